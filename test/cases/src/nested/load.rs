// SPDX-License-Identifier: Apache-2.0
//! The load of the cases: fio, which verifies itself, and a file that must stay whole.

use anyhow::Result;
pub(super) use kit::load::{
    Round, finish, format, rounds, start, start_rounds, verify_once, verify_round,
    wait_for_another_round, wait_for_requests, wait_for_round,
};

use crate::nested::daemon::Daemon;
use crate::nested::disk::Disk;
use crate::nested::guest::Guest;

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

/// Ends a case: all data verifies once more in the guest, the daemon stops in order, and the file
/// system on the disk is sound.
pub(super) fn end(mut guest: Guest, daemon: Daemon, disk: &Disk) -> Result<()> {
    verify_once(&mut guest)?;
    guest.ok("umount /run/disk")?;
    guest.cut_power();
    daemon.stop()?;
    disk.check()
}
