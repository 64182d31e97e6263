// SPDX-License-Identifier: Apache-2.0
//! Backups of running disks: a copy of the content at one moment, while the guest goes on writing.
//!
//! | Step | Thread |
//! |---|---|
//! | 1. The disk's [`Slot`] is taken: it has one backup at a time | of the client |
//! | 2. The target is made: a temporary file beside its place (`Place`), or a connection to an export | of the target |
//! | 3. The layer that holds writes back ([`backend::wrap::CopyFirst`]) is put around the image while no request is in flight: the moment of the copy (`moment`). In place of that the file is cloned, if it can be (`clone`). The bitmap of the backup begins new notes | of the disk |
//! | 4. `Copier` reads; the client's thread tells the progress and cancels if the client goes | `backup` |
//! | | the target is written, or the clone is made durable | of the target |
//! | 5. The complete, durable target gets its name, and becomes the base of the bitmap | of the target, of the client |
//! | 6. The layer is taken off, if there is one | of the disk |
//!
//! Only one thread works on the target (`TargetThread`). One that hangs keeps that thread, and neither the client, nor the
//! guest for longer than `disks::converge::STUCK`, nor the image or the [`Slot`] of the disk.
//!
//! A failure of a step leaves no new image, and the disk as it was, with its bitmaps. An export may have a part of the
//! copy then: it differs from the last complete backup only in parts that the bitmap has noted, so that the next complete
//! one mends it. No failure of the target reaches the guest: its writes go on at the latest with [`Clusters::end`].

mod clone;
mod copier;
mod destination;
mod digest;
mod moment;
mod reading;
mod slot;
mod source;
mod target;

pub use destination::Destination;
pub use moment::Extent;
pub use slot::{Cancelled, Cause, Slot};
pub use source::Image;
pub(crate) use source::ImageReader;

use crate::disks::Disks;
use crate::disks::converge::{STUCK, Sign, TargetThread, Unfinished};
use crate::disks::layers::Layers;
use crate::events::DiskEvents;
use crate::failure::Failure;
use crate::image::place;
use crate::nbd::NbdError;
use crate::pace::Bandwidth;
use crate::values::Reflink;
use backend::wrap::Clusters;
use copier::{Acting, Copier, CopyError};
use destination::Made;
use moment::{Before, Begun, begin, end};
use reading::Reading;
use slot::Taken;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use vhost_user::Control;

/// Interval of the look at the client, and of the progress.
const TICK: Duration = Duration::from_millis(100);

/// The refusal of an act that a backup excludes.
pub const BUSY: &str =
    "it is being backed up; wait for the end of that, or cancel it (vhost-blk ctl backup --cancel)";

/// The refusal of a second backup of a disk.
pub const ANOTHER: &str = "another backup of it is in progress; wait for its end, or cancel it (vhost-blk ctl backup --cancel)";

/// The order of a backup.
#[derive(Debug)]
pub struct Order {
    /// Name of the disk.
    pub disk: String,
    /// The place of the copy.
    pub target: Destination,
    /// The part of the disk that is copied.
    pub extent: Extent,
    /// Bytes per second that are read at most, besides those that the guest is about to overwrite.
    pub bandwidth: Arc<Bandwidth>,
    /// Read the complete copy again, and compare it with what was read from the disk.
    pub verify: bool,
    /// Share the space of the image.
    pub reflink: Reflink,
}

/// The work of the thread of a backup.
type Work = Box<dyn FnOnce() -> Result<(), CopyError> + Send>;

/// The progress of a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are copied, or lie in holes.
    pub copied_bytes: u64,
    /// Size of the disk at the moment of the copy, or of its changes since the backup before.
    pub total_bytes: u64,
    /// The copy shares the space of the image.
    pub is_shared: bool,
}

/// A disk to back up.
pub struct Source {
    /// Its image.
    pub image: Image,
    /// Reaches its device.
    pub control: Arc<Control>,
    /// The layers around its image.
    pub(crate) layers: Arc<Layers>,
    /// Learns of the begin and the end.
    pub(crate) events: Arc<DiskEvents>,
    /// Its only backup.
    pub taken: Taken,
}

