// SPDX-License-Identifier: Apache-2.0
//! One queue's client: keeps `depth` requests in flight.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use driver::{Area, Queue};
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};
use virtio_spec::blk::SECTOR_BYTES;
use virtio_spec::features::{F_EVENT_IDX, F_INDIRECT_DESC, bit};

use crate::cpu::Times;
use crate::load::{Load, MIXED_ALIGN, Mode, Op, Outcome, READS_PERCENT, mixed_bytes};
use crate::wire::{Kind, Wire};

/// Empty polls between two looks at the clock.
const POLLS_PER_CLOCK: u32 = 1 << 14;
/// A server that returns nothing for this long has failed.
pub(crate) const SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// Latencies are kept to three digits up to this bound.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// When a run ends.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// After this time.
    Time(Duration),
    /// After so many requests of each queue (a few more are in flight then).
    Ios(u64),
}

/// Places for requests of mixed sizes on a disk of so many of the greatest blocks: the last one
/// leaves room for the greatest.
fn mixed_starts(blocks: u64, greatest: u32) -> u64 {
    (blocks - 1) * u64::from(greatest / MIXED_ALIGN) + 1
}

/// The notes of a worker in a run, for a time line.
#[derive(Clone, Debug, Default)]
pub(crate) struct Notes {
    /// The number of its thread.
    pub(crate) task: u32,
    /// Nanoseconds of CLOCK_MONOTONIC, and the requests that became available then.
    pub(crate) available: Vec<(u64, u64)>,
    /// The times at which it saw the end of each request.
    pub(crate) seen: Vec<u64>,
}

/// Nanoseconds of CLOCK_MONOTONIC, which the kernel's trace has, too.
fn monotonic() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A queue and all its requests, laid out.
pub(crate) struct Worker {
    pub(crate) index: u64,
    /// The notes of the next run; none: it notes nothing.
    pub(crate) notes: Option<Notes>,
    wire: Wire,
    queue: Queue,
    slots: Area,
    data: u64,
    data_stride: u64,
    /// Slot of each chain id in flight.
    slot_of: Vec<u16>,
    /// Kind of the request that is laid out in each slot.
    kinds: Vec<Kind>,
    /// Bytes of that request.
    sizes: Vec<u32>,
    started: Vec<Instant>,
    load: Load,
    indirect: bool,
    event_idx: bool,
    blocks: u64,
    random: u64,
    /// Next block of a sequential load.
    position: u64,
}

impl Worker {
    pub(crate) fn new(
        queue: Queue,
        load: &Load,
        wire: Wire,
        features: u64,
        blocks: u64,
        index: u64,
    ) -> Result<Self> {
        let indirect = features & bit(F_INDIRECT_DESC) != 0;
        let descriptors = if indirect { 1 } else { 3 };
        if u32::from(load.depth) * descriptors > u32::from(load.queue_size) {
            bail!("depth {} does not fit queue size {}", load.depth, load.queue_size);
        }
        let depth = usize::from(load.depth);
        let memory = queue.memory().clone();
        let data_stride = u64::from(load.block_bytes.next_multiple_of(4096));
        let data = memory.alloc_area(depth * data_stride as usize, 4096);
        // Touch every page and give writes something that does not compress.
        let pattern: Vec<u8> = (0..data.len()).map(|i| (i * 131 / 8) as u8).collect();
        data.write(0, &pattern);
        let slots = memory.alloc_area(depth * wire.slot_bytes(), wire.slot_bytes());
        let first = if load.op.writes() { Kind::Write } else { Kind::Read };
        for slot in 0..depth {
            wire.lay_out(&slots, slot * wire.slot_bytes(), first, load.block_bytes);
        }
        Ok(Self {
            index,
            notes: None,
            wire,
            slots,
            data: data.gpa(),
            data_stride,
            slot_of: vec![0; load.queue_size.into()],
            kinds: vec![first; depth],
            sizes: vec![load.block_bytes; depth],
            started: vec![Instant::now(); depth],
            load: load.clone(),
            indirect,
            event_idx: features & bit(F_EVENT_IDX) != 0,
            blocks,
            random: 0x9e37_79b9_7f4a_7c15 ^ (index + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9),
            position: blocks * index / u64::from(load.queues),
            queue,
        })
    }

    #[inline]
    fn next_random(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        ((u128::from(self.random) * u128::from(bound)) >> 64) as u64
    }

    #[inline]
    fn next_sector(&mut self) -> u64 {
        if self.load.op == Op::Mixed {
            let starts = mixed_starts(self.blocks, self.load.block_bytes);
            return self.next_random(starts) * (u64::from(MIXED_ALIGN) / SECTOR_BYTES);
        }
        let block = if self.load.op.is_sequential() {
            let block = self.position;
            self.position = if block + 1 == self.blocks { 0 } else { block + 1 };
            block
        } else {
            self.next_random(self.blocks)
        };
        block * (u64::from(self.load.block_bytes) / SECTOR_BYTES)
    }

    #[inline]
    fn next_kind(&mut self) -> Kind {
        let reads = match self.load.op {
            Op::Randread | Op::Read => true,
            Op::Randwrite | Op::Write | Op::Writeflush => false,
            Op::Randrw | Op::Mixed => self.next_random(100) < READS_PERCENT,
        };
        if reads { Kind::Read } else { Kind::Write }
    }

