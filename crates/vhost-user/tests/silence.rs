// SPDX-License-Identifier: Apache-2.0
//! A front-end that connects and says nothing.

mod common;

use common::{Daemon, Setup, mem};
use driver::Options;
use std::sync::Arc;
use std::time::Duration;
use vhost_user::{Answer, Command};

const GET_FEATURES: u32 = 1;

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
fn a_silent_front_end_stays_while_nobody_waits() {
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
