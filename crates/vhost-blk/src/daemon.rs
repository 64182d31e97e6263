// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk daemon` and `vhost-blk serve`: any number of disks, or one.

use crate::disks::{Disks, Mode, NewDisk, Opened, Origin};
use crate::failure::Failure;
use crate::options::{DaemonArgs, ProcessArgs, ServeArgs};
use crate::signals::{self, Acts, Gate};
use crate::socket::{self, Source};
use crate::socket_file::{self, SocketFile};
use crate::upgrade::{self, Taken, TakenSocket, Upgrader};
use crate::{control, log, metrics, notify, os};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, PoisonError};

/// Socket files of the process, other than those of the disks.
type SocketFiles = Arc<Mutex<Vec<SocketFile>>>;

/// Serves one disk until SIGTERM or SIGINT, or until the connection of `--fd` ends.
///
/// # Errors
/// [`Failure`] if the start fails. No socket file remains.
pub fn serve(args: &ServeArgs) -> Result<(), Failure> {
    args.check()?;
    let source = Source::choose(args)?;
    log::start(args.process.log_level, args.process.log_format);
    let disks = Disks::new(args.process.clone(), Mode::One);
    let mut taken = upgrade::take()?;
    let disk = NewDisk {
        name: args.name.clone(),
        args: args.disk.clone(),
        origin: Origin::Command,
        image: None,
        taken: taken.as_mut().map(|taken| std::mem::take(&mut taken.disk)),
    };
    run(&disks, taken, || disks.prepare(disk, &source).map(Some))
}

/// Serves any number of disks until SIGTERM or SIGINT.
///
/// # Errors
/// [`Failure`] if the start fails. No socket file remains.
pub fn daemon(args: &DaemonArgs) -> Result<(), Failure> {
    args.process.check()?;
    if args.process.control_path.is_none() {
        return Err(Failure::usage(
            "serve disks",
            "there is no way to control the daemon",
            "give --control-path PATH",
        ));
    }
    log::start(args.process.log_level, args.process.log_format);
    if let Err(error) = os::raise_open_files() {
        tracing::warn!(%error, "the limit on open files stays; each disk has some tens of them");
    }
    let disks = Disks::new(args.process.clone(), Mode::Many(args.config_dir.clone()));
    run(&disks, None, || match &args.config_dir {
        // A failed disk is in the log and hurts no other.
        Some(_) => disks.reload().map(|_| None),
        None => Ok(None),
    })
}

/// Runs the process. `begin` adds the first disks; it may leave one to be served after the other
/// sockets are there. `taken` are the sockets of an earlier program.
fn run(
    disks: &Arc<Disks>,
    mut taken: Option<Taken>,
    begin: impl FnOnce() -> Result<Option<Opened>, Failure>,
) -> Result<(), Failure> {
    let files = SocketFiles::default();
    let gate = handle_signals(disks, &files)?;
    let begun = begin().and_then(|opened| {
        let inherited = taken.as_mut().and_then(|taken| taken.control.take());
        let commands = command_socket(&disks.process, inherited, &files)?;
        let inherited = taken.as_mut().and_then(|taken| taken.metrics.take());
        let scrapes = metrics_socket(&disks.process, inherited, &files)?;
        let (commands, for_later) = commands.unzip();
        let (scrapes, scrapes_for_later) = scrapes.unzip();
        let mut opened = opened;
        if let (Some(opened), Some(control)) = (&mut opened, for_later) {
            let (front_ends, disk) = opened.passed_on().map_err(no_descriptor)?;
            let sockets = upgrade::Sockets { front_ends, control, metrics: scrapes_for_later };
            // Only set here.
            let _ = disks.upgrader.set(Upgrader::new(sockets, vec![disk], gate));
        }
        // Clients wait in the backlogs until there is a disk.
        opened.map_or(Ok(()), |opened| disks.launch(opened))?;
        if let Some(Taken { client, upgraded, .. }) = taken {
            control::welcome(client, Arc::clone(disks), upgraded)?;
        }
        commands.map_or(Ok(()), |commands| control::start(commands, Arc::clone(disks)))?;
        scrapes.map_or(Ok(()), |scrapes| scrapes.start(Arc::clone(disks)))
    });
    let begun = begun.or_else(|failure| match disks.is_stopping() {
        // A signal may precede the first disk, above all one that an earlier program has left.
        true => {
            tracing::info!(%failure, "stopped during the start");
            Ok(())
        }
        false => Err(failure),
    });
    if begun.is_err() {
        disks.stop();
    } else {
        notify_manager("READY=1");
    }
    disks.wait();
    if begun.is_ok() {
        notify_manager("STOPPING=1");
    }
    files.lock().unwrap_or_else(PoisonError::into_inner).clear();
    begun
}