/// Makes a backup. `goes_on` learns of the progress after the moment of the copy, and cancels by
/// `false`.
///
/// # Errors
/// [`Failure`]. No target remains then, except an incomplete one on storage that hangs.
pub fn run(
    disks: &Arc<Disks>,
    order: &Arc<Order>,
    goes_on: &mut dyn FnMut(Option<Progress>) -> bool,
) -> Result<Progress, Failure> {
    let (what, disk) = (order.what(), &*order.disk);
    // The drained disk then has little to write for a clone, and the copier for its look at holes, while the guest
    // waits. Storage that hangs holds nothing else here.
    let goes_on = RefCell::new(goes_on);
    let is_wanted = || (goes_on.borrow_mut())(None);
    let synced = disks.sync_for((disk, &what), is_wanted);
    if order.reflink != Reflink::Never || !is_wanted() {
        synced?;
    }
    // Nothing else exchanges the storage at this moment, nor from then on: the slot is taken.
    let act = format!("the begin of a backup of the disk {disk}");
    let turn = disks.turn(&what, act, &mut || is_wanted())?;
    let sign = disks.use_target(disk, &what, "backup", order.target.path())?;
    // The slot is dropped last: the end of the disk waits for it, and the image is unlocked then.
    let source = disks.source_of_backup(&what, order)?;
    drop(turn);
    let clusters = Arc::clone(source.taken.clusters());
    let size_bytes = clusters.capacity_bytes();
    let before = Before::of(&source.layers, &order.extent, &order.target);
    let before = before.map_err(|told| Failure::told(&what, told))?;
    let base = before.as_ref().map(|before| before.base.clone());
    let (of_thread, parts) = (Arc::clone(order), source.taken.parts());
    let open = move || Made::of(&of_thread, base.as_ref(), size_bytes, &parts);
    let is_wanted = || is_wanted() && !clusters.has_ended();
    let thread = TargetThread::start(what, Arc::clone(&sign) as Sign, open, is_wanted)?;
    let acting = Acting { acts: thread.acts().clone(), clusters: Arc::clone(&clusters) };
    let backup = Backup { order, source: &source, acting, sign, was_cancelled: Cell::new(false) };
    let done = backup.make(before, goes_on.into_inner());
    let was_cancelled = backup.was_cancelled.get();
    drop(backup);
    if done.is_err() {
        source.taken.fail();
    }
    // Removes an incomplete image.
    if !thread.close() {
        tracing::warn!(disk, target = %order.target, "the target does not answer; an incomplete file is removed when it does");
    }
    if done.is_ok() {
        tracing::info!(disk, target = %order.target, "the backup is complete");
    }
    let Source { image, control, layers, events, taken } = source;
    // The image is unlocked before the end of the disk goes on.
    drop((image, layers, control));
    let told = done.as_ref().map(drop);
    taken.end(&events, told.map_err(|failure| (failure.to_string(), was_cancelled)));
    done
}

/// A backup whose target is open.
struct Backup<'a> {
    order: &'a Arc<Order>,
    source: &'a Source,
    acting: Acting,
    /// Of each thread that waits for the storage of the disk, or of the target.
    sign: Arc<()>,
    /// A client, or the end of the disk, has ended it.
    was_cancelled: Cell<bool>,
}

impl Backup<'_> {
    fn make(
        &self,
        before: Option<Before>,
        goes_on: &mut dyn FnMut(Option<Progress>) -> bool,
    ) -> Result<Progress, Failure> {
        let (order, source, clusters) = (self.order, self.source, &self.acting.clusters);
        let act = self.plan_clone(&mut || goes_on(None))?;
        let reader = source.image.reader().map_err(|why| {
            Failure::run(order.what(), why, "raise the limit on open files (ulimit -n)")
        })?;
        let mut is_wanted = || goes_on(None) && !clusters.has_ended();
        let (layers, control) = (&source.layers, &source.control);
        let extent = (&order.extent, before);
        let begun = begin(layers, control, extent, act, clusters, &mut is_wanted);
        let begun = begun.map_err(|told| match is_wanted() {
            true => Failure::told(order.what(), told),
            false => self.cancelled(),
        })?;
        source.taken.begin(&source.events);
        let is_shared = begun.is_shared;
        let total_bytes = clusters.total_bytes();
        let complete_one = Progress { copied_bytes: total_bytes, total_bytes, is_shared };
        let mut goes_on = || {
            let copied_bytes = if is_shared { total_bytes } else { clusters.freed_bytes() };
            goes_on(Some(Progress { copied_bytes, ..complete_one })) && !clusters.has_ended()
        };
        let target = self.acting.clone();
        let (work, reading): (Work, _) = match is_shared {
            true => (Box::new(move || target.with(Made::finish_clone)), Reading::default()),
            false => {
                let copier = Copier::new(reader, target, order);
                let reading = copier.reading();
                (copier.work(order.verify), reading)
            }
        };
        let copied = copy(clusters, Arc::clone(&self.sign), work, &reading, &mut goes_on);
        let copied = copied.map_err(|error| self.failure(error));
        let outcome = copied.and_then(|()| self.complete(&begun, &mut goes_on));
        clusters.end();
        drop(begun);
        if !is_shared || outcome.is_err() {
            end(layers, control);
        }
        outcome.map(|()| complete_one)
    }

    fn cancelled(&self) -> Failure {
        self.was_cancelled.set(true);
        self.order.cancelled(self.source.taken.cause())
    }

    fn failure(&self, error: CopyError) -> Failure {
        match error {
            CopyError::Cancelled | CopyError::Server(NbdError::HungUp) => self.cancelled(),
            error => self.order.failure(self.acting.clusters.capacity_bytes(), error),
        }
    }

    /// Plans a clone, if the backup may be one.
    fn plan_clone(&self, goes_on: &mut dyn FnMut() -> bool) -> Result<Option<clone::Act>, Failure> {
        if self.order.reflink == Reflink::Never {
            return Ok(None);
        }
        let (order, image) = (Arc::clone(self.order), self.source.image.clone());
        let size_bytes = self.acting.clusters.capacity_bytes();
        let parts = self.source.taken.parts();
        let plan = move |made: &mut Made| Ok(made.plan_clone(&order, &image, size_bytes, &parts));
        let planned = self.acting.with_client(plan, goes_on);
        planned.map_err(|error| self.failure(error))?
    }

    /// Ends a complete copy, and makes it the base of the bitmap. A cancel has an effect until the image has its
    /// name.
    fn complete(&self, begun: &Begun, goes_on: &mut dyn FnMut() -> bool) -> Result<(), Failure> {
        let decided = Arc::new(AtomicBool::new(false));
        let (of_act, order) = (Arc::clone(&decided), Arc::clone(self.order));
        let size_bytes = self.acting.clusters.capacity_bytes();
        let before = begun.noting.as_ref().and_then(|noting| noting.before.clone());
        let at = begun.at;
        let complete = move |made: &mut Made| {
            Ok(made.complete(&order, size_bytes, (at, before.as_ref()), &of_act))
        };
        let completed = match goes_on() {
            true => self.acting.acts.act(complete, || {
                match goes_on() || decided.swap(true, Ordering::AcqRel) {
                    // It is wanted, or the image has its name already.
                    true => Ok(()),
                    false => Err(Unfinished::Ended(String::new())),
                }
            }),
            false => Err(Unfinished::Ended(String::new())),
        };
        let base = completed.unwrap_or_else(|_| Err(self.cancelled()))?;
        if let Some(noting) = &begun.noting {
            noting.complete(base);
        }
        Ok(())
    }
}

