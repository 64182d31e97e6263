// SPDX-License-Identifier: Apache-2.0
//! A load in the guest that writes, reads back and compares, until it is told to stop.

use std::time::Duration;

use anyhow::{Result, bail};

use crate::exec::wait_until;
use crate::guest::Guest;

/// fio: writes, then reads everything back and compares checksums.
const VERIFY: &str = "fio --name=verify --filename=/run/disk/verify --size=8M --rw=randwrite \
    --bsrange=4k-64k --ioengine=io_uring --iodepth=16 --direct=1 --randrepeat=0 --verify=crc32c \
    --verify_fatal=1 --do_verify=1 --output-format=terse";

/// Makes a file system on the disk and mounts it.
pub(super) fn format(guest: &mut Guest, disk: &str) -> Result<()> {
    guest.ok(&format!("mke2fs -q -t ext4 -F {disk} && mount {disk} /run/disk")).map(drop)
}

/// Writes and verifies once.
pub(super) fn verify_once(guest: &mut Guest) -> Result<()> {
    guest.ok(VERIFY).map(drop)
}

/// Starts to write and verify again and again.
pub(super) fn start(guest: &mut Guest) -> Result<()> {
    let rounds = format!("while [ ! -e /run/stop ]; do {VERIFY} || exit 1; echo round; done");
    guest.ok("rm -f /run/stop /run/load.code")?;
    guest
        .ok(&format!("(sh -c '{rounds}'; echo $? >/run/load.code) >/run/load.log 2>&1 &"))
        .map(drop)
}

/// Stops the load, which must have found nothing wrong and finished a round.
pub(super) fn finish(guest: &mut Guest) -> Result<()> {
    guest.ok("touch /run/stop")?;
    wait_until("the load's end", Duration::from_secs(240), || {
        Ok(guest.run("cat /run/load.code")?.code == 0)
    })?;
    let code = guest.ok("cat /run/load.code")?;
    let log = guest.ok("tail -n 30 /run/load.log")?;
    if code.trim() != "0" || !log.contains("round") {
        let kernel = guest.ok("dmesg | tail -n 30")?;
        bail!("the load in the guest ended with {}: {log}\n{kernel}", code.trim());
    }
    Ok(())
}
