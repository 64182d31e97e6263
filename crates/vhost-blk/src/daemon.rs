// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk daemon` and `vhost-blk serve`: any number of disks, or one.

use crate::disk::LockWait;
use crate::disks::{Disks, Mode, NewDisk, Opened, Origin, check_files};
use crate::failure::Failure;
use crate::options::{DaemonArgs, ProcessArgs, ServeArgs};
use crate::signals::{self, Acts, Blocked, Gate, Remaining};
use crate::socket::{self, Source};
use crate::socket_file::{self, SocketFile};
use crate::upgrade::{self, Taken, TakenSocket, Upgrader};
use crate::{control, log, metrics, notify, os, pidfile, watchdog};
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Socket files of the process, other than those of the disks, and the file of its id.
type SocketFiles = Arc<Mutex<Vec<SocketFile>>>;

/// Serves one disk until SIGTERM or SIGINT, or until the connection of `--fd` ends.
///
/// # Errors
/// [`Failure`] if the start fails. No socket file remains.
pub fn serve(args: &ServeArgs) -> Result<(), Failure> {
    args.check()?;
    let source = Source::choose(args)?;
    let signals = begin_process(&args.process, false)?;
    let disks = Disks::new(args.process.clone(), Mode::One);
    let taken = upgrade::take()?;
    run(&disks, signals, taken, |taken| {
        let disk = NewDisk {
            name: args.name.clone(),
            args: args.disk.clone(),
            origin: Origin::Command,
            image: None,
            // The check of the upgrade has counted them.
            taken: taken.and_then(|taken| taken.disks.pop()).map(|disk| disk.parts),
            wait: LockWait::from_now(),
        };
        disks.prepare(disk, &source).map(Some)
    })
}

/// Serves any number of disks until SIGTERM or SIGINT.
///
/// # Errors
/// [`Failure`] if the start fails. No socket file remains.
pub fn daemon(args: &DaemonArgs) -> Result<(), Failure> {
    if let (true, Some(directory)) = (args.check, &args.config_dir) {
        return check(&args.process, directory);
    }
    args.check()?;
    // Clients, which learn of its files, have another working directory.
    let directory = args.config_dir.as_ref().map(std::path::absolute).transpose();
    let directory = directory.map_err(|error| {
        Failure::run("find the working directory", error, "give --config-dir as an absolute path")
    })?;
    let signals = begin_process(&args.process, true)?;
    if let Err(error) = os::raise_open_files() {
        tracing::warn!(%error, "the limit on open files stays; each disk has some tens of them");
    }
    let disks = Disks::new(args.process.clone(), Mode::Many(directory));
    let taken = upgrade::take()?;
    if taken.is_none() {
        socket::refuse_passed()?;
    }
    run(&disks, signals, taken, |taken| {
        // Later reloads bring the disks of the directory to the files' present state, as before.
        if let Some(Taken { disks: all, failed, upgraded, .. }) = taken {
            let lost = disks.take_over(std::mem::take(all));
            lost.into_iter().for_each(|name| upgraded.has_lost(name));
            disks.retry_all(std::mem::take(failed));
        }
        Ok(None)
    })
}

/// Blocks the signals and starts the log. `reloads`: SIGHUP reads the configuration again.
fn begin_process(process: &ProcessArgs, reloads: bool) -> Result<Blocked, Failure> {
    let signals = signals::block(reloads)?;
    log::start(process.log_level, process.log_format)?;
    Ok(signals)
}

/// Checks the files of a directory, and prints each error.
fn check(process: &ProcessArgs, directory: &Path) -> Result<(), Failure> {
    process.check()?;
    let (failures, count) = check_files(process, directory)?;
    for failure in &failures {
        let _ = writeln!(std::io::stderr(), "vhost-blk: {failure}"); // stderr may be gone
    }
    let of = |count: usize, noun: &str| match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    };
    match failures.len() {
        0 => {
            let _ = writeln!(std::io::stdout(), "{} can be used", of(count, "file")); // the status tells it, too
            Ok(())
        }
        errors => {
            let why = format!("{} in {}", of(errors, "error"), of(count, "file"));
            Err(Failure::usage("use all of the configuration", why, "see the lines above"))
        }
    }
}

