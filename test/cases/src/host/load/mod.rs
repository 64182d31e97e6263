// SPDX-License-Identifier: Apache-2.0
//! A load that verifies every byte that it reads, and knows the data that it wrote.

mod many;
mod periods;
mod slot;
pub(crate) mod stamp;

pub(crate) use many::{Handles, memory_for, under_load};
pub(crate) use periods::{Periods, allow_errors, allow_lost_calls};

use crate::host::target::LIMIT;
use anyhow::{Context, Result, anyhow, bail, ensure};
use driver::{GuestMemory, Queue};
use kit::rng::Rng;
use periods::Moment;
use slot::{Kind, Op, Slot};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_spec::blk::{S_IOERR, S_OK};

/// Polls of an empty used ring before a polling load sleeps.
const SPINS: u32 = 2000;
/// Interval at which a load looks whether its call may be lost.
const RENEW: Duration = Duration::from_millis(50);

/// Blocks of a write that creates many extents.
const FRAGMENT: u64 = 32;

/// Specification of a load.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    /// Sectors that no other load touches.
    pub(crate) sectors: Range<u64>,
    /// Sectors per logical block.
    pub(crate) unit: u64,
    /// Room in bytes of each request in flight.
    pub(crate) rooms: Vec<usize>,
    /// Uses indirect tables for some of the requests.
    pub(crate) indirect: bool,
    /// Lets requests end with S_IOERR; the content of the sectors that they touched is then unknown.
    pub(crate) errors: Periods,
    /// Lets calls be lost, as by the death of a device between a used request and its call.
    pub(crate) lost_calls: Periods,
    /// The load includes WRITE_ZEROES requests.
    pub(crate) zeroes: bool,
    /// The load includes FLUSH requests.
    pub(crate) flushes: bool,
    /// Reads stay large; writes and zeroed ranges have a few blocks, and zeroed ranges are
    /// frequent. This gives an image many extents.
    pub(crate) fragments: bool,
    /// All data is aligned in memory, as drivers do it: no request waits for a bounce buffer of the device.
    pub(crate) aligned: bool,
    /// The load only reads, content that other loads have written.
    pub(crate) read_only: bool,
    /// Seed of the random numbers.
    pub(crate) seed: u64,
}

impl Spec {
    /// A load of requests of mixed sizes up to `largest` bytes.
    pub(crate) fn new(sectors: Range<u64>, unit: u64, largest: usize, seed: u64) -> Self {
        let small = largest.min(64 << 10);
        Self {
            sectors,
            unit,
            rooms: vec![largest, small, small, small, small, small],
            indirect: true,
            errors: Periods::default(),
            lost_calls: Periods::default(),
            zeroes: true,
            flushes: true,
            fragments: false,
            aligned: false,
            read_only: false,
            seed,
        }
    }

    /// Bytes of guest memory for the load.
    pub(crate) fn bytes(&self) -> usize {
        self.rooms.iter().map(|&room| Slot::bytes(room)).sum()
    }
}

/// Totals of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    /// Number of completed requests.
    pub(crate) requests: u64,
    /// Number of completed requests with S_IOERR.
    pub(crate) errors: u64,
    /// Number of bytes that were read and verified.
    pub(crate) verified: u64,
}

/// Known content of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// Exactly this generation.
    Is(u32),
    /// A whole sector of this generation or an earlier one.
    UpTo(u32),
}

/// A running load on one queue.
pub(crate) struct Load {
    queue: Queue,
    spec: Spec,
    slots: Vec<Slot>,
    by_id: HashMap<u16, usize>,
    sectors: Vec<Known>,
    generation: u32,
    rng: Rng,
    done: Done,
}

impl Load {
    /// Creates a load on sectors that contain only zeroes.
    pub(crate) fn new(queue: Queue, memory: &Arc<GuestMemory>, spec: Spec) -> Self {
        let slot = |&room: &usize| Slot::new(memory, room, spec.unit, spec.aligned);
        let slots = spec.rooms.iter().map(slot).collect();
        let sectors = vec![Known::Is(0); (spec.sectors.end - spec.sectors.start) as usize];
        let rng = Rng::new(spec.seed);
        let by_id = HashMap::new();
        let done = Done::default();
        Self { queue, spec, slots, by_id, sectors, generation: 0, rng, done }
    }

    /// Writes all sectors, so that their earlier content does not matter.
    pub(crate) fn prepare(&mut self) -> Result<()> {
        let room = self.slots[0].room() as u64 / 512;
        let mut sector = self.spec.sectors.start;
        while sector < self.spec.sectors.end {
            let count = room.min(self.spec.sectors.end - sector);
            self.start(0, Kind::Write, sector, count)?;
            self.kick();
            self.take_all()?;
            sector += count;
        }
        Ok(())
    }

