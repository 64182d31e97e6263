// SPDX-License-Identifier: Apache-2.0
//! Commands to a device that serves: what it tells, and queues that move from one data plane to
//! the other under load.

mod common;

use common::load::{Done, Loaded, under_load};
use common::plane::{Plain, kernel_or_skip};
use common::{Daemon, Setup, mem, wait_until};
use data_plane::{Operation, PlaneKind};
use driver::{Options, Request};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use vhost_user::{Answer, Command, Status};
use virtio_spec::blk::S_OK;

const QUEUES: u16 = 2;
/// Times that the plane is changed.
const TIMES: u64 = 25;

fn setup() -> Setup {
    Setup { queues: QUEUES, threads: 2, packed: false, ..Setup::default() }
}

fn options() -> Options {
    Options { num_queues: QUEUES, ..Options::default() }
}

fn switch(daemon: &Daemon, to: PlaneKind) -> Answer {
    daemon.control().ask(Command::Switch(to)).expect("the device is there")
}

fn count(status: &Status, queue: usize, name: &str) -> u64 {
    let counts = status.queues[queue].running.as_ref().expect("it runs").counters();
    counts.iter().find(|(known, _)| known == name).expect("it is counted").1
}

/// Queues of a device with both planes, loaded while `act` does as it likes.
fn loaded(options: &Options, mut act: impl FnMut(&Daemon, &mut Loaded)) -> Vec<Done> {
    let daemon = Daemon::start(Arc::new(Plain::for_kernel()), &setup());
    let device = daemon.connect(options);
    let (done, session) = under_load(device, QUEUES.into(), |loaded| act(&daemon, loaded));
    drop(session);
    daemon.next_outcome().expect("the connection ends well");
    done
}

#[test]
fn the_status_tells_planes_features_and_counts() {
    let daemon = Daemon::start(Arc::new(mem()), &setup());
    let mut device = daemon.connect(&options());
    for sector in 0..7 {
        device.write(sector, &[1; 512]).unwrap();
    }
    let told = daemon.status();
    assert!(told.connected);
    assert!(told.writeback);
    assert_eq!(told.features, device.session().features());
    assert_eq!(told.queues.len(), usize::from(QUEUES));
    for queue in &told.queues {
        assert_eq!((queue.plane, queue.size), (Some(told.plane), 128));
    }
    assert_eq!(count(&told, 0, "chains"), 7);
    assert_eq!(count(&told, 1, "chains"), 0);
    device.session().stop_queue(1).unwrap();
    assert_eq!(daemon.status().queues[1].plane, None);
}

