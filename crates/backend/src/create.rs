// SPDX-License-Identifier: Apache-2.0
//! Creates images.

use crate::file::{identity_of, sys};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, open};
use rustix::io::Errno;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Mode of a new image, before the umask.
const MODE: u32 = 0o666;

/// Allocation of a new image's space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// The file system allocates blocks when they are written.
    Sparse,
    /// `fallocate` allocates all blocks at once: a later write cannot fail for lack of space.
    Full,
}

/// Errors of [`create`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A file of that name exists.
    #[error("{}: exists already and is not overwritten; choose another name", .path.display())]
    Exists {
        /// The image.
        path: PathBuf,
    },
    /// The file system has too little space.
    #[error("{}: not enough space for {size_bytes} bytes; free some, or make the image sparse", .path.display())]
    NoSpace {
        /// The image.
        path: PathBuf,
        /// Requested size in bytes.
        size_bytes: u64,
    },
    /// The file system has no `fallocate`.
    #[error("{}: its file system cannot preallocate; make the image sparse", .path.display())]
    NoPreallocation {
        /// The image.
        path: PathBuf,
    },
    /// The size exceeds the maximum file size of the file system.
    #[error("{}: {size_bytes} bytes are more than its file system allows, or than the limit on the size of files \
             (ulimit -f, LimitFSIZE=); choose a smaller size, or raise that limit", .path.display())]
    TooLarge {
        /// The image.
        path: PathBuf,
        /// Requested size in bytes.
        size_bytes: u64,
    },
    /// Any other error.
    #[error("{}: cannot be created: {source}", .path.display())]
    Failed {
        /// The image.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

/// Creates a raw image of `size_bytes` zero bytes, durably. Removes an incomplete image if this fails.
///
/// # Errors
/// [`CreateError`]; its text names the cause and the remedy.
pub fn create(path: &Path, size_bytes: u64, allocation: Allocation) -> Result<(), CreateError> {
    create_with(path, size_bytes, |file| allocate(file, size_bytes, allocation)).map(drop)
}

/// Gives an empty file its size.
///
/// # Errors
/// The error of the system call.
pub fn allocate(file: &File, size_bytes: u64, allocation: Allocation) -> io::Result<()> {
    if allocation == Allocation::Full {
        sys::fallocate(file, 0, 0, size_bytes)?;
    }
    file.set_len(size_bytes)
}

/// Creates a file whose content `fill` writes, for a disk of `size_bytes`, durably with its name. The name appears with
/// the whole content: a program that is killed before leaves nothing there.
///
/// # Errors
/// [`CreateError`]; its text names the cause and the remedy.
pub fn create_with(
    path: &Path,
    size_bytes: u64,
    fill: impl FnOnce(&File) -> io::Result<()>,
) -> Result<File, CreateError> {
    let error = |why| error_of(path, size_bytes, why);
    // Not after the work.
    if path.symlink_metadata().is_ok() {
        return Err(error(Errno::EXIST.into()));
    }
    let made = match make_unnamed(directory_of(path)) {
        Ok(file) => fill(&file)
            .and_then(|()| file.sync_all())
            .and_then(|()| link_unnamed(&file, path))
            .map(|()| file),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => make_named(path, fill),
        Err(errno) => Err(errno.into()),
    };
    let made = made.map_err(error)?;
    match sync_directory(path) {
        Ok(()) => Ok(made),
        Err(why) => {
            remove_own(path, &made);
            Err(error(why))
        }
    }
}

/// Removes the name of a new file, unless another file has got it meanwhile. The caller has another error to report, so
/// that of the removal is lost.
pub fn remove_own(path: &Path, file: &File) {
    let identities = path.symlink_metadata().and_then(|found| Ok((found, file.metadata()?)));
    if identities.is_ok_and(|(found, own)| identity_of(&found) == identity_of(&own)) {
        let _ = fs::remove_file(path);
    }
}

/// Creates a file without a name, which goes with its descriptor.
fn make_unnamed(directory: &Path) -> Result<File, Errno> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = open(directory, flags, Mode::from_raw_mode(MODE)).map(File::from)?;
    // A name is given by this path, which a chroot may lack.
    match path_of_descriptor(&file).exists() {
        true => Ok(file),
        false => Err(Errno::OPNOTSUPP),
    }
}

