// SPDX-License-Identifier: Apache-2.0
//! The storage below imago: one file of the chain, with the order of writes that a crash needs.
//!
//! imago writes metadata in a safe order and syncs nothing in between. Here each of its writes is
//! durable before the next one begins (`O_DSYNC`), and data written by [`Store::write_data`] is
//! durable before the next write of metadata. So no table on the disk ever names a cluster whose
//! reference count or data is missing.
// UNSAFETY: imago's `Storage` declares its functions `unsafe` because of alignment, which this
// storage does not need. No block of this file does anything unsafe.
#![expect(unsafe_code)]

use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use imago::storage::{PreallocateMode, Storage};
use std::fmt::{self, Display};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// One change of a file, for tests of crashes.
#[derive(Clone, Debug)]
pub enum Change {
    /// A write; durable at once if `durable`.
    Write {
        /// Position in the file.
        offset: u64,
        /// The written bytes.
        data: Vec<u8>,
        /// Nothing later begins before this is on stable storage.
        durable: bool,
    },
    /// The file gets this length.
    SetLen(u64),
    /// Everything before is on stable storage.
    Sync,
}

/// The changes of a file, oldest first.
pub type Log = Arc<Mutex<Vec<Change>>>;

/// One file of the chain.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    /// Number in the chain: 0 is the image itself.
    index: u32,
    file: File,
    /// The same file with `O_DSYNC`; `None` if it is read-only.
    durable: Option<File>,
    has_unsynced_data: AtomicBool,
    helper: CommonStorageHelper,
    log: Option<Log>,
}

impl Store {
    /// Opens file number `index` of the chain.
    pub fn open(path: &Path, index: u32, writable: bool, log: Option<Log>) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(writable);
        let file = options.open(path)?;
        let durable =
            writable.then(|| options.custom_flags(libc::O_DSYNC).open(path)).transpose()?;
        let (has_unsynced_data, helper) = (AtomicBool::new(false), CommonStorageHelper::default());
        Ok(Store { path: path.into(), index, file, durable, has_unsynced_data, helper, log })
    }

    /// Number in the chain.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Writes the data of a new cluster, which no table names yet.
    pub fn write_data(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.has_unsynced_data.store(true, Ordering::Relaxed);
        self.log(|| Change::Write { offset, data: data.to_vec(), durable: false });
        self.file.write_all_at(data, offset)
    }

    /// Makes the data durable.
    pub fn sync_data(&self) -> io::Result<()> {
        if self.has_unsynced_data.swap(false, Ordering::Relaxed) {
            self.file.sync_data()?;
            self.log(|| Change::Sync);
        }
        Ok(())
    }

    /// Extends the file to a multiple of `unit`: a read of its last cluster is never short.
    pub fn fill_up(&self, unit: u64) -> io::Result<()> {
        let len = self.len()?;
        let wanted = len.next_multiple_of(unit);
        if wanted > len {
            self.has_unsynced_data.store(true, Ordering::Relaxed);
            self.log(|| Change::SetLen(wanted));
            self.file.set_len(wanted)?;
        }
        Ok(())
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn log(&self, change: impl FnOnce() -> Change) {
        if let Some(log) = &self.log {
            log.lock().unwrap_or_else(PoisonError::into_inner).push(change());
        }
    }
}

impl Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())
    }
}

impl Storage for Store {
    fn size(&self) -> io::Result<u64> {
        self.len()
    }

    fn get_filename(&self) -> Option<PathBuf> {
        Some(self.path.clone())
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, mut offset: u64) -> io::Result<()> {
        for mut part in bufv.into_inner() {
            let mut rest = &mut part[..];
            while !rest.is_empty() {
                match self.file.read_at(rest, offset) {
                    Ok(0) => {
                        rest.fill(0); // behind the end
                        offset += rest.len() as u64;
                        rest = &mut [];
                    }
                    Ok(read) => {
                        offset += read as u64;
                        rest = &mut rest[read..];
                    }
                    Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                    Err(why) => return Err(why),
                }
            }
        }
        Ok(())
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, mut offset: u64) -> io::Result<()> {
        let Some(durable) = &self.durable else {
            return Err(io::ErrorKind::PermissionDenied.into());
        };
        self.sync_data()?;
        for part in bufv.into_inner() {
            durable.write_all_at(&part, offset)?;
            self.log(|| Change::Write { offset, data: part.to_vec(), durable: true });
            offset += part.len() as u64;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }

    fn resize(&self, new_size: u64, _: PreallocateMode) -> io::Result<()> {
        if new_size < self.len()? {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.has_unsynced_data.store(true, Ordering::Relaxed);
        self.log(|| Change::SetLen(new_size));
        self.file.set_len(new_size)
    }
}
