// SPDX-License-Identifier: Apache-2.0
//! Making a new raw image.

use crate::file::sys;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// How much of the image is taken from the file system at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Nothing: blocks are allocated as they are written.
    Sparse,
    /// Everything (`fallocate`): writing cannot fail for want of space.
    Full,
}

/// Why an image cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A file of that name is there.
    #[error("{}: exists already and is not overwritten; remove it or choose another name", .path.display())]
    Exists {
        /// The image.
        path: PathBuf,
    },
    /// No room for it.
    #[error("{}: not enough space for {size_bytes} bytes; free some, or make the image sparse", .path.display())]
    NoSpace {
        /// The image.
        path: PathBuf,
        /// What was asked for.
        size_bytes: u64,
    },
    /// The file system has no `fallocate`.
    #[error("{}: its file system cannot preallocate; make the image sparse", .path.display())]
    NoPreallocation {
        /// The image.
        path: PathBuf,
    },
    /// Larger than the file system's largest file.
    #[error("{}: {size_bytes} bytes are more than its file system allows; choose a smaller size", .path.display())]
    TooLarge {
        /// The image.
        path: PathBuf,
        /// What was asked for.
        size_bytes: u64,
    },
    /// Anything else.
    #[error("{}: cannot be made: {source}", .path.display())]
    Failed {
        /// The image.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// Makes a raw image of zeroes that reads as `size_bytes` bytes. What was made of it is removed
/// if it fails.
///
/// # Errors
/// Each [`CreateError`] names the cause and what to do about it.
pub fn create(path: &Path, size_bytes: u64, allocation: Allocation) -> Result<(), CreateError> {
    let error = |why| error_of(path, size_bytes, why);
    let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(error)?;
    let made = make(&file, size_bytes, allocation);
    if made.is_err() {
        // The first failure is the one to tell.
        let _ = fs::remove_file(path);
    }
    made.map_err(error)
}

fn make(file: &File, size_bytes: u64, allocation: Allocation) -> io::Result<()> {
    if allocation == Allocation::Full {
        sys::fallocate(file, 0, 0, size_bytes)?;
    }
    file.set_len(size_bytes)?;
    file.sync_all()
}

fn error_of(path: &Path, size_bytes: u64, source: io::Error) -> CreateError {
    let path = path.to_owned();
    match source.raw_os_error() {
        Some(libc::EEXIST) => CreateError::Exists { path },
        Some(libc::ENOSPC | libc::EDQUOT) => CreateError::NoSpace { path, size_bytes },
        Some(libc::EOPNOTSUPP) => CreateError::NoPreallocation { path },
        Some(libc::EFBIG) => CreateError::TooLarge { path, size_bytes },
        _ => CreateError::Failed { path, source },
    }
}

/// Why a text is not a disk size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizeError {
    /// Not a number with a unit.
    #[error("`{0}` is not a size; give bytes, or a whole number with K, M, G or T, such as 10G")]
    Malformed(String),
    /// Zero or part of a sector.
    #[error("size `{0}` is not a multiple of 512 bytes above 0; give such as 512K or 10G")]
    NotSectors(String),
    /// More than any file has.
    #[error("size `{0}` is too large; the limit is 8388607T")]
    TooLarge(String),
}

/// Reads a size such as `10G`: bytes, or K, M, G, T as powers of 1024; whole sectors above 0.
///
/// # Errors
/// Each [`SizeError`] says what to write instead.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(SizeError::Malformed(text.into())),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(SizeError::Malformed(text.into()));
    }
    let too_large = || SizeError::TooLarge(text.into());
    let number: u64 = digits.parse().map_err(|_| too_large())?;
    let bytes = number.checked_mul(1 << shift).ok_or_else(too_large)?;
    if i64::try_from(bytes).is_err() {
        return Err(too_large());
    }
    match bytes % 512 == 0 && bytes > 0 {
        true => Ok(bytes),
        false => Err(SizeError::NotSectors(text.into())),
    }
}
