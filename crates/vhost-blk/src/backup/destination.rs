// SPDX-License-Identifier: Apache-2.0
//! The place of a copy, and the way from there to a target that can be written.

use super::Order;
use super::copier::CopyError;
use super::moment::Before;
use super::target::{Target, Written};
use crate::failure::Failure;
use crate::image::place::{self, Place};
use crate::nbd::{Address, Client, Hangup};
use crate::values::Format;
use backend::create::Allocation;
use backend::wrap::CLUSTER_BYTES;
use qcow2::copy;
use qcow2::create::{self, NewImage, Preallocation};
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// The place of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// A new image.
    File {
        /// Its absolute path.
        path: PathBuf,
        /// Its format.
        format: Format,
    },
    /// An export of an NBD server, which has the content of the disk afterwards.
    Export(Address),
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Destination::File { path, .. } => path.display().fmt(f),
            Destination::Export(address) => address.fmt(f),
        }
    }
}

/// A target that was made.
pub(super) struct Made {
    pub(super) target: Target,
    pub(super) end: End,
}

/// The part of a target that the copier does not have.
pub(super) enum End {
    /// The place of a new image. The drop removes the image.
    File(Place),
    /// Ends the connection.
    Export(Hangup),
}

impl Made {
    /// Makes the empty image, or connects to the export.
    pub(super) fn of(
        order: &Order<'_>,
        before: Option<&Before>,
        size_bytes: u64,
    ) -> Result<Made, Failure> {
        let what = format!("back up the disk {}", order.disk);
        match order.target {
            Destination::File { path, format } => {
                let place = Place::take_free(path)?;
                let over = before.map(|before| before.image(path, size_bytes)).transpose();
                let over = over.map_err(|told| Failure::told(&what, told))?.flatten();
                let failed = |why| place::failure(path, size_bytes, why);
                let image = make(place.file(), size_bytes, *format, over).map_err(failed)?;
                let written = Written {
                    file: place.file().try_clone().map_err(failed)?,
                    path: place.part().to_owned(),
                    is_qcow2: *format == Format::Qcow2,
                };
                Ok(Made { target: Target::Image { image, written }, end: End::File(place) })
            }
            Destination::Export(address) => {
                let failed = |why| order.failure(&what, size_bytes, CopyError::Server(why));
                let client = Client::connect(address).map_err(failed)?;
                client.check(size_bytes, CLUSTER_BYTES).map_err(failed)?;
                let hangup = client.hangup().map_err(failed)?;
                if !client.flushes() {
                    tracing::warn!(
                        disk = order.disk,
                        "the NBD server has no FLUSH: the copy may be in its memory only"
                    );
                }
                Ok(Made { target: Target::Export(client), end: End::Export(hangup) })
            }
        }
    }
}

impl End {
    /// Path of an incomplete image.
    pub(super) fn part(&self) -> Option<&Path> {
        match self {
            End::File(place) => Some(place.part()),
            End::Export(_) => None,
        }
    }

    /// Ends the wait of the copier for the server.
    pub(super) fn hang_up(&self) {
        if let End::Export(hangup) = self {
            hangup.hang_up();
        }
    }
}

/// Makes the empty image: `over` another one, or without a backing file. Parts of the disk that are
/// never written stay holes.
fn make(
    file: &File,
    size_bytes: u64,
    format: Format,
    over: Option<NewImage>,
) -> io::Result<copy::Target> {
    if format == Format::Raw {
        return copy::Target::raw(file, size_bytes, Allocation::Sparse);
    }
    let image = over.unwrap_or(NewImage {
        size_bytes,
        cluster_bytes: create::CLUSTER_BYTES,
        backing: None,
        preallocation: Preallocation::Off,
    });
    image.check().map_err(io::Error::other)?;
    copy::Target::qcow2(file, &image)
}
