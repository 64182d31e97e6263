// SPDX-License-Identifier: Apache-2.0
//! Cases and measurements with guests inside the VM: the whole stack, with real KVM, ioeventfds and
//! irqfds.
//!
//! * [`guest`]: an inner guest; [`load`]: the load on its disk.
//! * [`disk`], [`daemon`]: the served disk and its daemon.
//! * [`kvm`]: a check that guests run here at all.
//! * [`measure`]: a comparison of all ways to attach a disk.
//!
//! Each other module has cases.

mod daemon;
mod demo_storage;
mod disk;
mod driver;
mod engines;
mod guest;
mod guest_killed;
mod kvm;
mod load;
pub(crate) mod measure;
mod migrate;
mod migrate_nvme;
mod operate;
mod pause;
mod reconnect;
mod soak;
mod switch;

use std::path::{Path, PathBuf};

use anyhow::Result;
use kit::outcome::skip;

use guest::{Driver, Image};

/// Directory in which the lab puts the inner guest's files.
pub(crate) const GUEST_DIRECTORY: &str = "/lab/guest";

/// Directory for files of inner guests, kept for further guests of the same VM.
pub(crate) const WORK_DIRECTORY: &str = "/run/nested";

/// Files that the lab has put into the VM, or on a host beside this program.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Lab {
    /// Directory with the project's programs
    #[arg(long, value_name = "DIR", default_value = "/lab/bin")]
    pub(crate) bin: PathBuf,
    /// Directory with the inner guest's vmlinuz and root.img
    #[arg(long, value_name = "DIR", default_value = GUEST_DIRECTORY)]
    pub(crate) guest: PathBuf,
    /// Directory for files of inner guests
    #[arg(long, value_name = "DIR", default_value = WORK_DIRECTORY)]
    pub(crate) work: PathBuf,
    /// This is a real host, which needs no preparation for KVM under emulation
    #[arg(long)]
    pub(crate) on_host: bool,
}

impl Lab {
    /// Files in a VM of the lab.
    pub(crate) fn in_vm(bin: PathBuf, guest: PathBuf) -> Self {
        Self { bin, guest, work: WORK_DIRECTORY.into(), on_host: false }
    }

    /// The daemon's program.
    fn program(&self) -> PathBuf {
        self.bin.join("vhost-blk")
    }
}

/// Needs of a case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    module: bool,
    driver: Driver,
}

impl Needs {
    /// KVM only.
    const NOTHING: Self = Self { module: false, driver: Driver::InTree };
    /// The host's module.
    const MODULE: Self = Self { module: true, ..Self::NOTHING };
}

/// Inputs of a case.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// The daemon's program.
    program: PathBuf,
    /// Boot files of inner guests.
    image: Image,
    /// Seed of random numbers.
    seed: u64,
    /// Number of random events, if it was given.
    events: Option<usize>,
}

/// Runs a case, or skips it if the VM lacks one of its needs.
pub(crate) fn run(
    needs: Needs,
    body: fn(&Setup) -> Result<()>,
    lab: &Lab,
    (seed, events): (u64, Option<usize>),
) -> Result<()> {
    if needs.module && !Path::new("/dev/vhost-blk").exists() {
        return Err(skip("/dev/vhost-blk is missing: load vhost_blk"));
    }
    // Not with the driver under test: a failure of that driver must fail the case.
    kvm::must_work(lab, &Image::prepare(lab, Driver::InTree)?)?;
    let image = Image::prepare(lab, needs.driver)?;
    body(&Setup { program: lab.program(), image, seed, events })
}
