// SPDX-License-Identifier: Apache-2.0
//! Reads the content of a served image beside its lanes.
//!
//! A range may be read while no request changes it; requests on other parts of the disk go on. They
//! may move the range to another place in the files: the content of the old place stays until the piece
//! is read, because no place with a user is freed.

use crate::Qcow2Disk;
use crate::image::Piece;
use crate::versions::User;
use backend::file::Reader;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Reads a served image, with descriptors of its own.
pub struct Qcow2Reader {
    disk: Arc<Qcow2Disk>,
    /// By the number of the file in the chain.
    files: Vec<Reader>,
    content: Vec<u8>,
    user: User,
}

impl Qcow2Disk {
    /// Opens the files of the chain once more, to read the disk.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn reader(self: &Arc<Self>) -> io::Result<Qcow2Reader> {
        let files = self.files.iter().map(|file| file.reader()).collect::<io::Result<_>>()?;
        let disk = Arc::clone(self);
        Ok(Qcow2Reader { disk, files, content: Vec::new(), user: self.user() })
    }
}

impl Qcow2Reader {
    /// Reads a range of bytes, which starts and ends with a sector.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn read(&mut self, range: Range<u64>) -> io::Result<&[u8]> {
        self.read_after(range, &mut || ())
    }

    /// The same; calls `found` when it knows the place of a piece, and has not read it.
    pub(crate) fn read_after(
        &mut self,
        mut range: Range<u64>,
        found: &mut dyn FnMut(),
    ) -> io::Result<&[u8]> {
        self.content.clear();
        while !range.is_empty() {
            let epoch = self.user.enter();
            let piece = self.disk.visible(range.start, range.end - range.start);
            found();
            let read = piece.and_then(|piece| self.read_piece(piece));
            self.user.leave(epoch);
            range.start += read?;
        }
        Ok(&self.content)
    }

    /// Reads a piece. Returns its length.
    fn read_piece(&mut self, piece: Piece) -> io::Result<u64> {
        Ok(match piece {
            Piece::At(file, host, len) => {
                let read = self.files[file as usize].read(host..host + len)?;
                self.content.extend_from_slice(read);
                len
            }
            Piece::Zero(len) => {
                self.content.resize(self.content.len() + len as usize, 0);
                len
            }
            // The disk has all of its content itself.
            Piece::Below(_) => return Err(io::Error::other("no content")),
            Piece::Data(data) => {
                self.content.extend_from_slice(&data);
                data.len() as u64
            }
        })
    }

    /// The bytes of the last read.
    pub fn content(&self) -> &[u8] {
        &self.content
    }

    /// The first position in a range that is not known to be zero; its end if all of it is.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn skip_zeroes(&mut self, mut range: Range<u64>) -> io::Result<u64> {
        while !range.is_empty() {
            match self.disk.visible(range.start, range.end - range.start)? {
                Piece::Zero(len) => range.start += len,
                _ => break,
            }
        }
        Ok(range.start)
    }
}
