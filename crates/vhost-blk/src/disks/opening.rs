// SPDX-License-Identifier: Apache-2.0
//! The way of a disk from its options to its thread.

use super::front_ends::FrontEnds;
use super::{Disks, Entry, NewDisk, Reservation, growth};
use crate::disk;
use crate::engine::Server;
use crate::events::Change;
use crate::failure::Failure;
use crate::options::{DiskArgs, ProcessArgs};
use crate::socket::{Endpoint, Source};
use crate::stop::Stop;
use crate::upgrade::{self, Storage, TakenDisk};
use crate::values::BackendKind;
use backend::Info;
use backend::file::File as ImageFile;
use data_plane::{HealthEvent, OncePerSecond, PlaneKind};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// A disk that is about to be served.
pub struct Opened {
    server: Server,
    endpoint: Endpoint,
    /// The front-end of an earlier program, which `server` has taken over.
    connected: Option<UnixStream>,
    storage: Storage,
    entry: Entry,
    info: Info,
    notices: Vec<String>,
    reservation: Reservation,
}

impl Disks {
    /// Opens a disk and its socket. It is served after [`Disks::launch`].
    ///
    /// # Errors
    /// As [`Disks::add`].
    pub fn prepare(self: &Arc<Self>, disk: NewDisk, source: &Source) -> Result<Opened, Failure> {
        disk.args.check()?;
        self.process.check_socket(disk.args.socket_path.as_ref())?;
        let reservation = self.reserve(&disk.name)?;
        self.span(&disk.name).in_scope(|| self.open(disk, source, reservation))
    }

    /// Opens the disk, its data planes and its socket.
    fn open(
        &self,
        disk: NewDisk,
        source: &Source,
        reservation: Reservation,
    ) -> Result<Opened, Failure> {
        let NewDisk { name, args, origin, image, taken } = disk;
        let failed = |error: io::Error| {
            Failure::run(
                format!("serve {name}"),
                error,
                "raise the limit on open files (ulimit -n)",
            )
        };
        let TakenDisk { image: taken_image, device, front_ends } = taken.unwrap_or_default();
        let from = match (taken_image, &image) {
            (Some(file), _) => disk::From::Program(file),
            (None, Some(image)) => disk::From::Descriptor(image),
            (None, None) => disk::From::Path,
        };
        let mut opened = disk::open(&args, from)?;
        let storage = storage(&args, opened.image.take()).map_err(failed)?;
        if device.is_some() {
            opened.notices.clear(); // the first program has told them
        }
        let disk::Opened { disk, lock, notices, .. } = opened;
        let info = disk.info();
        let pool = self.pool(args.queues())?;
        let mut server = Server::start(disk, lock, &args, &self.process, &pool)?;
        let connected = match device {
            Some((state, descriptors)) => server.take_over(state, descriptors)?,
            None => None,
        };
        let control = Arc::new(server.control().map_err(failed)?);
        let stop = Arc::new(Stop::new().map_err(failed)?);
        let (events, of_disk) = (Arc::clone(&self.events), name.clone());
        let observer = move |notice| events.tell(&of_disk, &Change::Device(notice));
        server.observe(observer).map_err(failed)?;
        let (events, of_disk) = (Arc::clone(&self.events), name.clone());
        let observer =
            move |event: &HealthEvent| events.tell(&of_disk, &Change::Health(event.clone()));
        server.observe_health(observer);
        let (endpoint, connected) = match (front_ends, connected) {
            (Some((socket, file)), connected) => {
                (Endpoint::Listening(socket.into(), file), connected)
            }
            (None, Some(stream)) => (Endpoint::Connected(stream), None),
            (None, None) => (source.open()?, None),
        };
        let (endpoint, socket) = match endpoint {
            Endpoint::Listening(listener, file) => (Endpoint::Listening(listener, None), file),
            connected => (connected, None),
        };
        let path = args.blk_file.as_deref().filter(|_| args.backend == BackendKind::File);
        let device = path.and_then(growth::device_number);
        let socket = socket.map(Arc::new);
        let entry = Entry { args, origin, stop, control, socket, device };
        Ok(Opened { server, endpoint, connected, storage, entry, info, notices, reservation })
    }

    /// Serves a disk that [`Disks::prepare`] opened.
    ///
    /// # Errors
    /// As [`Disks::add`].
    pub fn launch(self: &Arc<Self>, opened: Opened) -> Result<(), Failure> {
        let name = opened.reservation.name.clone();
        let span = self.span(&name);
        if opened.entry.device.is_some() {
            growth::watch(self)?;
        }
        span.in_scope(|| opened.log(&self.process));
        let Opened { server, endpoint, connected, entry, reservation, .. } = opened;
        let front_ends = FrontEnds {
            disk: name.clone(),
            server,
            stop: Arc::clone(&entry.stop),
            events: Arc::clone(&self.events),
            endings: OncePerSecond::default(),
        };
        let served = reservation.enter(entry)?;
        let body = move || {
            // Dropped in the opposite order: the device before the entry.
            let _served = served;
            let mut front_ends = front_ends;
            let _span = span.entered();
            match endpoint {
                Endpoint::Listening(listener, _) => front_ends.serve_all(&listener, connected),
                Endpoint::Connected(stream) => front_ends.serve_one(stream, None),
            }
        };
        let spawned = std::thread::Builder::new().name("disk".into()).spawn(body);
        spawned.map(drop).map_err(|error| {
            let remedy = "raise the limit on threads (ulimit -u)";
            Failure::run(format!("serve {name}"), error, remedy)
        })
    }
}

/// The part of the disk that an upgrade passes on.
fn storage(args: &DiskArgs, image: Option<Arc<ImageFile>>) -> io::Result<Storage> {
    match (args.backend, image) {
        (BackendKind::Mem, _) => {
            Ok(Storage::Bound("the content of a mem disk is in the memory of this program"))
        }
        (BackendKind::File, None) => {
            Ok(Storage::Bound("the tables of a qcow2 image are in the memory of this program"))
        }
        (_, None) => Ok(Storage::Nothing),
        (_, Some(file)) => upgrade::Image::of(file).map(Storage::Image),
    }
}

impl Opened {
    /// The disk and its listening socket for a later program.
    ///
    /// # Errors
    /// The error of the system call, if no file descriptor is left.
    pub fn passed_on(&mut self) -> io::Result<(Option<upgrade::Socket>, upgrade::Disk)> {
        let socket = match &self.endpoint {
            Endpoint::Listening(listener, _) => {
                Some(upgrade::Socket::of(listener, self.entry.socket.as_deref())?)
            }
            Endpoint::Connected(_) => None,
        };
        let storage = std::mem::replace(&mut self.storage, Storage::Nothing);
        Ok((socket, upgrade::Disk::new(Arc::clone(&self.entry.control), storage)))
    }

    fn log(&self, process: &ProcessArgs) {
        let Opened { server, entry: Entry { args, .. }, info, notices, .. } = self;
        notices.iter().for_each(|notice| tracing::warn!("{notice}"));
        let (plane, why) = server.plane();
        tracing::info!(%plane, why, "data plane");
        if plane == PlaneKind::Kernel && args.packed.is_on() {
            tracing::info!("packed virtqueues are not offered: the kernel data plane has none");
        }
        tracing::info!(
            disk = info.description.as_str(),
            capacity_sectors = info.capacity_sectors,
            read_only = info.read_only,
            queues = args.queues(),
            threads = process.thread_count(args.queues()),
            "serving"
        );
    }
}
