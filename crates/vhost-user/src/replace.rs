// SPDX-License-Identifier: Apache-2.0
//! Another storage for a running device: an overlay, or a wrapper that is put around the storage.
//!
//! | Step | If it fails |
//! |---|---|
//! | 1. All queues stop, and their requests in flight complete | |
//! | 2. [`Replace`] makes the new storage of the present one | the new storage is dropped |
//! | 3. The guest's view of both is compared; each data-plane thread opens a lane | the lanes close |
//! | 4. [`Replacement::commit`] records the change outside of the device | the lanes close |
//! | 5. The data planes use the new storage, and the old one is dropped | cannot fail |
//! | 6. The queues start again, with either storage | the VMM is disconnected |

use crate::control::Posted;
use crate::error::OperateError;
use crate::image_lock::FollowedLock;
use crate::session::Session;
use backend::{Disk, ImageLock, Info, RangeLimits};
use data_plane::{AtStop, ReplaceError};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use virtio_spec::features::F_RING_PACKED;

/// Makes the new storage while no queue runs. It gets the present storage, with everything that the
/// guest has written.
pub type Replace = Box<dyn FnOnce(&Arc<dyn Disk>) -> Result<Replacement, String> + Send>;

/// The storage that takes the place of the present one.
pub struct Replacement {
    /// The storage. It has the capacity, the blocks, the access and the requests that the guest knows.
    pub disk: Arc<dyn Disk>,
    /// The device goes on with the lock that follows its guest, if it has one.
    pub keeps_lock: bool,
    /// The lock that follows the guest from now on, in place of that one. It is held.
    pub lock: Option<ImageLock>,
    /// The last step that may fail; it leaves nothing behind then.
    pub commit: Box<dyn FnOnce() -> Result<(), String> + Send>,
}

impl Replacement {
    /// A storage on the same files as the present one, such as a wrapper around it: the lock stays, and
    /// there is nothing to record.
    pub fn around(disk: Arc<dyn Disk>) -> Self {
        Replacement { disk, keeps_lock: true, lock: None, commit: Box::new(|| Ok(())) }
    }
}

/// Errors of the exchange. The old storage serves on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    /// The sender does not wait any more.
    #[error("the command was withdrawn; repeat it")]
    Withdrawn,
    /// Another program may use the image.
    #[error(
        "the guest runs elsewhere, and may write to the image there; repeat this where the guest \
         runs"
    )]
    Released,
    /// [`Replace`] or [`Replacement::commit`] has failed; the text has the remedy.
    #[error("{0}")]
    Storage(String),
    /// The guest would see another disk.
    #[error("{}", differs(.0))]
    Differs(String),
    /// The data planes cannot have the storage.
    #[error(transparent)]
    Planes(#[from] ReplaceError),
    /// No data plane could start the queues again.
    #[error("{0}; and {1}")]
    Lost(Box<ExchangeError>, OperateError),
}

const WAITING: u8 = 0;
const BEGUN: u8 = 1;
const WITHDRAWN: u8 = 2;

/// The order of an exchange.
pub(crate) struct Order {
    replace: Replace,
    state: Arc<AtomicU8>,
}

impl Order {
    /// An order, and its state for [`Replacing`].
    pub(crate) fn new(replace: Replace) -> (Self, Arc<AtomicU8>) {
        let state = Arc::new(AtomicU8::new(WAITING));
        (Order { replace, state: Arc::clone(&state) }, state)
    }
}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Order").field("state", &self.state).finish_non_exhaustive()
    }
}

/// An exchange that was ordered.
#[derive(Debug)]
pub struct Replacing {
    answer: Posted<Result<Duration, String>>,
    state: Arc<AtomicU8>,
}

impl Replacing {
    pub(crate) fn new(answer: Posted<Result<Duration, String>>, state: Arc<AtomicU8>) -> Self {
        Replacing { answer, state }
    }

    /// Waits for the answer: the time in which the device took no request. An error in it: the old
    /// storage serves on, for the reason and with the remedy in the text.
    ///
    /// # Errors
    /// As [`Posted::receive`].
    pub fn wait(&self, patience: Duration) -> Result<Result<Duration, String>, RecvTimeoutError> {
        self.answer.receive(patience)
    }

