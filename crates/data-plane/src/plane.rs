// SPDX-License-Identifier: Apache-2.0
//! The control plane's handle on the data-plane threads.

use crate::region::InflightRegion;
use crate::running::QueueStats;
use crate::submit::Storage;
use crate::uring::Uring;
use crate::worker::Worker;
use backend::Disk;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use virtio_blk::DiskView;
use virtqueue::{GuestMemory, Layout, VirtQueue};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// How the data plane runs.
#[derive(Clone, Debug)]
pub struct PlaneOptions {
    /// Number of threads; queues are spread over them.
    pub threads: usize,
    /// CPUs to pin the threads to, in turn; empty: none is pinned.
    pub cpus: Vec<usize>,
    /// Longest time to poll before sleeping; zero: never poll.
    pub poll_max: Duration,
    /// Register guest memory as fixed buffers, which pins it.
    pub pin_memory: bool,
    /// Use an `IOPOLL` ring for reads and writes.
    pub iopoll: IoPoll,
}

/// When reads and writes go through an `IOPOLL` ring: the kernel then polls the device's poll
/// queues instead of taking its interrupts, and the thread spins while I/O is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoPoll {
    /// Where the device has poll queues.
    Auto,
    /// Always; I/O fails where the device has none.
    On,
    /// Never.
    Off,
}

/// A complete queue, ready to run.
#[derive(Debug)]
pub struct QueueStart {
    /// The device's number of the queue.
    pub index: u16,
    /// The ring, at the position where to go on.
    pub ring: VirtQueue,
    /// Its layout.
    pub layout: Layout,
    /// What the driver may do with the disk.
    pub disk: DiskView,
    /// Kick eventfd; without one the ring is polled.
    pub kick: Option<File>,
    /// Call eventfd; without one the driver polls.
    pub call: Option<File>,
    /// Signalled at a ring fault.
    pub err: Option<File>,
    /// Where to keep track of chains in flight.
    pub region: Option<Arc<InflightRegion>>,
}

/// Names a started queue.
#[derive(Debug)]
#[must_use = "a started queue must be stopped"]
pub struct QueueHandle {
    worker: usize,
    number: u16,
}

/// The state of a stopped queue; nothing of it is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueStopped {
    /// Where to go on, as in vhost-user's GET_VRING_BASE.
    pub base: u32,
    /// What it did.
    pub stats: QueueStats,
    /// It was stopped by a ring fault.
    pub faulted: bool,
}

/// Why the data plane cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No io_uring.
    #[error(
        "cannot set an io_uring up: {0}; allow it (sysctl kernel.io_uring_disabled=0, and no \
         seccomp filter or container profile against it)"
    )]
    Uring(io::Error),
    /// The disk gave no lane.
    #[error("cannot open the disk for a data-plane thread: {0}")]
    Lane(io::Error),
    /// A file could not be registered.
    #[error("cannot register the disk's file with io_uring: {0}")]
    Register(io::Error),
    /// No thread or eventfd.
    #[error("cannot start a data-plane thread: {0}; raise the limits on threads and open files")]
    Thread(io::Error),
    /// A thread cannot be pinned.
    #[error("cannot pin a data-plane thread to CPU {0}: {1}; name CPUs this process may use")]
    Cpu(usize, io::Error),
}

/// What the control plane tells a thread.
pub(crate) enum Mail {
    Start(Box<QueueStart>, Sender<u16>),
    Stop(u16, Sender<QueueStopped>),
    SetCall(u16, Option<File>),
    Stats(u16, Sender<QueueStats>),
    Memory(Option<Arc<GuestMemory>>, Sender<io::Result<()>>),
    Exit,
}

struct Thread {
    mail: Sender<Mail>,
    mail_fd: EventFd,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    fn send(&self, mail: Mail) {
        self.mail.send(mail).expect("the thread ends only when told to");
        self.mail_fd.write(1).expect("the mail counter never fills up");
    }

    /// Sends what `mail` makes of a reply channel, and waits for the reply.
    fn ask<T>(&self, mail: impl FnOnce(Sender<T>) -> Mail) -> T {
        let (reply, answer) = channel();
        self.send(mail(reply));
        answer.recv().expect("the thread answers before it ends")
    }
}

/// The data-plane threads of one disk. Dropping it ends them; stop all queues first.
pub struct DataPlane {
    threads: Vec<Thread>,
    pin_memory: bool,
    /// Kept while registered.
    memory: Option<Arc<GuestMemory>>,
}

