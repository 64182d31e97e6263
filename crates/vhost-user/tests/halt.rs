// SPDX-License-Identifier: Apache-2.0
//! `--on-error`: an error of the storage halts the disk, which keeps the failed requests.

mod common;

use backend::FileOptions;
use common::broken::{Broken, Trouble};
use common::gate::Gate;
use common::{DISK_BYTES, Daemon, LIMIT, Setup, TMPFS, file, mem, wait_until};
use data_plane::{ErrorPolicy, PlaneKind};
use driver::{Device, Options, Placed, Request, Segment};
use libc::{EIO, ENOSPC};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use vhost::VhostBackend;
use vhost_user::{Answer, Command, QueueStatus, Status};
use virtio_spec::blk::{RangeSegment, S_IOERR, S_OK};

const QUEUES: u16 = 2;
/// A message that the protocol does not have.
const UNKNOWN: u32 = 9999;
/// No guest has memory here.
const NOWHERE: u64 = 0x7000_0000_0000;
/// Requests of a queue.
const REQUESTS: u64 = 8;

/// A daemon whose disk fails on demand, and a guest.
struct Rig {
    daemon: Daemon,
    trouble: Trouble,
    options: Options,
    _directory: tempfile::TempDir,
}

impl Rig {
    fn new(on_error: ErrorPolicy, by_event: bool, options: Options) -> Rig {
        let (disk, directory) = file(TMPFS, FileOptions::default());
        let (disk, trouble) = Broken::new(Arc::new(disk), by_event);
        let setup = Setup { queues: QUEUES, threads: 2, on_error, ..Setup::default() };
        let options = Options { num_queues: QUEUES, ..options };
        let daemon = Daemon::start(Arc::new(disk), &setup);
        Rig { daemon, trouble, options, _directory: directory }
    }

    fn guest(&self) -> Device {
        self.daemon.connect(&self.options)
    }

    fn ask(&self, command: Command) -> Answer {
        self.daemon.control().ask(command).expect("the device is there")
    }

    fn status(&self) -> Status {
        self.daemon.status()
    }

    fn is_halted(&self) -> bool {
        self.status().health.halt.is_some()
    }

    /// Requests that the queues keep.
    fn kept(&self) -> u64 {
        self.status().queues.iter().flat_map(|queue| &queue.running).map(|report| report.kept).sum()
    }

    /// Requests that the queues have taken and returned, in all their starts.
    fn counts(&self) -> (u64, u64) {
        let queues = self.status().queues;
        let add = |sum: (u64, u64), one: &QueueStatus| {
            (sum.0 + one.total.chains, sum.1 + one.total.completed)
        };
        queues.iter().fold((0, 0), add)
    }

    /// Waits until the halted disk keeps all requests that it has taken. A later failure would halt it again.
    fn wait_for_kept(&self) {
        wait_until("all that failed is kept", || {
            let kept = self.kept();
            kept > 0 && self.counts() == (kept, 0)
        });
    }

    /// Puts [`REQUESTS`] writes into each queue, all of which fail: by an event, when all have started.
    fn halt(&self, device: &mut Device, errno: i32) -> Sent {
        self.trouble.gather(u64::from(QUEUES) * REQUESTS);
        self.trouble.set(errno);
        let mut sent = Sent::default();
        for queue in 0..usize::from(QUEUES) {
            (0..REQUESTS).for_each(|number| sent.submit(device, queue, number));
        }
        wait_until("the disk halts", || self.is_halted());
        sent
    }
}

/// The guest's requests in flight.
#[derive(Default)]
struct Sent(HashMap<(usize, u16), (u64, u8)>);

impl Sent {
    fn submit(&mut self, device: &mut Device, queue: usize, number: u64) {
        let sector = (queue as u64 * 1000) + number * 8;
        let byte = 1 + queue as u8 * 100 + number as u8;
        let layout = device.layout();
        let request = Request::write(sector, &[byte; 4096]);
        let id = device.queue(queue).submit(&request, &layout).unwrap();
        assert!(self.0.insert((queue, id), (sector, byte)).is_none());
    }

