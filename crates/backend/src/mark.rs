// SPDX-License-Identifier: Apache-2.0
//! Marks of files that no disk opens for writing: the backing file of an overlay, because a write
//! would change what the overlay does not have itself, an overlay that was merged into its backing
//! file, and an image whose disk has moved to other storage: the other file has newer data.
//!
//! A mark is an extended attribute with the path of the other file. It stays with the file when the
//! file is renamed, and may be lost by a copy.
//!
//! The mark of an image in use refuses nothing: it tells that clusters may have been leaked.

use crate::file::{File as ImageFile, identity_of};
use crate::lock::LockError;
use crate::quoted;
use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr, getxattr};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The attribute of a backing file, with the path of the overlay.
const OVERLAY: &str = "user.vhost-blk.overlay";
/// The attribute of an overlay that was merged into its backing file, with the path of that.
const MERGED: &str = "user.vhost-blk.merged";
/// The attribute of an image whose disk has moved, with the path of its storage since.
const MOVED: &str = "user.vhost-blk.moved";
/// The attribute of an image that a disk writes, and of one that a disk wrote when it died.
const IN_USE: &str = "user.vhost-blk.in-use";
/// Values of the mark.
const SOUND: &str = "sound";
const LEAKS: &str = "leaks";
/// Longest path.
const PATH_MAX: usize = 4096;

/// A reason not to write to a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Marked {
    /// The file is the backing file of an overlay.
    #[error(
        "{file}: it is the backing file of {overlay}, and a write would corrupt that image; serve \
         {overlay} with `--format qcow2 --allow-backing {rule}` (`vhost-blk info` tells all \
         options), or, if {overlay} is given up, remove the mark with `{command}`",
        file = .path.display(), overlay = .overlay.display(), rule = rule(.path, .overlay),
        command = unmarking(OVERLAY, .path)
    )]
    Overlay {
        /// The file.
        path: PathBuf,
        /// The overlay.
        overlay: PathBuf,
    },
    /// The file was merged into its backing file, which has newer data.
    #[error(
        "{file}: it was merged into {backing}, which has the data of its disk since; serve \
         {backing} (`vhost-blk info` tells the options), and remove {file}",
        file = .path.display(), backing = .backing.display()
    )]
    Merged {
        /// The file.
        path: PathBuf,
        /// The backing file.
        backing: PathBuf,
    },
    /// The disk of the file has moved to other storage.
    #[error(
        "{file}: its disk was mirrored to {storage}, which has the data of the disk since; serve \
         {storage}, or, to go back to the content at that moment, remove the mark with \
         `{command}`",
        file = .path.display(), storage = .storage.display(), command = unmarking(MOVED, .path)
    )]
    Moved {
        /// The file.
        path: PathBuf,
        /// The storage since.
        storage: PathBuf,
    },
}

/// The command with which an operator removes a mark.
fn unmarking(name: &str, path: &Path) -> String {
    format!("setfattr -x {name} {}", quoted(path))
}

/// The value of `--allow-backing` for one backing file.
fn rule(path: &Path, overlay: &Path) -> &'static str {
    let directory = |path: &Path| path.canonicalize().ok()?.parent().map(Path::to_owned);
    match (directory(path), directory(overlay)) {
        (Some(of_file), Some(of_overlay)) if of_file == of_overlay => "same-dir",
        _ => "any",
    }
}

/// The overlay of `file`; `None`: it is not marked.
///
/// # Errors
/// The error of the system call; [`io::ErrorKind::Unsupported`] if the file cannot have a mark.
pub fn overlay_of(file: &File) -> io::Result<Option<PathBuf>> {
    get(file, OVERLAY)
}

/// Returns whether the overlay has the mark of one that was merged into `file`: a crash at the end of the merge left
/// the mark of `file`.
fn has_merged(overlay: &Path, file: &File) -> io::Result<bool> {
    let Ok(path) = path_of(|path| getxattr(overlay, MERGED, path)) else { return Ok(false) };
    let own = identity_of(&file.metadata()?);
    Ok(fs::metadata(path).is_ok_and(|merged| identity_of(&merged) == own))
}

