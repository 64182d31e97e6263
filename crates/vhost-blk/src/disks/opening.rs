// SPDX-License-Identifier: Apache-2.0
//! The way of a disk from its options to its thread.

use super::front_ends::{ConnectionPace, FrontEnds};
use super::kept::{self, Consumed, Earlier};
use super::layers::Layers;
use super::lost::Watch;
use super::reload::path_of;
use super::restart::After;
use super::starting::Reservation;
use super::{Disks, Entry, Image, Mode, NewDisk, Origin, growth};
use crate::config;
use crate::disk::{self, LockWait};
use crate::events::{Change, DiskEvents};
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::server::Server;
use crate::socket::{Endpoint, Source};
use crate::socket_file::SocketFile;
use crate::stop::Stop;
use crate::upgrade::{self, Parts, Storage, TakenParts, TakenSocket};
use crate::values::{BackendKind, Plane};
use backend::file::File as ImageFile;
use backend::{Disk, Info};
use data_plane::{GroupStart, HealthEvent, LimitChange, Limits, OncePerSecond, PlaneKind, Traced};
use qcow2::Qcow2Disk;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use vhost_user::{Command, DeviceState};

/// A disk that is about to be served.
pub struct Opened {
    server: Server,
    /// The limits that the disk gives its group.
    start: Option<GroupStart>,
    endpoint: Endpoint,
    /// The front-end of an earlier program, which `server` has taken over.
    connected: Option<UnixStream>,
    entry: Entry,
    info: Info,
    reservation: Arc<Reservation>,
    /// The file of its bitmaps.
    consumed: Option<Consumed>,
}

/// The work of the thread of a disk.
type Serve = Box<dyn FnOnce() + Send>;

/// The parts with which a disk begins.
struct Begun {
    args: DiskArgs,
    /// The image is that of an exchange, in place of that of the command line.
    is_exchanged: bool,
    from: disk::From,
    /// The state of its device, and the descriptors that the state names.
    device: Option<(DeviceState, Vec<OwnedFd>)>,
    front_ends: Option<TakenSocket>,
    /// The bitmaps that an upgrade has passed.
    bitmaps: Option<File>,
    /// Bytes that the disk has unmapped in earlier programs.
    unmapped_bytes: u64,
}

impl Disks {
    /// Opens and serves a disk on the socket that its options name.
    ///
    /// # Errors
    /// [`Failure`] if it cannot be served. Nothing of it remains.
    pub fn add(self: &Arc<Self>, disk: NewDisk) -> Result<(), Failure> {
        let (reservation, source) = self.reserve_new(&disk)?;
        self.add_reserved(disk, &source, Arc::new(reservation))
    }

    /// Opens a disk and its socket. It is served after [`Disks::launch`].
    ///
    /// # Errors
    /// As [`Disks::add`].
    pub fn prepare(self: &Arc<Self>, disk: NewDisk, source: &Source) -> Result<Opened, Failure> {
        let reservation = Arc::new(self.reserve_checked(&disk)?);
        self.open_reserved(disk, source, reservation)
    }

    /// Checks the options of a new disk, and takes its name. Opens nothing.
    ///
    /// # Errors
    /// [`Failure`] if the options are wrong, or the name has a disk.
    pub(super) fn reserve_new(
        self: &Arc<Self>,
        disk: &NewDisk,
    ) -> Result<(Reservation, Source), Failure> {
        let source = Source::of_disk(&disk.args)?;
        Ok((self.reserve_checked(disk)?, source))
    }

    fn reserve_checked(self: &Arc<Self>, disk: &NewDisk) -> Result<Reservation, Failure> {
        self.check(&disk.args)?;
        self.reserve(&disk.name, Some(&disk.args), disk.origin)
    }

    fn open_reserved(
        self: &Arc<Self>,
        disk: NewDisk,
        source: &Source,
        reservation: Arc<Reservation>,
    ) -> Result<Opened, Failure> {
        self.span(&disk.name).in_scope(|| self.open(disk, source, reservation))
    }

    /// Opens and serves a disk whose name is taken.
    ///
    /// # Errors
    /// As [`Disks::add`].
    pub(super) fn add_reserved(
        self: &Arc<Self>,
        disk: NewDisk,
        source: &Source,
        reservation: Arc<Reservation>,
    ) -> Result<(), Failure> {
        let opened = self.open_reserved(disk, source, reservation)?;
        self.launch(opened)
    }

