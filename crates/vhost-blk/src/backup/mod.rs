// SPDX-License-Identifier: Apache-2.0
//! Backups of running disks: a copy of the content at one moment, while the guest goes on writing.
//!
//! | Step | Thread |
//! |---|---|
//! | 1. The disk's [`Slot`] is taken: it has one backup at a time | of the client |
//! | 2. The target is made: a temporary file beside its place (`Place`), or a connection to an export | of the client |
//! | 3. The layer that holds writes back ([`backend::wrap::CopyFirst`]) is put around the image while no request is in flight: the moment of the copy (`moment`). In place of that the file is cloned, if it can be (`clone`). The bitmap of the backup begins new notes | of the disk |
//! | 4. `Copier` copies, or the clone is made durable; the client's thread tells the progress and cancels if the client goes | `backup` |
//! | 5. The complete, durable target gets its name, and becomes the base of the bitmap | of the client |
//! | 6. The layer is taken off, if there is one | of the disk |
//!
//! A failure of a step leaves no new image, and the disk as it was, with its bitmaps. An export may have a part of the
//! copy then: it differs from the last complete backup only in parts that the bitmap has noted, so that the next complete
//! one mends it. No failure of the target reaches the guest: its writes go on at the latest with [`Clusters::end`].

mod clone;
mod copier;
mod destination;
mod digest;
mod moment;
mod slot;
mod source;
mod target;

pub use destination::Destination;
pub use moment::Extent;
pub use slot::Slot;
pub use source::Image;
pub(crate) use source::ImageReader;

use crate::disks::Disks;
use crate::disks::bitmaps::Base;
use crate::disks::layers::Layers;
use crate::failure::Failure;
use crate::image::place;
use crate::nbd::NbdError;
use crate::values::{Format, Reflink};
use backend::wrap::Clusters;
use clone::Clone;
use copier::{Copier, CopyError};
use destination::{End, Made};
use moment::{Before, Begun, begin, end};
use slot::Taken;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use vhost_user::Control;

/// Interval of the look at the client, and of the progress.
const TICK: Duration = Duration::from_millis(100);

/// The refusal of an act that a backup excludes.
pub const BUSY: &str = "it is being backed up; wait for the end of the backup, or stop its client";

/// The order of a backup.
#[derive(Debug)]
pub struct Order<'a> {
    /// Name of the disk.
    pub disk: &'a str,
    /// The place of the copy.
    pub target: &'a Destination,
    /// The part of the disk that is copied.
    pub extent: Extent,
    /// Bytes per second that are read at most, besides those that the guest is about to overwrite.
    pub bandwidth: Option<NonZeroU64>,
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
    /// Its only backup.
    pub taken: Taken,
}

