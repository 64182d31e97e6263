// SPDX-License-Identifier: Apache-2.0
//! Makes the disks those that the files of the configuration directory describe.
//!
//! A change of limits, of the cache mode and of the treatment of errors reaches a running disk. Any other change
//! needs a restart of the disk, which happens only while no front-end is connected: not every VMM connects again.
//! Disks that a command added are not touched.
//!
//! Each disk is treated by a thread of its own (`openers.rs`), and a reload waits for all of them for a bounded time:
//! storage that hangs delays no other disk, and its own disk is `starting` until it answers.

use super::changing::{self, DISK_MAX};
use super::live::Live;
use super::openers::Task;
use super::removal::{Purpose, Which};
use super::starting::Reservation;
use super::{Disks, Entry, Mode, Origin, Slot};
use crate::config;
use crate::disk::LockWait;
use crate::failure::{Failure, Sort};
use crate::options::DiskArgs;
use crate::stop::Stop;
use crate::values;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use vhost_user::Control;

pub use super::turn::HeldTurn;

/// Maximum wait of a reload, and of the start of the daemon, for the disks. They go on without it.
pub const START_MAX: Duration = Duration::from_secs(10);
/// Interval of the look for the end of the process.
const LOOK: Duration = Duration::from_millis(100);

/// The treatment of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is served from now on.
    Added,
    /// It is no longer served.
    Removed,
    /// The running disk has the changed options.
    Changed,
    /// It was stopped and started with the changed options.
    Restarted,
    /// It is still being opened.
    Starting,
    /// It runs with its old options, or not at all.
    Failed,
}

impl Outcome {
    /// Its name in the control protocol.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Added => "added",
            Outcome::Removed => "removed",
            Outcome::Changed => "changed",
            Outcome::Restarted => "restarted",
            Outcome::Starting => "starting",
            Outcome::Failed => "failed",
        }
    }
}

/// The treatment of one disk or file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Name of the disk.
    pub disk: String,
    /// Its treatment.
    pub outcome: Outcome,
    /// The reason of a failure.
    pub reason: Option<String>,
    /// Warnings of its start.
    pub warnings: Vec<String>,
}

impl Report {
    /// The report of a disk with a change, or with a failure.
    fn of(disk: String, done: Result<Option<Outcome>, Failure>) -> Option<Report> {
        let slow = || {
            let limit = START_MAX.as_secs();
            format!("it is not served yet after {limit} s; check its storage, or remove the disk")
        };
        let (outcome, reason) = match done {
            Ok(outcome) => (outcome?, (outcome? == Outcome::Starting).then(slow)),
            Err(failure) => (Outcome::Failed, Some(failure.to_string())),
        };
        Some(Report { disk, outcome, reason, warnings: Vec::new() })
    }

    /// With the warnings of the disk, if it has begun.
    fn with_warnings(self, disks: &Disks) -> Report {
        let has_begun = matches!(self.outcome, Outcome::Added | Outcome::Restarted);
        let warnings = if has_begun { disks.notices_of(&self.disk) } else { Vec::new() };
        Report { warnings, ..self }
    }

    fn log(&self) {
        let Report { disk, outcome, reason, .. } = self;
        match reason {
            None => tracing::info!(disk, outcome = outcome.name(), "configuration"),
            Some(reason) if *outcome == Outcome::Starting => {
                tracing::warn!(disk, reason, "configuration");
            }
            Some(reason) => tracing::error!(disk, reason, "configuration"),
        }
    }
}

pub(super) type Files = BTreeMap<String, Result<DiskArgs, Failure>>;

/// The treatment of a disk, which may take its time.
type Treatment = Box<dyn FnOnce() -> Result<Option<Outcome>, Failure> + Send>;

/// A treatment in progress, during which no upgrade begins: the disk may be absent for a moment.
struct Treating(Arc<Disks>);

impl Treating {
    fn begin(disks: &Arc<Disks>) -> Treating {
        disks.lock().treatments += 1;
        Treating(Arc::clone(disks))
    }
}

