// SPDX-License-Identifier: Apache-2.0
//! The io_uring data plane: the control plane's handle on its threads.

use crate::error::{KernelError, QueueStartError, StartError};
use crate::limits::{Limiter, Limits};
use crate::mail::{Answer, Mail, Postbox};
use crate::plane::{DataPlane, IoPoll, KeptRequests, QueueReport, QueueSetup, QueueState};
use crate::portion::Portion;
use crate::submit::Storage;
use crate::uring::Uring;
use crate::worker::Worker;
use backend::Disk;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use virtqueue::{GuestMemory, VirtQueue};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Options of the io_uring data plane.
#[derive(Clone, Debug)]
pub struct UringOptions {
    /// Number of threads; queues are distributed over them.
    pub threads: usize,
    /// CPUs to pin the threads to, in turn; empty: no thread is pinned.
    pub cpus: Vec<usize>,
    /// Maximum time to poll before a thread sleeps; zero: no polling.
    pub poll_max: Duration,
    /// Requests that a queue hands to the storage, and completions that a thread shows to drivers,
    /// at a time; `None`: each thread finds the best number.
    pub portion: Option<usize>,
    /// Register guest memory as fixed buffers, which pins it.
    pub pin_memory: bool,
    /// Use of an `IOPOLL` ring for reads and writes.
    pub iopoll: IoPoll,
}

/// The io_uring data plane of one disk. Dropping it ends its threads; stop all queues before.
pub struct UringPlane {
    disk: Arc<dyn Disk>,
    limiter: Arc<Limiter>,
    threads: Vec<Thread>,
    queues: BTreeMap<u16, Place>,
    pin_memory: bool,
    /// Kept while it is registered.
    memory: Option<Arc<GuestMemory>>,
}

struct Thread {
    postbox: Postbox,
    handle: Option<JoinHandle<()>>,
}

/// The thread of a running queue, and the thread's number of the queue.
#[derive(Clone, Copy)]
struct Place {
    thread: usize,
    number: u16,
}

impl UringPlane {
    /// Starts the threads, each with its ring and its lane of `disk`.
    ///
    /// # Errors
    /// [`StartError`]; the threads that have started end.
    pub fn new(disk: Arc<dyn Disk>, options: &UringOptions) -> Result<Self, StartError> {
        let mut plane = UringPlane {
            disk: Arc::clone(&disk),
            limiter: Arc::new(Limiter::new()),
            threads: Vec::new(),
            queues: BTreeMap::new(),
            pin_memory: options.pin_memory,
            memory: None,
        };
        let iopoll = match options.iopoll {
            IoPoll::Auto => disk.info().io_poll,
            IoPoll::On => true,
            IoPoll::Off => false,
        };
        for number in 0..options.threads.max(1) {
            let cpu = options.cpus.get(number % options.cpus.len().max(1)).copied();
            let cpus = options.cpus.clone();
            let setup = WorkerSetup {
                cpu,
                cpus,
                iopoll,
                poll_max: options.poll_max,
                portion: options.portion,
                limiter: Arc::clone(&plane.limiter),
            };
            let thread = start_thread(Arc::clone(&disk), number, setup)?;
            plane.threads.push(thread);
        }
        Ok(plane)
    }

    /// Opens the lane of each thread anew, so that it has the present capacity of the disk. No queue
    /// may run.
    ///
    /// # Errors
    /// The first error of a thread, which keeps its old lane.
    pub fn reopen_lanes(&self) -> io::Result<()> {
        let reopen = |thread: &Thread| {
            thread.postbox.request(|reply| Mail::OpenLane(Arc::clone(&self.disk), reply))
        };
        let answers: Vec<_> = self.threads.iter().map(reopen).collect();
        let outcomes: Vec<_> = answers.into_iter().map(Answer::wait).collect();
        outcomes.into_iter().collect()
    }

    /// Replaces the limits of the disk.
    pub fn set_limits(&self, limits: &Limits) {
        self.limiter.set(limits);
        self.threads.iter().for_each(|thread| thread.postbox.send(Mail::Limits));
    }

    /// Makes the threads look at the health of the disk again.
    pub fn wake(&self) {
        self.threads.iter().for_each(|thread| thread.postbox.send(Mail::Wake));
    }

    fn place(&self, index: u16) -> (&Postbox, u16) {
        let Place { thread, number } = self.queues[&index];
        (&self.threads[thread].postbox, number)
    }
}