    #[inline]
    fn add(&mut self, slot: u16, now: Instant) -> Result<()> {
        let kind = self.next_kind();
        let sector = self.next_sector();
        let bytes = match self.load.op {
            Op::Mixed => mixed_bytes(self.next_random(100)),
            _ => self.load.block_bytes,
        };
        self.started[usize::from(slot)] = now;
        self.send(slot, kind, (sector, bytes))
    }

    #[inline]
    fn send(&mut self, slot: u16, kind: Kind, (sector, bytes): (u64, u32)) -> Result<()> {
        let at = usize::from(slot) * self.wire.slot_bytes();
        let index = usize::from(slot);
        if self.kinds[index] != kind || self.sizes[index] != bytes {
            self.wire.lay_out(&self.slots, at, kind, bytes);
            (self.kinds[index], self.sizes[index]) = (kind, bytes);
        }
        self.wire.aim(&self.slots, at, sector);
        let data = self.data + u64::from(slot) * self.data_stride;
        let header = self.slots.gpa() + at as u64;
        let all = self.wire.segments(header, data, kind, bytes);
        let without_data = [all[0], all[2]];
        let segments = if kind == Kind::Flush { &without_data[..] } else { &all[..] };
        let id = if self.indirect {
            self.queue.add_indirect(segments)?
        } else {
            self.queue.add(segments)?
        };
        self.slot_of[usize::from(id)] = slot;
        Ok(())
    }

    /// Keeps `depth` requests in flight until the end, then takes the last ones back.
    pub(crate) fn run(&mut self, until: Until) -> Result<Outcome> {
        let mut latency_ns = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3)?;
        let times = Times::of_this_thread()?;
        let begin = Instant::now();
        let (mut now, mut last, mut ios, mut polls) = (begin, begin, 0, 0_u32);
        let (end, ios_max) = match until {
            Until::Time(duration) => (Some(begin + duration), u64::MAX),
            Until::Ios(ios) => (None, ios),
        };
        if let Some(notes) = &mut self.notes {
            notes.task = kit::sched::this_task();
        }
        self.quiet_calls();
        for slot in 0..self.load.depth {
            self.add(slot, now)?;
        }
        self.show(u64::from(self.load.depth));
        while self.queue.in_flight() > 0 {
            let left = ios_max.saturating_sub(ios);
            let before = self.queue.in_flight();
            let (taken, done) = self.reap(&mut now, end, left, &mut latency_ns)?;
            if taken > 0 {
                (ios, last, polls) = (ios + done, now, 0);
                let added = self.queue.in_flight() as u64 + taken - before as u64;
                self.show(added);
            } else if self.load.mode == Mode::Spin {
                std::hint::spin_loop();
                polls += 1;
                if polls % POLLS_PER_CLOCK == 0 && last.elapsed() > SILENCE_LIMIT {
                    bail!("the server returned nothing for {SILENCE_LIMIT:?}");
                }
            } else if self.queue.arm_calls() {
                self.queue.wait_call()?;
                self.quiet_calls();
            }
        }
        let spent = Times::of_this_thread()?.since(&times);
        let (waited, busy) = (spent.waited, spent.busy);
        Ok(Outcome { ios, elapsed: now - begin, latency_ns, waited, busy })
    }

    /// Takes all used chains and adds as many new ones while there is time left. Gives the numbers
    /// of chains and of completed requests: a write with its FLUSH is one request of two chains.
    #[inline]
    fn reap(
        &mut self,
        now: &mut Instant,
        end: Option<Instant>,
        left: u64,
        latency: &mut Histogram<u64>,
    ) -> Result<(u64, u64)> {
        let (mut taken, mut done) = (0, 0);
        while let Some(used) = self.queue.take_used()? {
            if taken == 0 {
                *now = Instant::now();
            }
            taken += 1;
            if let Some(notes) = &mut self.notes {
                notes.seen.push(monotonic());
            }
            let slot = self.slot_of[usize::from(used.id)];
            self.wire.check(&self.slots, usize::from(slot) * self.wire.slot_bytes())?;
            if self.load.op == Op::Writeflush && self.kinds[usize::from(slot)] == Kind::Write {
                self.send(slot, Kind::Flush, (0, self.load.block_bytes))?;
                continue;
            }
            done += 1;
            latency.saturating_record((*now - self.started[usize::from(slot)]).as_nanos() as u64);
            if done < left && end.is_none_or(|end| *now < end) {
                self.add(slot, *now)?;
            }
        }
        Ok((taken, done))
    }

    #[inline]
    fn show(&mut self, added: u64) {
        if let Some(notes) = self.notes.as_mut().filter(|_| added > 0) {
            notes.available.push((monotonic(), added));
        }
        self.queue.publish();
        self.queue.kick_if_asked();
    }

    /// A spinning client wants no calls at all; a sleeping one none until it arms them again,
    /// which EVENT_IDX on a split ring gives by itself.
    fn quiet_calls(&mut self) {
        if self.load.mode == Mode::Spin || !self.event_idx || self.load.packed {
            self.queue.suppress_calls();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_place_of_mixed_requests_leaves_room_for_the_greatest() {
        let (blocks, greatest) = (10, 64 << 10);
        let last = (mixed_starts(blocks, greatest) - 1) * u64::from(MIXED_ALIGN);
        assert_eq!(last + u64::from(greatest), blocks * u64::from(greatest));
        assert_eq!(mixed_starts(1, greatest), 1);
    }
}
