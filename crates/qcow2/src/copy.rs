// SPDX-License-Identifier: Apache-2.0
//! Copies the content of a disk from one image to another; holes and zeroes stay holes.

use crate::create::NewImage;
use crate::extents::Extent;
use crate::image::{Answer, Image};
use crate::versions::Version;
use crate::{AllowBacking, Qcow2Error, chain, header};
use backend::FileError;
use backend::create::{Allocation, allocate};
use backend::file::place;
use backend::holes::Holes;
use backend::lock::{Access, lock_image};
use imago::qcow2::Qcow2;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, file};
use rustix::fs::{Advice, fadvise};
use std::fs::{self, File};
use std::io::{self, Seek};
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::slice;
use std::sync::Arc;

/// Bytes that are read at once: a whole number of clusters of any size.
const CHUNK: u64 = 2 << 20;
/// Zeroes of this length and alignment are a hole of a raw image.
const RAW_HOLE: u64 = 4096;

/// The use of data and its position.
type Act<'a> = dyn FnMut(u64, &[u8]) -> Result<(), CopyError> + 'a;

/// An image that is read.
pub struct Source {
    kind: Kind,
    size_bytes: u64,
    identities: Vec<(u64, u64)>,
    buffer: Vec<u8>,
}

enum Kind {
    Raw(Stored),
    Qcow2 {
        image: Box<Image>,
        extra: Option<&'static str>,
        files: Vec<Stored>,
        last: Option<Extent>,
    },
}

/// A file of an image that no program writes.
struct Stored {
    file: File,
    holes: Holes,
}

impl Stored {
    fn of(file: File) -> io::Result<Self> {
        let holes = Holes::synced(&file, || file.sync_data())?;
        Ok(Stored { file, holes })
    }
}

/// The content at a position.
enum Piece {
    /// This many zeroes.
    Hole(u64),
    /// This many bytes of the buffer.
    Data(usize),
}

impl Source {
    /// Opens an image, and its backing files. `locks`: no other program may write to them.
    ///
    /// # Errors
    /// [`Qcow2Error`]; its text names the cause and the remedy.
    pub fn open(
        path: &Path,
        is_qcow2: bool,
        allow: AllowBacking,
        locks: bool,
    ) -> Result<Source, Qcow2Error> {
        // The lock comes first: nothing may change the header meanwhile.
        let top = open_locked(path, locks)?;
        if !is_qcow2 {
            let source = Self::raw(path, top)?;
            if source.size_bytes == 0 {
                return Err(chain::refuse(path, "it is empty", "give an image"));
            }
            return Ok(source);
        }
        let mut files = vec![top];
        let links = chain::follow_by(path, true, allow, &mut |number, path| {
            if number > 0 {
                files.push(open_locked(path, locks)?);
            }
            Ok(place(&files[number]))
        })?;
        Self::qcow2(path, &links, files)
    }

    /// Opens a new image of this process at `path` to read what is stored in the file itself, without
    /// backing files: a part that it does not have reads as zero. The page cache does not have it any
    /// more. `file` is durable.
    ///
    /// # Errors
    /// [`Qcow2Error`].
    pub fn own(file: &File, path: &Path, is_qcow2: bool) -> Result<Source, Qcow2Error> {
        let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
        // A file system may keep the pages: then the check is weaker.
        let _ = fadvise(file, 0, None, Advice::DontNeed);
        let top = File::open(path).map_err(failed)?;
        if !is_qcow2 {
            return Self::raw(path, top);
        }
        let header = header::read(path, &top)?;
        let link = chain::Link { path: path.into(), opened: place(&top), header: Some(header) };
        Self::qcow2(path, &[link], vec![top])
    }

    fn raw(path: &Path, mut file: File) -> Result<Source, Qcow2Error> {
        let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
        let size_bytes = file.seek(io::SeekFrom::End(0)).map_err(failed)?;
        let identities = vec![identity(&file).map_err(failed)?];
        let kind = Kind::Raw(Stored::of(file).map_err(failed)?);
        Ok(Source { kind, size_bytes, identities, buffer: vec![] })
    }

