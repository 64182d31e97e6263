// SPDX-License-Identifier: Apache-2.0
//! The storage below imago: one file of the chain, with the order of writes that a crash needs.
//!
//! imago's writes wait in an `Overlay` for a commit, which writes them in phases. Those before a phase are durable when
//! it begins. Data of new clusters that hides other content goes to the file at once ([`Store::write_data`]) and counts
//! as the first phase. So no table on the disk ever names a cluster whose reference count or data is missing. A new
//! cluster of a disk that reads as zeroes is a hole of the file (`Store::make_zero`), which a lane writes later.
// UNSAFETY: imago's `Storage` declares its functions `unsafe` because of alignment, which this
// storage does not need. One block, for tests, exchanges the file below a descriptor.
#![expect(unsafe_code)]

use crate::fields::{AUTOCLEAR_AT, SIZE_AT};
use crate::guard::Guard;
use crate::job::{Begun, Job, Out, Rest};
use crate::overlay::{Commit, Overlay, PHASES};
use backend::holes::Holes;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use imago::storage::{PreallocateMode, Storage};
use rustix::fs::{Advice, FallocateFlags, fallocate};
use std::borrow::Cow;
use std::fmt::{self, Display};
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Maximum zeroes that are written at once.
const ZEROES_MAX: u64 = 1 << 20;

/// One change of a file, for tests of crashes.
#[derive(Clone, Debug)]
pub enum Change {
    /// A write.
    Write {
        /// Position in the file.
        offset: u64,
        /// The written bytes.
        data: Vec<u8>,
    },
    /// The file gets this length.
    SetLen(u64),
    /// Everything before is on stable storage.
    Sync,
}

/// The reason why a commit has failed.
#[derive(Debug)]
pub enum CommitError {
    /// There is no room for a write: the changes still wait, and the commit can be repeated.
    Full(io::Error),
    /// Any other one: the tables in the file are unknown.
    Lost(io::Error),
}

impl From<io::Error> for CommitError {
    fn from(why: io::Error) -> Self {
        CommitError::Lost(why)
    }
}

impl CommitError {
    /// The error of a write, or of a change of the length.
    pub(crate) fn of_write(why: io::Error) -> Self {
        match why.raw_os_error() {
            // The last one: the largest file of the file system or of the process (RLIMIT_FSIZE).
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => CommitError::Full(why),
            _ => CommitError::Lost(why),
        }
    }
}

/// The changes of a file, oldest first.
pub type Log = Arc<Mutex<Vec<Change>>>;

/// One file of the chain.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    /// Number in the chain: 0 is the image itself.
    index: u32,
    out: Arc<Out>,
    /// The holes of the file, which lanes write meanwhile.
    holes: Holes,
    /// Nothing was ever written behind this position.
    fresh_from: AtomicU64,
    /// End of the last place that a table is about to name. The file gets this length with the commit.
    named_end: AtomicU64,
    writable: bool,
    overlay: Mutex<Overlay>,
    /// The refcount table has moved: its old place may be reused after a commit only.
    must_commit: AtomicBool,
    /// Since imago has opened the image for writing.
    pub(crate) guard: OnceLock<Mutex<Guard>>,
    helper: CommonStorageHelper,
}

impl Store {
    /// Opens file number `index` of the chain at `opened`; `path` is its name.
    pub fn open(
        opened: &Path,
        path: &Path,
        index: u32,
        writable: bool,
        log: Option<Log>,
    ) -> io::Result<Self> {
        let file = File::options().read(true).write(writable).open(opened)?;
        Ok(Store {
            path: path.into(),
            index,
            holes: Holes::exact(&file),
            fresh_from: AtomicU64::new(file.metadata()?.len()),
            named_end: AtomicU64::new(0),
            out: Arc::new(Out::new(file, log)),
            writable,
            overlay: Mutex::default(),
            must_commit: AtomicBool::new(false),
            guard: OnceLock::new(),
            helper: CommonStorageHelper::default(),
        })
    }

