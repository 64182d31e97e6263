// SPDX-License-Identifier: Apache-2.0
//! The new storage of a mirror: made, locked, and compared with the old one.

use super::plan::Plan;
use crate::disk::{self, From};
use crate::failure::Failure;
use crate::image::inherit;
use crate::image::place::{self, Place};
use crate::options::DiskArgs;
use crate::values::LockMode;
use backend::Info;
use backend::create::{Allocation, allocate, remove_own};
use backend::file::identity_of;
use backend::lock::{Access, LockError, lock_image};
use qcow2::AllowBacking;
use qcow2::create::{CLUSTER_BYTES, NewImage, Preallocation};
use qcow2::target::Target;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The new storage before it has its name. The drop removes a new file.
pub(super) struct New {
    pub(super) target: Target,
    /// The place of a new file.
    place: Option<Place>,
    /// The open storage with its lock.
    lock: File,
    path: PathBuf,
    capacity_bytes: u64,
}

/// The new storage with its name, locked. Without [`Named::keep`] a new file is removed.
pub(super) struct Named {
    /// Path of a new file.
    made: Option<PathBuf>,
    /// Held until the opened disk has the lock, too.
    lock: File,
}

impl Named {
    /// The identity of the copied storage.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn identity(&self) -> Result<(u64, u64), String> {
        identity(&self.lock)
    }

    /// Leaves the file.
    pub(super) fn keep(mut self) {
        self.made = None;
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if let Some(path) = &self.made {
            remove_own(path, &self.lock);
        }
    }
}

/// The disk whose place the new storage takes.
pub(super) struct Model {
    pub(super) name: String,
    pub(super) args: DiskArgs,
    /// Its properties, without wrappers.
    pub(super) info: Info,
}

impl New {
    /// Makes or opens the storage, and locks it. The guest would see the same disk in it.
    ///
    /// # Errors
    /// [`Failure`]; there is no new file.
    pub(super) fn make(plan: &Plan, model: &Model) -> Result<New, Failure> {
        let what = format!("{} {}", super::WHAT, model.name);
        let told = |told: String| Failure::told(&what, told);
        let place = match plan.is_device() {
            true => None,
            false => Some(Place::take_locked(plan.path(), model.args.lock == LockMode::Auto)?),
        };
        if let Some(place) = &place {
            let failed = |why| place::failure(plan.path(), plan.capacity_bytes(), why);
            fill(plan, place.file()).map_err(failed)?;
        }
        let path = place.as_ref().map_or(plan.path(), |place| place.part()).to_owned();
        let lock = match &place {
            Some(place) => place.file().try_clone().map_err(no_descriptor),
            None => open_locked(&path, &model.args),
        };
        let lock = lock.map_err(told)?;
        let locked = identity(&lock).map_err(told)?;
        let info = examine(&plan.next(&model.args, &path), plan, locked)?;
        check_size(plan, &info).map_err(told)?;
        vhost_user::seen(&model.info, info).map_err(|why| told(vhost_user::differs(&why)))?;
        let target = match plan.is_qcow2() {
            true => {
                Target::open(&path, locked, true, AllowBacking::Off).map_err(|why| why.to_string())
            }
            false => lock.try_clone().map(Target::of_raw).map_err(no_descriptor),
        };
        let target = target.map_err(told)?;
        check_is_at(&path, &lock).map_err(told)?;
        let (path, capacity_bytes) = (plan.path().to_owned(), plan.capacity_bytes());
        Ok(New { target, place, lock, path, capacity_bytes })
    }

    /// Path of the incomplete file.
    pub(super) fn part(&self) -> Option<&Path> {
        self.place.as_ref().map(Place::part)
    }

    /// Checks that the copied storage still has its path, which the next start of the disk opens.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn check_path(&self) -> Result<(), String> {
        check_is_at(self.part().unwrap_or(&self.path), &self.lock)
    }

    /// Everything that was not written reads as zeroes.
    pub(super) fn is_blank(&self) -> bool {
        self.place.is_some()
    }

    /// Gives the durable storage its name.
    ///
    /// # Errors
    /// Cause and remedy; there is no new file.
    pub(super) fn name(self) -> Result<Named, String> {
        let New { target, place, lock, path, capacity_bytes } = self;
        // The tables of an image have one user at a time.
        drop(target);
        let made = match place {
            None => None,
            Some(place) => {
                place.fill(capacity_bytes).map_err(|failure| failure.to_string())?;
                Some(path)
            }
        };
        Ok(Named { made, lock })
    }
}

/// Makes the empty image, with owner and mode of the old one.
fn fill(plan: &Plan, file: &File) -> io::Result<()> {
    if plan.old().is_file() {
        inherit(plan.old(), file)?;
    }
    if !plan.is_qcow2() {
        allocate(file, plan.capacity_bytes(), Allocation::Sparse)?;
        return file.sync_all();
    }
    let image = NewImage {
        size_bytes: plan.capacity_bytes(),
        cluster_bytes: CLUSTER_BYTES,
        backing: None,
        preallocation: Preallocation::Off,
    };
    image.check().map_err(io::Error::other)?;
    image.write(file)?;
    file.sync_all()
}

/// Opens a block device, and locks it, also for a disk without a lock: another user would lose its data.
fn open_locked(path: &Path, args: &DiskArgs) -> Result<File, String> {
    let file = File::options().read(true).write(true).open(path);
    let file = file
        .map_err(|why| format!("{}: {why}; let the daemon's user write to it", path.display()))?;
    match lock_image(&file, path, Access::Write) {
        Err(LockError::Refused { .. }) if args.lock == LockMode::Off => Ok(file),
        locked => locked.map(|()| file).map_err(|why| why.to_string()),
    }
}

fn no_descriptor(why: io::Error) -> String {
    format!("{why}; raise the limit on open files (ulimit -n)")
}

fn identity(file: &File) -> Result<(u64, u64), String> {
    let found = file.metadata().map_err(|why| format!("{why}; check the new storage"))?;
    Ok(identity_of(&found))
}

/// Refuses a path that names another storage than the locked one.
fn check_is_at(path: &Path, locked: &File) -> Result<(), String> {
    let shown = path.display();
    let found = fs::metadata(path)
        .map_err(|why| format!("{shown}: {why}; give the new storage its path back"))?;
    if identity_of(&found) == identity(locked)? {
        return Ok(());
    }
    Err(format!(
        "{shown}: another file or device than the copied one is at this path by now; give the copied \
         one its path back, and repeat the command"
    ))
}

/// The properties of the disk in the storage.
fn examine(args: &DiskArgs, plan: &Plan, identity: (u64, u64)) -> Result<Info, Failure> {
    if plan.is_qcow2() {
        let path = args.blk_file.clone().into_iter().collect::<Vec<_>>();
        return disk::examine_qcow2(args, &path);
    }
    let from = From::Locked { identity, first_bytes: Some(plan.capacity_bytes()), known: None };
    Ok(disk::examine(args, from)?.0)
}

/// A block device has to be large enough.
fn check_size(plan: &Plan, info: &Info) -> Result<(), String> {
    let (wanted, present) = (plan.capacity_bytes(), info.capacity_sectors * 512);
    if present >= wanted {
        return Ok(());
    }
    Err(format!(
        "{} has {present} bytes, and the disk {wanted}; give a device that is as large or larger",
        plan.path().display()
    ))
}
