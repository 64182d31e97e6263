// SPDX-License-Identifier: Apache-2.0
//! The daemon is killed repeatedly while the guest writes; QEMU connects to its successor.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};

use super::disk::{Disk, Kind};
use super::{Needs, Setup, load};
use crate::case::cases;
use crate::nested::daemon::{Daemon, Plane};
use crate::nested::guest::{Guest, GuestSpec};

cases! { Nested;
    "reconnect-kernel", Needs::MODULE,
        "the daemon is killed twenty times while a guest behind the kernel plane writes; QEMU goes on with the next one",
        |setup| run(setup, Plane::Kernel);
    "reconnect-uring", Needs::NOTHING,
        "the daemon is killed twenty times while a guest behind the io_uring plane writes; QEMU goes on with the next one",
        |setup| run(setup, Plane::Uring);
}

const KILLS: u64 = 20;

/// Runs the case.
fn run(setup: &Setup, plane: Plane) -> Result<()> {
    let disk = Disk::create(Kind::Device)?;
    let more = ["--num-queues=2"];
    let mut daemon = Daemon::start(&setup.program, &disk.path(), "killed", plane, &more)?;
    let spec = GuestSpec { disks: daemon.reconnecting_qemu_args(2), ..GuestSpec::default() };
    let mut guest = Guest::boot(&setup.image, &spec)?;
    let node = guest.virtio_disk("killed")?;
    load::format(&mut guest, &node)?;
    load::start(&mut guest)?;
    for kill in 0..KILLS {
        // At another point of the load each time.
        sleep(Duration::from_millis(300 + 50 * kill));
        daemon.replace().with_context(|| format!("kill {kill}"))?;
    }
    load::finish(&mut guest)?;
    load::end(guest, daemon, &disk)?;
    println!("{KILLS} daemons killed under load; all data verified");
    Ok(())
}
