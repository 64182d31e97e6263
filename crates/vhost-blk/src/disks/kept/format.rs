// SPDX-License-Identifier: Apache-2.0
//! The bitmaps of a disk as bytes, for another program.
//!
//! | Part | Content |
//! |---|---|
//! | [`MAGIC`] | a line |
//! | head | a line of JSON: the files of the image, and each bitmap with its last backup |
//! | notes | of each bitmap the words of [`Written::words`], 8 bytes each, the lowest byte first |
//! | checksum | CRC-32 of all before, 4 bytes, the lowest byte first |

use super::identity::FileIdentity;
use crate::disks::bitmaps::{BITMAPS_MAX, Base};
use backend::wrap::Written;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The first line. Another format has another number.
const MAGIC: &str = "vhost-blk bitmaps 1\n";
/// Maximum bytes: the bitmaps of a disk have 16 MiB each at most, and the head fits into the rest.
pub(super) const BYTES_MAX: usize = (BITMAPS_MAX + 1) * (16 << 20);

/// The text for a reader of the file.
const ABOUT: &str = "Changes of a disk since its backups, for vhost-blk ctl backup --incremental. The next start of \
     the disk takes and removes this file. Without it the next backup has to be a full one.";

/// The bitmaps of a disk.
#[derive(Default)]
pub(in crate::disks) struct Notes {
    /// The files of the image; empty in an upgrade, which passes the open files.
    pub(super) files: Vec<FileIdentity>,
    /// The reason for which other bitmaps are lost.
    pub(super) lost: Option<String>,
    pub(super) bitmaps: Vec<(String, Base, Arc<Written>)>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    about: String,
    files: Vec<FileIdentity>,
    lost: Option<String>,
    bitmaps: Vec<Row>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    base: Base,
    capacity_bytes: u64,
    part_bytes: u64,
    words: usize,
}

impl Notes {
    /// # Errors
    /// The cause, for example a path that is not UTF-8.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let row = |(name, base, written): &(String, Base, Arc<Written>)| Row {
            name: name.clone(),
            base: base.clone(),
            capacity_bytes: written.capacity_bytes(),
            part_bytes: written.part_bytes(),
            words: written.words().len(),
        };
        let head = Head {
            about: ABOUT.to_owned(),
            files: self.files.clone(),
            lost: self.lost.clone(),
            bitmaps: self.bitmaps.iter().map(row).collect(),
        };
        let mut bytes = MAGIC.as_bytes().to_vec();
        bytes.extend(serde_json::to_vec(&head).map_err(|why| why.to_string())?);
        bytes.push(b'\n');
        for (_, _, written) in &self.bitmaps {
            written.words().for_each(|word| bytes.extend(word.to_le_bytes()));
        }
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        Ok(bytes)
    }

    /// # Errors
    /// The cause.
    pub(super) fn of_bytes(bytes: &[u8]) -> Result<Notes, String> {
        let damaged = || "it is damaged".to_owned();
        if !bytes.starts_with(MAGIC.as_bytes()) {
            return Err("it has another format than this program knows".to_owned());
        }
        let (body, sum) = bytes.split_last_chunk().ok_or_else(damaged)?;
        if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
            return Err(damaged());
        }
        let mut parts = body.splitn(3, |byte| *byte == b'\n').skip(1);
        let (Some(head), Some(words)) = (parts.next(), parts.next()) else { return Err(damaged()) };
        let head: Head = serde_json::from_slice(head).map_err(|why| why.to_string())?;
        let mut words = words
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("it has 8 bytes")));
        if head.bitmaps.len() > BITMAPS_MAX {
            return Err(damaged());
        }
        let mut bitmaps = Vec::new();
        for Row { name, base, capacity_bytes, part_bytes, words: count } in head.bitmaps {
            let words: Vec<u64> = words.by_ref().take(count).collect();
            let written = Written::of_words(capacity_bytes, part_bytes, &words);
            bitmaps.push((name, base, Arc::new(written.ok_or_else(damaged)?)));
        }
        Ok(Notes { files: head.files, lost: head.lost, bitmaps })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file without bitmaps, with this end of its head and a right checksum.
    fn file(about: &str, end: &[u8]) -> Vec<u8> {
        let head = format!(r#"{{"about":"{about}","files":[],"lost":null,"bitmaps":[]}}"#);
        let mut bytes = [MAGIC.as_bytes(), head.as_bytes(), end].concat();
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    #[test]
    fn a_checksum_that_looks_like_the_end_of_the_head_is_none() {
        assert!(Notes::of_bytes(&file("", b"\n")).is_ok());
        let newline_at = |at: usize, end: &[u8]| {
            let of = |n: u32| file(&n.to_string(), end);
            let has = |bytes: &Vec<u8>| bytes[bytes.len() - 4 + at] == b'\n';
            (0..).map(of).find(has).expect("one of some hundred")
        };
        for at in 0..4 {
            for end in [&b""[..], b" ", b"\r"] {
                assert!(Notes::of_bytes(&newline_at(at, end)).is_err(), "{at}");
            }
            assert!(Notes::of_bytes(&newline_at(at, b"\n")).is_ok(), "{at}");
        }
    }

    #[test]
    fn a_file_that_is_cut_anywhere_is_refused() {
        let notes = Notes { lost: Some("x".to_owned()), ..Notes::default() };
        let bytes = notes.to_bytes().expect("text");
        for len in 0..bytes.len() {
            assert!(Notes::of_bytes(&bytes[..len]).is_err(), "{len}");
        }
    }
}
