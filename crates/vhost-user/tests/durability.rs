// SPDX-License-Identifier: Apache-2.0
//! Write-back, write-through and FLUSH, as a recording disk sees them.

mod common;

use backend::wrap::{Delay, Entry, Log, OpSet, Phase, Record};
use backend::{Disk, IoKind};
use common::{Daemon, Setup, both_rings, mem, wait_until};
use driver::{Device, Options, Request};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use virtio_spec::blk::{CONFIG_WRITEBACK_OFFSET, F_CONFIG_WCE, F_FLUSH, RangeSegment, S_OK};
use virtio_spec::features::bit;

const WCE_OFFSET: u32 = CONFIG_WRITEBACK_OFFSET as u32;

fn recorded(setup: &Setup) -> (Daemon, Log) {
    let disk = Record::in_memory(Arc::new(mem()));
    let log = disk.log();
    (Daemon::start(Arc::new(disk), setup), log)
}

fn write_back() -> (Daemon, Log) {
    recorded(&Setup::default())
}

/// True if the next write, discard and write zeroes are write-through; all three must agree.
fn next_are_durable(device: &mut Device, log: &Log) -> bool {
    let before = log.entries().len();
    device.write(8, &[1; 512]).unwrap();
    let range = RangeSegment { sector: 8, num_sectors: 1, flags: 0 };
    device.request(&Request::discard(&[range])).unwrap();
    device.request(&Request::write_zeroes(&[range])).unwrap();
    let entries = log.entries();
    let durable: Vec<_> = entries[before..]
        .iter()
        .filter(|entry| entry.phase == Phase::Start)
        .map(|entry| entry.durable)
        .collect();
    assert_eq!(durable.len(), 3, "one I/O each");
    assert!(durable.iter().all(|&each| each == durable[0]), "{durable:?}");
    durable[0]
}

#[test]
fn writes_are_not_durable_in_write_back_mode() {
    let (daemon, log) = write_back();
    for options in both_rings() {
        assert!(!next_are_durable(&mut daemon.connect(&options), &log));
    }
}

#[test]
fn writes_are_durable_where_flush_was_not_negotiated() {
    let (daemon, log) = write_back();
    let features = Options::default().features & !bit(F_FLUSH);
    let mut device = daemon.connect(&Options { features, ..Options::default() });
    assert!(next_are_durable(&mut device, &log));
}

#[test]
fn writes_are_durable_on_a_disk_served_in_write_through_mode() {
    let (daemon, log) = recorded(&Setup { writeback: false, ..Setup::default() });
    let mut device = daemon.connect(&Options::default());
    assert_eq!(device.config().unwrap().writeback, 0);
    assert!(next_are_durable(&mut device, &log));
}

#[test]
fn the_cache_mode_follows_the_configuration_space_at_once() {
    let (daemon, log) = write_back();
    let mut device = daemon.connect(&Options::default());
    assert_eq!(device.config().unwrap().writeback, 1);
    for (mode, expected) in [(0, 0), (1, 1), (0, 0), (0xff, 1)] {
        device.session().set_config(WCE_OFFSET, &[mode]).unwrap();
        assert_eq!(device.config().unwrap().writeback, expected);
        assert_eq!(next_are_durable(&mut device, &log), expected == 0);
    }
}

#[test]
fn the_cache_mode_outlasts_a_reset_and_a_reconnection() {
    let (daemon, log) = write_back();
    let mut device = daemon.connect(&Options::default());
    device.session().set_config(WCE_OFFSET, &[0]).unwrap();
    device.session().reset_device().unwrap();
    device.queue(0).queue().split().reset();
    device.start().unwrap();
    assert!(next_are_durable(&mut device, &log), "after a reset");
    drop(device);
    daemon.next_outcome().unwrap();
    let mut device = daemon.connect(&Options::default());
    assert_eq!(device.config().unwrap().writeback, 0);
    assert!(next_are_durable(&mut device, &log), "on the next connection");
}

#[test]
fn the_cache_mode_stays_where_config_wce_was_not_negotiated() {
    let (daemon, log) = write_back();
    let features = Options::default().features & !bit(F_CONFIG_WCE);
    let mut device = daemon.connect(&Options { features, ..Options::default() });
    assert!(device.session().set_config(WCE_OFFSET, &[0]).is_err());
    drop(device);
    assert!(daemon.next_outcome().is_err());
    assert!(!next_are_durable(&mut daemon.connect(&Options::default()), &log));
}

