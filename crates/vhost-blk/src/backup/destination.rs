// SPDX-License-Identifier: Apache-2.0
//! The place of a copy, and the way from there to a target that can be written.

use super::Order;
use super::clone::{Act, Clone};
use super::copier::CopyError;
use super::digest::Digest;
use super::slot::Parts;
use super::source::Image;
use super::target::{Durable, Target, Written};
use crate::disks::bitmaps::{Base, real_path};
use crate::disks::converge::{TargetUser, Words};
use crate::failure::Failure;
use crate::image::place::{self, Place};
use crate::nbd::{Address, Client, ZEROES_MAX};
use crate::values::Format;
use backend::create::{Allocation, remove_own};
use backend::wrap::{CLUSTER_BYTES, Clusters};
use qcow2::copy;
use qcow2::create::{self, NewImage, Preallocation};
use std::convert::Infallible;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;
use std::{fmt, io, mem};

/// The place of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// A new image.
    File {
        /// Its absolute path.
        path: PathBuf,
        /// Its format.
        format: Format,
    },
    /// An export of an NBD server, which has the content of the disk afterwards.
    Export(Address),
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Destination::File { path, .. } => path.display().fmt(f),
            Destination::Export(address) => address.fmt(f),
        }
    }
}

/// Bytes of a file that are zeroed at once: an entry for each cluster of a qcow2 file.
const FILE_ZEROES_MAX: u64 = 4 << 30;

impl Destination {
    /// The path of the file, or of the socket.
    pub(super) fn path(&self) -> &Path {
        match self {
            Destination::File { path, .. } => path,
            Destination::Export(address) => &address.socket,
        }
    }

    /// Most bytes to zero while a guest may wait.
    pub(super) fn zeroes_max(&self) -> u64 {
        match self {
            Destination::File { .. } => FILE_ZEROES_MAX,
            Destination::Export(_) => ZEROES_MAX,
        }
    }
}

/// A target that was made. Only its thread ([`crate::disks::converge::TargetThread`]) works on it. The drop removes a new
/// image.
pub(super) struct Made {
    state: State,
    /// The place of a new image.
    place: Option<Place>,
    clone: Option<Clone>,
}

enum State {
    Writing(Target),
    Durable(Durable),
    /// The clone is the backup, or the use of the target has ended.
    Ended,
}

impl TargetUser for Made {
    const WORDS: Words =
        Words { thread: "backup-target", target: "target", cancelled: "it was cancelled" };
    /// The acts return their errors.
    type Error = Infallible;
}

impl Made {
    /// Makes the empty image, over the backup `before` if there is one, or connects to the export.
    pub(super) fn of(
        order: &Order,
        before: Option<&Base>,
        size_bytes: u64,
        parts: &Parts,
    ) -> Result<Made, Failure> {
        let what = order.what();
        let told = |told: String| Failure::told(&what, told);
        before.map_or(Ok(()), Base::check).map_err(told)?;
        match &order.target {
            Destination::File { path, format } => {
                let place = Place::take_free(path)?;
                parts.add(place.part());
                let over = before.map(|before| image_over(before, path, size_bytes)).transpose();
                let over = over.map_err(told)?.flatten();
                let failed = |why| place::failure(path, size_bytes, why);
                let image = make(place.file(), size_bytes, *format, over).map_err(failed)?;
                let written = Written {
                    file: place.file().try_clone().map_err(failed)?,
                    path: place.part().to_owned(),
                    is_qcow2: *format == Format::Qcow2,
                    is_incremental: before.is_some(),
                };
                let state = State::Writing(Target::Image { image, written });
                Ok(Made { state, place: Some(place), clone: None })
            }
            Destination::Export(address) => {
                let failed = |why| order.failure(size_bytes, CopyError::Server(why));
                let connected = |hangup| parts.is_connected(hangup);
                let client = Client::connect(address, connected).map_err(failed)?;
                client.check(size_bytes, CLUSTER_BYTES).map_err(failed)?;
                if !client.flushes() {
                    tracing::warn!(
                        disk = order.disk,
                        "the NBD server has no FLUSH: the copy may be in its memory only"
                    );
                }
                let state = State::Writing(Target::Export(client));
                Ok(Made { state, place: None, clone: None })
            }
        }
    }

