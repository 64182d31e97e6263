// SPDX-License-Identifier: Apache-2.0
//! The images that a backup reads while they are served.

use crate::values::Format;
use backend::file::{File as ImageFile, Reader};
use backend::{Disk, Info};
use qcow2::{Qcow2Disk, Qcow2Reader};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// A served image.
#[derive(Clone)]
pub enum Image {
    /// A raw image or a block device.
    Raw(Arc<ImageFile>),
    /// A qcow2 image with its backing files.
    Qcow2(Arc<Qcow2Disk>),
}

impl Image {
    pub(crate) fn info(&self) -> Info {
        match self {
            Image::Raw(image) => image.info(),
            Image::Qcow2(image) => image.info(),
        }
    }

    /// The file and the disk of a qcow2 image, if a backup in this format may be a clone of the file.
    ///
    /// # Errors
    /// The reason why it may not.
    pub(super) fn clonable(
        &self,
        format: Format,
    ) -> Result<(&Arc<ImageFile>, Option<Arc<Qcow2Disk>>), String> {
        match (self, format) {
            (Image::Raw(image), Format::Raw) => Ok((image, None)),
            (Image::Qcow2(image), Format::Qcow2) => match image.extra() {
                None => Ok((image.top(), Some(Arc::clone(image)))),
                Some(extra) => Err(format!("the image has {extra}, and a backup has none")),
            },
            _ => Err("the formats differ".to_owned()),
        }
    }

    pub(crate) fn reader(&self) -> io::Result<ImageReader> {
        Ok(match self {
            Image::Raw(image) => ImageReader::Raw(image.reader()?),
            Image::Qcow2(image) => ImageReader::Qcow2(image.reader()?),
        })
    }
}

/// Reads a served image beside its lanes.
pub(crate) enum ImageReader {
    Raw(Reader),
    Qcow2(Qcow2Reader),
}

impl ImageReader {
    /// Reads a range of bytes, which no request changes meanwhile.
    pub(crate) fn read(&mut self, range: Range<u64>) -> io::Result<&[u8]> {
        match self {
            ImageReader::Raw(reader) => reader.read(range),
            ImageReader::Qcow2(reader) => reader.read(range),
        }
    }

    /// The bytes of the last read.
    pub(crate) fn content(&self) -> &[u8] {
        match self {
            ImageReader::Raw(reader) => reader.content(),
            ImageReader::Qcow2(reader) => reader.content(),
        }
    }

    /// The first position in a range that may have data; its end if all of it is known to be zero.
    pub(crate) fn skip_hole(&mut self, range: Range<u64>) -> io::Result<u64> {
        match self {
            ImageReader::Raw(reader) => reader.skip_hole(range),
            ImageReader::Qcow2(reader) => reader.skip_zeroes(range),
        }
    }

    /// Returns whether another program may have written the image meanwhile. The lock of a qcow2
    /// image follows no guest.
    pub(crate) fn was_handed_over(&self) -> bool {
        match self {
            ImageReader::Raw(reader) => reader.was_handed_over(),
            ImageReader::Qcow2(_) => false,
        }
    }
}
