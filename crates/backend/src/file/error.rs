// SPDX-License-Identifier: Apache-2.0
//! Why a file cannot be served.

use crate::lock::LockError;
use std::io;
use std::path::{Path, PathBuf};

/// Why a file cannot be served, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// There is no such file.
    #[error("{}: no such file; make one with `vhost-blk create {} SIZE`", .path.display(), .path.display())]
    Missing {
        /// Where it should be.
        path: PathBuf,
    },
    /// Opening for writing is not allowed.
    #[error("{}: cannot be opened for writing ({source}); use --read-only, or change its permissions", .path.display())]
    NotWritable {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Opening failed.
    #[error("{}: cannot be opened: {source}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// It cannot be locked.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A directory, socket, character device ...
    #[error("{}: neither a regular file nor a block device; give an image or a disk", .path.display())]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// Its size, block size or alignment cannot be found out.
    #[error("{}: cannot find out its size and block size: {source}; try --direct off", .path.display())]
    Probe {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The device refuses writes.
    #[error("{}: the device is read-only; use --read-only", .path.display())]
    ReadOnlyDevice {
        /// The device.
        path: PathBuf,
    },
    /// There is not one whole block in it.
    #[error("{}: smaller than one block of {block} bytes; make it larger, for example with `truncate -s 1G`", .path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// Logical block size in bytes.
        block: u32,
    },
    /// Not a block size.
    #[error("logical block size {wanted} is not a power of two from 512 to 65536; use 512 or 4096")]
    BlockSize {
        /// What was asked for.
        wanted: u32,
    },
    /// The storage has larger blocks than wanted.
    #[error("{}: a logical block of {wanted} bytes is smaller than the storage's {least}; use --logical-block-size {least}, or for an image file --direct off", .path.display())]
    BlockTooSmall {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        wanted: u32,
        /// Least possible size.
        least: u32,
    },
}

impl FileError {
    pub(super) fn open(path: &Path, source: io::Error, read_only: bool) -> FileError {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => FileError::Missing { path },
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem if !read_only => {
                FileError::NotWritable { path, source }
            }
            _ => FileError::Open { path, source },
        }
    }
}
