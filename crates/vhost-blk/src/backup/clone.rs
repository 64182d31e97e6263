// SPDX-License-Identifier: Apache-2.0
//! A backup that shares the space of the image: a clone of its file, made while the disk is drained.
//!
//! | State | Next |
//! |---|---|
//! | planned: the disk was synced, and the files can share space ([`Clone::plan`]) | the disk is drained |
//! | drained ([`Act::make`]): the tables of a qcow2 image are durable, and nothing changes the file | made, or refused |
//! | made: the file has the content of the moment ([`Clone::finish`] makes it durable) | the end of the backup |
//! | refused, or not made in [`AUTO_MAX`] or [`ALWAYS_MAX`] | `auto`: a copy from this moment on; `always`: no backup |

use super::copier::CopyError;
use super::slot::Parts;
use super::source::Image;
use super::{Destination, Extent, Order};
use crate::disks::exchange::settled;
use crate::failure::Failure;
use crate::image::place::{self, Place};
use crate::values::Reflink;
use backend::reflink::{self, CloneError};
use backend::wrap::Clusters;
use qcow2::Qcow2Disk;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time in which a drained disk is cloned, besides one call of the kernel. A disk with more extents is
/// copied.
const AUTO_MAX: Duration = Duration::from_millis(100);
/// The same for a disk that has to be cloned.
const ALWAYS_MAX: Duration = Duration::from_secs(2);

/// A clone that is possible.
pub(super) struct Clone {
    /// Place of the clone.
    pub(super) place: Place,
    file: File,
    /// Size of the disk; `None`: the image has it in its header.
    raw_bytes: Option<u64>,
}

/// The part of a clone that is done while no request is in flight.
pub(super) struct Act {
    /// Name of the disk.
    disk: String,
    source: File,
    target: File,
    /// The place, for errors.
    path: PathBuf,
    size_bytes: u64,
    /// The disk of a qcow2 image.
    qcow2: Option<Arc<Qcow2Disk>>,
    /// There is no backup without it.
    must: bool,
    limit: Duration,
}

/// An attempt without a clone.
enum Missed {
    /// A copy is possible, for this reason.
    Refused(String),
    /// A copy would fail, too.
    Failed(Failure),
}

impl Clone {
    /// Finds out whether the backup can be a clone; otherwise it is a copy.
    ///
    /// # Errors
    /// [`Failure`], also if it has to be a clone and cannot.
    pub(super) fn plan(
        order: &Order,
        image: &Image,
        size_bytes: u64,
        parts: &Parts,
    ) -> Result<Option<(Clone, Act)>, Failure> {
        if order.reflink == Reflink::Never {
            return Ok(None);
        }
        match Self::planned(order, image, size_bytes, parts) {
            Ok(planned) => Ok(Some(planned)),
            Err(missed) => {
                missed.or_copy(&order.disk, order.reflink == Reflink::Always).map(|()| None)
            }
        }
    }

    fn planned(
        order: &Order,
        image: &Image,
        size_bytes: u64,
        parts: &Parts,
    ) -> Result<(Clone, Act), Missed> {
        let refused = |why: &str| Err(Missed::Refused(why.to_owned()));
        let (path, format) = match (&order.target, &order.extent) {
            (Destination::Export(_), _) => return refused("the target is no file"),
            (_, Extent::Changes(_)) => return refused("an incremental backup has changes only"),
            (Destination::File { path, format }, Extent::Full(_)) => (path.clone(), *format),
        };
        if order.verify {
            return refused("--verify compares two copies of the data, and there would be one");
        }
        let (top, qcow2) = image.clonable(format).map_err(Missed::Refused)?;
        let failed = |why| Missed::Failed(place::failure(&path, size_bytes, why));
        let source = top.share().map_err(failed)?;
        if !source.metadata().map_err(failed)?.is_file() {
            return refused("the image is a block device");
        }
        let place = Place::take_free(&path).map_err(Missed::Failed)?;
        parts.add(place.part());
        let target = place.file().try_clone().map_err(failed)?;
        reflink::try_out(&source, &target).map_err(|error| match error {
            CloneError::Failed(why) => failed(why),
            error => Missed::Refused(error.to_string()),
        })?;
        let file = place.file().try_clone().map_err(failed)?;
        let raw_bytes = qcow2.is_none().then_some(size_bytes);
        let must = order.reflink == Reflink::Always;
        let limit = if must { ALWAYS_MAX } else { AUTO_MAX };
        let disk = order.disk.clone();
        let act = Act { disk, source, target, path, size_bytes, qcow2, must, limit };
        Ok((Clone { place, file, raw_bytes }, act))
    }

