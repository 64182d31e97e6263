// SPDX-License-Identifier: Apache-2.0
//! Disks and their options for the next start of the daemon: the files of the configuration directory.
//!
//! | Disk | `save` | Then it is |
//! |---|---|---|
//! | of a command | writes a new file with its present options | of the directory |
//! | of the directory | writes its present limits, cache mode and treatment of errors into its file | of the directory |
//!
//! `--save` of a verb writes only the part of them that the verb changes ([`Live`]) into the file of such a disk.
//! No reload runs meanwhile. The next one finds the file and the disk alike.

use super::config_file::{self, NewConfig};
use super::live::Live;
use super::{Disks, Force, Image, Mode, Origin, Removed, Slot, changing};
use crate::disk_options;
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::values::{Burst, Cache, IoTimeout, OnReadError};
use serde_json::Value;
use std::cell::Cell;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use vhost_user::Status;

impl Disks {
    /// Writes the file of a disk, with its present options. `part`: the options that are written into a file that
    /// exists; `go_on`: the client still waits for its turn. Returns the path of the file.
    ///
    /// # Errors
    /// [`Failure`] if there is no directory or no such disk, the disk does not answer, or the file cannot be written.
    /// It is as before then, unless the error names the file of another disk of its limit group.
    pub fn save(
        &self,
        name: &str,
        part: Live,
        mut go_on: impl FnMut() -> bool,
    ) -> Result<PathBuf, Failure> {
        let what = format!("save the disk {name}");
        let failed = |why: String| Failure::told(&what, why);
        let path = self.config_path(&what, name)?;
        let _turn = self.turn(&what, format!("the saving of the disk {name}"), &mut go_on)?;
        let (args, origin, control, image) = {
            let state = self.lock();
            state.check_free(&what)?;
            let entry = state.entry(name)?;
            (entry.args.clone(), entry.origin, entry.control.clone(), entry.image.clone())
        };
        // In this turn: an earlier status could lack the change of another client, which has saved it.
        let status = &changing::status(&what, &control)?;
        let now = present(args.clone(), status);
        let of_group = match part.has("limit-") {
            true => self.prepare_group(name, status).map_err(failed)?,
            false => Vec::new(),
        };
        match origin {
            Origin::Directory => {
                let args = part.put(&now, args);
                let config = NewConfig::prepare_live(&path, &args, part).map_err(failed)?;
                config.replace(false).map_err(failed)?;
            }
            Origin::Command => {
                let args = of_new_file(now, image.as_ref()).map_err(failed)?;
                config_file::create(&path, &args).map_err(failed)?;
            }
        }
        if let Some(entry) = self.lock().with_device(&control) {
            // Not those from before the write: another command may have changed the rest.
            let args = saved(entry.args.clone(), origin, status, part).map_err(failed)?;
            (entry.args, entry.origin) = (args, Origin::Directory);
        }
        for (other, config) in of_group {
            config.replace(false).map_err(failed)?;
            match self.lock().table.get_mut(&other) {
                Some(Slot::Served(entry)) => entry.args = with_limits(entry.args.clone(), status),
                Some(Slot::Failed(it)) => {
                    it.args = it.args.take().map(|args| with_limits(args, status))
                }
                _ => {}
            }
        }
        Ok(path)
    }

    /// Writes the limits of the group of a disk into new files of its other disks, where they differ: the next start
    /// would give the group those of one of them.
    fn prepare_group(
        &self,
        name: &str,
        status: &Status,
    ) -> Result<Vec<(String, NewConfig)>, String> {
        let Some(group) = status.limit_group.as_deref() else { return Ok(Vec::new()) };
        let of_group = |args: &DiskArgs| {
            args.limit_group.as_deref() == Some(group)
                && args.limits().is_set()
                && args.limits() != status.limits
        };
        let others: Vec<_> = {
            let state = self.lock();
            let found = state.table.iter().filter_map(|(other, slot)| match slot {
                // The file of a disk that is stopping may have gone.
                Slot::Served(entry) if entry.origin == Origin::Directory && !entry.stop.asked() => {
                    Some((other, &entry.args))
                }
                Slot::Failed(failed) => Some((other, failed.args.as_ref()?)),
                _ => None,
            });
            found
                .filter(|(other, args)| *other != name && of_group(args))
                .map(|(other, args)| (other.clone(), args.clone()))
                .collect()
        };
        let prepare = |(other, args): (String, DiskArgs)| {
            let path = self.config_path("save", &other).map_err(|failure| failure.why)?;
            let config = NewConfig::prepare_live(&path, &with_limits(args, status), Live::Limits)?;
            Ok((other, config))
        };
        others.into_iter().map(prepare).collect()
    }

    /// Saves a disk that was added a moment ago, and removes it if that fails.
    pub(super) fn save_added(&self, name: &str) -> Result<(), Failure> {
        self.save(name, Live::All, || true).map(drop).inspect_err(|_| {
            if let Err(failure) = self.remove(name, Force::Yes, || true) {
                tracing::error!(%failure, "the disk stays, and is not saved");
            }
        })
    }

    /// Refuses to save a served disk whose file cannot be written, before a command changes the disk. Writes a file
    /// beside the present one, and removes it.
    ///
    /// # Errors
    /// As [`Disks::save`].
    pub fn check_save_of(&self, name: &str) -> Result<(), Failure> {
        let what = format!("save the disk {name}");
        let failed = |why: String| Failure::told(&what, why);
        let path = self.config_path(&what, name)?;
        let (args, origin, image) = {
            let state = self.lock();
            let entry = state.entry(name)?;
            (entry.args.clone(), entry.origin, entry.image.clone())
        };
        match origin {
            Origin::Directory => {
                NewConfig::prepare_live(&path, &args, Live::All).map(drop).map_err(failed)
            }
            Origin::Command => {
                self.check_save(name)?;
                let args = of_new_file(args, image.as_ref()).map_err(failed)?;
                config_file::check_create(&path, &args).map_err(failed)
            }
        }
    }

