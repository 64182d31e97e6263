// SPDX-License-Identifier: Apache-2.0
//! A guest is paused, resumed and reset while it writes.

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::disk::{Disk, Kind};
use super::{Lab, load};
use crate::daemon::{Daemon, Plane};
use crate::guest::{Guest, GuestSpec, Image};

const PAUSES: u32 = 6;
const RESETS: u32 = 2;
const A_MOMENT: Duration = Duration::from_millis(300);

/// Runs the case.
pub(super) fn run(lab: &Lab, image: &Image, plane: Plane) -> Result<()> {
    let disk = Disk::create(Kind::Device)?;
    let daemon = Daemon::start(&lab.program, &disk.path(), "paused", plane, &["--num-queues=2"])?;
    let spec = GuestSpec { disks: daemon.qemu_args(2), ..GuestSpec::default() };
    let mut guest = Guest::boot(image, &spec)?;
    let mut node = guest.virtio_disk("paused")?;
    load::format(&mut guest, &node)?;
    load::start(&mut guest)?;
    for _ in 0..PAUSES {
        guest.monitor("stop", json!({}))?;
        sleep(A_MOMENT);
        guest.monitor("cont", json!({}))?;
        sleep(A_MOMENT);
    }
    load::finish(&mut guest)?;
    for _ in 0..RESETS {
        load::start(&mut guest)?;
        sleep(4 * A_MOMENT);
        guest.monitor("system_reset", json!({}))?;
        guest.wait_ready()?;
        node = guest.virtio_disk("paused")?;
        guest.ok(&format!("mount {node} /run/disk"))?;
    }
    load::verify_once(&mut guest)?;
    guest.ok("umount /run/disk")?;
    guest.cut_power();
    daemon.stop()?;
    disk.check()?;
    println!("{PAUSES} pauses and {RESETS} resets under load; all data verified");
    Ok(())
}
