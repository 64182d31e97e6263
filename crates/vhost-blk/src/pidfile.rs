// SPDX-License-Identifier: Apache-2.0
//! The file of `--pidfile`: the id of the process, from the moment at which it is ready until its clean end.
//!
//! The process holds a lock (`flock`) on the file, which ends with it: a file without a lock is stale. The lock belongs
//! to the open file, so that it goes to the next program with an upgrade. The file appears with its content. A lock on
//! the directory serializes daemons that start for the same path.

use crate::failure::Failure;
use crate::socket_file::{self, SocketFile};
use backend::create::directory_of;
use backend::file::identity_of;
use rustix::fs::{Access, access};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use std::fmt::Display;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Maximum length of a process id with its line break; a longer file is another one.
const BYTES_MAX: u64 = 21;
const MODE: u32 = 0o644;

/// Checks that no live process has the file, and that it is no other file.
///
/// # Errors
/// [`Failure`] with the process that has it.
pub(crate) fn check(path: &Path) -> Result<(), Failure> {
    let failed = |why: &dyn Display, remedy: &str| failure(path, why, remedy);
    let open =
        File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let mut file = match open {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(&error, "name another path")),
        Ok(file) => file,
    };
    let mut text = String::new();
    let is_regular = file.metadata().is_ok_and(|found| found.is_file());
    let read =
        if is_regular { (&mut file).take(BYTES_MAX + 1).read_to_string(&mut text) } else { Ok(0) };
    let is_id =
        text.len() as u64 <= BYTES_MAX && text.trim_end().bytes().all(|byte| byte.is_ascii_digit());
    if !is_regular || read.is_err() || !is_id {
        return Err(failed(&"the file there has no process id", "name another path"));
    }
    match file.try_lock() {
        Ok(()) => Ok(()),
        // Each user may read the file, and wait for the lock of a process that has ended.
        Err(TryLockError::WouldBlock) if !is_alive(text.trim_end()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            let why = format!("the live process {} has it", text.trim_end());
            Err(failed(&why, "stop that process, or name another path"))
        }
        Err(TryLockError::Error(error)) => {
            Err(failed(&error, "name a path on another file system"))
        }
    }
}

/// Returns whether a process has this id.
fn is_alive(id: &str) -> bool {
    let pid = id.parse().ok().and_then(Pid::from_raw);
    // Any other error, such as EPERM, is one of a process that exists.
    pid.is_none_or(|pid| test_kill_process(pid) != Err(Errno::SRCH))
}

/// Checks that a file can be made in the directory of `path`.
///
/// # Errors
/// [`Failure`] with the cause.
pub(crate) fn check_directory(path: &Path) -> Result<(), Failure> {
    access(directory_of(path), Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|error| failed_in_directory(path, error.into()))
}

fn failed_in_directory(path: &Path, error: io::Error) -> Failure {
    match error.kind() {
        ErrorKind::NotFound => failure(path, &"there is no such directory", "make it"),
        _ => failure(path, &error, "check the permissions and the space of its directory"),
    }
}

/// Writes the file, in place of a stale one. Returns it with the descriptor that has the lock.
///
/// # Errors
/// [`Failure`] as [`check`], or if the file cannot be written. Nothing of it remains.
pub(crate) fn write(path: &Path) -> Result<(OwnedFd, SocketFile), Failure> {
    let failed = |error: io::Error| failed_in_directory(path, error);
    let _lock = socket_file::lock_directory_at_start(path).map_err(failed)?;
    check(path)?;
    let new = new_path(path);
    let made = make(&new).and_then(|made| fs::rename(&new, path).map(|()| made));
    let (file, identity) = made.map_err(|error| {
        let _ = fs::remove_file(&new);
        failed(error)
    })?;
    Ok((file.into(), SocketFile::of_parts(path.into(), identity)))
}

/// A name beside the file that no other process uses.
fn new_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    name.into()
}

/// Makes the locked file. Returns its device and number, too.
fn make(path: &Path) -> io::Result<(File, (u64, u64))> {
    let mut file = File::options().write(true).create_new(true).mode(MODE).open(path)?;
    file.try_lock()?;
    writeln!(file, "{}", std::process::id())?;
    let identity = identity_of(&file.metadata()?);
    Ok((file, identity))
}

fn failure(path: &Path, why: &dyn Display, remedy: &str) -> Failure {
    Failure::run(format!("use the pid file {}", path.display()), why, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_the_id_and_excludes_another_until_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        let (lock, file) = write(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        let why = write(&path).unwrap_err().to_string();
        assert!(why.contains(&format!("the live process {} has it", std::process::id())), "{why}");
        assert!(why.contains("stop that process, or name another path"), "{why}");
        drop(lock);
        // Stale now: the next one replaces it, and the end of the first one does not remove it.
        let (_lock, _next) = write(&path).unwrap();
        drop(file);
        assert!(path.exists());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn another_file_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        fs::write(&path, "").unwrap();
        drop(write(&path).expect("an empty file holds nothing to lose"));
        for content in ["no id", "1234567890123456789012"] {
            fs::write(&path, content).unwrap();
            let why = write(&path).unwrap_err().to_string();
            assert!(why.contains("the file there has no process id"), "{why}");
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        let why = write(directory.path()).unwrap_err().to_string();
        assert!(why.contains("the file there has no process id"), "{why}");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(write(&link).is_err());
        let why = write(Path::new("/no/such/directory/pid")).unwrap_err().to_string();
        assert!(why.contains("there is no such directory; make it"), "{why}");
    }
}
