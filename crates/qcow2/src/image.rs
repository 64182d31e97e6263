// SPDX-License-Identifier: Apache-2.0
//! The mapping of a disk to the files of its chain, and its changes. Used by one thread.
//!
//! No cluster that an extent of a lane names is freed: a lane may write to a known extent at any time.
//! Clusters of compressed data, which only this thread reads, are freed, and their place is given back to
//! the host; those of discarded data are freed after all lanes have forgotten them ([`crate::unmap`]).
//! A change of a table is durable after [`Image::commit`], which precedes every answer; [`crate::tables`] has the
//! states of the image after one that failed.

use crate::chain::Opened;
use crate::decompressed::Decompressed;
use crate::extents::Extent;
use crate::header::Header;
use crate::storage::Store;
use crate::tables::Tables;
use crate::unmap::Discarded;
use crate::versions::{Version, Versions};
use imago::storage::Storage;
use imago::{FormatAccess, Mapping};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Maximum bytes that the image copies for one answer.
pub(crate) const COPY_MAX: u64 = 1 << 20;
/// Maximum length of an extent.
pub(crate) const EXTENT_MAX: u64 = 1 << 30;
/// Unit of the disk in bytes.
const SECTOR: u64 = 512;

/// The answer to a question about a position of the disk.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The lane itself does the I/O. The version at the time of the question.
    Extent(Extent, Version),
    /// This many bytes are zero, and so is the extent. The version at the time of the question.
    Zero(u64, Extent, Version),
    /// The data of a read.
    Data(Vec<u8>),
    /// This many bytes are done.
    Done(u64),
    /// The place hides other content: [`Question::Write`] gives it one, with the data.
    NeedsData,
    /// The error of the system call.
    Failed(i32),
}

/// The question of a lane.
#[derive(Debug)]
pub(crate) enum Question {
    /// Read from a position at most this many bytes.
    Read(u64, u64),
    /// Give this many bytes at a position a place, to which the lane writes.
    Place(u64, u64),
    /// Write this at a position, unless the lane can do that.
    Write(u64, Vec<u8>),
    /// Zero this many bytes, unless their cluster exists.
    Zero(u64, u64),
    /// Discard this many bytes, unless their cluster exists.
    Discard(u64, u64),
}

impl Question {
    /// Returns whether it changes something.
    pub(crate) fn changes(&self) -> bool {
        !matches!(self, Question::Read(..))
    }

    /// Its position and length.
    pub(crate) fn range(&self) -> (u64, u64) {
        match self {
            Question::Read(at, len)
            | Question::Place(at, len)
            | Question::Zero(at, len)
            | Question::Discard(at, len) => (*at, *len),
            Question::Write(at, data) => (*at, data.len() as u64),
        }
    }
}

/// A piece of a disk, by the place of its content.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Not in the image itself: this many bytes are in a backing file, or nowhere.
    Below(u64),
    /// In a file of the chain, by its number and the position there: so many bytes.
    At(u32, u64, u64),
    /// This many bytes are zero, whatever a backing file has.
    Zero(u64),
    /// The data, which is compressed, or ends within a sector.
    Data(Vec<u8>),
}

/// An open image with its chain.
pub(crate) struct Image {
    pub(crate) access: FormatAccess<Store>,
    cluster_bytes: u64,
    has_backing: bool,
    /// Size of the disk in the backing file.
    pub(crate) backing_bytes: u64,
    /// Size of the disk. imago has that of a growth from its start on.
    pub(crate) size_bytes: u64,
    /// Freed clusters are punched out of the file.
    pub(crate) gives_back: bool,
    versions: Arc<Versions>,
    pub(crate) discarded: Discarded,
    /// Bytes of discarded data whose place was freed.
    unmapped_bytes: Arc<AtomicU64>,
    pub(crate) tables: Tables,
    pub(crate) decompressed: Decompressed,
    /// An error was logged.
    has_complained: bool,
}

/// The mapping at a position.
pub(crate) enum Found {
    Extent {
        extent: Extent,
        writable: bool,
    },
    /// This many bytes are zero, and so is the extent.
    Zero(u64, Extent),
    /// The data must be copied: compressed, shared, or a part of a sector.
    Copy(u64),
}

impl Image {
    pub(crate) fn new(
        Opened { access, backing_bytes }: Opened,
        header: &Header,
        versions: Arc<Versions>,
    ) -> Self {
        let size_bytes = access.size();
        Image {
            access,
            cluster_bytes: header.cluster_bytes,
            has_backing: header.backing.is_some(),
            backing_bytes,
            size_bytes,
            gives_back: true,
            versions,
            discarded: Discarded::default(),
            unmapped_bytes: Arc::default(),
            tables: Tables::default(),
            decompressed: Decompressed::default(),
            has_complained: false,
        }
    }

