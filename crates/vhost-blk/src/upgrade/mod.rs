// SPDX-License-Identifier: Apache-2.0
//! Replaces the program of a running daemon while its guests run.
//!
//! | Step | Actor | If it fails |
//! |---|---|---|
//! | 1. hold | no disk comes or goes until the end ([`crate::disks::Held`]) | refused |
//! | 2. check | the new program, as a child, reads the options and the present state | refused |
//! | 3. stop | all disks stop their queues at the same time ([`vhost_user::Frozen`]) | refused; the queues start |
//! | | the tables of qcow2 images are durable | the same |
//! | 4. exec | the control client's thread, with the state in a memory file | refused; the queues start |
//! | 5. take over | the new program, in the same process (`restore`) | a disk is lost, or the process ends |
//!
//! The process keeps its id, its control group and its open files, and so the locks of the images.

mod check;
mod error;
mod exec;
mod passed;
mod program;
mod restore;
mod state;

pub use check::{check, check_daemon};
pub use error::{Obstacle, UpgradeError};
pub use passed::{Clusters, Disk, Image, Parts, Socket, Sockets, Storage};
pub use program::{CHECK_ANSWER, CHECK_COMMAND};
pub use restore::{Taken, TakenClient, TakenDisk, TakenParts, TakenSocket, Upgraded, take};
pub use state::ImageOptions;

use crate::control::codec::Channel;
use crate::disks::{Disks, Held};
use crate::signals::Gate;
use crate::{log, notify, os};
use rustix::time::{ClockId, clock_gettime};
use state::{ClientState, FORMAT, ProgramState};
use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};
use vhost_user::{Control, Exported, Frozen, Posted};

/// The variable that names the memory file to the new program: its process id and its descriptor.
const VARIABLE: &str = "VHOST_BLK_UPGRADE";
/// Maximum wait for the present states of the disks, while their queues run.
const SNAPSHOT_MAX: Duration = Duration::from_secs(2);
/// Maximum wait for the stop of all disks: one with slow storage delays the others no longer.
const FREEZE_MAX: Duration = Duration::from_secs(2);

/// Descriptors that both programs need for a moment: files of the check and of the state, and the
/// look at the open ones.
const SPARE_DESCRIPTORS: u64 = 16;
/// Descriptors that the new program needs for a moment to continue a disk: those of the replay of the
/// negotiation (`vhost_user`), and copies of passed ones.
const SPARE_DESCRIPTORS_OF_DISK: u64 = 4;

/// Everything that an upgrade passes on, besides the disks.
pub struct Upgrader {
    sockets: Sockets,
    gate: Gate,
    in_progress: Mutex<()>,
}

/// The client that asks for an upgrade.
pub struct Caller<'a> {
    /// Its connection.
    pub channel: &'a Channel,
    /// It waits for an answer.
    pub wants_answer: bool,
}

impl Upgrader {
    /// An upgrader of a program with these sockets, until it is asked to stop.
    pub fn new(sockets: Sockets, gate: Gate) -> Self {
        Upgrader { sockets, gate, in_progress: Mutex::new(()) }
    }

    /// Replaces this program by `program`, by default by the present file of this program. The new
    /// one serves `disks` and answers `caller`. Returns only if that fails.
    pub fn upgrade(
        &self,
        disks: &Disks,
        program: Option<&Path>,
        caller: &Caller<'_>,
    ) -> UpgradeError {
        let Err(error) = self.try_upgrade(disks, program, caller);
        tracing::warn!(%error, "no upgrade");
        error
    }

