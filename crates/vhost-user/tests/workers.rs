// SPDX-License-Identifier: Apache-2.0
//! The kernel's workers: how many, and on which CPUs. Alone in its program, as it counts what the
//! whole process has.

mod common;

use common::plane::{Plain, kernel_or_skip};
use common::{Daemon, Setup};
use data_plane::PlaneKind;
use driver::{Options, Request};
use std::sync::Arc;
use vhost_user::{Answer, Command};
use virtio_spec::blk::S_OK;

const QUEUES: u16 = 2;

/// The CPUs that each of this process's vhost workers may use, the highest first.
fn workers() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let statuses =
        tasks.filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
    let field = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.trim().to_owned()
    };
    let is_worker = |text: &String| {
        let name = field(text, "Name:");
        name.strip_prefix("vhost-").is_some_and(|rest| rest.parse::<u32>().is_ok())
    };
    let workers = statuses.filter(is_worker);
    let mut cpus: Vec<String> = workers.map(|text| field(&text, "Cpus_allowed_list:")).collect();
    cpus.sort_unstable_by(|a, b| b.cmp(a));
    cpus
}

#[test]
fn each_queue_has_a_worker_of_its_own_on_its_cpu_or_as_many_as_are_wanted() {
    if !kernel_or_skip() {
        return;
    }
    for (threads, cpus, expected) in [
        (1, vec![0], vec!["0"]),
        (2, vec![0], vec!["0", "0"]),
        (2, vec![1, 0], vec!["1", "0"]),
        (2, vec![], vec!["0-1", "0-1"]),
    ] {
        let setup = Setup { queues: QUEUES, threads, cpus, ..Setup::default() };
        let daemon = Daemon::start(Arc::new(Plain::for_kernel()), &setup);
        let mut device = daemon.connect(&Options { num_queues: QUEUES, ..Options::default() });
        let switched = daemon.control().ask(Command::Switch(PlaneKind::Kernel)).unwrap();
        assert!(matches!(switched, Answer::Switched(_)), "{switched:?}");
        assert_eq!(workers(), expected);
        let layout = device.layout();
        for index in 0..usize::from(QUEUES) {
            let read = device.queue(index).execute(&Request::read(0, 512), &layout).unwrap();
            assert_eq!(read.status, Some(S_OK));
        }
        drop(device);
        daemon.next_outcome().unwrap();
        assert_eq!(workers(), [""; 0], "they go with the front-end");
    }
}