    /// Withdraws the order. `false`: [`Replace`] has been called, and the answer comes soon.
    pub fn withdraw(&self) -> bool {
        let state = &self.state;
        state.compare_exchange(WAITING, WITHDRAWN, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

impl Session<'_> {
    /// Carries out an order. The old storage serves on after an error. Returns the time in which no
    /// queue ran.
    pub(crate) fn replace_storage(&mut self, order: Order) -> Result<Duration, ExchangeError> {
        if self.is_image_released() {
            return Err(ExchangeError::Released);
        }
        self.drain_and_exchange(order)
    }

    /// As [`Session::replace_storage`], also while the guest runs elsewhere: for an order that writes nothing to the
    /// image, such as the end of what another one has begun.
    pub(crate) fn drain_and_exchange(&mut self, order: Order) -> Result<Duration, ExchangeError> {
        let begun = Instant::now();
        let stopped = self.stop_running(AtStop::Resubmit);
        let exchanged = self.exchange(order);
        match (exchanged, self.restart(stopped)) {
            (Ok(()), Ok(())) => {}
            // The VMM connects again, and its queues start with the new storage.
            (Ok(()), Err(lost)) => {
                tracing::error!(error = %lost, "the storage was replaced, and the queues do not start");
            }
            (Err(error), Ok(())) => return Err(error),
            (Err(error), Err(lost)) => return Err(ExchangeError::Lost(Box::new(error), lost)),
        }
        Ok(begun.elapsed())
    }

    fn exchange(&mut self, Order { replace, state }: Order) -> Result<(), ExchangeError> {
        state
            .compare_exchange(WAITING, BEGUN, Ordering::AcqRel, Ordering::Acquire)
            .map_err(|_| ExchangeError::Withdrawn)?;
        let packed = self.acked(F_RING_PACKED);
        let device = &mut *self.device;
        let Replacement { disk, keeps_lock, lock, commit } =
            replace(&device.disk).map_err(ExchangeError::Storage)?;
        let info = seen(&device.config.info, disk.info()).map_err(ExchangeError::Differs)?;
        let prepared = device.planes.prepare(Arc::clone(&disk))?;
        commit().map_err(ExchangeError::Storage)?;
        let before = device.planes.current();
        device.planes.replace(prepared, packed);
        tracing::info!(before = %device.config.info.description, after = %info.description, "storage");
        (device.disk, device.config.info) = (disk, info);
        if !keeps_lock {
            device.image_lock = lock.map(|lock| FollowedLock { lock, held: true });
        }
        device.tell_plane(before);
        Ok(())
    }
}

/// The refusal of a storage in which the guest would see another disk, with the remedy.
pub fn differs(told: &str) -> String {
    format!("the guest's disk has {told}; stop the VMM, and start it with the new storage")
}

/// The guest's view of a new storage: that of the old one, which the guest has read. Sizes and
/// alignments that are only advice stay.
///
/// # Errors
/// A property that the new storage cannot have.
pub fn seen(old: &Info, new: Info) -> Result<Info, String> {
    same("sectors", old.capacity_sectors, new.capacity_sectors)?;
    same("bytes in a block", old.logical_block_bytes, new.logical_block_bytes)?;
    let access = |info: &Info| if info.read_only { "read-only" } else { "read-write" };
    same("access", access(old), access(&new))?;
    has_range("DISCARD", old.discard, new.discard)?;
    has_range("WRITE_ZEROES", old.write_zeroes, new.write_zeroes)?;
    has_range("SECURE_ERASE", old.secure_erase, new.secure_erase)?;
    Ok(Info {
        physical_block_bytes: old.physical_block_bytes,
        io_min_bytes: old.io_min_bytes,
        io_opt_bytes: old.io_opt_bytes,
        discard: old.discard,
        write_zeroes: old.write_zeroes,
        write_zeroes_unmaps: old.write_zeroes_unmaps,
        secure_erase: old.secure_erase,
        ..new
    })
}

fn same<T: PartialEq + fmt::Display>(what: &str, old: T, new: T) -> Result<(), String> {
    if old == new { Ok(()) } else { Err(format!("{old} {what}, and the new storage {new}")) }
}

fn has_range(what: &str, old: Option<RangeLimits>, new: Option<RangeLimits>) -> Result<(), String> {
    let Some(old) = old.map(|old| old.sectors_max) else { return Ok(()) };
    match new.map(|new| new.sectors_max) {
        None => Err(format!("{what}, and the new storage does not support it")),
        Some(new) if new < old => {
            Err(format!("{what} of {old} sectors, and the new storage takes {new}"))
        }
        Some(_) => Ok(()),
    }
}
