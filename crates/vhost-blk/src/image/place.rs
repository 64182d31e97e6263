// SPDX-License-Identifier: Apache-2.0
//! The place of a new image: a temporary file beside it that takes its name at the end.

use crate::create;
use crate::failure::Failure;
use backend::create::{directory_of, error_of, remove_own, sync_directory};
use backend::file::identity_of;
use backend::lock::{Access, LockError, lock_image};
use backend::mark;
use qcow2::copy::Source;
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

const WHAT: &str = "make the image";
/// Ends of the names of temporary files. One of the second kind without a lock is of no use.
const PART: &str = ".part";
const LOCKED_PART: &str = ".mirror.part";
/// Random characters before them.
const RANDOM: usize = 6;
/// Attempts to lock a new temporary file, which another program may look at.
const LOCKS_MAX: usize = 4;

/// The place, with the new file. Without [`Place::fill`] the file is removed.
#[derive(Debug)]
pub(crate) struct Place {
    path: PathBuf,
    new: NamedTempFile,
    /// The file that is replaced, with its lock.
    old: Option<File>,
}

/// The failure of the new image at `path`, for a disk of `size_bytes`.
pub(crate) fn failure(path: &Path, size_bytes: u64, why: io::Error) -> Failure {
    create::failure(error_of(path, size_bytes, why))
}

