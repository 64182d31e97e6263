// SPDX-License-Identifier: Apache-2.0
//! The part of a thread's ring that belongs to one disk: its registered files and buffers. All disks
//! of the thread share the tables of the ring.
// UNSAFETY: registers guest memory. The owner of the disk keeps it mapped until it is unregistered.
#![expect(unsafe_code)]

use crate::plane::IoPoll;
use crate::poll_ring::PollRing;
use crate::poll_trial::PollTrial;
use crate::table::Table;
use crate::uring::{CQ_ENTRIES, SQ_ENTRIES, Uring};
use backend::BufList;
use io_uring::Submitter;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use virtqueue::GuestMemory;

/// Places of a ring for files, or as many as the limit on open files allows.
const FILES_MAX: u32 = 4096;
/// Places of a ring for buffers: io_uring's limit.
const BUFFERS_MAX: u32 = 1 << 14;
/// io_uring's limit on one registered buffer.
const FIXED_BUFFER_BYTES_MAX: u64 = 1 << 30;
/// A place of a table of files without a file.
const NO_FILE: RawFd = -1;

/// One registered buffer.
#[derive(Clone, Copy, Debug)]
struct FixedBuffer {
    start: usize,
    end: usize,
    index: u16,
}

/// One disk's part of the ring; by default that of no disk.
#[derive(Debug, Default)]
pub(crate) struct Port {
    /// Places of the lane's files.
    files: Range<u32>,
    /// Places of the registered buffers.
    buffers: Range<u32>,
    fixed: Vec<FixedBuffer>,
    /// Use of the `IOPOLL` ring for reads and writes; with `Auto` its trial decides.
    iopoll: IoPoll,
    /// Submits operations with IOSQE_ASYNC, because issuing one may block.
    pub(crate) force_async: bool,
    /// The device does not support polling.
    refused: bool,
    /// Number of next transfers for the main ring: retries of transfers that found no free tag.
    detours: usize,
}

impl Port {
    /// The place of the lane's first file.
    #[inline]
    pub(crate) fn first_file(&self) -> u32 {
        self.files.start
    }

    /// Returns whether the next transfer belongs to the `IOPOLL` ring, whose trial is `trial`.
    #[inline]
    pub(crate) fn polls_next(&mut self, trial: &mut PollTrial) -> bool {
        let detour = self.detours > 0;
        self.detours -= usize::from(detour);
        match self.iopoll {
            _ if detour || self.refused => false,
            IoPoll::Off => false,
            IoPoll::On => true,
            IoPoll::Auto => trial.polls_next(),
        }
    }

    /// Returns whether transfers may go to the `IOPOLL` ring.
    fn may_poll(&self) -> bool {
        self.iopoll != IoPoll::Off
    }

    /// Returns the result of a polled transfer for the lane: a transfer that could not be polled is
    /// to be repeated.
    #[inline]
    pub(crate) fn result_for_lane(&mut self, result: i32) -> i32 {
        if result == -libc::EOPNOTSUPP && !self.refused {
            tracing::warn!("the device's queues cannot be polled: using interrupts");
            self.refused = true;
        }
        if !matches!(-result, libc::EOPNOTSUPP | libc::EAGAIN) {
            return result;
        }
        self.detours += 1;
        -libc::EAGAIN // the lane retries, and the main ring waits for a tag
    }

    /// The index of the registered buffer that contains all memory of a transfer, if there is one.
    #[inline]
    pub(crate) fn fixed_index(&self, bufs: &BufList, vectored: bool) -> Option<u16> {
        if self.fixed.is_empty() || (bufs.iovs().len() > 1 && !vectored) {
            return None;
        }
        let inside = |buffer: &&FixedBuffer| {
            bufs.iovs().iter().all(|iov| {
                let start = iov.iov_base as usize;
                start >= buffer.start && start + iov.iov_len <= buffer.end
            })
        };
        self.fixed.iter().find(inside).map(|buffer| buffer.index)
    }
}

/// Registers a table of files with a ring, all places empty.
pub(crate) fn register_table(submitter: &Submitter<'_>) -> io::Result<Table> {
    let mut size = FILES_MAX;
    loop {
        match submitter.register_files_sparse(size) {
            Ok(()) => return Ok(Table::new(size)),
            // More places than the process may have open files.
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) && size > 1 => size /= 2,
            Err(error) => return Err(error),
        }
    }
}

