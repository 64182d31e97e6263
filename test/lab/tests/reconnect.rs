// SPDX-License-Identifier: Apache-2.0
//! A guest in stock QEMU writes and verifies while its daemon is killed repeatedly: QEMU connects
//! to each successor, which replays the requests that were in flight.

mod common;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{LAB, build_daemon, disk_args};
use kit::process::{OwnedChild, StopWith};
use lab::disk;
use lab::guest::{Guest, GuestDisk, GuestSpec};
use lab::job::Job;
use lab::run::GUEST_PATIENCE;

/// The nested lab has longer versions: `reconnect-uring`, `reconnect-kernel`.
const KILLS: usize = 4;

/// The guest's rounds: each takes seconds, and the daemon is killed in its middle.
fn rounds(count: usize) -> Job {
    Job::on_disk(&format!(
        r#"
stage make the file system
mkfs.ext4 -q -F "$disk"
mount "$disk" /mnt
round=0
while [ "$round" -lt {count} ]; do
    round=$((round + 1))
    stage "round $round"
    say "began $round"
    fio --name=verify --filename=/mnt/verify.dat --size=24m --direct=1 --ioengine=io_uring \
        --iodepth=16 --rw=randwrite --bsrange=4k-64k --randrepeat=0 --fsync=32 \
        --verify=crc32c --verify_fatal=1 --do_verify=1 --output=/run/verify.txt ||
        {{ cat /run/verify.txt; fail "fio found data that is not what it wrote"; }}
done
stage check the file system
umount /mnt
e2fsck -fn "$disk" || fail "e2fsck found errors"
"#
    ))
}

/// A daemon on a socket that it inherits from its predecessors.
struct Daemon {
    child: OwnedChild,
    log: PathBuf,
}

impl Daemon {
    fn start(program: &Path, folder: &Path, number: usize) -> Self {
        let log = folder.join(format!("log-{number}"));
        let words = [
            program.to_str().unwrap().into(),
            "serve".into(),
            format!("--socket-path={}", folder.join("socket").display()),
            format!("--blk-file={}", folder.join("disk").display()),
            "--num-queues=2".into(),
        ];
        let child = OwnedChild::spawn(&words, &log, StopWith::Terminate).unwrap();
        Self { child, log }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }
}

#[track_caller]
fn wait_until(what: &str, mut look: impl FnMut() -> bool) {
    let end = Instant::now() + GUEST_PATIENCE;
    while !look() {
        assert!(Instant::now() < end, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_guest_that_writes_finds_all_its_data_right_while_its_daemon_is_killed_again_and_again() {
    let program = build_daemon();
    let folder = tempfile::tempdir_in(LAB.cache.dir()).unwrap();
    disk::create(&folder.path().join("disk"), disk::DISK_BYTES).unwrap();
    let mut daemon = Daemon::start(&program, folder.path(), 0);
    let socket = folder.path().join("socket");
    wait_until("a socket", || socket.exists());
    let spec = GuestSpec {
        accel: LAB.choice.accel,
        vcpus: 2,
        disk: Some(GuestDisk::Arguments(disk_args(&socket, ",reconnect=1"))),
        job: rounds(KILLS),
    };
    let guest = Guest::boot(&LAB.base, &spec).unwrap();
    for kill in 1..=KILLS {
        wait_until(&format!("round {kill}, {:?}\n{}", guest.report(), daemon.said()), || {
            guest.report().values("began").count() >= kill
        });
        // A moment within the round, which takes longer than this.
        std::thread::sleep(Duration::from_millis(200 * kill as u64));
        assert!(daemon.child.try_wait().unwrap().is_none(), "it had ended: {}", daemon.said());
        daemon.child.kill_hard().unwrap();
        daemon = Daemon::start(&program, folder.path(), kill);
        wait_until("QEMU at the new daemon", || daemon.said().contains("front-end connected"));
    }
    if let Err(error) = guest.finish(GUEST_PATIENCE) {
        panic!("{error:#}\nthe last daemon's log:\n{}", daemon.said());
    }
    assert!(daemon.child.stop(Duration::from_secs(20)).unwrap().success(), "{}", daemon.said());
    disk::check_ext4(&folder.path().join("disk")).unwrap();
}
