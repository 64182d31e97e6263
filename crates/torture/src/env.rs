// SPDX-License-Identifier: Apache-2.0
//! Where the case runs: programs, modules, who runs the queues, and the seed.

use std::path::PathBuf;

/// Who runs the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Plane {
    /// The kernel, programmed without a daemon.
    Direct,
    /// The kernel, by way of the daemon.
    Kernel,
    /// The daemon itself: to try the cases where there is no module.
    Uring,
}

/// What the command line says about the surroundings.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Env {
    /// Folder with the project's programs
    #[arg(long, value_name = "DIR", default_value = "/lab/bin")]
    pub(crate) bin: PathBuf,
    /// Folder with the kernel modules
    #[arg(long, value_name = "DIR", default_value = "/lab/modules")]
    pub(crate) modules: PathBuf,
    /// Who runs the queues, where the case does not say
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
    /// Length of cases that are made of rounds, in percent of the usual
    #[arg(long, value_name = "PERCENT", default_value = "100")]
    pub(crate) effort: u64,
}

impl Env {
    /// The same with the queues run by the kernel by way of the daemon, unless the command line
    /// chose the daemon itself.
    pub(crate) fn over_daemon(&self) -> Self {
        let plane = if self.plane == Plane::Direct { Plane::Kernel } else { self.plane };
        Self { plane, ..self.clone() }
    }

    /// A number of rounds, as the effort has it; at least one.
    pub(crate) fn rounds(&self, usual: u64) -> u64 {
        (usual * self.effort / 100).max(1)
    }

    /// The seed; printed once by the program.
    pub(crate) fn seed(&self) -> u64 {
        self.seed.expect("the program fills it in")
    }
}
