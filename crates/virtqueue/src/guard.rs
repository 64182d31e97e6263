// SPDX-License-Identifier: Apache-2.0
//! Keeps the process alive if a front-end truncates memory that it shares.
//!
//! An access beyond the end of a truncated file raises SIGBUS, whose default action ends the process
//! and with it the service of all other guests. A handler puts zeroes in place of the lost pages and
//! marks the mapping as lost; the queues on it fault. Any other SIGBUS keeps its default action.
//!
//! A page within the file raises SIGBUS if its file system has no room for it (a hole in a full tmpfs), or if the
//! hardware has lost it. Only that page is replaced: requests in flight still use the others. Each such page may split
//! a mapping of the kernel, of which a process has a bounded number. So beyond [`SINGLE_MAX`] pages of a mapping, or
//! [`SINGLES_MAX`] of the process, all pages behind it are replaced, too.
//!
//! The handler takes no lock. It reads the registry of mappings, whose entries have a version that is
//! odd while the entry changes. The entry of the mapping that a thread accesses does not change.
// UNSAFETY: installs a signal handler, which replaces mapped pages.
#![expect(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, fence};
use std::sync::{Mutex, Once, PoisonError};

/// Maximum mappings of the process.
pub(crate) const MAPPINGS_MAX: usize = 1 << 14;
/// Maximum pages of a mapping that are replaced alone.
const SINGLE_MAX: u32 = 64;
/// Maximum pages of the process that are replaced alone: they make at most twice as many mappings of the kernel, of the
/// 65530 that `vm.max_map_count` allows by default.
const SINGLES_MAX: u32 = 4096;
/// `si_code` of an access to a page that the file does not have.
const BUS_ADRERR: c_int = 2;
/// `si_code` of an access to a page that the hardware has lost.
const BUS_MCEERR_AR: c_int = 4;

/// A mapping in the registry.
struct Entry {
    version: AtomicU32,
    start: AtomicUsize,
    /// Address behind the last page; 0: the entry is free.
    end: AtomicUsize,
    page_bytes: AtomicUsize,
    /// Descriptor of the file.
    file: AtomicI32,
    /// Offset of the first page in the file.
    offset: AtomicU64,
    lost: AtomicBool,
    /// Pages that were replaced alone.
    singles: AtomicU32,
}

/// The pages of a mapping.
pub(crate) struct Pages {
    pub(crate) addresses: Range<usize>,
    /// Size of a page in bytes.
    pub(crate) page_bytes: usize,
    /// Descriptor of the file, open as long as the mapping.
    pub(crate) file: RawFd,
    /// Offset of the first page in the file.
    pub(crate) offset: u64,
}

impl Pages {
    const NONE: Pages = Pages { addresses: 0..0, page_bytes: 0, file: -1, offset: 0 };
}

impl Entry {
    const fn free() -> Self {
        Entry {
            version: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            page_bytes: AtomicUsize::new(0),
            file: AtomicI32::new(-1),
            offset: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            singles: AtomicU32::new(0),
        }
    }

    /// Changes the entry. The caller holds the lock of [`FREE`].
    fn set(&self, pages: &Pages) {
        let version = self.version.load(Relaxed);
        self.version.store(version.wrapping_add(1), Relaxed);
        fence(Release); // pairs with the fence in `get`: a reader of the new values sees the version
        self.start.store(pages.addresses.start, Relaxed);
        self.end.store(pages.addresses.end, Relaxed);
        self.page_bytes.store(pages.page_bytes, Relaxed);
        self.file.store(pages.file, Relaxed);
        self.offset.store(pages.offset, Relaxed);
        if self.lost.swap(false, Relaxed) {
            LOST.fetch_sub(1, Relaxed);
        }
        SINGLES.fetch_sub(self.singles.swap(0, Relaxed), Relaxed);
        self.version.store(version.wrapping_add(2), Release);
    }

    /// Counts a page that is going to be replaced alone. Returns `false` if there were too many.
    fn count_single_page(&self) -> bool {
        if self.singles.load(Relaxed) >= SINGLE_MAX || SINGLES.load(Relaxed) >= SINGLES_MAX {
            return false;
        }
        self.singles.fetch_add(1, Relaxed);
        SINGLES.fetch_add(1, Relaxed);
        true
    }

