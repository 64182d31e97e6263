// SPDX-License-Identifier: Apache-2.0
//! The servers of sockets: the daemon as a program, or a device on a thread of the helper.

use std::fs::{self, File, OpenOptions};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, bail};
use backend::Disk;
use data_plane::{
    Coalesce, IoPoll, KernelOptions, Limits, PlaneChoice, PlaneKind, PlaneSelector, UringOptions,
    UringPlane,
};
use rustix::process::Signal;
use vhost_user::{Device, DeviceOptions};

use super::journal::{Journal, Log};
use super::liar;
use kit::daemon::Daemon;
use kit::disks::Lie;

const QUEUES: u16 = 8;
const QUEUE_SIZE_MAX: u16 = 1024;

/// A server of a socket.
pub(super) struct Served {
    socket: PathBuf,
    kind: Kind,
}

enum Kind {
    Daemon(Daemon),
    Thread { thread: JoinHandle<()>, stop: Arc<AtomicBool>, log: Option<Log> },
}

/// Path of a daemon's control socket.
fn control_of(socket: &Path) -> PathBuf {
    socket.with_extension("control")
}

impl Served {
    /// Starts the daemon that lies beside this program, with more arguments.
    pub(super) fn daemon(socket: &Path, log: &Path, args: &[String]) -> Result<Self> {
        let program = std::env::current_exe()?.with_file_name("vhost-blk");
        let mut words = vec![program.to_string_lossy().into_owned(), "serve".to_owned()];
        words.push(format!("--socket-path={}", socket.display()));
        words.push(format!("--control-path={}", control_of(socket).display()));
        words.extend(args.iter().cloned());
        let daemon = Daemon::start_echoed(words, socket, log)?;
        Ok(Self { socket: socket.to_owned(), kind: Kind::Daemon(daemon) })
    }

    /// Starts a disk that records all writes.
    pub(super) fn journal(socket: &Path, bytes: u64, physical_block_bytes: u32) -> Result<Self> {
        let (journal, log) = Journal::new(bytes, physical_block_bytes)?;
        let disk: Arc<dyn Disk> = Arc::new(journal);
        Self::on_thread(socket, Some(log), move |stream| {
            if let Err(why) = serve_disk(&disk, stream) {
                eprintln!("helper: journal: {why:#}");
            }
        })
    }

    /// Starts a lying device.
    pub(super) fn liar(socket: &Path, lie: Lie, after: u32, seed: u64) -> Result<Self> {
        Self::on_thread(socket, None, move |stream| {
            if let Err(why) = liar::serve(&stream, lie, after, seed) {
                eprintln!("helper: liar: {why:#}");
            }
        })
    }

    /// Serves one connection after another until it is stopped.
    fn on_thread(
        socket: &Path,
        log: Option<Log>,
        mut serve: impl FnMut(UnixStream) + Send + 'static,
    ) -> Result<Self> {
        let listener = UnixListener::bind(socket)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let body = move || {
            for stream in listener.incoming() {
                match stream {
                    Ok(stream) if !stopped.load(Ordering::Acquire) => serve(stream),
                    _ => return,
                }
            }
        };
        let thread = std::thread::Builder::new().name("device".into()).spawn(body)?;
        Ok(Self { socket: socket.to_owned(), kind: Kind::Thread { thread, stop, log } })
    }

    /// The socket it listens on.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The entries of a journal.
    pub(super) fn log(&self) -> Result<&Log> {
        match &self.kind {
            Kind::Thread { log: Some(log), .. } => Ok(log),
            _ => bail!("{} is no journal", self.socket.display()),
        }
    }

    /// Sends a signal to a daemon.
    pub(super) fn signal(&mut self, name: &str) -> Result<()> {
        let Kind::Daemon(daemon) = &self.kind else { bail!("only a daemon takes signals") };
        let signal = match name {
            "STOP" => Signal::STOP,
            "CONT" => Signal::CONT,
            "TERM" => Signal::TERM,
            "KILL" => Signal::KILL,
            other => bail!("no signal {other} here"),
        };
        daemon.signal(signal)
    }

    /// Sends a command to a daemon.
    pub(super) fn control(&self, words: &[String]) -> Result<()> {
        let Kind::Daemon(_) = &self.kind else { bail!("only a daemon takes commands") };
        let program = std::env::current_exe()?.with_file_name("vhost-blk");
        let control = control_of(&self.socket);
        let (program, control) = (program.to_string_lossy(), control.to_string_lossy());
        let start: [&str; 4] = [&program, "ctl", "--control-path", &control];
        let words: Vec<&str> = start.into_iter().chain(words.iter().map(String::as_str)).collect();
        kit::process::run_to_end(&words).map(drop)
    }

    /// Ends the server; its front-end has disconnected.
    pub(super) fn stop(self) -> Result<()> {
        match self.kind {
            Kind::Daemon(daemon) => {
                daemon.end()?;
                let _ = fs::remove_file(&self.socket);
            }
            Kind::Thread { thread, stop, .. } => {
                stop.store(true, Ordering::Release);
                // Wakes the accept.
                drop(UnixStream::connect(&self.socket)?);
                fs::remove_file(&self.socket)?;
                if thread.join().is_err() {
                    bail!("the device's thread panicked");
                }
            }
        }
        Ok(())
    }
}

/// Serves a disk through this project's own device.
fn serve_disk(disk: &Arc<dyn Disk>, stream: UnixStream) -> Result<()> {
    let (poll_max, cpus) = (Duration::ZERO, Vec::new());
    let options = UringOptions {
        threads: 2,
        cpus: cpus.clone(),
        poll_max,
        batch_size: None,
        pin_memory: false,
        coalesce: Coalesce::Off,
        iopoll: IoPoll::Off,
    };
    let plane = UringPlane::new(Arc::clone(disk), &options)?;
    let kernel = KernelOptions {
        batch_size: None,
        path: data_plane::DEVICE_PATH.into(),
        workers: 1,
        cpus,
        poll_max,
        pin_memory: false,
        coalesce: Coalesce::Off,
        iopoll: IoPoll::Off,
        seg_max: vhost_user::seg_max(QUEUE_SIZE_MAX),
        num_queues: QUEUES,
        queue_size_max: QUEUE_SIZE_MAX,
        limits: Limits::NONE,
        watches_time: false,
        errors: Default::default(),
    };
    let choice = PlaneChoice::Only(PlaneKind::Uring);
    let planes = PlaneSelector::new(Arc::clone(disk), plane, kernel, choice)?;
    let options = DeviceOptions {
        num_queues: QUEUES,
        queue_size_max: QUEUE_SIZE_MAX,
        serial: "a journal".to_owned(),
        packed: true,
        writeback: true,
    };
    Ok(Device::new(Arc::clone(disk), planes, options)?.serve(stream, None)?)
}

/// Creates an empty file of a size.
pub(super) fn sized_file(path: &Path, bytes: u64) -> Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
    file.set_len(bytes)?;
    Ok(file)
}