    /// Number in the chain.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Clears the autoclear features, durably: a bitmap of QEMU, which one of them declares valid, is wrong as soon as
    /// data changes, and not every change of data has a commit.
    ///
    /// # Errors
    /// The error of the system call.
    pub(crate) fn clear_autoclear(&self) -> io::Result<()> {
        self.out.write(0, &[0; 8], AUTOCLEAR_AT as u64)?;
        self.sync()
    }

    /// Writes data, also that of a cluster which no table on the disk names yet: whole sectors.
    pub fn write_data(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.check_data(offset, data.len() as u64)?;
        // imago may have copied the old content of the whole cluster there, for the next commit.
        self.overlay().forget(offset, data.len() as u64);
        self.fresh_from.fetch_max(offset + data.len() as u64, Ordering::Relaxed);
        self.out.write(0, data, offset)
    }

    /// Prepares a new place of data that a lane will write: it reads as zeroes, also after a crash. Most places are
    /// holes.
    pub(crate) fn make_zero(&self, offset: u64, len: u64) -> io::Result<()> {
        // An allocation that failed may have left old content there, for the next commit.
        self.overlay().forget(offset, len);
        self.named_end.fetch_max(offset + len, Ordering::Relaxed);
        let is_hole = || Ok::<_, io::Error>(self.first_data(offset..offset + len)?.is_empty());
        match offset >= self.fresh_from.load(Ordering::Relaxed) || is_hole()? {
            true => self.check_data(offset, len),
            false => self.zero_data(offset, len),
        }
    }

    /// Forgets the content of free clusters that waits for the next commit.
    pub fn forget(&self, clusters: Range<u64>) {
        self.overlay().forget(clusters.start, clusters.end - clusters.start);
    }

    /// Zeroes a range like [`Store::write_data`].
    pub fn zero_data(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_data(offset, len)?;
        self.overlay().forget(offset, len);
        self.out.changes_data(|| Change::Write { offset, data: vec![0; len as usize] });
        zero(&self.out.file, offset, len)
    }

    /// Begins to write the waiting changes: they are fixed from now on until [`Store::end_commit`]. `None`: there
    /// are none.
    ///
    /// # Errors
    /// [`CommitError`].
    pub(crate) fn begin_commit(&self, cluster_bytes: u64) -> Result<Option<Begun>, CommitError> {
        let mut overlay = self.overlay();
        let guard = self.guard();
        guard.as_ref().map_or(Ok(()), |guard| guard.check())?;
        let end = overlay.end().max(self.named_end.load(Ordering::Relaxed));
        let end = end.max(self.size_bytes()?).next_multiple_of(cluster_bytes);
        if overlay.is_empty() {
            self.extend(end).map_err(CommitError::of_write)?;
            self.must_commit.store(false, Ordering::Relaxed);
            return Ok(None);
        }
        let known = guard.as_ref().map(|guard| guard.places());
        let Commit { phases, freed, places, reserved_end } =
            overlay.commit(cluster_bytes, known, &|buf, at| self.read_file(buf, at))?;
        guard.map_or(Ok(()), |mut guard| guard.check_commit(places.as_ref(), &freed))?;
        self.fresh_from.fetch_max(overlay.end(), Ordering::Relaxed);
        let job = Job::new(&self.out, end, reserved_end, phases);
        let rest = Rest { freed, places, revision: overlay.revision() };
        Ok(Some(Begun { job, rest }))
    }

    /// Takes the outcome of the [`Job`] of a commit. Returns the ranges of the clusters that have become free,
    /// durably.
    ///
    /// # Errors
    /// [`CommitError`]. A sync that fails may have lost data of earlier writes, also if it finds no room.
    pub(crate) fn end_commit(
        &self,
        rest: Rest,
        written: Result<(), CommitError>,
    ) -> Result<Vec<Range<u64>>, CommitError> {
        let mut overlay = self.overlay();
        let Rest { freed, places, revision } = rest;
        let written = written.and_then(|()| match overlay.revision() == revision {
            true => Ok(()),
            false => Err(io::Error::other("a table has changed during its commit").into()),
        });
        let reused = freed.iter().map(|range| range.end).max().unwrap_or(0);
        self.fresh_from.fetch_max(reused, Ordering::Relaxed);
        let freed = match (self.guard(), written) {
            (None, written) => written.map(|()| freed)?,
            (Some(mut guard), Ok(())) => guard.committed(places, freed),
            (Some(mut guard), Err(why)) => {
                guard.half_free(freed);
                return Err(why);
            }
        };
        overlay.committed();
        self.must_commit.store(false, Ordering::Relaxed);
        Ok(freed)
    }

