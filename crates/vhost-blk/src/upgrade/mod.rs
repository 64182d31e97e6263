// SPDX-License-Identifier: Apache-2.0
//! Replaces the program of a running daemon while its guests run.
//!
//! | Step | Who | If it fails |
//! |---|---|---|
//! | 1. check | the new program, as a child, reads the options and the present state | refused |
//! | 2. stop | each disk stops its queues and waits ([`vhost_user::Frozen`]) | refused; the queues start |
//! | 3. exec | the control client's thread, with the state in a memory file | refused; the queues start |
//! | 4. take over | the new program, in the same process ([`restore`]) | the process ends |
//!
//! The process keeps its id, its control group and its open files, and so the lock of the image.

mod check;
mod exec;
mod program;
mod restore;
mod state;

pub use check::check;
pub use program::CHECK_COMMAND;
pub use restore::{Taken, TakenDisk, TakenSocket, Upgraded, take};

use crate::notify;
use crate::signals::Gate;
use crate::socket_file::SocketFile;
use backend::file::File as ImageFile;
use rustix::time::{ClockId, clock_gettime};
use state::{DiskState, FORMAT, ImageState, ProgramState, SocketFileState, SocketState};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, TryLockError};
use vhost_user::{Control, Exported};

/// The variable that names the memory file to the new program: its process id and its descriptor.
const VARIABLE: &str = "VHOST_BLK_UPGRADE";

/// Reasons for which an upgrade is refused. The old program serves on.
#[derive(Debug, thiserror::Error)]
pub enum UpgradeError {
    /// The program is not suited.
    #[error("{}: {why}; give the absolute path of an executable that only root or this user can change", .path.display())]
    Program {
        /// Its path.
        path: PathBuf,
        /// The cause.
        why: String,
    },
    /// The new program's check failed.
    #[error("{} cannot take over ({ended}): {told}; nothing was changed", .path.display())]
    Check {
        /// Path of the program.
        path: PathBuf,
        /// The end of the check.
        ended: String,
        /// Its output.
        told: String,
    },
    /// An upgrade is in progress.
    #[error("another upgrade is in progress; wait for it")]
    Busy,
    /// The disk cannot outlive its program.
    #[error("{0}; restart the daemon instead")]
    Bound(&'static str),
    /// An error of the storage has halted the disk, which keeps requests.
    #[error("an error of the storage has halted the disk; resume it before the upgrade")]
    Halted,
    /// A sync of the image has failed. The new program would forget it, and a FLUSH could succeed
    /// although data is lost.
    #[error(
        "a sync of the disk has failed and completed writes may be lost; check the storage and the \
         guest's data, then restart the daemon instead"
    )]
    SyncFailed,
    /// The daemon is about to end.
    #[error("the daemon is about to end; start it again")]
    Ending,
    /// The program was not executed; the disks run again.
    #[error("{} could not be executed: {source}; the old program serves on", .path.display())]
    Exec {
        /// Path of the program.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{0}; check the limits of the daemon (ulimit)")]
    System(io::Error),
}

/// A listening socket to pass on.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    file: Option<SocketFileState>,
}

impl Socket {
    /// A second descriptor of `socket`, and the identity of its file.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn of(socket: &impl AsFd, file: Option<&SocketFile>) -> io::Result<Self> {
        let file = file.map(|file| {
            let (path, identity) = file.parts();
            SocketFileState { path: path.into(), identity }
        });
        Ok(Socket { fd: socket.as_fd().try_clone_to_owned()?, file })
    }

    fn state(&self) -> SocketState {
        SocketState { fd: self.fd.as_raw_fd(), file: self.file.clone() }
    }
}

/// A disk to pass on.
#[derive(Debug)]
pub struct Disk {
    control: Arc<Control>,
    storage: Storage,
}

/// The storage of a disk.
#[derive(Debug)]
pub enum Storage {
    /// A file, which is passed on.
    Image(Image),
    /// Nothing to pass on.
    Nothing,
    /// It ends with the program, for this reason.
    Bound(&'static str),
}

/// A second descriptor of an open image, with the same lock.
#[derive(Debug)]
pub struct Image {
    /// Keeps the descriptor of `state` open.
    _fd: File,
    state: ImageState,
    file: Arc<ImageFile>,
}

impl Image {
    /// The image of `file`.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn of(file: Arc<ImageFile>) -> io::Result<Self> {
        let (fd, open) = (file.share()?, file.opened_as()?);
        let state = ImageState { fd: fd.as_raw_fd(), identity: open.identity, direct: open.direct };
        Ok(Image { _fd: fd, state, file })
    }
}

