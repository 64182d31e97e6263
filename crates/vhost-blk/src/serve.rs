// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk serve`: opens the disk, starts the data plane, and serves one front-end after
//! another until it is told to stop.

use crate::engine::Server;
use crate::failure::Failure;
use crate::options::ServeArgs;
use crate::signals::Stop;
use crate::socket::{Endpoint, Source};
use crate::values::Plane;
use crate::{disk, log, notify, os};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Wait after a failed `accept`, which fails for want of descriptors and would fail again.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Serves until SIGTERM or SIGINT, or until the connection given by `--fd` ends.
///
/// # Errors
/// When something needed cannot be had; nothing is left behind then.
pub fn serve(args: &ServeArgs) -> Result<(), Failure> {
    args.check()?;
    let source = Source::choose(args)?;
    let socket_file = Arc::new(Mutex::new(None));
    let last = Arc::clone(&socket_file);
    let remove = move || drop(last.lock().unwrap_or_else(PoisonError::into_inner).take());
    let stop = Stop::install(remove.clone())?;
    let opened = disk::open(args)?;
    let info = opened.disk.info();
    let mut server = Server::start(opened.disk, args)?;
    let endpoint = match source.open()? {
        Endpoint::Connected(stream) => Endpoint::Connected(stream),
        Endpoint::Listening(listener, file) => {
            *socket_file.lock().unwrap_or_else(PoisonError::into_inner) = file;
            Endpoint::Listening(listener, None)
        }
    };
    log::start(args.log_level, args.log_format);
    for notice in opened.notices {
        tracing::warn!("{notice}");
    }
    if args.data_plane == Plane::Auto {
        tracing::info!("data plane: auto means uring");
    }
    tracing::info!(
        disk = info.description,
        capacity_sectors = info.capacity_sectors,
        read_only = info.read_only,
        queues = args.queues(),
        threads = args.thread_count(),
        "serving"
    );
    tell("READY=1");
    match endpoint {
        Endpoint::Listening(listener, _) => serve_all(&mut server, &listener, &stop),
        Endpoint::Connected(stream) => serve_one(&mut server, stream, &stop),
    }
    tell("STOPPING=1");
    drop(server);
    remove();
    Ok(())
}

/// Front-ends come one after another; others wait in the socket's backlog.
fn serve_all(server: &mut Server, listener: &UnixListener, stop: &Stop) {
    while !stop.asked() {
        match os::wait_readable(listener.as_fd(), stop.as_fd()) {
            Ok((_, true)) => return,
            Ok((true, false)) => {}
            Ok((false, false)) => continue,
            Err(error) => {
                tracing::error!(%error, "waiting for a front-end failed");
                std::thread::sleep(ACCEPT_RETRY);
                continue;
            }
        }
        match listener.accept() {
            Ok((stream, _)) => serve_one(server, stream, stop),
            Err(error) => {
                tracing::error!(%error, "accepting a front-end failed");
                std::thread::sleep(ACCEPT_RETRY);
            }
        }
    }
}

fn serve_one(server: &mut Server, stream: UnixStream, stop: &Stop) {
    if let Err(error) = stop.watch(&stream) {
        tracing::error!(%error, "no descriptor is left for a front-end");
        return;
    }
    tracing::info!("front-end connected");
    let outcome = server.serve(stream);
    stop.forget();
    match outcome {
        Ok(()) => tracing::info!("front-end disconnected"),
        Err(_) if stop.asked() => tracing::info!("front-end told to go"),
        Err(error) => tracing::warn!(error, "connection ended"),
    }
}

fn tell(state: &str) {
    if let Err(error) = notify::notify(state) {
        tracing::warn!(%error, state, "the service manager cannot be told");
    }
}
