// SPDX-License-Identifier: Apache-2.0
//! Bitmaps: the parts of a disk that its guest has changed since a backup.
//!
//! A bitmap has a base, the last complete backup of it. Each backup of a bitmap begins new notes at
//! its moment, while the disk is drained:
//!
//! | That backup | Base | Notes |
//! |---|---|---|
//! | is in progress | the backup before | those before the moment are kept aside |
//! | is complete | that backup | those since its moment |
//! | fails or is cancelled | the backup before | those before and after the moment together |
//!
//! A bitmap without a base does not outlive the backup that should become its base. A clean end of the
//! disk keeps the bitmaps for its next start, and an upgrade passes them on ([`super::kept`]).

use super::Disks;
pub(crate) use super::base::Base;
use super::replacing::{DRAIN_MAX, wait};
use crate::failure::Failure;
use backend::file::File as ImageFile;
use backend::wrap::Written;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Maximum bitmaps of a disk.
pub(crate) const BITMAPS_MAX: usize = 16;

/// The refusal after a migration.
const ELSEWHERE: &str =
    "the guest was on another host since its last backup, which noted no changes";

/// The refusal after the device of the disk was away.
const AWAY: &str =
    "its device was away since its last backup, and other programs may have written to it";

/// The remedy if an incremental backup is not possible.
pub(super) const FULL: &str = "make a full backup with --bitmap";

/// The path of a file that need not exist, without symbolic links to its directory.
///
/// # Errors
/// The error of the system call.
pub(crate) fn real_path(path: &Path) -> io::Result<PathBuf> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    Ok(fs::canonicalize(directory)?.join(path.file_name().unwrap_or_default()))
}

/// A bitmap, from the moment of a backup on.
pub(crate) struct Bitmap {
    written: Arc<Written>,
    state: Mutex<State>,
}

struct State {
    base: Option<Base>,
    /// The notes before the moment, while the backup is in progress.
    before: Option<Arc<Written>>,
    /// The image, and the number of times that its lock had been given up.
    image: (Arc<ImageFile>, u32),
    /// The device was away.
    was_away: bool,
}

impl Bitmap {
    /// New notes on a drained disk, after those of `before`.
    pub(crate) fn begin(
        top: &Arc<ImageFile>,
        capacity_bytes: u64,
        before: Option<&Bitmap>,
    ) -> Bitmap {
        let written = Arc::new(Written::new(capacity_bytes));
        let image = (Arc::clone(top), top.handovers());
        let base = before.and_then(|before| before.lock().sound_base().cloned());
        let before = before.map(|before| Arc::clone(&before.written));
        Bitmap { written, state: Mutex::new(State { base, before, image, was_away: false }) }
    }

    /// The notes of an earlier program, which had the same image and this backup.
    pub(super) fn of_earlier(top: &Arc<ImageFile>, written: Arc<Written>, base: Base) -> Bitmap {
        let image = (Arc::clone(top), top.handovers());
        let state = State { base: Some(base), before: None, image, was_away: false };
        Bitmap { written, state: Mutex::new(state) }
    }

    /// The backup that notes for a later program build on.
    ///
    /// # Errors
    /// The cause, if there is none.
    pub(super) fn base_to_keep(&self) -> Result<Base, &'static str> {
        let state = self.lock();
        match (&state.base, state.problem()) {
            (Some(base), None) if state.before.is_none() => Ok(base.clone()),
            (Some(_), Some(problem)) => Err(problem),
            _ => Err("its backup was not complete"),
        }
    }

    /// The notes since the moment.
    pub(crate) fn written(&self) -> &Arc<Written> {
        &self.written
    }

    /// Ends the backup in progress with success.
    pub(crate) fn complete(&self, base: Base) {
        let mut state = self.lock();
        (state.base, state.before) = (Some(base), None);
    }

    /// Ends the backup in progress without success: the notes before it are valid again.
    pub(crate) fn give_back(&self) {
        if let Some(before) = self.lock().before.take() {
            self.written.note_all(&before);
        }
    }

    /// Returns whether a backup is complete.
    pub(crate) fn has_base(&self) -> bool {
        self.lock().base.is_some()
    }

    /// The backup that the next one can build on.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(crate) fn base(&self) -> Result<Base, String> {
        let base = self.sound_base()?;
        base.check()?;
        Ok(base)
    }

    /// As [`Bitmap::base`], without a look at the files of that backup, whose storage may hang.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(crate) fn sound_base(&self) -> Result<Base, String> {
        let state = self.lock();
        let problem = || format!("{}; {FULL}", state.problem().unwrap_or(ELSEWHERE));
        state.sound_base().cloned().ok_or_else(problem)
    }

    /// Follows its disk to another image of the same content.
    pub(super) fn go_on_in(&self, top: &Arc<ImageFile>) {
        let mut state = self.lock();
        if state.problem().is_none() {
            state.image = (Arc::clone(top), top.handovers());
        }
    }

    /// Ends the notes as the base of a backup: other programs may have written to the storage.
    pub(super) fn end(&self) {
        self.lock().was_away = true;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The reason for which another program may have written the image.
    fn problem(&self) -> Option<&'static str> {
        let (image, handovers) = &self.image;
        match image.handovers() == *handovers {
            _ if self.was_away => Some(AWAY),
            true => None,
            false => Some(ELSEWHERE),
        }
    }

    fn sound_base(&self) -> Option<&Base> {
        self.base.as_ref().filter(|_| self.problem().is_none())
    }
}

