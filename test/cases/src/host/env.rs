// SPDX-License-Identifier: Apache-2.0
//! The environment of a case: programs, modules, data plane, and the seed.

use anyhow::{Context, Result};
use std::path::PathBuf;

/// The data plane that runs the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Plane {
    /// The kernel, programmed without a daemon.
    Direct,
    /// The kernel, through the daemon.
    Kernel,
    /// The daemon itself: for trying the cases without the module.
    Uring,
    /// The daemon chooses.
    Auto,
}

impl Plane {
    /// The value of the daemon's `--data-plane`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Plane::Direct | Plane::Kernel => "kernel",
            Plane::Uring => "uring",
            Plane::Auto => "auto",
        }
    }
}

/// Environment, from the command line.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Env {
    /// Directory with the project's programs
    #[arg(long, value_name = "DIR", default_value = "/lab/bin")]
    pub(crate) bin: PathBuf,
    /// Directory with the kernel modules
    #[arg(long, value_name = "DIR", default_value = "/lab/modules")]
    pub(crate) modules: PathBuf,
    /// Data plane that runs the queues, if the case does not choose it
    #[arg(long, value_name = "PLANE", default_value = "direct")]
    pub(crate) plane: Plane,
    /// Use this file or block device, whose content is lost, instead of making a disk
    #[arg(long, value_name = "PATH")]
    pub(crate) disk: Option<PathBuf>,
    /// Put a wrapper around the daemon's backend (with --plane uring): the case must then fail
    #[arg(long, value_name = "SPEC")]
    pub(crate) wrap: Option<String>,
    /// Start of the random numbers [default: the clock]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Length of cases that consist of rounds, in percent of the usual length
    #[arg(long, value_name = "PERCENT", default_value = "100")]
    pub(crate) effort: u64,
}

impl Env {
    /// The same environment with the queues run by the kernel through the daemon, unless the
    /// command line selected the daemon itself.
    pub(crate) fn over_daemon(&self) -> Self {
        let plane = if self.plane == Plane::Direct { Plane::Kernel } else { self.plane };
        Self { plane, ..self.clone() }
    }

    /// The same environment with the given data plane.
    pub(crate) fn on(&self, plane: Plane) -> Self {
        Self { plane, ..self.clone() }
    }

    /// Runs a case with the queues in the kernel, through the daemon, and then in the daemon.
    pub(crate) fn on_both_planes(&self, case: impl Fn(&Env) -> Result<()>) -> Result<()> {
        for plane in [Plane::Kernel, Plane::Uring] {
            case(&self.on(plane)).with_context(|| format!("{plane:?}"))?;
        }
        Ok(())
    }

    /// The usual number of rounds, scaled by the effort; at least one.
    pub(crate) fn rounds(&self, usual: u64) -> u64 {
        (usual * self.effort / 100).max(1)
    }

    /// Seed of the random numbers; the program prints it once.
    pub(crate) fn seed(&self) -> u64 {
        self.seed.expect("the program fills it in")
    }
}
