// SPDX-License-Identifier: Apache-2.0
//! Errors of opening a file or block device.

use crate::lock::LockError;
use crate::mark::Marked;
use std::io;
use std::path::{Path, PathBuf};

/// Errors of [`super::File::open`]; each text names the cause and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file does not exist.
    #[error("{}: no such file; make one with `vhost-blk create {} SIZE`", .path.display(), .path.display())]
    Missing {
        /// Path of the file.
        path: PathBuf,
    },
    /// The permissions do not allow writing.
    #[error("{}: cannot be opened for writing ({source}); use --read-only, or change its permissions", .path.display())]
    NotWritable {
        /// The file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The file cannot be opened.
    #[error("{}: cannot be opened: {source}; check the path, its permissions and the storage below it", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// A file that an earlier program has opened does not suit.
    #[error("{}: {what}; restart instead", .path.display())]
    Adopted {
        /// Path of the file.
        path: PathBuf,
        /// The difference.
        what: &'static str,
    },
    /// The file is not the one that the disk has used or copied.
    #[error("{}: another file or device is at this path by now; give the one of the disk its path back", .path.display())]
    Replaced {
        /// The path.
        path: PathBuf,
    },
    /// The file cannot be locked.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The file is the backing file of another image.
    #[error(transparent)]
    Marked(#[from] Marked),
    /// The path names a directory, a socket, a character device or another unsupported file type.
    #[error("{}: neither a regular file nor a block device; give an image or a disk", .path.display())]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// The size, block size or alignment cannot be determined.
    #[error("{}: cannot determine its size and block size: {source}; try --direct off", .path.display())]
    Probe {
        /// The file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The device refuses writes.
    #[error("{}: the device is read-only; use --read-only", .path.display())]
    ReadOnlyDevice {
        /// The device.
        path: PathBuf,
    },
    /// The file is smaller than one logical block.
    #[error("{}: smaller than one block of {block} bytes; make it larger, for example with `truncate -s 1G`", .path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// Logical block size in bytes.
        block: u32,
    },
    /// The requested logical block size is invalid.
    #[error("logical block size {wanted} is not a power of two from 512 to 65536; use 512 or 4096")]
    BlockSize {
        /// Requested size in bytes.
        wanted: u32,
    },
    /// The device has larger logical blocks than requested.
    #[error("{}: a logical block of {wanted} bytes is smaller than the device's {least}; use --logical-block-size {least}", .path.display())]
    BlockTooSmall {
        /// The file.
        path: PathBuf,
        /// Requested size in bytes.
        wanted: u32,
        /// Minimum size in bytes.
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
