// SPDX-License-Identifier: Apache-2.0
//! The socket file. This process never replaces the socket of a live process, sets the permissions
//! before the first connection, and removes the file at the end if it is still its own.
//!
//! A lock on the directory serializes daemons that start for the same path; unlike a lock file it
//! leaves nothing behind. A daemon holds it only while it examines and replaces the file: later
//! `connect` shows whether a process listens.

use crate::failure::Failure;
use crate::subscription::lock;
use backend::create::directory_of;
use backend::file::identity_of;
use socket2::{Domain, SockAddr, Socket, Type};
use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Maximum connections that wait while one is served.
const BACKLOG: i32 = 16;
/// Maximum length of a path in bytes (`sun_path` without the terminating 0).
const PATH_BYTES_MAX: usize = 107;
/// Maximum wait for the lock on the directory, at the start and at the end.
const START_WAIT_MAX: Duration = Duration::from_secs(5);
const END_WAIT_MAX: Duration = Duration::from_millis(50);
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Device and number of each socket file that this process serves. A connection to one would be a front-end of its
/// disk.
static SERVED: Mutex<BTreeSet<(u64, u64)>> = Mutex::new(BTreeSet::new());

/// A socket file that this process created; see [`SocketFile::remove`].
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    /// A file that an earlier program of this process has created.
    pub fn of_parts(path: PathBuf, identity: (u64, u64)) -> Self {
        lock(&SERVED).insert(identity);
        SocketFile { path, identity }
    }

    /// Its path, and its device and number.
    pub fn parts(&self) -> (&Path, (u64, u64)) {
        (&self.path, self.identity)
    }

    /// Removes the file if it is still the one that this process created.
    pub fn remove(&self) {
        // Remove it even without the lock: the identity of the file decides.
        let _lock = lock_directory(&self.path, END_WAIT_MAX);
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|found| identity_of(&found) == self.identity);
        if ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.remove();
        lock(&SERVED).remove(&self.identity);
    }
}

/// Creates a socket file at `path` and listens on it.
///
/// # Errors
/// [`Failure`] if `path` is neither free nor a stale socket, or the file cannot be created.
pub fn listen(
    path: &Path,
    mode: u32,
    group: Option<u32>,
) -> Result<(UnixListener, SocketFile), Failure> {
    let failed = |why: &dyn std::fmt::Display, remedy: &str| {
        Failure::run(format!("listen on {}", path.display()), why, remedy)
    };
    let bytes = path.as_os_str().len();
    if bytes == 0 || bytes > PATH_BYTES_MAX {
        let why = format!("the path has {bytes} bytes and the kernel takes 1 to {PATH_BYTES_MAX}");
        return Err(failed(&why, "choose another path"));
    }
    let lock = lock_directory_at_start(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => missing(path),
        _ => failed(&error, "let this user read the directory"),
    })?;
    clear(path)?;
    let system = |error: io::Error| failed(&error, "check the permissions of the directory");
    let address = SockAddr::unix(path).map_err(system)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(system)?;
    socket.bind(&address).map_err(system)?;
    let made = fs::symlink_metadata(path).map_err(system)?;
    let file = SocketFile::of_parts(path.into(), identity_of(&made));
    let finish = || -> Result<(), Failure> {
        // No process can connect before `listen`.
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(system)?;
        if group.is_some() {
            std::os::unix::fs::chown(path, None, group).map_err(|error| {
                failed(&error, "choose a group that this user belongs to: --socket-group, --control-group, --metrics-group")
            })?;
        }
        socket.listen(BACKLOG).map_err(system)
    };
    if let Err(failure) = finish() {
        drop(lock);
        drop(file);
        return Err(failure);
    }
    Ok((UnixListener::from(OwnedFd::from(socket)), file))
}

/// The error of a socket whose directory does not exist. This program makes none: owner and mode of the directory
/// decide which users reach the socket.
fn missing(path: &Path) -> Failure {
    let directory = path.parent().unwrap_or(Path::new("")).display();
    let why = format!("there is no directory {directory}");
    let remedy = "make it, with an owner and a mode that let the users of the socket reach it (mkdir, install -d); \
                  for a service below /run by RuntimeDirectory= of its unit, or by tmpfiles.d";
    Failure::run(format!("listen on {}", path.display()), why, remedy)
}

