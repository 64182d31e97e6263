// SPDX-License-Identifier: Apache-2.0
//! A mapping of a file that a front-end shares. It survives that the front-end truncates the file.
// UNSAFETY: calls `madvise` for a new mapping.
#![expect(unsafe_code)]

use crate::address_space::Reservation;
use crate::guard::{Guard, MAPPINGS_MAX, Pages, any_lost};
use rustix::fs::{fcntl_get_seals, fstatfs};
use rustix::mm::{Advice, madvise};
use rustix::param::page_size;
use std::fs::File;
use std::os::fd::AsRawFd;
use vm_memory::{FileOffset, MmapRegion};

/// A shared, writable mapping of a part of a file.
#[derive(Debug)]
pub struct SharedMapping {
    // The fields are dropped in this order: the guard before the mapping, and the
    // reservation after it.
    guard: Guard,
    mapping: MmapRegion,
    _reservation: Reservation,
    /// Bytes of the mapping before the part, and bytes of the part.
    part: (usize, usize),
}

impl SharedMapping {
    /// Maps the pages of the `len` bytes of `file` from byte `offset` on. Keeps them out of core
    /// dumps of this process.
    ///
    /// # Errors
    /// The reason as text, if a server may have the file, the file is too short, the process has too many
    /// mappings or bytes of them, or `mmap` fails.
    pub fn map(file: File, offset: u64, len: u64) -> Result<Self, String> {
        refuse_server(&file)?;
        let page_bytes = page_bytes_of(&file)?;
        let descriptor = file.as_raw_fd();
        // `mmap` would accept it, and the first access beyond the end would raise SIGBUS.
        let file_len = file.metadata().map_err(|error| error.to_string())?.len();
        let end = offset
            .checked_add(len)
            .filter(|end| *end <= file_len)
            .ok_or_else(|| format!("{len} bytes at {offset} of a file of {file_len} bytes"))?;
        let start = offset - offset % page_bytes;
        // Whole pages: `munmap` refuses a part of a huge one.
        let bytes = (end - start).next_multiple_of(page_bytes);
        let reservation = Reservation::take(bytes)?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let place = FileOffset::new(file, start);
        let mapping = MmapRegion::build(Some(place), bytes as usize, prot, flags)
            .map_err(|error| error.to_string())?;
        // SAFETY: the range is the whole new mapping; the advice changes no content.
        unsafe { madvise(mapping.as_ptr().cast(), mapping.size(), Advice::LinuxDontDump) }
            .map_err(|error| error.to_string())?;
        let first = mapping.as_ptr() as usize;
        let guard = Guard::new(&Pages {
            addresses: first..first + mapping.size(),
            page_bytes: page_bytes as usize,
            file: descriptor,
            offset: start,
        });
        let guard =
            guard.ok_or_else(|| format!("this process has {MAPPINGS_MAX} mappings already"))?;
        let part = ((offset - start) as usize, len as usize);
        Ok(SharedMapping { guard, mapping, _reservation: reservation, part })
    }

    /// Address of the first byte in this process.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr().wrapping_add(self.part.0)
    }

    /// Length in bytes.
    pub fn size(&self) -> usize {
        self.part.1
    }

    /// The mapped file, and the offset of the first byte in it.
    pub fn file(&self) -> (&File, u64) {
        let place = self.mapping.file_offset().expect("the mapping was made with its file");
        (place.file(), place.start() + self.part.0 as u64)
    }

    /// Leaves a SIGBUS to its default action.
    #[cfg(test)]
    pub(crate) fn unguard(&self) {
        self.guard.disable();
    }

    /// Returns whether an access found that pages of the file are gone.
    #[inline]
    pub fn is_lost(&self) -> bool {
        any_lost() && self.guard.is_lost()
    }
}

/// File systems on local disks, by `f_type`. VMMs place guest memory there by default: libvirt's `<source type='file'/>`.
const LOCAL: [u64; 6] = [
    0xef53,      // ext4, also ext2 and ext3
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0x2fc1_2fc1, // ZFS
    0xca45_1a4e, // bcachefs
    0xf2f5_2010, // F2FS
];

/// Refuses a file that is neither in memory (memfd, tmpfs, hugetlbfs) nor on a local disk. A page fault waits for the
/// server of the file, which may be the front-end itself (FUSE): if it never answers, the thread stops, and all its
/// disks with it. A list of servers would have to know what lies below an overlay.
fn refuse_server(file: &File) -> Result<(), String> {
    // Only files in memory have seals. This call waits for no server.
    if fcntl_get_seals(file).is_ok() {
        return Ok(());
    }
    let kind = fstatfs(file).map_err(|error| error.to_string())?.f_type as u64 & 0xffff_ffff;
    match LOCAL.contains(&kind) {
        true => Ok(()),
        false => Err(format!(
            "its file system (type {kind:#x}) may wait for a server, which would stop the daemon; use memfd, \
             /dev/shm or hugetlbfs"
        )),
    }
}

