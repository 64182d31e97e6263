// SPDX-License-Identifier: Apache-2.0
//! The limits of a disk or of a group, and changes of them.

use crate::error::KernelError;
use crate::limits::Share;
use std::num::NonZeroU64;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Limits of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests per second, of any kind.
    pub iops: Option<NonZeroU64>,
    /// Bytes per second that requests read, write or zero; 16 discarded bytes count as one.
    pub bytes: Option<NonZeroU64>,
    /// Unused time that later requests may catch up on.
    pub burst: Duration,
}

impl Limits {
    /// The burst, unless the user wants another one. QEMU has the same.
    pub const BURST_DEFAULT: Duration = Duration::from_millis(100);
    /// Minimum burst: more than the longest sleep that a queue makes up for (8 ms).
    pub const BURST_MIN: Duration = Duration::from_millis(10);
    /// Maximum burst.
    pub const BURST_MAX: Duration = Duration::from_secs(3600);

    /// No limit.
    pub const NONE: Limits = Limits { iops: None, bytes: None, burst: Limits::BURST_DEFAULT };

    /// Returns whether there is a limit.
    pub fn is_set(&self) -> bool {
        self.iops.is_some() || self.bytes.is_some()
    }
}

/// A change of [`Limits`]; `None` keeps a value, and `Some(None)` removes a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitChange {
    /// Requests per second.
    pub iops: Option<Option<NonZeroU64>>,
    /// Bytes per second.
    pub bytes: Option<Option<NonZeroU64>>,
    /// Unused time that later requests may catch up on.
    pub burst: Option<Duration>,
}

impl LimitChange {
    /// The limits after the change of `old`.
    pub fn of(self, old: Limits) -> Limits {
        Limits {
            iops: self.iops.unwrap_or(old.iops),
            bytes: self.bytes.unwrap_or(old.bytes),
            burst: self.burst.unwrap_or(old.burst),
        }
    }

    /// The change of a group that a disk with these limits joins: without a limit it adopts those of the group.
    pub fn of_member(limits: Limits) -> LimitChange {
        if limits.is_set() { limits.into() } else { LimitChange::default() }
    }

    /// Returns whether it keeps everything.
    pub fn is_empty(self) -> bool {
        self == LimitChange::default()
    }

    /// Returns whether it removes each limit, whatever the old ones are: the disk then leaves its group.
    pub fn removes_all(self) -> bool {
        (self.iops, self.bytes) == (Some(None), Some(None))
    }
}

impl From<Limits> for LimitChange {
    /// The change from any limits to these.
    fn from(limits: Limits) -> Self {
        let Limits { iops, bytes, burst } = limits;
        LimitChange { iops: Some(iops), bytes: Some(bytes), burst: Some(burst) }
    }
}

/// Limits of a group in the options of a disk that starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupStart {
    /// A command gives them: they change the group.
    Command(LimitChange),
    /// A file gives them. The last file by the names of the disks has the limits of the group, in whichever order the
    /// disks start, until a command changes them.
    File {
        /// Name of the disk.
        disk: String,
        /// Its limits.
        limits: Limits,
    },
}

/// The source of the limits of a group.
#[derive(Debug, Default)]
pub(crate) enum Source {
    /// It has none yet.
    #[default]
    Nobody,
    /// The file of the disk of this name, which may have left the group.
    File(String, Weak<Share>),
    /// A command, or an earlier program.
    Command,
}

impl Source {
    /// Returns whether the limits of the file of `disk` take the place of the present ones.
    pub(crate) fn gives_way_to(&self, disk: &str) -> bool {
        match self {
            Source::Nobody => true,
            Source::File(present, share) => disk >= present.as_str() || share.strong_count() == 0,
            Source::Command => false,
        }
    }
}

/// The reason for which limits stay as they are.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    /// A group would have members and no limit.
    #[error(
        "the limit group {0} would have no limit; give --iops or --bandwidth, or take the disk out of the group \
         (--none)"
    )]
    Last(Arc<str>),
    /// The kernel plane refuses them.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limiter;
    use std::sync::Barrier;

    fn limits(iops: u64, bytes: u64) -> Limits {
        Limits { iops: NonZeroU64::new(iops), bytes: NonZeroU64::new(bytes), ..Limits::NONE }
    }

    fn iops(iops: u64) -> LimitChange {
        LimitChange { iops: Some(NonZeroU64::new(iops)), ..LimitChange::default() }
    }

    fn bytes(bytes: u64) -> LimitChange {
        LimitChange { bytes: Some(NonZeroU64::new(bytes)), ..LimitChange::default() }
    }

    #[test]
    fn a_part_that_is_not_given_stays() {
        assert_eq!(iops(7).of(limits(1, 2)), limits(7, 2));
        assert_eq!(bytes(0).of(limits(1, 2)), limits(1, 0));
        let burst = LimitChange { burst: Some(Limits::BURST_MAX), ..LimitChange::default() };
        assert_eq!(burst.of(limits(1, 2)), Limits { burst: Limits::BURST_MAX, ..limits(1, 2) });
        assert_eq!(LimitChange::from(limits(0, 5)).of(limits(1, 2)), limits(0, 5));
        assert!(LimitChange::from(Limits::NONE).removes_all() && !iops(0).removes_all());
    }

    #[test]
    fn a_group_keeps_its_last_limit_and_a_disk_without_a_group_loses_it() {
        let group = Limiter::new(Some("g"));
        assert!(group.change(iops(5)).unwrap());
        assert!(!group.change(iops(5)).unwrap());
        assert!(group.change(bytes(9)).unwrap());
        assert!(group.change(iops(0)).unwrap());
        let why = group.change(bytes(0)).unwrap_err().to_string();
        assert!(why.contains("the limit group g would have no limit"), "{why}");
        assert_eq!(group.limits(), limits(0, 9));
        let disk = Limiter::new(None);
        assert!(disk.change(iops(5)).unwrap() && disk.change(iops(0)).unwrap());
        assert_eq!(disk.limits(), Limits::NONE);
    }

    #[test]
    fn changes_of_different_parts_at_the_same_time_all_hold() {
        let group = Limiter::new(Some("g"));
        group.set(&limits(1, 1));
        let begin = Barrier::new(2);
        let change = |change: fn(u64) -> LimitChange| {
            begin.wait();
            for n in 2..=200_000 {
                assert!(group.change(change(n)).unwrap());
                // The other thread changes the other part only.
                let now = group.limits();
                assert_eq!(change(n).of(now), now);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| change(iops));
            scope.spawn(|| change(bytes));
        });
        assert_eq!(group.limits(), limits(200_000, 200_000));
    }
}