/// Removes a stale socket at `path`; refuses any other existing file.
fn clear(path: &Path) -> Result<(), Failure> {
    let failed = |why: &dyn std::fmt::Display, remedy: &str| {
        Failure::run(format!("listen on {}", path.display()), why, remedy)
    };
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(&error, "check the path")),
        Ok(found) => found,
    };
    if found.is_dir() {
        return Err(failed(&"it is a directory", "give the path of a file in it"));
    }
    if !found.file_type().is_socket() {
        return Err(failed(
            &"something that is not a socket is there",
            "choose another path or remove it",
        ));
    }
    if lock(&SERVED).contains(&identity_of(&found)) {
        return Err(failed(&"this daemon serves this socket", "choose another path"));
    }
    match probe(path) {
        Ok(()) => Err(failed(
            &"another process serves this socket",
            "choose another path or stop that process",
        )),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)
            .map_err(|error| {
                failed(&format!("a stale socket is there and stays: {error}"), "remove it")
            }),
        Err(error) => Err(failed(
            &format!("a socket is there, and its state is unknown: {error}"),
            "choose another path or remove it",
        )),
    }
}

/// Returns `Ok` if a process listens on the socket.
fn probe(path: &Path) -> io::Result<()> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&SockAddr::unix(path)?) {
        // The queue of connections is full: there is a listener.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        // A socket of another type is in use, too.
        Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => Ok(()),
        other => other,
    }
}

/// Locks the directory of `path` until the result is dropped, for a process that starts. Goes on without the lock if
/// another process holds it for long: each user who may read the directory can lock it, and must not keep disks down.
/// The lock only orders programs that replace the same stale file.
///
/// # Errors
/// The error of a system call.
pub(crate) fn lock_directory_at_start(path: &Path) -> io::Result<Option<File>> {
    let locked = lock_directory(path, START_WAIT_MAX)?;
    if locked.is_none() {
        let path = path.display();
        tracing::warn!(%path, "another process holds a lock on this directory: going on without the lock");
    }
    Ok(locked)
}

/// Locks the directory of `path` until the result is dropped. `None`: another process holds the lock.
fn lock_directory(path: &Path, wait_max: Duration) -> io::Result<Option<File>> {
    let file = File::open(directory_of(path))?;
    let deadline = Instant::now() + wait_max;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(LOCK_RETRY);
            }
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_file_has_its_mode_and_goes_with_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.sock");
        let (_listener, file) = listen(&path, 0o640, None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        UnixStream::connect(&path).unwrap();
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn a_successors_file_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.sock");
        let (_listener, file) = listen(&path, 0o600, None).unwrap();
        fs::rename(&path, dir.path().join("elsewhere")).unwrap();
        let (_other, _its_file) = listen(&path, 0o600, None).unwrap();
        drop(file);
        assert!(path.exists());
    }

    #[test]
    fn of_many_that_start_at_once_on_a_stale_socket_one_wins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.sock");
        drop(UnixListener::bind(&path).unwrap());
        let won: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> =
                (0..8).map(|_| scope.spawn(|| listen(&path, 0o600, None).ok())).collect();
            all.into_iter().filter_map(|one| one.join().unwrap()).collect()
        });
        assert_eq!(won.len(), 1);
        UnixStream::connect(&path).unwrap();
    }

    /// Any user who may read the directory can do that.
    #[test]
    fn a_lock_of_another_program_on_the_directory_keeps_no_socket_away() {
        let dir = tempfile::tempdir().unwrap();
        let held = File::open(dir.path()).unwrap();
        held.lock_shared().unwrap();
        let path = dir.path().join("disk.sock");
        drop(UnixListener::bind(&path).unwrap());
        let (_listener, _file) = listen(&path, 0o600, None).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_missing_directory_is_named_with_the_ways_to_make_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("none/disk.sock");
        let failure = listen(&path, 0o600, None).unwrap_err();
        assert_eq!(failure.why, format!("there is no directory {}/none", dir.path().display()));
        assert!(failure.remedy.contains("RuntimeDirectory="), "{failure}");
        assert!(!dir.path().join("none").exists());
    }

    #[test]
    fn a_path_longer_than_the_kernel_takes_is_refused() {
        let path = PathBuf::from("x".repeat(108));
        let failure = listen(&path, 0o600, None).unwrap_err().to_string();
        assert!(failure.contains("108 bytes"), "{failure}");
    }
}
