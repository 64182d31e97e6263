// SPDX-License-Identifier: Apache-2.0
//! Every sector carries its number and a generation; queues on several threads, requests from 512
//! bytes to a mebibyte.

mod common;

use backend::wrap::{Limit, Rates};
use backend::{Disk, FileOptions};
use common::load::{Done, Load, SECTORS_MAX};
use common::{DISK, Daemon, Setup, TMPFS, file, layouts, mem, pattern};
use driver::{Options, Request};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;
use vhost_user::QUEUES_MAX;
use virtio_spec::blk::S_OK;

/// Requests of each queue.
const REQUESTS: u64 = 300;
/// Sectors of each queue's part of the disk.
const PART: u64 = 8192;

fn verified(disk: Arc<dyn Disk>, queues: u16, setup: Setup) {
    let setup = Setup { queues, threads: 2, ..setup };
    let daemon = Daemon::start(disk, &setup);
    for packed in layouts() {
        let options =
            Options { num_queues: queues, packed, scratch_bytes: 12 << 20, ..Options::default() };
        let device = daemon.connect(&options);
        let layout = device.layout();
        let (_session, all) = device.into_parts();
        let threads: Vec<_> = (0..)
            .zip(all)
            .map(|(index, queue)| {
                // Zeroes, as the load expects at first.
                let first = (index * 2 + u64::from(packed)) * PART;
                let sectors = first..first + PART;
                let load = Load::new(queue, layout.clone(), sectors).of_up_to(SECTORS_MAX);
                let enough = |done: &Done| done.reads + done.writes < REQUESTS;
                std::thread::spawn(move || load.run(enough).0)
            })
            .collect();
        for thread in threads {
            let done = thread.join().expect("all verified");
            assert!(done.reads > 0 && done.writes > 0, "{done:?}");
        }
    }
}

#[test]
fn two_queues_on_two_threads_keep_every_byte_in_memory() {
    verified(Arc::new(mem()), 2, Setup::default());
}

#[test]
fn two_queues_on_two_threads_keep_every_byte_in_a_direct_file() {
    let (disk, _directory) = file(TMPFS, FileOptions::default());
    verified(Arc::new(disk), 2, Setup::default());
}

#[test]
fn two_queues_on_two_threads_keep_every_byte_in_pinned_memory() {
    let (disk, _directory) = file(DISK, FileOptions::default());
    let setup = Setup { pin_memory: true, poll_max: Duration::ZERO, ..Setup::default() };
    verified(Arc::new(disk), 2, setup);
}

#[test]
fn two_queues_on_two_threads_keep_every_byte_in_a_cached_file() {
    let (disk, _directory) = file(DISK, FileOptions { direct: false, ..FileOptions::default() });
    verified(Arc::new(disk), 2, Setup::default());
}

#[test]
fn two_queues_on_two_threads_keep_every_byte_on_a_limited_disk() {
    let ios = NonZeroU64::new(20_000);
    let rates = Rates { ios, bytes: None, burst: Duration::from_millis(1) };
    verified(Arc::new(Limit::new(Arc::new(mem()), rates)), 2, Setup::default());
}

#[test]
fn each_of_sixty_four_queues_writes_and_reads_its_own_data() {
    assert_eq!(QUEUES_MAX, 64);
    let setup = Setup { queues: QUEUES_MAX, threads: 2, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(mem()), &setup);
    for packed in layouts() {
        let options = Options { num_queues: QUEUES_MAX, packed, ..Options::default() };
        let mut device = daemon.connect(&options);
        let layout = device.layout();
        let all = 0..QUEUES_MAX;
        let data = |queue: u16| pattern(512, u64::from(queue) * 2 + u64::from(packed));
        // All writes are in flight before the first one is collected.
        for queue in all.clone() {
            let write = Request::write(queue.into(), &data(queue));
            device.queue(queue.into()).submit(&write, &layout).unwrap();
        }
        for queue in all.clone() {
            assert_eq!(device.queue(queue.into()).collect().unwrap().1.status, Some(S_OK));
        }
        for queue in all {
            let read = Request::read(queue.into(), 512);
            let done = device.queue(queue.into()).execute(&read, &layout).unwrap();
            assert_eq!(done.status, Some(S_OK));
            assert!(done.data == data(queue), "queue {queue}, packed {packed}");
        }
    }
}
