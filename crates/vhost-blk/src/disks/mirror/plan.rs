// SPDX-License-Identifier: Apache-2.0
//! The checks of a mirror before anything is changed. Errors are texts with cause and remedy.

use super::Wanted;
use super::stack::stack;
use crate::disks::exchange::{Source, check_disk, path_of_new};
use crate::options::DiskArgs;
use crate::values::{AllowBacking, Format};
use backend::file::{device_of, identity_of};
use qcow2::create::CLUSTER_BYTES;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Zeroes of this length and alignment are a hole of a raw image.
const RAW_HOLE: u64 = 4096;

/// A mirror that can be begun.
pub(super) struct Plan {
    path: PathBuf,
    is_device: bool,
    format: Format,
    capacity_bytes: u64,
    block_bytes: u32,
    /// The file of the disk, whose owner and mode a new one gets.
    old: Metadata,
}

impl Plan {
    pub(super) fn of(source: &Source, wanted: &Wanted) -> Result<Plan, String> {
        let info = source.image.disk.info();
        check_disk(&source.args, info.read_only, REFUSALS)?;
        source.storage_path()()?;
        let shown = wanted.target.display();
        let failed = |error: io::Error| format!("{shown}: {error}; check the path");
        let found = match fs::metadata(&wanted.target) {
            Ok(found) => Some(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        let own = source.args.format.unwrap_or(Format::Raw);
        let is_device = found.as_ref().is_some_and(|found| found.file_type().is_block_device());
        let (path, format) = match found {
            Some(found) if is_device => (device(source, wanted, &found)?, Format::Raw),
            Some(_) => return Err(format!("{shown}: exists already; choose another name")),
            None => (path_of_new(&wanted.target)?, wanted.format.unwrap_or(own)),
        };
        let (capacity_bytes, block_bytes) = (info.capacity_sectors * 512, info.logical_block_bytes);
        let failed = |error| format!("the image: {error}; check the storage of the disk");
        let old = source.image.top.metadata().map_err(failed)?;
        Ok(Plan { path, is_device, format, capacity_bytes, block_bytes, old })
    }

    /// Path of the new storage.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file of the disk at the begin.
    pub(super) fn old(&self) -> &Metadata {
        &self.old
    }

    pub(super) fn is_device(&self) -> bool {
        self.is_device
    }

    pub(super) fn is_qcow2(&self) -> bool {
        self.format == Format::Qcow2
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Zeroes of this length and alignment take no space.
    pub(super) fn unit(&self) -> u64 {
        if self.is_qcow2() { CLUSTER_BYTES } else { RAW_HOLE }
    }

    /// The options of the disk in the new storage, which is at this path by now.
    pub(super) fn next(&self, args: &DiskArgs, path: &Path) -> DiskArgs {
        DiskArgs {
            blk_file: Some(path.to_owned()),
            format: Some(self.format),
            allow_backing: AllowBacking::Off,
            // An image has blocks of 512 bytes unless told otherwise.
            logical_block_size: match self.block_bytes {
                512 => args.logical_block_size,
                other => Some(other),
            },
            ..args.clone()
        }
    }

    /// Checks that a new file can have its name.
    pub(super) fn check_name(&self) -> Result<(), String> {
        let is_free = self.is_device || fs::symlink_metadata(&self.path).is_err();
        let shown = self.path.display();
        if is_free { Ok(()) } else { Err(format!("{shown}: exists by now; move it away")) }
    }
}

/// The refusals of a disk that is read-only, and of one on the kernel alone.
pub(in crate::disks) const REFUSALS: [&str; 2] = [
    "the disk is read-only, so that its image does not change; copy it (vhost-blk convert), and start \
     the disk with the copy",
    "the disk has --data-plane kernel, and the kernel notes no changes; start it with --data-plane \
     auto or uring",
];

/// Checks a block device as a target. Returns its path as it was given: a link keeps its meaning.
fn device(source: &Source, wanted: &Wanted, found: &Metadata) -> Result<PathBuf, String> {
    let shown = wanted.target.display();
    if !wanted.target.is_absolute() || wanted.target.to_str().is_none() {
        return Err(format!("{shown}: give an absolute path, in UTF-8"));
    }
    if wanted.format == Some(Format::Qcow2) {
        return Err(format!(
            "{shown} is a block device, which gets the content of the disk itself; drop \
             --format, or give the path of a new file"
        ));
    }
    if is_of_disk(source, found)? {
        return Err(format!(
            "{shown} is the storage of the disk already, or lies below or above it; give another one"
        ));
    }
    if !wanted.overwrite {
        return Err(format!(
            "{shown} is a block device, whose content is lost; give --overwrite if it may be"
        ));
    }
    Ok(wanted.target.clone())
}

/// Returns whether a block device is the storage of the disk or of one of its backing files, lies below it or above,
/// or is over the same file.
fn is_of_disk(source: &Source, found: &Metadata) -> Result<bool, String> {
    let target = identity_of(found);
    let above = stack(target);
    let files = source.image.qcow2.as_ref().map(|qcow2| qcow2.files());
    for file in files.unwrap_or(std::slice::from_ref(&source.image.top)) {
        let failed =
            |error: io::Error| format!("the image: {error}; check the storage of the disk");
        let own = file.opened_as().map_err(failed)?.identity;
        let below = stack(own);
        // Two loop devices may be over one file. Two partitions have the same disk, and no byte in common.
        let has_file = below.intersection(&above).any(|identity| device_of(*identity).is_none());
        if above.contains(&own) || below.contains(&target) || has_file {
            return Ok(true);
        }
    }
    Ok(false)
}