impl Place {
    /// Checks and locks the place, and makes the temporary file.
    ///
    /// # Errors
    /// [`Failure`], also if the place has a file of `source`, or one in use.
    pub(super) fn take(path: &Path, overwrite: bool, source: &Source) -> Result<Place, Failure> {
        let failed = |why: io::Error| failure(path, 0, why);
        // The name of a link stays; its file is replaced.
        let target = match fs::canonicalize(path) {
            Ok(target) => target,
            Err(why) if why.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(why) => return Err(failed(why)),
        };
        if fs::symlink_metadata(&target).is_ok_and(|found| found.is_symlink()) {
            let why = format!("{}: a symbolic link to a file that does not exist", path.display());
            return Err(Failure::run(WHAT, why, "remove it, or choose another name"));
        }
        // A FIFO would wait for its writer.
        let open = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&target);
        let old = match open {
            Ok(_) if !overwrite => {
                return Err(exists(path, "give --overwrite, or choose another name"));
            }
            Ok(old) => Some(check_old(path, old, source)?),
            Err(why) if why.kind() == io::ErrorKind::NotFound => None,
            Err(why) => return Err(failed(why)),
        };
        let mode = source.mode_of_copy().map_err(failed)?;
        Place::make(target, old, mode, PART)
    }

    /// As [`Place::take`], where the place has to be free. Only this user may read the new file.
    ///
    /// # Errors
    /// [`Failure`], also if there is a file.
    pub(crate) fn take_free(path: &Path) -> Result<Place, Failure> {
        Place::take_free_as(path, PART)
    }

    /// As [`Place::take_free`], with a lock of the temporary file as that of a disk. The temporary files
    /// of killed programs for this place are removed: their locks have gone. `has_lock`: the disk in the new
    /// file will be locked, so that a file system without locks is refused.
    ///
    /// # Errors
    /// [`Failure`], also if there is a file.
    pub(crate) fn take_locked(path: &Path, has_lock: bool) -> Result<Place, Failure> {
        Place::remove_left(path);
        for _ in 0..LOCKS_MAX {
            // Checks the place, and makes the directory's errors known.
            let Place { path, new, old } = Place::take_free_as(path, LOCKED_PART)?;
            let has_name = || fs::symlink_metadata(new.path()).is_ok();
            match lock_image(new.as_file(), new.path(), Access::Write) {
                // Another program may have removed it before it was locked.
                Ok(()) if has_name() => return Ok(Place { path, new, old }),
                Err(why @ LockError::Refused { .. }) if has_lock => {
                    return Err(Failure::told(WHAT, why));
                }
                // The file system has no locks.
                Err(LockError::Refused { .. }) => return Ok(Place { path, new, old }),
                _ => {}
            }
        }
        let why = format!("{}: another program makes an image there", path.display());
        Err(Failure::run(WHAT, why, "wait for that, or choose another name"))
    }

    /// Removes the temporary files of [`Place::take_locked`] that no program has locked.
    fn remove_left(path: &Path) {
        let Ok(found) = fs::read_dir(directory_of(path)) else { return };
        for found in found.flatten() {
            let name = found.file_name();
            let random = name
                .to_str()
                .and_then(|name| name.strip_prefix(&prefix(path))?.strip_suffix(LOCKED_PART));
            let is_part = random.is_some_and(|random| {
                random.len() == RANDOM && random.bytes().all(|byte| byte.is_ascii_alphanumeric())
            });
            if !is_part || !found.file_type().is_ok_and(|kind| kind.is_file()) {
                continue;
            }
            let part = found.path();
            let Ok(file) = File::options().read(true).write(true).open(&part) else { continue };
            if lock_image(&file, &part, Access::Write).is_ok() && fs::remove_file(&part).is_ok() {
                tracing::info!(part = %part.display(), "the rest of a killed program was removed");
            }
        }
    }

    fn take_free_as(path: &Path, suffix: &str) -> Result<Place, Failure> {
        match fs::symlink_metadata(path) {
            Ok(_) => Err(exists(path, "choose another name")),
            Err(why) if why.kind() == io::ErrorKind::NotFound => {
                Place::make(path.to_owned(), None, 0o600, suffix)
            }
            Err(why) => Err(failure(path, 0, why)),
        }
    }

    fn make(path: PathBuf, old: Option<File>, mode: u32, suffix: &str) -> Result<Place, Failure> {
        let mut builder = tempfile::Builder::new();
        let prefix = prefix(&path);
        builder.prefix(&prefix).rand_bytes(RANDOM).suffix(suffix);
        builder.permissions(Permissions::from_mode(mode));
        let new = builder.tempfile_in(directory_of(&path)).map_err(|why| {
            // The error of the file has its name, which the user does not know.
            let why = fs::metadata(directory_of(&path)).err().unwrap_or(why);
            let why = format!("{}: cannot be created: {why}", path.display());
            Failure::run(WHAT, why, "check its directory, the permissions and the free space")
        })?;
        if let Some(old) = &old {
            let inherited = old.metadata().and_then(|old| inherit(&old, new.as_file()));
            inherited.map_err(|why| failure(&path, 0, why))?;
        }
        Ok(Place { path, new, old })
    }

    pub(crate) fn file(&self) -> &File {
        self.new.as_file()
    }

    /// Path of the temporary file.
    pub(crate) fn part(&self) -> &Path {
        self.new.path()
    }

    /// Gives the new file its name, durably, and returns it. After an error there is no new file, unless it has replaced
    /// another one.
    pub(crate) fn fill(self, size_bytes: u64) -> Result<File, Failure> {
        let Place { path, new, old } = self;
        let failed = |why: io::Error| failure(&path, size_bytes, why);
        let replaces = old.as_ref().map_or(Ok(false), |old| is_at(&path, old))?;
        let named = match replaces {
            true => new.persist(&path),
            false => new.persist_noclobber(&path),
        };
        let named = named.map_err(|error| failed(error.error))?;
        match sync_directory(&path) {
            Ok(()) => Ok(named),
            Err(why) => {
                if old.is_none() {
                    remove_own(&path, &named);
                }
                Err(failed(why))
            }
        }
    }
}

fn exists(path: &Path, remedy: &str) -> Failure {
    Failure::run(WHAT, format!("{}: exists already", path.display()), remedy)
}

/// Start of the names of temporary files for a place.
fn prefix(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    format!(".{}.", name.chars().take(40).collect::<String>())
}