impl Drop for Treating {
    fn drop(&mut self) {
        self.0.lock().treatments -= 1;
    }
}

/// A served disk as a reload has found it.
pub(super) struct Known {
    pub(super) args: DiskArgs,
    pub(super) origin: Origin,
    pub(super) stop: Arc<Stop>,
    pub(super) control: Arc<Control>,
}

impl Known {
    pub(super) fn of(entry: &Entry) -> Known {
        Known {
            args: entry.args.clone(),
            origin: entry.origin,
            stop: Arc::clone(&entry.stop),
            control: Arc::clone(&entry.control),
        }
    }
}

/// The reload that a signal asks for.
///
/// | Due | State | Ends by |
/// |---|---|---|
/// | no | none is asked for, or its reload has begun | a signal |
/// | yes | its thread waits for the turn, or is about to be started | the turn |
///
/// An upgrade, which may take the turn before that thread, passes a due one on to the next program.
#[derive(Debug, Default)]
pub(super) struct ReloadRequest(AtomicBool);

impl ReloadRequest {
    /// A signal asks. Returns whether its thread has to be started: another one finds the files of now otherwise.
    fn make(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// The reload has the turn and reads the files next, or cannot begin. A signal from here on asks for the next one.
    fn end(&self) {
        self.0.store(false, Ordering::Release);
    }

    fn is_due(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Disks {
    /// Notes that a signal asks for a reload, until it begins. `false`: a thread waits for its turn already, and
    /// its reload finds the files of now.
    pub fn request_reload(&self) -> bool {
        self.reload_request.make()
    }

    /// Notes that the thread for that cannot be started.
    pub fn withdraw_reload(&self) {
        self.reload_request.end();
    }

    /// Returns whether a reload that a signal has asked for has not begun.
    pub fn reload_is_due(&self) -> bool {
        self.reload_request.is_due()
    }

    /// Reads the directory again, as [`Disks::request_reload`] has asked for, after another act.
    ///
    /// # Errors
    /// As [`Disks::reload_now`].
    pub fn reload_as_requested(self: &Arc<Self>) -> Result<Vec<Report>, Failure> {
        let turn = self.turn_of_reload();
        self.reload_request.end();
        self.reload_now(&turn)
    }

    /// Reads the directory again. A disk without a change has no report.
    ///
    /// # Errors
    /// [`Failure`] if there is no directory, or it cannot be read: no disk is touched.
    pub fn reload_now(self: &Arc<Self>, _no_other: &HeldTurn<'_>) -> Result<Vec<Report>, Failure> {
        let Mode::Many(Some(directory)) = &self.mode else {
            return Err(Failure::run(
                "read the configuration again",
                "the daemon has no directory of configuration files",
                "start vhost-blk daemon with --config-dir",
            ));
        };
        let files = read_directory(directory)?;
        // A path or an image may go from one disk to another.
        let mut reports = self.treat_all(self.missing(&files));
        let treatments = files.into_iter().map(|(name, file)| {
            let treatment = self.treatment(&name, file);
            (name, treatment)
        });
        reports.extend(self.treat_all(treatments.collect()));
        Ok(reports)
    }

    /// Carries out all treatments, and waits for their ends.
    fn treat_all(self: &Arc<Self>, treatments: Vec<(String, Treatment)>) -> Vec<Report> {
        let deadline = Instant::now() + START_MAX;
        let (sender, ends) = mpsc::channel();
        let mut waiting: BTreeSet<String> =
            treatments.iter().map(|(name, _)| name.clone()).collect();
        let tasks = treatments.into_iter().map(|(name, treatment)| {
            let (sender, treating) = (sender.clone(), Treating::begin(self));
            let disks = Arc::clone(self);
            Box::new(move || {
                let report = Report::of(name.clone(), treatment());
                let report = report.map(|report| report.with_warnings(&disks));
                drop(treating);
                report.iter().filter(|it| it.outcome != Outcome::Starting).for_each(Report::log);
                let _ = sender.send((name, report)); // the reload may not wait any more
            }) as Task
        });
        self.begin_all(tasks.collect());
        drop(sender);
        let mut reports = Vec::new();
        while !waiting.is_empty() && !self.is_stopping() {
            let left = deadline.saturating_duration_since(Instant::now());
            match ends.recv_timeout(left.min(LOOK)) {
                Ok((name, report)) => {
                    if report.as_ref().is_none_or(|it| it.outcome != Outcome::Starting) {
                        waiting.remove(&name);
                        reports.extend(report);
                    }
                }
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
                Err(_) => break,
            }
        }
        for name in waiting {
            let late = Report::of(name, Ok(Some(Outcome::Starting)));
            late.iter().for_each(Report::log);
            reports.extend(late);
        }
        reports.sort_by(|a, b| a.disk.cmp(&b.disk));
        reports
    }

    /// The removals of the disks whose files have gone.
    fn missing(self: &Arc<Self>, files: &Files) -> Vec<(String, Treatment)> {
        let state = self.lock();
        let missing = state.table.iter().filter(|(name, slot)| {
            slot.origin() == Origin::Directory && !files.contains_key(*name)
        });
        let remove = |(name, slot): (&String, &Slot)| {
            let (disks, disk, which) = (Arc::clone(self), name.clone(), Which::of(slot));
            let treatment: Treatment = Box::new(move || {
                match disks.remove_this(&disk, &which, Purpose::Removal, until(DISK_MAX)) {
                    // It has gone by itself.
                    Err(failure) if failure.sort == Sort::NoSuchDisk => Ok(None),
                    removed => removed.map(|_| Some(Outcome::Removed)),
                }
            });
            (name.clone(), treatment)
        };
        missing.map(remove).collect()
    }

    /// The treatment of a disk by its file. A name without a disk is taken at once.
    fn treatment(self: &Arc<Self>, name: &str, file: Result<DiskArgs, Failure>) -> Treatment {
        let is_vacant = matches!(self.lock().table.get(name), None | Some(Slot::Failed(_)));
        let (disks, name) = (Arc::clone(self), name.to_owned());
        let args = match file {
            Ok(args) => args,
            Err(failure) => {
                if is_vacant {
                    self.note_failed(&name, &failure);
                }
                return Box::new(move || Err(failure));
            }
        };
        if !is_vacant {
            return Box::new(move || disks.apply(&name, args));
        }
        match self.reserve(&name, Some(&args), Origin::Directory) {
            Ok(reservation) => Box::new(move || {
                disks.start_reserved(reservation, args).map(|()| Some(Outcome::Added))
            }),
            Err(failure) => Box::new(move || Err(failure)),
        }
    }

    /// Gives the disk the options of its file. `None`: it has them.
    fn apply(self: &Arc<Self>, name: &str, args: DiskArgs) -> Result<Option<Outcome>, Failure> {
        if !self.wait_for_opening(name, Instant::now() + START_MAX) {
            return Ok(Some(Outcome::Starting));
        }
        let known = match self.lock().table.get(name) {
            Some(Slot::Served(entry)) => Some(Known::of(entry)),
            _ => None,
        };
        match known {
            None => self.start_of_directory(name, args).map(|()| Some(Outcome::Added)),
            Some(Known { origin: Origin::Command, .. }) => Err(Failure::run(
                format!("use the file of {name}"),
                "a command has added another disk of this name",
                "remove that disk, or rename the file",
            )),
            Some(known) if known.stop.asked() => {
                self.start_after_end(name, &known, args).map(|()| Some(Outcome::Added))
            }
            Some(known) if known.args == args => Ok(None),
            Some(known) if Live::All.put(&args, known.args.clone()) == args => {
                self.change(name, &known, args).map(|()| Some(Outcome::Changed))
            }
            Some(known) => self.restart(name, &known, args).map(Some),
        }
    }

    /// Opens a disk of the directory, which is listed as failed if that fails.
    fn start_of_directory(self: &Arc<Self>, name: &str, args: DiskArgs) -> Result<(), Failure> {
        let reservation = self.reserve(name, Some(&args), Origin::Directory)?;
        self.start_reserved(reservation, args)
    }

    /// The same, whose name is taken.
    fn start_reserved(
        self: &Arc<Self>,
        reservation: Reservation,
        args: DiskArgs,
    ) -> Result<(), Failure> {
        let reservation = Arc::new(reservation);
        let opened = self.open_of_directory(&reservation, args.clone(), LockWait::from_now());
        opened.inspect_err(|failure| {
            reservation.fail(Some(args), failure);
        })
    }

    /// Starts a disk of the directory that a command has removed, after its end.
    fn start_after_end(
        self: &Arc<Self>,
        name: &str,
        known: &Known,
        args: DiskArgs,
    ) -> Result<(), Failure> {
        let which = Which::Served(Arc::clone(&known.stop));
        match self.remove_this(name, &which, Purpose::Restart, until(DISK_MAX)) {
            Err(failure) if failure.sort != Sort::NoSuchDisk => {
                self.start_later(known);
                Err(failure)
            }
            _ => self.start_of_directory(name, args),
        }
    }

    /// Changes a running disk.
    fn change(&self, name: &str, known: &Known, new: DiskArgs) -> Result<(), Failure> {
        changing::change(name, &known.control, &known.args, &new)?;
        if let Some(entry) = self.lock().in_table(&known.control) {
            // A snapshot may have changed the others meanwhile.
            entry.args = Live::All.put(&new, entry.args.clone());
        }
        Ok(())
    }

    /// The options in the present file of a disk; `None`: there is no file.
    pub(super) fn file_of(&self, name: &str) -> Result<Option<DiskArgs>, Failure> {
        let Mode::Many(Some(directory)) = &self.mode else { return Ok(None) };
        let path = path_of(directory, name);
        match std::fs::symlink_metadata(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            _ => options_of(name, &path).map(Some),
        }
    }
}

/// Returns whether the time has not passed, from now on.
pub(super) fn until(patience: Duration) -> impl Fn() -> bool {
    let deadline = Instant::now() + patience;
    move || Instant::now() < deadline
}

/// The file of a disk.
pub(super) fn path_of(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.toml"))
}

/// The disks that the files `NAME.toml` of a directory describe, hidden ones aside.
pub(super) fn read_directory(directory: &Path) -> Result<Files, Failure> {
    let failed = |error: std::io::Error| {
        let what = format!("read the directory {}", directory.display());
        let failure = Failure::run(what, &error, "check --config-dir");
        match error.kind() {
            // The command line is wrong.
            ErrorKind::NotFound | ErrorKind::NotADirectory => {
                Failure { sort: Sort::Usage, ..failure }
            }
            _ => failure,
        }
    };
    let mut files = Files::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        // Editors and deployment tools have hidden files beside those that they write.
        let is_hidden = |name: &OsStr| name.as_encoded_bytes().starts_with(b".");
        if path.extension().is_none_or(|extension| extension != "toml")
            || path.file_name().is_some_and(is_hidden)
        {
            continue;
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let args = options_of(&name, &path);
        files.insert(name, args);
    }
    Ok(files)
}

/// The options of a disk in its file.
fn options_of(name: &str, path: &Path) -> Result<DiskArgs, Failure> {
    values::disk_name(name).map_err(|remedy| {
        let what = format!("use the configuration {}", path.display());
        Failure::usage(what, "its name is not the name of a disk", remedy)
    })?;
    // A FIFO would wait for its writer.
    if path.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        let what = format!("read the configuration {}", path.display());
        return Err(Failure::usage(what, "it is no regular file", "write a file, or rename it"));
    }
    config::disk_of_file(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reload_that_is_asked_for_during_another_one_stays_due() {
        let request = ReloadRequest::default();
        assert!(request.make() && !request.make());
        request.end(); // the first one reads the files
        assert!(request.make(), "a signal meanwhile has a thread of its own");
        assert!(request.is_due());
        request.end();
        assert!(!request.is_due());
    }
}