    /// The pages; `None` while the entry changes.
    fn get(&self) -> Option<Pages> {
        let version = self.version.load(Acquire);
        let pages = Pages {
            addresses: self.start.load(Relaxed)..self.end.load(Relaxed),
            page_bytes: self.page_bytes.load(Relaxed),
            file: self.file.load(Relaxed),
            offset: self.offset.load(Relaxed),
        };
        fence(Acquire); // pairs with the fence in `set`
        let steady = version.is_multiple_of(2) && version == self.version.load(Relaxed);
        steady.then_some(pages)
    }
}

static ENTRIES: [Entry; MAPPINGS_MAX] = [const { Entry::free() }; MAPPINGS_MAX];
/// Number of entries that were ever in use; those behind are free.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Freed entries below [`USED`]. The lock orders all changes of entries.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// Number of lost mappings.
static LOST: AtomicUsize = AtomicUsize::new(0);
/// Number of pages that were replaced alone, in all mappings.
static SINGLES: AtomicU32 = AtomicU32::new(0);

/// A guarded mapping. Drop it before the mapping is unmapped.
#[derive(Debug)]
pub(crate) struct Guard {
    entry: usize,
}

impl Guard {
    /// Guards the pages of a mapping; `None`: there are [`MAPPINGS_MAX`] already.
    pub(crate) fn new(pages: &Pages) -> Option<Self> {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(install);
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = free.pop().or_else(|| {
            let next = USED.load(Relaxed);
            (next < MAPPINGS_MAX).then(|| USED.fetch_add(1, Release))
        })?;
        ENTRIES[entry].set(pages);
        Some(Guard { entry })
    }

    #[cfg(test)]
    pub(crate) fn disable(&self) {
        let _changing = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        ENTRIES[self.entry].set(&Pages::NONE);
    }