    /// Plans a clone, if the backup may be one: [`Clone::plan`].
    pub(super) fn plan_clone(
        &mut self,
        order: &Order,
        image: &Image,
        size_bytes: u64,
        parts: &Parts,
    ) -> Result<Option<Act>, Failure> {
        let (clone, act) = Clone::plan(order, image, size_bytes, parts)?.unzip();
        self.clone = clone;
        Ok(act)
    }

    /// Makes the clone the backup, durably.
    pub(super) fn finish_clone(&mut self) -> Result<(), CopyError> {
        let Some(clone) = self.clone.take() else { return Err(CopyError::Cancelled) };
        clone.finish()?;
        self.state = State::Ended;
        self.place = Some(clone.place);
        Ok(())
    }

    /// Writes data at a position; no position is written twice.
    pub(super) fn write(&mut self, at: u64, data: &[u8]) -> Result<(), CopyError> {
        self.writing()?.write(at, data)
    }

    /// Makes ranges read as zeroes.
    pub(super) fn zero(&mut self, ranges: Vec<Range<u64>>) -> Result<(), CopyError> {
        let target = self.writing()?;
        ranges.into_iter().try_for_each(|zeroes| target.zero(zeroes))
    }

    fn writing(&mut self) -> Result<&mut Target, CopyError> {
        match &mut self.state {
            State::Writing(target) => Ok(target),
            State::Durable(_) | State::Ended => Err(CopyError::Cancelled),
        }
    }

    /// Makes the copy durable.
    pub(super) fn finish(&mut self) -> Result<(), CopyError> {
        if let State::Writing(target) = mem::replace(&mut self.state, State::Ended) {
            self.state = State::Durable(target.finish()?);
        }
        Ok(())
    }

    /// The digest of the copy as it is read again: [`Durable::read_again`].
    pub(super) fn read_again(
        &mut self,
        copied: &Clusters,
        goes_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Digest, CopyError> {
        match &mut self.state {
            State::Durable(durable) => durable.read_again(copied, goes_on),
            State::Writing(_) | State::Ended => Err(CopyError::Cancelled),
        }
    }

    /// Ends the use of the durable target in order, and gives a new image its name. Returns the base of a bitmap,
    /// with the moment of the content and the backup before. The first one that sets `decided` decides about the
    /// end: the image is removed again if no thread waits for it any more.
    pub(super) fn complete(
        &mut self,
        order: &Order,
        size_bytes: u64,
        (at, before): (SystemTime, Option<&Base>),
        decided: &AtomicBool,
    ) -> Result<Base, Failure> {
        if let State::Durable(durable) = mem::replace(&mut self.state, State::Ended) {
            durable.end();
        }
        self.clone = None;
        match (self.place.take(), &order.target) {
            (Some(place), Destination::File { path, format }) => {
                let kind = (at, *format == Format::Qcow2);
                let base = Base::of(place.file(), path, kind, before);
                let base = base.map_err(|why| place::failure(path, size_bytes, why))?;
                if decided.load(Ordering::Acquire) {
                    return Err(order.cancelled(None));
                }
                let made = place.fill(size_bytes)?;
                if decided.swap(true, Ordering::AcqRel) {
                    remove_own(path, &made);
                }
                Ok(base)
            }
            (_, Destination::Export(address)) => {
                decided.store(true, Ordering::Release);
                Ok(Base::in_export(address, at))
            }
            (None, Destination::File { .. }) => Err(order.cancelled(None)),
        }
    }
}

/// The image of an incremental backup; `None`: the backup before is in an export.
fn image_over(before: &Base, target: &Path, size_bytes: u64) -> Result<Option<NewImage>, String> {
    let Some((backing, is_qcow2)) = before.image() else { return Ok(None) };
    let target = real_path(target)
        .map_err(|why| format!("{}: {why}; check its directory", target.display()))?;
    NewImage::over(&target, size_bytes, backing, is_qcow2).map(Some)
}

/// Makes the empty image: `over` another one, or without a backing file. Parts of the disk that are
/// never written stay holes.
fn make(
    file: &File,
    size_bytes: u64,
    format: Format,
    over: Option<NewImage>,
) -> io::Result<copy::Target> {
    if format == Format::Raw {
        return copy::Target::raw(file, size_bytes, Allocation::Sparse);
    }
    let image = over.unwrap_or(NewImage {
        size_bytes,
        cluster_bytes: create::CLUSTER_BYTES,
        backing: None,
        preallocation: Preallocation::Off,
    });
    image.check().map_err(io::Error::other)?;
    copy::Target::qcow2(file, &image)
}