impl Order {
    fn what(&self) -> String {
        format!("back up the disk {}", self.disk)
    }

    fn cancelled(&self, cause: Option<Cause>) -> Failure {
        let (why, remedy) = match cause {
            Some(Cause::Command) => ("cancelled by a client", "repeat it if the copy is wanted"),
            Some(Cause::Disk) => {
                ("cancelled by the end of the disk", "repeat it when it is served")
            }
            None => ("cancelled: its client has gone", "repeat it, and let its client run"),
        };
        Failure::run(self.what(), why, remedy)
    }

    fn failure(&self, size_bytes: u64, error: CopyError) -> Failure {
        let what = self.what();
        match (error, &self.target) {
            (CopyError::Write(why), Destination::File { path, .. }) => {
                place::failure(path, size_bytes, why)
            }
            (CopyError::Server(error), Destination::Export(address)) => {
                let server = address.socket.display();
                Failure::told(what, format!("the NBD server at {server}: {error}"))
            }
            (error, _) => Failure::told(what, error),
        }
    }
}

/// Copies on a thread of its own: a client that does not take the progress delays no write of the guest, and neither
/// does a read that hangs, whose thread is left to the storage, with the `sign` of its work.
fn copy(
    clusters: &Arc<Clusters>,
    sign: Arc<()>,
    work: Work,
    reading: &Reading,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<(), CopyError> {
    let (sender, result) = channel();
    let body = move || {
        let done = work();
        drop(sign); // the next command finds no work in progress
        let _ = sender.send(done); // it waits
    };
    let thread = std::thread::Builder::new().name("backup".into()).spawn(body);
    thread.map_err(|why| {
        clusters.end();
        CopyError::Thread(why)
    })?;
    loop {
        if !goes_on() {
            clusters.end();
        }
        if reading.is_stuck(clusters, STUCK) {
            let was_ended = clusters.has_ended();
            clusters.end();
            return Err(if was_ended { CopyError::Cancelled } else { CopyError::StuckRead });
        }
        match result.recv_timeout(TICK) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => return Err(CopyError::Cancelled),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies a disk whose storage hangs in a read. `is_wanted`: a write of the guest waits for it.
    fn copy_of_hung(is_wanted: bool, goes_on: bool) -> Result<(), CopyError> {
        let clusters = Arc::new(Clusters::new(1 << 20).unwrap());
        let (reading, sign) = (Reading::default(), Arc::new(()));
        let (storage, answers) = channel::<()>();
        let of_work = reading.clone();
        let work: Work = Box::new(move || {
            let hung_up = |_| CopyError::Server(NbdError::HungUp);
            of_work.with(is_wanted, || answers.recv()).map_err(hung_up)
        });
        let copied = copy(&clusters, Arc::clone(&sign), work, &reading, &mut || goes_on);
        assert!(clusters.has_ended());
        assert_eq!(Arc::strong_count(&sign), 2, "the thread still waits for the storage");
        drop(storage);
        copied
    }

    #[test]
    fn a_read_of_the_disk_that_hangs_ends_the_copy_and_frees_the_guest() {
        let copied = copy_of_hung(true, true);
        assert!(matches!(copied, Err(CopyError::StuckRead)), "{copied:?}");
    }

    #[test]
    fn a_cancel_waits_for_a_read_that_hangs_no_longer_than_a_write_of_the_guest() {
        let copied = copy_of_hung(false, false);
        assert!(matches!(copied, Err(CopyError::Cancelled)), "{copied:?}");
    }
}