impl DataPlane {
    /// Starts the threads, each with its ring and its lane of `disk`.
    ///
    /// # Errors
    /// [`StartError`]; threads started before the failure are ended.
    pub fn new(disk: Arc<dyn Disk>, options: &PlaneOptions) -> Result<Self, StartError> {
        let mut plane =
            DataPlane { threads: Vec::new(), pin_memory: options.pin_memory, memory: None };
        let iopoll = match options.iopoll {
            IoPoll::Auto => disk.info().io_poll,
            IoPoll::On => true,
            IoPoll::Off => false,
        };
        for number in 0..options.threads.max(1) {
            let cpu = options.cpus.get(number % options.cpus.len().max(1)).copied();
            let setup = WorkerSetup { cpu, iopoll, poll_max: options.poll_max };
            let thread = start_thread(Arc::clone(&disk), number, setup)?;
            plane.threads.push(thread);
        }
        Ok(plane)
    }

    /// Tells the threads of new guest memory (`None`: none any more). No queue may be running.
    pub fn set_memory(&mut self, memory: Option<Arc<GuestMemory>>) {
        if !self.pin_memory {
            return;
        }
        for thread in &self.threads {
            let result = thread.ask(|reply| Mail::Memory(memory.clone(), reply));
            if let Err(error) = result {
                tracing::warn!(%error, "guest memory cannot be pinned; raise RLIMIT_MEMLOCK to its size, or set --pin-memory off; going on without");
            }
        }
        self.memory = memory; // unmapped only after the threads forgot it
    }

    /// Hands a queue to its thread.
    pub fn start_queue(&self, start: QueueStart) -> QueueHandle {
        let worker = usize::from(start.index) % self.threads.len();
        let number = self.threads[worker].ask(|reply| Mail::Start(Box::new(start), reply));
        QueueHandle { worker, number }
    }

    /// Takes a queue back: nothing more is taken, what is in flight completes, and the state is
    /// returned.
    pub fn stop_queue(&self, queue: QueueHandle) -> QueueStopped {
        self.threads[queue.worker].ask(|reply| Mail::Stop(queue.number, reply))
    }

    /// What a running queue did since it was started.
    pub fn queue_stats(&self, queue: &QueueHandle) -> QueueStats {
        self.threads[queue.worker].ask(|reply| Mail::Stats(queue.number, reply))
    }

    /// Replaces the call eventfd of a running queue, without waiting for its I/O.
    pub fn set_call(&self, queue: &QueueHandle, call: Option<File>) {
        self.threads[queue.worker].send(Mail::SetCall(queue.number, call));
    }
}

impl Drop for DataPlane {
    fn drop(&mut self) {
        for thread in &self.threads {
            thread.send(Mail::Exit);
        }
        for thread in &mut self.threads {
            if let Some(handle) = thread.handle.take() {
                let _ = handle.join();
            }
        }
    }
}

/// Ends the program when the thread panics: unwinding would free memory that the kernel still
/// writes to.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// What one thread is made with.
struct WorkerSetup {
    cpu: Option<usize>,
    iopoll: bool,
    poll_max: Duration,
}

fn start_thread(
    disk: Arc<dyn Disk>,
    number: usize,
    setup: WorkerSetup,
) -> Result<Thread, StartError> {
    let mail_fd = EventFd::new(EFD_NONBLOCK).map_err(StartError::Thread)?;
    let worker_fd = mail_fd.try_clone().map_err(StartError::Thread)?;
    let (mail, inbox) = channel();
    let (started, outcome) = channel();
    let body = move || {
        let _guard = AbortOnPanic;
        match build_worker(&*disk, &setup, inbox, worker_fd) {
            Ok(worker) => {
                let _ = started.send(Ok(()));
                worker.run();
            }
            Err(error) => {
                let _ = started.send(Err(error));
            }
        }
    };
    let name = format!("vhost-blk-{number}");
    let handle = std::thread::Builder::new().name(name).spawn(body).map_err(StartError::Thread)?;
    outcome.recv().expect("the thread reports its start")?;
    Ok(Thread { mail, mail_fd, handle: Some(handle) })
}

/// Runs on the new thread: rings and lanes belong to the thread that made them.
fn build_worker(
    disk: &dyn Disk,
    setup: &WorkerSetup,
    inbox: Receiver<Mail>,
    mail_fd: EventFd,
) -> Result<Worker, StartError> {
    if let Some(cpu) = setup.cpu {
        crate::affinity::pin_this_thread(cpu).map_err(|error| StartError::Cpu(cpu, error))?;
    }
    let mut engine = Uring::new(setup.iopoll).map_err(StartError::Uring)?;
    let lane = disk.open_lane().map_err(StartError::Lane)?;
    engine.register_files(&lane.files()).map_err(StartError::Register)?;
    let storage = Storage { lane, engine, stalled: VecDeque::new() };
    Ok(Worker::new(storage, setup.poll_max, inbox, mail_fd))
}
