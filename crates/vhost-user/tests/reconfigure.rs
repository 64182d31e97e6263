// SPDX-License-Identifier: Apache-2.0
//! Messages that change the state under running queues, while the queues are loaded: no request is
//! lost or done twice, and every byte is verified.

mod common;

use backend::wrap::{Phase, Record};
use backend::{FileOptions, IoKind};
use common::gate::Gate;
use common::load::{Done, Loaded, under_load};
use common::{Daemon, Setup, TMPFS, both_rings, every_ring, file, layouts, mem, wait_until};
use driver::{GuestMemory, Layout, Options, QueueSetup, Request, RequestQueue};
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use vhost::VhostBackend;
use virtio_spec::blk::S_OK;
use virtio_spec::features::{VHOST_USER_F_PROTOCOL_FEATURES, bit};

/// Times that each message is sent.
const TIMES: usize = 25;
const QUEUES: u16 = 2;

fn two_threads() -> Setup {
    Setup { queues: QUEUES, threads: 2, ..Setup::default() }
}

/// Runs `act` repeatedly under the load of two queues, on a direct file, with split and with packed
/// rings.
fn again_and_again(setup: &Setup, options: &Options, mut act: impl FnMut(&mut Loaded, usize)) {
    for packed in layouts() {
        let (disk, _directory) = file(TMPFS, FileOptions::default());
        let daemon = Daemon::start(Arc::new(disk), setup);
        let options = Options { packed, num_queues: QUEUES, ..options.clone() };
        let device = daemon.connect(&options);
        let (done, session) = under_load(device, QUEUES.into(), |loaded| {
            for time in 0..TIMES {
                loaded.wait_for_progress(3);
                act(loaded, time);
            }
        });
        assert!(done.iter().all(|done| done.reads + done.writes >= 3 * TIMES as u64));
        drop(session);
        daemon.next_outcome().expect("the connection ends well");
    }
}

#[test]
fn the_memory_table_may_be_set_again_under_load() {
    again_and_again(&two_threads(), &Options::default(), |loaded, _| {
        loaded.session.share_memory(&loaded.memory, false).unwrap();
    });
}

#[test]
fn pinned_memory_may_be_set_again_under_load() {
    let setup = Setup { pin_memory: true, ..two_threads() };
    again_and_again(&setup, &Options::default(), |loaded, _| {
        loaded.session.share_memory(&loaded.memory, false).unwrap();
    });
}

#[test]
fn memory_regions_come_and_go_under_load() {
    let options = Options { mem_slots: true, ..Options::default() };
    let extra = GuestMemory::new(&[(1 << 40, 1 << 20)]).unwrap();
    again_and_again(&two_threads(), &options, |loaded, _| {
        loaded.session.share_memory(&extra, true).unwrap();
        loaded.wait_for_progress(1);
        loaded.session.unshare_region(&extra.regions()[0]).unwrap();
    });
}

#[test]
fn call_eventfds_swapped_under_load_lose_no_completion() {
    again_and_again(&two_threads(), &Options::default(), |loaded, time| {
        let index = time % 2;
        loaded.session.frontend().set_vring_call(index, &loaded.calls[index]).unwrap();
        // Without an eventfd the driver may fall asleep; a new eventfd has to wake it up.
        loaded.session.remove_call(index).unwrap();
        loaded.session.frontend().set_vring_call(index, &loaded.calls[index]).unwrap();
    });
}

#[test]
fn kick_eventfds_swapped_under_load_lose_no_request() {
    again_and_again(&two_threads(), &Options::default(), |loaded, time| {
        let index = time % 2;
        loaded.session.frontend().set_vring_kick(index, &loaded.kicks[index]).unwrap();
    });
}

#[test]
fn queues_may_be_disabled_and_enabled_under_load() {
    again_and_again(&two_threads(), &Options::default(), |loaded, time| {
        let index = time % 2;
        loaded.session.enable(index, false).unwrap();
        loaded.session.enable(index, true).unwrap();
    });
}

#[test]
fn features_may_be_said_again_under_load() {
    again_and_again(&two_threads(), &Options::default(), |loaded, _| {
        loaded.session.config().unwrap();
        let features = loaded.session.features();
        loaded.session.negotiate_features(features).unwrap();
    });
}