/// Runs the process. `begin` adds the disk of `serve`, or those of an earlier program; it may leave one to be served
/// after the other sockets are there. The disks of the directory come last: none of them delays the control socket.
fn run(
    disks: &Arc<Disks>,
    signals: Blocked,
    mut taken: Option<Taken>,
    begin: impl FnOnce(Option<&mut Taken>) -> Result<Option<Opened>, Failure>,
) -> Result<(), Failure> {
    let files = SocketFiles::default();
    begin_pidfile(disks, taken.as_mut(), &files)?;
    // A reload by a signal waits for the first disks.
    let turn = disks.turn_of_reload();
    let gate = handle_signals(disks, signals, &files)?;
    let is_first = taken.is_none();
    if !is_first {
        // Only set here.
        let _ = disks.upgraded.set(SystemTime::now());
    }
    let begun = begin(taken.as_mut());
    // The client of an upgrade may ask for the next one.
    let turn = is_first.then_some(turn);
    let begun = begun.and_then(|first| start(disks, taken, first, &files, gate));
    let begun = begun.and_then(|()| match (&disks.mode, &turn) {
        // A disk that fails or hangs is listed, and hurts no other.
        (Mode::Many(Some(_)), Some(turn)) => disks.reload_now(turn).map(drop),
        _ => Ok(()),
    });
    drop(turn);
    let begun = begun.and_then(|()| write_pidfile(disks, &files));
    let begun = begun.or_else(|failure| match disks.is_stopping() {
        // A signal may precede the first disk, above all one that an earlier program has left.
        true => {
            tracing::info!(%failure, "stopped during the start");
            Ok(())
        }
        false => Err(failure),
    });
    if let Err(failure) = &begun {
        disks.stop();
        if !disks.wait_at_most(Duration::ZERO) {
            tracing::error!(%failure, "the start has failed: ending its disks");
        }
        if signals::wait_for_end(|| disks.remaining()) != Remaining::NOTHING {
            disks.remove_socket_files();
            disks.remove_parts();
        }
    } else {
        log_ready(disks);
        disks.tell_manager_from_now("READY=1");
        watchdog::start(disks);
        disks.wait();
        notify::notify("STOPPING=1");
        disks.end_streams(true);
    }
    files.lock().unwrap_or_else(PoisonError::into_inner).clear();
    begun
}

/// Logs what a daemon serves besides its disks. `serve` logs its disk.
fn log_ready(disks: &Disks) {
    if let Mode::Many(directory) = &disks.mode {
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            control = disks.process.control_path.as_ref().map(|path| path.display().to_string()),
            config = directory.as_ref().map(|path| path.display().to_string()),
            "ready"
        );
    }
}

/// Creates the sockets of the process, serves the `first` disk, and answers clients.
fn start(
    disks: &Arc<Disks>,
    mut taken: Option<Taken>,
    first: Option<Opened>,
    files: &SocketFiles,
    gate: Gate,
) -> Result<(), Failure> {
    let inherited = taken.as_mut().and_then(|taken| taken.control.take());
    let (commands, control) = command_socket(&disks.process, inherited, files)?.unzip();
    let inherited = taken.as_mut().and_then(|taken| taken.metrics.take());
    let opened = match metrics_socket(&disks.process, inherited, files) {
        // The guests go on.
        Err(failure) if taken.is_some() => {
            tracing::error!("{failure}");
            None
        }
        opened => opened?,
    };
    let (scrapes, metrics) = opened.unzip();
    if let Some(control) = control {
        // Only set here.
        let _ = disks.upgrader.set(Upgrader::new(upgrade::Sockets { control, metrics }, gate));
    }
    let places = control::Places::default();
    // Clients wait in the backlogs until there is a disk.
    first.map_or(Ok(()), |first| disks.launch(first))?;
    if let Some(Taken { client, upgraded, reload_is_due, .. }) = taken {
        control::welcome(client, Arc::clone(disks), upgraded, places.clone())?;
        if reload_is_due {
            reload_apart(disks);
        }
    }
    commands.map_or(Ok(()), |commands| control::start(commands, Arc::clone(disks), places))?;
    scrapes.map_or(Ok(()), |scrapes| scrapes.start(Arc::clone(disks)))
}