    /// The image at `path` in the files of its chain.
    fn qcow2(path: &Path, links: &[chain::Link], files: Vec<File>) -> Result<Source, Qcow2Error> {
        let Some(header) = &links[0].header else {
            return Err(Qcow2Error::NotQcow2 { path: path.into() });
        };
        let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
        let identities = files.iter().map(identity).collect::<io::Result<Vec<_>>>();
        let identities = identities.map_err(failed)?;
        let files = files.into_iter().map(Stored::of).collect::<io::Result<Vec<_>>>();
        let files = files.map_err(failed)?;
        let image = Box::new(Image::new(chain::open(links, false, None)?, header, Arc::default()));
        let kind = Kind::Qcow2 { image, extra: header.extra(), files, last: None };
        Ok(Source { kind, size_bytes: header.size_bytes, identities, buffer: vec![] })
    }

    /// Size of the disk in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The file of the image, if a new image of the same format, with clusters of `cluster_bytes` in qcow2,
    /// may be a clone of it.
    ///
    /// # Errors
    /// The reason why it may not.
    pub fn clonable(&self, cluster_bytes: u64) -> Result<&File, String> {
        match &self.kind {
            Kind::Raw(stored) => match stored.file.metadata() {
                Ok(found) if found.is_file() => Ok(&stored.file),
                Ok(_) => Err("the source is a block device".to_owned()),
                Err(why) => Err(format!("the source: {why}")),
            },
            Kind::Qcow2 { image, extra, files, .. } => {
                if let Some(extra) = extra {
                    return Err(format!("the source has {extra}, and the new image has none"));
                }
                let own = image.cluster_bytes();
                match own == cluster_bytes {
                    true => Ok(&files[0].file),
                    false => Err(format!(
                        "the source has clusters of {own} bytes, and the new image of {cluster_bytes}"
                    )),
                }
            }
        }
    }

    /// The mode of a copy: those who may not read a file of the image may not use the copy.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn mode_of_copy(&self) -> io::Result<u32> {
        let files = match &self.kind {
            Kind::Raw(stored) => slice::from_ref(stored),
            Kind::Qcow2 { files, .. } => files,
        };
        files.iter().try_fold(0o666, |mode, stored| {
            let theirs = stored.file.metadata()?.mode();
            let of_class = |read: u32, all: u32| if theirs & read != 0 { all } else { 0 };
            Ok(mode & (0o600 | of_class(0o040, 0o060) | of_class(0o004, 0o006)))
        })
    }

    /// Returns whether the open file is one of this image.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn has(&self, file: &File) -> io::Result<bool> {
        Ok(self.identities.contains(&identity(file)?))
    }

    /// Returns whether the image itself has all of `range` (`has`), or nothing of it. Its backing files do not count.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn has_itself(&self, range: Range<u64>, has: bool) -> io::Result<bool> {
        let Kind::Qcow2 { image, .. } = &self.kind else { return Ok(has) };
        let mut at = range.start;
        while at < range.end {
            let (found, len) = image.has(at, range.end - at)?;
            if found != has {
                return Ok(false);
            }
            at += len;
        }
        Ok(true)
    }

    /// Calls `act` with all data and its position, in order; holes are left out. `goes_on` learns of the
    /// bytes that are done, and stops by `false`.
    ///
    /// # Errors
    /// [`CopyError`].
    pub fn each(
        &mut self,
        goes_on: &mut dyn FnMut(u64) -> bool,
        act: &mut Act<'_>,
    ) -> Result<(), CopyError> {
        let mut at = 0;
        while at < self.size_bytes {
            if !goes_on(at) {
                return Err(CopyError::Stopped);
            }
            at += match self.piece(at).map_err(|why| CopyError::Read(at, why))? {
                Piece::Hole(len) => len,
                Piece::Data(len) => {
                    act(at, &self.buffer[..len])?;
                    len as u64
                }
            };
        }
        Ok(())
    }

    /// The content from `at` on, at most to the next multiple of [`CHUNK`].
    fn piece(&mut self, at: u64) -> io::Result<Piece> {
        let (rest, buffer) = (self.size_bytes - at, &mut self.buffer);
        match &mut self.kind {
            Kind::Raw(stored) => read(stored, at..self.size_bytes, CHUNK - at % CHUNK, buffer),
            Kind::Qcow2 { image, files, last, .. } => {
                let known = last.filter(|extent| (extent.start..extent.end).contains(&at));
                let answer = match known {
                    Some(extent) => Answer::Extent(extent, Version::default()),
                    None => image.read(at, rest)?,
                };
                match answer {
                    Answer::Extent(extent, _) => {
                        *last = Some(extent);
                        let from = extent.host + (at - extent.start);
                        let range = from..from + (extent.end - at).min(rest);
                        read(&files[extent.file as usize], range, CHUNK - at % CHUNK, buffer)
                    }
                    Answer::Zero(len, ..) => Ok(Piece::Hole(len.min(rest))),
                    Answer::Data(data) => {
                        *buffer = data;
                        Ok(Piece::Data(buffer.len()))
                    }
                    other => Err(io::Error::other(format!("no content at {at}: {other:?}"))),
                }
            }
        }
    }
}

