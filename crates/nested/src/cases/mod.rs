// SPDX-License-Identifier: Apache-2.0
//! The cases: what an inner guest lives through on a served disk.

mod disk;
mod load;
mod migrate;
mod pause;
mod power_cut;
mod switch;

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::daemon::Plane;
use crate::guest::Image;
use crate::kvm;

/// What the cases run with.
#[derive(Clone, Debug)]
pub struct Lab {
    /// The `vhost-blk` program.
    pub program: PathBuf,
    /// The payload's folder with the inner guest's kernel and root image.
    pub guest: PathBuf,
}

/// How a case ended; a failure is an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All was as it has to be.
    Passed,
    /// It could not be tried, and why.
    Skipped(String),
}

/// A case.
#[derive(Clone, Copy)]
pub struct Case {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it shows, in one sentence.
    pub about: &'static str,
    kernel: bool,
    run: fn(&Lab, &Image) -> Result<()>,
}

/// All cases.
pub const CASES: &[Case] = &[
    Case {
        name: "power-cut-kernel",
        about: "what a guest made durable on a block device behind the kernel plane survives a power cut",
        kernel: true,
        run: |lab, image| power_cut::run(lab, image, Plane::Kernel, disk::Kind::Device),
    },
    Case {
        name: "power-cut-kernel-file",
        about: "what a guest made durable in an image file behind the kernel plane survives a power cut",
        kernel: true,
        run: |lab, image| power_cut::run(lab, image, Plane::Kernel, disk::Kind::File),
    },
    Case {
        name: "power-cut-uring",
        about: "what a guest made durable behind the io_uring plane survives a power cut",
        kernel: false,
        run: |lab, image| power_cut::run(lab, image, Plane::Uring, disk::Kind::Device),
    },
    Case {
        name: "migrate-kernel",
        about: "a guest that writes is migrated live from one kernel plane to another",
        kernel: true,
        run: |lab, image| migrate::run(lab, image, Plane::Kernel, Plane::Kernel),
    },
    Case {
        name: "migrate-kernel-to-uring",
        about: "a guest that writes is migrated live from the kernel plane to the io_uring plane",
        kernel: true,
        run: |lab, image| migrate::run(lab, image, Plane::Kernel, Plane::Uring),
    },
    Case {
        name: "migrate-uring",
        about: "a guest that writes is migrated live from one io_uring plane to another",
        kernel: false,
        run: |lab, image| migrate::run(lab, image, Plane::Uring, Plane::Uring),
    },
    Case {
        name: "pause-kernel",
        about: "a guest behind the kernel plane is paused, resumed and reset while it writes",
        kernel: true,
        run: |lab, image| pause::run(lab, image, Plane::Kernel),
    },
    Case {
        name: "pause-uring",
        about: "a guest behind the io_uring plane is paused, resumed and reset while it writes",
        kernel: false,
        run: |lab, image| pause::run(lab, image, Plane::Uring),
    },
    Case {
        name: "switch",
        about: "a running disk moves between the data planes, back and forth, while the guest writes",
        kernel: true,
        run: switch::run,
    },
];

impl Case {
    /// Finds a case by its name.
    pub fn named(name: &str) -> Option<&'static Self> {
        CASES.iter().find(|case| case.name == name)
    }

    /// Runs it.
    pub fn run(&self, lab: &Lab) -> Result<Outcome> {
        if self.kernel && !Path::new("/dev/vhost-blk").exists() {
            return Ok(Outcome::Skipped("/dev/vhost-blk is missing: load vhost_blk".to_owned()));
        }
        let image = Image::prepare(&lab.guest)?;
        if let Err(reason) = kvm::works(&image)? {
            return Ok(Outcome::Skipped(reason));
        }
        (self.run)(lab, &image)?;
        Ok(Outcome::Passed)
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