#[test]
fn a_flush_reaches_the_disk_once_for_each_request() {
    let (daemon, log) = write_back();
    let mut device = daemon.connect(&Options::default());
    (0..5).for_each(|_| device.flush().unwrap());
    let flushes = log.entries().iter().filter(|entry| entry.kind == IoKind::Flush).count();
    assert_eq!(flushes, 10, "five starts and five ends");
}

/// Positions in the log of the end of each write, by sector, and of start and end of each flush.
fn positions(entries: &[Entry]) -> (HashMap<u64, usize>, Vec<(usize, usize)>) {
    let (mut writes, mut starts, mut flushes) = (HashMap::new(), HashMap::new(), Vec::new());
    for (at, entry) in entries.iter().enumerate() {
        match (entry.kind, entry.phase) {
            (IoKind::Write, Phase::End(Ok(()))) => drop(writes.insert(entry.sector, at)),
            (IoKind::Flush, Phase::Start) => drop(starts.insert(entry.number, at)),
            (IoKind::Flush, Phase::End(Ok(()))) => flushes.push((starts[&entry.number], at)),
            _ => {}
        }
    }
    (writes, flushes)
}

#[test]
fn a_flush_starts_after_every_write_that_was_completed_before_it_was_submitted() {
    for options in both_rings() {
        let delay = Duration::from_millis(1);
        let inner = Delay::new(Arc::new(mem()), delay, OpSet::ALL);
        let disk = Record::in_memory(Arc::new(inner));
        let log = disk.log();
        let setup = Setup { queues: 2, threads: 2, ..Setup::default() };
        let daemon = Daemon::start(Arc::new(disk), &setup);
        let mut device = daemon.connect(&Options { num_queues: 2, ..options });
        let mut completed_before = Vec::new();
        let mut completed = Vec::new();
        let mut sector = 0;
        let layout = device.layout();
        for round in 0..10 {
            // Writes on both queues, some of which are still in flight when the flush comes.
            let mut sectors = HashMap::new();
            for index in [0, 1] {
                for _ in 0..4 {
                    let request = Request::write(sector, &[round; 512]);
                    let id = device.queue(index).submit(&request, &layout).unwrap();
                    sectors.insert((index, id), sector);
                    sector += 1;
                }
            }
            for index in [0, 1, 1] {
                let (id, completion) = device.queue(index).collect().unwrap();
                assert_eq!(completion.status, Some(S_OK));
                completed.push(sectors.remove(&(index, id)).unwrap());
            }
            completed_before.push(completed.clone());
            let flush = device.queue(0).submit(&Request::flush(), &layout).unwrap();
            let mut flushed = false;
            for (index, count) in [(0, 4), (1, 2)] {
                for _ in 0..count {
                    let (id, completion) = device.queue(index).collect().unwrap();
                    assert_eq!(completion.status, Some(S_OK));
                    flushed |= index == 0 && id == flush;
                    completed.extend(sectors.remove(&(index, id)));
                }
            }
            assert!(flushed && sectors.is_empty());
            let (_, flushes) = positions(&log.entries());
            assert_eq!(flushes.len(), completed_before.len(), "completed only once it has ended");
        }
        let (writes, flushes) = positions(&log.entries());
        for ((start, _), before) in flushes.iter().zip(&completed_before) {
            let late = before.iter().filter(|sector| writes[sector] > *start).count();
            assert_eq!(late, 0, "{late} writes were completed, but ended after the flush started");
        }
    }
}

#[test]
fn a_write_is_completed_only_after_its_end_on_the_disk() {
    let (gate, permits) = common::gate::Gate::new(Arc::new(mem()));
    let disk = Record::in_memory(Arc::new(gate));
    let log = disk.log();
    let daemon = Daemon::start(Arc::new(disk) as Arc<dyn Disk>, &Setup::default());
    let mut device = daemon.connect(&Options::default());
    let layout = device.layout();
    device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    device.queue(0).submit(&Request::flush(), &layout).unwrap();
    wait_until("both have started", || log.entries().len() == 2);
    assert!(device.queue(0).try_collect().unwrap().is_none());
    permits.release(1);
    device.queue(0).collect().unwrap();
    assert!(device.queue(0).try_collect().unwrap().is_none());
    permits.release(1);
    device.queue(0).collect().unwrap();
}
