// SPDX-License-Identifier: Apache-2.0
//! Counters of a queue, which have the same names and meanings on both data planes.

mod common;

use common::broken::Broken;
use common::{Daemon, LIMIT, Setup, every_ring, mem};
use data_plane::{Coalesce, ErrorPolicy, FailureKind, QueueReport, QueueStats};
use driver::{Device, Options, Request};
use libc::{EDQUOT, EIO, ENODEV, ENOSPC, EROFS, ETIMEDOUT};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost_user::{Answer, Command};
use virtio_spec::blk::S_OK;

/// Requests of a round.
const ROUND: u64 = 20;

fn total(daemon: &Daemon, queue: usize) -> QueueStats {
    daemon.status().queues[queue].total
}

/// One request at a time; the driver sleeps until each call.
fn round(device: &mut Device) {
    let layout = device.layout();
    for _ in 0..ROUND {
        let read = device.queue(0).execute(&Request::read(0, 512), &layout).unwrap();
        assert_eq!(read.status, Some(S_OK));
    }
}

#[test]
fn polls_are_counted_with_their_time_and_by_their_end() {
    let poll_max = Duration::from_micros(200);
    let daemon = Daemon::start(Arc::new(mem()), &Setup { poll_max, ..Setup::default() });
    let mut device = daemon.connect(&Options::default());
    let end = Instant::now() + LIMIT;
    loop {
        let QueueStats { polls, polls_won, poll_ns, .. } = total(&daemon, 0);
        assert!(polls_won <= polls);
        if polls_won > 0 && polls > polls_won && poll_ns > 0 {
            break;
        }
        assert!(Instant::now() < end, "{polls_won} of {polls} polls found work, {poll_ns} ns");
        round(&mut device);
        std::thread::sleep(Duration::from_millis(2)); // the last poll of a round finds nothing
    }
}

#[test]
fn without_polling_none_is_counted() {
    let setup = Setup { poll_max: Duration::ZERO, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(mem()), &setup);
    let mut device = daemon.connect(&Options::default());
    (0..20).for_each(|_| round(&mut device));
    let QueueStats { polls, polls_won, poll_ns, completed, .. } = total(&daemon, 0);
    assert_eq!((polls, polls_won, poll_ns, completed), (0, 0, 0, 20 * ROUND));
}

#[test]
fn calls_that_the_driver_does_not_want_are_counted_apart() {
    for options in every_ring() {
        let setup = Setup { coalesce: Coalesce::Off, ..Setup::default() };
        let daemon = Daemon::start(Arc::new(mem()), &setup);
        let mut device = daemon.connect(&options);
        round(&mut device);
        let before = total(&daemon, 0);
        let layout = device.layout();
        for number in 0..ROUND {
            let end = Instant::now() + LIMIT;
            device.queue(0).queue().suppress_calls();
            device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
            while device.queue(0).try_collect().unwrap().is_none() {
                assert!(Instant::now() < end, "request {number} is lost");
            }
        }
        // The queue counts after the driver sees the request.
        let counted = || {
            let after = total(&daemon, 0);
            (after.calls - before.calls, after.suppressed - before.suppressed)
        };
        common::wait_until("all are counted", || counted().1 >= ROUND);
        assert_eq!(counted(), (0, ROUND), "{options:?}");
    }
}

#[test]
fn failures_are_counted_by_kind_on_their_queue() {
    const ERRORS: [(i32, FailureKind); 6] = [
        (EIO, FailureKind::Io),
        (ENOSPC, FailureKind::NoSpace),
        (EDQUOT, FailureKind::NoSpace),
        (EROFS, FailureKind::ReadOnly),
        (ENODEV, FailureKind::Removed),
        (ETIMEDOUT, FailureKind::Timeout),
    ];
    let (disk, trouble) = Broken::new(Arc::new(mem()), false);
    let setup = Setup { queues: 2, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(disk), &setup);
    let mut device = daemon.connect(&Options { num_queues: 2, ..Options::default() });
    let layout = device.layout();
    let mut expected = [0; FailureKind::ALL.len()];
    for (errno, kind) in ERRORS {
        trouble.set(errno);
        let failed = device.queue(1).execute(&Request::write(0, &[1; 512]), &layout).unwrap();
        assert_ne!(failed.status, Some(S_OK));
        expected[kind as usize] += 1;
    }
    assert_eq!(total(&daemon, 1).failures, expected);
    assert_eq!(total(&daemon, 0).failures, [0; FailureKind::ALL.len()]);
    let counters = total(&daemon, 1).counters();
    assert!(counters.contains(&("failed_no_space".to_owned(), 2)), "{counters:?}");
}

#[test]
fn each_failure_of_a_kept_request_is_counted() {
    let (disk, trouble) = Broken::new(Arc::new(mem()), false);
    let on_error = ErrorPolicy::Stop;
    let daemon = Daemon::start(Arc::new(disk), &Setup { on_error, ..Setup::default() });
    let mut device = daemon.connect(&Options { inflight: true, ..Options::default() });
    let layout = device.layout();
    trouble.set(EIO);
    device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    let halted = |times| {
        let status = daemon.status();
        status.health.halt.is_some() && status.health.halts == times
    };
    common::wait_until("the disk halts", || halted(1));
    assert_eq!(daemon.control().ask(Command::Resume), Some(Answer::Changed(true)));
    common::wait_until("it halts again", || halted(2));
    trouble.set(0);
    assert_eq!(daemon.control().ask(Command::Resume), Some(Answer::Changed(true)));
    assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
    let QueueStats { failures, failed, .. } = total(&daemon, 0);
    assert_eq!((failures[FailureKind::Io as usize], failed), (2, 0));
}

#[test]
fn the_choices_of_the_plane_are_told() {
    for (coalesce, coalescing) in [(Coalesce::On, true), (Coalesce::Off, false)] {
        let daemon = Daemon::start(Arc::new(mem()), &Setup { coalesce, ..Setup::default() });
        let _device = daemon.connect(&Options::default());
        let status = daemon.status();
        let report: &QueueReport = status.queues[0].running.as_ref().expect("it runs");
        assert!(report.choices.batch_size > 0);
        assert_eq!(report.choices.coalescing, coalescing);
        let counters = report.counters();
        assert!(counters.contains(&("coalescing".to_owned(), coalescing.into())), "{counters:?}");
    }
}
