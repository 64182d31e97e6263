// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk serve`: opens the disk, starts the data plane, and serves one front-end after
//! another until it is told to stop.

use crate::engine::Server;
use crate::failure::Failure;
use crate::options::ServeArgs;
use crate::signals::Stop;
use crate::socket::{Endpoint, Source};
use crate::sockets::{Files, Sockets};
use crate::upgrade::{self, Storage, Taken, Upgrader};
use crate::values::BackendKind;
use crate::{control, disk, growth, log, notify, os};
use backend::Info;
use backend::file::File as ImageFile;
use data_plane::{OncePerSecond, PlaneKind};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost_user::{ACCEPT_RETRY, Control, Next};

/// Maximum time until the first message of a front-end while another one waits.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Serves until SIGTERM or SIGINT, or until the connection of `--fd` ends.
///
/// # Errors
/// [`Failure`] if the start fails. No socket file remains.
pub fn serve(args: &ServeArgs) -> Result<(), Failure> {
    args.check()?;
    let source = Source::choose(args)?;
    log::start(args.log_level, args.log_format);
    let files = Files::default();
    let last = files.clone();
    let stop = Stop::install(move || last.remove())?;
    let started = start(args, &source, &stop, &files).inspect_err(|_| files.remove())?;
    let Started { mut server, endpoint, connected } = started;
    notify_manager("READY=1");
    match endpoint {
        Endpoint::Listening(listener, _) => serve_all(&mut server, &listener, &stop, connected),
        Endpoint::Connected(stream) => {
            serve_one(&mut server, stream, None, &stop, &mut OncePerSecond::default());
        }
    }
    notify_manager("STOPPING=1");
    drop(server);
    files.remove();
    Ok(())
}

/// A daemon that is ready to serve.
struct Started {
    server: Server,
    endpoint: Endpoint,
    /// The front-end of an earlier program, which `server` has taken over.
    connected: Option<UnixStream>,
}

/// Opens the disk and the sockets, or takes them over from an earlier program of this process, and
/// starts all threads.
fn start(
    args: &ServeArgs,
    source: &Source,
    stop: &Stop,
    files: &Files,
) -> Result<Started, Failure> {
    let mut taken = upgrade::take()?;
    let (image, device) = match taken.as_mut().and_then(|taken| taken.disks.pop()) {
        Some(disk) => (disk.image, Some((disk.device, disk.descriptors))),
        None => (None, None),
    };
    let opened = disk::open(args, image)?;
    let mut server = Server::start(Arc::clone(&opened.disk), args)?;
    let connected = match device {
        Some((state, descriptors)) => server.take_over(state, descriptors)?,
        None => None,
    };
    let sockets = Sockets::open(args, source, taken.as_mut(), connected.as_ref(), files)?;
    if taken.is_none() {
        opened.notices.iter().for_each(|notice| tracing::warn!("{notice}"));
    }
    if let (BackendKind::File, Some(path)) = (args.backend, &args.blk_file) {
        growth::watch(path, control_of(&mut server, "watch the size of the device")?)?;
    }
    if let Some(listener) = sockets.metrics {
        listener.start(control_of(&mut server, "serve metrics")?)?;
    }
    if let (Some(listener), Some(passed)) = (sockets.control, sockets.passed) {
        let control = control_of(&mut server, "upgrade the daemon")?;
        let disk = upgrade::Disk::new(control, storage(args, opened.image.as_deref())?);
        let upgrader = Arc::new(Upgrader::new(passed, vec![disk], stop.gate()));
        if let Some(Taken { client, upgraded, .. }) = taken {
            let control = control_of(&mut server, "answer the upgrade")?;
            control::welcome(client, control, Arc::clone(&upgrader), upgraded)?;
        }
        control::start(listener, control_of(&mut server, "listen for commands")?, upgrader)?;
    }
    log_start(args, &server, &opened.disk.info());
    Ok(Started { server, endpoint: sockets.endpoint, connected })
}