fn path_of_descriptor(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Gives a file without a name this one, which is free.
fn link_unnamed(file: &File, path: &Path) -> io::Result<()> {
    Ok(linkat(CWD, path_of_descriptor(file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

/// As [`create_with`], on a file system that has no files without a name: under a name of its own until the end.
fn make_named(path: &Path, fill: impl FnOnce(&File) -> io::Result<()>) -> io::Result<File> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".new.").suffix(".part").permissions(Permissions::from_mode(MODE));
    let made = builder.tempfile_in(directory_of(path))?;
    fill(made.as_file())?;
    made.as_file().sync_all()?;
    made.persist_noclobber(path).map_err(|failed| failed.error)
}

/// The directory of a file.
pub fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    }
}

/// Makes the name of a file durable.
///
/// # Errors
/// The error of the system call. The directory has to be readable.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(directory_of(path))?.sync_all()
}

/// The error of a new image at `path` for a disk of `size_bytes`.
pub fn error_of(path: &Path, size_bytes: u64, source: io::Error) -> CreateError {
    let path = path.to_owned();
    match source.raw_os_error() {
        Some(libc::EEXIST) => CreateError::Exists { path },
        Some(libc::ENOSPC | libc::EDQUOT) => CreateError::NoSpace { path, size_bytes },
        Some(libc::EOPNOTSUPP) => CreateError::NoPreallocation { path },
        Some(libc::EFBIG) => CreateError::TooLarge { path, size_bytes },
        _ => CreateError::Failed { path, source },
    }
}

/// Errors of [`parse_size`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizeError {
    /// Not a number with a unit.
    #[error("`{0}` is not a size; give bytes, or a number with K, M, G or T, such as 10G or 1.5G")]
    Malformed(String),
    /// 0, or not a multiple of 512 bytes.
    #[error("size `{0}` is not a multiple of 512 bytes above 0; give one such as 512K or 10G")]
    NotSectors(String),
    /// More than the maximum size of a file.
    #[error("size `{0}` is too large; the limit is 8388607T")]
    TooLarge(String),
}

/// Digits of a fraction at most.
const FRACTION_MAX: usize = 9;

/// Parses a size such as `10G` and returns it in bytes. The units K, M, G and T, also written KiB, MiB, GiB and TiB,
/// are powers of 1024, and their number may have a fraction.
/// The size is a multiple of 512 bytes above 0.
///
/// # Errors
/// [`SizeError`]; its text names a valid form.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let bytes = parse_bytes(text)?;
    match bytes % 512 == 0 && bytes > 0 {
        true => Ok(bytes),
        false => Err(SizeError::NotSectors(text.into())),
    }
}

/// Parses a number of bytes such as `10G`, as [`parse_size`] does, but of any value. A fraction of a byte is left out.
///
/// # Errors
/// [`SizeError`]; its text names a valid form.
pub fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed(text.into());
    let too_large = || SizeError::TooLarge(text.into());
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let (number, unit) = text.split_at(text.find(|c| !is_number(c)).unwrap_or(text.len()));
    let unit = unit.to_ascii_uppercase();
    let shift = match unit.as_str() {
        "" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return Err(malformed()),
    };
    let (whole, part) = match number.split_once('.') {
        None => (number, "0"),
        Some((whole, part)) if shift > 0 && part.len() <= FRACTION_MAX => (whole, part),
        Some(_) => return Err(malformed()),
    };
    let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_digits(whole) || !is_digits(part) {
        return Err(malformed());
    }
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let scale = 10_u128.pow(part.len() as u32);
    let part: u128 = part.parse().map_err(|_| too_large())?;
    let bytes = (u128::from(whole) << shift) + (part << shift) / scale;
    i64::try_from(bytes).map(i64::unsigned_abs).map_err(|_| too_large())
}
