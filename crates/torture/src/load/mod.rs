// SPDX-License-Identifier: Apache-2.0
//! A load that verifies every byte it reads, and knows what it wrote.

mod many;
mod slot;
pub(crate) mod stamp;

pub(crate) use many::{Handles, memory_for, under_load};

use crate::target::LIMIT;
use anyhow::{Context, Result, anyhow, bail, ensure};
use driver::{GuestMemory, Queue};
use lab_case::rng::Rng;
use slot::{Kind, Op, Slot};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use virtio_spec::blk::{S_IOERR, S_OK};

/// Polls of an empty used ring before the load sleeps, when it polls.
const SPINS: u32 = 2000;
/// How often a load whose device may be killed looks for a call that was lost with it.
const RENEW: Duration = Duration::from_millis(50);

/// Blocks of a write where there shall be many extents.
const FRAGMENT: u64 = 32;

/// What a load does.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    /// Sectors that only this load touches.
    pub(crate) sectors: Range<u64>,
    /// Sectors of a logical block.
    pub(crate) unit: u64,
    /// Requests in flight: room in bytes of each.
    pub(crate) rooms: Vec<usize>,
    /// Through indirect tables, or sometimes.
    pub(crate) indirect: bool,
    /// Requests with S_IOERR are no failure; what they touched is not known afterwards.
    pub(crate) errors_allowed: Arc<AtomicBool>,
    /// The device may be killed: a call may get lost with it.
    pub(crate) calls_may_be_lost: bool,
    /// WRITE_ZEROES is among the requests.
    pub(crate) zeroes: bool,
    /// Reads are as large as ever, writes and zeroed ranges of a few blocks, and the latter many:
    /// an image gets many extents.
    pub(crate) fragments: bool,
    /// Only reads: content that others have written.
    pub(crate) read_only: bool,
    /// Start of the random numbers.
    pub(crate) seed: u64,
}

impl Spec {
    /// A load of mixed sizes up to `largest` bytes.
    pub(crate) fn new(sectors: Range<u64>, unit: u64, largest: usize, seed: u64) -> Self {
        let small = largest.min(64 << 10);
        Self {
            sectors,
            unit,
            rooms: vec![largest, small, small, small, small, small],
            indirect: true,
            errors_allowed: Arc::new(AtomicBool::new(false)),
            calls_may_be_lost: false,
            zeroes: true,
            fragments: false,
            read_only: false,
            seed,
        }
    }

    /// Guest memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        self.rooms.iter().map(|&room| Slot::bytes(room)).sum()
    }
}

/// What a load did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    /// Requests that were completed.
    pub(crate) requests: u64,
    /// Those of them with S_IOERR.
    pub(crate) errors: u64,
    /// Bytes read and verified.
    pub(crate) verified: u64,
}

/// What is known of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// This generation.
    Is(u32),
    /// This generation or an earlier one, but whole.
    UpTo(u32),
}

/// A load on one queue.
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
    /// A load on sectors that are all zeroes.
    pub(crate) fn new(queue: Queue, memory: &Arc<GuestMemory>, spec: Spec) -> Self {
        let slots = spec.rooms.iter().map(|&room| Slot::new(memory, room)).collect();
        let sectors = vec![Known::Is(0); (spec.sectors.end - spec.sectors.start) as usize];
        let rng = Rng::new(spec.seed);
        let by_id = HashMap::new();
        let done = Done::default();
        Self { queue, spec, slots, by_id, sectors, generation: 0, rng, done }
    }

    /// Writes all sectors, so that what they held before does not matter.
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

    /// Runs while `go_on` says so, takes everything back, and reads all sectors.
    pub(crate) fn run(&mut self, mut go_on: impl FnMut(&Done) -> bool) -> Result<()> {
        while go_on(&self.done) {
            self.start_some()?;
            self.kick();
            self.take_one()?;
        }
        self.take_all()?;
        self.verify_all().context("the last look at everything")
    }

    /// What was done so far.
    pub(crate) fn done(&self) -> Done {
        self.done
    }

    /// Reads all sectors.
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
        let Spec { unit, zeroes, fragments, read_only, .. } = self.spec;
        let kind = match self.rng.below(20) {
            _ if read_only => Kind::Read,
            0 => Kind::Flush,
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
        // Sizes spread evenly over their orders of magnitude.
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
        let op = Op { kind, sector, count, generation };
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

    /// Waits for one used chain at least, and takes all there are.
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
        while self.queue.arm_calls() {
            let limit = if self.spec.calls_may_be_lost { RENEW } else { LIMIT };
            if !self.queue.wait_call_for(limit)? && Instant::now() >= end {
                return Err(self.silence());
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
            S_IOERR if self.spec.errors_allowed.load(Relaxed) => {
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

    /// After a write that failed, each of its sectors holds what it held, or the new, whole.
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
