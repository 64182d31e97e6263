// SPDX-License-Identifier: Apache-2.0
//! The storage contract.
//!
//! A [`Disk`] is the control plane's handle on something that stores blocks. Every data-plane
//! thread opens its own [`Lane`] of it and is its only user, so that a lane needs no lock.
//!
//! A lane does not wait and owns no ring: [`Lane::start`] either finishes an [`Io`] at once or
//! pushes an [`Op`] into the thread's [`Engine`] (io_uring in the data plane), and
//! [`Lane::event`] is told the result. Wrappers ([`wrap`]) are lanes around lanes.
//!
//! What is absent: virtqueues, guest-physical addresses, status bytes, threads.

pub mod bufs;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod create;
pub mod engine;
pub mod file;
pub mod io;
pub mod lock;
pub mod mem;
pub mod null;
pub mod wrap;

pub use bufs::BufList;
pub use engine::{Engine, FileIndex, Op, Token};
pub use file::{File, FileError, FileOptions};
pub use io::{Io, IoError, IoKind, Slot, Step};
pub use lock::LockError;
pub use mem::Mem;
pub use null::Null;

use std::os::fd::{BorrowedFd, RawFd};

/// Limits of one range command (DISCARD, WRITE_ZEROES, SECURE_ERASE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLimits {
    /// Most 512-byte sectors of one range.
    pub sectors_max: u32,
    /// Alignment of a range that takes full effect, in 512-byte sectors (at least 1).
    pub align_sectors: u32,
}

/// What a disk is and can do; constant while it is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// One line for people: kind and path.
    pub description: String,
    /// Capacity in 512-byte sectors.
    pub capacity_sectors: u64,
    /// Smallest addressable unit in bytes; a power of two, at least 512.
    pub logical_block_bytes: u32,
    /// Smallest unit written without read-modify-write, in bytes; a multiple of the logical block.
    pub physical_block_bytes: u32,
    /// Suggested minimum and optimal I/O size in bytes; 0 where unknown.
    pub io_min_bytes: u32,
    /// See `io_min_bytes`.
    pub io_opt_bytes: u32,
    /// Alignment in bytes that the storage wants of memory (1 where it does not care).
    /// A lane accepts any alignment; what does not fit is bounced.
    pub memory_align_bytes: u32,
    /// Write commands are refused.
    pub read_only: bool,
    /// A FLUSH has something to do: completed writes may sit in a volatile cache.
    pub volatile_cache: bool,
    /// DISCARD is supported, within these limits.
    pub discard: Option<RangeLimits>,
    /// WRITE_ZEROES is supported, within these limits.
    pub write_zeroes: Option<RangeLimits>,
    /// WRITE_ZEROES with `unmap` may free the space.
    pub write_zeroes_unmaps: bool,
    /// SECURE_ERASE is supported, within these limits.
    pub secure_erase: Option<RangeLimits>,
    /// The device has poll queues, so that an `IOPOLL` ring completes without interrupts.
    pub io_poll: bool,
}

impl Info {
    /// A disk without hardware: nothing to align to, every range command, no volatile cache.
    fn without_hardware(description: &str, capacity_bytes: u64, range_sectors_max: u32) -> Self {
        let any_range = Some(RangeLimits { sectors_max: range_sectors_max, align_sectors: 1 });
        Info {
            description: description.into(),
            capacity_sectors: capacity_bytes / 512,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            io_min_bytes: 0,
            io_opt_bytes: 0,
            memory_align_bytes: 1,
            read_only: false,
            volatile_cache: false,
            discard: any_range,
            write_zeroes: any_range,
            write_zeroes_unmaps: true,
            secure_erase: any_range,
            io_poll: false,
        }
    }
}

/// Something that stores blocks, as the control plane sees it.
pub trait Disk: Send + Sync {
    /// What the disk is and can do.
    fn info(&self) -> Info;

    /// Opens the handle of one data-plane thread; called on that thread.
    ///
    /// # Errors
    /// When a resource of the lane (descriptor, bounce memory) cannot be had.
    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>>;

    /// How many layers of [`Lane`] one `open_lane` stacks; a wrapper adds one. The innermost
    /// lane is layer 0.
    fn layers(&self) -> u8 {
        1
    }

    /// The open file or block device in which the disk's bytes lie as they are, so that the kernel
    /// may serve them instead of a [`Lane`].
    ///
    /// # Errors
    /// Why there is none, and what to do about it, in words.
    fn kernel_file(&self) -> Result<BorrowedFd<'_>, &'static str> {
        Err("only a plain file or block device can be given to the kernel; use --backend file \
             without --wrap")
    }
}

/// One thread's handle on a disk.
///
/// The caller keeps `io` (and the memory its buffers name) in place from `start` until
/// [`Step::Done`], passes the same `slot` with it, and uses a slot for one `Io` at a time.
/// `io` was checked by the caller: its range lies inside the capacity and within the limits of
/// [`Info`], and nothing that writes is sent to a read-only disk. A lane must still not panic for
/// any value in it.
pub trait Lane {
    /// Files to register with the engine, once, in the order of [`FileIndex`].
    fn files(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// Whether `start` moves the data itself, which takes long against the rest of a request: the
    /// first of several completions is then worth publishing before the next is started.
    fn moves_data_itself(&self) -> bool {
        false
    }

    /// Starts `io`. [`Step::Busy`] means: not started, no resource now; call `start` again after
    /// the next completion of this lane. It is only returned while another `Io` of this lane is
    /// pending.
    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step;

    /// Takes the result of an op that this lane pushed for `token.slot`: the return value of the
    /// system call, or a negative errno. Never returns [`Step::Busy`].
    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step;
}
