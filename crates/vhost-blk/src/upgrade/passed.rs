// SPDX-License-Identifier: Apache-2.0
//! The sockets and disks that a program passes on.

use super::FREEZE_MAX;
use super::error::{Obstacle, UpgradeError};
use super::state::{DiskState, ImageOptions, ImageState, SocketFileState, SocketState};
use crate::disks::Origin;
use crate::disks::kept::Passing;
use crate::os::memory_file;
use crate::socket_file::SocketFile;
use backend::file::File as ImageFile;
use qcow2::{Qcow2Disk, Settling};
use serde_json::Value;
use socket2::SockRef;
use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
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

    /// Refuses connections from now on, also those that wait. Other descriptors of the socket stay open.
    pub fn close(&self) {
        let socket = SockRef::from(&self.fd);
        if socket.shutdown(Shutdown::Both).is_ok() {
            // None waits for a connection: without one, the error is EINVAL. One that gets no descriptor stays.
            let goes_on = |error: &io::Error| error.kind() == io::ErrorKind::Interrupted;
            while socket.accept().as_ref().err().is_none_or(goes_on) {}
        }
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
pub struct Disk {
    /// Its name.
    pub name: String,
    /// Its options (`DiskOptions`); `None`: those of the command line.
    pub options: Option<Value>,
    /// `serve`: the image in which it goes on, in place of that of the command line.
    pub exchanged: Option<ImageOptions>,
    /// The source of its options.
    pub origin: Origin,
    /// Reaches its device.
    pub control: Arc<Control>,
    /// Its parts besides the device.
    pub parts: Arc<Parts>,
    /// Its bitmaps.
    pub bitmaps: Passing,
    /// The clusters of its qcow2 image.
    pub clusters: Clusters,
    /// Bytes that it has unmapped in images before the present one.
    pub unmapped_before: u64,
}

/// The parts of a disk that pass on besides its device.
pub struct Parts {
    /// Its storage.
    pub storage: Storage,
    /// The socket of front-ends, if it listens.
    pub front_ends: Option<Arc<Socket>>,
}

/// The storage of a disk.
pub enum Storage {
    /// Files, which are passed on.
    Image(Image),
    /// Nothing to pass on.
    Nothing,
    /// It ends with the program, for this reason.
    Bound(&'static str),
}

/// An open image.
pub struct Image {
    file: Arc<ImageFile>,
    top: Shared,
    /// Its tables and its backing files, if it is a qcow2 image.
    qcow2: Option<(Arc<Qcow2Disk>, Vec<Shared>)>,
}

/// A second descriptor of an open file, with the same lock.
struct Shared {
    /// Keeps the descriptor of `state` open.
    _fd: File,
    state: ImageState,
}

impl Shared {
    fn of(file: &ImageFile) -> io::Result<Self> {
        let (fd, open) = (file.share()?, file.opened_as()?);
        let state = ImageState {
            fd: fd.as_raw_fd(),
            identity: open.identity,
            direct: open.direct,
            punches: file.punches(),
        };
        Ok(Shared { _fd: fd, state })
    }
}

impl Image {
    /// The image of `file`, which is that of `qcow2` if there is one.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn of(file: Arc<ImageFile>, qcow2: Option<Arc<Qcow2Disk>>) -> io::Result<Self> {
        let with_backing = |disk: Arc<Qcow2Disk>| {
            let backing = disk.files().iter().skip(1).map(|file| Shared::of(file));
            let backing = backing.collect::<io::Result<_>>()?;
            Ok::<_, io::Error>((disk, backing))
        };
        Ok(Image { top: Shared::of(&file)?, qcow2: qcow2.map(with_backing).transpose()?, file })
    }

    /// The files to pass on: the image, and its backing files if it is qcow2.
    fn state(&self) -> Result<(ImageState, Option<Vec<ImageState>>), Obstacle> {
        if self.file.has_failed_sync() {
            return Err(Obstacle::SyncFailed);
        }
        let states =
            |backing: &Vec<Shared>| backing.iter().map(|file| file.state.clone()).collect();
        let backing = self.qcow2.as_ref().map(|(_, backing)| states(backing));
        Ok((self.top.state.clone(), backing))
    }
}

/// The clusters that a settled qcow2 image has claimed. Without them the next program looks at all tables before the
/// first change.
#[derive(Default)]
pub struct Clusters(Mutex<Option<File>>);

impl Clusters {
    /// A descriptor with those of now, until the next call.
    fn descriptor(&self, disk: &Qcow2Disk) -> Option<RawFd> {
        let known = disk.known(FREEZE_MAX).ok()??;
        let file = memory_file("vhost-blk-clusters", &known).ok()?;
        let descriptor = file.as_raw_fd();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(file);
        Some(descriptor)
    }
}

impl Disk {
    pub(super) fn refused(&self, why: Obstacle) -> UpgradeError {
        UpgradeError::Disk { name: self.name.clone(), why }
    }

    /// The image of a qcow2 disk.
    fn qcow2(&self) -> Option<&Qcow2Disk> {
        match &self.parts.storage {
            Storage::Image(Image { qcow2, .. }) => qcow2.as_ref().map(|(disk, _)| &**disk),
            _ => None,
        }
    }

    /// Orders that nothing of the drained disk stays in the memory of this program alone.
    pub(super) fn begin_settling(&self) -> Option<Settling> {
        self.qcow2().map(Qcow2Disk::begin_settling)
    }

    /// Waits until that is done, at most for `patience`.
    pub(super) fn settled(
        &self,
        settling: Option<Settling>,
        patience: Duration,
    ) -> Result<(), Obstacle> {
        let (Some(disk), Some(settling)) = (self.qcow2(), settling) else { return Ok(()) };
        settling.wait(patience).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => Obstacle::Slow,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
                if !disk.top().has_failed_sync() =>
            {
                Obstacle::NoRoom
            }
            _ => Obstacle::SyncFailed,
        })
    }

    pub(super) fn state(&self, exported: Exported) -> Result<DiskState, Obstacle> {
        let (image, backing) = match &self.parts.storage {
            Storage::Image(image) => {
                let (image, backing) = image.state()?;
                (Some(image), backing)
            }
            Storage::Nothing => (None, None),
            Storage::Bound(why) => return Err(Obstacle::Bound(why)),
        };
        let (unmapped_here, clusters) = match self.qcow2() {
            Some(disk) => (disk.unmapped_bytes(), self.clusters.descriptor(disk)),
            None => (0, None),
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
            backing,
            exchanged: self.exchanged.clone(),
            bitmaps: self.bitmaps.descriptor().map_err(Obstacle::Bitmaps)?,
            clusters,
            unmapped_bytes: self.unmapped_before + unmapped_here,
            device,
            descriptors,
        })
    }
}