    /// Collects all requests, each of which ends once with `status`.
    #[track_caller]
    fn collect(&mut self, device: &mut Device, status: u8) -> Vec<(u64, u8)> {
        let mut written = Vec::new();
        for queue in 0..usize::from(QUEUES) {
            while self.0.keys().any(|(of, _)| *of == queue) {
                let (id, completion) = device.queue(queue).collect().unwrap();
                assert_eq!(completion.status, Some(status));
                written.push(self.0.remove(&(queue, id)).expect("each request ends once"));
            }
        }
        written
    }

    /// As [`Sent::collect`] after the disk was mended; the data is on the disk.
    #[track_caller]
    fn succeed(&mut self, device: &mut Device) {
        for (sector, byte) in self.collect(device, S_OK) {
            let mut data = [0; 4096];
            device.read(sector, &mut data).unwrap();
            assert_eq!(data, [byte; 4096], "sector {sector}");
        }
    }
}

#[track_caller]
fn nothing_is_returned(device: &mut Device) {
    std::thread::sleep(Duration::from_millis(20));
    for queue in 0..usize::from(QUEUES) {
        assert!(device.queue(queue).try_collect().unwrap().is_none(), "queue {queue}");
    }
}

#[test]
fn a_halted_disk_keeps_what_failed_takes_nothing_and_goes_on_after_the_resume() {
    for options in common::every_ring() {
        for by_event in [false, true] {
            for inflight in [false, true] {
                let options = Options { inflight, ..options.clone() };
                let rig = Rig::new(ErrorPolicy::Stop, by_event, options);
                let mut device = rig.guest();
                let mut sent = rig.halt(&mut device, EIO);
                nothing_is_returned(&mut device);
                let told = rig.status();
                assert!(told.health.halt.unwrap().reason.contains("write of 4096 bytes"));
                rig.wait_for_kept();
                // New requests wait, too.
                (0..2).for_each(|queue| sent.submit(&mut device, queue, REQUESTS));
                nothing_is_returned(&mut device);
                // The storage still fails: the disk halts again.
                assert_eq!(rig.ask(Command::Resume), Answer::Changed(true));
                wait_until("it halts again", || rig.is_halted());
                assert_eq!(rig.status().health.halts, 2);
                rig.wait_for_kept();
                nothing_is_returned(&mut device);
                rig.trouble.set(0);
                assert_eq!(rig.ask(Command::Resume), Answer::Changed(true));
                sent.succeed(&mut device);
                assert!(!rig.is_halted() && rig.kept() == 0);
                assert_eq!(rig.ask(Command::Resume), Answer::Changed(false));
            }
        }
    }
}

#[test]
fn the_count_of_requests_never_sinks_and_has_a_kept_one_once() {
    for options in common::both_rings() {
        for (inflight, reconnects) in [(false, false), (true, false), (false, true), (true, true)] {
            let rig = Rig::new(ErrorPolicy::Stop, true, Options { inflight, ..options.clone() });
            let mut device = rig.guest();
            let mut sent = Sent::default();
            rig.trouble.gather(2); // the write is in flight until another one starts
            rig.trouble.set(EIO);
            sent.submit(&mut device, 0, 0);
            wait_until("it is in flight", || rig.counts() == (1, 0));
            rig.trouble.gather(0);
            wait_until("the disk halts", || rig.is_halted());
            let report = rig.status().queues[0].running.clone().unwrap();
            assert_eq!((rig.counts(), report.inflight, report.kept), ((1, 0), 0, 1));
            assert_eq!(rig.ask(Command::Resume), Answer::Changed(true));
            wait_until("it halts again", || rig.is_halted());
            assert_eq!(rig.counts(), (1, 0));
            assert_eq!(rig.ask(Command::Pause), Answer::Changed(true));
            assert_eq!(rig.counts(), (1, 0), "the queue does not run");
            let bytes = 2 * DISK_BYTES;
            assert_eq!(rig.ask(Command::Resize(Some(bytes))), Answer::Resized(bytes));
            if reconnects {
                device.session().raw().message(UNKNOWN, &[], &[]).unwrap();
                rig.daemon.next_outcome().expect_err("an unknown message");
                if !inflight {
                    sent.collect(&mut device, S_IOERR);
                }
                device.reconnect(rig.daemon.socket()).unwrap();
                assert_eq!(rig.counts(), (1, u64::from(!inflight)));
            }
            rig.trouble.set(0);
            assert_eq!(rig.ask(Command::Resume), Answer::Changed(true));
            sent.collect(&mut device, S_OK);
            assert_eq!(rig.counts(), (1, 1));
            device.write(0, &[1; 512]).unwrap();
            assert_eq!(rig.counts(), (2, 2));
        }
    }
}

