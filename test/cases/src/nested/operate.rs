// SPDX-License-Identifier: Apache-2.0
//! A running disk grows, is limited and paused while the guest writes; QEMU tells the guest of the
//! size.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::disk::{Disk, Kind};
use super::{Needs, Setup, load};
use crate::case::cases;
use crate::nested::daemon::{Daemon, Plane};
use crate::nested::guest::{Guest, GuestSpec};
use kit::wait::wait_until_so;

cases! { Nested;
    "operate-kernel", Needs::MODULE,
        "a disk of the kernel plane grows, is limited, paused and resumed while the guest writes",
        |setup| run(setup, Plane::Kernel);
    "operate-uring", Needs::NOTHING,
        "a disk of the io_uring plane grows, is limited, paused and resumed while the guest writes",
        |setup| run(setup, Plane::Uring);
}

const ROUNDS: u64 = 4;
const GROWTH_MIB: u64 = 8;
/// Longest time for the guest to see a size; emulation needs only a part of it.
const SIZE_LIMIT: Duration = Duration::from_secs(60);

/// Runs the case.
fn run(setup: &Setup, plane: Plane) -> Result<()> {
    let disk = Disk::create(Kind::File)?;
    let daemon = Daemon::with_control(&setup.program, &disk.path(), "operated", plane, &[])?;
    let spec = GuestSpec { disks: daemon.qemu_args(2), ..GuestSpec::default() };
    let mut guest = Guest::boot(&setup.image, &spec)?;
    let node = guest.virtio_disk("operated")?;
    load::format(&mut guest, &node)?;
    load::start(&mut guest)?;
    for round in 0..ROUNDS {
        daemon.control(&["limit", "--iops", "200"])?;
        let bytes = disk.path().metadata()?.len() + (GROWTH_MIB << 20);
        if round % 2 == 1 {
            daemon.control(&["pause"])?;
        }
        daemon.control(&["resize", &bytes.to_string()])?;
        daemon.control(&["resume"])?;
        wait_until_so(SIZE_LIMIT, "the new size in the guest", || {
            Ok(guest.ok(&format!("blockdev --getsize64 {node}"))?.trim() == bytes.to_string())
        })?;
        daemon.control(&["limit", "--none"])?;
    }
    load::finish(&mut guest)?;
    // The file system grows into the new part while it is mounted.
    let resized = guest.run(&format!("resize2fs {node}"))?;
    ensure!(resized.code == 0, "{resized:?}");
    load::verify_once(&mut guest)?;
    load::end(guest, daemon, &disk)?;
    println!("{ROUNDS} times {GROWTH_MIB} MiB more, with limits and pauses, under a load");
    Ok(())
}
