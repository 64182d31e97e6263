// SPDX-License-Identifier: Apache-2.0
//! A front-end that connects and says nothing or only a part of a message, or reads nothing.

mod common;

use common::{Daemon, Setup, mem};
use driver::{Options, RawChannel};
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;
use vhost_user::{Answer, Command};

const GET_FEATURES: u32 = 1;
const SET_OWNER: u32 = 3;
const SET_VRING_NUM: u32 = 8;
const FLAG_VERSION: u32 = 1;

#[test]
fn a_silent_front_end_makes_room_for_the_next_one() {
    let setup = Setup { patience: Duration::from_millis(20), ..Setup::default() };
    let daemon = Daemon::start(Arc::new(mem()), &setup);
    let silent = daemon.raw();
    daemon.connect(&Options::default()).write(0, &[1; 512]).unwrap();
    let why = daemon.next_outcome().unwrap_err();
    assert!(why.contains("said nothing"), "{why}");
    assert!(silent.hangs_up_within(common::LIMIT).unwrap());
    daemon.next_outcome().unwrap();
}

#[test]
fn a_silent_front_end_stays_while_no_other_one_waits() {
    let setup = Setup { patience: Duration::ZERO, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(mem()), &setup);
    let silent = daemon.raw();
    common::wait_until("it is served", || match daemon.control().ask(Command::Status) {
        Some(Answer::Status(status)) => status.connected,
        _ => false,
    });
    silent.message(GET_FEATURES, &[], &[]).unwrap();
    assert!(silent.reply(common::LIMIT).unwrap().value().is_some());
    // One that has spoken may be as silent as it likes, whoever waits.
    let waiting = daemon.raw();
    silent.message(GET_FEATURES, &[], &[]).unwrap();
    assert!(silent.reply(common::LIMIT).unwrap().value().is_some());
    drop(silent);
    daemon.next_outcome().unwrap();
    drop(waiting);
}

/// A daemon without patience that serves a silent front-end. Two others wait: one has hung up.
fn served_silent(next: impl FnOnce(&Daemon)) -> (Daemon, RawChannel) {
    let setup = Setup { patience: Duration::ZERO, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(mem()), &setup);
    let first = daemon.raw();
    first.message(GET_FEATURES, &[], &[]).unwrap();
    assert!(first.reply(common::LIMIT).unwrap().value().is_some());
    let silent = daemon.raw();
    drop(daemon.raw());
    next(&daemon);
    drop(first);
    daemon.next_outcome().unwrap();
    (daemon, silent)
}

#[test]
fn a_connection_that_was_closed_while_it_waited_evicts_none() {
    let (daemon, silent) = served_silent(|_| {});
    // The daemon has time to evict it; with too little time the test passes, too.
    std::thread::sleep(Duration::from_millis(50));
    silent.message(GET_FEATURES, &[], &[]).unwrap();
    assert!(silent.reply(common::LIMIT).unwrap().value().is_some());
    drop(silent);
    daemon.next_outcome().unwrap();
}

#[test]
fn a_live_connection_behind_a_closed_one_is_served() {
    let mut waiting = None;
    let (daemon, silent) = served_silent(|daemon| waiting = Some(daemon.raw()));
    let waiting = waiting.unwrap();
    let why = daemon.next_outcome().unwrap_err();
    assert!(why.contains("said nothing"), "{why}");
    assert!(silent.hangs_up_within(common::LIMIT).unwrap());
    waiting.message(GET_FEATURES, &[], &[]).unwrap();
    assert!(waiting.reply(common::LIMIT).unwrap().value().is_some());
}

/// Sends messages until the socket has no room. Returns their number.
fn fill(channel: &RawChannel) -> usize {
    let is_full = |_: &usize| {
        let sent = channel.message(GET_FEATURES, &[], &[]);
        sent.is_err_and(|why| why.kind() == ErrorKind::WouldBlock || panic!("{why}"))
    };
    (0..).find(is_full).expect("no end of the numbers")
}

/// A front-end that has filled the socket with answers that it does not read. One full socket of messages is enough:
/// the daemon waits for room as soon as the answers take a quarter of theirs. More messages would block a daemon that
/// answers without waiting for room.
fn deaf(daemon: &Daemon) -> RawChannel {
    let deaf = daemon.raw();
    deaf.stream().set_nonblocking(true).unwrap();
    while fill(&deaf) > 0 {
        command_twice(daemon);
    }
    deaf.stream().set_nonblocking(false).unwrap();
    deaf
}

#[test]
fn a_front_end_that_reads_no_answers_is_disconnected() {
    let daemon = Daemon::of(mem());
    let _deaf = deaf(&daemon);
    let why = daemon.next_outcome().unwrap_err();
    assert!(why.contains("has read no answer"), "{why}");
    daemon.connect(&Options::default()).write(0, &[1; 512]).unwrap();
}

fn message(code: u32, payload: &[u8]) -> Vec<u8> {
    let header = [code, FLAG_VERSION, payload.len() as u32].map(u32::to_le_bytes);
    [header.as_flattened(), payload].concat()
}

/// Sends commands after the daemon has looked at what the connected front-end sent.
fn command_twice(daemon: &Daemon) {
    // The daemon has time to look; with too little time the test passes, too.
    std::thread::sleep(Duration::from_millis(20));
    for _ in 0..2 {
        let answer = daemon.control().post(Command::Status).receive(common::LIMIT);
        assert!(matches!(answer, Ok(Answer::Status(status)) if status.connected));
    }
}

#[test]
fn an_incomplete_message_delays_no_command() {
    let daemon = Daemon::of(mem());
    let channel = daemon.raw();
    channel.message(SET_OWNER, &[], &[]).unwrap();
    for (whole, lengths) in [
        (message(GET_FEATURES, &[]), vec![1, 11]),
        (message(SET_VRING_NUM, &[0, 0, 0, 0, 128, 0, 0, 0]), vec![4, 12, 19]),
    ] {
        for length in lengths {
            let (part, rest) = whole.split_at(length);
            channel.send_bytes(part, &[]).unwrap();
            command_twice(&daemon);
            channel.send_bytes(rest, &[]).unwrap();
            channel.message(GET_FEATURES, &[], &[]).unwrap();
            assert!(channel.reply(common::LIMIT).unwrap().value().is_some());
        }
    }
}

#[test]
fn a_front_end_that_reads_no_answers_delays_no_command() {
    let daemon = Daemon::of(mem());
    let deaf = deaf(&daemon);
    command_twice(&daemon);
    assert!(deaf.reply(common::LIMIT).unwrap().value().is_some());
}

#[test]
fn a_front_end_that_never_sends_the_rest_of_a_message_is_disconnected() {
    let daemon = Daemon::of(mem());
    let whole = message(SET_VRING_NUM, &[0, 0, 0, 0, 128, 0, 0, 0]);
    for length in [3, 12, 16] {
        let channel = daemon.raw();
        channel.send_bytes(&whole[..length], &[]).unwrap();
        // The stream stays open: it is the daemon that gives up.
        let why = daemon.next_outcome().unwrap_err();
        assert!(why.contains("incomplete for 5 s"), "{why}");
    }
    daemon.connect(&Options::default()).write(0, &[1; 512]).unwrap();
}
