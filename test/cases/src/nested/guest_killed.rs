// SPDX-License-Identifier: Apache-2.0
//! A guest is powered off hard while it writes; the data that it made durable must be on the disk.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::disk::{Disk, Kind};
use super::{Needs, Setup, load};
use crate::case::cases;
use crate::nested::daemon::{Daemon, Plane};
use crate::nested::guest::{Guest, GuestSpec, Mount};
use kit::process::run_to_end;
use kit::wait::wait_until_so;

cases! { Nested;
    "guest-killed-kernel", Needs::MODULE,
        "what a guest made durable on a block device behind the kernel plane is there after the guest is killed",
        |setup| run(setup, Plane::Kernel, Kind::Device);
    "guest-killed-kernel-file", Needs::MODULE,
        "what a guest made durable in an image file behind the kernel plane is there after the guest is killed",
        |setup| run(setup, Plane::Kernel, Kind::File);
    "guest-killed-uring", Needs::NOTHING,
        "what a guest made durable behind the io_uring plane is there after the guest is killed",
        |setup| run(setup, Plane::Uring, Kind::Device);
}

/// Files that the guest must have made durable before the cut.
const DURABLE_MIN: usize = 25;

/// Repeats without end: writes a file, makes it durable, reports it with its checksum.
const RECORDS: &str = "exec 4>$PROGRESS; i=0; while :; do i=$((i+1)); \
    head -c $((5000+i*211)) /dev/urandom >/tmp/record; \
    dd if=/tmp/record of=/run/disk/record.$i bs=8k conv=fsync || exit; \
    echo \"$i $(md5sum </tmp/record)\" >&4; done";

/// Load beside the records, so that the journal is never idle.
const NOISE: &str = "fio --name=noise --filename=/run/disk/noise --size=16M --rw=randwrite --bs=4k \
    --ioengine=io_uring --iodepth=8 --direct=1 --time_based --runtime=600";

/// Runs the case.
fn run(setup: &Setup, plane: Plane, kind: Kind) -> Result<()> {
    run_with(setup, plane, kind, |_, _| Ok(()))
}

/// Runs the case; before the load begins, calls `before` with the disk mounted.
pub(super) fn run_with(
    setup: &Setup,
    plane: Plane,
    kind: Kind,
    before: impl FnOnce(&mut Guest, &str) -> Result<()>,
) -> Result<()> {
    let disk = Disk::create(kind)?;
    let daemon = Daemon::start(&setup.program, &disk.path(), "cut", plane, &["--num-queues=2"])?;
    let spec = GuestSpec { disks: daemon.qemu_args(2), ..GuestSpec::default() };
    let mut guest = Guest::boot(&setup.image, &spec)?;
    let node = guest.virtio_disk("cut")?;
    load::format(&mut guest, &node)?;
    load::verify_once(&mut guest)?;
    before(&mut guest, &node)?;
    guest.ok(&format!("({NOISE}) >/run/noise.log 2>&1 &"))?;
    guest.ok(&format!("({RECORDS}) >/run/records.log 2>&1 &"))?;
    wait_until_so(Duration::from_secs(240), "the guest's durable files", || {
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

/// Mounts the disk, which replays the journal, and checks every record.
fn compare(disk: &Disk, records: &[String]) -> Result<()> {
    let mount = Mount::writable(&disk.path())?;
    for record in records {
        let (number, rest) = record.split_once(' ').context("a line of the guest's is cut")?;
        let file = mount.place().join(format!("record.{number}"));
        let sum = run_to_end(&["md5sum", &file.display().to_string()])
            .with_context(|| format!("durable file {number}"))?;
        if sum.split_whitespace().next() != rest.split_whitespace().next() {
            bail!("durable file {number} has other content than what the guest wrote");
        }
    }
    Ok(())
}