fn open_locked(path: &Path, locks: bool) -> Result<File, Qcow2Error> {
    let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
    let kind = fs::metadata(path).map_err(failed)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(FileError::Kind { path: path.into() }.into());
    }
    let file = File::open(path).map_err(failed)?;
    if locks {
        lock_image(&file, path, Access::Read).map_err(FileError::from)?;
    }
    Ok(file)
}

fn identity(file: &File) -> io::Result<(u64, u64)> {
    let found = file.metadata()?;
    Ok((found.dev(), found.ino()))
}

/// Reads data at the start of a range, at most `max` bytes of it, or reports a hole there.
fn read(stored: &Stored, range: Range<u64>, max: u64, buffer: &mut Vec<u8>) -> io::Result<Piece> {
    let Stored { file, holes } = stored;
    let data = holes.first_data(file, range.clone())?;
    if data.start > range.start {
        return Ok(Piece::Hole(data.start - range.start));
    }
    let len = (data.end - data.start).min(max) as usize;
    buffer.resize(len, 0);
    file.read_exact_at(buffer, range.start)?;
    Ok(Piece::Data(len))
}

/// A new image that is written.
pub enum Target {
    /// A raw file.
    Raw(File),
    /// A qcow2 image.
    Qcow2 {
        /// Its tables.
        access: FormatAccess<file::File>,
        /// Its file.
        file: File,
        /// Size of a cluster in bytes.
        cluster_bytes: u64,
        /// It has a backing file, whose content zeroes have to hide.
        is_overlay: bool,
    },
}