/// The reason to refuse `file`, which has the name `path`, for writing. An overlay that was merged into it is none.
///
/// # Errors
/// The error of the system call.
pub fn refusal(file: &File, path: &Path) -> io::Result<Option<Marked>> {
    let known = |found: io::Result<Option<PathBuf>>| match found {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(None),
        found => found,
    };
    let path = path.to_owned();
    match known(get(file, OVERLAY))? {
        Some(overlay) if !has_merged(&overlay, file)? => {
            return Ok(Some(Marked::Overlay { path, overlay }));
        }
        _ => {}
    }
    if let Some(backing) = known(get(file, MERGED))? {
        return Ok(Some(Marked::Merged { path, backing }));
    }
    Ok(known(get(file, MOVED))?.map(|storage| Marked::Moved { path, storage }))
}

/// As [`refusal`], for a writer that holds the lock. A mark that cannot be read refuses the file, too. Removes the mark
/// of an overlay that was merged into it.
///
/// # Errors
/// [`LockError::MarkUnknown`].
pub(crate) fn refusal_of_writer(file: &File, path: &Path) -> Result<Option<Marked>, LockError> {
    let unknown = |source| LockError::MarkUnknown { path: path.to_owned(), source };
    let found = refusal(file, path).map_err(unknown)?;
    if found.is_none() && matches!(get(file, OVERLAY), Ok(Some(_))) {
        let removed = fremovexattr(file, OVERLAY).map_err(io::Error::from);
        removed.and_then(|()| file.sync_all()).map_err(unknown)?;
    }
    Ok(found)
}

/// The mark of a file that is in use, or was not closed properly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InUse {
    /// The disk had no leaked clusters when it began to use the file.
    Sound,
    /// Clusters may have been leaked before.
    Leaks,
}

/// The mark of `file`; `None`: it was closed properly, or cannot have a mark.
///
/// # Errors
/// The error of the system call.
pub fn in_use(file: &File) -> io::Result<Option<InUse>> {
    match get(file, IN_USE) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(None),
        found => Ok(found?.map(|value| match value == Path::new(SOUND) {
            true => InUse::Sound,
            false => InUse::Leaks,
        })),
    }
}

/// Marks the file as in use, durably. A file that cannot have a mark stays without one.
///
/// # Errors
/// The error of the system call; the file may have the mark then.
pub fn set_in_use(file: &File, mark: InUse) -> io::Result<()> {
    let value = if mark == InUse::Sound { SOUND } else { LEAKS };
    match set(file, IN_USE, Path::new(value)) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
        Err(error) => Err(error),
        Ok(()) => file.sync_all(),
    }
}

