// SPDX-License-Identifier: Apache-2.0
//! The properties of a disk in a qcow2 image.

use crate::header::Header;
use backend::{Disk, File, FileOptions, Info, RangeLimits};
use std::path::Path;
use std::sync::Arc;

/// The properties of the disk in the image at `path`, whose chain has these files.
pub(crate) fn describe(
    path: &Path,
    files: &[Arc<File>],
    options: &FileOptions,
    header: &Header,
) -> Info {
    let file = files[0].info();
    let block = options.logical_block_bytes.unwrap_or(512).max(512);
    let chain = match files.len() {
        1 => String::new(),
        2 => " with 1 backing file".to_owned(),
        n => format!(" with {} backing files", n - 1),
    };
    let align = |range: RangeLimits| RangeLimits {
        align_sectors: range.align_sectors.max(block / 512),
        ..range
    };
    Info {
        description: format!("qcow2 image {}{chain}", path.display()),
        capacity_sectors: header.size_bytes / u64::from(block) * u64::from(block / 512),
        logical_block_bytes: block,
        physical_block_bytes: file.physical_block_bytes.max(block),
        io_opt_bytes: u32::try_from(header.cluster_bytes).unwrap_or(0),
        read_only: options.read_only,
        volatile_cache: true,
        discard: file.discard.map(align),
        write_zeroes: file.write_zeroes.map(align),
        submission_blocks: files.iter().any(|file| file.info().submission_blocks),
        ..file
    }
}
