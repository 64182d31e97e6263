// SPDX-License-Identifier: Apache-2.0
//! A qcow2 image as a disk.
//!
//! [`Qcow2Disk`] has one thread that works on the tables of the image through `imago` (`disk_thread`,
//! `image`), and tells lanes the places around their questions, too (`around`). A lane keeps the places
//! that it has learned (`extents`, `pages`) and does their I/O on the file itself, at the speed of a raw
//! image (`lane`). Three rules keep the image consistent after a crash at any instant:
//!
//! 1. A table is written after the things that it names are durable: reference counts, other tables, and data that
//!    hides content of before (`storage`).
//! 2. A write that allocates completes after its tables are in the file, so that the end of the process loses
//!    nothing; one commit serves many writes. A FLUSH of the guest makes them durable, with its data.
//! 3. No cluster that an extent of a lane may name is freed or moved, so that a late I/O of a lane hits no
//!    other data. DISCARD and WRITE_ZEROES punch the file inside of an allocated cluster. Its table entry
//!    goes later, in the background, after all lanes have forgotten the place (`versions`, `unmap`).
//!    Clusters of compressed data, which no extent names, and of old tables are freed at once; they are
//!    punched after the commit that frees them.

mod around;
mod chain;
mod change;
pub mod check;
mod claims;
mod clusters;
mod committer;
pub mod copy;
#[cfg(test)]
mod crash_tests;
pub mod create;
mod decompressed;
mod describe;
mod disk_thread;
mod ending;
mod entry;
mod error;
mod extents;
mod fields;
mod growth;
mod guard;
pub mod header;
#[cfg(test)]
mod hold_tests;
mod image;
mod in_use;
pub mod inspect;
mod job;
mod lane;
#[cfg(test)]
mod lock_tests;
mod mapped;
pub mod merge;
#[cfg(test)]
mod open_tests;
mod options;
mod overlay;
mod pages;
mod piece;
mod places;
mod reader;
#[cfg(test)]
mod refcount_growth_tests;
mod reserve;
mod shifted;
pub mod storage;
#[cfg(test)]
mod store_tests;
#[cfg(test)]
mod sync_tests;
mod tables;
pub mod target;
mod unmap;
mod versions;

pub use chain::FILES_MAX;
pub use ending::Settling;
pub use error::Qcow2Error;
pub use in_use::repair;
pub use options::{AllowBacking, Qcow2Options, TakesOver};
pub use reader::Qcow2Reader;

use backend::file::place;
use backend::mark::InUse as Mark;
use backend::{Disk, File, FileOptions, Info, Lane, ResizeError};
use chain::Link;
use describe::describe;
use disk_thread::{Of, Work};
use image::{Image, Piece};
use in_use::InUse;
use lane::{Limits, Qcow2Lane};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use storage::{Log, Store};
use versions::{User, Versions};

const PAGE_BYTES: u32 = 4096;

/// A disk in a qcow2 image.
pub struct Qcow2Disk {
    files: Vec<Arc<File>>,
    info: Info,
    capacity_bytes: AtomicU64,
    versions: Arc<Versions>,
    unmapped_bytes: Arc<AtomicU64>,
    /// A hole of the image's file is a hole without doubt.
    exact_holes: bool,
    work: Arc<Mutex<Sender<Work>>>,
    /// The mark of the image, while it may be written.
    in_use: Option<InUse>,
    cluster_bytes: u64,
    /// As [`header::Header::extra`].
    extra: Option<&'static str>,
    is_closed: AtomicBool,
    /// A line for the user about leaked clusters.
    reclaimed: Option<String>,
}

impl Qcow2Disk {
    /// Opens the image at `path`, and its backing files read-only.
    ///
    /// # Errors
    /// [`Qcow2Error`]; its text names the cause and the remedy.
    pub fn open(path: &Path, options: &Qcow2Options) -> Result<Qcow2Disk, Qcow2Error> {
        Self::open_after(path, options, &mut || ())
    }

