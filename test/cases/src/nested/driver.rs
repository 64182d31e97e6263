// SPDX-License-Identifier: Apache-2.0
//! A guest in which this project's driver drives all disks, the root disk included.

use anyhow::{Result, bail, ensure};

use super::disk::Kind;
use super::{Needs, Setup, guest_killed};
use crate::case::cases;
use crate::nested::daemon::Plane;
use crate::nested::guest::{Driver, Guest, OwnDriver};

/// Description of all of these cases.
const ABOUT: &str = "a guest boots from a disk driven by this project's driver, \
    in the mode of the case's name, and what it made durable \
    behind the kernel plane is there after the guest is killed";

cases! { Nested;
    "driver-request", driven(false, 0), ABOUT, run;
    "driver-bio", driven(true, 0), ABOUT, run;
    "driver-request-poll", driven(false, 1), ABOUT, run;
    "driver-bio-poll", driven(true, 1), ABOUT, run;
}

/// The kernel plane, and a guest with this project's driver in the given mode.
const fn driven(bio: bool, poll_queues: u32) -> Needs {
    Needs { driver: Driver::Own(OwnDriver { bio, poll_queues }), ..Needs::MODULE }
}

/// Polled reads beside reads that complete by interrupt.
const POLLED: &str = "fio --filename=/run/disk/verify --ioengine=io_uring --direct=1 --rw=randread \
    --bs=4k --iodepth=8 --number_ios=2000 --name=polled --hipri=1 --name=ordinary";

/// Runs the case: the guest is killed on the kernel plane, seen from the driver's side.
fn run(setup: &Setup) -> Result<()> {
    let Driver::Own(driver) = setup.image.driver else {
        bail!("the image has the kernel's own driver")
    };
    guest_killed::run_with(setup, Plane::Kernel, Kind::Device, |guest, node| {
        for disk in ["/dev/vda", node] {
            is_driven(guest, disk, driver)?;
        }
        if driver.poll_queues > 0 {
            guest.ok(POLLED)?;
        }
        Ok(())
    })
}

/// Checks the driver's attributes of the disk, which the kernel's own driver does not have.
fn is_driven(guest: &mut Guest, disk: &str, driver: OwnDriver) -> Result<()> {
    let name = disk.trim_start_matches("/dev/");
    let said = guest.ok(&format!("cd /sys/block/{name} && cat io_path io_poll_queues"))?;
    let path = if driver.bio { "bio" } else { "request" };
    let expected = format!("{path}\n{}", driver.poll_queues);
    ensure!(said.trim() == expected, "{disk} says of its driver {said:?}, not {expected:?}");
    Ok(())
}
