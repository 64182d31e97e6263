// SPDX-License-Identifier: Apache-2.0
//! A queue of a device that lies, on a thread of its own.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, bail};
use lab_case::rng::Rng;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_spec::blk::{S_IOERR, S_OK};
use virtio_spec::split::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, IDX_OFFSET, RING_OFFSET,
};
use zerocopy::FromBytes;

use super::memory::Memory;
use crate::protocol::Lie;

/// How often a sleeping queue looks whether it shall end.
const LOOK_EVERY: Duration = Duration::from_millis(20);

const DESC_BYTES: u64 = 16;
const DESC_FLAGS_OFFSET: u64 = 12;
const USED_ELEM_BYTES: u64 = 8;

/// Most descriptors that are followed.
const CHAIN_MAX: usize = 1024;

/// A status byte that the specification does not know.
const STATUS_UNKNOWN: u8 = 0xab;

/// How a device behaves.
pub(super) struct Manner {
    pub(super) lie: Lie,
    /// How many requests of all queues are still answered as they should be.
    pub(super) honest: Arc<AtomicU32>,
    pub(super) rng: Rng,
}

impl Manner {
    /// What to lie about now.
    fn lie(&self) -> Lie {
        match self.honest.load(Ordering::Relaxed) {
            0 => self.lie,
            _ => Lie::Nothing,
        }
    }

    /// One request more.
    fn count(&self) {
        let less = |left: u32| left.checked_sub(1);
        let _ = self.honest.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

/// A queue's set-up, and its thread.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) size: u16,
    /// The next entry of the avail ring.
    pub(super) next: u16,
    addresses: [u64; 3],
    call: Arc<Mutex<Option<File>>>,
    running: Option<Running>,
}

struct Running {
    stop: Arc<AtomicBool>,
    next: Arc<AtomicU16>,
    thread: JoinHandle<()>,
}

impl Queue {
    /// Descriptor table, used ring, avail ring: the order of the message.
    pub(super) fn set_addresses(&mut self, addresses: [u64; 3]) {
        self.addresses = addresses;
    }

    pub(super) fn set_call(&mut self, call: Option<File>) {
        *self.call.lock().unwrap_or_else(PoisonError::into_inner) = call;
    }

    pub(super) fn start(&mut self, memory: Arc<Memory>, kick: File, manner: Manner) -> Result<()> {
        if self.size == 0 {
            bail!("a queue without a size");
        }
        let [table, used, avail] = self.addresses;
        let mut ring = Ring {
            table: memory.guest_address(table)?,
            used: memory.guest_address(used)?,
            avail: memory.guest_address(avail)?,
            memory,
            size: self.size,
            next: self.next,
            used_index: self.next,
            call: Arc::clone(&self.call),
            lie: Lie::Nothing,
            manner,
        };
        let (stop, next) = (Arc::default(), Arc::new(AtomicU16::new(self.next)));
        let (stopped, position) = (Arc::clone(&stop), Arc::clone(&next));
        let body = move || {
            if let Err(why) = ring.run(&kick, &stopped) {
                eprintln!("helper: liar: a queue ends: {why:#}");
            }
            position.store(ring.next, Ordering::Release);
        };
        let thread = std::thread::Builder::new().name("liar".into()).spawn(body)?;
        self.running = Some(Running { stop, next, thread });
        Ok(())
    }

    pub(super) fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.stop.store(true, Ordering::Release);
            let _ = running.thread.join(); // A panic was told on the log.
            self.next = running.next.load(Ordering::Acquire);
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Ring {
    memory: Arc<Memory>,
    table: u64,
    used: u64,
    avail: u64,
    size: u16,
    next: u16,
    used_index: u16,
    call: Arc<Mutex<Option<File>>>,
    /// What the request at hand is lied about.
    lie: Lie,
    manner: Manner,
}

impl Ring {
    fn run(&mut self, mut kick: &File, stop: &AtomicBool) -> Result<()> {
        let limit = Timespec::try_from(LOOK_EVERY)?;
        while !stop.load(Ordering::Acquire) {
            let mut fds = [PollFd::from_borrowed_fd(kick.as_fd(), PollFlags::IN)];
            if poll(&mut fds, Some(&limit))? > 0 {
                kick.read_exact(&mut [0; 8])?;
            }
            self.lie = self.manner.lie();
            self.scribble()?;
            let end = self.memory.read_u16(self.avail + IDX_OFFSET as u64)?;
            let mut steps = 0;
            while self.next != end && steps <= self.size {
                let at = self.avail + RING_OFFSET as u64 + 2 * u64::from(self.next % self.size);
                let head = self.memory.read_u16(at)?;
                self.next = self.next.wrapping_add(1);
                steps += 1;
                self.lie = self.manner.lie();
                self.manner.count();
                self.answer(head)?;
            }
            let asked = steps > 0 && self.lie != Lie::CallsNever;
            if asked || self.lie == Lie::CallsAlways {
                self.call();
            }
        }
        Ok(())
    }

