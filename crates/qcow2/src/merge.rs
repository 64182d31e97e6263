// SPDX-License-Identifier: Apache-2.0
//! Copies the content that an image has itself into its backing file, while a guest uses the image.
//!
//! The guest does not see the backing file where the image has content, so that the copy changes
//! nothing for it, and an end in the middle leaves the chain as good as before.

use crate::image::Piece;
use crate::target::{Locked, Target, check_identity};
use crate::versions::User;
use crate::{AllowBacking, Qcow2Disk, Qcow2Error, chain};
use backend::file::File as ImageFile;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// A merge of an image into its backing file.
pub struct Merge {
    image: Arc<Qcow2Disk>,
    /// The file of the image.
    from: File,
    to: Target,
    user: User,
}

impl Merge {
    /// Opens the backing file of the image, at `path`, for writing. The caller has locked it.
    ///
    /// # Errors
    /// [`Qcow2Error`]; among them that the path of the image or of the backing file names another file now. Nothing
    /// is changed then.
    pub fn open(
        image: Arc<Qcow2Disk>,
        path: &Path,
        is_qcow2: bool,
        allow_backing: AllowBacking,
    ) -> Result<Merge, Qcow2Error> {
        let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
        let from = File::open(image.top().path()).map_err(failed)?;
        let identity = |file: &ImageFile| file.opened_as().map(|it| it.identity).map_err(failed);
        check_identity(image.top().path(), &from, identity(image.top())?)?;
        let Some(backing) = image.backing() else {
            return Err(chain::refuse(path, "the image has no backing file", "take another one"));
        };
        let locked = Locked { identity: identity(backing)?, read_in: Some(image.cluster_bytes) };
        let to = Target::recorded(path, Some(locked), is_qcow2, allow_backing, None)?;
        let user = image.user();
        Ok(Merge { image, from, to, user })
    }

    /// Size of the disk in the backing file in bytes.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn target_bytes(&self) -> io::Result<u64> {
        self.to.size_bytes()
    }

    /// As [`Target::known`] of the backing file.
    pub fn known(&self) -> Option<Vec<u8>> {
        self.to.known()
    }

    /// Enlarges the backing file. Its new part reads as zeroes, as it did above its end.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn grow(&mut self, bytes: u64) -> io::Result<()> {
        self.to.grow(bytes)
    }

    /// Copies the next piece of a range, and moves the start of the range behind it. At most `max` bytes
    /// of the image are read for it, or 1 MiB at most of a compressed cluster, or of clusters whose place a write may
    /// free. Returns the number of copied bytes, zeroes included.
    ///
    /// # Errors
    /// The error of the system call. The image is as before.
    pub fn copy_piece(&mut self, range: &mut Range<u64>, max: u64) -> io::Result<u64> {
        self.copy_after(range, max, &mut || ())
    }

    /// The same; calls `found` when it knows the place of the piece, and has not read it.
    pub(crate) fn copy_after(
        &mut self,
        range: &mut Range<u64>,
        max: u64,
        found: &mut dyn FnMut(),
    ) -> io::Result<u64> {
        let epoch = self.user.enter();
        let piece = self.image.own(range.start, range.end - range.start);
        found();
        let copied = piece.and_then(|piece| self.copy(piece, range.start, max));
        self.user.leave(epoch);
        let (done, copied) = copied?;
        range.start += done;
        Ok(copied)
    }

    /// Copies a piece at `at`. Returns its length, and that of its content.
    fn copy(&mut self, piece: Piece, at: u64, max: u64) -> io::Result<(u64, u64)> {
        Ok(match piece {
            Piece::Below(len) => (len, 0),
            Piece::Zero(len) => {
                self.to.zero(at, len)?;
                (len, len)
            }
            Piece::At(_, host, len) => {
                let mut data = vec![0; len.min(max) as usize];
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
        self.to.sync()
    }
}