/// Removes the mark of [`set_in_use`], not durably: a mark that comes back costs a check only.
///
/// # Errors
/// The error of the system call.
pub fn unset_in_use(file: &File) -> io::Result<()> {
    match fremovexattr(file, IN_USE) {
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn get(file: &File, name: &str) -> io::Result<Option<PathBuf>> {
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    match path_of(|path| fgetxattr(file, name, path)) {
        Ok(path) => Ok(Some(path)),
        Err(Errno::NODATA) => Ok(None),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Err(io::ErrorKind::Unsupported.into()),
        Err(error) => Err(error.into()),
    }
}

/// The path in an attribute, which `read` reads.
fn path_of(read: impl FnOnce(&mut [u8]) -> Result<usize, Errno>) -> Result<PathBuf, Errno> {
    let mut path = vec![0; PATH_MAX];
    let len = read(&mut path)?;
    path.truncate(len);
    Ok(OsString::from_vec(path).into())
}

/// Sets a mark. The caller makes it durable.
fn set(file: &File, name: &str, path: &Path) -> io::Result<()> {
    Ok(fsetxattr(file, name, path.as_os_str().as_bytes(), XattrFlags::empty())?)
}

impl ImageFile {
    /// Removes a mark, durably.
    fn remove(&self, name: &str) -> io::Result<()> {
        fremovexattr(self.as_file(), name)?;
        self.sync_all()
    }

    /// Removes a mark that the file may have. A mark that cannot be read may be there.
    fn remove_if_any(&self, name: &str) -> io::Result<()> {
        match get(self.as_file(), name) {
            Ok(Some(_)) => self.remove(name),
            Ok(None) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Marks the file as the backing file of `overlay`, durably.
    ///
    /// # Errors
    /// The error of the system call; the file may have the mark then.
    pub fn mark(&self, overlay: &Path) -> io::Result<()> {
        set(self.as_file(), OVERLAY, overlay)?;
        self.sync_all()
    }

    /// Removes the mark of [`ImageFile::mark`], durably.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn unmark(&self) -> io::Result<()> {
        self.remove(OVERLAY)
    }

    /// The command that does the same as [`ImageFile::unmark`], for an operator.
    pub fn unmarking(&self) -> String {
        unmarking(OVERLAY, self.path())
    }

    /// As [`in_use`].
    ///
    /// # Errors
    /// As there.
    pub fn in_use(&self) -> io::Result<Option<InUse>> {
        in_use(self.as_file())
    }

    /// As [`set_in_use`].
    ///
    /// # Errors
    /// As there.
    pub fn set_in_use(&self, mark: InUse) -> io::Result<()> {
        set_in_use(self.as_file(), mark)
    }

    /// As [`unset_in_use`].
    ///
    /// # Errors
    /// As there.
    pub fn unset_in_use(&self) -> io::Result<()> {
        unset_in_use(self.as_file())
    }

    /// The mark of the file: [`overlay_of`].
    ///
    /// # Errors
    /// As there.
    pub fn overlay(&self) -> io::Result<Option<PathBuf>> {
        overlay_of(self.as_file())
    }

    /// Marks the file as merged into its backing file, durably. Returns whether it has the mark: some file
    /// systems have none.
    ///
    /// # Errors
    /// The error of the system call; the file may have the mark then.
    pub fn mark_merged(&self, backing: &Path) -> io::Result<bool> {
        match set(self.as_file(), MERGED, backing) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(false),
            Err(error) => Err(error),
            Ok(()) => self.sync_all().map(|()| true),
        }
    }

    /// Removes the mark of [`ImageFile::mark_merged`], if there is one.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn unmark_merged(&self) -> io::Result<()> {
        self.remove_if_any(MERGED)
    }

    /// The command that does the same as [`ImageFile::unmark_merged`], for an operator.
    pub fn merged_unmarking(&self) -> String {
        unmarking(MERGED, self.path())
    }

    /// Marks the file as the former image of a disk that has moved to `storage`, durably. Returns
    /// whether it has the mark: a block device and some file systems have none, and a full one takes none.
    ///
    /// # Errors
    /// The error of the system call; the file may have the mark then.
    pub fn mark_moved(&self, storage: &Path) -> io::Result<bool> {
        if !self.as_file().metadata()?.is_file() {
            return Ok(false);
        }
        let path = storage.as_os_str().as_bytes();
        // Apart from the sync, whose want of space is an error.
        match fsetxattr(self.as_file(), MOVED, path, XattrFlags::empty()) {
            Ok(()) => self.sync_all().map(|()| true),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOSPC | Errno::DQUOT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the mark of [`ImageFile::mark_moved`], if there is one.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn unmark_moved(&self) -> io::Result<()> {
        self.remove_if_any(MOVED)
    }

    /// The command that does the same as [`ImageFile::unmark_moved`], for an operator.
    pub fn moved_unmarking(&self) -> String {
        unmarking(MOVED, self.path())
    }
}
