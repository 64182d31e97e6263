// SPDX-License-Identifier: Apache-2.0
//! The kernel threads that run the queues: the workers of vhost. They are threads of this process
//! named `vhost-` plus a number. The kernel starts the first one with the device.

use super::device::VhostBlk;
use crate::affinity;
use crate::error::KernelError;
use std::collections::HashSet;
use std::fs;
use std::sync::{Mutex, PoisonError};

/// The workers of one open device; queues are distributed over them in turn.
#[derive(Debug)]
pub(super) struct Workers {
    /// Ids of the workers. `None`: the device's first worker, and workers that do not exist yet.
    slots: Vec<Option<u32>>,
    cpus: Vec<usize>,
    /// The vhost core supports only one worker.
    only_one: bool,
}

impl Workers {
    /// Runs `own`, which sets the owner and so starts the first worker of the device, and pins this worker.
    ///
    /// # Errors
    /// The errors of `own`.
    pub(super) fn start(
        count: usize,
        cpus: &[usize],
        own: impl FnOnce() -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        let slots = vec![None; count.max(1)];
        let workers = Workers { slots, cpus: cpus.to_vec(), only_one: false };
        workers.pinned(0, own)?;
        Ok(workers)
    }

    /// Attaches queue `index` to its worker, or leaves it to the only worker.
    pub(super) fn serve(&mut self, device: &VhostBlk, index: u16) {
        let slot = usize::from(index) % self.slots.len();
        if slot == 0 || self.only_one {
            return;
        }
        let worker = match self.slots[slot] {
            Some(id) => Ok(id),
            None => self.pinned(slot, || device.new_worker()),
        };
        let attached = worker.and_then(|id| {
            self.slots[slot] = Some(id);
            device.attach_worker(index, id)
        });
        if let Err(error) = attached {
            crate::log_once_per_second!(
                warn,
                queue = index,
                %error,
                "the queue has no own kernel worker and shares one"
            );
            self.only_one = error.is_unknown_call();
        }
    }

    /// Runs `start`, which starts a worker, and pins it to the CPU of `slot`.
    fn pinned<T>(
        &self,
        slot: usize,
        start: impl FnOnce() -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        /// A comparison finds the new thread: no other device may start one meanwhile, pinned or not.
        static STARTING: Mutex<()> = Mutex::new(());
        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if self.cpus.is_empty() {
            return start();
        }
        let known = vhost_threads();
        let started = start()?;
        pin_new(&known, self.cpus[slot % self.cpus.len()]);
        Ok(started)
    }
}

/// Pins the workers that are not in `known` to `cpu`.
fn pin_new(known: &HashSet<i32>, cpu: usize) {
    let now = vhost_threads();
    let mut new = now.difference(known).peekable();
    if new.peek().is_none() {
        tracing::warn!(cpu, "the kernel's worker is no thread of this process: it is not pinned");
    }
    for &thread in new {
        if let Err(error) = affinity::pin_thread(thread, cpu) {
            tracing::warn!(cpu, %error, "the kernel's worker cannot be pinned");
        }
    }
}

/// The ids of this process's vhost workers.
fn vhost_threads() -> HashSet<i32> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let is_worker = |id: &i32| {
        let name = fs::read_to_string(format!("/proc/self/task/{id}/comm")).unwrap_or_default();
        is_worker_name(name.trim_end())
    };
    let ids = threads.filter_map(|thread| thread.file_name().to_str()?.parse().ok());
    ids.filter(is_worker).collect()
}

fn is_worker_name(name: &str) -> bool {
    let number = name.strip_prefix("vhost-").unwrap_or("");
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread::{self, JoinHandle};

    #[test]
    fn the_kernels_workers_are_told_from_the_daemons_own_threads() {
        assert!(is_worker_name("vhost-12345"));
        for other in ["vhost-blk-0", "vhost-", "vhost", "kvm-vhost-1", ""] {
            assert!(!is_worker_name(other), "{other}");
        }
    }

    /// A thread with a worker's name. It ends when the sender is dropped, and returns the number of its CPUs.
    type Started = (mpsc::Sender<()>, JoinHandle<usize>);

    fn start_worker(number: u32) -> Started {
        let (done, wait) = mpsc::channel::<()>();
        let (ready, is_ready) = mpsc::channel();
        let body = move || {
            ready.send(()).unwrap();
            let _ = wait.recv();
            thread::available_parallelism().unwrap().get()
        };
        let named = thread::Builder::new().name(format!("vhost-{number}"));
        let thread = named.spawn(body).unwrap();
        is_ready.recv().unwrap();
        (done, thread)
    }

    /// Starts one as the first worker of a device with these CPUs.
    fn start(number: u32, cpus: &[usize]) -> Started {
        let mut started = None;
        let own = || {
            started = Some(start_worker(number));
            Ok(())
        };
        Workers::start(1, cpus, own).unwrap();
        started.unwrap()
    }

    fn cpus_of((done, thread): Started) -> usize {
        drop(done);
        thread.join().unwrap()
    }

    #[test]
    fn the_new_worker_is_pinned_and_no_other() {
        let all = thread::available_parallelism().unwrap().get();
        let before = start(76, &[]);
        assert_eq!(cpus_of(start(77, &[0])), 1, "CPUs that the thread may use");
        assert_eq!(cpus_of(before), all, "CPUs of the worker of another device");
    }

    #[test]
    fn a_worker_that_starts_beside_a_pinned_one_keeps_its_cpus() {
        let all = thread::available_parallelism().unwrap().get();
        let number_of_cpus = |cpus: &[usize]| cpus_of(start(78, cpus));
        thread::scope(|scope| {
            scope.spawn(|| (0..100).for_each(|_| assert_eq!(number_of_cpus(&[0]), 1)));
            (0..100).for_each(|_| assert_eq!(number_of_cpus(&[]), all));
        });
    }
}
