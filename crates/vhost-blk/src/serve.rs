// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk serve`: opens the disk, starts the data plane, and serves one front-end after
//! another until it is told to stop.

use crate::engine::Server;
use crate::failure::Failure;
use crate::options::ServeArgs;
use crate::signals::Stop;
use crate::socket::{Endpoint, Source};
use crate::socket_file::SocketFile;
use crate::values::{BackendKind, MetricsAddress};
use crate::{control, disk, growth, log, metrics, notify, os, socket_file};
use data_plane::{OncePerSecond, PlaneKind};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vhost_user::{ACCEPT_RETRY, Control, Next};

/// Maximum time until the first message of a front-end while another one waits.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Permission bits of the control socket: its commands can interrupt the disk.
const CONTROL_MODE: u32 = 0o600;

/// Serves until SIGTERM or SIGINT, or until the connection of `--fd` ends.
///
/// # Errors
/// [`Failure`] if the start fails. No socket file remains.
pub fn serve(args: &ServeArgs) -> Result<(), Failure> {
    args.check()?;
    let source = Source::choose(args)?;
    log::start(args.log_level, args.log_format);
    let socket_files = Arc::new(Mutex::new(Vec::new()));
    let last = Arc::clone(&socket_files);
    let remove = move || last.lock().unwrap_or_else(PoisonError::into_inner).clear();
    let stop = Stop::install(remove.clone())?;
    let opened = disk::open(args)?;
    let info = opened.disk.info();
    let mut server = Server::start(opened.disk, opened.lock, args)?;
    let endpoint = match source.open()? {
        Endpoint::Connected(stream) => Endpoint::Connected(stream),
        Endpoint::Listening(listener, file) => {
            socket_files.lock().unwrap_or_else(PoisonError::into_inner).extend(file);
            Endpoint::Listening(listener, None)
        }
    };
    if let Some(path) = &args.control_path {
        let listening = listen_for_commands(path, &mut server, &socket_files);
        listening.inspect_err(|_| remove())?;
    }
    if let Some(address) = &args.metrics {
        let listening = listen_for_scrapes(address, &mut server, &socket_files);
        listening.inspect_err(|_| remove())?;
    }
    if let (BackendKind::File, Some(path)) = (args.backend, &args.blk_file) {
        let watching = control_of(&mut server, "watch the size of the device")
            .and_then(|control| growth::watch(path, control));
        watching.inspect_err(|_| remove())?;
    }
    for notice in opened.notices {
        tracing::warn!("{notice}");
    }
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
    notify_manager("READY=1");
    match endpoint {
        Endpoint::Listening(listener, _) => serve_all(&mut server, &listener, &stop),
        Endpoint::Connected(stream) => {
            serve_one(&mut server, stream, None, &stop, &mut OncePerSecond::default());
        }
    }
    notify_manager("STOPPING=1");
    drop(server);
    remove();
    Ok(())
}

/// Creates the metrics socket. It is the last one: its existence implies that of the others.
fn listen_for_scrapes(
    address: &MetricsAddress,
    server: &mut Server,
    socket_files: &Mutex<Vec<SocketFile>>,
) -> Result<(), Failure> {
    let (listener, file) = metrics::Listener::open(address)?;
    socket_files.lock().unwrap_or_else(PoisonError::into_inner).extend(file);
    listener.start(control_of(server, "serve metrics")?)
}

/// Creates the control socket. Its existence implies that of the front-ends' socket.
fn listen_for_commands(
    path: &Path,
    server: &mut Server,
    socket_files: &Mutex<Vec<SocketFile>>,
) -> Result<(), Failure> {
    let (listener, file) = socket_file::listen(path, CONTROL_MODE, None)?;
    socket_files.lock().unwrap_or_else(PoisonError::into_inner).push(file);
    control::start(listener, control_of(server, "listen for commands")?)
}

/// A handle that sends commands to the device, for the task `what`.
fn control_of(server: &mut Server, what: &str) -> Result<Control, Failure> {
    let remedy = "raise the limit on open files (ulimit -n)";
    server.control().map_err(|error| Failure::run(what, error, remedy))
}

/// Serves one front-end after another; others wait in the backlog of the socket.
fn serve_all(server: &mut Server, listener: &UnixListener, stop: &Stop) {
    let mut endings = OncePerSecond::default();
    let next = Next { listener: listener.as_fd(), patience: SILENCE_MAX };
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
            Ok((stream, _)) => {
                let mut front_end = Some(stream);
                while let Some(stream) = front_end {
                    serve_one(server, stream, Some(next), stop, &mut endings);
                    front_end = server.take_waiting();
                }
            }
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