    /// Opens and serves a disk of the directory, whose name is taken.
    ///
    /// # Errors
    /// As [`Disks::add`].
    pub(super) fn open_of_directory(
        self: &Arc<Self>,
        reservation: &Arc<Reservation>,
        args: DiskArgs,
        wait: LockWait,
    ) -> Result<(), Failure> {
        // It may have waited for its turn.
        reservation.check()?;
        let (name, origin) = (reservation.name.clone(), Origin::Directory);
        let source = self.check(&args).and_then(|()| Source::of_disk(&args));
        let source = source.map_err(|failure| self.of_file(&name, failure))?;
        let disk = NewDisk { name, args, origin, image: None, taken: None, wait };
        self.add_reserved(disk, &source, Arc::clone(reservation))
    }

    /// A failure of the options of a disk of the directory.
    fn of_file(&self, name: &str, failure: Failure) -> Failure {
        match &self.mode {
            Mode::Many(Some(directory)) => config::of_file(&path_of(directory, name), failure),
            _ => failure,
        }
    }

    fn check(&self, args: &DiskArgs) -> Result<(), Failure> {
        args.check()?;
        self.process.check_socket(args.socket_path.as_ref())
    }

    /// Opens the disk, its data planes and its socket.
    fn open(
        &self,
        disk: NewDisk,
        source: &Source,
        reservation: Arc<Reservation>,
    ) -> Result<Opened, Failure> {
        let NewDisk { name, args, origin, image, taken, wait } = disk;
        let no_descriptor = |error: io::Error| {
            let remedy = "raise the limit on open files (ulimit -n)";
            Failure::run(format!("serve {name}"), error, remedy)
        };
        let Begun { args, is_exchanged, from, device, front_ends, bitmaps, unmapped_bytes } =
            self.begun(args, image.as_ref(), taken);
        let mut opened = self.open_storage(&args, from, (origin, wait))?;
        let storage = storage(args.backend, &opened).map_err(no_descriptor)?;
        if device.is_some() {
            opened.notices.clear(); // the first program has told them
        }
        let disk::Opened { disk, top, qcow2, lock, notices, .. } = opened;
        let image = top.clone().map(|top| image_of(&disk, top, qcow2, unmapped_bytes));
        let is_held = lock.as_ref().is_none_or(|(_, is_held)| *is_held);
        let obstacle = obstacle(&args, is_held);
        let earlier = earlier(bitmaps.as_ref(), image.as_ref(), device.is_some(), obstacle);
        let (layers, consumed) = layered(disk, top, earlier, image.as_ref().filter(|_| is_held));
        let disk = layers.disk();
        let info = disk.info();
        // The limits of an earlier program hold.
        let start = if device.is_some() { None } else { group_start(&name, &args, origin) };
        let of_start = if device.is_some() { args.without_limits() } else { args.clone() };
        let mut server =
            Server::start(disk, lock, &of_start, &self.process, &self.pool(args.queues())?)?;
        let taken_over = device.map(|(state, descriptors)| server.take_over(state, descriptors));
        let connected = taken_over.transpose()?.flatten();
        let control = Arc::new(server.control().map_err(no_descriptor)?);
        let stop = Arc::new(Stop::of(server.waiting()).map_err(no_descriptor)?);
        let events = self.observe(&name, &mut server);
        // The image may have taken its time: no socket appears after a removal.
        let free = reservation.check();
        let (endpoint, connected) =
            free.and_then(|()| self.endpoint(front_ends, connected, source))?;
        let (endpoint, socket, front_ends) = parted(endpoint).map_err(no_descriptor)?;
        let (device, watch) = watched(&args, image.as_ref());
        let entry = Entry {
            args,
            origin,
            stop,
            control,
            health: server.health(),
            events,
            socket: socket.map(Arc::new),
            device,
            watch,
            parts: Arc::new(Parts { storage, front_ends }),
            backup: Arc::default(),
            image,
            is_exchanged,
            layers,
            job: None,
            last_mirror: None,
            notices,
            after: After::Nothing,
        };
        Ok(Opened { server, start, endpoint, connected, entry, info, reservation, consumed })
    }

    /// The parts with which a disk begins, all of an earlier program's.
    fn begun(&self, args: DiskArgs, image: Option<&OwnedFd>, taken: Option<TakenParts>) -> Begun {
        let named = || image.map_or(disk::From::Path, disk::From::passed);
        let Some(taken) = taken else {
            let (from, is_exchanged) = (named(), false);
            return Begun {
                args,
                is_exchanged,
                from,
                device: None,
                front_ends: None,
                bitmaps: None,
                unmapped_bytes: 0,
            };
        };
        let TakenParts {
            image,
            device,
            descriptors,
            front_ends,
            exchanged,
            bitmaps,
            unmapped_bytes,
        } = taken;
        // The command line and the configuration file of `serve` may have changed.
        let is_exchanged = exchanged.is_some();
        let args = match exchanged {
            Some(image) => image.put_into(args),
            None => args,
        };
        let is_checked = self.mode == Mode::One && !is_exchanged;
        let from = image.map_or_else(named, |image| disk::From::Program { image, is_checked });
        let device = Some((device, descriptors));
        Begun { args, is_exchanged, from, device, front_ends, bitmaps, unmapped_bytes }
    }

