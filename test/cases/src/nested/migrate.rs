// SPDX-License-Identifier: Apache-2.0
//! A guest migrates live from one QEMU and daemon to another over one image, while it writes. The
//! lock of the image follows it: the target's daemon starts no queue before the source's gives it up.

use anyhow::{Result, bail};

use super::disk::{Disk, Kind};
use super::{Needs, Setup, load};
use crate::case::cases;
use crate::nested::daemon::{Daemon, Plane};
use crate::nested::guest::{Guest, GuestSpec};

cases! { Nested;
    "migrate-kernel", Needs::MODULE,
        "a guest that writes is migrated live from one kernel plane to another",
        |setup| run(setup, Plane::Kernel, Plane::Kernel);
    "migrate-kernel-to-uring", Needs::MODULE,
        "a guest that writes is migrated live from the kernel plane to the io_uring plane",
        |setup| run(setup, Plane::Kernel, Plane::Uring);
    "migrate-uring", Needs::NOTHING,
        "a guest that writes is migrated live from one io_uring plane to another",
        |setup| run(setup, Plane::Uring, Plane::Uring);
}

/// Bytes a second while the guest writes.
pub(super) const UNDER_LOAD: u64 = 48 << 20;

/// Repeats reads of a file through the page cache, each time from the disk. Only the device writes
/// these pages, so they reach the target only if the device logged them.
const CACHED_READS: &str = "while [ ! -e /run/stop ]; do \
    dd if=/run/disk/cached iflag=nocache count=0; cat /run/disk/cached >/dev/null; done";

/// Runs the case.
fn run(setup: &Setup, from: Plane, to: Plane) -> Result<()> {
    let disk = Disk::create(Kind::File)?;
    let queues = "--num-queues=2";
    let daemons = [
        Daemon::start(&setup.program, &disk.path(), "moved", from, &[queues])?,
        Daemon::start(&setup.program, &disk.path(), "moved", to, &[queues, "--incoming=on"])?,
    ];
    let spec = |daemon: &Daemon, incoming| GuestSpec {
        disks: daemon.qemu_args(2),
        incoming,
        ..GuestSpec::default()
    };
    let mut source = Guest::boot(&setup.image, &spec(&daemons[0], false))?;
    let sum = prepare(&mut source)?;
    let mut target = Guest::start(&setup.image, &spec(&daemons[1], true))?;
    source.limit_migration(UNDER_LOAD)?;
    let migration = source.migrate_to(&mut target)?;
    source.cut_power();
    look(&mut target, &sum)?;
    target.cut_power();
    for daemon in daemons {
        daemon.stop()?;
    }
    disk.check()?;
    println!(
        "moved under load: dirty log read {} times, {} ms of standstill; all data verified",
        migration.rounds, migration.downtime_ms
    );
    Ok(())
}

/// Makes a file system with a file of known content, and starts the load. Returns the file's
/// checksum.
fn prepare(guest: &mut Guest) -> Result<String> {
    let node = guest.virtio_disk("moved")?;
    load::format(guest, &node)?;
    guest.ok("head -c 24000000 /dev/urandom >/run/disk/cached && sync")?;
    let sum = guest.ok("md5sum </run/disk/cached")?;
    load::start(guest)?;
    guest.ok(&format!("({CACHED_READS}) >/dev/null 2>&1 &"))?;
    Ok(sum)
}

/// Checks that the load continues without an error, and that the cached file is right in memory and
/// on the disk.
fn look(guest: &mut Guest, sum: &str) -> Result<()> {
    load::finish(guest)?;
    for (place, command) in [
        ("memory", "md5sum </run/disk/cached"),
        ("the disk", "echo 3 >/proc/sys/vm/drop_caches; md5sum </run/disk/cached"),
    ] {
        if guest.ok(command)? != sum {
            bail!("after the migration a file is wrong in {place}");
        }
    }
    load::verify_once(guest)?;
    guest.ok("umount /run/disk").map(drop)
}
