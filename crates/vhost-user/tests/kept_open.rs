// SPDX-License-Identifier: Apache-2.0
//! The end of a front-end whose end of the connection is in the receive buffer of a socket that the daemon holds.

mod common;

use common::{Daemon, LIMIT, Setup, mem};
use driver::{Options, RawChannel};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

const GET_FEATURES: u32 = 1;
const SET_OWNER: u32 = 3;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;

/// A front-end that is being served.
fn served(daemon: &Daemon) -> RawChannel {
    let channel = daemon.raw();
    answers(&channel);
    channel
}

fn answers(channel: &RawChannel) {
    channel.message(GET_FEATURES, &[], &[]).unwrap();
    assert!(channel.reply(LIMIT).unwrap().value().is_some());
}

#[test]
fn the_end_of_a_connection_in_a_waiting_one_keeps_no_connection_open() {
    let daemon = Daemon::of(mem());
    let (first, second) = (served(&daemon), daemon.raw());
    second.send_bytes(&[0], &[first.stream().as_fd()]).unwrap();
    drop((first, second));
    daemon.next_outcome().unwrap();
    answers(&daemon.raw());
}

#[test]
fn two_ends_in_the_buffer_of_a_waiting_connection_keep_no_connection_open() {
    let daemon = Daemon::of(mem());
    let (first, second) = (served(&daemon), daemon.raw());
    // It waits, and has the right to one message.
    second.message(GET_FEATURES, &[], &[]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let both = [first.stream().as_fd(), second.stream().as_fd()];
    second.send_bytes(&[0], &both).unwrap();
    drop((first, second));
    daemon.next_outcome().unwrap();
    answers(&daemon.raw());
}

#[test]
fn the_buffer_of_a_call_or_err_socket_keeps_no_connection_open() {
    for message in [SET_VRING_CALL, SET_VRING_ERR] {
        let daemon = Daemon::of(mem());
        let mut device = daemon.connect(&Options::default());
        let (kept, other) = UnixStream::pair().unwrap();
        let send = |channel: &RawChannel| {
            let own = channel.stream().try_clone().unwrap();
            let other = RawChannel::from_stream(other.try_clone().unwrap());
            other.send_bytes(&[0], &[own.as_fd()])
        };
        send(device.session().raw()).unwrap();
        let index = 0u64.to_ne_bytes();
        device.session().raw().message(message, &index, &[kept.as_fd()]).unwrap();
        device.session().config().unwrap();
        // Nor does it take one later.
        let refused = send(device.session().raw()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::BrokenPipe);
        drop((device, kept, other));
        daemon.next_outcome().unwrap();
    }
}

#[test]
fn the_front_ends_own_end_of_a_socket_pair_is_refused_as_call() {
    let (setup, disk): (Setup, Arc<dyn backend::Disk>) = (Setup::default(), Arc::new(mem()));
    let pool = common::pool(&setup);
    let plane = pool.add_disk(Arc::clone(&disk)).unwrap();
    let mut device = common::make_device(disk, &setup, plane);
    let (own, stream) = UnixStream::pair().unwrap();
    let channel = RawChannel::from_stream(own);
    channel.message(SET_OWNER, &[], &[]).unwrap();
    let own = channel.stream().try_clone().unwrap();
    channel.message(SET_VRING_CALL, &0u64.to_ne_bytes(), &[own.as_fd()]).unwrap();
    // It would wait for messages for ever.
    let refused = device.serve(stream, None).unwrap_err().to_string();
    assert!(refused.contains("own end of the connection"), "{refused}");
}

#[test]
fn sixteen_front_ends_wait_and_are_served_in_turn_and_the_next_one_is_closed() {
    // None of them counts as silent: each has spoken before its turn.
    let daemon =
        Daemon::start(Arc::new(mem()), &Setup { patience: Duration::ZERO, ..Setup::default() });
    let first = served(&daemon);
    let waiting: Vec<RawChannel> = (0..16).map(|_| daemon.raw()).collect();
    for channel in &waiting {
        channel.message(GET_FEATURES, &[], &[]).unwrap();
    }
    assert!(daemon.raw().hangs_up_within(LIMIT).unwrap());
    answers(&first);
    drop(first);
    for channel in waiting {
        daemon.next_outcome().unwrap();
        assert!(channel.reply(LIMIT).unwrap().value().is_some());
    }
}