    /// The source of front-ends, and the one that is connected to a disk of an earlier program.
    fn endpoint(
        &self,
        listening: Option<TakenSocket>,
        connected: Option<UnixStream>,
        source: &Source,
    ) -> Result<(Endpoint, Option<UnixStream>), Failure> {
        Ok(match (listening, connected) {
            (Some((socket, file)), connected) => {
                (Endpoint::Listening(socket.into(), file), connected)
            }
            (None, Some(stream)) => (Endpoint::Connected(stream), None),
            (None, None) => {
                let opened = source.open();
                (opened.map_err(|failure| self.told_of_listener(source, failure))?, None)
            }
        })
    }

    /// Makes the device of the disk `name` tell the subscribers of its changes. Returns its events.
    fn observe(&self, name: &str, server: &mut Server) -> Arc<DiskEvents> {
        let events = Arc::new(DiskEvents::new(Arc::clone(&self.events), name));
        let told = Arc::clone(&events);
        server.observe(move |notice| told.tell(&Change::Device(notice)));
        let told = Arc::clone(&events);
        let (failures, of_failure) = (self.failures.names(), name.to_owned());
        server.observe_health(move |event: &HealthEvent| {
            told.tell(&Change::Health(event.clone()));
            if matches!(event, HealthEvent::Failed(_)) {
                let _ = failures.try_send(of_failure.clone()); // full, or the process ends
            }
        });
        let (traces, disk) = (Arc::clone(&self.traces), name.to_owned());
        let tell = move |message: Traced<'_>| traces.tell(&disk, message);
        server.health().set_trace_hook(Box::new(tell));
        events
    }

    /// Serves a disk that [`Disks::prepare`] opened.
    ///
    /// # Errors
    /// As [`Disks::add`].
    pub fn launch(self: &Arc<Self>, opened: Opened) -> Result<(), Failure> {
        let name = opened.reservation.name.clone();
        let span = self.span(&name);
        let is_device = opened.entry.device.is_some();
        if is_device {
            growth::watch(self)?;
        }
        let threads = self.threads_of(opened.server.plane().0, opened.entry.args.queues());
        span.in_scope(|| opened.log(threads));
        let Opened { server, start, endpoint, connected, entry, reservation, consumed, .. } =
            opened;
        let mut front_ends = FrontEnds {
            server,
            stop: Arc::clone(&entry.stop),
            events: Arc::clone(&entry.events),
            endings: OncePerSecond::default(),
            pace: ConnectionPace::default(),
        };
        // Before the entry: a disk in the table does not leave it by a start that fails.
        let (begin, begun) = mpsc::channel::<Serve>();
        let body = move || begun.into_iter().for_each(|serve| serve());
        let spawned = std::thread::Builder::new().name("disk".into()).spawn(body);
        spawned.map_err(|error| {
            let remedy = "raise the limit on threads (ulimit -u)";
            Failure::run(format!("serve {name}"), error, remedy)
        })?;
        let device = is_device.then(|| Arc::clone(&entry.control));
        let served = reservation.enter(entry)?;
        // Not before: a disk that does not start must not change the limits of others.
        if let Some(Err(failure)) = start.map(|start| front_ends.server.start_in_group(&start)) {
            tracing::error!(%failure, "the limits of the disk do not apply to its group");
        }
        consumed.into_iter().for_each(Consumed::release);
        let serve = move || {
            // Dropped in the opposite order: the device before the entry.
            let _served = served;
            let mut front_ends = front_ends;
            let _span = span.entered();
            match endpoint {
                Endpoint::Listening(listener, _) => front_ends.serve_all(&listener, connected),
                Endpoint::Connected(stream) => front_ends.serve_one(stream, None),
            }
        };
        begin.send(Box::new(serve)).expect("the thread waits for it");
        if let Some(control) = device {
            // It may have grown since it was opened; messages of the kernel concern only disks in the table.
            drop(control.post(Command::Resize(None)));
        }
        Ok(())
    }
}

