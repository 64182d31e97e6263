// SPDX-License-Identifier: Apache-2.0
//! Probes the properties of an open file or block device.

use super::FileOptions;
use super::error::FileError;
use super::lane::DiscardBy;
use super::piece::DirectAlign;
use super::write_cache::WriteCache;
use super::{stack, sys};
use crate::RangeLimits;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Maximum length of a range command in sectors (1 GiB). The device announces less; see
/// `virtio_blk::ZEROED_SECTORS_MAX`.
const RANGE_SECTORS_MAX: u32 = 1 << 21;
/// Maximum alignment in bytes that is tried and accepted.
const ALIGN_MAX: u32 = 64 << 10;

/// Properties of the storage.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) size_bytes: u64,
    pub(super) is_device: bool,
    /// A regular file on a file system in memory.
    pub(super) in_memory: bool,
    pub(super) read_only: bool,
    /// Minimum logical block size in bytes.
    pub(super) logical_block: u32,
    pub(super) physical_block: u32,
    pub(super) io_min: u32,
    pub(super) io_opt: u32,
    /// Alignment that O_DIRECT needs. `None` without O_DIRECT, and for a file in memory.
    pub(super) direct: Option<DirectAlign>,
    pub(super) write_cache: WriteCache,
    pub(super) discard: Option<RangeLimits>,
    pub(super) discard_by: DiscardBy,
    pub(super) zeroing: RangeLimits,
    pub(super) zeroing_unmaps: bool,
    pub(super) io_poll: bool,
    /// See [`crate::Info::submission_blocks`].
    pub(super) submission_blocks: bool,
}

/// The present size of a file or block device in bytes.
pub(super) fn size_bytes(file: &File) -> io::Result<u64> {
    let meta = file.metadata()?;
    match meta.file_type().is_block_device() {
        true => sys::device_bytes(file),
        false => Ok(meta.len()),
    }
}

/// Probes `file`, which is open with O_DIRECT if `direct`. `punches`: known from before.
pub(super) fn probe(
    file: &File,
    direct: bool,
    writable: bool,
    punches: Option<bool>,
) -> io::Result<Facts> {
    let meta = file.metadata()?;
    if meta.file_type().is_block_device() {
        probe_device(file, meta.rdev(), direct)
    } else {
        probe_regular(file, &meta, direct, (writable, punches))
    }
}

fn probe_regular(
    file: &File,
    meta: &fs::Metadata,
    direct: bool,
    (writable, punches): (bool, Option<bool>),
) -> io::Result<Facts> {
    let align = if direct { Some(direct_align(file)?) } else { None };
    let in_memory = sys::is_in_memory(file);
    let fs_block = u32::try_from(meta.blksize()).ok().filter(|size| size.is_power_of_two());
    // The physical block tells the guest the alignment of O_DIRECT; smaller writes are only slower.
    let physical_block =
        fs_block.unwrap_or(512).min(4096).max(align.map_or(512, |align| align.write));
    let ranges =
        RangeLimits { sectors_max: RANGE_SECTORS_MAX, align_sectors: physical_block / 512 };
    let can_punch = writable && punches.unwrap_or_else(|| can_punch(file, meta.len()));
    Ok(Facts {
        size_bytes: meta.len(),
        is_device: false,
        in_memory,
        read_only: false,
        logical_block: 512,
        physical_block,
        io_min: 0,
        io_opt: 0,
        // A file in memory uses no DMA: the result of the trial reads does not apply.
        direct: align.filter(|_| !in_memory),
        write_cache: WriteCache::UNKNOWN,
        discard: can_punch.then_some(ranges),
        discard_by: DiscardBy::Punch,
        zeroing: ranges,
        zeroing_unmaps: can_punch,
        io_poll: false,
        submission_blocks: stack::blocks_submitters(meta.dev()),
    })
}

/// The logical block size in bytes: the wanted one, if the storage permits it.
pub(super) fn logical_block(
    path: &Path,
    options: &FileOptions,
    facts: &Facts,
) -> Result<u32, FileError> {
    let wanted = options.logical_block_bytes.unwrap_or(facts.logical_block);
    if !wanted.is_power_of_two() || !(512..=65536).contains(&wanted) {
        return Err(FileError::BlockSize { wanted });
    }
    if wanted < facts.logical_block {
        let (path, least) = (path.into(), facts.logical_block);
        return Err(FileError::BlockTooSmall { path, wanted, least });
    }
    Ok(wanted)
}

/// The begin of the notice about blocks of O_DIRECT that are larger than those of the guest.
pub(super) const WANTS_BLOCKS: &str = "O_DIRECT wants blocks of";