/// `f_type` of hugetlbfs.
const HUGETLBFS: u64 = 0x9584_58f6;

/// Size of the pages of `file`. A mapping begins with a whole one,
/// and huge pages can only be replaced as a whole. The blocks of other file systems may be smaller or larger.
fn page_bytes_of(file: &File) -> Result<u64, String> {
    let system = fstatfs(file).map_err(|error| error.to_string())?;
    if system.f_type as u64 & 0xffff_ffff != HUGETLBFS {
        return Ok(page_size() as u64);
    }
    let told = system.f_bsize;
    let bytes = u64::try_from(told).ok().filter(|bytes| bytes.is_power_of_two());
    bytes.ok_or_else(|| format!("its file system has pages of {told} bytes"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::address_space::MAPPED_BYTES_MAX;
    use rustix::fs::{MemfdFlags, memfd_create};

    const PAGE: u64 = 4096;

    /// A file in memory, as front-ends share.
    pub(crate) fn memory_file(flags: MemfdFlags, len: u64) -> File {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC | flags).unwrap());
        file.set_len(len).unwrap();
        file
    }

    /// Returns whether the process has a mapping that begins at `start`.
    fn is_mapped(start: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| line.starts_with(&format!("{start:x}-")))
    }

    #[test]
    fn memory_that_is_a_file_of_a_server_is_refused() {
        for path in ["/proc/self/status", "/dev/null", "/dev/zero", "/proc", "/dev/shm"] {
            let why = SharedMapping::map(File::open(path).unwrap(), 0, PAGE).unwrap_err();
            assert!(why.contains("use memfd, /dev/shm or hugetlbfs"), "{path}: {why}");
        }
        let on_tmpfs = tempfile::tempfile_in("/dev/shm").unwrap();
        on_tmpfs.set_len(PAGE).unwrap();
        SharedMapping::map(on_tmpfs, 0, PAGE).unwrap();
        SharedMapping::map(memory_file(MemfdFlags::empty(), PAGE), 0, PAGE).unwrap();
        SharedMapping::map(memory_file(MemfdFlags::ALLOW_SEALING, PAGE), 0, PAGE).unwrap();
    }

    #[test]
    fn the_bytes_before_the_part_are_not_mapped() {
        let file = memory_file(MemfdFlags::empty(), 8 * PAGE);
        std::os::unix::fs::FileExt::write_all_at(&file, b"part", 5 * PAGE + 8).unwrap();
        let mapping = SharedMapping::map(file, 5 * PAGE + 8, PAGE).unwrap();
        // SAFETY: the part has these bytes.
        assert_eq!(unsafe { mapping.as_ptr().cast::<[u8; 4]>().read_volatile() }, *b"part");
        assert_eq!(mapping.size() as u64, PAGE);
        assert_eq!(mapping.file().1, 5 * PAGE + 8);
        assert_eq!(mapping.mapping.size() as u64, 2 * PAGE);
    }

    #[test]
    fn all_mappings_together_have_a_bound() {
        let map = |offset, len| {
            SharedMapping::map(memory_file(MemfdFlags::empty(), 1 << 62), offset, len)
        };
        let why = map(0, MAPPED_BYTES_MAX + PAGE).unwrap_err();
        assert!(why.contains("at most 65536 GiB; serve some disks by another process"), "{why}");
        // The offset takes no address.
        let most = map(1 << 60, MAPPED_BYTES_MAX / 4 * 3).unwrap();
        assert!(map(0, MAPPED_BYTES_MAX / 4 * 3).is_err());
        drop(most);
        drop(map(0, MAPPED_BYTES_MAX / 4 * 3).unwrap());
    }

    #[test]
    fn a_refused_mapping_takes_no_share() {
        for _ in 0..5 {
            // `mmap` refuses the file.
            let file = memory_file(MemfdFlags::ALLOW_SEALING, MAPPED_BYTES_MAX / 4);
            rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::WRITE).unwrap();
            let why = SharedMapping::map(file, 0, MAPPED_BYTES_MAX / 4).unwrap_err();
            assert!(!why.contains("GiB"), "{why}");
        }
    }

    #[test]
    fn a_part_of_a_huge_page_is_unmapped_as_a_whole() {
        // No page is touched: the system needs to have none.
        const HUGE: u64 = 2 << 20;
        let file = memory_file(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, 4 * HUGE);
        let mapping = SharedMapping::map(file, HUGE + PAGE, PAGE).unwrap();
        let start = mapping.as_ptr() as usize - PAGE as usize;
        assert_eq!(mapping.mapping.size() as u64, HUGE);
        assert!(is_mapped(start));
        drop(mapping);
        assert!(!is_mapped(start));
    }
}
