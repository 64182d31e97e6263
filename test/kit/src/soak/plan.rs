// SPDX-License-Identifier: Apache-2.0
//! The kinds of events, and their order in a run.

use std::fmt;

use super::{Length, MODULES_MAX};
use crate::rng::Rng;

/// A kind of event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Nothing: the pause of an undisturbed guest, for comparison.
    Quiet,
    /// The daemon is killed (SIGKILL), and QEMU connects to the next one.
    Kill,
    /// The daemon stops in order, and QEMU connects to the next one.
    Restart,
    /// `ctl upgrade`.
    Upgrade,
    /// `ctl switch` to the other data plane.
    Switch,
    /// `ctl resize` to a larger size, which the guest sees.
    Resize,
    /// `ctl limit`.
    Limit,
    /// `ctl limit --none`.
    Unlimit,
    /// `ctl pause` and `ctl resume`.
    Pause,
    /// QEMU stops all virtual CPUs and the queues, and continues.
    VmStop,
    /// Memory is plugged into the guest.
    Memory,
    /// The storage does not answer for a time.
    Stall,
    /// The storage fails, the disk halts, and the operator resumes it.
    Fail,
    /// `ctl set-cache`.
    Cache,
    /// `ctl snapshot`; the old image has one moment.
    Snapshot,
    /// `ctl commit`, until the disk has no overlay.
    Commit,
    /// `ctl backup`, twice: an incremental backup and, if there is none to continue, a full one before.
    Backup,
    /// `ctl mirror` to a raw or qcow2 image; the old one has one moment.
    Mirror,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 18] = [
        Self::Quiet,
        Self::Kill,
        Self::Restart,
        Self::Upgrade,
        Self::Switch,
        Self::Resize,
        Self::Limit,
        Self::Unlimit,
        Self::Pause,
        Self::VmStop,
        Self::Memory,
        Self::Stall,
        Self::Fail,
        Self::Cache,
        Self::Snapshot,
        Self::Commit,
        Self::Backup,
        Self::Mirror,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Quiet => "quiet",
            Self::Kill => "kill",
            Self::Restart => "restart",
            Self::Upgrade => "upgrade",
            Self::Switch => "switch",
            Self::Resize => "resize",
            Self::Limit => "limit",
            Self::Unlimit => "unlimit",
            Self::Pause => "pause",
            Self::VmStop => "vm-stop",
            Self::Memory => "memory",
            Self::Stall => "stall",
            Self::Fail => "fail",
            Self::Cache => "cache",
            Self::Snapshot => "snapshot",
            Self::Commit => "commit",
            Self::Backup => "backup",
            Self::Mirror => "mirror",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The parts that some kinds of events need.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    /// The kernel plane.
    pub(super) kernel: bool,
    /// Images in files, which grow and have copies and overlays.
    pub(super) images: bool,
}

impl Kind {
    fn is_possible(self, parts: Parts) -> bool {
        match self {
            Self::Switch => parts.kernel,
            Self::Resize | Self::Snapshot | Self::Commit | Self::Backup | Self::Mirror => {
                parts.images
            }
            // A write-through write of a device may fail in its sync, which is final.
            Self::Cache => parts.images,
            _ => true,
        }
    }
}

/// The events of a seed. Each round has every possible kind once, in random order, so that a run of
/// at least a round has every kind. Memory is plugged in at most [`MODULES_MAX`] times.
pub(super) fn order(seed: u64, length: Length, parts: Parts) -> impl Iterator<Item = Kind> {
    let count = match length {
        Length::Events(count) => count,
        Length::Time(_) => usize::MAX,
    };
    let mut rng = Rng::new(seed);
    let rounds = (0..).flat_map(move |round| {
        let is_possible = move |kind: &Kind| {
            kind.is_possible(parts) && (*kind != Kind::Memory || round < MODULES_MAX)
        };
        let mut kinds: Vec<Kind> = Kind::ALL.into_iter().filter(is_possible).collect();
        for last in (1..kinds.len()).rev() {
            kinds.swap(last, rng.below(last as u64 + 1) as usize);
        }
        kinds
    });
    rounds.take(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Parts = Parts { kernel: true, images: true };

    fn events(seed: u64, count: usize, parts: Parts) -> Vec<Kind> {
        order(seed, Length::Events(count), parts).collect()
    }

    #[test]
    fn a_seed_repeats_its_order_and_another_gives_another() {
        assert_eq!(events(7, 60, ALL), events(7, 60, ALL));
        assert_ne!(events(7, 60, ALL), events(8, 60, ALL));
        let round = Kind::ALL.len();
        assert_ne!(
            events(7, round, ALL),
            events(7, 2 * round, ALL)[round..],
            "each round has its own order"
        );
    }

    #[test]
    fn each_kind_comes_in_the_first_round_and_memory_not_too_often() {
        let all = events(3, 200, ALL);
        assert_eq!(all.len(), 200);
        let mut first = all[..Kind::ALL.len()].to_vec();
        first.sort();
        assert_eq!(first, Kind::ALL);
        assert_eq!(all.iter().filter(|kind| **kind == Kind::Memory).count(), MODULES_MAX);
    }

    #[test]
    fn nothing_is_switched_without_a_second_plane() {
        assert!(!events(3, 100, Parts { kernel: false, ..ALL }).contains(&Kind::Switch));
        assert!(events(3, 100, ALL).contains(&Kind::Switch));
    }

    #[test]
    fn a_device_is_not_copied_does_not_grow_and_keeps_its_cache_mode() {
        let events = events(3, 100, Parts { images: false, ..ALL });
        let of_images =
            [Kind::Resize, Kind::Snapshot, Kind::Commit, Kind::Backup, Kind::Mirror, Kind::Cache];
        for kind in of_images {
            assert!(!events.contains(&kind), "{kind}");
        }
        assert!(events.contains(&Kind::Stall) && events.contains(&Kind::Fail));
    }
}
