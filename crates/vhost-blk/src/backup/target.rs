// SPDX-License-Identifier: Apache-2.0
//! The target of a backup: a new image, or the export of an NBD server. It is written, made durable, and
//! read again if the copy is verified.

use super::copier::CopyError;
use super::digest::Digest;
use crate::nbd::Client;
use backend::wrap::{CLUSTER_BYTES, CLUSTER_BYTES_MAX, Clusters};
use qcow2::copy::{self, Source as Own};
use std::fmt::Display;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

/// Bytes of an export that are read again at once.
const AGAIN_MAX: u64 = CLUSTER_BYTES_MAX;

/// A target that is written.
pub(super) enum Target {
    /// A new image.
    Image {
        /// Its content.
        image: copy::Target,
        /// Its file, to read it again.
        written: Written,
    },
    /// An export, which may have other content: each zero is written, too.
    Export(Client),
}

/// The file of a new image.
pub(super) struct Written {
    /// The file.
    pub(super) file: File,
    /// Its path.
    pub(super) path: PathBuf,
    /// It is no raw image.
    pub(super) is_qcow2: bool,
    /// It is an image over the backup before.
    pub(super) is_incremental: bool,
}

/// A target whose content is complete and durable.
pub(super) enum Durable {
    /// A new image.
    Image(Written),
    /// An export.
    Export(Client),
}

impl Target {
    /// Writes data at a position; no position is written twice.
    pub(super) fn write(&mut self, at: u64, data: &[u8]) -> Result<(), CopyError> {
        let client = match self {
            Target::Image { image, .. } => {
                return image.write(at, data).map_err(CopyError::Write);
            }
            Target::Export(client) => client,
        };
        let mut done = 0;
        for run in copy::runs(at, data, CLUSTER_BYTES) {
            client.zero(at + done as u64..at + run.start as u64)?;
            client.write(at + run.start as u64, &data[run.clone()])?;
            done = run.end;
        }
        Ok(client.zero(at + done as u64..at + data.len() as u64)?)
    }

    /// Makes a range read as zeroes.
    pub(super) fn zero(&mut self, range: Range<u64>) -> Result<(), CopyError> {
        match self {
            Target::Image { image, .. } => image.zero(range).map_err(CopyError::Write),
            Target::Export(client) => Ok(client.zero(range)?),
        }
    }

    /// Makes the copy durable.
    pub(super) fn finish(self) -> Result<Durable, CopyError> {
        Ok(match self {
            Target::Image { image, written } => {
                image.finish().map_err(CopyError::Write)?;
                Durable::Image(written)
            }
            Target::Export(mut client) => {
                client.flush()?;
                Durable::Export(client)
            }
        })
    }
}

impl Durable {
    /// The digest of the copy as it is read again: all of an image, the held ones of `copied` of an export. An
    /// incremental image must have exactly the held ones.
    pub(super) fn read_again(
        &mut self,
        copied: &Clusters,
        goes_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Digest, CopyError> {
        match self {
            Durable::Image(Written { file, path, is_qcow2, is_incremental }) => {
                let mut own = Own::own(file, path, *is_qcow2).map_err(unreadable)?;
                if *is_incremental && !has_exactly(&own, copied, goes_on)? {
                    return Err(CopyError::Differs);
                }
                read_file(&mut own, goes_on)
            }
            Durable::Export(client) => read_export(client, copied, goes_on),
        }
    }

    /// Ends the use of the target in order.
    pub(super) fn end(self) {
        match self {
            Durable::Image(_) => {}
            Durable::Export(client) => client.disconnect(),
        }
    }
}

fn unreadable(why: impl Display) -> CopyError {
    CopyError::ReadCopy(why.to_string())
}

/// Returns whether an image has the held clusters of `copied`, and no others. Below a cluster of zeroes that it lacks,
/// the backup before would show old data.
fn has_exactly(
    own: &Own,
    copied: &Clusters,
    goes_on: &mut dyn FnMut(u64) -> bool,
) -> Result<bool, CopyError> {
    let has = |bytes, has| own.has_itself(bytes, has).map_err(unreadable);
    let mut next = 0;
    while let Some(run) = copied.first_held(next..copied.len(), u64::MAX) {
        let others = copied.bytes_of(next..run.start);
        if !goes_on(others.start) {
            return Err(CopyError::Cancelled);
        }
        next = run.end;
        if !has(others, false)? || !has(copied.bytes_of(run), true)? {
            return Ok(false);
        }
    }
    has(copied.bytes_of(next..copied.len()), false)
}

fn read_file(own: &mut Own, goes_on: &mut dyn FnMut(u64) -> bool) -> Result<Digest, CopyError> {
    let mut found = Digest::default();
    let read = own.each(goes_on, &mut |at, data| {
        found.add(at, data);
        Ok(())
    });
    match read {
        Ok(()) => Ok(found),
        Err(copy::CopyError::Stopped) => Err(CopyError::Cancelled),
        Err(copy::CopyError::Read(_, why) | copy::CopyError::Write(why)) => Err(unreadable(why)),
    }
}

fn read_export(
    client: &mut Client,
    clusters: &Clusters,
    goes_on: &mut dyn FnMut(u64) -> bool,
) -> Result<Digest, CopyError> {
    let (mut found, mut next) = (Digest::default(), 0);
    let mut buffer = vec![0; AGAIN_MAX as usize];
    let run_max = AGAIN_MAX / clusters.cluster_bytes();
    while let Some(run) = clusters.first_held(next..clusters.len(), run_max) {
        next = run.end;
        let bytes = clusters.bytes_of(run);
        if !goes_on(bytes.start) {
            return Err(CopyError::Cancelled);
        }
        let part = &mut buffer[..(bytes.end - bytes.start) as usize];
        client.read(bytes.start, part)?;
        found.add(bytes.start, part);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn an_incremental_image_that_lacks_zeroes_or_has_other_clusters_is_not_the_copy() {
        let directory = tempfile::tempdir().unwrap();
        let run = |words: &str| {
            let mut words = words.split(' ');
            let mut command = Command::new(words.next().unwrap());
            assert!(command.current_dir(&directory).args(words).status().unwrap().success());
        };
        run("qemu-img create -qf raw full 1M");
        run("qemu-img create -qf qcow2 -b full -F raw next 1M");
        // Zeroes and data in clusters of 64 KiB.
        for write in ["-z 0 64k", "-P 1 128k 64k"] {
            let write = format!("write {write}");
            let io = ["-f", "qcow2", "-c", &write, "next"];
            let done = Command::new("qemu-io").current_dir(&directory).args(io).output().unwrap();
            assert!(done.status.success(), "{done:?}");
        }
        let path = directory.path().join("next");
        let own = Own::own(&File::open(&path).unwrap(), &path, true).unwrap();
        for (held, is_the_copy) in [
            (&[0, 2][..], true),
            (&[0], false),
            (&[2], false),
            (&[0, 1, 2], false),
            (&[0, 2, 15], false),
        ] {
            let copied = Clusters::new(1 << 20).unwrap();
            (0..copied.len())
                .filter(|it| !held.contains(it))
                .for_each(|it| copied.free(it..it + 1));
            assert_eq!(has_exactly(&own, &copied, &mut |_| true).unwrap(), is_the_copy, "{held:?}");
        }
    }
}
