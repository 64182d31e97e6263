// SPDX-License-Identifier: Apache-2.0
//! A queue of a lying device, on its own thread.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use super::memory::Memory;
use super::packed::Packed;
use super::split::Split;
use anyhow::{Result, bail};
use kit::disks::Lie;
use kit::rng::Rng;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_spec::blk::{S_IOERR, S_OK};

/// Interval at which a sleeping queue checks if it must end.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A status byte that the specification does not know.
const STATUS_UNKNOWN: u8 = 0xab;

/// A buffer of a request.
pub(super) struct Part {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) writable: bool,
}

/// A request as read from the ring.
pub(super) struct Chain {
    pub(super) id: u16,
    /// Places that it takes in the used ring.
    pub(super) places: u16,
    /// Empty if the guest's own ring content is invalid, because the device scribbled on it.
    pub(super) parts: Vec<Part>,
}

/// After such a lie the ring is no longer what the driver takes it for.
fn is_about_a_ring(lie: Lie) -> bool {
    use Lie::{ChainsJoined, IdsOutOfRange, IdsRandom, IdsTwice, IndexJumps, ScribblesRing};
    matches!(lie, IdsOutOfRange | IdsTwice | IdsRandom | IndexJumps | ScribblesRing | ChainsJoined)
}

/// The operations common to split and packed rings.
pub(super) trait Format: Send {
    /// Takes the next request, if there is one.
    fn take(&mut self, memory: &Memory) -> Result<Option<Chain>>;
    /// Adds a used entry with these values for a chain.
    fn put(&mut self, memory: &Memory, id: u32, len: u32, chain: &Chain) -> Result<()>;
    /// Publishes the added entries and `jump` more that were not added.
    fn publish(&mut self, memory: &Memory, jump: u16) -> Result<()>;
    /// Changes a chain so that it seems to continue.
    fn join(&mut self, memory: &Memory, chain: &Chain) -> Result<()>;
    /// Overwrites the driver's part of the ring.
    fn scribble(&mut self, memory: &Memory, rng: &mut Rng) -> Result<()>;
    /// The device's position, in the form of GET_VRING_BASE.
    fn base(&self) -> u32;
}

/// The part of a device that its queues share.
pub(super) struct Shared {
    /// Requests that are still to be answered correctly.
    honest: AtomicU32,
    /// The device has lied about a ring. The driver may have taken requests back, and no driver survives a device that
    /// writes to memory that was freed. A queue that writes to buffers holds the lock for reading.
    has_lied: RwLock<bool>,
}

impl Shared {
    pub(super) fn new(honest: u32) -> Self {
        Self { honest: AtomicU32::new(honest), has_lied: RwLock::new(false) }
    }

    /// The driver starts over, after a reset.
    pub(super) fn start_over(&self, honest: u32) {
        self.honest.store(honest, Ordering::Relaxed);
    }

