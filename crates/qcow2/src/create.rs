// SPDX-License-Identifier: Apache-2.0
//! Creates qcow2 images that [`crate::Qcow2Disk`] accepts.

use crate::header::size_max;
use crate::{AllowBacking, Qcow2Error, chain};
use imago::format::PreallocateMode;
use imago::qcow2::Qcow2;
use imago::{FormatCreateBuilder, file};
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Size of a cluster unless told otherwise.
pub const CLUSTER_BYTES: u64 = 64 << 10;
/// Longest name of a backing file in bytes.
const NAME_MAX: usize = 1023;

/// Allocation of a new image's space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preallocation {
    /// Writes allocate clusters.
    Off,
    /// All clusters have their place in the file, which is sparse.
    Metadata,
    /// All clusters have their place, and the file system has allocated it.
    Full,
}

/// A new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    /// Size of a cluster in bytes.
    pub cluster_bytes: u64,
    /// Name of the backing file, relative to the directory of the image, and if it is qcow2 (or raw).
    pub backing: Option<(String, bool)>,
    /// Allocation of its space. `Off` with a backing file.
    pub preallocation: Preallocation,
}

impl NewImage {
    /// A disk of `size_bytes` in the file `path` whose backing file is `backing`. Both paths are
    /// absolute, without symbolic links; a backing file in the same directory is named without it.
    ///
    /// # Errors
    /// Cause and remedy.
    pub fn over(
        path: &Path,
        size_bytes: u64,
        backing: &Path,
        is_qcow2: bool,
    ) -> Result<NewImage, String> {
        let name = match backing.file_name().filter(|_| backing.parent() == path.parent()) {
            Some(name) => Path::new(name),
            None => backing,
        };
        let name = name.to_str().ok_or("the path of the backing file is not UTF-8; rename it")?;
        Ok(NewImage {
            size_bytes,
            cluster_bytes: CLUSTER_BYTES,
            backing: Some((name.to_owned(), is_qcow2)),
            preallocation: Preallocation::Off,
        })
    }

    /// Checks the sizes and the combination.
    ///
    /// # Errors
    /// Cause and remedy.
    pub fn check(&self) -> Result<(), String> {
        let cluster = self.cluster_bytes;
        if !cluster.is_power_of_two() || !(4 << 10..=2 << 20).contains(&cluster) {
            return Err(format!(
                "clusters of {cluster} bytes are not possible; give a power of 2 from 4K to 2M"
            ));
        }
        let size_max = size_max(cluster);
        if !(512..=size_max).contains(&self.size_bytes) || !self.size_bytes.is_multiple_of(512) {
            return Err(format!(
                "a disk of {} bytes is not possible with clusters of {cluster} bytes; give a \
                 multiple of 512 up to {size_max}",
                self.size_bytes
            ));
        }
        match &self.backing {
            Some(_) if self.preallocation != Preallocation::Off => {
                Err("space is not preallocated over a backing file; give --preallocation off"
                    .into())
            }
            Some((name, _)) if name.is_empty() || name.len() > NAME_MAX => Err(format!(
                "the name of the backing file has {} bytes; give one of 1 to {NAME_MAX}",
                name.len()
            )),
            _ => Ok(()),
        }
    }

    /// Writes the image into the empty file `file`. The caller syncs the file.
    ///
    /// # Errors
    /// The error of imago or of a system call.
    pub fn write(&self, file: &File) -> io::Result<()> {
        self.check().map_err(io::Error::other)?;
        let storage = file::File::try_from(file.try_clone()?)?;
        let mut builder = Qcow2::<file::File>::create_builder(storage)
            .size(self.size_bytes)
            .cluster_size(self.cluster_bytes as usize)
            .preallocate(match self.preallocation {
                Preallocation::Off => PreallocateMode::None,
                Preallocation::Metadata => PreallocateMode::FormatAllocate,
                Preallocation::Full => PreallocateMode::FullAllocate,
            });
        if let Some((name, is_qcow2)) = &self.backing {
            let format = if *is_qcow2 { "qcow2" } else { "raw" };
            builder = builder.backing(unambiguous(name), format.into());
        }
        builder.create()
    }
}

/// The name in a form that no program takes for a protocol, as `nbd:` would be.
fn unambiguous(name: &str) -> String {
    match name.split('/').next() {
        Some(first) if first.contains(':') => format!("./{name}"),
        _ => name.into(),
    }
}

/// Size in bytes of the disk in a backing file: all files of its chain exist and are usable.
///
/// # Errors
/// [`Qcow2Error`]: a disk with this backing file would be refused.
pub fn backing_bytes(path: &Path, is_qcow2: bool) -> Result<u64, Qcow2Error> {
    // Of a raw file that is missing, too.
    fs::metadata(path).map_err(|source| Qcow2Error::Unreadable { path: path.into(), source })?;
    let links = chain::follow(path, is_qcow2, AllowBacking::Any)?;
    if links.len() >= chain::FILES_MAX {
        let remedy = "shorten it with `qemu-img rebase` or `qemu-img commit`";
        return Err(chain::refuse(path, "its chain has 32 files already", remedy));
    }
    chain::open(&links, false, None)?;
    match links.first().and_then(|link| link.header.as_ref()) {
        Some(header) => Ok(header.size_bytes),
        None => {
            let failed = |source| Qcow2Error::Image { path: path.into(), source };
            Ok(fs::metadata(path).map_err(failed)?.len().next_multiple_of(512))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_colon_is_no_protocol() {
        assert_eq!(unambiguous("nbd:host"), "./nbd:host");
        assert_eq!(unambiguous("a/nbd:host"), "a/nbd:host");
        assert_eq!(unambiguous("/nbd:host"), "/nbd:host");
    }
}
