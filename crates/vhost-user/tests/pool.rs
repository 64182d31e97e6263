// SPDX-License-Identifier: Apache-2.0
//! Disks that share data-plane threads: the trouble of one does not reach the others.
// UNSAFETY: asks for the lease of a file; no library in use has leases.
#![expect(unsafe_code)]

mod common;

use backend::{Disk, FileOptions};
use common::gate::Gate;
use common::load::under_load;
use common::{DISK, Daemon, LIMIT, Setup, file, mem, pool, wait_until};
use data_plane::StartError;
use driver::{Device, Layout, Options, Request};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;
use virtio_spec::blk::S_OK;

fn mem_disk() -> Arc<dyn Disk> {
    Arc::new(mem())
}

/// Writes and reads on queue 0.
fn works(device: &mut Device, byte: u8) {
    for sector in 0..50 {
        device.write(sector, &[byte; 512]).unwrap();
        let mut data = [0; 512];
        device.read(sector, &mut data).unwrap();
        assert_eq!(data, [byte; 512]);
    }
}

fn submit_reads(device: &mut Device, count: u64) {
    let layout = device.layout();
    for sector in 0..count {
        device.queue(0).submit(&Request::read(sector, 512), &layout).unwrap();
    }
}

#[test]
fn a_disk_that_hangs_delays_no_other_disk_of_its_thread() {
    let setup = Setup { threads: 1, ..Setup::default() };
    let pool = pool(&setup);
    let (gate, permits) = Gate::new(mem_disk());
    let hung = Daemon::in_pool(Arc::new(gate), &setup, &pool);
    let good = Daemon::in_pool(mem_disk(), &setup, &pool);
    let mut stuck = hung.connect(&Options::default());
    submit_reads(&mut stuck, 20);
    works(&mut good.connect(&Options::default()), 1);
    // It also drains while another disk is served.
    let draining = std::thread::spawn(move || drop(stuck));
    works(&mut good.connect(&Options::default()), 2);
    permits.open();
    draining.join().unwrap();
    hung.next_outcome().unwrap();
}

/// Requests of a full queue.
const FULL: u64 = 1024;

#[test]
fn a_disk_that_hangs_with_full_queues_leaves_room_in_the_storage_and_gets_all_answers() {
    let setup = Setup { threads: 1, queues: 3, ..Setup::default() };
    let pool = pool(&setup);
    let (gate, permits) = Gate::new(mem_disk());
    let hung = Daemon::in_pool(Arc::new(gate), &setup, &pool);
    let good = Daemon::in_pool(mem_disk(), &setup, &pool);
    let full = Options { num_queues: 3, queue_size: FULL as u16, ..Options::default() };
    let mut stuck = hung.connect(&full);
    let layout = stuck.layout();
    for queue in 0..3 {
        for sector in 0..FULL {
            stuck.queue(queue).submit(&Request::read(sector, 512), &layout).unwrap();
        }
    }
    let inflight = || {
        let queues = hung.status().queues;
        let running = queues.iter().filter_map(|queue| queue.running.as_ref());
        running.map(|report| report.inflight).sum::<u64>()
    };
    // Three queues that have no room have at least as many together.
    wait_until("the requests are taken", || inflight() >= 1317);
    // In these turns the thread takes all that it may.
    works(&mut good.connect(&Options::default()), 1);
    let taken = inflight();
    permits.open(); // a failed test ends, too
    assert!(taken < 1536, "the storage has {taken} requests of one disk");
    for queue in 0..3 {
        for _ in 0..FULL {
            assert_eq!(stuck.queue(queue).collect().unwrap().1.status, Some(S_OK));
        }
    }
}

/// Each of these requests needs one of the few bounce buffers of the thread, and the ring of the deep queue is never
/// empty.
#[test]
fn unaligned_requests_of_a_deep_queue_let_those_of_another_queue_through() {
    const DEPTH: usize = 100;
    let setup = Setup { threads: 1, queues: 2, batch_size: Some(8), ..Setup::default() };
    let (disk, _directory) = file(DISK, FileOptions::default());
    assert!(!disk.fell_back_from_direct(), "the build directory's file system has O_DIRECT");
    let daemon = Daemon::in_pool(Arc::new(disk), &setup, &pool(&setup));
    let mut device = daemon.connect(&Options { num_queues: 2, ..Options::default() });
    let layout = Layout { misalign: 1, ..device.layout() };
    device.write(0, &[1; 512]).unwrap(); // a hole would be read at once
    let read = Request::read(0, 512);
    for _ in 0..DEPTH {
        device.queue(0).submit(&read, &layout).unwrap();
    }
    for n in 0..10 * DEPTH {
        if n == DEPTH {
            device.queue(1).submit(&read, &layout).unwrap();
        }
        assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
        if let Some((_, completion)) = device.queue(1).try_collect().unwrap() {
            return assert_eq!(completion.status, Some(S_OK));
        }
        device.queue(0).submit(&read, &layout).unwrap();
    }
    panic!("the request of the other queue has waited for {} of this one", 9 * DEPTH);
}

