// SPDX-License-Identifier: Apache-2.0
//! A guest is powered off hard while it writes; what it made durable has to be there.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::disk::{Disk, Kind};
use super::{Lab, load};
use crate::daemon::{Daemon, Plane};
use crate::exec::{self, wait_until};
use crate::guest::{Guest, GuestSpec, Image, Mount};

/// Files that the guest has to have made durable before the cut.
const DURABLE_MIN: usize = 25;

/// Writes a file, waits until it is durable, says so with its checksum; for ever.
const RECORDS: &str = "exec 4>$PROGRESS; i=0; while :; do i=$((i+1)); \
    head -c $((5000+i*211)) /dev/urandom >/tmp/record; \
    dd if=/tmp/record of=/run/disk/record.$i bs=8k conv=fsync || exit; \
    echo \"$i $(md5sum </tmp/record)\" >&4; done";

/// Load beside it, so that the journal is never at rest.
const NOISE: &str = "fio --name=noise --filename=/run/disk/noise --size=16M --rw=randwrite --bs=4k \
    --ioengine=io_uring --iodepth=8 --direct=1 --time_based --runtime=600";

/// Runs the case.
pub(super) fn run(lab: &Lab, image: &Image, plane: Plane, kind: Kind) -> Result<()> {
    run_with(lab, image, plane, kind, |_, _| Ok(()))
}

/// Runs the case, and something else in the guest before the load begins, on the mounted disk.
pub(super) fn run_with(
    lab: &Lab,
    image: &Image,
    plane: Plane,
    kind: Kind,
    before: impl FnOnce(&mut Guest, &str) -> Result<()>,
) -> Result<()> {
    let disk = Disk::create(kind)?;
    let daemon = Daemon::start(&lab.program, &disk.path(), "cut", plane, &["--num-queues=2"])?;
    let spec = GuestSpec { disks: daemon.qemu_args(2), ..GuestSpec::default() };
    let mut guest = Guest::boot(image, &spec)?;
    let node = guest.virtio_disk("cut")?;
    load::format(&mut guest, &node)?;
    load::verify_once(&mut guest)?;
    before(&mut guest, &node)?;
    guest.ok(&format!("({NOISE}) >/run/noise.log 2>&1 &"))?;
    guest.ok(&format!("({RECORDS}) >/run/records.log 2>&1 &"))?;
    wait_until("the guest's durable files", Duration::from_secs(240), || {
        Ok(guest.progress()?.len() >= DURABLE_MIN)
    })
    .map_err(|error| guest.explain(error))?;
    let records = guest.progress()?;
    guest.cut_power();
    daemon.stop()?;
    compare(&disk, &records)?;
    disk.check()?;
    println!("{} durable files are there, the file system is sound", records.len());
    Ok(())
}

/// Mounts the disk, which replays the journal, and looks at every record.
fn compare(disk: &Disk, records: &[String]) -> Result<()> {
    let mount = Mount::writable(&disk.path())?;
    for record in records {
        let (number, rest) = record.split_once(' ').context("a line of the guest's is cut")?;
        let file = mount.place().join(format!("record.{number}"));
        let sum = exec::run(&["md5sum", &file.display().to_string()])
            .with_context(|| format!("durable file {number}"))?;
        if sum.split_whitespace().next() != rest.split_whitespace().next() {
            bail!("durable file {number} has other content than what the guest wrote");
        }
    }
    Ok(())
}
