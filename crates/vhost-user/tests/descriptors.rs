// SPDX-License-Identifier: Apache-2.0
//! A daemon that has no descriptor left. Alone in its program, as the limit is the whole process's.

mod common;

use common::plane::{Plain, kernel_or_skip};
use common::{Daemon, Setup};
use data_plane::PlaneKind;
use driver::{Options, Request};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;
use vhost_user::{Answer, Command};
use virtio_spec::blk::S_OK;

const QUEUES: u16 = 2;

/// Does `act` while the process can open nothing.
fn without_descriptors<T>(act: impl FnOnce() -> T) -> T {
    let before = getrlimit(Resource::Nofile);
    // Two may still be waited for, which is what the daemon does between two messages.
    let none = Rlimit { current: Some(2), ..before };
    setrlimit(Resource::Nofile, none).expect("a lower limit is always allowed");
    let done = act();
    setrlimit(Resource::Nofile, before).expect("the limit of before is allowed");
    done
}

#[test]
fn queues_that_no_plane_can_start_again_end_the_connection_and_the_next_one_loses_nothing() {
    if !kernel_or_skip() {
        return;
    }
    let setup = Setup { queues: QUEUES, threads: 2, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(Plain::for_kernel()), &setup);
    let options = Options { inflight: true, num_queues: QUEUES, ..Options::default() };
    let mut device = daemon.connect(&options);
    let switch = |to| daemon.control().ask(Command::Switch(to)).expect("the device is there");
    let moved = switch(PlaneKind::Kernel);
    assert!(matches!(moved, Answer::Switched(0 | 2)), "{moved:?}"); // 0: they were there
    device.write(3, &[3; 512]).unwrap();

    match without_descriptors(|| switch(PlaneKind::Uring)) {
        Answer::Refused(why) => assert!(why.contains("the VMM is disconnected"), "{why}"),
        other => panic!("{other:?}"),
    }
    let outcome = daemon.next_outcome().expect_err("the connection is given up");
    assert!(outcome.contains("could not be started again"), "{outcome}");

    let layout = device.layout();
    for queue in 0..QUEUES.into() {
        device.queue(queue).submit(&Request::read(3, 512), &layout).unwrap();
    }
    device.reconnect(daemon.socket()).unwrap();
    for queue in 0..QUEUES.into() {
        let (_, done) = device.queue(queue).collect().unwrap();
        assert_eq!((done.status, done.data), (Some(S_OK), vec![3; 512]));
    }
}
