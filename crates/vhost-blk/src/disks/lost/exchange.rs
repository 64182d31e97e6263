// SPDX-License-Identifier: Apache-2.0
//! A disk goes on with the device that has come back at its path.
//!
//! | Step | If it fails |
//! |---|---|
//! | 1. the identity of the device is compared with that of the old one | the disk waits for the right device |
//! | 2. the device is opened and locked, with the size of the disk | it is closed, and tried again at the next look |
//! | 3. [`vhost_user::Control::replace_storage`] compares the properties that the guest has read, and exchanges the storage | the same |
//! | 4. the disk adopts a larger size, and its halt ends | the operator resumes it |
//!
//! Completed writes that the guest has not flushed are as safe as the volatile cache of the engine is. A page cache
//! of this host loses them with the device, so a disk with one is refused.

use super::device::Device;
use super::{Follower, Found};
use crate::disk::{self, From, LockWait, Opened};
use crate::disks::Disks;
use crate::disks::exchange::{Bitmaps, New, Source, replacement_with};
use crate::disks::replacing::{DRAIN_MAX, wait};
use crate::disks::turn::Holder;
use crate::stop::Stop;
use backend::file::{File as ImageFile, identity_of};
use data_plane::Health;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use vhost_user::{Answer, Command};

const WHAT: &str = "exchange the device of";
/// The refusal of a disk whose image has tables in memory.
const IS_QCOW2: &str = "the device has a qcow2 image, whose tables may be lost in part; check it (vhost-blk check), and start the disk again";
/// The refusal of a disk that uses the page cache.
const IS_CACHED: &str = "completed writes may be lost with the host's page cache (--direct off); check the guest's data, and start the disk again";
/// The refusal while threads of the daemon work on the old device.
const AT_WORK: &str =
    "it is being backed up, merged or mirrored; the disk gets the device after the end of that";
/// The end of a refusal during other changes.
const AFTER: &str = "the disk gets the device after that";
/// Bytes of the trial read.
const TRIAL_BYTES: u64 = 512;

/// A disk as it is before a look.
struct View {
    source: Source,
    device: Device,
    stop: Arc<Stop>,
    health: Arc<Health>,
    is_at_work: bool,
}

impl View {
    fn path(&self) -> &Path {
        self.source.args.blk_file.as_deref().unwrap_or(Path::new(""))
    }

    fn top(&self) -> &Arc<ImageFile> {
        &self.source.image.top
    }

    /// Returns whether the open device cannot be read, as one without a connection.
    fn fails(&self) -> bool {
        let read = self.top().reader().and_then(|mut it| it.read(0..TRIAL_BYTES).map(drop));
        read.is_err_and(|why| is_of_device(&why))
    }
}

/// Returns whether an error is one of the device, and not of this process.
fn is_of_device(why: &io::Error) -> bool {
    let of_device =
        [libc::EIO, libc::ENODEV, libc::ENXIO, libc::ENOMEDIUM, libc::ENOLINK, libc::ETIMEDOUT];
    why.kind() == io::ErrorKind::UnexpectedEof
        || why.raw_os_error().is_some_and(|errno| of_device.contains(&errno))
}

impl Follower {
    /// Looks at the device of the disk, and exchanges it for the one at its path if it is gone. `None`: an upgrade
    /// is in progress, or the disk has gone.
    pub(super) fn look(&self) -> Option<Found> {
        // The device may not answer, and the exchange of the program would wait for this thread.
        let _sign = self.disks.wait_for_storage(&self.name, WHAT).ok()?;
        Some(self.found())
    }

    fn found(&self) -> Found {
        let Some(view) = self.view() else { return Found::Present };
        let here = Device::at_path(view.path());
        let other = here.filter(|here| !here.is(&view.device));
        if view.device.is_present() && !(other.is_some() && view.fails()) {
            return Found::Present;
        }
        match other.filter(Device::is_present) {
            None => Found::Gone,
            Some(other) => match self.go_on_with(&view, &other) {
                Ok(()) => Found::Present,
                Err(reason) => Found::Refused(reason),
            },
        }
    }

    fn view(&self) -> Option<View> {
        let source = self.disks.source(&self.name, WHAT).ok()?;
        let state = self.disks.lock();
        let entry = state.entry(&self.name).ok()?;
        // Another disk may have the name by now.
        let is_it = Arc::ptr_eq(&source.control, &self.control)
            && Arc::ptr_eq(&entry.control, &self.control);
        Some(View {
            source,
            device: entry.watch.device.clone().filter(|_| is_it)?,
            stop: Arc::clone(&entry.stop),
            health: Arc::clone(&entry.health),
            is_at_work: entry.backup.is_taken() || entry.job.is_some(),
        })
    }