    /// Allows to count clusters as used before they are: a crash may leak them. The image has a mark that tells it.
    pub(crate) fn may_reserve(&self) {
        self.overlay().reserve.is_allowed = true;
    }

    /// Returns whether all changes of commits are durable.
    pub(crate) fn is_synced(&self) -> bool {
        self.out.is_synced()
    }

    /// Makes all changes of commits durable.
    ///
    /// # Errors
    /// The error of the system call.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.out.sync()
    }

    /// Makes all changes of commits durable, and counts the clusters as free again that were reserved.
    ///
    /// # Errors
    /// [`CommitError`].
    pub(crate) fn settle(&self) -> Result<(), CommitError> {
        // No table names these clusters: the order of the writes does not matter.
        for (offset, counts) in self.overlay().reserve.give_back() {
            self.out.write(PHASES - 1, &counts, offset).map_err(CommitError::Lost)?;
        }
        self.sync().map_err(CommitError::Lost)
    }

    /// Bytes at a position, with the changes that wait for the next commit; zeroes behind the end.
    ///
    /// # Errors
    /// The error of the system call.
    pub(crate) fn read(&self, len: usize, offset: u64) -> io::Result<Vec<u8>> {
        self.overlay().read(len, offset, &|buf, at| self.read_file(buf, at))
    }

    /// Keeps a write for the next commit. Zeroes behind the end of the file change no sector, but its length.
    ///
    /// # Errors
    /// The error of a read.
    pub(crate) fn keep(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.named_end.fetch_max(offset + data.len() as u64, Ordering::Relaxed);
        self.overlay().write(data, offset, &|buf, at| self.read_file(buf, at))
    }

    /// Makes the host read a range of the file, so that many reads are in flight at once.
    pub(crate) fn read_ahead(&self, offset: u64, len: u64) {
        // Only advice: the read itself follows.
        let _ = rustix::fs::fadvise(&self.out.file, offset, NonZeroU64::new(len), Advice::WillNeed);
    }

    /// The first data in a range of the file; empty at its end if there is none.
    pub fn first_data(&self, range: Range<u64>) -> io::Result<Range<u64>> {
        self.holes.first_data(&self.out.file, range)
    }

    /// Gives the space of free clusters back to the host, if the file system can do it.
    pub fn punch(&self, range: Range<u64>) {
        let len = range.end - range.start;
        if punch(&self.out.file, range.start, len).is_ok() {
            let change = || Change::Write { offset: range.start, data: vec![0; len as usize] };
            self.out.changes_data(change);
        }
    }

    /// Gives the descriptor another open file, and returns the one before.
    #[cfg(test)]
    pub(crate) fn exchange(&self, other: &File) -> File {
        use std::os::fd::AsRawFd;
        let before = self.out.file.try_clone().expect("a duplicate");
        // SAFETY: both descriptors are open, and the one of this store stays its own.
        let done = unsafe { libc::dup2(other.as_raw_fd(), self.out.file.as_raw_fd()) };
        assert!(done >= 0, "dup2 succeeds");
        before
    }

    /// Returns whether a commit must follow before the next change.
    pub fn must_commit(&self) -> bool {
        self.must_commit.load(Ordering::Relaxed)
    }

    /// Returns whether a hole of the file is a hole without doubt.
    pub fn has_exact_holes(&self) -> bool {
        self.holes.are_told()
    }

    /// Bytes that the file system has for other data.
    pub fn free_bytes(&self) -> io::Result<u64> {
        let told = rustix::fs::fstatvfs(&self.out.file)?;
        Ok(told.f_bavail.saturating_mul(told.f_frsize))
    }

    pub(crate) fn overlay(&self) -> MutexGuard<'_, Overlay> {
        self.overlay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the size of the disk in a write of imago into the header. imago knows the size that a growth is to reach,
    /// also one that has failed, and writes it when the refcount table moves.
    fn with_size<'a>(&self, data: &'a [u8], offset: u64) -> io::Result<Cow<'a, [u8]>> {
        const SIZE: Range<usize> = SIZE_AT..SIZE_AT + 8;
        if offset > 0 || data.len() < SIZE.end || self.guard.get().is_none() {
            return Ok(data.into());
        }
        let mut header = data.to_vec();
        header[SIZE].copy_from_slice(&self.read(SIZE.len(), SIZE.start as u64)?);
        Ok(header.into())
    }

    fn extend(&self, wanted: u64) -> io::Result<()> {
        self.out.extend(wanted)
    }

    /// Reads the file; zeroes behind its end.
    fn read_file(&self, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buf.is_empty() {
            match self.out.file.read_at(buf, offset) {
                Ok(0) => {
                    buf.fill(0);
                    return Ok(());
                }
                Ok(read) => {
                    offset += read as u64;
                    buf = &mut buf[read..];
                }
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) => return Err(why),
            }
        }
        Ok(())
    }

    /// Extends the file to a multiple of `unit`: a read of its last cluster is never short.
    pub fn fill_up(&self, unit: u64) -> io::Result<()> {
        self.extend(self.size_bytes()?.next_multiple_of(unit))
    }

    /// Length of the file in bytes.
    pub fn size_bytes(&self) -> io::Result<u64> {
        self.out.size_bytes()
    }

    /// Bytes of the file system that the file takes; all of a block device.
    pub(crate) fn allocated_bytes(&self) -> io::Result<u64> {
        self.out.allocated_bytes()
    }
}