#[test]
fn a_switch_that_cannot_be_done_leaves_the_queues_running_where_they_are() {
    // The kernel takes no disk with wrappers, wherever this runs.
    let disk = backend::wrap::Record::in_memory(Arc::new(mem()));
    let daemon = Daemon::start(Arc::new(disk), &setup());
    let mut device = daemon.connect(&options());
    for round in 0..3 {
        device.write(round, &[1; 512]).unwrap();
        match switch(&daemon, PlaneKind::Kernel) {
            Answer::Refused(why) => assert!(why.contains("--wrap"), "{why}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(switch(&daemon, PlaneKind::Uring), Answer::Switched(0));
        let told = daemon.status();
        assert_eq!((told.plane, told.queues[0].plane), (PlaneKind::Uring, Some(PlaneKind::Uring)));
        // Not even stopped: the counts go on.
        assert_eq!(count(&told, 0, "chains"), round + 1);
    }
}

#[test]
fn a_guest_with_packed_queues_cannot_be_moved_to_the_kernel() {
    if common::plane::is_kernel() {
        println!("SKIP: packed queues are not offered where the kernel may run them");
        return;
    }
    let daemon = Daemon::start(Arc::new(Plain::for_kernel()), &Setup { packed: true, ..setup() });
    let mut device = daemon.connect(&Options { packed: true, ..options() });
    match switch(&daemon, PlaneKind::Kernel) {
        Answer::Refused(why) => assert!(why.contains("--packed off"), "{why}"),
        other => panic!("{other:?}"),
    }
    device.write(0, &[1; 512]).unwrap();
}

#[test]
fn queues_move_between_the_planes_under_load_and_lose_nothing() {
    if !kernel_or_skip() {
        return;
    }
    for event_idx in [true, false] {
        let done = loaded(&Options { event_idx, ..options() }, |daemon, loaded| {
            for time in 0..TIMES {
                let there = daemon.status().plane;
                let other = match there {
                    PlaneKind::Kernel => PlaneKind::Uring,
                    PlaneKind::Uring => PlaneKind::Kernel,
                };
                assert_eq!(switch(daemon, other), Answer::Switched(QUEUES.into()), "{time}");
                let told = daemon.status();
                assert!(told.queues.iter().all(|queue| queue.plane == Some(other)));
                loaded.wait_for_progress(3);
            }
        });
        assert!(done.iter().all(|done| done.reads + done.writes >= 3 * TIMES));
    }
}

#[test]
fn queues_with_an_in_flight_region_move_and_lose_nothing() {
    if !kernel_or_skip() {
        return;
    }
    loaded(&Options { inflight: true, ..options() }, |daemon, loaded| {
        switch(daemon, PlaneKind::Uring);
        for _ in 0..TIMES {
            assert_eq!(switch(daemon, PlaneKind::Kernel), Answer::Switched(QUEUES.into()));
            loaded.wait_for_progress(3);
            assert_eq!(switch(daemon, PlaneKind::Uring), Answer::Switched(QUEUES.into()));
            loaded.wait_for_progress(3);
        }
    });
}

#[test]
fn a_moved_queue_finds_what_was_made_available_while_it_was_stopped() {
    if !kernel_or_skip() {
        return;
    }
    let daemon = Daemon::start(Arc::new(Plain::for_kernel()), &setup());
    let mut device = daemon.connect(&options());
    let layout = device.layout();
    device.session().stop_queue(0).unwrap();
    device.queue(0).submit(&Request::write(9, &[9; 512]), &layout).unwrap();
    switch(&daemon, PlaneKind::Kernel);
    device.start_queue(0).unwrap();
    assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
    assert_eq!(daemon.status().queues[0].plane, Some(PlaneKind::Kernel));
    // The choice outlives the connection.
    drop(device);
    daemon.next_outcome().unwrap();
    let mut device = daemon.connect(&options());
    let mut data = [0; 512];
    device.read(9, &mut data).unwrap();
    assert_eq!(data, [9; 512]);
    assert_eq!(daemon.status().plane, PlaneKind::Kernel);
}

#[test]
fn a_call_descriptor_that_the_kernel_does_not_take_moves_the_queues_to_the_other_plane() {
    const SET_VRING_CALL: u32 = 13;
    if !common::plane::is_kernel() {
        println!("SKIP: with VHOST_BLK_TEST_PLANE=kernel only");
        return;
    }
    let daemon = Daemon::start(Arc::new(Plain::for_kernel()), &setup());
    let mut device = daemon.connect(&options());
    device.write(5, &[5; 512]).unwrap();
    assert_eq!(daemon.status().plane, PlaneKind::Kernel);
    let (call, _other) = UnixStream::pair().unwrap();
    device.session().raw().message(SET_VRING_CALL, &[0; 8], &[call.as_fd()]).unwrap();
    wait_until("the queues are moved", || daemon.status().plane == PlaneKind::Uring);

    let call = device.queue(0).queue().call_fd().try_clone().unwrap();
    device.session().replace_call(0, &call).unwrap();
    for queue in 0..QUEUES.into() {
        let (read, layout) = (Request::read(5, 512), device.layout());
        let done = device.queue(queue).execute(&read, &layout).unwrap();
        assert_eq!((done.status, done.data), (Some(S_OK), vec![5; 512]));
    }
}

#[test]
fn the_latency_of_each_request_is_counted_by_its_operation() {
    let daemon = Daemon::start(Arc::new(Plain::new()), &setup());
    let mut device = daemon.connect(&options());
    for round in 0..7 {
        device.write(round, &[1; 512]).unwrap();
        if round < 5 {
            device.read(round, &mut [0; 512]).unwrap();
        }
        if round < 3 {
            device.flush().unwrap();
        }
    }
    let latencies = daemon.status().queues[0].total.latencies;
    let counts = Operation::ALL.map(|operation| latencies.of(operation).count());
    assert_eq!(counts, [5, 7, 3, 0]);
    // The counters outlive the queue.
    device.session().stop_queue(0).unwrap();
    assert_eq!(daemon.status().queues[0].total.latencies, latencies);
}

#[test]
fn a_slow_request_is_in_a_high_bucket() {
    let delay = std::time::Duration::from_millis(40);
    let ops = backend::wrap::OpSet::ALL;
    let disk = Arc::new(backend::wrap::Delay::new(Arc::new(mem()), delay, ops));
    let daemon = Daemon::start(disk, &setup());
    let mut device = daemon.connect(&options());
    device.write(0, &[1; 512]).unwrap();
    let latencies = daemon.status().queues[0].total.latencies;
    let write = latencies.of(Operation::Write);
    assert!(write.sum_us >= 40_000, "{write:?}");
    // Below 2^15 us there is nothing.
    assert_eq!(write.buckets[..16].iter().sum::<u64>(), 0, "{write:?}");
    assert_eq!(write.count(), 1);
}
