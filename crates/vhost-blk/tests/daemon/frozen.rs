// SPDX-License-Identifier: Apache-2.0
//! Storage that keeps the kernel threads of io_uring keeps no other disk of the same data-plane thread.

use crate::mount::{Frozen, Mount, may_not_mount};
use crate::rig::Rig;
use driver::{Device, Options, Request};
use std::time::Duration;
use virtio_spec::blk::S_OK;

/// Writes that wait for the file system: more than the usual kernel threads of a data-plane thread.
const WRITES: u64 = 32;
/// Writes of a full queue. Three of them are more than a thread gives to the storage.
const FULL: u64 = 1024;
/// Writes of such queues that a thread gives to the storage at least.
const GIVEN: u64 = 1317;

/// Adds the disk `frozen` on this file system.
fn add_frozen(rig: &Rig, mount: &Mount, queues: usize) {
    let image = mount.path("image");
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    rig.ok(&format!(
        "add frozen --blk-file {} --socket-path frozen.sock --data-plane uring --num-queues {queues}",
        image.display()
    ));
}

/// Requests in flight of the disk on the frozen file system.
fn inflight(rig: &Rig) -> u64 {
    let status = rig.json("status frozen");
    let queues = status["queues"].as_array().unwrap().iter();
    queues.map(|queue| queue["inflight"].as_u64().unwrap()).sum()
}

/// Uses another disk, in ways that need kernel threads.
fn works(other: &mut Device) {
    other.write(0, &[1; 4096]).unwrap();
    other.flush().unwrap();
    other.write_zeroes(8, 8, 0).unwrap();
}

#[test]
fn a_frozen_file_system_keeps_no_other_disk_of_its_thread() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::with(&["--threads", "1"]);
    let mount = Mount::ext4(64);
    add_frozen(&rig, &mount, 1);
    rig.add("other", "");
    let (mut guest, mut other) = (rig.guest("frozen"), rig.guest("other"));
    let layout = guest.layout();
    let frozen = Frozen::of(&mount);
    for n in 0..WRITES {
        guest.queue(0).submit(&Request::write(n * 8, &[n as u8 + 1; 4096]), &layout).unwrap();
    }
    rig.place.wait_until("the writes are taken", || inflight(&rig) == WRITES);
    works(&mut other);
    assert_eq!(inflight(&rig), WRITES);
    drop(frozen);
    for _ in 0..WRITES {
        let (_, done) = guest.queue(0).collect().unwrap();
        assert_eq!(done.status, Some(S_OK));
    }
    let mut data = vec![0; 4096];
    for n in 0..WRITES {
        guest.read(n * 8, &mut data).unwrap();
        assert_eq!(data, [n as u8 + 1; 4096], "write {n}");
    }
}

#[test]
fn full_queues_on_a_frozen_file_system_keep_no_other_disk_of_their_thread() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::with(&["--threads", "1"]);
    let mount = Mount::ext4(64);
    add_frozen(&rig, &mount, 3);
    rig.add("other", "");
    let limit = Duration::from_secs(60);
    let full = Options { num_queues: 3, queue_size: FULL as u16, limit, ..Options::default() };
    let mut guest = Device::connect(rig.path("frozen.sock"), &full).unwrap();
    let mut other = rig.guest("other");
    let layout = guest.layout();
    let frozen = Frozen::of(&mount);
    for queue in 0..3 {
        for n in 0..FULL {
            let write = Request::write((queue as u64 * FULL + n) * 8, &[n as u8; 4096]);
            guest.queue(queue).submit(&write, &layout).unwrap();
        }
    }
    let mut before = 0;
    rig.place.wait_until("the thread takes no more", || {
        let now = inflight(&rig);
        let is_last = now >= GIVEN && now == before;
        before = now;
        is_last
    });
    works(&mut other);
    assert!(inflight(&rig) >= GIVEN, "writes have ended on a frozen file system");
    drop(frozen);
    for queue in 0..3 {
        for _ in 0..FULL {
            let (_, done) = guest.queue(queue).collect().unwrap();
            assert_eq!(done.status, Some(S_OK));
        }
    }
}

/// The exchange of the program would wait for the thread that writes the log.
#[test]
fn a_log_on_a_frozen_file_system_delays_no_disk_and_no_command_and_refuses_an_upgrade() {
    if may_not_mount() {
        return;
    }
    let mount = Mount::ext4(64);
    let log = mount.path("log");
    let rig = Rig::with_log(std::fs::File::create(&log).unwrap().into());
    rig.add("a", "");
    let mut guest = rig.guest("a");
    let frozen = Frozen::of(&mount);
    rig.ok("pause a");
    rig.ok("resume a");
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("the log file does not accept lines"), "{line}");
    guest.write(0, &[1; 512]).unwrap();
    drop(frozen);
    rig.place.wait_until("the end of the lines", || rig.ctl("upgrade").status.success());
    guest.write(1, &[1; 512]).unwrap();
    let lines = std::fs::read_to_string(&log).unwrap();
    assert!(lines.contains("method=\"Pause\"") && lines.contains("no upgrade"), "{lines}");
}