#[test]
fn every_kind_of_request_halts_but_a_flush_reaches_the_guest() {
    let range = RangeSegment { sector: 0, num_sectors: 8, flags: 0 };
    let requests = [
        Request::read(0, 4096),
        Request::write(0, &[1; 4096]),
        Request::discard(&[range]),
        Request::write_zeroes(&[range]),
    ];
    let rig = Rig::new(ErrorPolicy::Stop, false, Options::default());
    let mut device = rig.guest();
    let layout = device.layout();
    for (halts, request) in (1..).zip(&requests) {
        rig.trouble.set(EIO);
        device.queue(0).submit(request, &layout).unwrap();
        wait_until("the disk halts", || rig.status().health.halts == halts);
        nothing_is_returned(&mut device);
        rig.trouble.set(0);
        rig.ask(Command::Resume);
        assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK), "{halts}");
    }
    rig.trouble.set(EIO);
    let flushed = device.queue(0).execute(&Request::flush(), &layout).unwrap();
    assert_eq!(flushed.status, Some(S_IOERR));
    assert!(rig.status().health.halt.unwrap().reason.contains("flush"));
    rig.ask(Command::Resume);
    // The loss is known: it does not halt the disk again.
    let flushed = device.queue(0).execute(&Request::flush(), &layout).unwrap();
    assert_eq!((flushed.status, rig.is_halted()), (Some(S_IOERR), false));
}

#[test]
fn the_policy_enospc_reports_other_errors_report_reports_all_and_each_one_those_of_guest_memory() {
    for (policy, errno) in [
        (ErrorPolicy::Enospc, EIO),
        (ErrorPolicy::Report, EIO),
        (ErrorPolicy::Report, ENOSPC),
        (ErrorPolicy::Stop, libc::EFAULT),
    ] {
        let rig = Rig::new(policy, false, Options::default());
        let mut device = rig.guest();
        rig.trouble.set(errno);
        device.write(0, &[1; 512]).expect_err("the error reaches the guest");
        assert!(!rig.is_halted());
    }
    let rig = Rig::new(ErrorPolicy::Enospc, true, Options::default());
    let mut device = rig.guest();
    let mut sent = rig.halt(&mut device, ENOSPC);
    wait_until("all failed", || rig.kept() == 2 * REQUESTS); // a later failure would halt it again
    rig.trouble.set(0);
    rig.ask(Command::Resume);
    sent.succeed(&mut device);
}

#[test]
fn pause_resize_switch_and_messages_in_any_order_lose_nothing() {
    for options in common::both_rings() {
        for (seed, inflight) in [(1, false), (2, true), (3, false), (4, true)] {
            let options = Options { inflight, ..options.clone() };
            let rig = Rig::new(ErrorPolicy::Stop, seed % 2 == 0, options);
            let mut device = rig.guest();
            let mut sent = rig.halt(&mut device, EIO);
            let mut paused = false;
            for (step, byte) in (1..).zip(common::pattern(12, seed)) {
                match byte % 5 {
                    0 => {
                        assert_eq!(rig.ask(Command::Pause), Answer::Changed(!paused));
                        paused = true;
                    }
                    1 => {
                        let bytes = DISK_BYTES + (seed * 100 + step) * 4096;
                        assert_eq!(rig.ask(Command::Resize(Some(bytes))), Answer::Resized(bytes));
                    }
                    2 => {
                        let switch = Command::Switch(PlaneKind::Uring);
                        assert_eq!(rig.ask(switch), Answer::Switched(0));
                    }
                    3 => drop(device.start_log().unwrap()),
                    _ => {
                        assert_eq!(rig.ask(Command::Resume), Answer::Changed(true));
                        wait_until("it halts again", || rig.is_halted());
                        paused = false;
                    }
                }
                assert!(rig.is_halted() && rig.status().paused == paused, "seed {seed} {step}");
                nothing_is_returned(&mut device);
            }
            if !paused {
                rig.wait_for_kept();
            }
            rig.trouble.set(0);
            assert_eq!(rig.ask(Command::Resume), Answer::Changed(true));
            sent.succeed(&mut device);
            let told = rig.status();
            assert!(!told.paused && told.health.halt.is_none());
        }
    }
}