    /// Makes the disk go on with the device at the path.
    ///
    /// # Errors
    /// The reason with the remedy; the disk is as before.
    fn go_on_with(&self, view: &View, other: &Device) -> Result<(), String> {
        check(view, other)?;
        // It may hang: nothing else waits for it.
        let opened = Self::open(view, other)?;
        let act = format!("the exchange of the device of {}", self.name);
        // Each new reason is an event.
        let refused = |holder: Holder| format!("{} is in progress; {AFTER}", holder.act());
        let guard = self.disks.try_turn(act).map_err(refused)?;
        match self.view() {
            Some(now) if now.is_at_work => return Err(AT_WORK.to_owned()),
            Some(now) if Arc::ptr_eq(now.top(), view.top()) => {}
            _ => return Err(format!("the disk has changed; {AFTER}")),
        }
        self.exchange(view, opened)?;
        drop(guard);
        let name = &view.source.name;
        if !other.has_identity() {
            tracing::warn!(
                disk = name,
                "the device that is back has no identity to compare: only its size and its blocks are those of before"
            );
        }
        self.disks.adopt_size(name);
        self.end_halt(view);
        Ok(())
    }

    fn open(view: &View, other: &Device) -> Result<Opened, String> {
        let source = &view.source;
        let first_bytes = source.image.disk.info().capacity_sectors * 512;
        let from = from(view, first_bytes)?;
        let args = source.args.clone();
        let opened =
            disk::open(&args, from, LockWait::No).map_err(|failure| failure.to_string())?;
        let is_other =
            |top: &Arc<ImageFile>| super::growth::device_number(top) == Some(other.number());
        if !opened.top.as_ref().is_some_and(is_other) || !other.is_present() {
            return Err(super::GONE.to_owned());
        }
        let bytes = opened.disk.info().capacity_sectors * 512;
        if bytes < first_bytes {
            return Err(format!(
                "the device that is back has {bytes} bytes, fewer than the {first_bytes} of the disk; enlarge it"
            ));
        }
        Ok(opened)
    }

    /// Exchanges the storage of the disk.
    fn exchange(&self, view: &View, opened: Opened) -> Result<(), String> {
        let source = &view.source;
        let (sender, new) = channel::<New>();
        let layers = Arc::clone(&source.layers);
        let replace = move |_: &_| {
            replacement_with(opened, &layers, &sender, Box::new(|| Ok(())), Bitmaps::End)
        };
        let order = source.control.replace_storage(Box::new(replace));
        let stop = Arc::clone(&view.stop);
        wait(&order, DRAIN_MAX, || !stop.asked()).map_err(|unfinished| unfinished.to_string())?;
        new.try_iter().for_each(|new| self.disks.go_on_in(source, None, new));
        Ok(())
    }

    /// Makes a halted disk try its failed requests again.
    fn end_halt(&self, view: &View) {
        let name = &view.source.name;
        if view.health.take_failed_flush() {
            tracing::warn!(
                disk = name,
                "its guest got an error of a FLUSH: check the guest, then resume the disk (vhost-blk ctl resume)"
            );
            return;
        }
        if view.top().has_failed_sync() {
            tracing::warn!(
                disk = name,
                "a sync has failed before the device was back, and completed writes may be lost: check the guest's data"
            );
        }
        if let Some(Answer::Refused(why)) =
            self.control.post(Command::EndHalt).wait(Some(DRAIN_MAX))
        {
            tracing::warn!(disk = name, why, "it stays halted: resume it (vhost-blk ctl resume)");
        }
    }
}

/// Refuses a device that the disk cannot go on with.
fn check(view: &View, other: &Device) -> Result<(), String> {
    view.device.check_same(other)?;
    let is_direct = || view.top().opened_as().map_or(true, |open| open.direct);
    match () {
        () if view.source.image.qcow2.is_some() => Err(IS_QCOW2.to_owned()),
        () if !is_direct() => Err(IS_CACHED.to_owned()),
        () if view.is_at_work => Err(AT_WORK.to_owned()),
        () => Ok(()),
    }
}

/// The way to open the device at the path. A node that the old device had, too, has its lock.
fn from(view: &View, first_bytes: u64) -> Result<From, String> {
    let failed =
        |why: io::Error| format!("{}: {why}; bring the device back", view.path().display());
    let here = fs::metadata(view.path()).map_err(failed)?;
    let open = view.top().metadata().map_err(failed)?;
    Ok(match (here.dev(), here.ino()) == (open.dev(), open.ino()) {
        true => From::Locked {
            identity: identity_of(&here),
            first_bytes: Some(first_bytes),
            known: None,
        },
        false => From::Returned { first_bytes },
    })
}

impl Disks {
    /// The watch of the device of a disk.
    pub(in crate::disks) fn watched(path: Option<&Path>, top: &ImageFile) -> Option<Device> {
        Device::of_disk(path.unwrap_or(Path::new("")), top)
    }
}
