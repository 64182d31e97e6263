// SPDX-License-Identifier: Apache-2.0
//! Material for random arguments: descriptors of all kinds, and memory to point at.

use crate::host::fixture::Disk;
use anyhow::Result;
use driver::GuestMemory;
use driver::kernel::{KernelDevice, abi};
use kit::rng::Rng;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Size of the only memory of this process that arguments point at.
const ARENA_BYTES: u64 = 16 << 20;
/// Upper bound of base addresses, so that every range ends inside the arena.
const BASES_BYTES: u64 = 8 << 20;
/// A number that is certainly not an open descriptor.
const CLOSED_FD: RawFd = 1_000_000;
/// An unmapped address of user space.
const UNMAPPED: u64 = 0x2000;

/// Descriptors and memory, shared by the threads.
pub(super) struct Material {
    arena: Arc<GuestMemory>,
    storage: Vec<File>,
    events: Vec<EventFd>,
    others: Vec<OwnedFd>,
}

impl Material {
    pub(super) fn new(disk: &Disk) -> Result<Self> {
        let image = File::from(rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC)?);
        image.set_len(4 << 20)?;
        let storage =
            vec![disk.open()?, disk.open_as(false, true)?, disk.open_as(true, false)?, image];
        let events = (0..4).map(|_| EventFd::new(EFD_NONBLOCK)).collect::<std::io::Result<_>>()?;
        let mut others: Vec<OwnedFd> = Vec::new();
        for path in ["/dev/null", "/proc/self/maps", "/", KernelDevice::PATH] {
            others.push(File::open(path)?.into());
        }
        let (read, write) = std::io::pipe()?;
        others.extend([OwnedFd::from(read), OwnedFd::from(write)]);
        let arena = GuestMemory::new(&[(0, ARENA_BYTES)])?;
        Ok(Self { arena, storage, events, others })
    }

    /// A descriptor, usually of the expected kind.
    fn fd(&self, rng: &mut Rng, good: &[RawFd]) -> RawFd {
        match rng.below(12) {
            0 => -1,
            1 => *rng.pick(&[-2, CLOSED_FD, i32::MIN, i32::MAX]),
            2 => rng.pick(&self.others).as_raw_fd(),
            3 => rng.pick(&self.events).as_raw_fd(),
            4 => rng.pick(&self.storage).as_raw_fd(),
            _ => *rng.pick(good),
        }
    }

    pub(super) fn storage_fd(&self, rng: &mut Rng) -> RawFd {
        let good: Vec<_> = self.storage.iter().map(AsRawFd::as_raw_fd).collect();
        self.fd(rng, &good)
    }

    pub(super) fn event_fd(&self, rng: &mut Rng) -> RawFd {
        let good: Vec<_> = self.events.iter().map(AsRawFd::as_raw_fd).collect();
        self.fd(rng, &good)
    }

    /// Kicks one of the eventfds.
    pub(super) fn kick(&self, rng: &mut Rng) {
        // Fails only if the counter is full.
        let _full = rng.pick(&self.events).write(1);
    }

    /// An address in the arena, or an unmapped one.
    pub(super) fn address(&self, rng: &mut Rng) -> u64 {
        let base = self.arena.regions()[0].user_address();
        match rng.below(12) {
            0 => *rng.pick(&[0, 1, UNMAPPED, u64::MAX, 1 << 63, 0xffff_8880_0000_0000]),
            1 => base + rng.below(BASES_BYTES),
            _ => base + (rng.below(BASES_BYTES) & !0xfff),
        }
    }

    /// A random table of up to three regions.
    pub(super) fn regions(&self, rng: &mut Rng) -> Vec<abi::MemoryRegion> {
        let base = self.arena.regions()[0].user_address();
        let count = if rng.one_in(20) { rng.below(70) } else { 1 + rng.below(3) };
        (0..count)
            .map(|n| {
                let offset = rng.below(BASES_BYTES) & !0xfff;
                let size = 4096 * (1 + rng.below(1024));
                let (user, size) = match rng.below(20) {
                    0 => (UNMAPPED, *rng.pick(&[0, 1, 4096, 1 << 40, u64::MAX])),
                    1 => (*rng.pick(&[u64::MAX - 4095, 1 << 63]), size),
                    _ => (base + offset, size),
                };
                let gpa = if rng.one_in(20) { rng.number() } else { n << 28 };
                let padding = if rng.one_in(40) { rng.number() } else { 0 };
                abi::MemoryRegion { gpa, size, user, flags_padding: padding }
            })
            .collect()
    }

    /// The whole arena as guest memory at 0.
    pub(super) fn whole(&self) -> abi::MemoryRegion {
        let region = &self.arena.regions()[0];
        abi::MemoryRegion {
            gpa: 0,
            size: region.size(),
            user: region.user_address(),
            flags_padding: 0,
        }
    }

    /// Changes parts of the arena, including rings.
    pub(super) fn scribble(&self, rng: &mut Rng) {
        let len = 1 + rng.below(256) as usize;
        let bytes = match rng.below(3) {
            0 => vec![0; len],
            1 => rng.bytes(len),
            _ => (0..len).map(|n| if n % 4 == 0 { rng.below(8) as u8 } else { 0 }).collect(),
        };
        self.arena.write(rng.below(BASES_BYTES) & !3, &bytes);
    }
}