/// Takes over the file of the process id, or checks that it can be had before anything is served.
fn begin_pidfile(
    disks: &Disks,
    taken: Option<&mut Taken>,
    files: &SocketFiles,
) -> Result<(), Failure> {
    let is_first = taken.is_none();
    match (taken.and_then(|taken| taken.pidfile.take()), &disks.process.pidfile) {
        (Some(taken), _) => keep_pidfile(disks, taken, files),
        // Before a guest is served: the file is written when all disks have started.
        (None, Some(path)) if is_first => {
            pidfile::check(path)?;
            pidfile::check_directory(path)
        }
        (None, _) => Ok(()),
    }
}

/// Writes the file of the process id: the process is ready.
fn write_pidfile(disks: &Disks, files: &SocketFiles) -> Result<(), Failure> {
    let Some(path) = &disks.process.pidfile else { return Ok(()) };
    if disks.pidfile.get().is_some() {
        return Ok(());
    }
    let written = pidfile::write(path);
    let kept = written.and_then(|(lock, file)| keep_pidfile(disks, (lock, Some(file)), files));
    match kept {
        // The guests go on.
        Err(failure) if disks.upgraded.get().is_some() => {
            tracing::error!("{failure}");
            Ok(())
        }
        kept => kept,
    }
}

fn keep_pidfile(
    disks: &Disks,
    (lock, file): TakenSocket,
    files: &SocketFiles,
) -> Result<(), Failure> {
    let kept = upgrade::Socket::of(&lock, file.as_ref()).map_err(no_descriptor)?;
    // Only set here.
    let _ = disks.pidfile.set(kept);
    files.lock().unwrap_or_else(PoisonError::into_inner).extend(file);
    Ok(())
}

fn handle_signals(
    disks: &Arc<Disks>,
    signals: Blocked,
    files: &SocketFiles,
) -> Result<Gate, Failure> {
    let (stopping, looked_at) = (Arc::clone(disks), Arc::clone(disks));
    let (last, files) = (Arc::clone(disks), Arc::clone(files));
    let reload: Option<Box<dyn FnMut() + Send>> = match &disks.mode {
        Mode::One => None,
        Mode::Many(_) => {
            let disks = Arc::clone(disks);
            Some(Box::new(move || reload_apart(&disks)))
        }
    };
    let acts = Acts {
        stop: Box::new(move |reason| stopping.stop_for(reason)),
        reload,
        remaining: Box::new(move || looked_at.remaining()),
        last: Box::new(move || {
            last.end_streams(false);
            last.remove_socket_files();
            last.remove_parts();
            files.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }),
    };
    signals::install(signals, acts)
}

/// Reads the configuration again, on a thread of its own: a disk may delay it.
fn reload_apart(disks: &Arc<Disks>) {
    if !disks.request_reload() {
        return;
    }
    let of_thread = Arc::clone(disks);
    let body = move || {
        notify::notify(&notify::reloading());
        if let Err(failure) = of_thread.reload_as_requested() {
            tracing::error!("{failure}");
        }
        of_thread.tell_manager_from_now("READY=1");
    };
    if let Err(error) = std::thread::Builder::new().name("reload".into()).spawn(body) {
        disks.withdraw_reload();
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
        None => metrics::Listener::open(address, socket::metrics_access(args)?)?,
    };
    let for_later = upgrade::Socket::of(&listener, file.as_ref()).map_err(no_descriptor)?;
    files.lock().unwrap_or_else(PoisonError::into_inner).extend(file);
    Ok(Some((listener, for_later)))
}

/// Creates the control socket.
fn command_socket(
    args: &ProcessArgs,
    taken: Option<TakenSocket>,
    files: &SocketFiles,
) -> Result<Option<(UnixListener, upgrade::Socket)>, Failure> {
    let Some(path) = &args.control_path else { return Ok(None) };
    let (listener, file) = match taken {
        Some((socket, file)) => (socket.into(), file),
        None => {
            let (mode, group) = socket::control_access(args)?;
            let (listener, file) = socket_file::listen(path, mode, group)?;
            (listener, Some(file))
        }
    };
    let for_later = upgrade::Socket::of(&listener, file.as_ref()).map_err(no_descriptor)?;
    files.lock().unwrap_or_else(PoisonError::into_inner).extend(file);
    Ok(Some((listener, for_later)))
}

fn no_descriptor(error: std::io::Error) -> Failure {
    Failure::run(
        "keep a socket or the pid file",
        error,
        "raise the limit on open files (ulimit -n)",
    )
}