#[test]
fn a_halt_in_the_drain_of_a_pause_keeps_the_requests() {
    for options in common::both_rings() {
        for inflight in [false, true] {
            let rig = Rig::new(ErrorPolicy::Stop, true, Options { inflight, ..options.clone() });
            let mut device = rig.guest();
            rig.trouble.gather(REQUESTS);
            rig.trouble.set(EIO);
            let mut sent = Sent::default();
            (0..REQUESTS).for_each(|number| sent.submit(&mut device, 0, number));
            wait_until("they are in flight", || {
                let report = rig.status().queues[0].running.clone();
                report.is_some_and(|report| report.inflight + report.kept == REQUESTS)
            });
            assert_eq!(rig.ask(Command::Pause), Answer::Changed(true));
            assert!(rig.is_halted() && rig.status().paused);
            assert_eq!(rig.kept(), REQUESTS);
            rig.trouble.set(0);
            rig.ask(Command::Resume);
            sent.succeed(&mut device);
        }
    }
}

#[test]
fn a_queue_with_a_ring_fault_keeps_nothing_so_that_it_stops_after_a_resume() {
    for options in common::both_rings() {
        for inflight in [false, true] {
            let rig = Rig::new(ErrorPolicy::Stop, true, Options { inflight, ..options.clone() });
            let mut device = rig.guest();
            // The write is in flight until another one starts, which none does.
            rig.trouble.gather(2);
            rig.trouble.set(EIO);
            let mut sent = Sent::default();
            sent.submit(&mut device, 0, 0);
            let broken = Placed { segments: vec![Segment::readable(NOWHERE, 16)] };
            device.queue(0).add_placed(broken, false).unwrap();
            device.queue(0).queue().publish();
            device.queue(0).queue().kick();
            assert!(device.queue(0).queue().wait_err(LIMIT).unwrap(), "the ring is at fault");
            rig.trouble.gather(0);
            wait_until("the disk halts", || rig.is_halted());
            sent.collect(&mut device, S_IOERR);
            rig.trouble.set(0);
            assert_eq!(rig.ask(Command::Resume), Answer::Changed(true));
            drop(device);
            rig.daemon.next_outcome().expect("the connection ends");
        }
    }
}

#[test]
fn a_stop_by_the_front_end_answers_what_is_kept() {
    for options in common::both_rings() {
        for inflight in [false, true] {
            for stop in ["base", "enable", "num", "reset owner"] {
                let rig =
                    Rig::new(ErrorPolicy::Stop, true, Options { inflight, ..options.clone() });
                let mut device = rig.guest();
                let mut sent = rig.halt(&mut device, EIO);
                wait_until("all failed", || rig.kept() == 2 * REQUESTS);
                for queue in 0..QUEUES.into() {
                    match stop {
                        "base" => drop(device.session().stop_queue(queue).unwrap().to_string()),
                        "num" => device.session().frontend().set_vring_num(queue, 64).unwrap(),
                        "enable" => device.session().enable(queue, false).unwrap(),
                        _ => device.session().frontend().reset_owner().unwrap(),
                    }
                }
                sent.collect(&mut device, S_IOERR);
                // The halt goes on: a queue that starts again takes nothing.
                rig.trouble.set(0);
                (0..QUEUES.into()).for_each(|queue| device.start_queue(queue).unwrap());
                sent.submit(&mut device, 1, 0);
                nothing_is_returned(&mut device);
                assert_eq!(rig.ask(Command::Resume), Answer::Changed(true));
                sent.succeed(&mut device);
            }
        }
    }
}