impl Uring {
    /// Registers the files of a lane of the thread's disk `disk`, relative to which the lane counts
    /// its [`backend::FileIndex`]. `iopoll`: use of the `IOPOLL` ring for its reads and writes.
    pub(crate) fn open_port(
        &mut self,
        disk: u16,
        files: &[RawFd],
        iopoll: IoPoll,
    ) -> io::Result<()> {
        let places = self.files.take(files.len());
        let places = places.ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))?;
        let at = usize::from(disk);
        if at >= self.ports.len() {
            self.ports.resize_with(at + 1, Port::default);
        }
        self.ports[at] = Port { files: places, iopoll, ..Port::default() };
        let opened = self.open_poll_ring().and_then(|()| self.update_files(disk, files));
        if opened.is_err() {
            self.close_port(disk);
        }
        opened
    }

    /// Makes the `IOPOLL` ring if a disk wants one.
    fn open_poll_ring(&mut self) -> io::Result<()> {
        if self.poll_ring.is_none() && self.ports.iter().any(Port::may_poll) {
            let ring = PollRing::new(SQ_ENTRIES, CQ_ENTRIES)?;
            ring.submitter().register_files_sparse(self.files.size())?;
            self.poll_ring = Some(ring);
        }
        Ok(())
    }

    /// Unregisters the files and the buffers of a disk. Otherwise the kernel holds them, and keeps
    /// the file system busy, until it has destroyed the ring. No operation of the disk may be in
    /// flight.
    pub(crate) fn close_port(&mut self, disk: u16) {
        self.unregister_memory(disk);
        let files = self.ports[usize::from(disk)].files.clone();
        let nothing = vec![NO_FILE; files.len()];
        // It fails only for places outside the table.
        let _ = self.update_files(disk, &nothing);
        self.files.give(&files);
        self.ports[usize::from(disk)] = Port::default();
        if !self.ports.iter().any(Port::may_poll) {
            self.poll_ring = None;
        }
    }

    /// Replaces the registered files `old` of a disk by the same number of files of another lane.
    /// Keeps the old ones if this fails. No operation on the files may be in flight.
    pub(crate) fn replace_files(
        &mut self,
        disk: u16,
        old: &[RawFd],
        new: &[RawFd],
    ) -> io::Result<()> {
        assert_eq!(old.len(), new.len(), "lanes of a disk have the same number of files");
        let replaced = self.update_files(disk, new);
        if replaced.is_err() {
            self.update_files(disk, old).expect("open files can be registered again");
        }
        replaced
    }

    fn update_files(&self, disk: u16, files: &[RawFd]) -> io::Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        let port = &self.ports[usize::from(disk)];
        let poll_ring =
            self.poll_ring.as_ref().filter(|_| port.may_poll()).map(PollRing::submitter);
        for submitter in poll_ring.into_iter().chain([self.ring.submitter()]) {
            let updated = submitter.register_files_update(port.first_file(), files)?;
            if updated < files.len() {
                return Err(io::Error::other("the kernel replaced only some registered files"));
            }
        }
        Ok(())
    }

    /// Registers the regions of `memory` as buffers of a disk in place of the previous ones. The
    /// caller keeps the regions mapped until the next call for this disk.
    ///
    /// # Errors
    /// The error of the system call, usually ENOMEM because of RLIMIT_MEMLOCK. The disk then works
    /// without registered buffers.
    pub(crate) fn register_memory(&mut self, disk: u16, memory: &GuestMemory) -> io::Result<()> {
        self.unregister_memory(disk);
        if self.buffers.is_none() {
            self.ring.submitter().register_buffers_sparse(BUFFERS_MAX)?;
            self.buffers = Some(Table::new(BUFFERS_MAX));
        }
        let pieces = pieces_of(memory);
        let places = self.buffers.as_mut().and_then(|table| table.take(pieces.len()));
        let places = places.ok_or(io::ErrorKind::OutOfMemory)?;
        let port = &mut self.ports[usize::from(disk)];
        port.buffers = places.clone();
        for (place, piece) in places.zip(pieces) {
            if let Err(error) = update_buffer(&self.ring.submitter(), place, &piece) {
                self.unregister_memory(disk);
                return Err(error);
            }
            let (start, index) = (piece.iov_base as usize, place as u16);
            port.fixed.push(FixedBuffer { start, end: start + piece.iov_len, index });
        }
        Ok(())
    }

    /// Unregisters the buffers of a disk.
    pub(crate) fn unregister_memory(&mut self, disk: u16) {
        let port = &mut self.ports[usize::from(disk)];
        port.fixed.clear();
        let places = std::mem::take(&mut port.buffers);
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        for place in places.clone() {
            // It fails only for places outside the table.
            let _ = update_buffer(&self.ring.submitter(), place, &nothing);
        }
        if let Some(table) = &mut self.buffers {
            table.give(&places);
        }
    }
}