/// The limits that a disk gives its group when it starts; `None`: none, or it has no group.
fn group_start(name: &str, args: &DiskArgs, origin: Origin) -> Option<GroupStart> {
    let limits = args.limits();
    args.limit_group.as_ref().filter(|_| limits.is_set())?;
    Some(match origin {
        Origin::Directory => GroupStart::File { disk: name.to_owned(), limits },
        Origin::Command => GroupStart::Command(LimitChange {
            iops: limits.iops.map(Some),
            bytes: limits.bytes.map(Some),
            burst: (limits.burst != Limits::BURST_DEFAULT).then_some(limits.burst),
        }),
    })
}

/// The image of a disk, whose file is `top`. An earlier program has freed the places of `unmapped_before` bytes.
fn image_of(
    disk: &Arc<dyn Disk>,
    top: Arc<ImageFile>,
    qcow2: Option<Arc<Qcow2Disk>>,
    unmapped_before: u64,
) -> Image {
    Image { disk: Arc::clone(disk), top, qcow2, unmapped_before, told: disk.info() }
}

/// The block device of a disk, and its watch.
fn watched(args: &DiskArgs, image: Option<&Image>) -> (Option<(u32, u32)>, Watch) {
    let Some(Image { top, .. }) = image else { return (None, Watch::default()) };
    (growth::device_number(top), Watch::of(Disks::watched(args.blk_file.as_deref(), top)))
}

/// The bitmaps of an earlier program: those that an upgrade has passed, or those beside the image.
fn earlier(
    passed: Option<&File>,
    image: Option<&Image>,
    is_upgrade: bool,
    obstacle: Option<&str>,
) -> Earlier {
    match (passed, image) {
        (Some(passed), Some(image)) => Earlier::of_upgrade(passed, &image.top),
        (None, Some(image)) if !is_upgrade => kept::load(image, obstacle),
        _ => Earlier::default(),
    }
}

/// The layers of a disk, and its bitmaps until it is served. If the start fails, `image` keeps them: only one whose lock
/// is held, because another program may change the others meanwhile.
fn layered(
    disk: Arc<dyn Disk>,
    top: Option<Arc<ImageFile>>,
    mut earlier: Earlier,
    image: Option<&Image>,
) -> (Arc<Layers>, Option<Consumed>) {
    let unused = earlier.unused.take();
    let layers = Layers::new(disk, top, earlier);
    let consumed = image.map(|image| kept::until_served(image, &layers, unused));
    (layers, consumed)
}

/// The reason for which a disk cannot go on with the bitmaps of before. `is_held`: its image is locked,
/// or the user shares it.
fn obstacle(args: &DiskArgs, is_held: bool) -> Option<&'static str> {
    match args.data_plane {
        _ if !is_held => {
            Some("the disk waits for the guest of another host, which notes nothing here")
        }
        Plane::Kernel => Some("the kernel data plane notes no changes"),
        Plane::Auto | Plane::Uring => None,
    }
}

/// Parts a listening socket from its file, and keeps a descriptor of it for an upgrade.
fn parted(
    endpoint: Endpoint,
) -> io::Result<(Endpoint, Option<SocketFile>, Option<Arc<upgrade::Socket>>)> {
    match endpoint {
        Endpoint::Listening(listener, file) => {
            let socket = upgrade::Socket::of(&listener, file.as_ref())?;
            Ok((Endpoint::Listening(listener, None), file, Some(Arc::new(socket))))
        }
        connected => Ok((connected, None, None)),
    }
}

/// The part of the storage that an upgrade passes on.
fn storage(backend: BackendKind, opened: &disk::Opened) -> io::Result<Storage> {
    match (backend, &opened.top) {
        (BackendKind::Mem, _) => {
            Ok(Storage::Bound("the content of a mem disk is in the memory of this program"))
        }
        (_, None) => Ok(Storage::Nothing),
        (_, Some(file)) => {
            upgrade::Image::of(Arc::clone(file), opened.qcow2.clone()).map(Storage::Image)
        }
    }
}

impl Opened {
    fn log(&self, threads: usize) {
        let Opened { server, entry: Entry { args, layers, notices, .. }, info, .. } = self;
        notices.iter().for_each(|notice| tracing::warn!("{notice}"));
        if let Some(why) = layers.lost() {
            tracing::warn!(why, "{}", kept::LOST);
        }
        let (plane, why) = server.plane();
        tracing::info!(%plane, why, "data plane");
        if plane == PlaneKind::Kernel && args.packed.is_on() {
            tracing::info!("packed virtqueues are not offered: the kernel data plane has none");
        }
        tracing::info!(
            storage = info.description.as_str(),
            capacity_sectors = info.capacity_sectors,
            read_only = info.read_only,
            queues = args.queues(),
            threads,
            "serving"
        );
    }
}