    /// The same; calls `locked` when the image is open and locked, and not read yet.
    pub(crate) fn open_after(
        path: &Path,
        options: &Qcow2Options,
        locked: &mut dyn FnMut(),
    ) -> Result<Qcow2Disk, Qcow2Error> {
        // The lock comes first: nothing may change the header meanwhile.
        let own = options.of_files();
        let open = |number: usize, path: &Path, read_only: bool| -> Result<Arc<File>, Qcow2Error> {
            let takes_over = options.takes_over.filter(|file| file.number == number);
            let lock = own.lock.filter(|_| takes_over.is_none());
            let file = File::open(path, FileOptions { read_only, lock, ..own.clone() })?;
            if let Some(TakesOver { identity, .. }) = takes_over {
                file.check_identity(identity)?;
            }
            if takes_over.is_some() && own.lock.is_some() {
                let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
                file.take_over_lock().map_err(failed)?;
            }
            Ok(Arc::new(file))
        };
        let mut files = vec![open(0, path, own.read_only)?];
        locked();
        let links = chain::follow_by(path, true, options.allow_backing, &mut |number, path| {
            if number > 0 {
                files.push(open(number, path, true)?);
            }
            Ok(files[number].place())
        })?;
        // Without a lock, another program may change the image, and knows its counts.
        if own.read_only || own.lock.is_none() {
            return Self::of(path, files, &links, options);
        }
        let header = header_of(path, &links, options)?;
        let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
        let found = files[0].in_use().map_err(failed)?;
        let reclaims = found.is_some() && options.takes_over.is_none_or(|file| file.number != 0);
        let reclaimed =
            reclaims.then(|| in_use::reclaim(path, &links[0].opened, header.cluster_bytes));
        let mark = match (&reclaimed, found) {
            (Some(reclaimed), _) => reclaimed.mark,
            (None, Some(_)) => Mark::Leaks,
            (None, None) => Mark::Sound,
        };
        let mut disk = Self::of(path, files, &links, options)?;
        disk.begin_use(mark).map_err(failed)?;
        disk.reclaimed = reclaimed.and_then(|reclaimed| reclaimed.notice);
        Ok(disk)
    }

    /// As [`Qcow2Disk::open`], with files that an earlier program has opened: the image at `path`, then
    /// its backing files. That program has locked them, unless it shares the image, and has ended.
    /// `is_checked`: the image still has to be at `path`.
    ///
    /// # Errors
    /// As there, also if the headers name another chain than the open one.
    pub fn adopt(
        path: &Path,
        opened: Vec<fs::File>,
        is_checked: bool,
        options: &Qcow2Options,
    ) -> Result<Qcow2Disk, Qcow2Error> {
        let places: Vec<PathBuf> = opened.iter().map(place).collect();
        let links = chain::follow_open(path, &places, options.allow_backing)?;
        let own = FileOptions { lock: None, ..options.of_files() };
        let adopt = |(number, file): (usize, fs::File)| {
            let read_only = own.read_only || number > 0;
            let (own, path) = (FileOptions { read_only, ..own.clone() }, &links[number].path);
            File::adopt(path, file, is_checked && number == 0, own)
        };
        let files = opened.into_iter().enumerate().map(adopt).map(|file| Ok(Arc::new(file?)));
        let files = files.collect::<Result<Vec<_>, Qcow2Error>>()?;
        let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
        // The earlier program had the image locked if it has left a mark.
        let mark = if own.read_only { None } else { files[0].in_use().map_err(failed)? };
        let mut disk = Self::of(path, files, &links, options)?;
        mark.map_or(Ok(()), |mark| disk.begin_use(mark)).map_err(failed)?;
        Ok(disk)
    }

    /// The properties of the disk in the open files of another program, which may write to it: `opened`
    /// has the paths of their descriptors below `/proc`, the image first. Changes nothing.
    ///
    /// # Errors
    /// As [`Qcow2Disk::adopt`].
    pub fn examine(
        path: &Path,
        opened: &[PathBuf],
        options: &Qcow2Options,
    ) -> Result<Info, Qcow2Error> {
        let links = chain::follow_open(path, opened, options.allow_backing)?;
        let header = header_of(path, &links, options)?;
        let own = FileOptions { lock: None, ..options.of_files() };
        let open = |(number, opened): (usize, &PathBuf)| {
            let read_only = own.read_only || number > 0;
            let own = FileOptions { read_only, ..own.clone() };
            Ok(Arc::new(File::open_as(opened, &links[number].path, own)?))
        };
        let files: Vec<_> =
            opened.iter().enumerate().map(open).collect::<Result<_, Qcow2Error>>()?;
        chain::open(&links, false, None)?;
        Ok(describe(path, &files, &options.file, header))
    }

    fn of(
        path: &Path,
        files: Vec<Arc<File>>,
        links: &[Link],
        options: &Qcow2Options,
    ) -> Result<Qcow2Disk, Qcow2Error> {
        Self::logged(path, files, links, options, None)
    }