    /// Runs while `go_on` returns true, collects all requests in flight, and verifies all sectors.
    pub(crate) fn run(&mut self, mut go_on: impl FnMut(&Done) -> bool) -> Result<()> {
        while go_on(&self.done) {
            self.start_some()?;
            self.kick();
            self.take_one()?;
        }
        self.take_all()?;
        self.verify_all().context("the last look at everything")
    }

    /// Totals so far.
    pub(crate) fn done(&self) -> Done {
        self.done
    }

    /// Reads and verifies all sectors.
    fn verify_all(&mut self) -> Result<()> {
        let room = self.slots[0].room() as u64 / 512;
        let mut sector = self.spec.sectors.start;
        while sector < self.spec.sectors.end {
            let count = room.min(self.spec.sectors.end - sector);
            self.start(0, Kind::Read, sector, count)?;
            self.kick();
            self.take_all()?;
            sector += count;
        }
        Ok(())
    }

    fn kick(&mut self) {
        self.queue.publish();
        self.queue.kick_if_asked();
    }

    fn start_some(&mut self) -> Result<()> {
        for slot in 0..self.slots.len() {
            if self.slots[slot].op.is_some() {
                continue;
            }
            let (kind, sector, count) = self.choose(slot);
            let busy = self.slots.iter().filter_map(|slot| slot.op);
            if busy.filter(|op| op.kind != Kind::Flush).any(|op| op.overlaps(sector, count)) {
                continue;
            }
            self.start(slot, kind, sector, count)?;
        }
        Ok(())
    }

    fn choose(&mut self, slot: usize) -> (Kind, u64, u64) {
        let Spec { unit, zeroes, flushes, fragments, read_only, .. } = self.spec;
        let kind = match self.rng.below(20) {
            _ if read_only => Kind::Read,
            0 if flushes => Kind::Flush,
            1 if zeroes => Kind::Zeroes,
            11..16 if fragments => Kind::Zeroes,
            2..11 => Kind::Read,
            _ => Kind::Write,
        };
        if kind == Kind::Flush {
            return (kind, 0, 0);
        }
        let blocks = (self.spec.sectors.end - self.spec.sectors.start) / unit;
        let room = self.slots[slot].room() as u64 / 512 / unit;
        let most = if fragments && kind != Kind::Read { FRAGMENT } else { room };
        let most = most.min(blocks / 2).max(1);
        // Sizes are uniform over their orders of magnitude.
        let order = self.rng.below(u64::from(most.ilog2()) + 1);
        let count = (1 + self.rng.below(2 << order)).min(most);
        let block = self.rng.below(blocks - count + 1);
        (kind, self.spec.sectors.start + block * unit, count * unit)
    }

    fn start(&mut self, slot: usize, kind: Kind, sector: u64, count: u64) -> Result<()> {
        let mut data = Vec::new();
        let generation = match kind {
            Kind::Read | Kind::Flush => 0,
            Kind::Zeroes => 0,
            Kind::Write => {
                self.generation += 1;
                data.resize(count as usize * 512, 0);
                for (n, bytes) in (sector..).zip(data.chunks_exact_mut(512)) {
                    stamp::fill(bytes, n, self.generation);
                }
                self.generation
            }
        };
        if kind == Kind::Read {
            data.resize(count as usize * 512, 0xee);
        }
        let submitted = self.spec.errors.now();
        let op = Op { kind, sector, count, generation, submitted };
        let indirect = self.spec.indirect && !self.rng.one_in(4);
        let slots = &mut self.slots;
        let id = slots[slot].start(&mut self.queue, &mut self.rng, op, &data, indirect)?;
        self.by_id.insert(id, slot);
        Ok(())
    }

    fn take_all(&mut self) -> Result<()> {
        while !self.by_id.is_empty() {
            self.take_one()?;
        }
        Ok(())
    }

