// SPDX-License-Identifier: Apache-2.0
//! Makes the disks those that the files of the configuration folder describe.
//!
//! A change of limits and of the cache mode reaches a running disk. Any other change needs a restart
//! of the disk, which happens only while no front-end is connected: not every VMM connects again.
//! Disks that a command added are not touched.

use super::{Disks, Entry, Force, Mode, NewDisk, Origin, Slot};
use crate::config;
use crate::disk::LockWait;
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::values::{self, Cache};
use data_plane::Limits;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vhost_user::{Answer, Command};

pub use super::turn::NoReload;

/// Maximum wait for a disk; the others come next.
const DISK_MAX: Duration = Duration::from_secs(10);

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
}

impl Report {
    /// The report of a disk with a change, or with a failure.
    fn of(disk: String, done: Result<Option<Outcome>, Failure>) -> Option<Report> {
        Some(match done {
            Ok(outcome) => Report { disk, outcome: outcome?, reason: None },
            Err(failure) => {
                Report { disk, outcome: Outcome::Failed, reason: Some(failure.to_string()) }
            }
        })
    }
}

type Files = BTreeMap<String, Result<DiskArgs, Failure>>;

impl Disks {
    /// Reads the folder again, as [`Disks::request_reload`] has asked for, after another act.
    ///
    /// # Errors
    /// As [`Disks::reload_now`].
    pub fn reload_as_requested(self: &Arc<Self>) -> Result<Vec<Report>, Failure> {
        let turn = self.no_reload();
        // A signal from here on asks for the next one.
        self.reload_waits.store(false, Ordering::Relaxed);
        self.reload_now(&turn)
    }

    /// Reads the folder again. A disk without a change has no report.
    ///
    /// # Errors
    /// [`Failure`] if there is no folder, or it cannot be read: no disk is touched.
    pub fn reload_now(self: &Arc<Self>, _no_other: &NoReload<'_>) -> Result<Vec<Report>, Failure> {
        self.reload_is_due.store(false, Ordering::Relaxed);
        let Mode::Many(Some(folder)) = &self.mode else {
            return Err(Failure::run(
                "read the configuration again",
                "the daemon has no folder of configuration files",
                "start vhost-blk daemon with --config-dir",
            ));
        };
        let files = read_folder(folder)?;
        let mut reports = self.remove_missing(&files);
        reports.extend(self.apply_all(files));
        for Report { disk, outcome, reason } in &reports {
            match reason {
                None => tracing::info!(disk, outcome = outcome.name(), "configuration"),
                Some(reason) => tracing::error!(disk, reason, "configuration"),
            }
        }
        Ok(reports)
    }

    /// Removes the disks whose files have gone.
    fn remove_missing(&self, files: &Files) -> Vec<Report> {
        let missing: Vec<String> = {
            let state = self.lock();
            let of_folder = state.table.iter().filter(|(name, slot)| {
                let is_of_folder =
                    matches!(slot, Slot::Served(entry) if entry.origin == Origin::Folder);
                is_of_folder && !files.contains_key(*name)
            });
            of_folder.map(|(name, _)| name.clone()).collect()
        };
        let remove = |disk: String| {
            let done = self.remove(&disk, Force::No, until(DISK_MAX));
            Report::of(disk, done.map(|_| Some(Outcome::Removed)))
        };
        missing.into_iter().filter_map(remove).collect()
    }

    /// Gives the disks the options of their files. A new disk that does not start is tried again after all
    /// others, as its image may be in use: all of these wait at the same time.
    fn apply_all(self: &Arc<Self>, files: Files) -> Vec<Report> {
        let (mut reports, mut late) = (Vec::new(), Vec::new());
        for (name, file) in files {
            let is_new = !self.lock().table.contains_key(&name);
            let args = file.as_ref().ok().filter(|_| is_new).cloned();
            let done = file.and_then(|file| self.apply(&name, file, LockWait::No));
            match args.filter(|_| done.is_err()) {
                Some(args) => late.push((name, args)),
                None => reports.extend(Report::of(name, done)),
            }
        }
        let wait = LockWait::from_now();
        for (name, args) in late {
            let done = self.apply(&name, args, wait);
            reports.extend(Report::of(name, done));
        }
        reports
    }

