// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk daemon` and `vhost-blk serve`: any number of disks, or one.

use crate::disks::{Disks, Mode, NewDisk, Opened, Origin};
use crate::failure::Failure;
use crate::options::{DaemonArgs, ProcessArgs, ServeArgs};
use crate::signals::{self, Acts};
use crate::socket::{self, Source};
use crate::socket_file::{self, SocketFile};
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
    run(&disks, || {
        let (name, args) = (args.name.clone(), args.disk.clone());
        let disk = NewDisk { name, args, origin: Origin::Command, image: None };
        disks.prepare(disk, &source).map(Some)
    })
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
    run(&disks, || match &args.config_dir {
        // A failed disk is in the log and hurts no other.
        Some(_) => disks.reload().map(|_| None),
        None => Ok(None),
    })
}

/// Runs the process. `begin` adds the first disks; it may leave one to be served after the other
/// sockets are there.
fn run(
    disks: &Arc<Disks>,
    begin: impl FnOnce() -> Result<Option<Opened>, Failure>,
) -> Result<(), Failure> {
    let files = SocketFiles::default();
    handle_signals(disks, &files)?;
    let begun = begin().and_then(|opened| {
        let commands = command_socket(&disks.process, &files)?;
        let scrapes = metrics_socket(&disks.process, &files)?;
        // Clients wait in the backlogs until there is a disk.
        let launched = opened.map_or(Ok(()), |opened| disks.launch(opened));
        if launched.is_err() && disks.is_stopping() {
            return Ok(());
        }
        launched?;
        commands.map_or(Ok(()), |commands| control::start(commands, Arc::clone(disks)))?;
        scrapes.map_or(Ok(()), |scrapes| scrapes.start(Arc::clone(disks)))
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

fn handle_signals(disks: &Arc<Disks>, files: &SocketFiles) -> Result<(), Failure> {
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
    files: &SocketFiles,
) -> Result<Option<metrics::Listener>, Failure> {
    let Some(address) = &args.metrics else { return Ok(None) };
    let (listener, file) = metrics::Listener::open(address)?;
    files.lock().unwrap_or_else(PoisonError::into_inner).extend(file);
    Ok(Some(listener))
}

/// Creates the control socket. Its existence implies that of the sockets of the first disks.
fn command_socket(
    args: &ProcessArgs,
    files: &SocketFiles,
) -> Result<Option<UnixListener>, Failure> {
    let Some(path) = &args.control_path else { return Ok(None) };
    let group = args.control_group.as_deref();
    let (mode, group) = socket::access(args.control_mode, group, "--control-group")?;
    let (listener, file) = socket_file::listen(path, mode, group)?;
    files.lock().unwrap_or_else(PoisonError::into_inner).push(file);
    Ok(Some(listener))
}

fn notify_manager(state: &str) {
    if let Err(error) = notify::notify(state) {
        tracing::warn!(%error, state, "cannot notify the service manager");
    }
}
