// SPDX-License-Identifier: Apache-2.0
//! A virtqueue of either layout with its eventfds: add, publish, kick, take used, wait for a call.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use virtio_spec::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::memory::{Area, GuestMemory};
use crate::packed::PackedRing;
use crate::split::SplitRing;

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address.
    pub gpa: u64,
    /// Length in bytes.
    pub len: u32,
    /// True for a buffer that the device writes, false for one that it reads.
    pub writable: bool,
}

impl Segment {
    /// A buffer that the device reads.
    pub const fn readable(gpa: u64, len: u32) -> Self {
        Self { gpa, len, writable: false }
    }

    /// A buffer that the device writes.
    pub const fn writable(gpa: u64, len: u32) -> Self {
        Self { gpa, len, writable: true }
    }

    pub(crate) fn flags(&self) -> u16 {
        if self.writable { DESC_F_WRITE } else { 0 }
    }
}

/// A used chain as the device returned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The return value of [`Queue::add`] for the chain.
    pub id: u16,
    /// The written length that the device reported.
    pub len: u32,
}

/// The reason why a ring refuses to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// Not enough free descriptors for the chain.
    #[error("not enough free descriptors: take used chains first")]
    Full,
    /// The device returned an id that is not in flight.
    #[error("the device returned id {0}, which is not in flight")]
    UnknownId(u32),
    /// The device published more used entries than there are chains in flight.
    #[error("the device published {published} used entries with {in_flight} chains in flight")]
    TooManyUsed {
        /// Entries between the driver's position and the used index.
        published: u16,
        /// Chains that the driver has in flight.
        in_flight: u16,
    },
}

/// The two ring layouts.
#[derive(Debug)]
pub enum Ring {
    /// Split virtqueue.
    Split(SplitRing),
    /// Packed virtqueue.
    Packed(PackedRing),
}

macro_rules! on_ring {
    ($self:expr, $ring:ident => $call:expr) => {
        match &mut $self.ring {
            Ring::Split($ring) => $call,
            Ring::Packed($ring) => $call,
        }
    };
}

/// A virtqueue, its kick, call and err eventfds and its indirect tables.
#[derive(Debug)]
pub struct Queue {
    ring: Ring,
    memory: Arc<GuestMemory>,
    kick: EventFd,
    call: EventFd,
    err: EventFd,
    /// Epoll instance that sees each write to `call` once.
    calls: Epoll,
    tables: Vec<Option<Area>>,
}

impl Queue {
    /// Puts an empty ring with new eventfds into guest memory.
    pub fn new(
        memory: &Arc<GuestMemory>,
        size: u16,
        packed: bool,
        event_idx: bool,
    ) -> io::Result<Self> {
        let ring = if packed {
            Ring::Packed(PackedRing::new(memory, size, event_idx))
        } else {
            Ring::Split(SplitRing::new(memory, size, event_idx))
        };
        let call = EventFd::new(0)?;
        Ok(Self {
            ring,
            memory: memory.clone(),
            kick: EventFd::new(0)?,
            calls: edges_of(&call)?,
            call,
            err: EventFd::new(0)?,
            tables: vec![None; size.into()],
        })
    }

    /// The ring, for inspection or for hostile writes.
    pub fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// The split ring; panics on a packed one.
    pub fn split(&mut self) -> &mut SplitRing {
        match &mut self.ring {
            Ring::Split(ring) => ring,
            Ring::Packed(_) => panic!("this queue has a packed ring"),
        }
    }

    /// The packed ring; panics on a split one.
    pub fn packed(&mut self) -> &mut PackedRing {
        match &mut self.ring {
            Ring::Packed(ring) => ring,
            Ring::Split(_) => panic!("this queue has a split ring"),
        }
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.tables.len() as u16
    }

    /// Guest memory of the ring.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Guest-physical addresses of the three areas: descriptors, driver area, device area.
    pub fn addresses(&self) -> [u64; 3] {
        match &self.ring {
            Ring::Split(ring) => ring.addresses(),
            Ring::Packed(ring) => ring.addresses(),
        }
    }

    /// The value for SET_VRING_BASE with which the device resumes after the last chain that the
    /// driver collected. As with QEMU, the device sees chains in flight again (or finds them in
    /// flight).
    pub fn base(&self) -> u32 {
        match &self.ring {
            Ring::Split(ring) => ring.base().into(),
            Ring::Packed(ring) => ring.base(),
        }
    }

    /// The eventfd by which the driver kicks.
    pub fn kick_fd(&self) -> &EventFd {
        &self.kick
    }

    /// The eventfd by which the device calls.
    pub fn call_fd(&self) -> &EventFd {
        &self.call
    }

    /// The eventfd by which the device reports a ring fault.
    pub fn err_fd(&self) -> &EventFd {
        &self.err
    }

    /// Number of chains added and not yet returned.
    pub fn in_flight(&self) -> u16 {
        match &self.ring {
            Ring::Split(ring) => ring.in_flight(),
            Ring::Packed(ring) => ring.in_flight(),
        }
    }

    /// Adds a chain of descriptors in the ring itself. Seen by the device after [`Self::publish`].
    #[inline]
    pub fn add(&mut self, segments: &[Segment]) -> Result<u16, RingError> {
        on_ring!(self, ring => ring.add(segments))
    }

