// SPDX-License-Identifier: Apache-2.0
//! A guest migrates live from one QEMU and daemon to another over one image, while it writes. The
//! lock of the image follows it: the target's daemon starts no queue before the source's gives it up.

use anyhow::{Result, bail, ensure};
use serde_json::json;

use super::disk::{Disk, Kind};
use super::{Needs, Setup, load};
use crate::case::cases;
use crate::nested::daemon::{Daemon, Plane};
use crate::nested::guest::{Guest, GuestSpec};

cases! { Nested;
    "migrate-kernel", Needs::MODULE,
        "a guest that writes is migrated live from one kernel plane to another",
        |setup| run(setup, Plane::Kernel, Plane::Kernel, "");
    "migrate-kernel-to-uring", Needs::MODULE,
        "a guest that writes is migrated live from the kernel plane to the io_uring plane",
        |setup| run(setup, Plane::Kernel, Plane::Uring, "");
    "migrate-uring-to-kernel", Needs::MODULE,
        "a guest that writes is migrated live from the io_uring plane to the kernel plane",
        |setup| run(setup, Plane::Uring, Plane::Kernel, "");
    "migrate-uring", Needs::NOTHING,
        "a guest that writes is migrated live from one io_uring plane to another",
        |setup| run(setup, Plane::Uring, Plane::Uring, "");
    "migrate-packed", Needs::NOTHING,
        "a guest with packed rings is migrated live from one io_uring plane to another",
        |setup| run(setup, Plane::Uring, Plane::Uring, ",packed=on");
}

/// Bit of VIRTIO_F_RING_PACKED (virtio 1.3, 6).
const PACKED: usize = 34;

/// Bytes a second while the guest writes.
pub(super) const UNDER_LOAD: u64 = 48 << 20;

/// Repeats reads of a file through the page cache, each time from the disk. Only the device writes
/// these pages, so they reach the target only if the device logged them.
const CACHED_READS: &str = "while [ ! -e /run/stop ]; do \
    dd if=/run/disk/cached iflag=nocache count=0; cat /run/disk/cached >/dev/null; done";

/// Runs the case. `properties` are further ones of QEMU's device.
fn run(setup: &Setup, from: Plane, to: Plane, properties: &str) -> Result<()> {
    let disk = Disk::create(Kind::File)?;
    let queues = "--num-queues=2";
    let daemons = [
        Daemon::start(&setup.program, &disk.path(), "moved", from, &[queues])?,
        Daemon::start(&setup.program, &disk.path(), "moved", to, &[queues, "--incoming=on"])?,
    ];
    let spec = |daemon: &Daemon, incoming| {
        let mut disks = daemon.qemu_args(2);
        if let Some(device) = disks.last_mut() {
            device.push_str(properties);
        }
        GuestSpec { disks, incoming, ..GuestSpec::default() }
    };
    let mut source = Guest::boot(&setup.image, &spec(&daemons[0], false))?;
    let sum = prepare(&mut source, properties.contains("packed=on"))?;
    let mut target = Guest::start(&setup.image, &spec(&daemons[1], true))?;
    post_copy_is_refused(&mut target)?;
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

/// Post-copy needs a protocol feature of the back-end. Without it QEMU refuses the capability at the
/// destination, before a guest depends on it.
fn post_copy_is_refused(target: &mut Guest) -> Result<()> {
    let wanted = json!({ "capabilities": [{ "capability": "postcopy-ram", "state": true }] });
    let Err(error) = target.monitor("migrate-set-capabilities", wanted) else {
        bail!("QEMU takes post-copy for a back-end without it");
    };
    ensure!(format!("{error:#}").contains("not capable of postcopy"), error);
    Ok(())
}

/// Makes a file system with a file of known content, and starts the load. Returns the file's
/// checksum.
fn prepare(guest: &mut Guest, packed: bool) -> Result<String> {
    let node = guest.virtio_disk("moved")?;
    let features =
        guest.ok(&format!("cat /sys/block/{}/device/features", node.replace("/dev/", "")))?;
    let negotiated = features.as_bytes().get(PACKED) == Some(&b'1');
    ensure!(negotiated == packed, "the guest's features are {features}");
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