/// The regions of `memory` in pieces that io_uring accepts.
fn pieces_of(memory: &GuestMemory) -> Vec<libc::iovec> {
    let mut pieces = Vec::new();
    for region in memory.regions() {
        let mut offset = 0;
        while offset < region.len() {
            let len = (region.len() - offset).min(FIXED_BUFFER_BYTES_MAX);
            let base = region.host().wrapping_add(offset as usize);
            pieces.push(libc::iovec { iov_base: base.cast(), iov_len: len as usize });
            offset += len;
        }
    }
    pieces
}

fn update_buffer(submitter: &Submitter<'_>, place: u32, buffer: &libc::iovec) -> io::Result<()> {
    let buffer = std::slice::from_ref(buffer);
    // SAFETY: the caller of `register_memory` keeps the shared mappings until they are unregistered.
    unsafe { submitter.register_buffers_update(place, buffer, None) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;
    use backend::{Engine, FileIndex, Op, Slot, Token};
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use virtqueue::Region;

    const PAGE: usize = 4096;

    fn file_of(byte: u8) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[byte; PAGE]).unwrap();
        file
    }

    fn memory() -> GuestMemory {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(2 * PAGE as u64).unwrap();
        GuestMemory::new(vec![Region::map(0, 0, 2 * PAGE as u64, file, 0).unwrap()]).unwrap()
    }

    /// Carries out an operation of the disk's lane.
    fn result_of(uring: &mut Uring, disk: u16, op: Op) -> i32 {
        let token = Token { slot: Slot(3), layer: 0 };
        uring.of_disk(disk).push(op, token);
        let mut events = Vec::new();
        while events.is_empty() {
            uring.wait(None);
            uring.reap(&mut events, 1);
        }
        let (event, result) = events[0];
        assert_eq!(event, Event::Lane { disk, token });
        result
    }

    /// Reads a page of the disk's file `index` to `to`; returns its first byte or the error.
    fn read(uring: &mut Uring, disk: u16, index: u32, to: *mut u8) -> Result<u8, i32> {
        let mut segment = libc::iovec { iov_base: to.cast(), iov_len: PAGE };
        // SAFETY: the segment and the memory live until the completion below.
        let bufs = unsafe { BufList::new(&mut segment, 1) };
        match result_of(uring, disk, Op::Read { file: FileIndex(index), bufs, offset: 0 }) {
            // SAFETY: `to` is a page.
            0.. => Ok(unsafe { to.read_volatile() }),
            error => Err(error),
        }
    }

    #[test]
    fn each_disk_counts_its_own_files_and_a_removed_ones_places_are_used_again() {
        let mut uring = Uring::new().unwrap();
        let files: Vec<File> = (0..6).map(file_of).collect();
        let fds: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let mut page = [0; PAGE];
        let to = page.as_mut_ptr();
        uring.open_port(0, &fds[0..2], IoPoll::Off).unwrap();
        uring.open_port(1, &fds[2..4], IoPoll::Off).unwrap();
        assert_eq!(read(&mut uring, 0, 1, to), Ok(1));
        assert_eq!(read(&mut uring, 1, 0, to), Ok(2));
        uring.close_port(0);
        assert_eq!(read(&mut uring, 0, 0, to), Err(-libc::EBADF));
        assert_eq!(read(&mut uring, 1, 1, to), Ok(3));
        uring.open_port(0, &fds[4..6], IoPoll::Off).unwrap();
        assert_eq!(uring.ports[0].files, 0..2);
        assert_eq!(read(&mut uring, 0, 1, to), Ok(5));
        uring.replace_files(1, &fds[2..4], &fds[0..2]).unwrap();
        assert_eq!(read(&mut uring, 1, 1, to), Ok(1));
        assert_eq!(read(&mut uring, 0, 0, to), Ok(4));
    }

    #[test]
    fn an_operation_of_a_kernel_thread_is_counted_until_its_event() {
        let mut uring = Uring::new().unwrap();
        let file = file_of(1);
        uring.open_port(0, &[file.as_raw_fd()], IoPoll::Off).unwrap();
        let file = FileIndex(0);
        let grow = Op::Fallocate { file, mode: 0, offset: 0, len: 2 * PAGE as u64 };
        for op in [Op::Fdatasync { file }, grow] {
            uring.of_disk(0).push(op, Token { slot: Slot(4), layer: 0 });
            assert_eq!(uring.in_kernel_threads, 1);
            uring.wait(None);
            uring.reap(&mut Vec::new(), 1);
            assert_eq!(uring.in_kernel_threads, 0);
        }
        assert_eq!(result_of(&mut uring, 0, Op::Fdatasync { file }), 0);
    }

    /// Names of the kernel threads that work for this thread's rings.
    fn kernel_threads() -> usize {
        let worker = format!("iou-wrk-{}", rustix::thread::gettid().as_raw_nonzero());
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| worker.starts_with(name.trim())).count()
    }

    #[test]
    fn a_kernel_thread_submits_the_operations_of_a_disk_that_could_keep_the_thread() {
        let mut uring = Uring::new().unwrap();
        let page = [5; PAGE];
        for (disk, elsewhere) in [(0, false), (1, true)] {
            // A pipe with data answers at once.
            let (from, to) = std::io::pipe().unwrap();
            (&to).write_all(&page).unwrap();
            uring.open_port(disk, &[from.as_raw_fd()], IoPoll::Off).unwrap();
            uring.ports[usize::from(disk)].force_async = elsewhere;
            assert_eq!(read(&mut uring, disk, 0, [0; PAGE].as_mut_ptr()), Ok(5));
            assert_eq!(kernel_threads() > 0, elsewhere, "disk {disk}");
        }
    }

    #[test]
    fn disks_without_room_in_the_table_are_refused_and_others_stay() {
        let mut uring = Uring::new().unwrap();
        let file = file_of(7);
        uring.open_port(0, &[file.as_raw_fd()], IoPoll::Off).unwrap();
        let many = vec![file.as_raw_fd(); uring.files.size() as usize];
        let error = uring.open_port(1, &many, IoPoll::Off).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
        uring.open_port(2, &[file.as_raw_fd(), 99_999_999], IoPoll::Off).unwrap_err();
        uring.open_port(2, &[file.as_raw_fd()], IoPoll::Off).unwrap();
        assert_eq!(uring.ports[2].files, 1..2, "a refused disk leaves its places");
        assert_eq!(read(&mut uring, 0, 0, [0; PAGE].as_mut_ptr()), Ok(7));
    }

    #[test]
    fn two_disks_have_pinned_memory_and_one_keeps_it_when_the_other_goes() {
        let mut uring = Uring::new().unwrap();
        let (file, memories) = (file_of(9), [memory(), memory(), memory()]);
        for disk in [0, 1] {
            uring.open_port(disk, &[file.as_raw_fd()], IoPoll::Off).unwrap();
            if let Err(error) = uring.register_memory(disk, &memories[usize::from(disk)]) {
                return println!("SKIP: this user may not pin memory: {error}");
            }
        }
        let host = memories.each_ref().map(|memory| memory.regions()[0].host());
        let pinned = |uring: &Uring, disk: usize, at: *mut u8| {
            let mut segment = libc::iovec { iov_base: at.cast(), iov_len: PAGE };
            // SAFETY: the list is used in this function only.
            uring.ports[disk].fixed_index(&unsafe { BufList::new(&mut segment, 1) }, true)
        };
        assert_eq!([0, 1].map(|disk| pinned(&uring, disk, host[disk])), [Some(0), Some(1)]);
        assert_eq!(pinned(&uring, 0, host[1]), None, "the memory of another guest");
        assert_eq!(read(&mut uring, 0, 0, host[0]), Ok(9));
        uring.register_memory(0, &memories[2]).unwrap();
        assert_eq!((pinned(&uring, 0, host[0]), pinned(&uring, 0, host[2])), (None, Some(0)));
        uring.close_port(0);
        assert_eq!(read(&mut uring, 1, 0, host[1]), Ok(9));
        assert_eq!(pinned(&uring, 1, host[1]), Some(1));
    }

    #[test]
    fn only_automatic_polling_follows_the_trial() {
        for decided in [false, true] {
            let polls = |iopoll| {
                let mut port = Port { iopoll, ..Port::default() };
                port.polls_next(&mut PollTrial::decided(decided))
            };
            let all = [IoPoll::Off, IoPoll::On, IoPoll::Auto].map(polls);
            assert_eq!(all, [false, true, decided]);
        }
    }

    #[test]
    fn the_polling_ring_exists_while_a_disk_wants_it() {
        let mut uring = Uring::new().unwrap();
        let file = file_of(1);
        for (disk, iopoll) in [(0, IoPoll::Off), (1, IoPoll::On), (2, IoPoll::Auto)] {
            assert_eq!(uring.poll_ring.is_some(), disk == 2);
            uring.open_port(disk, &[file.as_raw_fd()], iopoll).unwrap();
        }
        assert_eq!(read(&mut uring, 0, 0, [0; PAGE].as_mut_ptr()), Ok(1));
        uring.close_port(2);
        assert!(uring.poll_ring.is_some());
        uring.close_port(1);
        assert!(uring.poll_ring.is_none());
    }
}
