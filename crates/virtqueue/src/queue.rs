// SPDX-License-Identifier: Apache-2.0
//! A started virtqueue of either layout, and the set-up that a start needs.

use crate::RingFault;
use crate::chain::{Chain, ChainHead};
use crate::dirty_log::DirtyLog;
use crate::guard::any_lost;
use crate::memory::GuestMemory;
use crate::packed::{BASE_OF_NEW, FLAGS_OFFSET, PackedQueue, Position};
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

/// A chain that a previous daemon took and did not return (vhost-user, "Inflight I/O tracking").
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InflightChain {
    /// Split: the head. The descriptor table still holds the chain.
    Split {
        /// Index of the head descriptor.
        head: u16,
    },
    /// Packed: copies of the ring descriptors.
    Packed {
        /// In ring order; at least one.
        descs: Vec<packed::Desc>,
    },
}

/// Errors in the set-up of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// Sections 2.7 and 2.8: the size of a split queue is a power of two; the maximum is 32768.
    #[error("queue size {0} is not valid (a split queue wants a power of two up to 32768)")]
    Size(u16),
    /// An area that is not aligned or does not lie in one region of guest memory.
    #[error("the {area} at {addr:#x} is outside guest memory or not aligned")]
    Area {
        /// Name of the area.
        area: &'static str,
        /// Its address in the front-end.
        addr: u64,
    },
    /// A base above 65535 (split) or with an offset outside the ring (packed).
    #[error("vring base {0:#x} is not valid for this ring")]
    Base(u32),
}

/// The complete set-up of a queue.
#[derive(Clone, Debug)]
pub struct RingSetup {
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// Split or packed, as negotiated.
    pub layout: Layout,
    /// Number of descriptors.
    pub size: u16,
    /// Address in the front-end of the descriptor table (packed: the descriptor ring).
    pub desc_addr: u64,
    /// Address in the front-end of the avail ring (packed: the driver event suppression structure).
    pub avail_addr: u64,
    /// Address in the front-end of the used ring (packed: the device event suppression structure).
    pub used_addr: u64,
    /// First position to serve. Split: index of the next avail entry. Packed: bits 0 to 15 next
    /// avail position, bits 16 to 31 next used position; bit 15 of each is the wrap counter
    /// (vhost-user, "VHOST_USER_SET_VRING_BASE").
    pub base: u32,
    /// INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Keep a copy of each chain's descriptors (packed): [`Chain::ring_descriptors`].
    pub keep_descriptors: bool,
    /// The dirty log, while the front-end asks for logging.
    pub log: Option<Arc<DirtyLog>>,
    /// Guest-physical address of the used ring for the dirty log (split), if the front-end gave
    /// one.
    pub used_log_addr: Option<u64>,
}

