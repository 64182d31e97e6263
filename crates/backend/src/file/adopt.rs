// SPDX-License-Identifier: Apache-2.0
//! Checks a file that an earlier program has opened.

use super::{FileError, FileOptions};
use rustix::fs::{OFlags, fcntl_getfl};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The path of an open file below `/proc`, to open it once more: also if another file has its name by now. It
/// holds as long as the descriptor is open.
pub fn place(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// The identity of an open file, and its access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenAs {
    /// Device and number of the file; of a block device its own number, which several nodes may
    /// have.
    pub identity: (u64, u64),
    /// Not open for writing.
    pub read_only: bool,
    /// Open with `O_DIRECT`.
    pub direct: bool,
}

impl OpenAs {
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let flags = fcntl_getfl(file)?;
        Ok(OpenAs {
            identity: identity_of(&file.metadata()?),
            read_only: flags & OFlags::ACCMODE == OFlags::RDONLY,
            direct: flags.contains(OFlags::DIRECT),
        })
    }
}

/// The identity of a file; of a block device its own number.
pub fn identity_of(meta: &Metadata) -> (u64, u64) {
    match meta.file_type().is_block_device() {
        true => identity_of_device(meta.rdev()),
        false => (meta.dev(), meta.ino()),
    }
}

/// The identity of the block device with this number.
pub const fn identity_of_device(number: u64) -> (u64, u64) {
    (u64::MAX, number)
}

/// The number of the block device with this identity; `None`: it is one of a file.
pub fn device_of(identity: (u64, u64)) -> Option<u64> {
    (identity.0 == u64::MAX).then_some(identity.1)
}

/// Refuses `file` if it is not the one at `path`.
pub(super) fn check_path(path: &Path, file: &File, options: &FileOptions) -> Result<(), FileError> {
    let failed = |source| FileError::open(path, source, options.read_only);
    let at_path = identity_of(&fs::metadata(path).map_err(failed)?);
    match OpenAs::of(file).map_err(failed)?.identity == at_path {
        true => Ok(()),
        false => {
            let what = "another file is at this path now";
            Err(FileError::Adopted { path: path.into(), what })
        }
    }
}

/// Returns whether `file` is open with O_DIRECT. Refuses it if it is open for another access.
pub(super) fn check(path: &Path, file: &File, options: &FileOptions) -> Result<bool, FileError> {
    let differs = |what| Err(FileError::Adopted { path: path.into(), what });
    let open = OpenAs::of(file).map_err(|error| FileError::open(path, error, options.read_only))?;
    if open.read_only != options.read_only {
        return differs("the open file has another access than --read-only says");
    }
    if open.direct && !options.direct {
        return differs("it is open for --direct on");
    }
    Ok(open.direct)
}