    /// Refuses to save a disk that has no place for its file.
    ///
    /// # Errors
    /// [`Failure`] if there is no directory, or a file of that name.
    pub fn check_save(&self, name: &str) -> Result<(), Failure> {
        let what = format!("save the disk {name}");
        let path = self.config_path(&what, name)?;
        match path.symlink_metadata() {
            Ok(_) => {
                let why = format!("{} exists", path.display());
                Err(Failure::run(what, why, "remove or rename that file"))
            }
            Err(_) => Ok(()),
        }
    }

    /// The path of the file of a disk, if there is one.
    pub fn present_file_of(&self, name: &str) -> Option<PathBuf> {
        let path = self.config_path("", name).ok()?;
        path.symlink_metadata().is_ok().then_some(path)
    }

    /// Removes the file of a disk, and then the disk. No upgrade and no reload comes in between.
    ///
    /// # Errors
    /// [`Failure`] if the disk has no file of its own, or that cannot be removed: the disk stays. Otherwise as
    /// [`Disks::remove`].
    pub fn remove_with_file(
        &self,
        name: &str,
        force: Force,
        go_on: impl Fn() -> bool,
    ) -> Result<Removed, Failure> {
        let what = format!("remove the file of the disk {name}");
        let path = self.config_path(&what, name)?;
        let act = format!("the removal of the disk {name}");
        let turn = self.turn(&what, act, &mut || go_on())?;
        {
            let state = self.lock();
            state.check_free(&what)?;
            if state.table.get(name).is_some_and(|slot| slot.origin() == Origin::Command) {
                let remedy = "drop --save for a disk without a file of its own";
                return Err(Failure::run(what, "a command has added the disk", remedy));
            }
        }
        std::fs::remove_file(&path).map_err(|error| {
            let remedy = "drop --save for a disk without a file; else let the daemon's user write to the directory \
                          (ReadWritePaths= of its unit)";
            Failure::run(what, format!("{}: {error}", path.display()), remedy)
        })?;
        if let Err(error) = backend::create::sync_directory(&path) {
            tracing::warn!(disk = name, %error, "the file is removed, and may come back after a loss of power");
        }
        // The disk is stopping when it is asked first: nothing can keep it from then on.
        let turn = Cell::new(Some(turn));
        self.remove(name, force, || {
            turn.take();
            go_on()
        })
    }

    /// All options with which a disk runs, and their source.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk.
    pub fn options_of(&self, name: &str, status: &Status) -> Result<(Value, Origin), Failure> {
        let (args, origin) = {
            let state = self.lock();
            let entry = state.entry(name)?;
            (entry.args.clone(), entry.origin)
        };
        let shown = |path: &Path| Ok::<_, Infallible>(path.display().to_string());
        let Ok(options) = disk_options::of_disk(&present(args, status), shown);
        Ok((options, origin))
    }

    fn config_path(&self, what: &str, name: &str) -> Result<PathBuf, Failure> {
        match &self.mode {
            Mode::Many(Some(directory)) => Ok(super::reload::path_of(directory, name)),
            _ => Err(Failure::run(
                what,
                "the daemon has no directory of configuration files",
                "start vhost-blk daemon with --config-dir, or drop --save",
            )),
        }
    }
}

/// The options of a disk, with those that commands have changed. The guest's choice of a cache mode is none of them.
pub(super) fn present(args: DiskArgs, status: &Status) -> DiskArgs {
    let cache = match status.cache_set {
        Some(true) => Cache::Writeback,
        Some(false) => Cache::Writethrough,
        None => args.cache,
    };
    let args = with_limits(args, status);
    DiskArgs {
        limit_group: status.limit_group.as_deref().map(str::to_owned),
        cache,
        on_error: status.errors.policies.others.into(),
        on_read_error: OnReadError::of(status.errors.policies),
        io_timeout: status.errors.io_timeout.map(IoTimeout),
        ..args
    }
}

/// The options of a disk, with the limits in force.
fn with_limits(args: DiskArgs, status: &Status) -> DiskArgs {
    let limits = status.limits;
    DiskArgs {
        limit_iops: limits.iops,
        limit_bandwidth: limits.bytes,
        limit_burst: Burst(limits.burst),
        ..args
    }
}

/// The options of a disk after a save: `args`, with what its file has new.
fn saved(args: DiskArgs, origin: Origin, status: &Status, part: Live) -> Result<DiskArgs, String> {
    let now = present(args.clone(), status);
    match origin {
        Origin::Directory => Ok(part.put(&now, args)),
        Origin::Command => absolute(now),
    }
}

/// The options of a disk in a file of its own.
fn of_new_file(args: DiskArgs, image: Option<&Image>) -> Result<DiskArgs, String> {
    let args = absolute(args)?;
    if let (Some(file), Some(image)) = (&args.blk_file, image) {
        // A client may have passed a descriptor with any path.
        super::exchange::real_path_of(file, &image.top)?;
    }
    Ok(args)
}

/// The options with paths that do not depend on the directory of the daemon.
fn absolute(args: DiskArgs) -> Result<DiskArgs, String> {
    let absolute = |path: Option<PathBuf>| {
        let made = path.map(std::path::absolute).transpose();
        made.map_err(|error| format!("a path: {error}; give an absolute one"))
    };
    let (blk_file, socket_path) =
        (absolute(args.blk_file.clone())?, absolute(args.socket_path.clone())?);
    Ok(DiskArgs { blk_file, socket_path, ..args })
}