/// Checks and locks a file that is to be replaced.
fn check_old(path: &Path, old: File, source: &Source) -> Result<File, Failure> {
    let failed = |why: io::Error| failure(path, 0, why);
    let shown = path.display();
    if !old.metadata().map_err(failed)?.is_file() {
        let why = format!("{shown}: no regular file, and only such a file is replaced");
        return Err(Failure::run(WHAT, why, "give the name of a file"));
    }
    if source.has(&old).map_err(failed)? {
        let why = format!("{shown}: it is the source, or one of its backing files");
        return Err(Failure::run(WHAT, why, "choose another name"));
    }
    lock_image(&old, path, Access::Write).map_err(|why| match why {
        // The option of the lock is that of the source.
        LockError::InUse { .. } => {
            let why = format!("{shown}: in use by {}", why.user().unwrap_or_default());
            Failure::run(WHAT, why, "stop that, or choose another name")
        }
        why => Failure::told(WHAT, why),
    })?;
    match mark::refusal(&old, path).map_err(failed)? {
        Some(marked) => Err(Failure::told(WHAT, marked)),
        None => Ok(old),
    }
}

/// Returns whether the file that was checked and locked is still at the path, or none is. Refuses to replace
/// another one.
fn is_at(path: &Path, old: &File) -> Result<bool, Failure> {
    let failed = |why: io::Error| failure(path, 0, why);
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(why) => return Err(failed(why)),
    };
    if identity_of(&found) == identity_of(&old.metadata().map_err(failed)?) {
        return Ok(true);
    }
    let why = format!("{}: another file got this name meanwhile", path.display());
    Err(Failure::run(WHAT, why, "look at that file, and repeat the command"))
}

/// Gives the new file owner and mode of the old one.
pub(crate) fn inherit(old: &Metadata, new: &File) -> io::Result<()> {
    let own = new.metadata()?;
    if (old.uid(), old.gid()) != (own.uid(), own.gid()) {
        fchown(new, Some(old.uid()), Some(old.gid()))?;
    }
    new.set_permissions(old.permissions())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Uid, getuid};
    use rustix::thread::set_thread_res_uid;
    use std::thread;

    /// A user that no directory belongs to.
    const NOBODY: u32 = 65_534;

    #[test]
    fn a_file_that_got_the_name_meanwhile_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("b");
        let replace = |old: File| Place::make(path.clone(), Some(old), 0o600, PART).unwrap();
        fs::write(&path, "old").unwrap();
        let place = replace(File::open(&path).unwrap());
        fs::rename(&path, directory.path().join("moved")).unwrap();
        fs::write(&path, "another one").unwrap();
        let told = place.fill(4096).unwrap_err().to_string();
        assert!(told.contains("another file got this name"), "{told}");
        assert_eq!(fs::read(&path).unwrap(), b"another one");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
        replace(File::open(&path).unwrap()).fill(4096).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
        let place = replace(File::open(&path).unwrap());
        fs::remove_file(&path).unwrap();
        place.fill(4096).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
    }

    /// The directory may be written and not be read, so that it cannot be synced.
    #[test]
    fn a_file_whose_name_cannot_be_made_durable_is_removed() {
        let outer = tempfile::tempdir().unwrap();
        fs::set_permissions(outer.path(), Permissions::from_mode(0o711)).unwrap();
        let directory = outer.path().join("directory");
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, Permissions::from_mode(0o333)).unwrap();
        let path = directory.join("b");
        let filled = thread::scope(|scope| {
            let fill = scope.spawn(|| {
                if getuid().is_root() {
                    // This thread alone: root may read every directory.
                    let nobody = Uid::from_raw(NOBODY);
                    set_thread_res_uid(nobody, nobody, nobody).unwrap();
                }
                Place::take_locked(&path, true).unwrap().fill(4096)
            });
            fill.join().unwrap()
        });
        let told = filled.unwrap_err().to_string();
        assert!(told.contains("Permission denied"), "{told}");
        fs::set_permissions(&directory, Permissions::from_mode(0o700)).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }
}
