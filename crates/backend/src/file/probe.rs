// SPDX-License-Identifier: Apache-2.0
//! What an open file or block device is and can do.

use super::sys::{self, DirectAlign};
use crate::RangeLimits;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::PathBuf;

/// One range command at a time is bounded to 1 GiB, so that stopping a queue does not wait long.
const RANGE_SECTORS_MAX: u32 = 1 << 21;
/// Largest alignment that is tried and believed.
const ALIGN_MAX: u32 = 64 << 10;

/// Facts about the storage; `logical_block` is the least it can do.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) size_bytes: u64,
    pub(super) is_device: bool,
    /// A regular file on a file system that lives in memory.
    pub(super) in_memory: bool,
    pub(super) read_only: bool,
    pub(super) logical_block: u32,
    pub(super) physical_block: u32,
    pub(super) io_min: u32,
    pub(super) io_opt: u32,
    /// With O_DIRECT, and unless it is in memory: alignment of memory.
    pub(super) memory_align: Option<u32>,
    pub(super) volatile_cache: bool,
    pub(super) discard: Option<RangeLimits>,
    pub(super) zeroing: RangeLimits,
    pub(super) zeroing_unmaps: bool,
    pub(super) io_poll: bool,
}

/// Looks at `file`, which is open with O_DIRECT if `direct`.
pub(super) fn probe(file: &File, direct: bool, writable: bool) -> io::Result<Facts> {
    let meta = file.metadata()?;
    if meta.file_type().is_block_device() {
        probe_device(file, meta.rdev(), direct)
    } else {
        probe_regular(file, &meta, direct, writable)
    }
}

fn probe_regular(
    file: &File,
    meta: &fs::Metadata,
    direct: bool,
    writable: bool,
) -> io::Result<Facts> {
    let align = if direct { Some(direct_align(file)?) } else { None };
    let in_memory = sys::is_in_memory(file);
    let logical_block = align.map_or(512, |align| align.offset.max(512));
    let fs_block = u32::try_from(meta.blksize()).ok().filter(|size| size.is_power_of_two());
    let physical_block = fs_block.unwrap_or(512).min(4096).max(logical_block);
    let ranges =
        RangeLimits { sectors_max: RANGE_SECTORS_MAX, align_sectors: physical_block / 512 };
    let can_punch = writable && can_punch(file, meta.len());
    Ok(Facts {
        size_bytes: meta.len(),
        is_device: false,
        in_memory,
        read_only: false,
        logical_block,
        physical_block,
        io_min: 0,
        io_opt: 0,
        // Nothing is transferred by DMA there, whatever reads of trial said.
        memory_align: align.filter(|_| !in_memory).map(|align| align.memory),
        volatile_cache: true,
        discard: can_punch.then_some(ranges),
        zeroing: ranges,
        zeroing_unmaps: can_punch,
        io_poll: false,
    })
}

/// Tries it on a block after the end, where there is nothing to lose.
fn can_punch(file: &File, size_bytes: u64) -> bool {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    sys::fallocate(file, mode, size_bytes.next_multiple_of(4096), 4096).is_ok()
}

/// Asks the file system, and where it does not know, tries reads of growing alignment.
fn direct_align(file: &File) -> io::Result<DirectAlign> {
    let sane = |n: u32| n.is_power_of_two() && n <= ALIGN_MAX;
    if let Some(said) = sys::statx_direct_align(file)
        && sane(said.memory)
        && sane(said.offset)
    {
        return Ok(said);
    }
    let mut memory = vec![0u8; 3 * ALIGN_MAX as usize];
    let base = memory.as_ptr().align_offset(2 * ALIGN_MAX as usize);
    let mut align = 512;
    loop {
        // At `base + align` the address is a multiple of `align` and of nothing larger.
        let at = base % (2 * ALIGN_MAX as usize) + align as usize;
        let end = (at + align as usize).min(memory.len());
        match file.read_at(&mut memory[at.min(end)..end], 0) {
            Ok(_) => return Ok(DirectAlign { memory: align, offset: align }),
            Err(why) if why.raw_os_error() == Some(libc::EINVAL) && align < 4096 => align *= 2,
            Err(why) => return Err(why),
        }
    }
}

fn probe_device(file: &File, device: u64, direct: bool) -> io::Result<Facts> {
    let queue = Queue::of(device);
    let logical_block = sys::device_logical_block(file)?.max(512);
    let align_sectors = |bytes: u64| {
        u32::try_from(bytes / 512).ok().filter(|n| *n > 0).unwrap_or(logical_block / 512)
    };
    let limits = |sectors_max: u64, align_bytes: u64| RangeLimits {
        sectors_max: u32::try_from(sectors_max).unwrap_or(u32::MAX).min(RANGE_SECTORS_MAX),
        align_sectors: align_sectors(align_bytes),
    };
    // Linux discards a device's range by zeroing it with unmap (fallocate), so both must be there.
    let unmaps = queue.number("write_zeroes_max_bytes") > 0;
    let discards = unmaps && queue.number("discard_max_bytes") > 0;
    let said = if direct { sys::statx_direct_align(file) } else { None };
    Ok(Facts {
        size_bytes: sys::device_bytes(file)?,
        is_device: true,
        in_memory: false,
        read_only: sys::device_is_read_only(file)?,
        logical_block,
        physical_block: sys::device_physical_block(file)?.max(logical_block),
        io_min: queue.number("minimum_io_size") as u32,
        io_opt: queue.number("optimal_io_size") as u32,
        memory_align: direct.then(|| said.map_or(logical_block, |align| align.memory)),
        volatile_cache: !direct || queue.text("write_cache") != "write through",
        discard: discards.then(|| limits(u64::MAX, queue.number("discard_granularity"))),
        zeroing: limits(u64::MAX, 0),
        zeroing_unmaps: unmaps,
        io_poll: direct && queue.number("io_poll") > 0,
    })
}

/// `/sys/dev/block/MAJOR:MINOR/queue` of a disk, or of the disk that a partition lies on.
struct Queue(PathBuf);

impl Queue {
    fn of(device: u64) -> Queue {
        let (major, minor) = (libc::major(device), libc::minor(device));
        let node = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let own = node.join("queue");
        // The node is a symbolic link, so the parent has to be found behind it.
        let of_disk = || Some(fs::canonicalize(&node).ok()?.parent()?.join("queue"));
        Queue(if own.exists() { own } else { of_disk().unwrap_or(own) })
    }

    /// The attribute, or an empty text.
    fn text(&self, attribute: &str) -> String {
        let text = fs::read_to_string(self.0.join(attribute)).unwrap_or_default();
        text.trim().to_owned()
    }

    /// The attribute, or 0.
    fn number(&self, attribute: &str) -> u64 {
        self.text(attribute).parse().unwrap_or(0)
    }
}