#[test]
fn a_reset_of_the_device_does_not_wait() {
    for options in common::both_rings() {
        let rig = Rig::new(ErrorPolicy::Stop, false, options);
        let mut device = rig.guest();
        let mut sent = rig.halt(&mut device, EIO);
        wait_until("all failed", || rig.kept() > 0);
        device.session().reset_device().unwrap();
        assert!(rig.is_halted() && rig.status().queues.iter().all(|queue| queue.plane.is_none()));
        rig.trouble.set(0);
        assert_eq!(rig.ask(Command::Resume), Answer::Changed(true));
        // Requests that were kept have got an error; others were never taken.
        for queue in 0..QUEUES.into() {
            while let Some((id, completion)) = device.queue(queue).try_collect().unwrap() {
                assert_eq!(completion.status, Some(S_IOERR));
                assert!(sent.0.remove(&(queue, id)).is_some());
            }
        }
        assert!(sent.0.len() < 2 * usize::try_from(REQUESTS).unwrap());
    }
}

#[test]
fn a_front_end_that_comes_back_gets_its_requests_from_the_region_or_an_error_without() {
    for options in common::both_rings() {
        for inflight in [false, true] {
            let rig = Rig::new(ErrorPolicy::Stop, true, Options { inflight, ..options.clone() });
            let mut device = rig.guest();
            let mut sent = rig.halt(&mut device, EIO);
            wait_until("all failed", || rig.kept() == 2 * REQUESTS);
            // The daemon ends the connection.
            device.session().raw().message(UNKNOWN, &[], &[]).unwrap();
            rig.daemon.next_outcome().expect_err("an unknown message");
            match inflight {
                true => nothing_is_returned(&mut device),
                false => drop(sent.collect(&mut device, S_IOERR)),
            }
            device.reconnect(rig.daemon.socket()).unwrap();
            nothing_is_returned(&mut device);
            assert!(rig.is_halted());
            rig.trouble.set(0);
            rig.ask(Command::Resume);
            sent.submit(&mut device, 0, REQUESTS);
            sent.succeed(&mut device);
        }
    }
}

/// Options for a guest whose queues have a region of memory each.
fn a_region_for_each_queue() -> Options {
    // Indirect tables would lie in the first region that has room.
    let of_queue = Options { scratch_bytes: 1 << 20, indirect: false, ..Options::default() };
    let daemon = Daemon::start(Arc::new(mem()), &Setup::default());
    let bytes = daemon.connect(&of_queue).memory().alloc(1, 1);
    let regions = vec![(0, bytes), (1 << 32, bytes)];
    Options { regions, mem_slots: true, ..of_queue }
}

#[test]
fn a_queue_that_cannot_start_again_takes_no_answer_from_the_others() {
    for options in [Options::default(), Options { packed: true, ..Options::default() }] {
        let options = Options { packed: options.packed, ..a_region_for_each_queue() };
        let rig = Rig::new(ErrorPolicy::Stop, true, options);
        let mut device = rig.guest();
        let mut sent = rig.halt(&mut device, EIO);
        wait_until("all failed", || rig.kept() == 2 * REQUESTS);
        let first = Arc::clone(&device.memory().regions()[0]);
        device.session().unshare_region(&first).expect_err("queue 0 has lost its ring");
        let error = rig.daemon.next_outcome().expect_err("the connection has ended");
        assert!(error.to_string().contains("queue 0 cannot start"), "{error}");
        for _ in 0..REQUESTS {
            let (id, completion) = device.queue(1).collect().unwrap();
            assert_eq!(completion.status, Some(S_IOERR));
            sent.0.remove(&(1, id)).expect("each request ends once");
        }
    }
}

#[test]
fn a_request_that_is_not_answered_in_time_is_told_once_and_its_end_too() {
    let (disk, permits) = Gate::new(Arc::new(mem()));
    let io_timeout = Some(Duration::from_millis(50));
    let setup = Setup { io_timeout, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(disk), &setup);
    let mut device = daemon.connect(&Options::default());
    let layout = device.layout();
    let stalls = || match daemon.control().ask(Command::Status) {
        Some(Answer::Status(status)) => (status.health.stalled.len(), status.health.stalls),
        other => panic!("{other:?}"),
    };
    device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
    wait_until("the stall is told", || stalls() == (1, 1));
    std::thread::sleep(Duration::from_millis(120));
    assert_eq!(stalls(), (1, 1), "it is told once");
    permits.open();
    device.queue(0).collect().unwrap();
    wait_until("its end is told", || stalls() == (0, 1));
}