/// A row of [`Disks::bitmaps`].
#[derive(Debug)]
pub struct BitmapFacts {
    /// Name of the bitmap.
    pub name: String,
    /// Size of a part in bytes.
    pub part_bytes: u64,
    /// Bytes of the parts that were changed since the last backup began, complete or not.
    pub changed_bytes: u64,
    /// Path of the last complete backup, or the address of its export.
    pub backup: Option<String>,
    /// The moment of its content.
    pub since: Option<SystemTime>,
    /// A backup of the bitmap is in progress.
    pub is_busy: bool,
    /// The reason for which an incremental backup would be refused.
    pub problem: Option<String>,
}

impl Bitmap {
    fn facts(&self, name: String) -> BitmapFacts {
        let problem = self.base().err();
        let state = self.lock();
        BitmapFacts {
            name,
            part_bytes: self.written.part_bytes(),
            changed_bytes: self.written.bytes(),
            backup: state.base.as_ref().map(Base::to_string),
            since: state.base.as_ref().map(|base| base.at),
            is_busy: state.before.is_some() || state.base.is_none(),
            problem: problem.filter(|_| state.base.is_some()),
        }
    }
}

/// The refusal for a bitmap that does not exist. `lost`: the reason for which earlier ones are lost.
pub(crate) fn no_bitmap(bitmap: &str, lost: Option<&str>) -> String {
    let lost = lost.unwrap_or("a crash or a kill of the daemon ends bitmaps");
    format!("it has no bitmap {bitmap} ({lost}); make a full backup with --bitmap {bitmap}")
}

impl Disks {
    /// The bitmaps of a disk. Looks at the files of their backups, whose storage may hang ([`Disks::look_for`]).
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk.
    pub fn bitmaps(&self, name: &str) -> Result<Vec<BitmapFacts>, Failure> {
        let layers = Arc::clone(&self.lock().entry(name)?.layers);
        Ok(layers.bitmaps().into_iter().map(|(name, bitmap)| bitmap.facts(name)).collect())
    }

    /// Removes a bitmap. Waits for the requests in flight as long as `go_on` says so, and at most 10 s.
    ///
    /// # Errors
    /// [`Failure`]; the bitmap is as before.
    pub fn remove_bitmap(
        &self,
        name: &str,
        bitmap: &str,
        mut go_on: impl FnMut() -> bool,
    ) -> Result<(), Failure> {
        let what = format!("remove the bitmap {bitmap} of {name}");
        let refused = |told: String| Failure::told(&what, told);
        let act = format!("the removal of a bitmap of the disk {name}");
        let _turn = self.turn(&what, act, &mut go_on)?;
        let (layers, control) = {
            let state = self.lock();
            let entry = state.entry(name)?;
            (Arc::clone(&entry.layers), Arc::clone(&entry.control))
        };
        let missing = || format!("it has no bitmap {bitmap}; see vhost-blk ctl bitmaps {name}");
        if !layers.bitmaps().contains_key(bitmap) {
            return Err(refused(missing()));
        }
        let (of_order, missing) = (bitmap.to_owned(), missing());
        let order = layers.change(&control, move |stack| {
            if stack.is_copied() {
                return Err(crate::backup::BUSY.to_owned());
            }
            stack.bitmaps.remove(&of_order).map(drop).ok_or(missing)
        });
        wait(&order, DRAIN_MAX, go_on).map_err(|told| refused(told.to_string()))?;
        Ok(())
    }
}
