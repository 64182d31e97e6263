// SPDX-License-Identifier: Apache-2.0
//! The threads of the io_uring data plane, shared by any number of disks.

use crate::affinity::pin_this_thread;
use crate::batch_size::BatchSize;
use crate::error::StartError;
use crate::eventfd_watch;
use crate::limits::{Limiter, Limits, Member};
use crate::mail::{Mail, Postbox};
use crate::plane::{Coalesce, IoPoll};
use crate::uring::Uring;
use crate::uring_plane::UringPlane;
use crate::worker::Worker;
use backend::Disk;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
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
    pub batch_size: Option<usize>,
    /// Coalescing of calls. It needs polling: a thread polls while it holds a call.
    pub coalesce: Coalesce,
    /// Register guest memory as fixed buffers, which pins it.
    pub pin_memory: bool,
    /// Use of an `IOPOLL` ring for reads and writes.
    pub iopoll: IoPoll,
}

/// Threads of the io_uring data plane, shared by any number of disks. Cheap to clone. The threads
/// end with the last handle; each [`UringPlane`] has one.
#[derive(Clone)]
pub struct UringPool(Arc<Threads>);

struct Threads {
    options: UringOptions,
    threads: Vec<Thread>,
    /// Number of disks so far.
    disks: AtomicUsize,
    /// The groups of disks that share limits. A group ends with its last disk.
    limit_groups: Mutex<BTreeMap<String, Arc<Limiter>>>,
}

struct Thread {
    postbox: Postbox,
    handle: Option<JoinHandle<()>>,
}

impl UringPool {
    /// Starts the threads, each with its ring. The process gets a handler of SIGURG, which interrupts a thread whose
    /// front-end has blocked an eventfd.
    ///
    /// # Errors
    /// [`StartError`]; the threads that have started end.
    pub fn new(options: &UringOptions) -> Result<Self, StartError> {
        eventfd_watch::start().map_err(StartError::Thread)?;
        let options = options.clone();
        let mut pool = Threads {
            options,
            threads: Vec::new(),
            disks: AtomicUsize::new(0),
            limit_groups: Mutex::default(),
        };
        for number in 0..pool.options.threads.max(1) {
            let thread = start_thread(number, pool.options.clone())?;
            pool.threads.push(thread);
        }
        Ok(UringPool(Arc::new(pool)))
    }

    /// Adds a disk: opens a lane of it for each thread.
    ///
    /// # Errors
    /// [`StartError`]; the other disks are not affected.
    pub fn add_disk(&self, disk: Arc<dyn Disk>) -> Result<UringPlane, StartError> {
        // Queue 0 is the busiest of most disks: each disk begins with another thread.
        let first_thread = self.0.disks.fetch_add(1, Ordering::Relaxed) % self.0.threads.len();
        UringPlane::in_pool(self.clone(), disk, first_thread)
    }

    /// The first thread that does not answer within `limit`; `None`: all of them do.
    ///
    /// A thread answers between two turns of its loop. It does not wait for storage there, so
    /// requests in flight delay no answer, however long they take.
    pub fn silent_thread(&self, limit: Duration) -> Option<usize> {
        let deadline = Instant::now() + limit;
        let answers: Vec<_> = self.postboxes().map(|post| post.request(Mail::Ping)).collect();
        answers.into_iter().position(|answer| !answer.arrives_before(deadline))
    }

    pub(crate) fn options(&self) -> &UringOptions {
        &self.0.options
    }

    /// Adds a disk to a group of disks that share limits; a new group has none.
    pub(crate) fn join_limit_group(&self, name: &str) -> Member {
        let mut groups = self.limit_groups();
        let group = groups.entry(name.to_owned()).or_insert_with(|| Limiter::new(Some(name)));
        group.join()
    }

    /// The limits of a group; `None`: it has no disk.
    pub(crate) fn limits_of_group(&self, name: &str) -> Option<Limits> {
        self.limit_groups().get(name).map(|group| group.limits())
    }

    /// The groups that have disks.
    fn limit_groups(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Limiter>>> {
        let groups = self.0.limit_groups.lock();
        let mut groups = groups.unwrap_or_else(PoisonError::into_inner);
        groups.retain(|_, group| group.has_members());
        groups
    }

    /// The postboxes of the threads.
    pub(crate) fn postboxes(&self) -> impl Iterator<Item = &Postbox> {
        self.0.threads.iter().map(|thread| &thread.postbox)
    }

    /// The postbox of a thread.
    pub(crate) fn postbox(&self, thread: usize) -> &Postbox {
        &self.0.threads[thread].postbox
    }

    /// Number of threads; never 0.
    pub(crate) fn threads(&self) -> usize {
        self.0.threads.len()
    }
}

impl Drop for Threads {
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

fn start_thread(number: usize, options: UringOptions) -> Result<Thread, StartError> {
    let wake = EventFd::new(EFD_NONBLOCK).map_err(StartError::Thread)?;
    let worker_fd = wake.try_clone().map_err(StartError::Thread)?;
    let (postbox, inbox) = Postbox::new(wake);
    let (started, outcome) = channel();
    let body = move || match build_worker(number, &options, inbox, worker_fd) {
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

/// Builds the worker on its own thread, because a ring belongs to the thread that made it.
fn build_worker(
    number: usize,
    options: &UringOptions,
    inbox: Receiver<Mail>,
    mail_fd: EventFd,
) -> Result<Worker, StartError> {
    if let Some(&cpu) = options.cpus.get(number % options.cpus.len().max(1)) {
        pin_this_thread(cpu).map_err(|error| StartError::Cpu(cpu, error))?;
    }
    let uring = Uring::new().map_err(StartError::Uring)?;
    if let Err(error) = uring.start_io_workers(&options.cpus) {
        tracing::warn!(%error, "the kernel's worker threads of io_uring are neither bounded nor kept on --cpus");
    }
    let batch_size = BatchSize::new(options.batch_size);
    Ok(Worker::new(uring, options.poll_max, batch_size, options.coalesce, inbox, mail_fd))
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
        let directory = tempfile::tempdir().unwrap();
        let mark = directory.path().join("mark");
        let test = std::thread::current().name().unwrap().to_owned();
        let mut again = Command::new(std::env::current_exe().unwrap());
        let output = again.args(["--exact", &test]).env(MARK, &mark).output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
        assert!(!mark.exists(), "the owner was dropped");
        run_or_abort(Owner(mark.clone()), |_| ());
        assert!(mark.exists());
    }
}
