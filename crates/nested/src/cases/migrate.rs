// SPDX-License-Identifier: Apache-2.0
//! A guest that writes moves live from one QEMU and daemon to another over one image.

use anyhow::{Result, bail};
use serde_json::json;

use super::disk::{Disk, Kind};
use super::{Lab, load};
use crate::daemon::{Daemon, Plane};
use crate::guest::{Guest, GuestSpec, Image};

/// Reads a file through the page cache again and again, each time from the disk: pages that only
/// the device writes. They are on the other side only if the device logged them.
const CACHED_READS: &str = "while [ ! -e /run/stop ]; do \
    dd if=/run/disk/cached iflag=nocache count=0; cat /run/disk/cached >/dev/null; done";

/// Runs the case.
pub(super) fn run(lab: &Lab, image: &Image, from: Plane, to: Plane) -> Result<()> {
    let disk = Disk::create(Kind::File)?;
    let more = ["--num-queues=2", "--lock=off"];
    let daemons = [
        Daemon::start(&lab.program, &disk.path(), "moved", from, &more)?,
        Daemon::start(&lab.program, &disk.path(), "moved", to, &more)?,
    ];
    let spec = |daemon: &Daemon, incoming| GuestSpec {
        disks: daemon.qemu_args(2),
        incoming,
        ..GuestSpec::default()
    };
    let mut source = Guest::boot(image, &spec(&daemons[0], false))?;
    let sum = prepare(&mut source)?;
    let mut target = Guest::start(image, &spec(&daemons[1], true))?;
    limit_speed(&mut source)?;
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

/// A file system with a file of known content, and the load. Returns the file's checksum.
fn prepare(guest: &mut Guest) -> Result<String> {
    let node = guest.virtio_disk("moved")?;
    load::format(guest, &node)?;
    guest.ok("head -c 24000000 /dev/urandom >/run/disk/cached && sync")?;
    let sum = guest.ok("md5sum </run/disk/cached")?;
    load::start(guest)?;
    guest.ok(&format!("({CACHED_READS}) >/dev/null 2>&1 &"))?;
    Ok(sum)
}

/// So slow that the guest writes meanwhile, and no early end; [`Guest::migrate_to`] lifts it.
fn limit_speed(guest: &mut Guest) -> Result<()> {
    let slow = json!({ "max-bandwidth": 48 << 20, "downtime-limit": 1 });
    guest.monitor("migrate-set-parameters", slow)
}

/// The load has to go on and find nothing wrong; the cached file has to be right as it lies in
/// memory, and on the disk.
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