    /// Makes the clone durable, after [`Act::make`].
    pub(super) fn finish(&self) -> Result<(), CopyError> {
        let sized = self.raw_bytes.map_or(Ok(()), |bytes| self.file.set_len(bytes));
        sized.and_then(|()| self.file.sync_all()).map_err(CopyError::Write)
    }
}

impl Act {
    /// Clones the file of a drained disk. `false`: the backup has to be a copy.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn make(self, clusters: &Clusters) -> Result<bool, String> {
        match self.cloned(clusters) {
            Ok(()) => Ok(true),
            Err(missed) => match missed.or_copy(&self.disk, self.must) {
                Ok(()) => Ok(false),
                Err(Failure { why, remedy, .. }) => Err(format!("{why}; {remedy}")),
            },
        }
    }

    fn cloned(&self, clusters: &Clusters) -> Result<(), Missed> {
        let failed = |told| Missed::Failed(Failure::told("clone the image", told));
        settled(self.qcow2.as_deref()).map_err(failed)?;
        let begun = Instant::now();
        let goes_on = &mut |_| !clusters.has_ended() && begun.elapsed() < self.limit;
        reflink::clone(&self.source, &self.target, goes_on).map_err(|error| match error {
            CloneError::Failed(why) => {
                Missed::Failed(place::failure(&self.path, self.size_bytes, why))
            }
            CloneError::Stopped if clusters.has_ended() => {
                Missed::Refused("it was cancelled".to_owned())
            }
            CloneError::Stopped => Missed::Refused(format!(
                "the image has more extents than are cloned in {} ms, while the guest waits",
                self.limit.as_millis()
            )),
            error @ CloneError::Refused(_) => Missed::Refused(error.to_string()),
        })
    }
}

impl Missed {
    /// Lets the backup of a disk be a copy, unless there `must` be a clone.
    ///
    /// # Errors
    /// [`Failure`].
    fn or_copy(self, disk: &str, must: bool) -> Result<(), Failure> {
        match self {
            Missed::Failed(failure) => Err(failure),
            Missed::Refused(why) if must => Err(Failure::run(
                format!("back up the disk {disk}"),
                format!("it cannot share the space of the image: {why}"),
                "give --reflink auto, which copies then",
            )),
            Missed::Refused(why) => {
                tracing::info!(disk, why, "the backup has space of its own");
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// No clone is made in no time, on any file system.
    #[test]
    fn a_disk_that_takes_too_long_is_copied_unless_it_has_to_be_cloned() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("source");
        fs::write(&path, [1; 4096]).unwrap();
        let act = |must| Act {
            disk: "a".to_owned(),
            source: File::open(&path).unwrap(),
            target: File::create(directory.path().join("target")).unwrap(),
            path: directory.path().join("copy"),
            size_bytes: 4096,
            qcow2: None,
            must,
            limit: Duration::ZERO,
        };
        let clusters = Clusters::new(4096).unwrap();
        assert_eq!(act(false).make(&clusters), Ok(false));
        let told = act(true).make(&clusters).unwrap_err();
        assert!(told.contains("more extents") && told.contains("; give --reflink auto"), "{told}");
        clusters.end();
        let told = act(true).make(&clusters).unwrap_err();
        assert!(told.contains("cancelled"), "{told}");
    }
}
