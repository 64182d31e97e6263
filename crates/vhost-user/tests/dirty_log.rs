// SPDX-License-Identifier: Apache-2.0
//! The dirty log holds exactly the pages that the device wrote: data, status and used ring.

mod common;

use backend::FileOptions;
use backend::wrap::{Fault, FaultRule, OpSet};
use common::load::under_load;
use common::plane::is_kernel;
use common::{Daemon, Setup, TMPFS, both_rings, file, layouts, mem, wait_until};
use driver::{Device, DirtyLog, Layout, Options, Request};
use std::collections::BTreeSet;
use std::sync::Arc;
use virtio_spec::blk::T_GET_ID;
use virtio_spec::features::{VHOST_F_LOG_ALL, bit};

const PAGE: u64 = 4096;

fn pages(gpa: u64, len: u64) -> impl Iterator<Item = u64> {
    let last = gpa + len.max(1) - 1;
    (gpa / PAGE..=last / PAGE).map(|page| page * PAGE).filter(move |_| len > 0)
}

/// Pages of the area that the device writes in a ring: whole of it, as every entry may be used.
fn ring_pages(device: &mut Device, packed: bool) -> BTreeSet<u64> {
    let size = u64::from(device.queue(0).queue().size());
    let [desc, _, used] = device.queue(0).queue().addresses();
    if packed {
        return pages(desc, 16 * size).chain(pages(used, 4)).collect();
    }
    pages(used, 6 + 8 * size).collect()
}

/// Runs a request whose buffers start on pages of their own; returns the pages that the device may
/// write: as many data bytes as given, and the status.
fn run(device: &mut Device, request: &Request, data_bytes: u64) -> BTreeSet<u64> {
    let layout = Layout { align: 4096, ..Layout::default() };
    let placed = device.queue(0).place(request, &layout).unwrap();
    let writable: Vec<_> = placed.segments.iter().filter(|s| s.writable).copied().collect();
    device.queue(0).add_placed(placed, false).unwrap();
    device.queue(0).queue().publish();
    device.queue(0).queue().kick_if_asked();
    device.queue(0).collect().unwrap();
    let (status, data) = writable.split_last().expect("a status byte");
    let data = data.iter().flat_map(|s| pages(s.gpa, data_bytes.min(s.len.into())));
    data.chain(pages(status.gpa + u64::from(status.len) - 1, 1)).collect()
}

fn dirty(log: &DirtyLog) -> BTreeSet<u64> {
    log.dirty_pages().into_iter().collect()
}

/// A request on the same thread, so that everything before it has been logged: the log's last
/// marks of a request may come after its completion.
fn settle(device: &mut Device) -> BTreeSet<u64> {
    run(device, &Request::flush(), 0)
}

#[test]
fn the_log_holds_exactly_the_pages_that_the_device_wrote() {
    for options in both_rings() {
        let (disk, _directory) = file(TMPFS, FileOptions::default());
        let daemon = Daemon::of(disk);
        let mut device = daemon.connect(&options);
        let log = device.start_log().unwrap();
        let ring = ring_pages(&mut device, options.packed);
        for round in 0..60_u64 {
            log.clear();
            let len = 512 * (1 + round * 7 % 40);
            let mut expected = match round % 4 {
                0 => run(&mut device, &Request::read(round, len as usize), len),
                1 => run(&mut device, &Request::write(round, &vec![1; len as usize]), 0),
                // Only what the device writes, however long the buffer is.
                2 => run(&mut device, &Request::new(T_GET_ID, 0, &[], 3 * PAGE as usize), 20),
                // Refused: only the status is written.
                _ => run(&mut device, &Request::read(u64::MAX, len as usize), 0),
            };
            expected.extend(settle(&mut device));
            let dirty = dirty(&log);
            let outside: BTreeSet<_> = dirty.difference(&ring).copied().collect();
            if round % 4 == 3 && is_kernel() {
                // It marks all buffers of a request that it refuses: more than it must.
                assert!(outside.is_superset(&expected), "round {round}");
            } else {
                assert_eq!(outside, expected, "round {round}");
            }
            let used = device.queue(0).queue().addresses()[if options.packed { 0 } else { 2 }];
            assert!(dirty.contains(&(used / PAGE * PAGE)), "round {round}: the used ring");
        }
    }
}

#[test]
fn a_failed_read_marks_its_data_as_well_as_it_may_have_been_written_in_part() {
    let ops = OpSet::parse("read").unwrap();
    let rule = FaultRule { ops, sectors: None, every: 1, error: backend::IoError::Errno(5) };
    let daemon = Daemon::of(Fault::new(Arc::new(mem()), rule));
    let mut device = daemon.connect(&Options::default());
    let log = device.start_log().unwrap();
    let expected = run(&mut device, &Request::read(0, 8192), 8192);
    settle(&mut device);
    assert!(dirty(&log).is_superset(&expected));
}