    /// The image, which leaves freed clusters in the file unless it `gives_back` their space to the host.
    pub(crate) fn giving_back(self, gives_back: bool) -> Self {
        Image { gives_back, ..self }
    }

    /// Answers a question. The answer is valid after [`Image::commit`].
    pub(crate) fn answer(&mut self, question: Question) -> Answer {
        let ready = if question.changes() { self.may_change() } else { Ok(()) };
        let answered = ready.and_then(|()| match question {
            Question::Read(at, len) => self.read(at, len),
            Question::Place(at, len) => self.write(at, len, None),
            Question::Write(at, data) => self.write(at, data.len() as u64, Some(&data)),
            Question::Zero(at, len) => self.zero(at, len),
            Question::Discard(at, len) => self.discard(at, len),
        });
        answered.unwrap_or_else(|why| {
            self.complain(&why);
            Answer::Failed(why.raw_os_error().unwrap_or(libc::EIO))
        })
    }

    /// Logs the first error.
    pub(crate) fn complain(&mut self, why: &io::Error) {
        if !std::mem::replace(&mut self.has_complained, true) {
            tracing::error!("qcow2: {why}; further errors of this image are not logged");
        }
    }

    /// Notes that the clusters of a range are about to change: whole ones get a place in the image. It ends what
    /// is known of backing files and zeroes there.
    pub(crate) fn change(&mut self, range: Range<u64>) {
        let cluster = self.cluster_bytes;
        let clusters = range.start - range.start % cluster..range.end.next_multiple_of(cluster);
        self.decompressed.forget(&clusters);
        self.versions.change(clusters.clone());
        self.tables.change(clusters);
    }

    pub(crate) fn store(&self) -> io::Result<&Store> {
        let stores = self.access.inner().collect_storage_dependencies();
        let top = stores.into_iter().find(|store| store.index() == 0);
        top.ok_or_else(|| io::Error::other("the image has no file"))
    }

    /// The mapping of a range with the byte at `at`, which has about `most` bytes at most.
    pub(crate) fn mapping(
        &self,
        at: u64,
        most: u64,
    ) -> io::Result<(Range<u64>, Mapping<'_, Store>)> {
        let mut start = at - at % self.cluster_bytes;
        let (mut mapping, mut found) = self.access.get_mapping(start, at - start + most)?;
        if start + found <= at {
            // A backing file with smaller clusters, or the end of one, lies in between.
            start = at;
            (mapping, found) = self.access.get_mapping(at, most)?;
        }
        match start + found > at {
            true => Ok((start..start + found, mapping)),
            false => Err(io::Error::other(format!("no mapping at {at}"))),
        }
    }

    /// The mapping at `at`, for at most `len` bytes. An extent may begin before `at`.
    pub(crate) fn find(&self, at: u64, len: u64) -> io::Result<Found> {
        self.find_within(at, len, EXTENT_MAX)
    }

    /// The same; an extent ends about `most` bytes behind `at`.
    pub(crate) fn find_within(&self, at: u64, len: u64, most: u64) -> io::Result<Found> {
        let (Range { start, end }, mapping) = self.mapping(at, most)?;
        let here = (end - at).min(len);
        match mapping {
            Mapping::Zero { .. } => Ok(Found::Zero(here, Extent::zeroes(start..end))),
            Mapping::Raw { storage, offset, writable, .. } => {
                let bound = self.end_of(storage)?;
                self.check_place(storage, offset, at - start, bound)?;
                let file_end = start.saturating_add(bound.saturating_sub(offset));
                let end = end.min(file_end) / SECTOR * SECTOR;
                let shared = storage.index() == 0 && !writable && self.access.inner().writable();
                if end <= at {
                    return Ok(Found::Copy(SECTOR.min(len))); // the file ends within the sector
                }
                if shared || (storage.index() == 0 && !storage.is_sound()) {
                    return Ok(Found::Copy(here));
                }
                let extent = Extent { start, end, file: storage.index(), host: offset };
                Ok(Found::Extent { extent, writable: writable && storage.index() == 0 })
            }
            Mapping::Special { .. } => Ok(Found::Copy(here)),
            _ => Err(io::Error::other(format!("no mapping at {at}"))),
        }
    }

    /// End of the places that a table may name. A commit fills the image up to whole clusters.
    pub(crate) fn end_of(&self, store: &Store) -> io::Result<u64> {
        let size = store.size()?;
        let grows = store.index() == 0 && self.access.inner().writable();
        Ok(if grows { size.next_multiple_of(self.cluster_bytes) } else { size })
    }