/// Makes a backup. `goes_on` learns of the progress after the moment of the copy, and cancels by
/// `false`.
///
/// # Errors
/// [`Failure`]; there is no target then.
pub fn run(
    disks: &Disks,
    order: &Order<'_>,
    goes_on: &mut dyn FnMut(Option<Progress>) -> bool,
) -> Result<Progress, Failure> {
    let what = format!("back up the disk {}", order.disk);
    if order.reflink != Reflink::Never {
        // The drained disk then has little to write. Storage that hangs holds nothing else here.
        disks.sync_image(order.disk, &what)?;
    }
    // Nothing else exchanges the storage or its options until the layer is there.
    let no_reload = disks.no_reload();
    // The slot is dropped last: the end of the disk waits for it, and the image is unlocked then.
    let Source { taken, image, control, layers } = disks.source_of_backup(order.disk, &what)?;
    let clusters = Arc::clone(taken.clusters());
    let size_bytes = clusters.capacity_bytes();
    let told = |told: String| Failure::told(&what, told);
    let failed = |error| order.failure(&what, size_bytes, error);
    let before = Before::of(&layers, &order.extent, order.target).map_err(told)?;
    let made = Made::of(order, before.as_ref(), size_bytes)?;
    if let Some(part) = made.end.part() {
        taken.has_part(part);
    }
    let (cloned, act) = Clone::plan(order, &image, &taken)?.unzip();
    let no_descriptor = |why| Failure::run(&what, why, "raise the limit on open files (ulimit -n)");
    let reader = image.reader().map_err(no_descriptor)?;
    let mut is_wanted = || goes_on(None) && !clusters.has_ended();
    let begun = begin(&layers, &control, (&order.extent, before), act, &clusters, &mut is_wanted)
        .map_err(
        |told| if is_wanted() { Failure::told(&what, told) } else { cancelled(&what) },
    )?;
    drop(no_reload);
    let is_shared = begun.is_shared;
    let (place, work) = match cloned.filter(|_| is_shared) {
        Some(clone) => clone.work(),
        None => {
            let copier = Copier::new(reader, made.target, Arc::clone(&clusters), order.bandwidth);
            (made.end, copier.work(order.verify))
        }
    };
    let total_bytes = clusters.total_bytes();
    let complete_one = Progress { copied_bytes: total_bytes, total_bytes, is_shared };
    let mut goes_on = || {
        let copied_bytes = if is_shared { total_bytes } else { clusters.freed_bytes() };
        goes_on(Some(Progress { copied_bytes, ..complete_one })) && !clusters.has_ended()
    };
    let copied = copy(&clusters, work, &place, &mut goes_on);
    // A cancel has an effect until now.
    let copied = copied.and_then(|()| if goes_on() { Ok(()) } else { Err(CopyError::Cancelled) });
    clusters.end();
    let outcome = copied.map_err(failed).and_then(|()| complete(place, order, size_bytes, &begun));
    drop(begun);
    if !is_shared || outcome.is_err() {
        end(&layers, &control);
    }
    outcome?;
    tracing::info!(disk = order.disk, target = %order.target, "the backup is complete");
    Ok(complete_one)
}

impl Order<'_> {
    fn failure(&self, what: &str, size_bytes: u64, error: CopyError) -> Failure {
        match (error, self.target) {
            (CopyError::Cancelled | CopyError::Server(NbdError::HungUp), _) => cancelled(what),
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

/// Ends a complete copy, and makes it the base of the bitmap.
fn complete(end: End, order: &Order<'_>, size_bytes: u64, begun: &Begun) -> Result<(), Failure> {
    let base = match (&end, order.target, &begun.noting) {
        (End::File(place), Destination::File { path, format }, Some(noting)) => {
            let kind = (begun.at, *format == Format::Qcow2);
            let base = Base::of(place.file(), path, kind, noting.before.as_ref());
            Some(base.map_err(|why| place::failure(path, size_bytes, why))?)
        }
        (End::Export(_), Destination::Export(address), Some(_)) => {
            Some(Base::in_export(address, begun.at))
        }
        _ => None,
    };
    if let End::File(place) = end {
        place.fill(size_bytes)?;
    }
    if let (Some(noting), Some(base)) = (&begun.noting, base) {
        noting.complete(base);
    }
    Ok(())
}

fn cancelled(what: &str) -> Failure {
    let why = "cancelled: the client has gone, or the disk is about to go";
    Failure::run(what, why, "repeat it when the disk is served")
}

/// Copies on a thread of its own.
fn copy(
    clusters: &Arc<Clusters>,
    work: Work,
    target: &End,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<(), CopyError> {
    let (sender, result) = channel();
    let body = move || {
        let _ = sender.send(work()); // it waits
    };
    let thread = std::thread::Builder::new().name("backup".into()).spawn(body);
    thread.map_err(|why| {
        clusters.end();
        CopyError::Thread(why)
    })?;
    loop {
        if !goes_on() {
            clusters.end();
            // The copier may wait for the server.
            target.hang_up();
        }
        match result.recv_timeout(TICK) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => return Err(CopyError::Cancelled),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}
