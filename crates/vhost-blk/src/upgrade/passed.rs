// SPDX-License-Identifier: Apache-2.0
//! The sockets and disks that a program passes on.

use super::error::Obstacle;
use super::state::{DiskState, ImageState, SocketFileState, SocketState};
use crate::disks::Origin;
use crate::socket_file::SocketFile;
use backend::file::File as ImageFile;
use serde_json::Value;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use vhost_user::{Control, Exported};

/// A listening socket to pass on.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    file: Option<SocketFileState>,
}

impl Socket {
    /// A second descriptor of `socket`, and the identity of its file.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn of(socket: &impl AsFd, file: Option<&SocketFile>) -> io::Result<Self> {
        let file = file.map(|file| {
            let (path, identity) = file.parts();
            SocketFileState { path: path.into(), identity }
        });
        Ok(Socket { fd: socket.as_fd().try_clone_to_owned()?, file })
    }

    pub(super) fn state(&self) -> SocketState {
        SocketState { fd: self.fd.as_raw_fd(), file: self.file.clone() }
    }
}

/// The sockets of a program, other than those of its disks.
#[derive(Debug)]
pub struct Sockets {
    /// The control socket.
    pub control: Socket,
    /// The metrics socket.
    pub metrics: Option<Socket>,
}

/// A disk to pass on.
#[derive(Debug)]
pub struct Disk {
    /// Its name.
    pub name: String,
    /// Its options (`DiskOptions`); `None`: those of the command line.
    pub options: Option<Value>,
    /// The source of its options.
    pub origin: Origin,
    /// Reaches its device.
    pub control: Arc<Control>,
    /// Its parts besides the device.
    pub parts: Arc<Parts>,
}

/// The parts of a disk that pass on besides its device.
#[derive(Debug)]
pub struct Parts {
    /// Its storage.
    pub storage: Storage,
    /// The socket of front-ends, if it listens.
    pub front_ends: Option<Arc<Socket>>,
}

/// The storage of a disk.
#[derive(Debug)]
pub enum Storage {
    /// A file, which is passed on.
    Image(Image),
    /// Nothing to pass on.
    Nothing,
    /// It ends with the program, for this reason.
    Bound(&'static str),
}

impl Storage {
    /// The storage of a disk in a qcow2 image.
    pub const QCOW2: Storage =
        Storage::Bound("the tables of a qcow2 image are in the memory of this program");
}

/// A second descriptor of an open image, with the same lock.
#[derive(Debug)]
pub struct Image {
    /// Keeps the descriptor of `state` open.
    _fd: File,
    state: ImageState,
    file: Arc<ImageFile>,
}

impl Image {
    /// The image of `file`.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn of(file: Arc<ImageFile>) -> io::Result<Self> {
        let (fd, open) = (file.share()?, file.opened_as()?);
        let state = ImageState { fd: fd.as_raw_fd(), identity: open.identity, direct: open.direct };
        Ok(Image { _fd: fd, state, file })
    }
}

impl Disk {
    pub(super) fn state(&self, exported: Exported) -> Result<DiskState, Obstacle> {
        let image = match &self.parts.storage {
            Storage::Image(image) if image.file.has_failed_sync() => {
                return Err(Obstacle::SyncFailed);
            }
            Storage::Image(image) => Some(image.state.clone()),
            Storage::Nothing => None,
            Storage::Bound(why) => return Err(Obstacle::Bound(why)),
        };
        let Exported { state: device, descriptors, halted } = exported;
        if halted {
            return Err(Obstacle::Halted);
        }
        Ok(DiskState {
            name: self.name.clone(),
            options: self.options.clone(),
            origin: self.origin,
            front_ends: self.parts.front_ends.as_deref().map(Socket::state),
            image,
            device,
            descriptors,
        })
    }
}
