// SPDX-License-Identifier: Apache-2.0
//! The time of an upgrade: no disk comes, goes or gets other options.

use super::kept::Passing;
use super::reload::HeldTurn;
use super::{Disks, Mode, Slot, State};
use crate::disk_options;
use crate::failure::Failure;
use crate::upgrade::{self, ImageOptions, Obstacle, UpgradeError};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Wait of an upgrade for threads of the control plane that wait for the storage of a disk.
const STORAGE_PATIENCE: Duration = Duration::from_millis(500);

/// All disks, none of which comes or goes until this is dropped.
pub struct Held<'a> {
    disks: &'a Disks,
    all: Vec<upgrade::Disk>,
    failed: Vec<String>,
    _turn: HeldTurn<'a>,
}

impl Disks {
    /// Holds the disks for an upgrade. Until the drop, [`Disks::add`] and [`Disks::remove`] are
    /// refused and [`Disks::reload_now`] waits.
    ///
    /// # Errors
    /// [`UpgradeError`] if there is a reload or a snapshot, or a disk is coming or going.
    pub fn hold(&self) -> Result<Held<'_>, UpgradeError> {
        let turn = self.try_turn("an upgrade".to_owned());
        let turn = turn.map_err(|holder| UpgradeError::Turn(holder.told()))?;
        let mut state = self.lock();
        // Most waits for a storage, and most tries of a disk that fails, are short. A reload has such tries, too.
        let deadline = Instant::now() + STORAGE_PATIENCE;
        while state.treatments == 0 && state.waits_for_storage() && Instant::now() < deadline {
            drop(state);
            thread::sleep(STORAGE_PATIENCE / 50);
            state = self.lock();
        }
        let all = state.to_pass_on(&self.mode)?;
        if state.treatments > 0 {
            return Err(UpgradeError::Turn("a reload still treats disks".to_owned()));
        }
        let failed = state.table.iter().filter(|(_, slot)| matches!(slot, Slot::Failed(_)));
        let failed = failed.map(|(name, _)| name.clone()).collect();
        state.is_held = true;
        Ok(Held { disks: self, all, failed, _turn: turn })
    }
}

impl State {
    /// Returns whether a command or another try of a disk waits for its storage.
    fn waits_for_storage(&self) -> bool {
        self.storage_waits.first().is_some() || self.table.values().any(Slot::is_tried_again)
    }

    fn to_pass_on(&self, mode: &Mode) -> Result<Vec<upgrade::Disk>, UpgradeError> {
        let disk = |(name, slot): (&String, &Slot)| {
            let name = name.clone();
            let entry = match slot {
                Slot::Starting(_) => {
                    return Err(UpgradeError::Disk { name, why: Obstacle::Coming });
                }
                Slot::Failed(_) => return Ok(None),
                Slot::Served(_) if self.stopping => return Err(UpgradeError::Ending),
                Slot::Served(entry) if entry.stop.asked() => {
                    return Err(UpgradeError::Disk { name, why: Obstacle::Going });
                }
                Slot::Served(entry) => entry,
            };
            if let Some(work) = entry.work() {
                return Err(UpgradeError::Disk { name, why: Obstacle::Work(work) });
            }
            let options = match mode {
                Mode::One => None,
                // The options of a file and of a command are UTF-8.
                Mode::Many(_) => disk_options::of_disk(&entry.args, utf8).ok(),
            };
            let is_exchanged = entry.is_exchanged && *mode == Mode::One;
            Ok(Some(upgrade::Disk {
                name,
                options,
                exchanged: is_exchanged.then(|| ImageOptions::of(&entry.args)),
                origin: entry.origin,
                control: entry.control.clone(),
                bitmaps: Passing::of(&entry.layers),
                clusters: upgrade::Clusters::default(),
                unmapped_before: entry.image.as_ref().map_or(0, |image| image.unmapped_before),
                parts: entry.parts.clone(),
            }))
        };
        let all = self.table.iter().filter_map(|slot| disk(slot).transpose());
        let all = all.collect::<Result<_, _>>()?;
        // Their threads may not be interruptible, and the exchange of the program waits for all threads.
        if let Some((path, act)) = self.targets.first() {
            return Err(UpgradeError::Target { path: path.to_owned(), act });
        }
        if let Some(name) = self.first_given_up() {
            return Err(UpgradeError::GivenUp { name: name.to_owned() });
        }
        match self.storage_waits.first() {
            Some(name) => Err(UpgradeError::Storage { name: name.to_owned() }),
            None => Ok(all),
        }
    }

    /// Refuses a change of the table during an upgrade.
    pub(super) fn check_free(&self, what: &str) -> Result<(), Failure> {
        match self.is_held {
            false => Ok(()),
            true => Err(Failure::run(what, "an upgrade is in progress", "try again after it")),
        }
    }
}

fn utf8(path: &Path) -> Result<String, ()> {
    path.to_str().map(str::to_owned).ok_or(())
}

impl Held<'_> {
    /// The disks, by name.
    pub fn all(&self) -> &[upgrade::Disk] {
        &self.all
    }

    /// Names of the disks of the directory that have failed to start.
    pub fn failed(&self) -> &[String] {
        &self.failed
    }

    /// Returns whether the process is about to end.
    pub fn is_stopping(&self) -> bool {
        self.disks.is_stopping()
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.disks.lock().is_held = false;
        self.disks.changed.notify_all();
    }
}