#[test]
fn a_stopped_queue_is_drained_and_goes_on_from_the_base_it_told() {
    for packed in layouts() {
        let disk = Record::in_memory(Arc::new(mem()));
        let log = disk.log();
        let daemon = Daemon::start(Arc::new(disk), &two_threads());
        let options = Options { packed, num_queues: QUEUES, ..Options::default() };
        let device = daemon.connect(&options);
        let (done, _session) = under_load(device, QUEUES.into(), |loaded| {
            for time in 0..TIMES {
                loaded.wait_for_progress(3);
                let index = time % 2;
                let base = loaded.session.stop_queue(index).unwrap();
                if packed {
                    assert_eq!(base >> 16, base & 0xffff, "taken is not given back: {base:#x}");
                } else {
                    let used_idx = loaded.used[index].load_u16(2, Ordering::Acquire);
                    assert_eq!(base, u32::from(used_idx), "taken is not given back");
                }
                loaded.session.set_vring_base(index, base).unwrap();
                loaded.session.frontend().set_vring_kick(index, &loaded.kicks[index]).unwrap();
            }
        });
        let writes: u64 = done.iter().map(|Done { writes, .. }| writes).sum();
        let started = |entry: &&backend::wrap::Entry| {
            (entry.kind, entry.phase) == (IoKind::Write, Phase::Start)
        };
        let on_disk = log.entries().iter().filter(started).count();
        assert_eq!(on_disk as u64, writes, "each write reached the disk once");
    }
}

#[test]
fn stopping_waits_for_the_requests_in_flight() {
    for options in both_rings() {
        let (disk, permits) = Gate::new(Arc::new(mem()));
        let daemon = Daemon::of(disk);
        let mut device = daemon.connect(&options);
        let layout = device.layout();
        (0..4).for_each(|sector| {
            device.queue(0).submit(&Request::write(sector, &[1; 512]), &layout).unwrap();
        });
        let in_flight = || {
            let report = daemon.status().queues[0].running.as_ref().map(|it| it.inflight);
            report == Some(4)
        };
        wait_until("the requests are in flight", in_flight);
        let has_stopped = AtomicBool::new(false);
        let base = std::thread::scope(|scope| {
            let session = device.session();
            let has_stopped = &has_stopped;
            let stop = scope.spawn(move || {
                let base = session.stop_queue(0).unwrap();
                has_stopped.store(true, Ordering::Release);
                base
            });
            std::thread::sleep(Duration::from_millis(50));
            let early = has_stopped.load(Ordering::Acquire);
            permits.open(); // a failed test ends, too
            assert!(!early, "it has stopped with requests in flight");
            stop.join().unwrap()
        });
        // Through indirect tables each request takes one descriptor.
        assert_eq!(base, if options.packed { 0x8004_8004 } else { 4 }, "{base:#x}");
        for _ in 0..4 {
            assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
        }
    }
}