    fn try_upgrade(
        &self,
        disks: &Disks,
        program: Option<&Path>,
        caller: &Caller<'_>,
    ) -> Result<Infallible, UpgradeError> {
        let _only_one = match self.in_progress.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(UpgradeError::Busy),
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
        };
        let held = disks.hold()?;
        check_descriptors(held.all().len())?;
        // Before any guest waits for it.
        log::flush_for_exec().map_err(UpgradeError::Log)?;
        let path = program::choose(program)?;
        let args: Vec<OsString> = std::env::args_os().collect();
        let present = gather(&held, Control::snapshot, SNAPSHOT_MAX, Obstacle::Silent)?;
        program::check(&path, &args, &self.state(disks, caller, &held, present)?)?;
        let all = held.all().iter();
        let (frozen, are_frozen) =
            parted(answers(&held, all, Control::freeze, FREEZE_MAX, Obstacle::Slow));
        let passed =
            frozen.and_then(|frozen| self.pass_on(disks, &held, &frozen, &path, &args, caller));
        // The caller hears of the failure when the disks serve again: each answers after that. One that is too slow
        // to stop goes on as soon as its requests are complete.
        let stopped = held.all().iter().zip(are_frozen).filter(|(_, is_frozen)| *is_frozen);
        let stopped = stopped.map(|(disk, _)| disk);
        answers(&held, stopped, Control::snapshot, SNAPSHOT_MAX, Obstacle::Silent).for_each(drop);
        passed
    }

    /// Executes the new program. The disks are drained, and nothing touches them.
    fn pass_on(
        &self,
        disks: &Disks,
        held: &Held<'_>,
        frozen: &[Frozen],
        path: &Path,
        args: &[OsString],
        caller: &Caller<'_>,
    ) -> Result<Infallible, UpgradeError> {
        let settle = |disk: &&Disk| disk.begin_settling();
        at_once(held.all().iter(), settle, FREEZE_MAX, |disk, settling, left| {
            disk.settled(settling, left).map_err(|why| disk.refused(why))
        })
        .collect::<Result<(), _>>()?;
        let stopped_at = frozen.iter().map(|disk| disk.stopped_at_ns).min();
        let exported = frozen.iter().map(|disk| disk.exported.clone()).collect();
        let mut state = self.state(disks, caller, held, exported)?;
        state.stopped_at_ns = stopped_at.unwrap_or_else(now_ns);
        let exec = || {
            // A later SIGHUP stays pending for the new program.
            state.reload_is_due = disks.reload_is_due();
            exec(path, args, &state)
        };
        match self.gate.pass(exec) {
            Some(source) => Err(UpgradeError::Exec { path: path.to_owned(), source }),
            None => Err(UpgradeError::Ending),
        }
    }

    /// The state of the program, with those of the devices of its disks.
    fn state(
        &self,
        all: &Disks,
        caller: &Caller<'_>,
        held: &Held<'_>,
        exported: Vec<Exported>,
    ) -> Result<ProgramState, UpgradeError> {
        let mut disks = Vec::with_capacity(exported.len());
        for (disk, exported) in held.all().iter().zip(exported) {
            disks.push(disk.state(exported).map_err(|why| disk.refused(why))?);
        }
        Ok(ProgramState {
            format: FORMAT,
            from: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            stopped_at_ns: now_ns(),
            control: self.sockets.control.state(),
            metrics: self.sockets.metrics.as_ref().map(Socket::state),
            client: ClientState {
                fd: caller.channel.as_fd().as_raw_fd(),
                wants_answer: caller.wants_answer,
                unread: caller.channel.unread().to_vec(),
            },
            reload_is_due: false,
            failed: held.failed().to_vec(),
            disks,
            log_level: log::set(),
            pidfile: all.pidfile.get().map(Socket::state),
            watchers: all.events.readers(),
        })
    }
}

/// Checks that the new program can open `disks` disks.
fn check_descriptors(disks: usize) -> Result<(), UpgradeError> {
    let needed = SPARE_DESCRIPTORS + SPARE_DESCRIPTORS_OF_DISK * disks as u64;
    match os::open_files_left().map_err(UpgradeError::System)? {
        Some(left) if left < needed => Err(UpgradeError::Descriptors { left, needed }),
        _ => Ok(()),
    }
}