impl Disk {
    /// A disk with the given storage; `control` reaches its device.
    pub fn new(control: Arc<Control>, storage: Storage) -> Self {
        Disk { control, storage }
    }

    fn state(&self, exported: Exported) -> Result<DiskState, UpgradeError> {
        let image = match &self.storage {
            Storage::Image(image) if image.file.has_failed_sync() => {
                return Err(UpgradeError::SyncFailed);
            }
            Storage::Image(image) => Some(image.state.clone()),
            Storage::Nothing => None,
            Storage::Bound(why) => return Err(UpgradeError::Bound(why)),
        };
        let Exported { state: device, descriptors, halted } = exported;
        if halted {
            return Err(UpgradeError::Halted);
        }
        Ok(DiskState { image, device, descriptors })
    }
}

/// The sockets of a program.
#[derive(Debug)]
pub struct Sockets {
    /// The socket of front-ends, if it listens.
    pub front_ends: Option<Socket>,
    /// The control socket.
    pub control: Socket,
    /// The metrics socket.
    pub metrics: Option<Socket>,
}

/// Everything that an upgrade passes on.
pub struct Upgrader {
    sockets: Sockets,
    disks: Vec<Disk>,
    gate: Gate,
    in_progress: Mutex<()>,
}

impl Upgrader {
    /// An upgrader of a program with these sockets and disks, until it is asked to stop.
    pub fn new(sockets: Sockets, disks: Vec<Disk>, gate: Gate) -> Self {
        Upgrader { sockets, disks, gate, in_progress: Mutex::new(()) }
    }

    /// Replaces this program by `program`, by default by the present file of this program. The new
    /// one answers `client`. Returns only if that fails.
    pub fn upgrade(&self, program: Option<&Path>, client: BorrowedFd<'_>) -> UpgradeError {
        let Err(error) = self.try_upgrade(program, client);
        tracing::warn!(%error, "no upgrade");
        error
    }

    fn try_upgrade(
        &self,
        program: Option<&Path>,
        client: BorrowedFd<'_>,
    ) -> Result<std::convert::Infallible, UpgradeError> {
        let _only_one = match self.in_progress.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(UpgradeError::Busy),
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
        };
        let path = program::choose(program)?;
        let args: Vec<OsString> = std::env::args_os().collect();
        program::check(&path, &args, &self.state(client, Control::snapshot)?)?;
        let mut frozen = Vec::new();
        let mut state = self.state(client, |control| {
            let disk = control.freeze()?;
            let exported = disk.exported.clone();
            frozen.push(disk);
            Some(exported)
        })?;
        let stopped_at = frozen.iter().map(|disk| disk.stopped_at_ns).min();
        state.stopped_at_ns = stopped_at.unwrap_or_else(now_ns);
        match self.gate.pass(|| self.exec(&path, &args, &state)) {
            Some(source) => Err(UpgradeError::Exec { path, source }),
            None => Err(UpgradeError::Ending),
        }
    }

    /// The state of the program; `export` provides that of each disk.
    fn state(
        &self,
        client: BorrowedFd<'_>,
        mut export: impl FnMut(&Control) -> Option<Exported>,
    ) -> Result<ProgramState, UpgradeError> {
        let disk = |disk: &Disk| disk.state(export(&disk.control).ok_or(UpgradeError::Ending)?);
        Ok(ProgramState {
            format: FORMAT,
            from: env!("CARGO_PKG_VERSION").to_owned(),
            stopped_at_ns: now_ns(),
            disks: self.disks.iter().map(disk).collect::<Result<_, _>>()?,
            front_ends: self.sockets.front_ends.as_ref().map(Socket::state),
            control: self.sockets.control.state(),
            metrics: self.sockets.metrics.as_ref().map(Socket::state),
            client: client.as_raw_fd(),
        })
    }

    fn exec(&self, program: &Path, args: &[OsString], state: &ProgramState) -> io::Error {
        let file = match state.write() {
            Ok(file) => file,
            Err(error) => return error,
        };
        let mut pass = state.descriptors();
        pass.push(file.as_raw_fd());
        let place = format!("{}:{}", std::process::id(), file.as_raw_fd());
        tell_manager(&notify::reloading());
        let error = exec::exec(program, args, (VARIABLE, &place), &pass);
        tell_manager("READY=1");
        error
    }
}

fn tell_manager(state: &str) {
    if let Err(error) = notify::notify(state) {
        tracing::warn!(%error, state, "cannot notify the service manager");
    }
}

/// The monotonic clock, which all programs of this machine share.
fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