    /// Adds a chain through an indirect table of its own (one descriptor of the ring).
    #[inline]
    pub fn add_indirect(&mut self, segments: &[Segment]) -> Result<u16, RingError> {
        let slot = on_ring!(self, ring => ring.next_slot()).ok_or(RingError::Full)?;
        let bytes = 16 * segments.len();
        if self.tables[usize::from(slot)].as_ref().is_none_or(|table| table.len() < bytes) {
            let room = 16 * segments.len().next_power_of_two();
            self.tables[usize::from(slot)] = Some(self.memory.alloc_area(room, 16));
        }
        let table = self.tables[usize::from(slot)].as_ref().expect("made above");
        let packed = matches!(self.ring, Ring::Packed(_));
        write_indirect_table(table, segments, packed);
        let gpa = table.gpa();
        self.add_table(gpa, bytes as u32)
    }

    /// Adds a chain through a table that the caller has already written.
    #[inline]
    pub fn add_table(&mut self, gpa: u64, bytes: u32) -> Result<u16, RingError> {
        on_ring!(self, ring => ring.add_one(gpa, bytes, DESC_F_INDIRECT))
    }

    /// Publishes all added chains to the device.
    #[inline]
    pub fn publish(&mut self) {
        on_ring!(self, ring => ring.publish());
    }

    /// Kicks if the device asked for a kick for the chains published since the last check.
    #[inline]
    pub fn kick_if_asked(&mut self) -> bool {
        let asked = on_ring!(self, ring => ring.kick_is_asked());
        if asked {
            self.kick();
        }
        asked
    }

    /// Kicks unconditionally.
    pub fn kick(&self) {
        self.kick.write(1).expect("an eventfd counter never fills up by kicks");
    }

    /// Takes the next used chain, if there is one.
    #[inline]
    pub fn take_used(&mut self) -> Result<Option<Used>, RingError> {
        on_ring!(self, ring => ring.take_used())
    }

    /// Arms calls. `false`: the device has used a chain in the meantime, so do not sleep.
    #[inline]
    pub fn arm_calls(&mut self) -> bool {
        on_ring!(self, ring => ring.arm_calls())
    }

    /// Suppresses calls (a hint; late ones may still come).
    #[inline]
    pub fn suppress_calls(&mut self) {
        on_ring!(self, ring => ring.suppress_calls());
    }

    /// Sleeps until the device calls, in one system call. All calls since the last wait count as
    /// one. Does not read the eventfd's counter, because some daemons make the eventfd
    /// non-blocking.
    #[inline]
    pub fn wait_call(&self) -> io::Result<()> {
        wait_edge(&self.calls, -1).map(drop)
    }

    /// As [`Self::wait_call`], with a bound: `false` after the time limit.
    pub fn wait_call_for(&self, limit: Duration) -> io::Result<bool> {
        wait_edge(&self.calls, limit.as_millis().try_into().unwrap_or(i32::MAX))
    }

    /// True if the device has called since the last wait; consumes the call.
    pub fn take_call(&self) -> io::Result<bool> {
        self.wait_call_for(Duration::ZERO)
    }

    /// Waits until the device reports a ring fault: `false` after the time limit.
    pub fn wait_err(&self, limit: Duration) -> io::Result<bool> {
        wait_edge(&edges_of(&self.err)?, limit.as_millis().try_into().unwrap_or(i32::MAX))
    }
}

/// Writes a table of descriptors for `segments` in the split or in the packed format.
pub(crate) fn write_indirect_table(table: &Area, segments: &[Segment], packed: bool) {
    let last = segments.len().wrapping_sub(1);
    for (i, segment) in segments.iter().enumerate() {
        table.store_u64(16 * i, segment.gpa, Ordering::Relaxed);
        let word = if packed {
            packed_word(segment.len, 0, segment.flags())
        } else {
            let next = if i == last { 0 } else { DESC_F_NEXT };
            split_word(segment.len, segment.flags() | next, (i + 1) as u16)
        };
        table.store_u64(16 * i + 8, word, Ordering::Relaxed);
    }
}

/// The second half of a split descriptor.
#[inline]
pub(crate) fn split_word(len: u32, flags: u16, next: u16) -> u64 {
    u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48
}

/// The second half of a packed descriptor.
#[inline]
pub(crate) fn packed_word(len: u32, id: u16, flags: u16) -> u64 {
    u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48
}

/// True if moving an index from `old` to `new` passes the event index (section 2.7.10).
#[inline]
pub(crate) fn passes_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// An epoll instance that wakes once for each new write to an eventfd.
fn edges_of(event: &EventFd) -> io::Result<Epoll> {
    let epoll = Epoll::new()?;
    let interest = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
    epoll.ctl(ControlOperation::Add, event.as_raw_fd(), interest)?;
    Ok(epoll)
}

#[inline]
fn wait_edge(epoll: &Epoll, limit_ms: i32) -> io::Result<bool> {
    loop {
        match epoll.wait(limit_ms, &mut [EpollEvent::default()]) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            ready => return Ok(ready? > 0),
        }
    }
}
