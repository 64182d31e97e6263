// SPDX-License-Identifier: Apache-2.0
//! Backups of running disks: a copy of the content at one moment, while the guest goes on writing.
//!
//! | Step | Thread |
//! |---|---|
//! | 1. The disk's [`Slot`] is taken: it has one backup at a time | of the client |
//! | 2. The target is made: a temporary file beside its place ([`Place`]) | of the client |
//! | 3. [`CopyFirst`] is put around the storage while no request is in flight: the moment of the copy | of the disk |
//! | 4. [`Copier`] copies; the client's thread tells the progress and cancels if the client goes | `backup` |
//! | 5. The complete, durable target gets its name | of the client |
//! | 6. The wrapper is taken off | of the disk |
//!
//! A failure of a step leaves no target, and the disk as it was. No failure of the target reaches the
//! guest: its writes go on at the latest with [`Clusters::end`].

mod copier;
mod slot;
mod source;

pub use slot::Slot;
pub use source::Image;

use crate::disks::Disks;
use crate::disks::replacing::{DRAIN_MAX, Unfinished, wait};
use crate::failure::Failure;
use crate::image::place::{self, Place};
use crate::values::Format;
use backend::Disk;
use backend::create::Allocation;
use backend::wrap::{Clusters, CopyFirst};
use copier::{Copier, CopyError};
use qcow2::copy::Target;
use qcow2::create::{CLUSTER_BYTES, NewImage, Preallocation};
use slot::Taken;
use source::ImageReader;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use vhost_user::{Control, Replacement};

/// Interval of the look at the client, and of the progress.
const TICK: Duration = Duration::from_millis(100);

/// The refusal of an act that a backup excludes.
pub const BUSY: &str = "it is being backed up; wait for the end of the backup, or stop its client";

/// The order of a backup.
#[derive(Debug)]
pub struct Order<'a> {
    /// Name of the disk.
    pub disk: &'a str,
    /// Absolute path of the new image.
    pub target: &'a Path,
    /// Its format.
    pub format: Format,
    /// Bytes per second that are read at most, besides those that the guest is about to overwrite.
    pub bandwidth: Option<NonZeroU64>,
}

/// The progress of a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are copied, or lie in holes.
    pub copied_bytes: u64,
    /// Size of the disk at the moment of the copy.
    pub total_bytes: u64,
}

/// A disk to back up.
pub struct Source {
    /// Its image.
    pub image: Image,
    /// Reaches its device.
    pub control: Arc<Control>,
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
    // Nothing else exchanges the storage or its options until the wrapper is there.
    let no_reload = disks.no_reload();
    // The slot is dropped last: the end of the disk waits for it, and the image is unlocked then.
    let Source { taken, image, control } = disks.source_of_backup(order.disk, &what)?;
    let clusters = Arc::clone(taken.clusters());
    let size_bytes = clusters.capacity_bytes();
    let failed = |why| place::failure(order.target, size_bytes, why);
    let place = Place::take_free(order.target)?;
    taken.has_part(place.part());
    let target = make(place.file(), size_bytes, order.format).map_err(failed)?;
    let no_descriptor = |why| Failure::run(&what, why, "raise the limit on open files (ulimit -n)");
    let reader = image.reader().map_err(no_descriptor)?;
    let mut is_wanted = || goes_on(None) && !clusters.has_ended();
    let wrapped = put_around(&control, &clusters, &mut is_wanted)
        .map_err(|told| if is_wanted() { Failure::told(&what, told) } else { cancelled(&what) })?;
    drop(no_reload);
    let mut goes_on = || {
        goes_on(Some(Progress { copied_bytes: clusters.free_bytes(), total_bytes: size_bytes }))
            && !clusters.has_ended()
    };
    let copied = copy(&clusters, reader, target, order.bandwidth, &mut goes_on);
    // A cancel has an effect until now.
    let copied = copied.and_then(|()| if goes_on() { Ok(()) } else { Err(CopyError::Cancelled) });
    clusters.end();
    let outcome = complete(place, copied, size_bytes, |error| match error {
        CopyError::Cancelled => cancelled(&what),
        CopyError::Write(why) => failed(why),
        error => Failure::told(&what, error),
    });
    take_off(&control, wrapped);
    outcome?;
    tracing::info!(disk = order.disk, target = %order.target.display(), "the backup is complete");
    Ok(Progress { copied_bytes: size_bytes, total_bytes: size_bytes })
}