impl super::File {
    /// Uses the page cache if O_DIRECT writes larger blocks than `bytes`, the unit in which an image format uses the
    /// file. A write of a part of a block reads all of it, and later writes it back with what it has read: with the
    /// old content of other units, which other writers may have changed meanwhile.
    pub fn bound_direct_blocks(&mut self, bytes: u64) {
        let Some(DirectAlign { write, .. }) = self.limits.direct else { return };
        if u64::from(write) <= bytes || self.limits.read_only {
            return;
        }
        self.limits.direct = None;
        self.limits.avoids_direct = true;
        self.info.memory_align_bytes = 1;
        if let Some(kind) = self.info.description.strip_suffix("(direct)") {
            self.info.description = format!("{kind}(cached)");
        }
        self.notices.retain(|notice| !notice.starts_with(WANTS_BLOCKS));
        self.notices.push(format!(
            "O_DIRECT writes blocks of {write} bytes in {}, and its clusters have {bytes}: using the \
             host's page cache (convert the image to larger clusters, or silence this by `--direct off`)",
            self.path.display()
        ));
    }
}

/// Returns whether the file system punches holes. Tries it far above the end of the file: another
/// program may write to the file and enlarge it meanwhile, but not by 1 GiB between two system calls.
fn can_punch(file: &File, size_bytes: u64) -> bool {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let end = size_bytes.next_multiple_of(4096);
    // The farthest place that the file system accepts: its maximum size is unknown.
    let mut places = (30..62).rev().map(|power| end.saturating_add(1 << power));
    places.any(|place| sys::fallocate(file, mode, place, 4096).is_ok())
}

/// Asks the file system for the alignment. If it does not know it, tries reads of growing
/// alignment.
fn direct_align(file: &File) -> io::Result<DirectAlign> {
    let sane = |n: u32| n.is_power_of_two() && n <= ALIGN_MAX;
    if let Some(said) = sys::statx_direct_align(file)
        && sane(said.memory)
        && sane(said.write)
    {
        let write = said.write.max(512);
        let read = if sane(said.read) { said.read.clamp(512, write) } else { write };
        return Ok(DirectAlign { memory: said.memory, write, read });
    }
    let mut memory = vec![0u8; 3 * ALIGN_MAX as usize];
    let base = memory.as_ptr().align_offset(2 * ALIGN_MAX as usize);
    let mut align = 512;
    loop {
        // The address `base + align` is a multiple of `align` and of no larger power of two.
        let at = base % (2 * ALIGN_MAX as usize) + align as usize;
        let end = (at + align as usize).min(memory.len());
        match file.read_at(&mut memory[at.min(end)..end], 0) {
            Ok(_) => return Ok(DirectAlign { memory: align, write: align, read: align }),
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
    let unmaps = queue.number("write_zeroes_max_bytes") > 0;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let has_command = has_async_discard(&release);
    let discard_by = if has_command { DiscardBy::Command } else { DiscardBy::Punch };
    let discards = queue.number("discard_max_bytes") > 0 && (unmaps || has_command);
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
        direct: direct.then(|| DirectAlign {
            memory: said.map_or(logical_block, |align| align.memory),
            write: logical_block,
            read: logical_block,
        }),
        write_cache: if direct { WriteCache::of_device(&queue) } else { WriteCache::UNKNOWN },
        discard: discards.then(|| limits(u64::MAX, queue.number("discard_granularity"))),
        discard_by,
        zeroing: limits(u64::MAX, 0),
        zeroing_unmaps: unmaps,
        io_poll: direct && queue.number("io_poll") > 0,
        submission_blocks: stack::blocks_submitters(device),
    })
}

/// Returns whether a kernel of this release discards asynchronously (Linux 6.12). Without that,
/// `fallocate` zeroes the range, if the device can; a device need not free the space then.
fn has_async_discard(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (6, 12),
        _ => false,
    }
}

/// `/sys/dev/block/MAJOR:MINOR/queue` of a disk, or of the disk of a partition.
pub(super) struct Queue(PathBuf);

impl Queue {
    fn of(device: u64) -> Queue {
        let (major, minor) = (libc::major(device), libc::minor(device));
        let node = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let own = node.join("queue");
        // The node is a symbolic link: the disk is the parent of its target.
        let of_disk = || Some(fs::canonicalize(&node).ok()?.parent()?.join("queue"));
        Queue(if own.exists() { own } else { of_disk().unwrap_or(own) })
    }

    /// The open attribute; `None` if there is none.
    pub(super) fn open(&self, attribute: &str) -> Option<File> {
        File::open(self.0.join(attribute)).ok()
    }

    /// The value of the attribute; empty if it cannot be read.
    fn text(&self, attribute: &str) -> String {
        let text = fs::read_to_string(self.0.join(attribute)).unwrap_or_default();
        text.trim().to_owned()
    }

    /// The value of the attribute as a number; 0 if it cannot be read.
    fn number(&self, attribute: &str) -> u64 {
        self.text(attribute).parse().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_discards_asynchronously_from_6_12_on() {
        for release in ["6.12.0", "6.18.44-generic", "7.0-rc1", "10.1"] {
            assert!(has_async_discard(release), "{release}");
        }
        for release in ["6.11.9", "6.1.0-40-amd64", "5.15.0", "", "next"] {
            assert!(!has_async_discard(release), "{release}");
        }
    }
}
