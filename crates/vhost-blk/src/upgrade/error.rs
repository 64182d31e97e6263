// SPDX-License-Identifier: Apache-2.0
//! Reasons for which an upgrade is refused. The old program serves on.

use super::FREEZE_MAX;
use std::io;
use std::path::PathBuf;

/// The reason of a refusal.
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
    #[error("{} cannot take over ({ended}): {told}, and nothing was changed; see the message, or name another program", .path.display())]
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
    /// The directory of configuration files is being read, or the storage of a disk is being exchanged.
    #[error("{0}; wait for the end of that")]
    Turn(String),
    /// A disk cannot be passed on.
    #[error("the disk {name} cannot be passed on: {why}")]
    Disk {
        /// Name of the disk.
        name: String,
        /// The cause and the remedy.
        why: Obstacle,
    },
    /// A copy is being begun, or has ended, and a thread still waits for its target or its source.
    #[error(
        "{}: a storage of the {act} to it does not answer, and the upgrade would wait for it; check that storage, and \
         repeat the command",
        .path.display()
    )]
    Target {
        /// Path of the target.
        path: PathBuf,
        /// The kind of the copy.
        act: &'static str,
    },
    /// A disk was given up, and a thread still waits for its storage.
    #[error(
        "the storage of the disk {name}, which was given up, does not answer, and the upgrade would \
         wait for it; check that storage, and repeat the command"
    )]
    GivenUp {
        /// The name that it had.
        name: String,
    },
    /// A thread waits for the storage of a disk.
    #[error(
        "a command, or a look at its device, waits for the storage of the disk {name}, and the upgrade \
         would wait for it; repeat the command after that, or check that storage"
    )]
    Storage {
        /// Name of the disk.
        name: String,
    },
    /// The limit on open files is too near: the new program could not open all of the disks.
    #[error(
        "{left} descriptors are left, and the take-over needs {needed} for a moment; raise the limit \
         on open files (ulimit -n), or remove a disk"
    )]
    Descriptors {
        /// Descriptors that the process may still open.
        left: u64,
        /// Descriptors that the upgrade needs besides those of the disks.
        needed: u64,
    },
    /// The file of the log hangs.
    #[error(
        "{0}, and the upgrade would wait for it; check the storage of that file, and repeat the command"
    )]
    Log(io::Error),
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

/// The reason for which a disk cannot be passed on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// It is being added.
    #[error("it is being added; wait until it is served")]
    Coming,
    /// Its bitmaps cannot be passed.
    #[error(
        "its bitmaps cannot be passed: {0}; remove them (vhost-blk ctl bitmaps --remove), and make \
         full backups afterwards"
    )]
    Bitmaps(String),
    /// It is being removed.
    #[error("it is being removed; wait until it is gone, or check its storage")]
    Going,
    /// Threads of this program work on it.
    #[error("{0}")]
    Work(&'static str),
    /// It cannot outlive its program.
    #[error("{0}; remove the disk first, or restart the daemon instead")]
    Bound(&'static str),
    /// An error of the storage has halted it, and it keeps requests.
    #[error("an error of the storage has halted the disk; resume it before the upgrade")]
    Halted,
    /// A sync of its image has failed. The new program would forget it, and a FLUSH could succeed
    /// although data is lost.
    #[error(
        "a sync of the disk has failed and completed writes may be lost; check the storage and the \
         guest's data, then restart the daemon instead"
    )]
    SyncFailed,
    /// The tables of its qcow2 image find no room.
    #[error(
        "the file system has no room for the tables of its qcow2 image; make room, and repeat the command"
    )]
    NoRoom,
    /// Its thread does not answer.
    #[error("it does not answer; check its storage")]
    Silent,
    /// Its requests in flight take too long.
    #[error(
        "its requests in flight did not complete in {} s, and it goes on as soon as they are; check its \
         storage, or try again under less load",
        FREEZE_MAX.as_secs()
    )]
    Slow,
}
