// SPDX-License-Identifier: Apache-2.0
//! A guest whose disks, that with its root file system among them, are driven by this project's
//! driver.

use anyhow::{Result, bail, ensure};

use super::disk::Kind;
use super::{Lab, power_cut};
use crate::daemon::Plane;
use crate::guest::{Driver, Guest, Image, OwnDriver};

/// Reads that are polled for, beside others that are not.
const POLLED: &str = "fio --filename=/run/disk/verify --ioengine=io_uring --direct=1 --rw=randread \
    --bs=4k --iodepth=8 --number_ios=2000 --name=polled --hipri=1 --name=ordinary";

/// Runs the case: a power cut on the kernel plane, as seen from the driver's side.
pub(super) fn run(lab: &Lab, image: &Image) -> Result<()> {
    let Driver::Own(driver) = image.driver else { bail!("the image has the kernel's own driver") };
    power_cut::run_with(lab, image, Plane::Kernel, Kind::Device, |guest, node| {
        for disk in ["/dev/vda", node] {
            is_driven(guest, disk, driver)?;
        }
        if driver.poll_queues > 0 {
            guest.ok(POLLED)?;
        }
        Ok(())
    })
}

/// The disk says that it is driven in this way; the kernel's own driver says nothing.
fn is_driven(guest: &mut Guest, disk: &str, driver: OwnDriver) -> Result<()> {
    let name = disk.trim_start_matches("/dev/");
    let said = guest.ok(&format!("cd /sys/block/{name} && cat io_path io_poll_queues"))?;
    let path = if driver.bio { "bio" } else { "request" };
    let expected = format!("{path}\n{}", driver.poll_queues);
    ensure!(said.trim() == expected, "{disk} says of its driver {said:?}, not {expected:?}");
    Ok(())
}