/// A started virtqueue. One data-plane thread owns it until it is stopped.
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
    /// Checks the set-up and starts the queue at `setup.base`.
    ///
    /// # Errors
    /// [`QueueError`] if the set-up is wrong; guest memory is unchanged then.
    pub fn start(setup: &RingSetup) -> Result<Self, QueueError> {
        let ring = match setup.layout {
            Layout::Split => Ring::Split(start_split(setup)?),
            Layout::Packed => Ring::Packed(start_packed(setup)?),
        };
        Ok(VirtQueue { ring })
    }

    /// Stage *chain*: takes the next available chain into `chain`. Returns `None` if no chain is
    /// available.
    ///
    /// # Errors
    /// [`RingFault`]: no chain was taken, and the caller must take no further chain.
    #[inline]
    pub fn take(&mut self, chain: &mut Chain) -> Result<Option<ChainHead>, RingFault> {
        let taken = each_layout!(self, queue => queue.take(chain));
        if self.is_lost() {
            return Err(RingFault::MemoryLost); // the chain may consist of zeroes in place of pages
        }
        taken
    }

    /// Returns whether guest memory or marks in the dirty log are lost. A migration without the marks
    /// would lose pages in silence.
    #[inline]
    pub fn is_lost(&self) -> bool {
        any_lost() && (self.memory().is_lost() || self.log().is_some_and(DirtyLog::is_lost))
    }

    fn memory(&self) -> &GuestMemory {
        match &self.ring {
            Ring::Split(queue) => &queue.memory,
            Ring::Packed(queue) => &queue.memory,
        }
    }

    /// Keeps a taken chain in flight, to be taken again by [`VirtQueue::take_resubmitted`]. A packed
    /// queue needs [`RingSetup::keep_descriptors`].
    #[cold]
    pub fn keep(&self, head: ChainHead, chain: &Chain) -> InflightChain {
        match &self.ring {
            Ring::Split(_) => InflightChain::Split { head: head.id() },
            Ring::Packed(_) => InflightChain::Packed { descs: chain.ring_descriptors().to_vec() },
        }
    }

    /// Takes a chain again that a previous daemon left in flight, or that was kept.
    ///
    /// # Errors
    /// As [`VirtQueue::take`]; also if the chain is of the other layout.
    #[cold]
    pub fn take_resubmitted(
        &mut self,
        inflight: &InflightChain,
        chain: &mut Chain,
    ) -> Result<ChainHead, RingFault> {
        match (&mut self.ring, inflight) {
            (Ring::Split(queue), InflightChain::Split { head }) => {
                queue.take_resubmitted(*head, chain)
            }
            (Ring::Packed(queue), InflightChain::Packed { descs }) => {
                queue.take_resubmitted(descs, chain)
            }
            _ => Err(RingFault::WrongLayout),
        }
    }

    /// Moves the queue to the position of a previous daemon: `used_index` in the form of
    /// [`VirtQueue::used_index`], plus the chains that it had `taken`. A split queue reads its used
    /// index from the ring and ignores `used_index`.
    pub fn resume(&mut self, used_index: u16, taken: &[InflightChain]) {
        match &mut self.ring {
            Ring::Split(queue) => {
                queue.next_avail = queue.next_used.wrapping_add(taken.len() as u16);
                queue.seen_avail = queue.next_avail;
            }
            Ring::Packed(queue) => {
                let descs = taken.iter().map(|inflight| match inflight {
                    InflightChain::Packed { descs } => descs.len(),
                    InflightChain::Split { .. } => 0,
                });
                queue.resume(Position::from_bits(used_index), descs.sum());
            }
        }
    }

    /// Returns whether the entry at `position` (in the form of [`VirtQueue::used_index`]) of a
    /// packed queue was published as used. Returns `false` for a split queue.
    pub fn was_used_at(&self, position: u16) -> bool {
        match &self.ring {
            Ring::Split(_) => false,
            Ring::Packed(queue) => queue.was_used_at(Position::from_bits(position)),
        }
    }

    /// Returns whether a chain is available.
    ///
    /// # Errors
    /// As [`VirtQueue::take`].
    #[inline]
    pub fn has_avail(&mut self) -> Result<bool, RingFault> {
        let available = match &mut self.ring {
            Ring::Split(queue) => queue.has_avail(),
            Ring::Packed(queue) => Ok(queue.has_avail()),
        };
        if self.is_lost() {
            return Err(RingFault::MemoryLost);
        }
        available
    }

    /// The most chains that the driver can have made available and the device has not taken. Exact for
    /// a split ring, whose index is read again for it; the size of a packed ring.
    #[cold]
    pub fn available_max(&self) -> u16 {
        match &self.ring {
            Ring::Split(queue) => queue.available(),
            Ring::Packed(queue) => queue.size,
        }
    }

    /// Stage *used*: returns a chain into which the device wrote `written_bytes` bytes. The driver
    /// sees it after [`VirtQueue::publish`].
    #[inline]
    pub fn push_used(&mut self, head: ChainHead, written_bytes: u32) {
        each_layout!(self, queue => queue.push_used(&head, written_bytes))
    }

    /// Publishes all pushed entries at once.
    #[inline]
    pub fn publish(&mut self) {
        each_layout!(self, queue => queue.publish())
    }

    /// Stage *notify*: returns whether the driver asked for a call for an entry that was published
    /// since `needs_call` last ran (sections 2.7.7 and 2.8.10).
    #[inline]
    pub fn needs_call(&mut self) -> bool {
        each_layout!(self, queue => queue.needs_call())
    }

    /// Returns whether the driver may wait for a call for an entry that a previous owner of the
    /// queue published without a call. Returns `false` if the driver asked for no calls.
    pub fn may_wait_for_call(&mut self) -> bool {
        each_layout!(self, queue => queue.may_wait_for_call())
    }

    /// Asks for a kick at the next chain. The caller must check [`VirtQueue::has_avail`] once more
    /// afterwards.
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

    /// The next position to serve, in the form of [`RingSetup::base`]. Split: index of the next
    /// avail entry. Packed: bits 0 to 15 next avail position, bits 16 to 31 next used position; bit
    /// 15 of each is the wrap counter (vhost-user, "VHOST_USER_SET_VRING_BASE").
    pub fn base(&self) -> u32 {
        match &self.ring {
            Ring::Split(queue) => u32::from(queue.next_avail),
            Ring::Packed(queue) => {
                u32::from(queue.next_avail.bits()) | u32::from(queue.next_used.bits()) << 16
            }
        }
    }

    /// The index of the next used entry (split) or the next used position (packed). The in-flight
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
    setup: &RingSetup,
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

fn start_split(setup: &RingSetup) -> Result<SplitQueue, QueueError> {
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
    // Acquire pairs with the release in `publish` of the previous owner of the queue.
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
        signalled_used: next_used,
        memory: Arc::clone(&setup.memory),
        hint: 0,
        log: setup.log.clone().map(|log| (log, used_log_addr)),
    })
}

/// Returns whether nothing was ever used in a packed ring. User Mode Linux sends base 0 for a new
/// ring, in which the wrap counters are 1. A ring that has wrapped to position 0 has the used bit in
/// some entry of its last lap: not in all, because a chain has one used entry for all its
/// descriptors.
fn is_new(desc: &RingArea, size: u16) -> bool {
    let flags = |index| desc.load_u16(index * 16 + FLAGS_OFFSET, Ordering::Relaxed);
    (0..usize::from(size)).all(|index| flags(index) & packed::DESC_F_USED == 0)
}

fn start_packed(setup: &RingSetup) -> Result<PackedQueue, QueueError> {
    let size = setup.size;
    if size == 0 || size > split::QUEUE_SIZE_MAX {
        return Err(QueueError::Size(size));
    }
    let bytes = packed::desc_ring_bytes(size);
    let desc = area(setup, "descriptor ring", setup.desc_addr, bytes, packed::DESC_ALIGN)?;
    let event = packed::EVENT_BYTES;
    let driver = area(setup, "driver area", setup.avail_addr, event, packed::EVENT_ALIGN)?;
    let device = area(setup, "device area", setup.used_addr, event, packed::EVENT_ALIGN)?;
    let base = if setup.base == 0 && is_new(&desc, size) { BASE_OF_NEW } else { setup.base };
    let next_avail = Position::from_bits(base as u16);
    // A front-end with a 16-bit base leaves the used half 0; no chain is in flight then.
    let next_used = match (base >> 16) as u16 {
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
