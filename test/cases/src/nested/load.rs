// SPDX-License-Identifier: Apache-2.0
//! A load in the guest that writes, reads back and compares, until it is stopped.

use std::time::Duration;

use anyhow::{Result, bail};

use crate::nested::daemon::Daemon;
use crate::nested::disk::Disk;
use crate::nested::guest::Guest;
use kit::wait::wait_until_so;

/// fio: writes, then reads everything back and compares checksums.
const VERIFY: &str = "fio --name=verify --filename=/run/disk/verify --size=8M --rw=randwrite \
    --bsrange=4k-64k --ioengine=io_uring --iodepth=16 --direct=1 --randrepeat=0 --verify=crc32c \
    --verify_fatal=1 --do_verify=1 --output-format=terse";

/// Longest time for a round; emulation needs only a part of it.
const ROUND_LIMIT: Duration = Duration::from_secs(240);

/// Makes a file system on the disk and mounts it.
pub(super) fn format(guest: &mut Guest, disk: &str) -> Result<()> {
    guest.ok(&format!("mke2fs -q -t ext4 -F {disk} && mount {disk} /run/disk")).map(drop)
}

/// Writes and verifies once.
pub(super) fn verify_once(guest: &mut Guest) -> Result<()> {
    guest.ok(VERIFY).map(drop)
}

/// Starts to write and verify repeatedly.
pub(super) fn start(guest: &mut Guest) -> Result<()> {
    let rounds = format!("while [ ! -e /run/stop ]; do {VERIFY} || exit 1; echo round; done");
    guest.ok("rm -f /run/stop /run/load.code")?;
    guest
        .ok(&format!("(sh -c '{rounds}'; echo $? >/run/load.code) >/run/load.log 2>&1 &"))
        .map(drop)
}

/// Waits until a running load has verified a round and continues.
pub(super) fn wait_for_round(guest: &mut Guest) -> Result<()> {
    wait_until_so(ROUND_LIMIT, "a verified round of the load", || {
        if guest.run("cat /run/load.code")?.code == 0 {
            bail!("the load has ended: {}", guest.ok("tail -n 30 /run/load.log")?);
        }
        Ok(guest.run("grep -q round /run/load.log")?.code == 0)
    })
}

/// Writes a file that must stay whole until the end of the case.
pub(super) fn write_kept(guest: &mut Guest) -> Result<()> {
    let write = "dd if=/dev/urandom of=kept bs=1M count=4 status=none && sha256sum kept >kept.sum";
    guest.ok(&format!("cd /run/disk && {write} && sync")).map(drop)
}

/// Reads that file past the page cache, and compares it.
pub(super) fn check_kept(guest: &mut Guest) -> Result<()> {
    let check = "echo 3 >/proc/sys/vm/drop_caches; cd /run/disk && sha256sum --quiet -c kept.sum";
    guest.ok(check).map(drop)
}

/// Stops the load, which must have verified at least one round without an error.
pub(super) fn finish(guest: &mut Guest) -> Result<()> {
    guest.ok("touch /run/stop")?;
    wait_until_so(
        ROUND_LIMIT,
        "the load's end",
        || Ok(guest.run("cat /run/load.code")?.code == 0),
    )?;
    let code = guest.ok("cat /run/load.code")?;
    let log = guest.ok("tail -n 30 /run/load.log")?;
    if code.trim() != "0" || !log.contains("round") {
        let kernel = guest.ok("dmesg | tail -n 30")?;
        bail!("the load in the guest ended with {}: {log}\n{kernel}", code.trim());
    }
    Ok(())
}

/// Ends a case: all data verifies once more in the guest, the daemon stops in order, and the file
/// system on the disk is sound.
pub(super) fn end(mut guest: Guest, daemon: Daemon, disk: &Disk) -> Result<()> {
    verify_once(&mut guest)?;
    guest.ok("umount /run/disk")?;
    guest.cut_power();
    daemon.stop()?;
    disk.check()
}