/// The part of the disk that an upgrade passes on.
fn storage(args: &ServeArgs, image: Option<&ImageFile>) -> Result<Storage, Failure> {
    match (args.backend, image) {
        (BackendKind::Mem, _) => {
            Ok(Storage::Bound("the content of a mem disk is in the memory of this program"))
        }
        (_, None) => Ok(Storage::Nothing),
        (_, Some(file)) => upgrade::Image::of(file).map(Storage::Image).map_err(|error| {
            Failure::run("keep the image", error, "raise the limit on open files (ulimit -n)")
        }),
    }
}

fn log_start(args: &ServeArgs, server: &Server, info: &Info) {
    let (plane, why) = server.plane();
    tracing::info!(%plane, why, "data plane");
    if plane == PlaneKind::Kernel && args.packed.is_on() {
        tracing::info!("packed virtqueues are not offered: the kernel data plane has none");
    }
    tracing::info!(
        disk = info.description,
        capacity_sectors = info.capacity_sectors,
        read_only = info.read_only,
        queues = args.queues(),
        threads = args.thread_count(),
        "serving"
    );
}

/// A handle that sends commands to the device, for the task `what`.
fn control_of(server: &mut Server, what: &str) -> Result<Control, Failure> {
    let remedy = "raise the limit on open files (ulimit -n)";
    server.control().map_err(|error| Failure::run(what, error, remedy))
}

/// Serves one front-end after another, first the one that is `connected`; others wait in the backlog
/// of the socket.
fn serve_all(
    server: &mut Server,
    listener: &UnixListener,
    stop: &Stop,
    connected: Option<UnixStream>,
) {
    let mut endings = OncePerSecond::default();
    let next = Next { listener: listener.as_fd(), patience: SILENCE_MAX };
    let mut serve = |server: &mut Server, mut front_end: Option<UnixStream>| {
        while let Some(stream) = front_end {
            serve_one(server, stream, Some(next), stop, &mut endings);
            front_end = server.take_waiting();
        }
    };
    serve(server, connected);
    while !stop.asked() {
        // Without a control socket the array repeats another descriptor.
        let control = server.control_fd().unwrap_or(stop.as_fd());
        match os::wait_readable([listener.as_fd(), stop.as_fd(), control]) {
            Ok([_, true, _]) => return,
            Ok([_, _, true]) => {
                server.answer();
                continue;
            }
            Ok([true, ..]) => {}
            Ok([false, ..]) => continue,
            Err(error) => {
                tracing::error!(%error, "waiting for a front-end failed");
                std::thread::sleep(ACCEPT_RETRY);
                continue;
            }
        }
        match listener.accept() {
            Ok((stream, _)) => serve(server, Some(stream)),
            Err(error) => {
                tracing::error!(%error, "accepting a front-end failed");
                std::thread::sleep(ACCEPT_RETRY);
            }
        }
    }
}

fn serve_one(
    server: &mut Server,
    stream: UnixStream,
    next: Option<Next<'_>>,
    stop: &Stop,
    endings: &mut OncePerSecond,
) {
    if let Err(error) = stop.watch(&stream) {
        tracing::error!(%error, "no descriptor is left for a front-end");
        return;
    }
    tracing::info!("front-end connected");
    let outcome = server.serve(stream, next);
    stop.forget();
    match outcome {
        Ok(()) => tracing::info!("front-end disconnected"),
        Err(_) if stop.asked() => {
            tracing::info!("front-end disconnected by the stop")
        }
        Err(error) => match endings.due(Instant::now()) {
            Some(0) => tracing::warn!(error, "connection ended"),
            Some(not_shown) => tracing::warn!(error, not_shown, "connection ended"),
            None => {}
        },
    }
}

fn notify_manager(state: &str) {
    if let Err(error) = notify::notify(state) {
        tracing::warn!(%error, state, "cannot notify the service manager");
    }
}