#[test]
fn a_ring_fault_of_one_disk_stops_no_queue_of_another() {
    let setup = Setup { threads: 1, ..Setup::default() };
    let pool = pool(&setup);
    let (bad, good) = (mem_disk(), mem_disk());
    let bad = Daemon::in_pool(bad, &setup, &pool);
    let good = Daemon::in_pool(good, &setup, &pool);
    let mut broken = bad.connect(&Options::default());
    let mut device = good.connect(&Options::default());
    broken.queue(0).queue().split().write_avail_idx(5000);
    broken.queue(0).queue().kick();
    assert!(broken.queue(0).queue().wait_err(LIMIT).unwrap());
    works(&mut device, 3);
}

#[test]
fn disks_come_and_go_while_another_one_is_under_load() {
    let setup = Setup { threads: 2, queues: 2, pin_memory: true, ..Setup::default() };
    let pool = pool(&setup);
    let (disk, _directory) = file(DISK, FileOptions::default());
    let daemon = Daemon::in_pool(Arc::new(disk), &setup, &pool);
    let two = Options { num_queues: 2, ..Options::default() };
    let (done, _) = under_load(daemon.connect(&two), 2, |loaded| {
        for round in 0..10 {
            let (disk, _directory) = file(DISK, FileOptions::default());
            let other = Daemon::in_pool(Arc::new(disk), &setup, &pool);
            works(&mut other.connect(&two), round);
            loaded.wait_for_progress(5);
            drop(other);
            loaded.wait_for_progress(5);
        }
    });
    assert!(done.iter().all(|done| done.reads > 0 && done.writes > 0), "{done:?}");
}

#[test]
fn the_threads_refuse_the_disk_after_the_last_one_and_take_it_when_another_one_goes() {
    let pool = pool(&Setup { threads: 1, ..Setup::default() });
    let disk: Arc<dyn Disk> = Arc::new(backend::Null::new(1 << 20));
    let add = || pool.add_disk(Arc::clone(&disk));
    let mut planes: Vec<_> = (0..4096).map(|_| add().expect("there is room")).collect();
    assert!(matches!(add(), Err(StartError::Full)));
    planes.swap_remove(17);
    planes.push(add().expect("there is room again"));
    assert!(matches!(add(), Err(StartError::Full)));
}

#[test]
fn a_removed_disk_leaves_no_open_file_behind() {
    let setup = Setup { threads: 2, ..Setup::default() };
    let pool = pool(&setup);
    let _other = Daemon::in_pool(mem_disk(), &setup, &pool);
    let (disk, directory) = file(DISK, FileOptions::default());
    let image = directory.path().join("image.raw");
    let lease = || {
        // A write lease is granted only while no other open file of the image exists anywhere.
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&image).unwrap();
        gets_write_lease(&file)
    };
    let daemon = Daemon::in_pool(Arc::new(disk), &setup, &pool);
    works(&mut daemon.connect(&Options::default()), 4);
    assert!(!lease(), "the daemon has the image open");
    drop(daemon);
    wait_until("the kernel has released the image", lease);
}

fn gets_write_lease(file: &std::fs::File) -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) == 0 }
}

#[test]
fn a_parked_queue_asks_for_a_kick_and_is_woken_by_it() {
    // The thread polls for longer than any test takes: only turns with work park a queue.
    for poll_max in [Duration::ZERO, Duration::from_secs(3600)] {
        for packed in [false, true] {
            for event_idx in [false, true] {
                let setup = Setup { threads: 1, queues: 2, poll_max, ..Setup::default() };
                let daemon = Daemon::start(mem_disk(), &setup);
                let options = Options { num_queues: 2, packed, event_idx, ..Options::default() };
                let mut device = daemon.connect(&options);
                parks_and_wakes(&mut device, !poll_max.is_zero());
            }
        }
    }
}

fn parks_and_wakes(device: &mut Device, polls: bool) {
    let layout = device.layout();
    for round in 0..3 {
        for sector in 0..300 {
            device.read(sector, &mut [0; 512]).unwrap();
        }
        let read = Request::read(round, 512);
        let added = device.queue(1).add(&read, &layout).unwrap();
        let queue = device.queue(1).queue();
        queue.publish();
        assert!(queue.kick_if_asked(), "round {round}: the parked queue asks for a kick");
        let (id, completion) = device.queue(1).collect().unwrap();
        assert_eq!((id, completion.status), (added, Some(S_OK)));
        if polls {
            let added = device.queue(0).add(&read, &layout).unwrap();
            let queue = device.queue(0).queue();
            queue.publish();
            assert!(!queue.kick_if_asked(), "round {round}: the busy queue is polled");
            assert_eq!(device.queue(0).collect().unwrap().0, added);
        }
    }
}
