// SPDX-License-Identifier: Apache-2.0
//! The kernel threads that run the queues: the workers of vhost. They are threads of this process
//! named `vhost-` plus a number. The kernel starts the first one with the device.

use super::device::VhostBlk;
use crate::affinity;
use std::collections::HashSet;
use std::fs;

/// The workers of one open device; queues are distributed over them in turn.
#[derive(Debug)]
pub(super) struct Workers {
    /// Ids of the workers. `None`: the device's first worker, and workers that do not exist yet.
    slots: Vec<Option<u32>>,
    cpus: Vec<usize>,
    /// Threads that existed before the last worker.
    known: HashSet<i32>,
    /// The vhost core supports only one worker.
    only_one: bool,
}

impl Workers {
    /// Must precede VHOST_SET_OWNER, which starts the first worker.
    pub(super) fn before_owner(count: usize, cpus: &[usize]) -> Self {
        let slots = vec![None; count.max(1)];
        Workers { slots, cpus: cpus.to_vec(), known: vhost_threads(), only_one: false }
    }

    /// Pins the first worker, after VHOST_SET_OWNER.
    pub(super) fn owned(&mut self) {
        self.pin_new(0);
    }

    /// Attaches queue `index` to its worker, or leaves it to the only worker.
    pub(super) fn serve(&mut self, device: &VhostBlk, index: u16) {
        let slot = usize::from(index) % self.slots.len();
        if slot == 0 || self.only_one {
            return;
        }
        let worker = match self.slots[slot] {
            Some(id) => Ok(id),
            None => device.new_worker().inspect(|_| self.pin_new(slot)),
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

    fn pin_new(&mut self, slot: usize) {
        if self.cpus.is_empty() {
            return;
        }
        let cpu = self.cpus[slot % self.cpus.len()];
        let now = vhost_threads();
        let new: Vec<i32> = now.difference(&self.known).copied().collect();
        if new.is_empty() {
            tracing::warn!(
                cpu,
                "the kernel's worker is no thread of this process: it is not pinned"
            );
        }
        for thread in new {
            if let Err(error) = affinity::pin_thread(thread, cpu) {
                tracing::warn!(cpu, %error, "the kernel's worker cannot be pinned");
            }
        }
        self.known = now;
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

    #[test]
    fn the_kernels_workers_are_told_from_the_daemons_own_threads() {
        assert!(is_worker_name("vhost-12345"));
        for other in ["vhost-blk-0", "vhost-", "vhost", "kvm-vhost-1", ""] {
            assert!(!is_worker_name(other), "{other}");
        }
    }

    #[test]
    fn a_thread_with_a_workers_name_is_found_and_pinned() {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let before = vhost_threads();
        let mut workers = Workers::before_owner(1, &[0]);
        let (ready, is_ready) = std::sync::mpsc::channel();
        let body = move || {
            ready.send(()).unwrap();
            wait.recv().unwrap();
            std::thread::available_parallelism().unwrap().get()
        };
        let thread = std::thread::Builder::new().name("vhost-77".into()).spawn(body).unwrap();
        is_ready.recv().unwrap();
        workers.owned();
        assert_eq!(workers.known.len(), before.len() + 1);
        done.send(()).unwrap();
        assert_eq!(thread.join().unwrap(), 1, "CPUs that the thread may use");
    }
}