/// Punches a hole into a file, which stays as long as it is.
pub(crate) fn punch(file: &File, at: u64, len: u64) -> io::Result<()> {
    Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)?)
}

/// Zeroes a range of a file, which stays as long as it is.
pub(crate) fn zero(file: &File, mut at: u64, mut len: u64) -> io::Result<()> {
    if punch(file, at, len).is_ok() {
        return Ok(());
    }
    let zeroes = vec![0; len.min(ZEROES_MAX) as usize];
    while len > 0 {
        let part = len.min(ZEROES_MAX);
        file.write_all_at(&zeroes[..part as usize], at)?;
        (at, len) = (at + part, len - part);
    }
    Ok(())
}

impl Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())
    }
}

impl Storage for Store {
    fn size(&self) -> io::Result<u64> {
        let named_end = self.named_end.load(Ordering::Relaxed);
        Ok(self.size_bytes()?.max(self.overlay().end()).max(named_end))
    }

    fn get_filename(&self) -> Option<PathBuf> {
        Some(self.path.clone())
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, mut offset: u64) -> io::Result<()> {
        let overlay = self.overlay();
        for mut part in bufv.into_inner() {
            self.read_file(&mut part, offset)?;
            overlay.patch(&mut part, offset);
            offset += part.len() as u64;
        }
        Ok(())
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, mut offset: u64) -> io::Result<()> {
        if !self.writable {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        for part in bufv.into_inner() {
            let part = self.with_size(&part, offset)?;
            self.check_write(&part, offset)?;
            if (48..60).contains(&offset) || offset == 0 {
                self.must_commit.store(true, Ordering::Relaxed);
            }
            self.keep(&part, offset)?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(()) // `Store::commit` syncs
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }

    fn resize(&self, new_size: u64, _: PreallocateMode) -> io::Result<()> {
        match new_size < self.size_bytes()? {
            true => Err(io::ErrorKind::Unsupported.into()),
            false => self.extend(new_size),
        }
    }
}