    /// From here on no queue writes to buffers.
    fn lies_about_a_ring(&self) {
        *self.has_lied.write().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

/// The behaviour of a device.
pub(super) struct Manner {
    pub(super) lie: Lie,
    pub(super) shared: Arc<Shared>,
    pub(super) rng: Rng,
}

impl Manner {
    /// The lie for the next request.
    fn lie(&self) -> Lie {
        match self.shared.honest.load(Ordering::Relaxed) {
            0 => self.lie,
            _ => Lie::Nothing,
        }
    }

    /// Counts one correctly answered request.
    fn count(&self) {
        let less = |left: u32| left.checked_sub(1);
        let _ = self.shared.honest.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

/// A queue's set-up and its thread.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) size: u16,
    /// The device's first position, in the form of SET_VRING_BASE.
    pub(super) base: u32,
    addresses: [u64; 3],
    call: Arc<Mutex<Option<File>>>,
    running: Option<Running>,
}

struct Running {
    stop: Arc<AtomicBool>,
    base: Arc<AtomicU32>,
    thread: JoinHandle<()>,
}

impl Queue {
    /// Sets the addresses in the order of the message: descriptor table, used ring, avail ring. (Of
    /// a packed ring: the ring, the device's area, the driver's area.)
    pub(super) fn set_addresses(&mut self, addresses: [u64; 3]) {
        self.addresses = addresses;
    }

    pub(super) fn set_call(&mut self, call: Option<File>) {
        *self.call.lock().unwrap_or_else(PoisonError::into_inner) = call;
    }

    pub(super) fn start(
        &mut self,
        memory: Arc<Memory>,
        kick: File,
        packed: bool,
        manner: Manner,
    ) -> Result<()> {
        let (size, base) = (self.size, self.base);
        if size == 0 {
            bail!("a queue without a size");
        }
        let mut addresses = self.addresses;
        for address in &mut addresses {
            *address = memory.guest_address(*address)?;
        }
        let format: Box<dyn Format> = if packed {
            Box::new(Packed::new(size, base, addresses))
        } else {
            Box::new(Split::new(size, base, addresses))
        };
        let mut ring =
            Ring { format, memory, size, call: Arc::clone(&self.call), lie: Lie::Nothing, manner };
        let (stop, base) = (Arc::default(), Arc::new(AtomicU32::new(base)));
        let (stopped, position) = (Arc::clone(&stop), Arc::clone(&base));
        let body = move || {
            if let Err(why) = ring.run(&kick, &stopped) {
                eprintln!("helper: liar: a queue ends: {why:#}");
            }
            position.store(ring.format.base(), Ordering::Release);
        };
        let thread = std::thread::Builder::new().name("liar".into()).spawn(body)?;
        self.running = Some(Running { stop, base, thread });
        Ok(())
    }

    pub(super) fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.stop.store(true, Ordering::Release);
            let _ = running.thread.join(); // A panic is in the log.
            self.base = running.base.load(Ordering::Acquire);
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
    format: Box<dyn Format>,
    size: u16,
    call: Arc<Mutex<Option<File>>>,
    /// The lie for the current request.
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
            let mut steps = 0;
            while steps <= self.size {
                let Some(chain) = self.format.take(&self.memory)? else { break };
                steps += 1;
                self.lie = self.manner.lie();
                self.manner.count();
                self.answer(&chain)?;
            }
            let asked = steps > 0 && self.lie != Lie::CallsNever;
            if asked || self.lie == Lie::CallsAlways {
                self.call();
            }
        }
        Ok(())
    }

    /// Answers one request, whatever its type.
    fn answer(&mut self, chain: &Chain) -> Result<()> {
        let silent = match self.lie {
            Lie::NeverAnswers | Lie::SilentUntilReset => true,
            Lie::AnswersHalf => self.manner.rng.one_in(2),
            _ => false,
        };
        if silent {
            return Ok(());
        }
        let written = self.fill_if_safe(chain);
        if is_about_a_ring(self.lie) {
            self.manner.shared.lies_about_a_ring();
        }
        self.push(chain, written)
    }

    /// Fills the buffers unless the driver may have taken them back. Returns the number of bytes for the used entry.
    fn fill_if_safe(&mut self, chain: &Chain) -> u32 {
        let shared = Arc::clone(&self.manner.shared);
        let has_lied = shared.has_lied.read().unwrap_or_else(PoisonError::into_inner);
        // Buffers that do not exist, as a configuration without sense can give, are none.
        if *has_lied { 1 } else { self.fill(chain).unwrap_or(1) }
    }

    /// Writes random data and the status byte; returns the number of bytes.
    fn fill(&mut self, chain: &Chain) -> Result<u32> {
        let mut writable = chain.parts.iter().filter(|part| part.writable).peekable();
        let mut written = 0_u32;
        while let Some(part) = writable.next() {
            written = written.wrapping_add(part.len);
            if writable.peek().is_some() {
                let bytes = self.manner.rng.bytes(part.len.min(1 << 20) as usize);
                self.memory.write(part.addr, &bytes)?;
            } else if self.lie != Lie::StatusNotWritten && part.len > 0 {
                let status = match self.lie {
                    Lie::StatusUnknown => STATUS_UNKNOWN,
                    // With header and status.
                    Lie::OneSegment if chain.parts.len() > 3 => S_IOERR,
                    Lie::Nothing | Lie::OneSegment => S_OK,
                    _ if self.manner.rng.one_in(16) => S_IOERR,
                    _ => S_OK,
                };
                self.memory.write(part.addr.wrapping_add(u64::from(part.len) - 1), &[status])?;
            }
        }
        Ok(written)
    }

    fn push(&mut self, chain: &Chain, written: u32) -> Result<()> {
        let id = match self.lie {
            Lie::IdsOutOfRange => u32::from(self.size) + self.manner.rng.below(1 << 15) as u32,
            Lie::IdsRandom => self.manner.rng.below(self.size.into()) as u32,
            _ => chain.id.into(),
        };
        let length = match self.lie {
            Lie::LengthsHuge => u32::MAX,
            Lie::LengthsZero => 0,
            _ => written,
        };
        if self.lie == Lie::ChainsJoined {
            self.format.join(&self.memory, chain)?;
        }
        self.format.put(&self.memory, id, length, chain)?;
        if self.lie == Lie::IdsTwice {
            self.format.put(&self.memory, id, length, chain)?;
        }
        let mut jump = 0;
        if self.lie == Lie::IndexJumps && self.manner.rng.one_in(8) {
            jump = self.manner.rng.below(u16::MAX.into()) as u16;
        }
        self.format.publish(&self.memory, jump)
    }

    fn scribble(&mut self) -> Result<()> {
        if self.lie == Lie::ScribblesRing && self.manner.rng.one_in(8) {
            self.manner.shared.lies_about_a_ring();
            self.format.scribble(&self.memory, &mut self.manner.rng)?;
        }
        Ok(())
    }

    fn call(&self) {
        let call = self.call.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut call) = call.as_ref() {
            // With a full counter the call has been made already.
            let _ = call.write(&1_u64.to_ne_bytes());
        }
    }
}
