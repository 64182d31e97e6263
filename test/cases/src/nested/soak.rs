// SPDX-License-Identifier: Apache-2.0
//! `make soak` on both planes.

use anyhow::{Result, ensure};
use kit::soak::{self, Length, Options, SERIAL, Served};

use super::disk::{Disk, Kind, check_ext4};
use super::{Needs, Setup};
use crate::case::cases;
use crate::nested::guest::{Guest, GuestSpec};

cases! { Nested;
    "soak", Needs::MODULE,
        "a guest verifies its data while its disk is switched between the planes, killed, upgraded, operated and broken in random order",
        run;
}

/// Three times each kind.
const EVENTS: usize = 54;

fn run(setup: &Setup) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("soak-").tempdir()?;
    let disk = Disk::create(Kind::File)?;
    let mut served = Served::start(&setup.program, folder.path(), &disk.path())?;
    let mut spec =
        GuestSpec { disks: served.qemu_args("reconnect-ms=200"), ..GuestSpec::default() };
    spec.disks.extend(soak::memory_args(spec.memory_mib));
    let mut guest = Guest::boot(&setup.image, &spec)?;
    let options = Options {
        seed: setup.seed,
        length: Length::Events(EVENTS),
        node: guest.virtio_disk(SERIAL)?,
        repeat: format!("cases run soak --seed {}", setup.seed),
    };
    let report = soak::run(&mut guest, &mut served, &options)?;
    print!("{report}");
    guest.cut_power();
    check_ext4(&served.stop()?)?;
    let planes: Vec<&str> = report.planes().collect();
    ensure!(planes == ["kernel", "uring"], "all events were on {planes:?}");
    Ok(())
}