fn handle_signals(disks: &Arc<Disks>, files: &SocketFiles) -> Result<Gate, Failure> {
    let (stopping, last, files) = (Arc::clone(disks), Arc::clone(disks), Arc::clone(files));
    let reload: Option<Box<dyn FnMut() + Send>> = match &disks.mode {
        Mode::One => None,
        Mode::Many(_) => {
            let disks = Arc::clone(disks);
            Some(Box::new(move || reload_apart(&disks)))
        }
    };
    signals::install(Acts {
        stop: Box::new(move || stopping.stop()),
        reload,
        last: Box::new(move || {
            last.remove_socket_files();
            files.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }),
    })
}

/// Reads the configuration again, on a thread of its own: a disk may delay it.
fn reload_apart(disks: &Arc<Disks>) {
    let disks = Arc::clone(disks);
    let body = move || {
        notify_manager(&notify::reloading());
        if let Err(failure) = disks.reload() {
            tracing::error!("{failure}");
        }
        notify_manager("READY=1");
    };
    if let Err(error) = std::thread::Builder::new().name("reload".into()).spawn(body) {
        tracing::error!(%error, "the configuration cannot be read again");
    }
}

/// Creates the metrics socket. It is the last one: its existence implies that of the others.
fn metrics_socket(
    args: &ProcessArgs,
    taken: Option<TakenSocket>,
    files: &SocketFiles,
) -> Result<Option<(metrics::Listener, upgrade::Socket)>, Failure> {
    let Some(address) = &args.metrics else { return Ok(None) };
    let (listener, file) = match taken {
        Some((socket, file)) => (metrics::Listener::of(socket, address), file),
        None => metrics::Listener::open(address)?,
    };
    let for_later = upgrade::Socket::of(&listener, file.as_ref()).map_err(no_descriptor)?;
    files.lock().unwrap_or_else(PoisonError::into_inner).extend(file);
    Ok(Some((listener, for_later)))
}

/// Creates the control socket. Its existence implies that of the sockets of the first disks.
fn command_socket(
    args: &ProcessArgs,
    taken: Option<TakenSocket>,
    files: &SocketFiles,
) -> Result<Option<(UnixListener, upgrade::Socket)>, Failure> {
    let Some(path) = &args.control_path else { return Ok(None) };
    let group = args.control_group.as_deref();
    let (mode, group) = socket::access(args.control_mode, group, "--control-group")?;
    let (listener, file) = match taken {
        Some((socket, file)) => (socket.into(), file),
        None => {
            let (listener, file) = socket_file::listen(path, mode, group)?;
            (listener, Some(file))
        }
    };
    let for_later = upgrade::Socket::of(&listener, file.as_ref()).map_err(no_descriptor)?;
    files.lock().unwrap_or_else(PoisonError::into_inner).extend(file);
    Ok(Some((listener, for_later)))
}

fn no_descriptor(error: std::io::Error) -> Failure {
    Failure::run("keep a socket", error, "raise the limit on open files (ulimit -n)")
}

fn notify_manager(state: &str) {
    if let Err(error) = notify::notify(state) {
        tracing::warn!(%error, state, "cannot notify the service manager");
    }
}
