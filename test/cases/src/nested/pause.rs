// SPDX-License-Identifier: Apache-2.0
//! A guest is paused, resumed and reset while it writes.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::disk::{Disk, Kind};
use super::{Needs, Setup, load};
use crate::case::cases;
use crate::nested::daemon::{Daemon, Plane};
use crate::nested::guest::{Guest, GuestSpec};

cases! { Nested;
    "pause-kernel", Needs::MODULE,
        "a guest behind the kernel plane is paused, resumed and reset while it writes",
        |setup| run(setup, Plane::Kernel);
    "pause-uring", Needs::NOTHING,
        "a guest behind the io_uring plane is paused, resumed and reset while it writes",
        |setup| run(setup, Plane::Uring);
}

const PAUSES: u32 = 6;
const RESETS: u32 = 2;
const A_MOMENT: Duration = Duration::from_millis(300);

/// Runs the case.
fn run(setup: &Setup, plane: Plane) -> Result<()> {
    let disk = Disk::create(Kind::Device)?;
    let daemon = Daemon::start(&setup.program, &disk.path(), "paused", plane, &["--num-queues=2"])?;
    let spec = GuestSpec { disks: daemon.qemu_args(2), ..GuestSpec::default() };
    let mut guest = Guest::boot(&setup.image, &spec)?;
    let mut node = guest.virtio_disk("paused")?;
    load::format(&mut guest, &node)?;
    load::write_kept(&mut guest)?;
    load::start(&mut guest)?;
    for _ in 0..PAUSES {
        load::wait_for_requests(&mut guest, &node)?;
        guest.monitor("stop", json!({}))?;
        sleep(A_MOMENT);
        guest.monitor("cont", json!({}))?;
    }
    load::wait_for_another_round(&mut guest).context("after the pauses")?;
    load::finish(&mut guest)?;
    for _ in 0..RESETS {
        load::start(&mut guest)?;
        load::wait_for_round(&mut guest)?;
        guest.monitor("system_reset", json!({}))?;
        guest.wait_ready()?;
        node = guest.virtio_disk("paused")?;
        guest.ok(&format!("mount {node} /run/disk"))?;
        load::check_kept(&mut guest)?;
    }
    load::end(guest, daemon, &disk)?;
    println!(
        "{PAUSES} pauses and {RESETS} resets under a load that verified itself; \
         what was synced before is whole"
    );
    Ok(())
}
