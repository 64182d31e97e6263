// SPDX-License-Identifier: Apache-2.0
//! A started virtqueue of either layout, and what it takes to start one.

use crate::RingFault;
use crate::chain::{Chain, ChainHead};
use crate::dirty_log::DirtyLog;
use crate::memory::GuestMemory;
use crate::packed::{PackedQueue, Position};
use crate::ring_area::RingArea;
use crate::split::SplitQueue;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio_spec::{packed, split};

/// The two layouts of a virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Section 2.7.
    Split,
    /// Section 2.8.
    Packed,
}

/// A chain that an earlier daemon took and did not give back (vhost-user, "Inflight I/O
/// tracking").
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resubmit {
    /// Split: the head; the table still holds the chain.
    Split {
        /// Index of the head descriptor.
        head: u16,
    },
    /// Packed: the descriptors as they stood in the ring.
    Packed {
        /// In ring order; at least one.
        descs: Vec<packed::Desc>,
    },
}

/// Why a queue cannot be started as it was set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// Section 2.7: a split queue's size is a power of two; neither may exceed 32768.
    #[error("queue size {0} is not valid (a split queue wants a power of two up to 32768)")]
    Size(u16),
    /// An area that does not lie in one region of guest memory, or is not aligned.
    #[error("the {area} at {addr:#x} is outside guest memory or not aligned")]
    Area {
        /// Which of the three.
        area: &'static str,
        /// The front-end's address of it.
        addr: u64,
    },
    /// A base that points outside a packed ring.
    #[error("vring base {0:#x} points outside the ring")]
    Base(u32),
}

/// All that a queue needs; complete or it does not start.
#[derive(Clone, Debug)]
pub struct QueueSetup {
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// Split or packed, as negotiated.
    pub layout: Layout,
    /// Number of descriptors.
    pub size: u16,
    /// The front-end's address of the descriptor table (packed: the descriptor ring).
    pub desc_addr: u64,
    /// ... of the avail ring (packed: the driver event suppression structure).
    pub avail_addr: u64,
    /// ... of the used ring (packed: the device event suppression structure).
    pub used_addr: u64,
    /// Where to go on, as in vhost-user's SET_VRING_BASE.
    pub base: u32,
    /// INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Keep a copy of each chain's descriptors (packed): [`Chain::ring_descriptors`].
    pub keep_descriptors: bool,
    /// The dirty log, while the front-end asks for logging.
    pub log: Option<Arc<DirtyLog>>,
    /// Guest-physical address of the used ring for the dirty log (split), where given.
    pub used_log_addr: Option<u64>,
}

/// A started virtqueue. Owned by one data-plane thread until it is stopped.
#[derive(Debug)]
pub struct VirtQueue {
    ring: Ring,
}

#[derive(Debug)]
enum Ring {
    Split(SplitQueue),
    Packed(PackedQueue),
}

macro_rules! each_layout {
    ($self:ident, $queue:ident => $body:expr) => {
        match &mut $self.ring {
            Ring::Split($queue) => $body,
            Ring::Packed($queue) => $body,
        }
    };
}

impl VirtQueue {
    /// Checks the set-up and starts the queue where `setup.base` says.
    ///
    /// # Errors
    /// [`QueueError`]; nothing was touched then.
    pub fn start(setup: &QueueSetup) -> Result<Self, QueueError> {
        let ring = match setup.layout {
            Layout::Split => Ring::Split(start_split(setup)?),
            Layout::Packed => Ring::Packed(start_packed(setup)?),
        };
        Ok(VirtQueue { ring })
    }

    /// Stage *chain*: takes the next available chain into `chain`; `None` when there is none.
    ///
    /// # Errors
    /// [`RingFault`]: the queue must stop taking; nothing was taken.
    #[inline]
    pub fn take(&mut self, chain: &mut Chain) -> Result<Option<ChainHead>, RingFault> {
        each_layout!(self, queue => queue.take(chain))
    }

    /// Takes a chain again that an earlier daemon took.
    ///
    /// # Errors
    /// As [`VirtQueue::take`]; also when it is of the other layout.
    #[cold]
    pub fn take_again(
        &mut self,
        again: &Resubmit,
        chain: &mut Chain,
    ) -> Result<ChainHead, RingFault> {
        match (&mut self.ring, again) {
            (Ring::Split(queue), Resubmit::Split { head }) => queue.take_again(*head, chain),
            (Ring::Packed(queue), Resubmit::Packed { descs }) => queue.take_again(descs, chain),
            _ => Err(RingFault::ChainTooLong { limit: 0 }),
        }
    }

    /// Moves the queue to where an earlier daemon left it: its used index (in the form of
    /// [`VirtQueue::used_index`]) and the chains that it had taken. A split queue reads its used
    /// index from the ring and ignores the one given.
    pub fn resume(&mut self, used_index: u16, taken: &[Resubmit]) {
        match &mut self.ring {
            Ring::Split(queue) => {
                queue.next_avail = queue.next_used.wrapping_add(taken.len() as u16);
                queue.seen_avail = queue.next_avail;
            }
            Ring::Packed(queue) => {
                queue.next_used = Position::from_bits(used_index);
                queue.next_avail = queue.next_used;
                for again in taken {
                    if let Resubmit::Packed { descs } = again {
                        queue.next_avail.advance(descs.len() as u16, queue.size);
                    }
                }
            }
        }
    }

    /// Packed: whether the entry at `position` (as in [`VirtQueue::used_index`]) was published as
    /// used. A split queue answers `false`.
    pub fn was_used_at(&self, position: u16) -> bool {
        match &self.ring {
            Ring::Split(_) => false,
            Ring::Packed(queue) => queue.was_used_at(Position::from_bits(position)),
        }
    }

