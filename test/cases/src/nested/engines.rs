// SPDX-License-Identifier: Apache-2.0
//! A guest writes to a block device of a storage engine while servers and connections are lost and
//! return. `host::engines` has many more such cases, with the project's own driver in place of
//! a guest.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::outcome::expect_io_errors;

use super::disk::check_ext4;
use super::load::{self, Round};
use super::{Needs, Setup};
use crate::case::cases;
use crate::host::fixture::{NbdExport, NbdOptions, NvmeTcp, Raid};
use crate::nested::daemon::{Daemon, Plane};
use crate::nested::guest::{Guest, GuestSpec};

cases! { Nested;
    "guest-nvme-outage", Needs::MODULE,
        "a guest on NVMe/TCP on the kernel plane loses one path, then both for 30 seconds while the target restarts: it waits, and gets no error",
        |setup| nvme(setup, Plane::Kernel);
    "guest-nvme-outage-uring", Needs::NOTHING,
        "the same on the io_uring plane",
        |setup| nvme(setup, Plane::Uring);
    "guest-nbd-reconnect", Needs::MODULE,
        "a guest on NBD on the kernel plane loses one gateway, then both, and new connections replace them: it waits, and gets no error",
        |setup| nbd(setup, Plane::Kernel);
    "guest-nbd-reconnect-uring", Needs::NOTHING,
        "the same on the io_uring plane",
        |setup| nbd(setup, Plane::Uring);
    "guest-raid1", Needs::MODULE,
        "a guest on a mirror of md on the kernel plane: each leg is lost and returns, and both are equal in the end",
        |setup| raid(setup, Plane::Kernel);
    "guest-raid1-uring", Needs::NOTHING,
        "the same on the io_uring plane",
        |setup| raid(setup, Plane::Uring);
}

const SERIAL: &str = "engine";
/// Seconds without a connection after which the host gives a controller up: more than any outage.
const LOSS_NEVER: u32 = 600;
/// Bytes of a leg of the mirror: room for the file system and the files of the load.
const LEG_BYTES: u64 = 24 << 20;
/// Duration of an outage of all paths.
const OUTAGE: Duration = Duration::from_secs(30);
/// Duration of an outage of all gateways, for which the kernel keeps the requests for a minute.
const SHORT_OUTAGE: Duration = Duration::from_secs(10);

/// Runs `change` while a guest writes rounds to the device and verifies. In the end all data is right, and
/// the file system is sound.
fn changed(
    setup: &Setup,
    device: &Path,
    plane: Plane,
    round: Round,
    change: impl FnOnce(&mut Guest) -> Result<()>,
) -> Result<()> {
    let daemon = Daemon::start(&setup.program, device, SERIAL, plane, &["--num-queues=2"])?;
    let spec = GuestSpec { disks: daemon.qemu_args(2), ..GuestSpec::default() };
    let mut guest = Guest::boot(&setup.image, &spec)?;
    let node = guest.virtio_disk(SERIAL)?;
    load::format(&mut guest, &node)?;
    load::write_kept(&mut guest)?;
    load::start_rounds(&mut guest, round)?;
    load::wait_for_another_round(&mut guest).context("before the change")?;
    change(&mut guest)?;
    load::wait_for_another_round(&mut guest).context("after the change")?;
    load::finish(&mut guest)?;
    load::check_kept(&mut guest)?;
    load::verify_round(&mut guest, round)?;
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
    changed(setup, &disk.path, plane, Round::Usual, |guest| {
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

fn nbd(setup: &Setup, plane: Plane) -> Result<()> {
    let (disk, mut export) = NbdExport::attach(&NbdOptions::default())?;
    changed(setup, &disk.path, plane, Round::Light, |guest| {
        export.kill(0)?;
        load::wait_for_another_round(guest).context("on one gateway")?;
        export.start(&[])?;
        export.reconnect(0)?;
        export.kill_all()?;
        wait_out(guest, SHORT_OUTAGE)?;
        export.start(&[])?;
        export.reconnect_all()
    })
}

fn raid(setup: &Setup, plane: Plane) -> Result<()> {
    // Requests of the lost leg fail; the array hides that.
    expect_io_errors();
    let mut raid = Raid::create(LEG_BYTES)?;
    let (disk, legs) = raid.parts();
    changed(setup, &disk.path, plane, Round::Light, |guest| {
        for leg in [1, 0] {
            let step = |what: &str| format!("leg {leg} {what}");
            Raid::lose(legs, leg).with_context(|| step("lost"))?;
            load::wait_for_another_round(guest).with_context(|| step("is lost"))?;
            Raid::return_leg(legs, leg).with_context(|| step("returns"))?;
        }
        Ok(())
    })?;
    raid.compare()
}
