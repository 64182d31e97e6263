// SPDX-License-Identifier: Apache-2.0
//! A load that records the sectors that the device has promised to be durable: those written before
//! a completed FLUSH, or, without a write cache, those of each completed write.

use crate::host::load::stamp;
use anyhow::{Result, ensure};
use driver::{Device, Request};
use kit::rng::Rng;
use std::collections::HashMap;
use virtio_spec::blk::S_OK;

/// Number of sectors that are written.
pub(super) const SECTORS: u64 = 4096;
/// Sectors of the largest write.
const WRITE_MAX: u64 = 64;

enum Sent {
    Write {
        first: u64,
        count: u64,
        generation: u32,
    },
    /// Generations that were complete when the FLUSH was sent.
    Flush {
        covers: Vec<u32>,
    },
}

/// Writes and flushes on all queues of a device.
pub(super) struct Writer<'a> {
    device: &'a mut Device,
    /// The device has no volatile write cache.
    write_through: bool,
    rng: Rng,
    generation: u32,
    /// Generation of the last completed write of each sector.
    ended: Vec<u32>,
    /// Oldest generation that each sector may have after a power cut.
    promised: Vec<u32>,
    sent: Vec<HashMap<u16, Sent>>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(
        device: &'a mut Device,
        queues: usize,
        write_through: bool,
        seed: u64,
    ) -> Self {
        let none = vec![0; SECTORS as usize];
        let sent = (0..queues).map(|_| HashMap::new()).collect();
        let rng = Rng::new(seed);
        Self {
            device,
            write_through,
            rng,
            generation: 0,
            ended: none.clone(),
            promised: none,
            sent,
        }
    }

    /// Writes on all queues, with a FLUSH in the middle; returns the promises so far.
    pub(super) fn round(&mut self) -> Result<&[u32]> {
        self.write_some()?;
        for _ in 0..self.rng.below(4) {
            self.collect()?;
        }
        if !self.write_through {
            self.submit(&Request::flush(), Sent::Flush { covers: self.ended.clone() })?;
        }
        self.write_some()?;
        while self.sent.iter().any(|sent| !sent.is_empty()) {
            self.collect()?;
        }
        Ok(&self.promised)
    }

    fn write_some(&mut self) -> Result<()> {
        for _ in 0..2 + self.rng.below(5) {
            let count = 1 + self.rng.below(WRITE_MAX);
            let first = self.rng.below(SECTORS - count + 1);
            if self.is_busy(first, count) {
                continue;
            }
            self.generation += 1;
            let generation = self.generation;
            let mut data = vec![0; count as usize * stamp::SECTOR];
            for (sector, bytes) in (first..).zip(data.chunks_exact_mut(stamp::SECTOR)) {
                stamp::fill(bytes, sector, generation);
            }
            self.submit(&Request::write(first, &data), Sent::Write { first, count, generation })?;
        }
        Ok(())
    }

    fn is_busy(&self, from: u64, sectors: u64) -> bool {
        self.sent.iter().flat_map(HashMap::values).any(|sent| match sent {
            Sent::Write { first, count, .. } => from < first + count && *first < from + sectors,
            Sent::Flush { .. } => false,
        })
    }

    fn submit(&mut self, request: &Request, what: Sent) -> Result<()> {
        let queue = self.rng.below(self.sent.len() as u64) as usize;
        let layout = self.device.layout();
        let id = self.device.queue(queue).submit(request, &layout)?;
        ensure!(self.sent[queue].insert(id, what).is_none(), "chain {id} is in flight already");
        Ok(())
    }

    /// Waits for one request on a queue that has requests in flight.
    fn collect(&mut self) -> Result<()> {
        let busy: Vec<_> = (0..self.sent.len()).filter(|&n| !self.sent[n].is_empty()).collect();
        if busy.is_empty() {
            return Ok(());
        }
        let queue = *self.rng.pick(&busy);
        let (id, completion) = self.device.queue(queue).collect()?;
        ensure!(completion.status == Some(S_OK), "status {:?}", completion.status);
        match self.sent[queue].remove(&id) {
            Some(Sent::Write { first, count, generation }) => {
                let sectors = first as usize..(first + count) as usize;
                self.ended[sectors.clone()].fill(generation);
                if self.write_through {
                    self.promised[sectors].fill(generation);
                }
            }
            Some(Sent::Flush { covers }) => self.promised = covers,
            None => anyhow::bail!("chain {id} came back twice"),
        }
        Ok(())
    }
}