    /// Returns whether a part of the mapping is lost.
    pub(crate) fn is_lost(&self) -> bool {
        ENTRIES[self.entry].lost.load(Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        ENTRIES[self.entry].set(&Pages::NONE);
        free.push(self.entry);
    }
}

/// Returns whether any mapping of the process is lost. A thread sees what its own access has lost.
#[inline]
pub(crate) fn any_lost() -> bool {
    LOST.load(Relaxed) != 0
}

fn install() {
    // SAFETY: an all-zero `sigaction` is valid: no signal is blocked.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler calls async-signal-safe functions only.
    let result = unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) };
    assert_eq!(result, 0, "SIGBUS can be handled");
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`; for a SIGBUS without address it is not used.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // SAFETY: the location is that of this thread.
    let errno = unsafe { *libc::__errno_location() };
    if !([BUS_ADRERR, BUS_MCEERR_AR].contains(&code) && replace_lost_pages(code, address)) {
        // The access is repeated after the return, and then ends the process.
        // SAFETY: both functions are async-signal-safe.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            if code <= 0 {
                libc::raise(signal); // another process sent it: there is no access
            }
        }
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Maps zeroes in place of the page at `address`. Returns `false` if no guarded mapping has the page.
fn replace_lost_pages(code: c_int, address: usize) -> bool {
    let used = USED.load(Acquire);
    let found = ENTRIES[..used].iter().find_map(|entry| {
        let pages = entry.get()?;
        pages.addresses.contains(&address).then_some((entry, pages))
    });
    let Some((entry, pages)) = found else { return false };
    let start = address - (address - pages.addresses.start) % pages.page_bytes;
    let is_alone =
        (code == BUS_MCEERR_AR || is_in_file(&pages, start)) && entry.count_single_page();
    // After a truncation all later pages are lost: one mapping replaces them. Falls back to one
    // page if the kernel refuses.
    if !(!is_alone && replace(start, pages.addresses.end - start)
        || replace(start, pages.page_bytes))
    {
        return false;
    }
    if !entry.lost.swap(true, Relaxed) {
        LOST.fetch_add(1, Relaxed);
    }
    true
}

/// Returns whether the page at an address lies before the end of the file, as far as can be found out.
fn is_in_file(pages: &Pages, page: usize) -> bool {
    let at = pages.offset + (page - pages.addresses.start) as u64;
    // SAFETY: an all-zero `stat` is valid, and `fstat` is async-signal-safe.
    let (result, stat) = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(pages.file, &raw mut stat), stat)
    };
    result == 0 && at < stat.st_size as u64
}

/// Maps zeroes in place of `len` bytes from `start` on. Returns whether the kernel has done so: a long range may need
/// more memory than `vm.overcommit_memory` allows.
fn replace(start: usize, len: usize) -> bool {
    let at = start as *mut c_void;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the pages belong to the mapping, which the accessing thread keeps; all access to them
    // is by raw pointers. `mmap` and `madvise` are plain system calls.
    unsafe {
        if libc::mmap(at, len, prot, flags, -1, 0) == libc::MAP_FAILED {
            return false;
        }
        libc::madvise(at, len, libc::MADV_DONTDUMP);
    }
    true
}

#[cfg(test)]
mod tests {
    use crate::SharedMapping;
    use crate::shared_mapping::tests::memory_file;
    use rustix::fs::MemfdFlags;
    use std::fs::File;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    const PAGE: usize = 4096;
    const CHILD: &str = "VHOST_BLK_TEST_SIGBUS";

    fn file(pages: usize) -> (File, File) {
        let file = memory_file(MemfdFlags::empty(), (pages * PAGE) as u64);
        (file.try_clone().unwrap(), file)
    }

    fn read(mapping: &SharedMapping, at: usize) -> u8 {
        // SAFETY: the tests read inside their mappings.
        unsafe { mapping.as_ptr().add(at).read_volatile() }
    }

    fn write(mapping: &SharedMapping, at: usize, byte: u8) {
        // SAFETY: as above.
        unsafe { mapping.as_ptr().add(at).write_volatile(byte) };
    }

    #[test]
    fn a_truncated_mapping_reads_as_zeroes_and_is_lost_and_others_are_not() {
        let ((owner, shared), (_, other)) = (file(4), file(1));
        let mapping = SharedMapping::map(shared, 0, 4 * PAGE as u64).unwrap();
        let other = SharedMapping::map(other, 0, PAGE as u64).unwrap();
        (0..4).for_each(|page| write(&mapping, page * PAGE, 7));
        owner.set_len(PAGE as u64).unwrap();
        assert!(!mapping.is_lost(), "no access has found it");
        assert_eq!(read(&mapping, 2 * PAGE), 0);
        assert!(mapping.is_lost() && !other.is_lost());
        assert_eq!([0, PAGE, 3 * PAGE].map(|at| read(&mapping, at)), [7, 0, 0]);
        write(&mapping, 3 * PAGE + 1, 9);
        assert_eq!(read(&mapping, 3 * PAGE + 1), 9);
        // The entry serves another mapping, which is not lost.
        drop(mapping);
        let (_, shared) = file(1);
        let next = SharedMapping::map(shared, 0, PAGE as u64).unwrap();
        assert!(!next.is_lost() && read(&next, 0) == 0);
    }

    /// Runs this test again in a process of its own; returns the signal that ended it.
    fn signal_of_child(what: &str) -> Option<i32> {
        let test = std::thread::current().name().unwrap().to_owned();
        let mut again = Command::new(std::env::current_exe().unwrap());
        let output = again.args(["--exact", &test]).env(CHILD, what).output().unwrap();
        assert!(output.status.signal().is_some() || output.status.success(), "{output:?}");
        output.status.signal()
    }

    #[test]
    fn a_sigbus_outside_guarded_mappings_ends_the_process() {
        let Ok(what) = std::env::var(CHILD) else {
            assert_eq!(signal_of_child("nothing"), None);
            assert_eq!(signal_of_child("other memory"), Some(libc::SIGBUS));
            assert_eq!(signal_of_child("a signal"), Some(libc::SIGBUS));
            return;
        };
        let (_, shared) = file(1);
        let _guarded = SharedMapping::map(shared, 0, PAGE as u64).unwrap();
        let (owner, shared) = file(1);
        let unguarded = SharedMapping::map(shared, 0, PAGE as u64).unwrap();
        match what.as_str() {
            "nothing" => {}
            "other memory" => {
                unguarded.unguard();
                owner.set_len(0).unwrap();
                read(&unguarded, 0);
            }
            // SAFETY: no memory is involved.
            _ => assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0),
        }
    }
}
