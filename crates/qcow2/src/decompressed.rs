// SPDX-License-Identifier: Apache-2.0
//! The content of the compressed clusters that were read last: a guest reads parts of one after another.

use crate::image::{EXTENT_MAX, Image};
use imago::Mapping;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;

/// Maximum bytes of decompressed clusters of a disk.
const DECOMPRESSED_MAX: usize = 4 << 20;
/// Maximum decompressed clusters of a disk.
const CLUSTERS_MAX: usize = 64;
/// Bytes of a backing file that are decompressed at once: a cluster of the usual size.
const BELOW_BYTES: u64 = 64 << 10;

/// A few parts of the disk by their start, the oldest first. Each is a compressed cluster, or the part of one that
/// the image above it shows.
#[derive(Debug, Default)]
pub(crate) struct Decompressed(VecDeque<(u64, Vec<u8>)>);

impl Decompressed {
    /// The bytes from `at` on of the part with it, which is the newest one from now on.
    fn get(&mut self, at: u64) -> Option<&[u8]> {
        let has =
            |(start, part): &(u64, Vec<u8>)| (*start..start + part.len() as u64).contains(&at);
        let number = self.0.iter().rposition(has)?;
        let found = self.0.remove(number)?;
        self.0.push_back(found);
        self.0.back().map(|(start, part)| &part[(at - start) as usize..])
    }

    /// Keeps a part until others take its room.
    fn keep(&mut self, start: u64, part: Vec<u8>) {
        self.0.push_back((start, part));
        let bytes =
            |all: &VecDeque<(u64, Vec<u8>)>| all.iter().map(|(_, it)| it.len()).sum::<usize>();
        while self.0.len() > CLUSTERS_MAX || bytes(&self.0) > DECOMPRESSED_MAX {
            self.0.pop_front();
        }
    }

    /// Forgets the parts that overlap a range, which changes.
    pub(crate) fn forget(&mut self, range: &Range<u64>) {
        self.0.retain(|(at, part)| at + part.len() as u64 <= range.start || range.end <= *at);
    }
}

impl Image {
    /// At most `len` bytes at `at` of a compressed cluster, which is kept for a while; `None`: there is none.
    pub(crate) fn decompressed(&mut self, at: u64, len: u64) -> io::Result<Option<Vec<u8>>> {
        let first = |found: &[u8]| Some(found[..found.len().min(len as usize)].to_vec());
        if let Some(found) = self.decompressed.get(at) {
            return Ok(first(found));
        }
        let (Range { start, end }, mapping) = self.mapping(at, EXTENT_MAX)?;
        let Mapping::Special { layer, .. } = mapping else { return Ok(None) };
        let is_own = std::ptr::eq(layer, &self.access);
        let unit = if is_own { self.cluster_bytes() } else { BELOW_BYTES };
        // A mapping has all compressed clusters in a row.
        let start = start.max(at - at % unit);
        let end = end.min(at - at % unit + unit).min(self.size_bytes());
        let mut part = vec![0; (end - start) as usize];
        self.access.read(&mut part[..], start)?;
        let found = first(&part[(at - start) as usize..]);
        self.decompressed.keep(start, part);
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{Answer, Question};
    use crate::{AllowBacking, chain};
    use std::fs;
    use std::os::unix::fs::FileExt;
    use std::process::Command;
    use std::sync::Arc;

    /// The image is damaged after the first read, so that a second decompression would fail.
    #[test]
    fn parts_of_a_compressed_cluster_are_read_with_one_decompression() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a.qcow2");
        let content: Vec<u8> = (0..128 << 10).map(|at| (at / 512) as u8).collect();
        fs::write(directory.path().join("a.raw"), &content).expect("a raw image");
        let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "a.raw", "a.qcow2"];
        let made = Command::new("qemu-img").current_dir(directory.path()).args(convert).status();
        assert!(made.expect("qemu-img runs; scripts/setup.sh installs it").success());
        let links = chain::follow(&path, true, AllowBacking::Off).expect("a chain");
        let header = links[0].header.as_ref().expect("a header");
        let access = chain::open(&links, true, None).expect("it opens");
        let mut image = Image::new(access, header, Arc::default());
        let mut read = |at: usize| image.answer(Question::Read(at as u64, 4096));
        assert_eq!(read(4096), Answer::Data(content[4096..8192].to_vec()));
        let file = fs::File::options().write(true).open(&path).expect("it opens");
        let len = file.metadata().expect("a size").len();
        // The compressed data is in the last clusters.
        file.write_all_at(&[0xff; 64 << 10], len - (64 << 10)).expect("it is damaged");
        assert_eq!(read(61440), Answer::Data(content[61440..65536].to_vec()));
        assert!(matches!(read(65536), Answer::Failed(_)), "the other one cannot be read any more");
        assert_eq!(image.answer(Question::Zero(0, 65536)), Answer::Done(65536));
        assert!(matches!(image.answer(Question::Read(0, 4096)), Answer::Zero(4096, ..)));
    }

    #[test]
    fn the_clusters_that_were_read_last_are_kept_within_their_bounds() {
        for (bytes, kept) in [(4096, CLUSTERS_MAX as u64), (2 << 20, 2)] {
            let mut clusters = Decompressed::default();
            let at = |n: u64| n * bytes as u64;
            (0..kept).for_each(|n| clusters.keep(at(n), vec![1; bytes]));
            assert!(clusters.get(0).is_some(), "{bytes}");
            clusters.keep(at(kept), vec![1; bytes]);
            assert_eq!(clusters.0.len() as u64, kept, "{bytes}");
            assert!(clusters.get(0).is_some() && clusters.get(at(1)).is_none(), "{bytes}");
        }
    }

    #[test]
    fn a_change_forgets_its_clusters() {
        for (range, kept) in [
            (8..16, [true, false, true]),
            (7..9, [false, false, true]),
            (15..16, [true, false, true]),
        ] {
            let mut clusters = Decompressed::default();
            [0, 8, 16].into_iter().for_each(|at| clusters.keep(at, vec![at as u8; 8]));
            assert_eq!(clusters.get(13), Some(&[8; 3][..]));
            clusters.forget(&range);
            assert_eq!([7, 8, 16].map(|at| clusters.get(at).is_some()), kept, "{range:?}");
        }
    }
}