/// Keeps a read of the sector `number` in flight until the device serves none any more, and counts those that are done.
fn one_after_another(mut queue: RequestQueue, number: usize, done: &AtomicU64, end: &AtomicBool) {
    while queue.submit(&Request::read(number as u64, 512), &Layout::default()).is_ok() {
        while queue.try_collect().unwrap().is_none() {
            if end.load(Ordering::Acquire) {
                return;
            }
            if queue.queue().arm_calls() {
                queue.queue().wait_call_for(Duration::from_millis(1)).unwrap();
            }
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Stops queues while the storage keeps the request of one of them. Returns whether all others come to rest.
fn rest_beside(held: usize) -> bool {
    const QUEUES: usize = 8;
    const RESET_OWNER: u32 = 4;
    let (disk, permits) = Gate::of_sector(Arc::new(mem()), held as u64);
    permits.open();
    let setup = Setup { queues: QUEUES as u16, threads: 2, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(disk), &setup);
    let options = Options { num_queues: QUEUES as u16, ..Options::default() };
    let (mut session, queues) = daemon.connect(&options).into_parts();
    let end = Arc::new(AtomicBool::new(false));
    let done = Arc::new([const { AtomicU64::new(0) }; QUEUES]);
    let all = || done.each_ref().map(|done| done.load(Ordering::Relaxed));
    let start = |(number, queue)| {
        let (done, end) = (Arc::clone(&done), Arc::clone(&end));
        std::thread::spawn(move || one_after_another(queue, number, &done[number], &end))
    };
    let threads: Vec<_> = queues.into_iter().enumerate().map(start).collect();
    wait_until("all are served", || all().iter().all(|done| *done >= 2));
    permits.close();
    let running = || daemon.status().queues[held].running.clone().expect("the queue runs");
    wait_until("the storage keeps a request", || running().inflight == 1);
    session.raw().message(RESET_OWNER, &[], &[]).unwrap();
    let is_at_rest = |_| {
        let before = all();
        std::thread::sleep(Duration::from_millis(100));
        all() == before
    };
    let rest = (0..600).any(is_at_rest);
    permits.open(); // a failed test ends, too
    session.config().unwrap(); // answered after the queues have stopped
    end.store(true, Ordering::Release);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    rest
}

#[test]
fn queues_that_are_stopped_together_stop_taking_before_one_is_waited_for() {
    for held in [0, 7] {
        assert!(rest_beside(held), "queues take requests while queue {held} is waited for");
    }
}

#[test]
fn a_queue_that_starts_calls_only_a_driver_that_may_wait_for_it() {
    for options in every_ring() {
        let daemon = Daemon::of(mem());
        let untouched = Options { setup: QueueSetup::Untouched, ..options.clone() };
        let mut device = daemon.connect(&untouched);
        let layout = device.layout();
        device.queue(0).queue().suppress_calls();
        if options.event_idx && !options.packed {
            // No other value asks for no call; the driver may wait for the entry before.
            device.queue(0).queue().split().write_used_event(0x4000);
        }
        device.start().unwrap();
        assert!(!device.queue(0).queue().take_call().unwrap(), "asked for none: {options:?}");
        device.write(0, &[1; 512]).unwrap();

        // The call for a request is lost: the restarted queue repeats it.
        assert!(device.queue(0).queue().arm_calls());
        let _ = device.queue(0).queue().take_call();
        device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
        device.queue(0).queue().wait_call().unwrap();
        let _ = device.queue(0).queue().take_call();
        let base = device.session().stop_queue(0).unwrap();
        device.session().set_vring_base(0, base).unwrap();
        let kick = device.queue(0).queue().kick_fd().try_clone().unwrap();
        device.session().frontend().set_vring_kick(0, &kick).unwrap();
        device.session().config().unwrap(); // answered after it has started
        assert!(device.queue(0).queue().take_call().unwrap(), "may wait: {options:?}");
    }
}

/// User Mode Linux has no eventfds that interrupt it.
#[test]
fn a_socket_pair_may_stand_for_a_call_eventfd_and_may_be_full() {
    const SET_VRING_CALL: u32 = 13;
    for options in both_rings() {
        let daemon = Daemon::of(mem());
        let mut device = daemon.connect(&options);
        let (mut reader, writer) = UnixStream::pair().unwrap();
        let index = 0u64.to_ne_bytes();
        device.session().raw().message(SET_VRING_CALL, &index, &[writer.as_fd()]).unwrap();
        device.session().config().unwrap();
        let mut calls = [0; 8];
        reader.read_exact(&mut calls).unwrap(); // for calls that the eventfd before may have missed
        assert!(device.queue(0).queue().arm_calls());
        let layout = device.layout();
        device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
        reader.read_exact(&mut calls).unwrap();
        assert_eq!(u64::from_ne_bytes(calls), 1);
        assert_eq!(device.queue(0).try_collect().unwrap().unwrap().1.status, Some(S_OK));

        // The daemon has made the shared socket end non-blocking, also for this test.
        while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
        for _ in 0..3 {
            assert!(device.queue(0).queue().arm_calls());
            device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
            wait_until("the request is done", || device.queue(0).try_collect().unwrap().is_some());
        }
    }
}

/// User Mode Linux sends 0 as the start of a new packed ring, where the wrap bits should be 1.
#[test]
fn a_new_packed_ring_may_be_said_to_start_at_zero_and_one_that_came_round_to_it_is_told_apart() {
    const SIZE: u16 = 8;
    for packed in layouts().into_iter().filter(|&packed| packed) {
        let daemon = Daemon::of(mem());
        let mut device =
            daemon.connect(&Options { packed, queue_size: SIZE, ..Options::default() });
        let kick = device.queue(0).queue().kick_fd().try_clone().unwrap();
        device.session().stop_queue(0).unwrap();
        for _lap in 0..2 {
            device.session().set_vring_base(0, 0).unwrap();
            device.session().frontend().set_vring_kick(0, &kick).unwrap();
            // Through indirect tables each request takes one descriptor.
            (0..SIZE.into()).for_each(|sector| device.write(sector, &[7; 512]).unwrap());
            let base = device.session().stop_queue(0).unwrap();
            assert!([0, 0x8000_8000].contains(&base), "a whole lap: {base:#x}");
        }
    }
}

#[test]
fn a_disabled_queue_takes_nothing() {
    for options in both_rings() {
        let disk = Record::in_memory(Arc::new(mem()));
        let log = disk.log();
        let setup = Setup { queues: 2, ..Setup::default() };
        let daemon = Daemon::start(Arc::new(disk), &setup);
        let mut device = daemon.connect(&Options { num_queues: 2, ..options });
        let layout = device.layout();
        device.session().enable(0, false).unwrap();
        device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
        device.queue(0).queue().kick();
        // The thread of both queues has completed a pass.
        for _ in 0..20 {
            device.queue(1).execute(&Request::flush(), &layout).unwrap();
        }
        assert!(log.entries().iter().all(|entry| entry.kind == IoKind::Flush));
        device.session().enable(0, true).unwrap();
        assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
    }
}

#[test]
fn features_without_the_protocol_features_enable_and_start_a_complete_queue() {
    for options in both_rings() {
        let daemon = Daemon::of(mem());
        let mut device = daemon.connect(&options);
        let layout = device.layout();
        device.session().enable(0, false).unwrap();
        device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
        device.queue(0).queue().kick();
        let features = device.features() & !bit(VHOST_USER_F_PROTOCOL_FEATURES);
        device.session().set_features(features).unwrap();
        assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
    }
}

#[test]
fn a_reset_device_is_as_new() {
    for options in both_rings() {
        let daemon = Daemon::of(mem());
        let mut device = daemon.connect(&options);
        for round in 0..3 {
            device.write(round, &[round as u8; 512]).unwrap();
            if round == 1 {
                device.session().frontend().reset_owner().unwrap();
            }
            device.session().reset_device().unwrap();
            match device.queue(0).queue().ring() {
                driver::Ring::Split(ring) => ring.reset(),
                driver::Ring::Packed(ring) => ring.reset(),
            }
            device.start().unwrap();
        }
        let mut data = [0; 512];
        device.read(2, &mut data).unwrap();
        assert_eq!(data, [2; 512]);
    }
}

#[test]
fn a_queue_that_was_reset_waits_to_be_enabled_again() {
    let disk = Record::in_memory(Arc::new(mem()));
    let log = disk.log();
    let setup = Setup { queues: 2, ..Setup::default() };
    let daemon = Daemon::start(Arc::new(disk), &setup);
    let mut device = daemon.connect(&Options { num_queues: 2, ..Options::default() });
    let layout = device.layout();
    device.session().reset_device().unwrap();
    let kick = device.queue(0).queue().kick_fd().try_clone().unwrap();
    device.start_queue(1).unwrap();
    device.session().frontend().set_vring_num(0, 128).unwrap();
    device.session().frontend().set_vring_kick(0, &kick).unwrap();
    device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    (0..20).for_each(|_| drop(device.queue(1).execute(&Request::flush(), &layout).unwrap()));
    assert!(log.entries().iter().all(|entry| entry.kind == IoKind::Flush));
    device.start_queue(0).unwrap();
    assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
}

#[test]
fn a_front_end_killed_with_requests_in_flight_is_drained_and_followed_by_the_next() {
    for options in both_rings() {
        let inner = Arc::new(mem());
        let (gate, permits) = Gate::new(inner.clone());
        let disk = Record::in_memory(Arc::new(gate));
        let log = disk.log();
        let daemon = Daemon::start(Arc::new(disk), &Setup::default());
        let mut device = daemon.connect(&options);
        let layout = device.layout();
        for sector in 0..16 {
            device.queue(0).submit(&Request::write(sector, &[sector as u8; 512]), &layout).unwrap();
        }
        wait_until("all have started", || log.entries().len() == 16);
        drop(device);
        permits.open();
        daemon.next_outcome().unwrap();
        assert_eq!(log.entries().len(), 32, "all have ended");
        let mut device = daemon.connect(&options);
        for sector in 0..16 {
            let mut data = [0; 512];
            device.read(sector, &mut data).unwrap();
            assert_eq!(data, [sector as u8; 512]);
        }
    }
}

#[test]
fn a_front_end_killed_under_load_is_followed_by_the_next() {
    let (disk, _directory) = file(TMPFS, FileOptions::default());
    let daemon = Daemon::start(Arc::new(disk), &two_threads());
    for options in both_rings() {
        for round in 0..5 {
            let mut device = daemon.connect(&Options { num_queues: QUEUES, ..options.clone() });
            let layout = device.layout();
            for index in 0..2 {
                let data = [round; 32 << 10];
                for sector in 0..30 {
                    let request = Request::write(sector * 64, &data);
                    device.queue(index).submit(&request, &layout).unwrap();
                }
            }
            drop(device);
            daemon.next_outcome().unwrap();
            let mut next = daemon.connect(&options);
            let mut data = [0; 512];
            next.write(4000, &[round + 1; 512]).unwrap();
            next.read(4000, &mut data).unwrap();
            assert_eq!(data, [round + 1; 512]);
            drop(next);
            daemon.next_outcome().unwrap();
        }
    }
}
