// SPDX-License-Identifier: Apache-2.0
//! A running disk moves between the data planes while the guest writes.

use anyhow::{Context as _, Result};

use super::disk::{Disk, Kind};
use super::{Needs, Setup, load};
use crate::case::cases;
use crate::nested::daemon::{Daemon, Plane};
use crate::nested::guest::{Guest, GuestSpec};

cases! { Nested;
    "switch", Needs::MODULE,
        "a running disk moves between the data planes, back and forth, while the guest writes",
        run;
}

const SWITCHES: u32 = 12;

/// Runs the case.
fn run(setup: &Setup) -> Result<()> {
    for kind in [Kind::Device, Kind::File] {
        let disk = Disk::create(kind)?;
        on(setup, &disk)?;
    }
    Ok(())
}

fn on(setup: &Setup, disk: &Disk) -> Result<()> {
    let daemon = Daemon::with_control(&setup.program, &disk.path(), "switched", Plane::Uring, &[])?;
    let spec = GuestSpec { disks: daemon.qemu_args(2), ..GuestSpec::default() };
    let mut guest = Guest::boot(&setup.image, &spec)?;
    let node = guest.virtio_disk("switched")?;
    load::format(&mut guest, &node)?;
    load::start(&mut guest)?;
    for i in 0..SWITCHES {
        load::wait_for_requests(&mut guest, &node)?;
        daemon.switch(if i % 2 == 0 { Plane::Kernel } else { Plane::Uring })?;
    }
    load::wait_for_another_round(&mut guest).context("after the switches")?;
    load::finish(&mut guest)?;
    load::end(guest, daemon, disk)?;
    println!("{SWITCHES} switches of {} under load; all data verified", disk.path().display());
    Ok(())
}
