// SPDX-License-Identifier: Apache-2.0
//! The storage contract.
//!
//! A [`Disk`] is the control plane's handle on block storage. The control plane opens and drops a
//! [`Lane`] of the disk for each data-plane thread, which may block. In between the thread is the
//! only user of its lane: a lane needs no lock.
//!
//! A lane does not wait and owns no ring. [`Lane::start`] either completes an [`Io`] at once or
//! pushes an [`Op`] to the thread's [`Engine`] (io_uring in the data plane), and [`Lane::event`]
//! gets the result. Work of another thread ends through a [`Remote`]. Wrappers ([`wrap`]) are lanes around lanes.
//!
//! This crate does not know virtqueues, guest-physical addresses or status bytes, and starts no
//! thread.

pub mod bufs;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod create;
pub mod engine;
pub mod file;
pub mod holes;
pub mod io;
pub mod lock;
pub mod mark;
pub mod mem;
pub mod null;
pub mod reflink;
pub mod remote;
pub mod resize;
pub mod wrap;

pub use bufs::BufList;
pub use engine::{Engine, FileIndex, Op, Token};
pub use file::{File, FileError, FileOptions, ImageLock};
pub use io::{Io, IoError, IoKind, Slot, Step};
pub use lock::LockError;
pub use mark::Marked;
pub use mem::Mem;
pub use null::Null;
pub use remote::{Deliver, Remote};
pub use resize::ResizeError;

/// Bytes that a lane copies itself before its thread does other work.
pub const COPY_BYTES_MAX: u64 = 2 << 20;

use std::borrow::Cow;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::Path;

/// A path as a word of a shell's command line, for the remedy of an error.
pub fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    // A path has no zero byte.
    shlex::try_quote(&text).map(Cow::into_owned).unwrap_or(text)
}

/// Limits of one range command (DISCARD, WRITE_ZEROES, SECURE_ERASE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLimits {
    /// Maximum length of one range in 512-byte sectors.
    pub sectors_max: u32,
    /// Alignment of a range that has its full effect, in 512-byte sectors (at least 1).
    pub align_sectors: u32,
}

/// Properties of a disk; constant while it is served, except the capacity ([`Disk::resize`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Kind and path in one line of text.
    pub description: String,
    /// Capacity in 512-byte sectors.
    pub capacity_sectors: u64,
    /// Smallest addressable unit in bytes; a power of two, at least 512.
    pub logical_block_bytes: u32,
    /// Smallest unit written without read-modify-write, in bytes; a multiple of the logical block.
    pub physical_block_bytes: u32,
    /// Suggested minimum I/O size in bytes; 0 if unknown.
    pub io_min_bytes: u32,
    /// Suggested optimal I/O size in bytes; 0 if unknown.
    pub io_opt_bytes: u32,
    /// Alignment of memory in bytes that needs no bounce buffer; 1 if any alignment does. A lane
    /// accepts every alignment.
    pub memory_align_bytes: u32,
    /// The disk refuses every I/O that changes data.
    pub read_only: bool,
    /// Completed writes may be in a volatile cache until a FLUSH.
    pub volatile_cache: bool,
    /// DISCARD is supported, within these limits.
    pub discard: Option<RangeLimits>,
    /// WRITE_ZEROES is supported, within these limits.
    pub write_zeroes: Option<RangeLimits>,
    /// WRITE_ZEROES with `unmap` may free the space.
    pub write_zeroes_unmaps: bool,
    /// SECURE_ERASE is supported, within these limits.
    pub secure_erase: Option<RangeLimits>,
    /// The device has poll queues: an `IOPOLL` ring completes I/O without interrupts.
    pub io_poll: bool,
    /// The storage may keep a thread that submits an I/O without waiting for it: the engine submits
    /// from another thread.
    pub submission_blocks: bool,
    /// A growth writes a block that requests in flight may write back as it was: none may be in flight then.
    pub grows_in_block: bool,
}

impl Info {
    /// A disk without hardware: no alignment, every range command, no volatile cache.
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
            submission_blocks: false,
            grows_in_block: false,
        }
    }
}

/// Block storage, as the control plane sees it.
pub trait Disk: Send + Sync {
    /// Properties of the disk.
    fn info(&self) -> Info;

    /// Enlarges the storage to `bytes` bytes, or adopts its present size (`None`). [`Disk::info`]
    /// tells the new capacity at once. A lane keeps the capacity with which it was opened.
    ///
    /// # Errors
    /// [`ResizeError`]; the capacity is unchanged then.
    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        let _ = bytes;
        Err(ResizeError::Fixed)
    }

    /// Makes all completed writes durable. Lanes may have I/O in flight, which it does not cover.
    ///
    /// # Errors
    /// The error of a sync that failed, now or earlier.
    fn sync(&self) -> std::io::Result<()>;

    /// Opens a lane for one data-plane thread.
    ///
    /// # Errors
    /// The error of the system call, if the lane gets no file descriptor or no memory.
    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>>;

    /// Number of layers of a [`Lane`] from `open_lane`. The innermost lane is layer 0; each wrapper
    /// adds one layer.
    fn layers(&self) -> u8 {
        1
    }

    /// The open file or block device with the plain content of the disk. The kernel data plane
    /// serves it without a [`Lane`].
    ///
    /// # Errors
    /// The reason and the remedy as text, if the kernel cannot serve this disk.
    fn kernel_file(&self) -> Result<BorrowedFd<'_>, &'static str> {
        Err("only a plain file or block device can be given to the kernel; use --backend file \
             without --wrap")
    }

    /// Takes note that a sync of [`Disk::kernel_file`] failed while the kernel served it: no FLUSH
    /// of this disk may succeed any more. `errno` is the first failure's.
    fn sync_failed(&self, errno: i32) {
        let _ = errno;
    }
}

/// One thread's handle on a disk.
///
/// The caller keeps `io` and the memory of its buffers in place from `start` until [`Step::Done`],
/// passes the same `slot` with it, and uses a slot for one `Io` at a time. The caller has checked
/// `io`: its range lies inside the capacity and within the limits of [`Info`], and a read-only disk
/// gets no write. A lane must not panic even for an unchecked `io`.
pub trait Lane: Send {
    /// Files to register with the engine once, in the order of [`FileIndex`].
    fn files(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// Returns whether `start` copies the data itself. The copy takes most of the time of a
    /// request, so the data plane publishes the first completion of a batch before it starts the
    /// next request.
    fn moves_data_itself(&self) -> bool {
        false
    }

    /// Starts `io`. One for which a resource is missing is pending, too: the lane continues it with an event
    /// ([`Op::Nop`]) when another I/O has released the resource.
    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step;

    /// Handles the result of an operation that this lane pushed for `token.slot`: the return value
    /// of the system call, or a negative errno.
    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step;
}