/// Asks all disks at the same time, and waits for their answers no longer than `patience`. Drops
/// all answers if one is missing.
fn gather<T>(
    held: &Held<'_>,
    ask: impl Fn(&Control) -> Posted<T>,
    patience: Duration,
    obstacle: Obstacle,
) -> Result<Vec<T>, UpgradeError> {
    answers(held, held.all().iter(), ask, patience, obstacle).collect()
}

/// Asks these disks at the same time. Their answers come within `patience`; the rest are `obstacle`.
fn answers<'a, T>(
    held: &'a Held<'_>,
    disks: impl Iterator<Item = &'a Disk>,
    ask: impl Fn(&Control) -> Posted<T>,
    patience: Duration,
    obstacle: Obstacle,
) -> impl Iterator<Item = Result<T, UpgradeError>> {
    let ask = move |disk: &&Disk| ask(&disk.control);
    at_once(disks, ask, patience, move |disk, posted, left| {
        posted.wait(Some(left)).ok_or_else(|| match posted.is_lost() {
            true if held.is_stopping() => UpgradeError::Ending,
            true => disk.refused(Obstacle::Silent),
            false => disk.refused(obstacle.clone()),
        })
    })
}

/// Asks all disks before the first wait for an answer. `wait` gets the time that is left of `patience` for all waits
/// together.
fn at_once<D, A, R>(
    disks: impl Iterator<Item = D>,
    ask: impl Fn(&D) -> A,
    patience: Duration,
    wait: impl Fn(D, A, Duration) -> R,
) -> impl Iterator<Item = R> {
    let asked: Vec<_> = disks.map(|disk| (ask(&disk), disk)).collect();
    let deadline = Instant::now() + patience;
    asked.into_iter().map(move |(answer, disk)| {
        wait(disk, answer, deadline.saturating_duration_since(Instant::now()))
    })
}

/// All answers or the first error, and which of them are no error. Drops all answers if one is missing.
fn parted<T, E>(answers: impl Iterator<Item = Result<T, E>>) -> (Result<Vec<T>, E>, Vec<bool>) {
    let answers: Vec<_> = answers.collect();
    let are_there = answers.iter().map(Result::is_ok).collect();
    (answers.into_iter().collect(), are_there)
}

fn exec(program: &Path, args: &[OsString], state: &ProgramState) -> io::Error {
    let file = match state.write() {
        Ok(file) => file,
        Err(error) => return error,
    };
    let mut pass = state.descriptors();
    pass.insert(file.as_raw_fd());
    let place = format!("{}:{}", std::process::id(), file.as_raw_fd());
    notify::notify(&notify::reloading());
    let error = match log::flush_for_exec() {
        Ok(()) => exec::exec(program, args, (VARIABLE, &place), &pass),
        Err(error) => error,
    };
    notify::notify("READY=1");
    error
}

/// The monotonic clock, which all programs of this machine share.
fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_waits_for_each_disk_that_has_stopped_and_for_no_other() {
        let all = parted([Ok::<_, ()>(1), Ok(2)].into_iter());
        assert_eq!(all, (Ok(vec![1, 2]), vec![true, true]));
        // Also for those after the first one that is too slow.
        let some = parted([Ok(1), Err("slow"), Ok(3), Err("later")].into_iter());
        assert_eq!(some, (Err("slow"), vec![true, false, true, false]));
    }

    #[test]
    fn all_disks_are_asked_before_the_first_wait_and_the_waits_share_the_patience() {
        let asked = std::cell::Cell::new(0);
        let ask = |_: &i32| asked.set(asked.get() + 1);
        let left: Vec<_> =
            at_once([1, 2, 3].into_iter(), ask, Duration::from_millis(20), |_, (), left| {
                assert_eq!(asked.get(), 3);
                std::thread::sleep(left);
                left
            })
            .collect();
        assert_eq!(left[1..], [Duration::ZERO; 2]);
    }
}
