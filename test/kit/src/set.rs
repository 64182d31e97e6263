// SPDX-License-Identifier: Apache-2.0
//! The sets that cases belong to: when a case runs, in which machine, and for how long at most.

use std::time::Duration;

use clap::ValueEnum;

/// When a case is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Set {
    /// At every change, on the debug kernel: short.
    Gating,
    /// At every change, on the plain kernel, which is many times faster: cases that are long on the debug kernel,
    /// further storage for others, the daemon with the module, and engines of storage.
    Plain,
    /// At every change, without the module: the daemon's io_uring plane alone. The debug kernel, which
    /// checks the module, adds nothing.
    Uring,
    /// The longer ones.
    Full,
    /// Guests inside the VM.
    Nested,
    /// The guest's driver, at every change.
    Guest,
    /// The guest's driver, the longer ones.
    GuestFull,
    /// The packages on Debian 12 with systemd.
    Debian12,
    /// The packages on Debian 13 with systemd.
    Debian13,
    /// Guests that libvirt starts, on Debian 12 with systemd.
    Libvirt,
    /// A cluster of Ceph on one machine.
    Ceph,
}

impl Set {
    /// The word in lists and options.
    pub fn as_str(self) -> &'static str {
        match self {
            Set::Gating => "gating",
            Set::Plain => "plain",
            Set::Uring => "uring",
            Set::Full => "full",
            Set::Nested => "nested",
            Set::Guest => "guest",
            Set::GuestFull => "guest-full",
            Set::Debian12 => "debian12",
            Set::Debian13 => "debian13",
            Set::Libvirt => "libvirt",
            Set::Ceph => "ceph",
        }
    }

    /// The most that a case of the set may take, on a slow machine with other work.
    pub fn timeout(self) -> Duration {
        Duration::from_secs(match self {
            Set::Gating | Set::Plain | Set::Uring | Set::Guest => 300,
            _ => 3600,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_in_lists_is_the_one_that_options_take() {
        for set in Set::value_variants() {
            assert_eq!(Set::from_str(set.as_str(), false), Ok(*set));
        }
    }
}