    /// The next piece at `at`, of at most `len` bytes.
    pub(crate) fn own(&mut self, at: u64, len: u64) -> io::Result<Piece> {
        let (mapping, found) = self.access.get_mapping(at, len.min(EXTENT_MAX))?;
        let found = found.min(len);
        if found == 0 {
            return Err(io::Error::other(format!("no mapping at {at}")));
        }
        match mapping {
            Mapping::Raw { storage, offset, writable, .. } if storage.index() == 0 => {
                let bound = self.end_of(storage)?;
                self.check_place(storage, offset, 0, bound)?;
                let end = at + found.min(bound - offset);
                let extent = Extent { start: at, end, file: 0, host: offset };
                // The next write gives such a cluster another place, and frees this one at once.
                let stays = writable || !self.access.inner().writable();
                let committed = self.tables.committed(extent, at).filter(|_| stays);
                let Some(extent) = committed else {
                    return Ok(Piece::Data(self.copy(at, end - at)?));
                };
                let extent = self.keep(extent, at..extent.end);
                Ok(Piece::At(0, offset, extent.end - at))
            }
            Mapping::Zero { explicit: true, .. } => Ok(Piece::Zero(found)),
            Mapping::Special { layer, .. } if std::ptr::eq(layer, &self.access) => {
                Ok(Piece::Data(self.copy(at, found)?))
            }
            // A raw backing file may end within a sector, and the guest may change its cluster before the next piece.
            _ => Ok(Piece::Below(found.next_multiple_of(SECTOR).min(len))),
        }
    }

    /// Returns whether the image itself has the place at `at`, as zeroes or data, and for how many of `len` bytes.
    pub(crate) fn has(&self, at: u64, len: u64) -> io::Result<(bool, u64)> {
        let (Range { end, .. }, mapping) = self.mapping(at, len)?;
        let has = match mapping {
            Mapping::Raw { storage, .. } => storage.index() == 0,
            Mapping::Special { layer, .. } => std::ptr::eq(layer, &self.access),
            Mapping::Zero { explicit, .. } => explicit,
            _ => false,
        };
        Ok((has, (end - at).min(len)))
    }

    /// The next piece of the disk as the guest sees it at `at`, of at most `len` bytes.
    ///
    /// # Errors
    /// The error of the system call.
    pub(crate) fn visible(&mut self, at: u64, len: u64) -> io::Result<Piece> {
        Ok(match self.read(at, len)? {
            Answer::Extent(Extent { start, end, file, host }, _) => {
                Piece::At(file, host + (at - start), (end - at).min(len))
            }
            Answer::Zero(len, ..) => Piece::Zero(len),
            Answer::Data(data) => Piece::Data(data),
            Answer::Done(_) | Answer::NeedsData | Answer::Failed(_) => {
                return Err(io::Error::other("no content"));
            }
        })
    }

    /// Bytes of discarded data whose place was freed.
    pub(crate) fn unmapped_bytes(&self) -> &Arc<AtomicU64> {
        &self.unmapped_bytes
    }

    pub(crate) fn versions(&self) -> &Arc<Versions> {
        &self.versions
    }

    /// The image has a backing file.
    pub(crate) fn has_backing(&self) -> bool {
        self.has_backing
    }

    pub(crate) fn cluster_bytes(&self) -> u64 {
        self.cluster_bytes
    }

    /// Size of the disk in bytes.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Refuses a mapping that only a damaged or hostile image has.
    fn check_place(&self, store: &Store, offset: u64, skip: u64, bound: u64) -> io::Result<()> {
        let is_header = store.index() == 0 && offset < self.cluster_bytes;
        let is_behind = store.index() == 0 && offset.saturating_add(skip) >= bound;
        if is_header || is_behind || !offset.is_multiple_of(SECTOR) {
            return Err(io::Error::other(format!(
                "{store}: a table names the wrong place {offset}"
            )));
        }
        Ok(())
    }

    /// The answer that names the place of a used range, which starts in the extent.
    pub(crate) fn extent(&mut self, extent: Extent, at: u64, len: u64) -> Answer {
        let used = at..extent.end.min(at.saturating_add(len));
        let extent = if extent.file == 0 { self.keep(extent, used) } else { extent };
        Answer::Extent(extent, self.versions.now())
    }

    /// Answers [`Question::Read`].
    pub(crate) fn read(&mut self, at: u64, len: u64) -> io::Result<Answer> {
        match self.find(at, len)? {
            Found::Extent { extent, .. } => match self.tables.committed(extent, at) {
                Some(extent) => Ok(self.extent(extent, at, len)),
                None => Ok(Answer::Data(self.copy(at, (extent.end - at).min(len))?)),
            },
            Found::Zero(len, extent) => Ok(Answer::Zero(len, extent, self.versions.now())),
            Found::Copy(len) => match self.decompressed(at, len)? {
                Some(data) => Ok(Answer::Data(data)),
                None => Ok(Answer::Data(self.copy(at, len)?)),
            },
        }
    }

    /// At most `len` bytes at `at`, as the tables in memory have them.
    fn copy(&self, at: u64, len: u64) -> io::Result<Vec<u8>> {
        let mut data = vec![0; len.min(COPY_MAX) as usize];
        self.access.read(&mut data[..], at)?;
        Ok(data)
    }
}
