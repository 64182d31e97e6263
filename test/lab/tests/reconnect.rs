// SPDX-License-Identifier: Apache-2.0
//! A guest in stock QEMU writes and verifies while its daemon is killed repeatedly: QEMU connects
//! to each successor, which replays the requests that were in flight.

mod common;

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use common::{LAB, build_daemon, disk_args, with_guests};
use kit::wait::wait_until_so;
use lab::disk;
use lab::guest::{Guest, GuestDisk, GuestSpec};
use lab::job::Job;
use lab::run::GUEST_PATIENCE;
use lab::server::{Server, ServerCommand};

/// The nested lab has longer versions: `reconnect-uring`, `reconnect-kernel`.
const KILLS: usize = 4;

/// Content of the second disk when the last daemon has been killed.
const OVER: &[u8] = b"over";

/// The guest's rounds: each takes seconds, and the daemon is killed in its middle. They end after [`OVER`].
fn rounds() -> Job {
    Job::on_disk(
        r#"
sign() { dd if=/dev/vdb bs=512 count=1 iflag=direct status=none | tr -d '\000'; }
stage make the file system
mkfs.ext4 -q -F "$disk"
mount "$disk" /mnt
round=0
until [ "$(sign)" = over ]; do
    round=$((round + 1))
    [ "$round" -le 1000 ] || fail "the host gives no sign"
    stage "round $round"
    say "began $round"
    fio --name=verify --filename=/mnt/verify.dat --size=24m --direct=1 --ioengine=io_uring \
        --iodepth=16 --rw=randwrite --bsrange=4k-64k --randrepeat=0 --fsync=32 \
        --verify=crc32c --verify_fatal=1 --do_verify=1 --output=/run/verify.txt ||
        { cat /run/verify.txt; fail "fio found data that is not what it wrote"; }
done
stage check the file system
umount /mnt
e2fsck -fn "$disk" || fail "e2fsck found errors"
"#,
    )
}

#[test]
fn a_guest_that_writes_finds_all_its_data_right_while_its_daemon_is_killed_again_and_again() {
    with_guests(kill_daemons);
}

fn kill_daemons() -> Result<()> {
    let directory = tempfile::tempdir_in(LAB.cache.dir())?;
    let disk = directory.path().join("disk");
    disk::create(&disk, disk::DISK_BYTES)?;
    let sign = directory.path().join("sign");
    disk::create(&sign, 1 << 20)?;
    let mut daemon = Server::start(&ServerCommand::daemon(&build_daemon()), &disk, 2)?;
    let spec = GuestSpec {
        accel: LAB.choice.accel,
        vcpus: 2,
        disks: vec![
            GuestDisk::Arguments(disk_args(&daemon.socket(), ",reconnect=1")),
            GuestDisk::VirtioBlk { path: sign.clone(), aio: "native" },
        ],
        job: rounds(),
    };
    let guest = Guest::boot(&LAB.base, &spec)?;
    for kill in 1..=KILLS {
        let began = || Ok(guest.report().values("began").count() >= kill);
        wait_until_so(GUEST_PATIENCE, &format!("round {kill}"), began)
            .with_context(|| format!("{:?}", guest.report()))
            .map_err(|error| daemon.with_log(guest.blame(error)))?;
        // A moment within the round, which takes longer than this.
        std::thread::sleep(Duration::from_millis(200 * kill as u64));
        daemon.replace_killed()?;
        let is_connected = || Ok(daemon.log().contains("front-end connected"));
        wait_until_so(GUEST_PATIENCE, "QEMU at the new daemon", is_connected)
            .map_err(|error| daemon.with_log(guest.blame(error)))?;
    }
    OpenOptions::new().write(true).open(sign)?.write_all(OVER)?;
    guest.finish(GUEST_PATIENCE).map_err(|error| daemon.with_log(error))?;
    daemon.stop()?;
    disk::check_ext4(&disk)
}