    /// One request: what it wants done does not matter.
    fn answer(&mut self, head: u16) -> Result<()> {
        let silent = match self.lie {
            Lie::NeverAnswers => true,
            Lie::AnswersHalf => self.manner.rng.one_in(2),
            _ => false,
        };
        if silent {
            return Ok(());
        }
        // A guest that writes nonsense itself, because its ring was scribbled on.
        let written = self.fill(head).unwrap_or(1);
        self.push(head, written)
    }

    /// Writes random data and the status byte; returns how much was written.
    fn fill(&mut self, head: u16) -> Result<u32> {
        let chain = self.chain(head)?;
        let mut writable = chain.iter().filter(|desc| desc.flags & DESC_F_WRITE != 0).peekable();
        let mut written = 0;
        while let Some(desc) = writable.next() {
            written += desc.len;
            if writable.peek().is_some() {
                let mut bytes = vec![0; desc.len.min(1 << 20) as usize];
                self.manner.rng.fill(&mut bytes);
                self.memory.write(desc.addr, &bytes)?;
            } else if self.lie != Lie::StatusNotWritten && desc.len > 0 {
                let status = match self.lie {
                    Lie::StatusUnknown => STATUS_UNKNOWN,
                    Lie::Nothing => S_OK,
                    _ if self.manner.rng.one_in(16) => S_IOERR,
                    _ => S_OK,
                };
                self.memory.write(desc.addr + u64::from(desc.len) - 1, &[status])?;
            }
        }
        Ok(written)
    }

    fn chain(&self, head: u16) -> Result<Vec<Desc>> {
        let (mut table, mut entries) = (self.table, u32::from(self.size));
        let (mut at, mut chain) = (head, Vec::new());
        while chain.len() < CHAIN_MAX {
            if u32::from(at) >= entries {
                bail!("a descriptor beyond its table");
            }
            let mut bytes = [0; DESC_BYTES as usize];
            self.memory.read(table + DESC_BYTES * u64::from(at), &mut bytes)?;
            let Ok(desc) = Desc::read_from_bytes(&bytes) else { bail!("a descriptor's size") };
            if desc.flags & DESC_F_INDIRECT != 0 {
                (table, entries, at) = (desc.addr, desc.len / DESC_BYTES as u32, 0);
                continue;
            }
            chain.push(desc);
            if desc.flags & DESC_F_NEXT == 0 {
                return Ok(chain);
            }
            at = desc.next;
        }
        bail!("a chain without end")
    }

    fn push(&mut self, head: u16, written: u32) -> Result<()> {
        let id = match self.lie {
            Lie::IdsOutOfRange => u32::from(self.size) + self.manner.rng.below(1 << 20) as u32,
            Lie::IdsRandom => self.manner.rng.below(self.size.into()) as u32,
            _ => head.into(),
        };
        let length = match self.lie {
            Lie::LengthsHuge => u32::MAX,
            Lie::LengthsZero => 0,
            _ => written,
        };
        if self.lie == Lie::ChainsJoined {
            self.join(head)?;
        }
        self.put(id, length)?;
        if self.lie == Lie::IdsTwice {
            self.put(id, length)?;
        }
        let mut index = self.used_index;
        if self.lie == Lie::IndexJumps && self.manner.rng.one_in(8) {
            index = index.wrapping_add(self.manner.rng.below(u16::MAX.into()) as u16);
        }
        self.memory.write(self.used + IDX_OFFSET as u64, &index.to_le_bytes())
    }

    fn put(&mut self, id: u32, length: u32) -> Result<()> {
        let slot = u64::from(self.used_index % self.size);
        let at = self.used + RING_OFFSET as u64 + USED_ELEM_BYTES * slot;
        self.memory.write(at, &[id.to_le_bytes(), length.to_le_bytes()].concat())?;
        self.used_index = self.used_index.wrapping_add(1);
        Ok(())
    }

    /// Says of a chain that another one belongs to it.
    fn join(&self, head: u16) -> Result<()> {
        let at = self.table + DESC_BYTES * u64::from(head % self.size) + DESC_FLAGS_OFFSET;
        let flags = self.memory.read_u16(at)? | DESC_F_NEXT;
        self.memory.write(at, &flags.to_le_bytes())
    }

    /// Overwrites what belongs to the driver.
    fn scribble(&mut self) -> Result<()> {
        if self.lie != Lie::ScribblesRing || !self.manner.rng.one_in(8) {
            return Ok(());
        }
        let mut bytes = [0; 16];
        self.manner.rng.fill(&mut bytes);
        let slot = self.manner.rng.below(self.size.into());
        self.memory.write(self.table + DESC_BYTES * slot, &bytes)?;
        self.memory.write(self.avail + RING_OFFSET as u64 + 2 * slot, &bytes[..2])
    }

    fn call(&self) {
        let call = self.call.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut call) = call.as_ref() {
            // A full counter is a call as well.
            let _ = call.write(&1_u64.to_ne_bytes());
        }
    }
}