impl Target {
    /// Makes a raw image in the empty file.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn raw(file: &File, size_bytes: u64, allocation: Allocation) -> io::Result<Target> {
        allocate(file, size_bytes, allocation)?;
        Ok(Target::Raw(file.try_clone()?))
    }

    /// Makes a qcow2 image in the empty file. With a backing file, whole clusters have to be written.
    ///
    /// # Errors
    /// The error of imago or of a system call.
    pub fn qcow2(file: &File, image: &NewImage) -> io::Result<Target> {
        image.write(file)?;
        let storage = file::File::try_from(file.try_clone()?)?;
        let opened = Qcow2::<file::File>::builder(storage)
            .write(true)
            .backing(None)
            .data_file(None)
            .open(DenyImplicitOpenGate::default())?;
        Ok(Target::Qcow2 {
            access: FormatAccess::new(opened),
            file: file.try_clone()?,
            cluster_bytes: image.cluster_bytes,
            is_overlay: image.backing.is_some(),
        })
    }

    /// Writes data; zeroes that fill a block take no space. The range was not written before.
    ///
    /// # Errors
    /// The error of imago or of a system call.
    pub fn write(&self, at: u64, data: &[u8]) -> io::Result<()> {
        let unit = match self {
            Target::Raw(_) => RAW_HOLE,
            Target::Qcow2 { cluster_bytes, .. } => *cluster_bytes,
        };
        let mut done = 0;
        for run in runs(at, data, unit) {
            self.zero(at + done as u64..at + run.start as u64)?;
            done = run.end;
            let (start, part) = (at + run.start as u64, &data[run]);
            match self {
                Target::Raw(file) => file.write_all_at(part, start)?,
                Target::Qcow2 { access, .. } => access.write(part, start)?,
            }
        }
        self.zero(at + done as u64..at + data.len() as u64)
    }

    /// Makes a range read as zeroes, which takes no space. The range was not written before.
    ///
    /// # Errors
    /// The error of imago or of a system call.
    pub fn zero(&self, range: Range<u64>) -> io::Result<()> {
        match self {
            Target::Qcow2 { access, is_overlay: true, cluster_bytes, .. } if !range.is_empty() => {
                let is_whole = |at: u64| at.is_multiple_of(*cluster_bytes) || at == access.size();
                debug_assert!(is_whole(range.start) && is_whole(range.end), "{range:?}");
                access.write_zeroes(range.start, range.end - range.start)
            }
            _ => Ok(()),
        }
    }

    /// Makes the image durable.
    ///
    /// # Errors
    /// The error of imago or of a system call.
    pub fn finish(self) -> io::Result<()> {
        match self {
            Target::Raw(file) => file.sync_all(),
            Target::Qcow2 { access, file, .. } => {
                access.flush()?;
                drop(access);
                file.sync_all()
            }
        }
    }
}

/// Ranges of `data`, which belongs at `at`, without the blocks of `unit` bytes that are zero.
pub fn runs(at: u64, data: &[u8], unit: u64) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    let mut start = 0;
    while start < data.len() {
        let len = unit - (at + start as u64) % unit;
        let end = start + (len as usize).min(data.len() - start);
        if !is_zero(&data[start..end]) {
            match found.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => found.push(start..end),
            }
        }
        start = end;
    }
    found
}

/// Compares with whole blocks, which is much faster than byte by byte.
fn is_zero(data: &[u8]) -> bool {
    const ZEROES: [u8; RAW_HOLE as usize] = [0; RAW_HOLE as usize];
    data.chunks(ZEROES.len()).all(|block| *block == ZEROES[..block.len()])
}

/// Errors of [`copy`] and [`Source::each`].
#[derive(Debug)]
pub enum CopyError {
    /// The source cannot be read at this position.
    Read(u64, io::Error),
    /// The target cannot be written.
    Write(io::Error),
    /// The caller has stopped the copy.
    Stopped,
}

/// Copies the whole content and makes it durable. `goes_on` learns of the bytes that are done, and
/// stops the copy by `false`.
///
/// # Errors
/// [`CopyError`]; the target is incomplete then.
pub fn copy(
    source: &mut Source,
    target: Target,
    goes_on: &mut dyn FnMut(u64) -> bool,
) -> Result<(), CopyError> {
    source.each(goes_on, &mut |at, data| target.write(at, data).map_err(CopyError::Write))?;
    match goes_on(source.size_bytes) {
        true => target.finish().map_err(CopyError::Write),
        false => Err(CopyError::Stopped),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_blocks_are_left_out_and_others_joined() {
        let mut data = vec![0; 20];
        data[5] = 1;
        data[11] = 1;
        // Blocks of 4 bytes from position 2: 0..2, 2..6, 6..10, 10..14 ...
        assert_eq!(runs(2, &data, 4), [2..6, 10..14]);
        data[7] = 1;
        assert_eq!(runs(2, &data, 4).first(), Some(&(2..14)));
        assert_eq!(runs(2, &data, 4).len(), 1);
        assert_eq!(runs(0, &[0; 9], 4), []);
    }
}