    /// The same; the log gets all changes of the image.
    pub(crate) fn logged(
        path: &Path,
        mut files: Vec<Arc<File>>,
        links: &[Link],
        options: &Qcow2Options,
        log: Option<Log>,
    ) -> Result<Qcow2Disk, Qcow2Error> {
        let header = header_of(path, links, options)?;
        // Backing files are only read.
        let top = Arc::get_mut(&mut files[0]).expect("nothing else has the file yet");
        top.bound_direct_blocks(header.cluster_bytes);
        let opened = chain::open(links, !options.file.read_only, log)?;
        let versions = Arc::new(Versions::default());
        let image =
            Image::new(opened, header, Arc::clone(&versions)).giving_back(options.file.discard);
        if let (Some(known), Some(mut guard)) =
            (&options.known, image.store().ok().and_then(Store::guard))
        {
            guard.trust(known);
        }
        let (unmapped_bytes, exact_holes) =
            (Arc::clone(image.unmapped_bytes()), image.has_exact_holes());
        // The thread may end after the disk, whose lock ends with its files unless `Work::Hold` keeps them.
        let top = Arc::downgrade(&files[0]);
        let sync_failed = move |errno| {
            if let Some(top) = top.upgrade() {
                top.sync_failed(errno);
            }
        };
        let failed = |source| Qcow2Error::Image { path: path.into(), source };
        let work = disk_thread::start(image, sync_failed).map_err(failed)?;
        let info = describe(path, &files, &options.file, header);
        let capacity_bytes = AtomicU64::new(info.capacity_sectors * 512);
        let (in_use, reclaimed) = (None, None);
        Ok(Qcow2Disk {
            files,
            info,
            capacity_bytes,
            versions,
            unmapped_bytes,
            exact_holes,
            work,
            in_use,
            cluster_bytes: header.cluster_bytes,
            extra: header.extra(),
            is_closed: AtomicBool::new(false),
            reclaimed,
        })
    }

    /// Marks the image, so that leaked clusters are looked for if it is not closed.
    fn begin_use(&mut self, mark: Mark) -> io::Result<()> {
        self.in_use = Some(InUse::begin(self.top(), mark)?);
        if self.top().in_use()?.is_some() {
            let _ = self.work().send(Work::Reserve); // a thread that has ended allocates nothing
        }
        Ok(())
    }

    /// The files of the chain, the image itself first.
    pub fn files(&self) -> &[Arc<File>] {
        &self.files
    }

    /// Bytes of discarded data whose place in the file was freed for other data.
    pub fn unmapped_bytes(&self) -> u64 {
        self.unmapped_bytes.load(Ordering::Relaxed)
    }

    /// Questions of lanes about places and tables so far. Each has made an I/O wait for the thread of the disk.
    pub fn questions(&self) -> u64 {
        self.versions.questions()
    }

    /// The clusters that the image has claimed, for [`Qcow2Options::known`], when it is settled; waits at most for
    /// `patience`. `None`: an image that another program may change, or whose tables were not all looked at.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`].
    pub fn known(&self, patience: Duration) -> io::Result<Option<Vec<u8>>> {
        if self.in_use.is_none() {
            return Ok(None);
        }
        let (reply, answer) = channel();
        self.ask_within(patience, Work::Known(reply), &answer)
    }

    /// As [`header::Header::extra`] of the image.
    pub fn extra(&self) -> Option<&'static str> {
        self.extra
    }

    /// The file of the image itself.
    pub fn top(&self) -> &Arc<File> {
        &self.files[0]
    }

    /// The file of the first backing file.
    pub fn backing(&self) -> Option<&Arc<File>> {
        self.files.get(1)
    }

    /// The next piece of the disk at `at`, at most `len` bytes, as far as the image has it itself.
    pub(crate) fn own(&self, at: u64, len: u64) -> io::Result<Piece> {
        self.tell(Of::Image, at, len)
    }

    /// The next piece of the disk at `at`, at most `len` bytes, as the guest sees it.
    pub(crate) fn visible(&self, at: u64, len: u64) -> io::Result<Piece> {
        self.tell(Of::Disk, at, len)
    }

    fn tell(&self, of: Of, at: u64, len: u64) -> io::Result<Piece> {
        let (reply, answer) = channel();
        self.ask(Work::Tell(of, at, len, reply), &answer)
    }

    /// Sends work to the thread, and waits for its answer.
    fn ask<T>(&self, work: Work, answer: &Receiver<io::Result<T>>) -> io::Result<T> {
        self.ask_within(Duration::MAX, work, answer)
    }

    /// The same, with a limit on the wait.
    fn ask_within<T>(
        &self,
        patience: Duration,
        work: Work,
        answer: &Receiver<io::Result<T>>,
    ) -> io::Result<T> {
        let _ = self.work().send(work); // a thread that has ended sends no answer
        answer_within(patience, answer)
    }

    /// Notices for the user about the files, one line each.
    pub fn notices(&self) -> Vec<String> {
        let of_files = self.files.iter().flat_map(|file| file.notices().to_vec());
        of_files.chain(self.reclaimed.clone()).collect()
    }

    /// A user of places in the files.
    fn user(&self) -> User {
        User::new(&self.versions, self.work())
    }

    fn work(&self) -> Sender<Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Waits for an answer of the thread, at most for `patience`.
