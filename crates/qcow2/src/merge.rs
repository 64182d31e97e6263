// SPDX-License-Identifier: Apache-2.0
//! Copies the content that an image has itself into its backing file, while a guest uses the image.
//!
//! The guest does not see the backing file where the image has content, so that the copy changes
//! nothing for it, and an end in the middle leaves the chain as good as before.

use crate::image::{Answer, Image, Piece, Question};
use crate::storage;
use crate::versions::{User, Versions};
use crate::{AllowBacking, Qcow2Disk, Qcow2Error, chain};
use backend::mark;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Bytes that are copied at once.
const CHUNK: u64 = 1 << 20;

/// A merge of an image into its backing file.
pub struct Merge {
    image: Arc<Qcow2Disk>,
    /// The file of the image.
    from: File,
    to: Target,
    user: User,
}

/// The backing file, open for writing.
enum Target {
    Raw(File),
    Qcow2(Box<Image>),
}

impl Merge {
    /// Opens the backing file at `path` for writing. The caller has locked it.
    ///
    /// # Errors
    /// [`Qcow2Error`].
    pub fn open(
        image: Arc<Qcow2Disk>,
        path: &Path,
        is_qcow2: bool,
        allow_backing: AllowBacking,
    ) -> Result<Merge, Qcow2Error> {
        let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
        let file = File::options().read(true).write(true).open(path).map_err(failed)?;
        let from = File::open(image.top().path()).map_err(failed)?;
        let to = match is_qcow2 {
            false => Target::Raw(file),
            true => {
                let links = chain::follow(path, true, allow_backing)?;
                let Some(header) = links.first().and_then(|link| link.header.as_ref()) else {
                    return Err(Qcow2Error::NotQcow2 { path: path.into() });
                };
                if header.has_snapshots {
                    let remedy = "delete them with `qemu-img snapshot -d`";
                    return Err(chain::refuse(path, "it has internal snapshots", remedy));
                }
                let access = chain::open(&links, true, None)?;
                // An end in the middle may leak clusters. The mark stays until they are looked for.
                mark::set_in_use(&file, mark::InUse::Leaks).map_err(failed)?;
                let image = Image::new(access, header, Arc::new(Versions::default()));
                Target::Qcow2(Box::new(image))
            }
        };
        let user = image.user();
        Ok(Merge { image, from, to, user })
    }

    /// Size of the disk in the backing file in bytes.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn target_bytes(&self) -> io::Result<u64> {
        match &self.to {
            Target::Raw(file) => Ok(file.metadata()?.len()),
            Target::Qcow2(image) => Ok(image.size_bytes()),
        }
    }

    /// Enlarges the backing file. Its new part reads as zeroes, as it did above its end.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn grow(&mut self, bytes: u64) -> io::Result<()> {
        match &mut self.to {
            Target::Raw(file) => file.set_len(bytes),
            Target::Qcow2(image) => image.grow(bytes),
        }
    }

    /// Copies the next piece of a range, and moves the start of the range behind it. Returns the
    /// number of copied bytes.
    ///
    /// # Errors
    /// The error of the system call. The image is as before.
    pub fn copy_piece(&mut self, range: &mut Range<u64>) -> io::Result<u64> {
        self.copy_after(range, &mut || ())
    }

    /// The same; calls `found` when it knows the place of the piece, and has not read it.
    pub(crate) fn copy_after(
        &mut self,
        range: &mut Range<u64>,
        found: &mut dyn FnMut(),
    ) -> io::Result<u64> {
        let epoch = self.user.enter();
        let piece = self.image.own(range.start, range.end - range.start);
        found();
        let copied = piece.and_then(|piece| self.copy(piece, range.start));
        self.user.leave(epoch);
        let (done, copied) = copied?;
        range.start += done;
        Ok(copied)
    }

    /// Copies a piece at `at`. Returns its length, and that of its content.
    fn copy(&mut self, piece: Piece, at: u64) -> io::Result<(u64, u64)> {
        Ok(match piece {
            Piece::Below(len) => (len, 0),
            Piece::Zero(len) => {
                self.to.zero(at, len)?;
                (len, len)
            }
            Piece::At(_, host, len) => {
                let mut data = vec![0; len.min(CHUNK) as usize];
                self.from.read_exact_at(&mut data, host)?;
                self.to.write(at, &data)?;
                (data.len() as u64, data.len() as u64)
            }
            Piece::Data(data) => {
                self.to.write(at, &data)?;
                (data.len() as u64, data.len() as u64)
            }
        })
    }

    /// Makes everything that was copied durable.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn sync(&mut self) -> io::Result<()> {
        match &mut self.to {
            Target::Raw(file) => file.sync_all(),
            Target::Qcow2(image) => {
                // Data at known places first: a table that names a new one follows its data.
                image.store()?.sync_data()?;
                image.committed()
            }
        }
    }
}

impl Target {
    fn write(&mut self, mut at: u64, mut data: &[u8]) -> io::Result<()> {
        let image = match self {
            Target::Raw(file) => return file.write_all_at(data, at),
            Target::Qcow2(image) => image,
        };
        while !data.is_empty() {
            let done = match image.answer(Question::Write(at, data.to_vec())) {
                Answer::Done(len) => len,
                Answer::Extent(extent, _) => {
                    let len = (extent.end - at).min(data.len() as u64);
                    let place = extent.host + (at - extent.start);
                    image.store()?.write_data(&data[..len as usize], place)?;
                    len
                }
                other => return Err(failure(&other)),
            };
            (at, data) = (at + done, &data[done as usize..]);
        }
        Ok(())
    }

    fn zero(&mut self, mut at: u64, mut len: u64) -> io::Result<()> {
        let image = match self {
            Target::Raw(file) => return storage::zero(file, at, len),
            Target::Qcow2(image) => image,
        };
        while len > 0 {
            let done = match image.answer(Question::Zero(at, len)) {
                Answer::Done(len) => len,
                Answer::Extent(extent, _) => {
                    let len = (extent.end - at).min(len);
                    image.store()?.zero_data(extent.host + (at - extent.start), len)?;
                    len
                }
                other => return Err(failure(&other)),
            };
            (at, len) = (at + done, len - done);
        }
        Ok(())
    }
}

fn failure(answer: &Answer) -> io::Error {
    match answer {
        Answer::Failed(errno) => io::Error::from_raw_os_error(*errno),
        _ => io::Error::other("the backing file has an odd mapping"),
    }
}
