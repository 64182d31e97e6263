// SPDX-License-Identifier: Apache-2.0
//! The checks of a snapshot before anything is changed. Errors are texts with cause and remedy.

use super::Wanted;
use crate::disks::exchange::{Source, check_disk, path_of_new};
use crate::options::DiskArgs;
use crate::values::{AllowBacking, Format};
use qcow2::create::{NewImage, backing_bytes};
use qcow2::inspect;
use std::io;
use std::path::{Path, PathBuf};

/// A snapshot that can be taken.
pub(super) struct Plan {
    overlay: PathBuf,
    /// The image, without symbolic links.
    backing: PathBuf,
    is_qcow2: bool,
    capacity_bytes: u64,
    block_bytes: u32,
    marks: bool,
}

impl Plan {
    /// Checks the disk and its image. The place of the overlay comes later: [`Plan::locate`].
    pub(super) fn of(source: &Source, wanted: &Wanted) -> Result<Plan, String> {
        check_disk(&source.args, source.image.disk.info().read_only, REFUSALS)?;
        source.check_config(wanted.update_config)?;
        let backing = source.path()?;
        let overlay = wanted.overlay.clone();
        let is_qcow2 = source.args.format == Some(Format::Qcow2);
        backing_bytes(&backing, is_qcow2).map_err(|error| error.to_string())?;
        let marks = can_be_marked(source, wanted)?;
        let info = source.image.disk.info();
        let (capacity_bytes, block_bytes) = (info.capacity_sectors * 512, info.logical_block_bytes);
        Ok(Plan { overlay, backing, is_qcow2, capacity_bytes, block_bytes, marks })
    }

    /// Checks the place of the overlay, whose storage may hang.
    pub(super) fn locate(self) -> Result<Plan, String> {
        Ok(Plan { overlay: path_of_new(&self.overlay)?, ..self })
    }

    /// Path of the overlay.
    pub(super) fn overlay(&self) -> &Path {
        &self.overlay
    }

    /// Returns whether the image gets a mark.
    pub(super) fn marks(&self) -> bool {
        self.marks
    }

    /// The new image.
    pub(super) fn image(&self) -> Result<NewImage, String> {
        NewImage::over(&self.overlay, self.capacity_bytes, &self.backing, self.is_qcow2)
    }

    /// The backing files that the overlay needs, which exists.
    pub(super) fn needs(&self) -> Result<qcow2::AllowBacking, String> {
        let found =
            inspect::inspect_as(&self.overlay, Some(true)).map_err(|error| error.to_string())?;
        let needs = found.serve.map_err(|why| format!("{}; {}", why.what, why.remedy))?;
        Ok(needs.allow_backing)
    }

    /// The options of the disk in the overlay, which needs these backing files.
    pub(super) fn next(&self, args: &DiskArgs, needs: qcow2::AllowBacking) -> DiskArgs {
        let allow_backing = match (args.allow_backing, needs) {
            (AllowBacking::Any, _) | (_, qcow2::AllowBacking::Any) => AllowBacking::Any,
            _ => AllowBacking::SameDir,
        };
        DiskArgs {
            blk_file: Some(self.overlay.clone()),
            format: Some(Format::Qcow2),
            allow_backing,
            // An image has blocks of 512 bytes unless told otherwise.
            logical_block_size: match self.block_bytes {
                512 => args.logical_block_size,
                other => Some(other),
            },
            ..args.clone()
        }
    }
}

/// The refusals of a disk that is read-only, and of one on the kernel alone.
pub(in crate::disks) const REFUSALS: [&str; 2] = [
    "the disk is read-only, so that its image does not change; use the image as it is",
    "the disk has --data-plane kernel, and the kernel serves no overlay; start it with --data-plane \
     auto or uring",
];

/// Returns whether the image is to be marked.
fn can_be_marked(source: &Source, wanted: &Wanted) -> Result<bool, String> {
    match source.image.top.overlay() {
        Ok(None) => Ok(true),
        Ok(Some(overlay)) => Err(format!(
            "the image has the mark of the overlay {} already, so that two overlays would depend on \
             it; remove the mark if that one is given up ({})",
            overlay.display(),
            source.image.top.unmarking()
        )),
        Err(_) if wanted.no_mark => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Err(
            "the file system of the image has no extended attributes, so that nothing would keep a \
             later start from writing to the image and corrupting the overlay; give --no-mark and \
             see to that yourself, or move the image"
                .to_owned(),
        ),
        Err(error) => Err(format!(
            "the mark of the image cannot be read: {error}; check the storage, or give --no-mark"
        )),
    }
}