fn answer_within<T>(patience: Duration, answer: &Receiver<io::Result<T>>) -> io::Result<T> {
    answer.recv_timeout(patience).unwrap_or_else(|error| match error {
        RecvTimeoutError::Timeout => Err(io::ErrorKind::TimedOut.into()),
        RecvTimeoutError::Disconnected => {
            Err(io::Error::other("the thread of the image has ended"))
        }
    })
}

/// The header of the image itself, if it can be served.
fn header_of<'a>(
    path: &Path,
    links: &'a [Link],
    options: &Qcow2Options,
) -> Result<&'a header::Header, Qcow2Error> {
    let Some(header) = links.first().and_then(|link| link.header.as_ref()) else {
        return Err(Qcow2Error::NotQcow2 { path: path.into() });
    };
    if header.has_snapshots && !options.file.read_only {
        let remedy = "give --read-only, or delete them with `qemu-img snapshot -d`";
        return Err(chain::refuse(path, "it has internal snapshots", remedy));
    }
    Ok(header)
}

impl Disk for Qcow2Disk {
    fn info(&self) -> Info {
        let capacity_bytes = self.capacity_bytes.load(Ordering::Relaxed);
        // A growth zeroes the rest of the last cluster, by pages of the page cache where holes are refused.
        let block_bytes = self.info.physical_block_bytes.max(PAGE_BYTES);
        let grows_in_block = !capacity_bytes.is_multiple_of(block_bytes.into());
        Info { capacity_sectors: capacity_bytes / 512, grows_in_block, ..self.info.clone() }
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), ResizeError> {
        let capacity = self.capacity_bytes.load(Ordering::Relaxed);
        let Some(wanted) = bytes.filter(|wanted| *wanted != capacity) else { return Ok(()) };
        let block = self.info.logical_block_bytes;
        if wanted < capacity {
            return Err(ResizeError::Smaller { wanted, capacity });
        }
        if !wanted.is_multiple_of(block.into()) {
            return Err(ResizeError::PartOfBlock { wanted, block });
        }
        let most = header::size_max(self.cluster_bytes);
        if wanted > most {
            return Err(ResizeError::TooLarge { wanted, most });
        }
        if self.info.read_only {
            return Err(ResizeError::ReadOnly);
        }
        let (reply, answer) = channel();
        let failed = |source| ResizeError::Grow { wanted, source };
        let (present, grown) = self.ask(Work::Grow(wanted, reply), &answer).map_err(failed)?;
        grown.map_err(|source| match present > capacity {
            true => ResizeError::GrownInPart { wanted, present, capacity, source },
            false => failed(source),
        })?;
        self.capacity_bytes.store(wanted, Ordering::Relaxed);
        Ok(())
    }

    /// The tables are in the file before the write that changes them completes.
    fn sync(&self) -> io::Result<()> {
        let commits = self.versions.commits();
        self.files[0].sync()?;
        self.versions.synced(commits);
        Ok(())
    }

    fn open_lane(&self) -> io::Result<Box<dyn Lane>> {
        let lanes =
            self.files.iter().map(|file| file.open_lane()).collect::<io::Result<Vec<_>>>()?;
        let limits = Limits {
            capacity_bytes: self.capacity_bytes.load(Ordering::Relaxed),
            cluster_bytes: self.cluster_bytes,
            read_only: self.info.read_only,
            has_backing: self.files.len() > 1,
            discard: self.info.discard.is_some(),
            // The image has the mark if no other program may change it, nor knows its clusters.
            unmaps: self.info.discard.is_some() && self.in_use.is_some() && self.exact_holes,
        };
        Ok(Box::new(Qcow2Lane::new(limits, lanes, self.user(), self.work())))
    }

    fn layers(&self) -> u8 {
        self.files.len() as u8 + 1
    }

    fn kernel_file(&self) -> Result<std::os::fd::BorrowedFd<'_>, &'static str> {
        Err("the kernel data plane serves raw content only, and this is a qcow2 image; use \
             --data-plane uring, or convert the image with `vhost-blk convert --format qcow2`")
    }

    fn sync_failed(&self, errno: i32) {
        self.files[0].sync_failed(errno);
    }
}

/// Far more than anything takes.
#[cfg(test)]
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);