    /// Waits for at least one used chain, and takes all that are available.
    fn take_one(&mut self) -> Result<()> {
        if self.by_id.is_empty() {
            return Ok(());
        }
        self.wait()?;
        while let Some(used) = self.queue.take_used()? {
            self.finish(used.id, used.len)?;
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        let end = Instant::now() + LIMIT;
        if self.rng.one_in(3) {
            self.queue.suppress_calls();
            for _ in 0..SPINS {
                if self.has_used() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        loop {
            let since = self.spec.lost_calls.now();
            if !self.queue.arm_calls() {
                return Ok(());
            }
            self.wait_for_call(since, end)?;
        }
    }

    /// Waits for a call. A used request without a call ends the wait only if calls may be lost.
    fn wait_for_call(&mut self, since: Moment, end: Instant) -> Result<()> {
        while !self.queue.wait_call_for(RENEW)? {
            if Instant::now() >= end {
                return Err(self.silence());
            }
            if self.spec.lost_calls.allowed_since(since) {
                break;
            }
        }
        Ok(())
    }

    fn has_used(&mut self) -> bool {
        let position = self.queue.base() as u16;
        self.queue.split().used_idx() != position
    }

    fn silence(&mut self) -> anyhow::Error {
        let lost = if self.has_used() { "a call was lost" } else { "nothing was used" };
        let waiting: Vec<_> = self.slots.iter().filter_map(|slot| slot.op).collect();
        let ring = self.queue.split();
        let [_, avail, _] = ring.areas();
        let avail = avail.load_u16(2, std::sync::atomic::Ordering::Acquire);
        anyhow!(
            "{lost} for {LIMIT:?}; avail {avail}, used {}, in flight: {waiting:?}",
            ring.used_idx()
        )
    }

    fn finish(&mut self, id: u16, written: u32) -> Result<()> {
        let slot = self.by_id.remove(&id).with_context(|| format!("chain {id} came back twice"))?;
        let op = self.slots[slot].op.take().expect("it was in flight");
        let status = self.slots[slot].status();
        self.done.requests += 1;
        match status {
            S_OK => {}
            S_IOERR if self.spec.errors.allowed_since(op.submitted) => {
                self.done.errors += 1;
                self.forget(&op);
                return Ok(());
            }
            _ => bail!("status {status:#x} of {op:?}"),
        }
        let data_len = if op.kind == Kind::Read { op.count as usize * 512 } else { 0 };
        ensure!(written as usize == data_len + 1, "{written} bytes written by {op:?}");
        match op.kind {
            Kind::Read => self.verify(slot, &op)?,
            Kind::Write | Kind::Zeroes => self.set(&op, Known::Is(op.generation)),
            Kind::Flush => {}
        }
        Ok(())
    }

    fn set(&mut self, op: &Op, known: Known) {
        let first = (op.sector - self.spec.sectors.start) as usize;
        self.sectors[first..first + op.count as usize].fill(known);
    }

    /// After a failed write, each of its sectors has its old content or the new one, whole.
    fn forget(&mut self, op: &Op) {
        if matches!(op.kind, Kind::Write | Kind::Zeroes) {
            self.set(op, Known::UpTo(self.generation));
        }
    }

    fn verify(&mut self, slot: usize, op: &Op) -> Result<()> {
        let data = self.slots[slot].data(op.count as usize * 512);
        for (sector, bytes) in (op.sector..).zip(data.chunks_exact(512)) {
            let known = self.sectors[(sector - self.spec.sectors.start) as usize];
            let got = stamp::generation_of(bytes, sector);
            let right = match (got, known) {
                (Some(got), Known::Is(generation)) => got == generation,
                (Some(got), Known::UpTo(last)) => got <= last,
                (None, _) => false,
            };
            ensure!(
                right,
                "sector {sector}: generation {got:?}, expected {known:?}, first bytes {:02x?}; {op:?}",
                &bytes[..16]
            );
        }
        self.done.verified += data.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::{Acquire, Release};

    /// A load that waits for the call of a request, which is used already.
    fn waiting() -> (Load, Moment) {
        let spec = Spec::new(0..64, 1, 4096, 1);
        let memory = GuestMemory::new(&memory_for(std::slice::from_ref(&spec))).unwrap();
        let queue = Queue::new(&memory, 16, false, false).unwrap();
        let mut load = Load::new(queue, &memory, spec);
        load.start(0, Kind::Read, 0, 8).unwrap();
        let since = load.spec.lost_calls.now();
        assert!(load.queue.arm_calls());
        let [_, _, used] = load.queue.split().areas();
        used.store_u16(2, 1, Release);
        assert!(load.has_used());
        (load, since)
    }

    #[test]
    fn a_used_request_ends_no_wait_before_its_call() {
        let (mut load, since) = waiting();
        let (call, called) = (load.queue.call_fd().try_clone().unwrap(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(RENEW * 4);
                called.store(true, Release);
                call.write(1).unwrap();
            });
            load.wait_for_call(since, Instant::now() + LIMIT).unwrap();
            assert!(called.load(Acquire));
        });
        let why = load.wait_for_call(since, Instant::now()).unwrap_err();
        assert!(why.to_string().starts_with("a call was lost"), "{why}");
    }

    #[test]
    fn a_call_may_be_lost_in_a_period_that_began_during_the_wait_for_it() {
        let (mut load, since) = waiting();
        load.spec.lost_calls.allow(true);
        load.wait_for_call(since, Instant::now() + LIMIT).unwrap();
        load.spec.lost_calls.allow(false);
        load.wait_for_call(since, Instant::now() + LIMIT).unwrap();
        let since = load.spec.lost_calls.now();
        assert!(load.wait_for_call(since, Instant::now()).is_err(), "the period has ended");
    }
}