    /// Gives the disk the options of its file. `None`: it has them. `wait`: for the image of a new disk.
    fn apply(
        self: &Arc<Self>,
        name: &str,
        args: DiskArgs,
        wait: LockWait,
    ) -> Result<Option<Outcome>, Failure> {
        let of_table = |entry: &Entry| (entry.args.clone(), entry.origin);
        let known = match self.lock().table.get(name) {
            Some(Slot::Served(entry)) => Some(of_table(entry)),
            _ => None,
        };
        match known {
            None => self.add_of_folder(name, args, wait).map(|()| Some(Outcome::Added)),
            Some((_, Origin::Command)) => Err(Failure::run(
                format!("use the file of {name}"),
                "a command has added another disk of this name",
                "remove that disk, or rename the file",
            )),
            Some((old, _)) if old == args => Ok(None),
            Some((old, _)) if with_live_options_of(&old, &args) == args => {
                self.change(name, &old, args).map(|()| Some(Outcome::Changed))
            }
            Some((old, _)) => self.restart(name, old, args).map(|()| Some(Outcome::Restarted)),
        }
    }

    fn add_of_folder(
        self: &Arc<Self>,
        name: &str,
        args: DiskArgs,
        wait: LockWait,
    ) -> Result<(), Failure> {
        self.add(NewDisk {
            name: name.to_owned(),
            args,
            origin: Origin::Folder,
            image: None,
            taken: None,
            wait,
        })
    }

    /// Changes a running disk.
    fn change(&self, name: &str, old: &DiskArgs, new: DiskArgs) -> Result<(), Failure> {
        let limits = new.limits();
        match &new.limit_group {
            group if (group, limits) == (&old.limit_group, old.limits()) => {}
            Some(group) => {
                let limits = limits.is_set().then_some(limits);
                self.order(name, Command::JoinLimits(group.as_str().into(), limits))?;
            }
            None => {
                if old.limit_group.is_some() {
                    self.order(name, Command::Limit(Limits::NONE))?;
                }
                self.order(name, Command::Limit(limits))?;
            }
        }
        if old.cache != new.cache {
            self.order(name, Command::SetCache(new.cache == Cache::Writeback))?;
        }
        if let Some(Slot::Served(entry)) = self.lock().table.get_mut(name) {
            entry.args = new;
        }
        Ok(())
    }

    fn order(&self, name: &str, command: Command) -> Result<(), Failure> {
        let what = format!("change the disk {name}");
        match self.post(name, command)?.wait(Some(DISK_MAX)) {
            Some(Answer::Refused(why)) => Err(Failure::told(what, why)),
            Some(_) => Ok(()),
            None => Err(Failure::run(what, "it does not answer", "check its storage")),
        }
    }

    /// Starts a disk again with other options, or with the old ones if it does not start.
    fn restart(self: &Arc<Self>, name: &str, old: DiskArgs, new: DiskArgs) -> Result<(), Failure> {
        let stop = Arc::clone(&self.lock().entry(name)?.stop);
        if !stop.request_if_idle() {
            return Err(Failure::run(
                format!("restart the disk {name} with its changed options"),
                "a front-end is connected",
                "stop its VMM and reload again; limits and the cache mode change without a restart",
            ));
        }
        // It may have gone already.
        if let Err(failure) = self.remove(name, Force::No, until(DISK_MAX))
            && self.lock().entry(name).is_ok()
        {
            return Err(failure);
        }
        self.add_of_folder(name, new, LockWait::from_now()).inspect_err(|_| {
            if let Err(failure) = self.add_of_folder(name, old, LockWait::from_now()) {
                tracing::error!(%failure, "the disk does not start with its old options either");
            }
        })
    }
}

/// Returns whether the time has not passed, from now on.
fn until(patience: Duration) -> impl Fn() -> bool {
    let deadline = Instant::now() + patience;
    move || Instant::now() < deadline
}

/// `old` with those options of `new` that a running disk can adopt.
fn with_live_options_of(old: &DiskArgs, new: &DiskArgs) -> DiskArgs {
    DiskArgs {
        limit_iops: new.limit_iops,
        limit_bandwidth: new.limit_bandwidth,
        limit_burst: new.limit_burst,
        limit_group: new.limit_group.clone(),
        cache: new.cache,
        ..old.clone()
    }
}

/// The disks that the files `NAME.toml` of a folder describe.
fn read_folder(folder: &Path) -> Result<Files, Failure> {
    let failed = |error: std::io::Error| {
        let what = format!("read the folder {}", folder.display());
        Failure::run(what, error, "check --config-dir")
    };
    let mut files = Files::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let args = values::disk_name(&name)
            .map_err(|remedy| {
                let what = format!("use the configuration {}", path.display());
                Failure::usage(what, "its name is not the name of a disk", remedy)
            })
            .and_then(|_| config::disk_of_file(&path));
        files.insert(name, args);
    }
    Ok(files)
}
