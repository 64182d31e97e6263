// SPDX-License-Identifier: Apache-2.0
//! The system calls that `std` does not wrap.
// UNSAFETY: ioctl, statx, fallocate, sync_file_range and posix_fadvise are foreign functions; a safe function wraps each.
#![expect(unsafe_code)]

use super::piece::DirectAlign;
use crate::BufList;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

const BLKGETSIZE64: libc::Ioctl = 0x8008_1272; // _IOR(0x12, 114, size_t)
const BLKROGET: libc::Ioctl = 0x125e; // _IO(0x12, 94)

/// Reports a write of the page cache that the storage has failed since the last report through this open file. Does
/// neither write nor wait.
pub(super) fn check_written(file: &File) -> io::Result<()> {
    // A wait for writes checks for errors, and nothing is written there.
    const BEHIND_EVERYTHING: i64 = 1 << 62;
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE;
    // SAFETY: takes numbers only.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), BEHIND_EVERYTHING, 1, flags) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Size of a block device in bytes.
pub(super) fn device_bytes(file: &File) -> io::Result<u64> {
    ioctl_get(file, BLKGETSIZE64, 0u64)
}

/// Logical block size of a block device.
pub(super) fn device_logical_block(file: &File) -> io::Result<u32> {
    ioctl_get(file, libc::BLKSSZGET, 0u32)
}

/// Physical block size of a block device.
pub(super) fn device_physical_block(file: &File) -> io::Result<u32> {
    ioctl_get(file, libc::BLKPBSZGET, 0u32)
}

/// Returns whether a block device is read-only.
pub(super) fn device_is_read_only(file: &File) -> io::Result<bool> {
    ioctl_get(file, BLKROGET, 0u32).map(|flag| flag != 0)
}

/// Discards a range of a block device.
#[cfg(feature = "conformance")]
pub(crate) fn device_discard(file: &File, offset: u64, len: u64) -> io::Result<()> {
    const BLKDISCARD: libc::Ioctl = 0x1277; // _IO(0x12, 119)
    let range = [offset, len];
    // SAFETY: the request reads two 64-bit numbers.
    match unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD, range.as_ptr()) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Runs an ioctl that writes a value of type `T`.
fn ioctl_get<T>(file: &File, request: libc::Ioctl, mut value: T) -> io::Result<T> {
    // SAFETY: `value` has the size that each request of this file writes.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut value) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(value),
    }
}

/// The alignment of O_DIRECT that the file system reports; `None` if it reports none.
pub(super) fn statx_direct_align(file: &File) -> Option<DirectAlign> {
    // SAFETY: all zeroes are a valid statx structure.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let (path, flags) = (c"".as_ptr(), libc::AT_EMPTY_PATH);
    let wanted = libc::STATX_DIOALIGN | libc::STATX_DIO_READ_ALIGN;
    // SAFETY: the path is a C string and `stat` is writable.
    let refused = unsafe { libc::statx(file.as_raw_fd(), path, flags, wanted, &raw mut stat) != 0 };
    let said = !refused && stat.stx_mask & libc::STATX_DIOALIGN != 0;
    // Linux 6.14 reports a smaller alignment for reads, for example of XFS with shared blocks.
    let read_said = stat.stx_mask & libc::STATX_DIO_READ_ALIGN != 0;
    let write = stat.stx_dio_offset_align;
    (said && stat.stx_dio_mem_align > 0 && write > 0).then_some(DirectAlign {
        memory: stat.stx_dio_mem_align,
        write,
        read: if read_said { stat.stx_dio_read_offset_align } else { write },
    })
}

/// `fallocate`.
pub(crate) fn fallocate(file: &File, mode: i32, offset: u64, len: u64) -> io::Result<()> {
    let range = |n: u64| i64::try_from(n).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG));
    let (offset, len) = (range(offset)?, range(len)?);
    // SAFETY: no memory is passed.
    match unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Makes `target` share a range of `source` in the same place. It is of whole blocks, or ends with the file.
pub(crate) fn clone_range(source: &File, offset: u64, len: u64, target: &File) -> io::Result<()> {
    let range = libc::file_clone_range {
        src_fd: source.as_raw_fd().into(),
        src_offset: offset,
        src_length: len,
        dest_offset: offset,
    };
    // SAFETY: the request reads this structure.
    match unsafe { libc::ioctl(target.as_raw_fd(), libc::FICLONERANGE, &raw const range) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Drops the clean pages of the file from the page cache.
pub(super) fn drop_cached_pages(file: &File) {
    // It is advice: a failure has no effect. SAFETY: no memory is passed.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// Returns whether the file is in memory (tmpfs, ramfs, hugetlbfs).
pub(super) fn is_in_memory(file: &File) -> bool {
    // SAFETY: all zeroes are a valid statfs structure.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is writable.
    let known = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut stat) == 0 };
    const RAMFS_MAGIC: i64 = 0x8584_58f6;
    known && matches!(stat.f_type, libc::TMPFS_MAGIC | libc::HUGETLBFS_MAGIC | RAMFS_MAGIC)
}

/// Calls `preadv` or `pread` for the first segments, of at most `bytes_max` bytes. The result has the form of io_uring:
/// number of bytes, or negative errno.
pub(super) fn read_now(file: &File, bufs: &BufList, offset: u64, bytes_max: u64) -> i32 {
    let (bufs, fd) = (bufs.first_within(bytes_max), file.as_raw_fd());
    let iovs = bufs.iovs();
    if let [iov] = iovs {
        let len = iov.iov_len.min(bytes_max as usize);
        // SAFETY: as below. `pread` avoids the kernel's copy of the list.
        return result(unsafe { libc::pread(fd, iov.iov_base, len, offset as i64) });
    }
    // SAFETY: the caller of `BufList::new` guarantees that the list is valid.
    result(unsafe { libc::preadv(fd, iovs.as_ptr(), iovs.len() as i32, offset as i64) })
}

/// Calls `pwritev2` for the first segments, of at most `bytes_max` bytes. The result has the form of io_uring.
pub(super) fn write_now(
    file: &File,
    bufs: &BufList,
    offset: u64,
    dsync: bool,
    bytes_max: u64,
) -> i32 {
    let (bufs, fd) = (bufs.first_within(bytes_max), file.as_raw_fd());
    let part;
    let iovs = match bufs.iovs() {
        [iov] => {
            let len = iov.iov_len.min(bytes_max as usize);
            part = [libc::iovec { iov_len: len, ..*iov }];
            &part[..]
        }
        iovs => iovs,
    };
    let flags = if dsync { libc::RWF_DSYNC } else { 0 };
    // SAFETY: the caller of `BufList::new` guarantees that the list is valid.
    result(unsafe { libc::pwritev2(fd, iovs.as_ptr(), iovs.len() as i32, offset as i64, flags) })
}

/// Calls `fdatasync`. The result has the form of io_uring.
pub(crate) fn sync_now(file: &File) -> i32 {
    file.sync_data().map_or_else(|why| errno_of(&why), |()| 0)
}

/// The errno of a failed call, negative as io_uring has it.
pub(crate) fn errno_of(why: &io::Error) -> i32 {
    -why.raw_os_error().unwrap_or(libc::EIO)
}

fn result(returned: isize) -> i32 {
    match returned {
        -1 => errno_of(&io::Error::last_os_error()),
        // One call moves less than 2 GiB.
        moved => moved as i32,
    }
}
