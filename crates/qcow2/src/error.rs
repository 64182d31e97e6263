// SPDX-License-Identifier: Apache-2.0
//! Errors of opening a qcow2 image.

use backend::FileError;
use std::io;
use std::path::PathBuf;

/// Errors of [`crate::Qcow2Disk::open`]; each text names the cause and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Qcow2Error {
    /// A file of the chain cannot be opened or locked.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file has no qcow2 header.
    #[error("{}: not a qcow2 image; give --format raw if it is a raw one", .path.display())]
    NotQcow2 {
        /// The file.
        path: PathBuf,
    },
    /// The image uses a feature that this program refuses.
    #[error("{}: {what}; {remedy}", .path.display())]
    Refused {
        /// The image.
        path: PathBuf,
        /// The feature.
        what: String,
        /// The remedy.
        remedy: String,
    },
    /// The policy does not allow the backing file.
    #[error(
        "{}: its backing file {} is not allowed; give --allow-backing same-dir or any if you trust \
         the image (it names a file of this host that the guest can read then)",
        .path.display(), .backing.display()
    )]
    Backing {
        /// The image.
        path: PathBuf,
        /// The backing file.
        backing: PathBuf,
    },
    /// The file cannot be opened or read.
    #[error("{}: cannot be read: {source}; {}", .path.display(), remedy(source))]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The metadata cannot be read or are wrong.
    #[error("{}: cannot be opened as qcow2: {source}; see `vhost-blk check {}`", .path.display(), .path.display())]
    Image {
        /// The image.
        path: PathBuf,
        /// Error of imago or of the system call.
        source: io::Error,
    },
}

/// The remedy for a file that cannot be read.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(_) => "check the path and its permissions",
        // An error of its content.
        None => "the image is damaged: restore it from a copy",
    }
}