#[test]
fn nothing_is_logged_before_log_all_and_after_it_is_taken_back() {
    for options in both_rings() {
        let daemon = Daemon::of(mem());
        let mut device = daemon.connect(&options);
        let memory = device.memory().clone();
        let log = device.session().set_log(&memory).unwrap();
        run(&mut device, &Request::read(0, 8192), 8192);
        assert!(dirty(&log).is_empty(), "before LOG_ALL");
        let features = device.features();
        device.session().negotiate_features(features | bit(VHOST_F_LOG_ALL)).unwrap();
        run(&mut device, &Request::read(0, 8192), 8192);
        settle(&mut device);
        assert!(!dirty(&log).is_empty(), "with LOG_ALL");
        device.session().negotiate_features(features).unwrap();
        log.clear();
        run(&mut device, &Request::read(0, 8192), 8192);
        settle(&mut device);
        assert!(dirty(&log).is_empty(), "after LOG_ALL");
    }
}

#[test]
fn a_log_that_is_too_short_for_the_memory_is_not_overrun() {
    let daemon = Daemon::of(mem());
    let mut device = daemon.connect(&Options::default());
    // One page of log covers 128 MiB: give it one byte of it, for the first eight pages.
    let file = driver::GuestMemory::new(&[(0, PAGE)]).unwrap();
    let payload = [1_u64, 0].map(u64::to_le_bytes).concat();
    let code = 6;
    device.session().raw().message(code, &payload, &[file.regions()[0].fd()]).unwrap();
    device.session().raw().reply(common::LIMIT).unwrap();
    let features = device.features() | bit(VHOST_F_LOG_ALL);
    device.session().negotiate_features(features).unwrap();
    run(&mut device, &Request::read(0, 64 << 10), 64 << 10);
    settle(&mut device);
    let mut content = vec![0; PAGE as usize];
    file.read(0, &mut content);
    assert!(content[1..].iter().all(|&byte| byte == 0), "written beyond the log's length");
}

#[test]
fn a_used_ring_may_be_logged_anywhere_but_across_the_end_of_all_addresses() {
    for (log_addr, accepted) in [(u64::MAX, false), (u64::MAX - 4095, false), (1 << 63, true)] {
        let daemon = Daemon::of(mem());
        let mut device = daemon.connect(&Options::default());
        let _log = device.start_log().unwrap();
        let memory = device.memory().clone();
        let [desc, avail, used] =
            device.queue(0).queue().addresses().map(|gpa| memory.user_address(gpa));
        let longs = [desc, used, avail, log_addr].map(u64::to_le_bytes).concat();
        let payload = [[0_u32, 1].map(u32::to_le_bytes).concat(), longs].concat();
        let answer = device.session().raw().message_with_ack(9, &payload, &[], common::LIMIT);
        assert_eq!(answer.unwrap().value() == Some(0), accepted, "{log_addr:#x}");
        if accepted {
            run(&mut device, &Request::read(0, 512), 512);
        }
    }
}

#[test]
fn logging_may_be_turned_on_and_off_under_load() {
    for packed in layouts() {
        let setup = Setup { queues: 2, threads: 2, ..Setup::default() };
        let daemon = Daemon::start(Arc::new(mem()), &setup);
        let options = Options { packed, num_queues: 2, ..Options::default() };
        let device = daemon.connect(&options);
        let (_done, session) = under_load(device, 2, |loaded| {
            let memory = loaded.memory.clone();
            let features = loaded.session.features();
            for _ in 0..15 {
                let log = loaded.session.set_log(&memory).unwrap();
                let on = features | bit(VHOST_F_LOG_ALL);
                loaded.session.negotiate_features(on).unwrap();
                loaded.wait_for_progress(3);
                wait_until("pages are marked", || !log.dirty_pages().is_empty());
                loaded.session.negotiate_features(features).unwrap();
                log.clear();
                loaded.wait_for_progress(3);
                assert!(log.dirty_pages().is_empty(), "marked with logging off");
            }
        });
        drop(session);
        daemon.next_outcome().unwrap();
    }
}

/// Without a log there is no address to mark pages at: taken as 0, the guest's addresses, which the
/// front-end chooses, would say which bits of the daemon's own memory are set.
#[test]
fn log_all_without_a_log_marks_nothing_in_the_daemon() {
    const BITS_OF_A_BYTE: u64 = 8;
    for options in both_rings() {
        let daemon = Daemon::of(mem());
        let not_a_log = vec![0_u8; 4096]; // the daemon is a thread of this process
        let gpa = not_a_log.as_ptr() as u64 * BITS_OF_A_BYTE * PAGE;
        let bytes = not_a_log.len() as u64 * BITS_OF_A_BYTE * PAGE;
        let mut device = daemon.connect(&Options { regions: vec![(gpa, bytes)], ..options });
        let features = device.features() | bit(VHOST_F_LOG_ALL);
        device.session().negotiate_features(features).unwrap();
        run(&mut device, &Request::read(0, 64 << 10), 64 << 10);
        settle(&mut device);
        drop(device);
        daemon.next_outcome().unwrap();
        assert!(std::hint::black_box(not_a_log).iter().all(|&byte| byte == 0));
    }
}
