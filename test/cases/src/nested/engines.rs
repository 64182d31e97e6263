// SPDX-License-Identifier: Apache-2.0
//! A guest writes to a block device of a storage engine while servers and connections are lost and
//! return. `host::engines` has many more such cases, with the project's own driver in place of
//! a guest.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::disk::check_ext4;
use super::{Needs, Setup, load};
use crate::case::cases;
use crate::host::fixture::NvmeTcp;
use crate::nested::daemon::{Daemon, Plane};
use crate::nested::guest::{Guest, GuestSpec};

cases! { Nested;
    "guest-nvme-outage", Needs::MODULE,
        "a guest on NVMe/TCP on the kernel plane loses one path, then both for 30 seconds while the target restarts: it waits, and gets no error",
        |setup| nvme(setup, Plane::Kernel);
    "guest-nvme-outage-uring", Needs::NOTHING,
        "the same on the io_uring plane",
        |setup| nvme(setup, Plane::Uring);
}

const SERIAL: &str = "engine";
/// Seconds without a connection after which the host gives a controller up: more than any outage.
const LOSS_NEVER: u32 = 600;
/// Duration of an outage of all paths.
const OUTAGE: Duration = Duration::from_secs(30);

/// Runs `change` while a guest writes to the device and verifies. In the end all data is right, and
/// the file system is sound.
fn changed(
    setup: &Setup,
    device: &Path,
    plane: Plane,
    change: impl FnOnce(&mut Guest) -> Result<()>,
) -> Result<()> {
    let daemon = Daemon::start(&setup.program, device, SERIAL, plane, &["--num-queues=2"])?;
    let spec = GuestSpec { disks: daemon.qemu_args(2), ..GuestSpec::default() };
    let mut guest = Guest::boot(&setup.image, &spec)?;
    let node = guest.virtio_disk(SERIAL)?;
    load::format(&mut guest, &node)?;
    load::write_kept(&mut guest)?;
    load::start(&mut guest)?;
    load::wait_for_another_round(&mut guest).context("before the change")?;
    change(&mut guest)?;
    load::wait_for_another_round(&mut guest).context("after the change")?;
    load::finish(&mut guest)?;
    load::check_kept(&mut guest)?;
    load::verify_once(&mut guest)?;
    guest.ok("umount /run/disk")?;
    guest.cut_power();
    daemon.stop()?;
    check_ext4(device)
}

/// Checks that the guest waits during an outage: its load ends no round.
fn wait_out(guest: &mut Guest, outage: Duration) -> Result<()> {
    // Requests that were on their way may still complete a round.
    sleep(outage / 2);
    let before = load::rounds(guest)?;
    sleep(outage / 2);
    let ended = load::rounds(guest)? - before;
    ensure!(ended == 0, "{ended} rounds ended without a server");
    Ok(())
}

fn nvme(setup: &Setup, plane: Plane) -> Result<()> {
    NvmeTcp::expect_lost_paths();
    let (disk, target) = NvmeTcp::connect(LOSS_NEVER)?;
    changed(setup, &disk.path, plane, |guest| {
        target.cut(0)?;
        target.wait_for_paths(1)?;
        load::wait_for_another_round(guest).context("on one path")?;
        target.cut(1)?;
        target.wait_for_paths(0)?;
        wait_out(guest, OUTAGE)?;
        target.restart()?;
        (0..2).try_for_each(|path| target.mend(path))?;
        target.wait_for_paths(2)
    })
}
