// SPDX-License-Identifier: Apache-2.0
//! `make soak` on both planes: of an image, of a device that stalls and fails, and of such a device among
//! other disks of one daemon.

use std::fmt;
use std::path::Path;

use anyhow::{Result, ensure};
use kit::soak::{self, Beside, Device, Length, Options, Served};

use super::disk::{Disk, Kind, check_ext4};
use super::{Needs, Setup};
use crate::case::cases;
use crate::host::fixture::{self, Dm, DmKind, NullBlkOptions, null_blk};
use crate::nested::guest::{Guest, GuestSpec};

cases! { Nested;
    "soak", Needs::MODULE,
        "a guest verifies its data while its disk is switched between the planes, killed, upgraded, operated and broken in random order",
        image;
    "soak-device", Needs::MODULE,
        "a guest verifies its data while its device stalls, fails, and is operated on both planes in random order",
        device;
    "soak-daemon", Needs::MODULE,
        "the same with two more disks in the daemon, which go on while the device is paused, stalls or is halted",
        daemon;
}

/// Three times each kind.
const EVENTS: usize = 54;
const DEVICE_EVENTS: usize = 36;
/// Each kind once: three disks at once are slow in an emulated guest.
const DAEMON_EVENTS: usize = 12;
/// MiB of each of the other disks of a daemon.
const OTHER_MIB: u64 = 32;

/// A device whose table changes.
struct Mapped {
    disk: fixture::Disk,
    dm: Dm,
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped").field("dm", &self.dm).finish_non_exhaustive()
    }
}

impl Device for Mapped {
    fn path(&self) -> &Path {
        &self.disk.path
    }

    fn suspend(&self) -> Result<()> {
        self.dm.suspend()
    }

    fn resume(&self) -> Result<()> {
        self.dm.resume()
    }

    fn fail(&self) -> Result<()> {
        self.dm.become_kind(DmKind::ErrorPart)
    }

    fn mend(&self) -> Result<()> {
        self.dm.become_kind(DmKind::Linear)
    }
}

fn image(setup: &Setup) -> Result<()> {
    let directory = tempfile::Builder::new().prefix("soak-").tempdir()?;
    let disk = Disk::create(Kind::File)?;
    let served = Served::start(&setup.program, directory.path(), &disk.path())?;
    run(setup, served, "soak", EVENTS)
}

fn device(setup: &Setup) -> Result<()> {
    let directory = tempfile::Builder::new().prefix("soak-").tempdir()?;
    let served = Served::start_device(&setup.program, directory.path(), mapped()?)?;
    run(setup, served, "soak-device", DEVICE_EVENTS)
}

fn mapped() -> Result<Box<Mapped>> {
    let (below, _) = null_blk(NullBlkOptions::USUAL)?;
    let (disk, dm) = Dm::over(below, "soaked", DmKind::Linear)?;
    Ok(Box::new(Mapped { disk, dm }))
}

fn daemon(setup: &Setup) -> Result<()> {
    let directory = tempfile::Builder::new().prefix("soak-").tempdir()?;
    let others = [Disk::sized(Kind::Device, OTHER_MIB)?, Disk::sized(Kind::File, OTHER_MIB)?];
    let planes = [("in-kernel", "data-plane = 'kernel'\n"), ("in-uring", "data-plane = 'uring'\n")];
    let beside = planes.iter().zip(&others);
    let beside =
        beside.map(|((serial, options), disk)| Beside { serial, path: disk.path(), options });
    let served =
        Served::start_daemon(&setup.program, directory.path(), mapped()?, beside.collect())?;
    run(setup, served, "soak-daemon", DAEMON_EVENTS)?;
    others.iter().try_for_each(Disk::check)
}

fn run(setup: &Setup, mut served: Served, name: &str, events: usize) -> Result<()> {
    let mut spec =
        GuestSpec { disks: served.qemu_args("reconnect-ms=200"), ..GuestSpec::default() };
    spec.disks.extend(soak::memory_args(spec.memory_mib));
    let mut guest = Guest::boot(&setup.image, &spec)?;
    let nodes = served.serials().map(|serial| guest.virtio_disk(serial)).collect::<Result<_>>()?;
    let (seed, events) = (setup.seed, setup.events.unwrap_or(events));
    let repeat = format!("cases run {name} --seed {seed} --events {events}");
    let options = Options { seed, length: Length::Events(events), nodes, repeat };
    let report = soak::run(&mut guest, &mut served, &options)?;
    print!("{report}");
    guest.cut_power();
    check_ext4(&served.stop()?)?;
    let planes: Vec<&str> = report.planes().collect();
    ensure!(planes == ["kernel", "uring"], "all events were on {planes:?}");
    Ok(())
}
