// SPDX-License-Identifier: Apache-2.0
//! The mark of a file that is the backing file of an overlay. A write to it would change what the
//! overlay does not have itself, so that no disk opens it for writing.
//!
//! The mark is the extended attribute `user.vhost-blk.overlay` with the path of the overlay. It stays
//! with the file when the file is renamed, and is lost by a copy, which is another file.

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

const NAME: &str = "user.vhost-blk.overlay";
/// Longest path.
const PATH_MAX: usize = 4096;

/// The file is the backing file of an overlay.
#[derive(Debug, thiserror::Error)]
#[error(
    "{file}: it is the backing file of {overlay}, and a write would corrupt that image; serve \
     {overlay} with `--format qcow2 --allow-backing {rule}` (`vhost-blk info` tells all options), or, \
     if {overlay} is given up, remove the mark with `setfattr -x {NAME} {file}`",
    file = .path.display(), overlay = .overlay.display(), rule = rule(.path, .overlay)
)]
pub struct Marked {
    /// The file.
    pub path: PathBuf,
    /// The overlay.
    pub overlay: PathBuf,
}

/// The value of `--allow-backing` for one backing file.
fn rule(path: &Path, overlay: &Path) -> &'static str {
    let folder = |path: &Path| path.canonicalize().ok()?.parent().map(Path::to_owned);
    match (folder(path), folder(overlay)) {
        (Some(of_file), Some(of_overlay)) if of_file == of_overlay => "same-dir",
        _ => "any",
    }
}

/// The overlay of `file`; `None`: it is not marked.
///
/// # Errors
/// The error of the system call; [`io::ErrorKind::Unsupported`] if the file cannot have a mark.
pub fn overlay_of(file: &File) -> io::Result<Option<PathBuf>> {
    let mut path = vec![0; PATH_MAX];
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    match fgetxattr(file, NAME, &mut path[..]) {
        Ok(len) => {
            path.truncate(len);
            Ok(Some(PathBuf::from(OsString::from_vec(path))))
        }
        Err(Errno::NODATA) => Ok(None),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Err(io::ErrorKind::Unsupported.into()),
        Err(error) => Err(error.into()),
    }
}

/// The reason to refuse `file`, which has the name `path`, for writing.
///
/// # Errors
/// The error of the system call.
pub fn refusal(file: &File, path: &Path) -> io::Result<Option<Marked>> {
    match overlay_of(file) {
        Ok(overlay) => Ok(overlay.map(|overlay| Marked { path: path.into(), overlay })),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(None),
        Err(error) => Err(error),
    }
}

/// Marks `file` durably.
pub(crate) fn set(file: &File, overlay: &Path) -> io::Result<()> {
    fsetxattr(file, NAME, overlay.as_os_str().as_bytes(), XattrFlags::empty())?;
    file.sync_all()
}

/// Removes the mark durably.
pub(crate) fn remove(file: &File) -> io::Result<()> {
    fremovexattr(file, NAME)?;
    file.sync_all()
}
