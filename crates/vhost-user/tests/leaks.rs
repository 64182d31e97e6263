// SPDX-License-Identifier: Apache-2.0
//! Reconnections leak nothing. The test is alone in its program, because it counts resources of the
//! whole process.

mod common;

use backend::FileOptions;
use common::plane::is_kernel;
use common::{Daemon, Setup, TMPFS, file};
use driver::{Options, Request};
use std::fs::{self, DirEntry};
use std::sync::Arc;

/// Bound on the growth of the memory by two hundred connections: 5 KiB for each.
const GROWTH_KIB: u64 = 1024;

/// Resources of the process.
#[derive(Debug)]
struct Holdings {
    descriptors: usize,
    threads: usize,
    mappings: usize,
    resident_kib: u64,
}

impl Holdings {
    fn count() -> Self {
        let entries = |directory| fs::read_dir(directory).expect("/proc is mounted").count();
        let status = fs::read_to_string("/proc/self/status").expect("/proc is mounted");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = resident.and_then(|text| text.split_whitespace().next()?.parse().ok());
        let maps = fs::read_to_string("/proc/self/maps").expect("/proc is mounted");
        Holdings {
            descriptors: entries("/proc/self/fd"),
            threads: threads(),
            // The heap of each thread may grow in pieces; only shared memory can leak.
            mappings: maps
                .lines()
                .filter(|line| line.split(' ').nth(1).is_some_and(shared))
                .count(),
            resident_kib: kib.expect("VmRSS is a number"),
        }
    }
}

/// Threads of the process, without the threads of the kernel for a ring (`iou-wrk-*`), which come and go.
fn threads() -> usize {
    let is_ours = |task: &DirEntry| {
        let name = fs::read_to_string(task.path().join("comm"));
        name.is_ok_and(|name| !name.starts_with("iou-wrk-"))
    };
    let tasks = fs::read_dir("/proc/self/task").expect("/proc is mounted");
    tasks.flatten().filter(is_ours).count()
}

fn shared(flags: &str) -> bool {
    flags.ends_with('s')
}

fn connect_and_leave(daemon: &Daemon, round: usize) {
    let options = Options {
        num_queues: 2,
        packed: round % 2 == 1 && !is_kernel(),
        mem_slots: round % 3 == 1,
        inflight: !round.is_multiple_of(5),
        ..Options::default()
    };
    let mut device = daemon.connect(&options);
    let _log = round.is_multiple_of(4).then(|| device.start_log().unwrap());
    let (layout, memory) = (device.layout(), device.memory().clone());
    for index in 0..2 {
        let write = Request::write(index as u64 * 8, &[round as u8; 4096]);
        device.queue(index).execute(&write, &layout).unwrap();
    }
    match round % 4 {
        // Disconnects in the middle of requests.
        0 => (0..8).for_each(|sector| {
            device.queue(0).submit(&Request::read(sector, 4096), &layout).unwrap();
        }),
        1 => drop(device.session().stop_queue(0).unwrap()),
        // Disconnects in the middle of a message with descriptors.
        2 => {
            let fds = [memory.regions()[0].fd(); 4];
            device.session().raw().send_bytes(&[5, 0, 0, 0, 1, 0, 0, 0], &fds).unwrap();
        }
        // Disconnects after a message with descriptors that the daemon refuses.
        _ => {
            let fds = [memory.regions()[0].fd(); 2];
            device.session().raw().message(12, &[0; 8], &fds).unwrap();
        }
    }
    drop(device);
    let _how = daemon.next_outcome();
}

#[test]
fn two_hundred_reconnections_leave_no_descriptor_thread_mapping_or_memory_behind() {
    let (disk, _directory) = file(TMPFS, FileOptions::default());
    let setup = Setup { queues: 2, threads: 2, pin_memory: true, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(disk), &setup);
    let batch = || {
        (0..200).for_each(|round| connect_and_leave(&daemon, round));
        Holdings::count()
    };
    // Buffers and heaps that are kept have reached their final size after the first batch.
    let (before, after) = (batch(), batch());
    println!("{before:?} {after:?}");
    assert_eq!(after.descriptors, before.descriptors, "{before:?} {after:?}");
    assert_eq!(after.threads, before.threads, "{before:?} {after:?}");
    assert_eq!(after.mappings, before.mappings, "{before:?} {after:?}");
    assert!(after.resident_kib < before.resident_kib + GROWTH_KIB, "{before:?} {after:?}");
}