/// Gives the target its name, or removes it.
fn complete(
    place: Place,
    copied: Result<(), CopyError>,
    size_bytes: u64,
    failure: impl FnOnce(CopyError) -> Failure,
) -> Result<(), Failure> {
    match copied {
        Ok(()) => place.fill(size_bytes),
        Err(error) => Err(failure(error)),
    }
}

fn cancelled(what: &str) -> Failure {
    let why = "cancelled: the client has gone, or the disk is about to go";
    Failure::run(what, why, "repeat it when the disk is served")
}

/// Makes the empty image. Parts of the disk that are never written stay holes.
fn make(file: &std::fs::File, size_bytes: u64, format: Format) -> std::io::Result<Target> {
    match format {
        Format::Raw => Target::raw(file, size_bytes, Allocation::Sparse),
        Format::Qcow2 => {
            let image = NewImage {
                size_bytes,
                cluster_bytes: CLUSTER_BYTES,
                backing: None,
                preallocation: Preallocation::Off,
            };
            image.check().map_err(std::io::Error::other)?;
            Target::qcow2(file, &image)
        }
    }
}

/// The wrapper, and the storage below it.
struct Wrapped {
    wrapper: Arc<dyn Disk>,
    inner: Arc<dyn Disk>,
}

/// Puts the wrapper around the storage.
fn put_around(
    control: &Control,
    clusters: &Arc<Clusters>,
    is_wanted: &mut dyn FnMut() -> bool,
) -> Result<Wrapped, Unfinished> {
    let (sender, made) = channel();
    let of_order = Arc::clone(clusters);
    let order = control.replace_storage(Box::new(move |inner| {
        if inner.info().capacity_sectors * 512 != of_order.capacity_bytes() {
            return Err("it was resized a moment ago; repeat the backup".into());
        }
        let inner = Arc::clone(inner);
        let wrapper: Arc<dyn Disk> = Arc::new(CopyFirst::new(Arc::clone(&inner), of_order));
        let _ = sender.send(Wrapped { wrapper: Arc::clone(&wrapper), inner }); // it waits
        Ok(Replacement::around(wrapper))
    }));
    wait(&order, DRAIN_MAX, is_wanted)?;
    made.recv().map_err(|_| Unfinished::Cancelled)
}

/// Takes the wrapper off, which holds nothing any more.
fn take_off(control: &Control, Wrapped { wrapper, inner }: Wrapped) {
    let order = control.replace_storage(Box::new(move |present| {
        if !Arc::ptr_eq(present, &wrapper) {
            return Err("another storage has taken its place; restart the daemon".into());
        }
        Ok(Replacement::around(inner))
    }));
    if let Err(Unfinished::Failed(why)) = wait(&order, Duration::MAX, || true) {
        // It costs a look at a flag for each write.
        tracing::warn!(why, "the backup's wrapper stays, and does nothing");
    }
}

/// Copies on a thread of its own.
fn copy(
    clusters: &Arc<Clusters>,
    reader: ImageReader,
    target: Target,
    bandwidth: Option<NonZeroU64>,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<(), CopyError> {
    let copier = Copier::new(reader, target, Arc::clone(clusters), bandwidth);
    let (sender, result) = channel();
    let body = move || {
        let _ = sender.send(copier.run()); // it waits
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
        match result.recv_timeout(TICK) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => return Err(CopyError::Cancelled),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}