    /// Whether a chain is available.
    ///
    /// # Errors
    /// As [`VirtQueue::take`].
    #[inline]
    pub fn has_avail(&mut self) -> Result<bool, RingFault> {
        match &mut self.ring {
            Ring::Split(queue) => queue.has_avail(),
            Ring::Packed(queue) => Ok(queue.has_avail()),
        }
    }

    /// Stage *used*: gives a chain back, with the bytes written into it. The driver sees it after
    /// [`VirtQueue::publish`].
    #[inline]
    pub fn push_used(&mut self, head: ChainHead, written_bytes: u32) {
        each_layout!(self, queue => queue.push_used(&head, written_bytes))
    }

    /// Publishes all pushed entries at once.
    #[inline]
    pub fn publish(&mut self) {
        each_layout!(self, queue => queue.publish())
    }

    /// Stage *notify*: whether the driver asked to be called for what was published since this
    /// was last asked.
    #[inline]
    pub fn needs_call(&mut self) -> bool {
        each_layout!(self, queue => queue.needs_call())
    }

    /// Asks for a kick at the next chain. Look at [`VirtQueue::has_avail`] once more afterwards.
    pub fn arm(&mut self) {
        each_layout!(self, queue => queue.arm())
    }

    /// Asks for no kicks.
    pub fn suppress(&mut self) {
        each_layout!(self, queue => queue.suppress())
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        match &self.ring {
            Ring::Split(queue) => queue.size,
            Ring::Packed(queue) => queue.size,
        }
    }

    /// Where the queue would go on, as in vhost-user's GET_VRING_BASE.
    pub fn base(&self) -> u32 {
        match &self.ring {
            Ring::Split(queue) => u32::from(queue.next_avail),
            Ring::Packed(queue) => {
                u32::from(queue.next_avail.bits()) | u32::from(queue.next_used.bits()) << 16
            }
        }
    }

    /// The used index as published (split), or the next used position (packed); the in-flight
    /// region records it.
    pub fn used_index(&self) -> u16 {
        match &self.ring {
            Ring::Split(queue) => queue.next_used,
            Ring::Packed(queue) => queue.next_used.bits(),
        }
    }

    /// The dirty log in use.
    pub fn log(&self) -> Option<&DirtyLog> {
        match &self.ring {
            Ring::Split(queue) => queue.log.as_ref().map(|(log, _)| &**log),
            Ring::Packed(queue) => queue.log.as_deref(),
        }
    }
}

fn area(
    setup: &QueueSetup,
    name: &'static str,
    addr: u64,
    len: usize,
    align: u64,
) -> Result<RingArea, QueueError> {
    setup
        .memory
        .locate_user(addr, len as u64)
        .and_then(|(region, offset)| RingArea::new(region, offset, len, align))
        .ok_or(QueueError::Area { area: name, addr })
}

fn start_split(setup: &QueueSetup) -> Result<SplitQueue, QueueError> {
    let size = setup.size;
    if !size.is_power_of_two() || size > split::QUEUE_SIZE_MAX {
        return Err(QueueError::Size(size));
    }
    let bytes = split::desc_table_bytes(size);
    let desc = area(setup, "descriptor table", setup.desc_addr, bytes, split::DESC_ALIGN)?;
    let bytes = split::avail_ring_bytes(size);
    let avail = area(setup, "avail ring", setup.avail_addr, bytes, split::AVAIL_ALIGN)?;
    let bytes = split::used_ring_bytes(size);
    let used = area(setup, "used ring", setup.used_addr, bytes, split::USED_ALIGN)?;
    let next_avail = u16::try_from(setup.base).map_err(|_| QueueError::Base(setup.base))?;
    // Acquire pairs with the release in `publish` of whoever ran the queue before.
    let next_used = used.load_u16(split::IDX_OFFSET, Ordering::Acquire);
    let used_log_addr = setup.used_log_addr.unwrap_or(used.guest_addr(0));
    Ok(SplitQueue {
        size,
        desc,
        avail,
        used,
        indirect: setup.indirect,
        event_idx: setup.event_idx,
        next_avail,
        seen_avail: next_avail,
        next_used,
        published: next_used,
        called: next_used,
        memory: Arc::clone(&setup.memory),
        hint: 0,
        log: setup.log.clone().map(|log| (log, used_log_addr)),
    })
}

fn start_packed(setup: &QueueSetup) -> Result<PackedQueue, QueueError> {
    let size = setup.size;
    if size == 0 || size > split::QUEUE_SIZE_MAX {
        return Err(QueueError::Size(size));
    }
    let bytes = packed::desc_ring_bytes(size);
    let desc = area(setup, "descriptor ring", setup.desc_addr, bytes, packed::DESC_ALIGN)?;
    let event = packed::EVENT_BYTES;
    let driver = area(setup, "driver area", setup.avail_addr, event, packed::EVENT_ALIGN)?;
    let device = area(setup, "device area", setup.used_addr, event, packed::EVENT_ALIGN)?;
    let next_avail = Position::from_bits(setup.base as u16);
    // Front-ends that know only 16 bits of base leave the used half 0; then nothing is in flight.
    let next_used = match (setup.base >> 16) as u16 {
        0 => next_avail,
        bits => Position::from_bits(bits),
    };
    if next_avail.offset >= size || next_used.offset >= size {
        return Err(QueueError::Base(setup.base));
    }
    Ok(PackedQueue {
        size,
        desc,
        driver,
        device,
        indirect: setup.indirect,
        event_idx: setup.event_idx,
        keep_descriptors: setup.keep_descriptors,
        next_avail,
        next_used,
        unpublished: None,
        used_since_call: 0,
        memory: Arc::clone(&setup.memory),
        hint: 0,
        log: setup.log.clone(),
    })
}