impl DataPlane for UringPlane {
    fn check(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn set_memory(&mut self, memory: Option<Arc<GuestMemory>>) {
        if !self.pin_memory {
            return;
        }
        for thread in &self.threads {
            let result = thread.postbox.ask(|reply| Mail::Memory(memory.clone(), reply));
            if let Err(error) = result {
                tracing::warn!(%error, "guest memory cannot be pinned; raise RLIMIT_MEMLOCK to its size, or set --pin-memory off; continuing without");
            }
        }
        self.memory = memory; // unmap the old memory only after the threads have unregistered it
    }

    fn start_queue(&mut self, setup: QueueSetup) -> Result<(), QueueStartError> {
        let ring = VirtQueue::start(&setup.ring)?;
        let (index, thread) = (setup.index, usize::from(setup.index) % self.threads.len());
        let queue = Box::new((setup, ring));
        let number = self.threads[thread].postbox.ask(|reply| Mail::Start(queue, reply));
        self.queues.insert(index, Place { thread, number });
        Ok(())
    }

    fn stop_queues(&mut self, indices: &[u16], kept: KeptRequests) -> Vec<QueueState> {
        let stop = |index: &u16| {
            let (postbox, number) = self.place(*index);
            postbox.request(|reply| Mail::Stop(number, kept, reply))
        };
        let answers: Vec<Answer<QueueState>> = indices.iter().map(stop).collect();
        let stopped = answers.into_iter().map(Answer::wait).collect();
        self.queues.retain(|index, _| !indices.contains(index));
        stopped
    }

    fn set_call(&mut self, index: u16, call: Option<File>) -> Result<(), KernelError> {
        let (postbox, number) = self.place(index);
        postbox.send(Mail::SetCall(number, call));
        Ok(())
    }

    /// The threads read the cache mode with every request.
    fn cache_mode_changed(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    fn device_counters(&self) -> io::Result<Vec<(String, String)>> {
        Ok(Vec::new())
    }

    fn queue_report(&self, index: u16, _: &[(String, String)]) -> QueueReport {
        let (postbox, number) = self.place(index);
        postbox.ask(|reply| Mail::State(number, reply)).report()
    }
}

impl Drop for UringPlane {
    fn drop(&mut self) {
        for thread in &self.threads {
            thread.postbox.send(Mail::Exit);
        }
        for thread in &mut self.threads {
            if let Some(handle) = thread.handle.take() {
                let _ = handle.join();
            }
        }
    }
}

/// Aborts the program if the thread panics.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Runs `body` on `owner`. Aborts the program if it panics: unwinding would free memory that the
/// kernel still writes to. The guard is a local variable, so it is dropped before `owner`.
fn run_or_abort<T>(mut owner: T, body: impl FnOnce(&mut T)) {
    let _guard = AbortOnPanic;
    body(&mut owner);
}

/// The set-up of one thread.
struct WorkerSetup {
    /// CPU of the thread.
    cpu: Option<usize>,
    /// CPUs of the kernel threads that work for it; empty: all.
    cpus: Vec<usize>,
    iopoll: bool,
    poll_max: Duration,
    portion: Option<usize>,
    limiter: Arc<Limiter>,
}

fn start_thread(
    disk: Arc<dyn Disk>,
    number: usize,
    setup: WorkerSetup,
) -> Result<Thread, StartError> {
    let wake = EventFd::new(EFD_NONBLOCK).map_err(StartError::Thread)?;
    let worker_fd = wake.try_clone().map_err(StartError::Thread)?;
    let (postbox, inbox) = Postbox::new(wake);
    let (started, outcome) = channel();
    let body = move || match build_worker(&*disk, &setup, inbox, worker_fd) {
        Ok(worker) => {
            let _ = started.send(Ok(()));
            run_or_abort(worker, Worker::run);
        }
        Err(error) => {
            let _ = started.send(Err(error));
        }
    };
    let name = format!("vhost-blk-{number}");
    let handle = std::thread::Builder::new().name(name).spawn(body).map_err(StartError::Thread)?;
    outcome.recv().expect("the thread reports its start")?;
    Ok(Thread { postbox, handle: Some(handle) })
}

/// Builds the worker on its own thread, because rings and lanes belong to the thread that made them.
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
    if let Err(error) = engine.bound_io_workers(&setup.cpus) {
        tracing::warn!(%error, "the kernel's worker threads of io_uring are neither bounded nor kept on --cpus; Linux 5.15 can do that");
    }
    let lane = disk.open_lane().map_err(StartError::Lane)?;
    engine.register_files(&lane.files()).map_err(StartError::Register)?;
    let storage = Storage { lane, engine, stalled: VecDeque::new() };
    let limiter = Arc::clone(&setup.limiter);
    Ok(Worker::new(storage, limiter, setup.poll_max, Portion::new(setup.portion), inbox, mail_fd))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::path::PathBuf;
    use std::process::Command;

    /// Path of the file that the owner makes when it is dropped.
    const MARK: &str = "VHOST_BLK_TEST_ABORT_MARK";

    struct Owner(PathBuf);

    impl Drop for Owner {
        fn drop(&mut self) {
            std::fs::write(&self.0, "dropped").unwrap();
        }
    }

    #[test]
    fn a_panic_aborts_before_the_memory_of_requests_is_freed() {
        if let Some(mark) = std::env::var_os(MARK) {
            return run_or_abort(Owner(mark.into()), |_| panic!("on purpose"));
        }
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        let test = std::thread::current().name().unwrap().to_owned();
        let mut again = Command::new(std::env::current_exe().unwrap());
        let output = again.args(["--exact", &test]).env(MARK, &mark).output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
        assert!(!mark.exists(), "the owner was dropped");
        run_or_abort(Owner(mark.clone()), |_| ());
        assert!(mark.exists());
    }
}
