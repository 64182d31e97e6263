// SPDX-License-Identifier: Apache-2.0
//! The cases: what an inner guest lives through on a served disk.

mod disk;
mod driver;
mod load;
mod migrate;
mod pause;
mod power_cut;
mod switch;

use std::path::{Path, PathBuf};

use anyhow::Result;
use lab_case::outcome::skip;

use crate::daemon::Plane;
use crate::guest::{Driver, Image, OwnDriver};
use crate::kvm;

/// What the cases run with.
#[derive(Clone, Debug)]
pub struct Lab {
    /// The `vhost-blk` program.
    pub program: PathBuf,
    /// The payload's folder with the inner guest's kernel and root image.
    pub guest: PathBuf,
}

/// A case.
#[derive(Clone, Copy)]
pub struct Case {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it shows, in one sentence.
    pub about: &'static str,
    kernel: bool,
    driver: Driver,
    run: fn(&Lab, &Image) -> Result<()>,
}

/// All cases.
pub const CASES: &[Case] = &[
    Case {
        name: "power-cut-kernel",
        about: "what a guest made durable on a block device behind the kernel plane survives a power cut",
        kernel: true,
        driver: Driver::InTree,
        run: |lab, image| power_cut::run(lab, image, Plane::Kernel, disk::Kind::Device),
    },
    Case {
        name: "power-cut-kernel-file",
        about: "what a guest made durable in an image file behind the kernel plane survives a power cut",
        kernel: true,
        driver: Driver::InTree,
        run: |lab, image| power_cut::run(lab, image, Plane::Kernel, disk::Kind::File),
    },
    Case {
        name: "power-cut-uring",
        about: "what a guest made durable behind the io_uring plane survives a power cut",
        kernel: false,
        driver: Driver::InTree,
        run: |lab, image| power_cut::run(lab, image, Plane::Uring, disk::Kind::Device),
    },
    Case {
        name: "migrate-kernel",
        about: "a guest that writes is migrated live from one kernel plane to another",
        kernel: true,
        driver: Driver::InTree,
        run: |lab, image| migrate::run(lab, image, Plane::Kernel, Plane::Kernel),
    },
    Case {
        name: "migrate-kernel-to-uring",
        about: "a guest that writes is migrated live from the kernel plane to the io_uring plane",
        kernel: true,
        driver: Driver::InTree,
        run: |lab, image| migrate::run(lab, image, Plane::Kernel, Plane::Uring),
    },
    Case {
        name: "migrate-uring",
        about: "a guest that writes is migrated live from one io_uring plane to another",
        kernel: false,
        driver: Driver::InTree,
        run: |lab, image| migrate::run(lab, image, Plane::Uring, Plane::Uring),
    },
    Case {
        name: "pause-kernel",
        about: "a guest behind the kernel plane is paused, resumed and reset while it writes",
        kernel: true,
        driver: Driver::InTree,
        run: |lab, image| pause::run(lab, image, Plane::Kernel),
    },
    Case {
        name: "pause-uring",
        about: "a guest behind the io_uring plane is paused, resumed and reset while it writes",
        kernel: false,
        driver: Driver::InTree,
        run: |lab, image| pause::run(lab, image, Plane::Uring),
    },
    Case {
        name: "switch",
        about: "a running disk moves between the data planes, back and forth, while the guest writes",
        kernel: true,
        driver: Driver::InTree,
        run: switch::run,
    },
    driven("driver-request", OwnDriver { bio: false, poll_queues: 0 }),
    driven("driver-bio", OwnDriver { bio: true, poll_queues: 0 }),
    driven("driver-request-poll", OwnDriver { bio: false, poll_queues: 1 }),
    driven("driver-bio-poll", OwnDriver { bio: true, poll_queues: 1 }),
];

/// A case of this project's driver in the guest.
const fn driven(name: &'static str, driver: OwnDriver) -> Case {
    Case {
        name,
        about: "a guest boots from a disk driven by this project's driver, in the mode of the case's name, and what it made durable behind the kernel plane survives a power cut",
        kernel: true,
        driver: Driver::Own(driver),
        run: driver::run,
    }
}

impl Case {
    /// Finds a case by its name.
    pub fn named(name: &str) -> Option<&'static Self> {
        CASES.iter().find(|case| case.name == name)
    }

    /// Runs it. An error is a failure or, with [`lab_case::outcome::Skip`] at its root, a reason not
    /// to run.
    pub fn run(&self, lab: &Lab) -> Result<()> {
        if self.kernel && !Path::new("/dev/vhost-blk").exists() {
            return Err(skip("/dev/vhost-blk is missing: load vhost_blk"));
        }
        // Not with the driver under test: if that is what does not work, the case must fail.
        kvm::must_work(&Image::prepare(&lab.guest, Driver::InTree)?)?;
        (self.run)(lab, &Image::prepare(&lab.guest, self.driver)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_cases_differ_and_descriptions_are_one_line() {
        let mut names: Vec<_> = CASES.iter().map(|case| case.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), CASES.len());
        assert!(CASES.iter().all(|case| !case.about.contains(['\n', '\t'])));
    }
}
