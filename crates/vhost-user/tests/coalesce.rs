// SPDX-License-Identifier: Apache-2.0
//! Held calls: a driver that sleeps gets each of them, also across a pause.

mod common;

use common::load::under_load;
use common::{Daemon, Setup, every_ring, mem};
use data_plane::Coalesce;
use driver::{Device, Options, Request};
use std::sync::Arc;
use std::time::Duration;
use vhost_user::{Answer, Command};
use virtio_spec::blk::S_OK;

/// Requests of a burst.
const BURST: u32 = 32;

fn setup(coalesce: Coalesce) -> Setup {
    Setup { coalesce, poll_max: Duration::from_micros(50), ..Setup::default() }
}

fn coalesced(daemon: &Daemon) -> u64 {
    daemon.status().queues.iter().map(|queue| queue.total.coalesced).sum()
}

/// Makes many requests at once, and sleeps until they are done.
fn burst(device: &mut Device) {
    let layout = device.layout();
    let queue = device.queue(0);
    for _ in 0..BURST {
        queue.add(&Request::read(0, 512), &layout).unwrap();
    }
    queue.queue().publish();
    queue.queue().kick_if_asked();
    for _ in 0..BURST {
        assert_eq!(queue.collect().unwrap().1.status, Some(S_OK));
    }
}

#[test]
fn a_driver_that_sleeps_gets_every_held_call() {
    for options in every_ring() {
        let daemon = Daemon::start(Arc::new(mem()), &setup(Coalesce::On));
        let mut device = daemon.connect(&options);
        let layout = device.layout();
        for _ in 0..50 {
            let read = device.queue(0).execute(&Request::read(0, 512), &layout).unwrap();
            assert_eq!(read.status, Some(S_OK));
        }
        (0..50).for_each(|_| burst(&mut device));
        // With an event index the driver asks for one call of a burst.
        assert!(options.event_idx || coalesced(&daemon) > 0, "no call was held");
    }
}

#[test]
fn without_coalescing_or_polling_no_call_is_held() {
    let asleep = Setup { poll_max: Duration::ZERO, ..setup(Coalesce::On) };
    for setup in [setup(Coalesce::Off), asleep] {
        let daemon = Daemon::start(Arc::new(mem()), &setup);
        let mut device = daemon.connect(&Options::default());
        (0..200).for_each(|_| burst(&mut device));
        assert_eq!(coalesced(&daemon), 0);
    }
}

#[test]
fn pauses_of_a_device_that_holds_calls_lose_nothing() {
    let daemon = Daemon::start(Arc::new(mem()), &setup(Coalesce::On));
    let device = daemon.connect(&Options { event_idx: false, ..Options::default() });
    under_load(device, 1, |loaded| {
        for _ in 0..50 {
            assert_eq!(daemon.control().ask(Command::Pause), Some(Answer::Changed(true)));
            assert_eq!(daemon.control().ask(Command::Resume), Some(Answer::Changed(true)));
            loaded.wait_for_progress(3);
        }
        assert!(coalesced(&daemon) > 0, "no call was held");
    });
}
