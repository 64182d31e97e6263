// SPDX-License-Identifier: Apache-2.0
//! What can be behind a socket: the daemon as a program, or a device on a thread of the helper.

use std::fs::{self, File, OpenOptions};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use backend::Disk;
use data_plane::{DataPlane, IoPoll, KernelOptions, PlaneChoice, PlaneKind, PlaneOptions, Planes};
use rustix::process::{Pid, Signal, kill_process};
use vhost_user::{Device, DeviceOptions};

use super::journal::{Journal, Log};
use super::liar;
use crate::protocol::Lie;

const START_LIMIT: Duration = Duration::from_secs(10);
const QUEUES: u16 = 8;
const QUEUE_SIZE_MAX: u16 = 1024;

/// Something that serves a socket.
pub(super) struct Served {
    socket: PathBuf,
    kind: Kind,
}

enum Kind {
    Daemon(Child),
    Thread { thread: JoinHandle<()>, stop: Arc<AtomicBool>, log: Option<Log> },
}

impl Served {
    /// The daemon beside this program, with more arguments.
    pub(super) fn daemon(socket: &Path, log: &Path, args: &[String]) -> Result<Self> {
        let program = std::env::current_exe()?.with_file_name("vhost-blk");
        let log = OpenOptions::new().create(true).append(true).open(log)?;
        let mut child = tied_to_us(&program)
            .arg("serve")
            .arg(format!("--socket-path={}", socket.display()))
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| program.display().to_string())?;
        let end = Instant::now() + START_LIMIT;
        // Between bind and listen the file is there and nobody listens.
        while UnixStream::connect(socket).is_err() {
            if let Some(status) = child.try_wait()? {
                bail!("the daemon ended with {status}");
            }
            if Instant::now() > end {
                let _ = child.kill();
                bail!("the daemon does not listen");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Self { socket: socket.to_owned(), kind: Kind::Daemon(child) })
    }

    /// A disk that keeps all writes.
    pub(super) fn journal(socket: &Path, bytes: u64) -> Result<Self> {
        let (journal, log) = Journal::new(bytes)?;
        let disk: Arc<dyn Disk> = Arc::new(journal);
        Self::on_thread(socket, Some(log), move |stream| {
            if let Err(why) = serve_disk(&disk, stream) {
                eprintln!("helper: journal: {why:#}");
            }
        })
    }

    /// A device that lies.
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

    /// Where it listens.
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
        let Kind::Daemon(child) = &self.kind else { bail!("only a daemon takes signals") };
        let signal = match name {
            "STOP" => Signal::STOP,
            "CONT" => Signal::CONT,
            "TERM" => Signal::TERM,
            "KILL" => Signal::KILL,
            other => bail!("no signal {other} here"),
        };
        Ok(kill_process(Pid::from_child(child), signal)?)
    }

    /// Ends it; its front-end has gone.
    pub(super) fn stop(self) -> Result<()> {
        match self.kind {
            Kind::Daemon(mut child) => {
                child.kill()?;
                child.wait()?;
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

/// A command that ends with this process, however that ends.
fn tied_to_us(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Serves a disk by this project's own device.
fn serve_disk(disk: &Arc<dyn Disk>, stream: UnixStream) -> Result<()> {
    let (poll_max, cpus) = (Duration::ZERO, Vec::new());
    let options = PlaneOptions {
        threads: 2,
        cpus: cpus.clone(),
        poll_max,
        pin_memory: false,
        iopoll: IoPoll::Off,
    };
    let plane = DataPlane::new(Arc::clone(disk), &options)?;
    let kernel = KernelOptions {
        path: data_plane::DEVICE_PATH.into(),
        workers: 1,
        cpus,
        poll_max,
        pin_memory: false,
        iopoll: IoPoll::Off,
        seg_max: vhost_user::seg_max(QUEUE_SIZE_MAX),
        queue_size_max: QUEUE_SIZE_MAX,
    };
    let choice = PlaneChoice::Only(PlaneKind::Uring);
    let planes = Planes::new(Arc::clone(disk), plane, kernel, choice)?;
    let options = DeviceOptions {
        num_queues: QUEUES,
        queue_size_max: QUEUE_SIZE_MAX,
        serial: "a journal".to_owned(),
        packed: true,
        writeback: true,
    };
    Ok(Device::new(Arc::clone(disk), planes, options).serve(stream)?)
}

/// An empty file of a size.
pub(super) fn sized_file(path: &Path, bytes: u64) -> Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
    file.set_len(bytes)?;
    Ok(file)
}
