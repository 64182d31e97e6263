// SPDX-License-Identifier: Apache-2.0
//! The state of a device that a later program takes over, in a form for JSON. A descriptor is its
//! position in a table that the state travels with.

use crate::DeviceOptions;
use backend::Info;
use data_plane::{
    ErrorPolicies, ErrorPolicy, ErrorRules, FailureKind, HealthTotals, Histogram, LATENCY_BUCKETS,
    Latencies, Limits, PlaneKind, QueueStats, Selected, Selection,
};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU64;
use std::time::Duration;

/// Position of a descriptor in the table.
pub(crate) type DescriptorIndex = usize;

/// The state of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceState {
    pub(crate) capacity_sectors: u64,
    pub(crate) logical_block_bytes: u32,
    pub(crate) read_only: bool,
    pub(crate) num_queues: u16,
    pub(crate) plane: PlaneState,
    pub(crate) paused: bool,
    pub(crate) writeback: bool,
    /// The cache mode that a command has set. Older programs do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache_set: Option<bool>,
    pub(crate) limits: LimitsState,
    /// The group of disks that share the limits.
    pub(crate) limit_group: Option<String>,
    /// The treatment of errors that a command has set. Older programs do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) errors: Option<ErrorsState>,
    /// The device holds the lock of its image; `None`: it follows none.
    pub(crate) image_lock_held: Option<bool>,
    /// The guest of an image without a lock is elsewhere. Older programs do not know it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) guest_is_away: bool,
    pub(crate) front_ends: u64,
    /// Counters of each queue.
    pub(crate) counters: Vec<CounterState>,
    /// Counters of the health; `None`: all are 0. Older programs do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) health: Option<HealthState>,
    pub(crate) connection: Option<ConnectionState>,
    /// The front-ends that wait for the end of the connection. Older programs do not know them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) waiting: Vec<DescriptorIndex>,
}

/// The treatment of storage that fails or hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ErrorsState {
    reads: PolicyState,
    others: PolicyState,
    io_timeout_ns: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PolicyState {
    Report,
    Stop,
    Enospc,
}

impl From<ErrorPolicy> for PolicyState {
    fn from(policy: ErrorPolicy) -> Self {
        match policy {
            ErrorPolicy::Report => PolicyState::Report,
            ErrorPolicy::Stop => PolicyState::Stop,
            ErrorPolicy::Enospc => PolicyState::Enospc,
        }
    }
}

impl From<PolicyState> for ErrorPolicy {
    fn from(policy: PolicyState) -> Self {
        match policy {
            PolicyState::Report => ErrorPolicy::Report,
            PolicyState::Stop => ErrorPolicy::Stop,
            PolicyState::Enospc => ErrorPolicy::Enospc,
        }
    }
}

impl From<ErrorRules> for ErrorsState {
    fn from(rules: ErrorRules) -> Self {
        ErrorsState {
            reads: rules.policies.reads.into(),
            others: rules.policies.others.into(),
            io_timeout_ns: rules.io_timeout.map(|limit| limit.as_nanos() as u64),
        }
    }
}

impl From<ErrorsState> for ErrorRules {
    fn from(state: ErrorsState) -> Self {
        let (reads, others) = (state.reads.into(), state.others.into());
        ErrorRules {
            policies: ErrorPolicies { reads, others },
            io_timeout: state.io_timeout_ns.map(Duration::from_nanos),
        }
    }
}

/// The state of the front-end's connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConnectionState {
    pub(crate) stream: DescriptorIndex,
    /// The front-end has sent no message.
    pub(crate) silent: bool,
    pub(crate) asked_features: bool,
    pub(crate) features: u64,
    pub(crate) protocol_features: u64,
    pub(crate) status: u8,
    pub(crate) queues: Vec<SlotState>,
    pub(crate) memory: Vec<RegionState>,
    pub(crate) log: Option<PartState>,
    pub(crate) inflight: Option<InflightState>,
    pub(crate) channel: Option<DescriptorIndex>,
    pub(crate) known_sectors: Option<u64>,
}

/// The set-up of a stopped queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SlotState {
    pub(crate) size: u16,
    pub(crate) addr: Option<AddrState>,
    pub(crate) base: u32,
    pub(crate) enabled: bool,
    pub(crate) kick: KickState,
    pub(crate) call: Option<DescriptorIndex>,
    pub(crate) err: Option<DescriptorIndex>,
}

/// The kick of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum KickState {
    /// Not received.
    None,
    /// Received without an eventfd.
    Polled,
    /// Received with an eventfd.
    Eventfd(DescriptorIndex),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AddrState {
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
    pub(crate) used_log: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RegionState {
    pub(crate) guest_addr: u64,
    pub(crate) user_addr: u64,
    pub(crate) file: PartState,
}

/// A part of a shared file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PartState {
    pub(crate) file: DescriptorIndex,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct InflightState {
    pub(crate) file: PartState,
    pub(crate) num_queues: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitsState {
    iops: Option<NonZeroU64>,
    bytes: Option<NonZeroU64>,
    burst_ms: u64,
}

impl From<Limits> for LimitsState {
    fn from(limits: Limits) -> Self {
        let burst_ms = limits.burst.as_millis() as u64; // an hour at most
        LimitsState { iops: limits.iops, bytes: limits.bytes, burst_ms }
    }
}

impl From<LimitsState> for Limits {
    fn from(state: LimitsState) -> Self {
        let burst = Duration::from_millis(state.burst_ms).clamp(Self::BURST_MIN, Self::BURST_MAX);
        Limits { iops: state.iops, bytes: state.bytes, burst }
    }
}

/// The counters of a queue, by name: another version may have further ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CounterState {
    counts: Vec<(String, u64)>,
    /// Buckets and sum of each operation.
    latencies: Vec<(Vec<u64>, u64)>,
}

impl From<QueueStats> for CounterState {
    fn from(stats: QueueStats) -> Self {
        let of = |histogram: &Histogram| (histogram.buckets.to_vec(), histogram.sum_us);
        let latencies = stats.latencies.0.iter().map(of).collect();
        CounterState { counts: stats.counters(), latencies }
    }
}

impl From<&CounterState> for QueueStats {
    fn from(state: &CounterState) -> Self {
        let mut latencies = Latencies::default();
        for (histogram, (buckets, sum_us)) in latencies.0.iter_mut().zip(&state.latencies) {
            histogram.sum_us = *sum_us;
            for (at, count) in buckets.iter().enumerate() {
                // A version with more buckets has finer ones at the end.
                histogram.buckets[at.min(LATENCY_BUCKETS - 1)] += count;
            }
        }
        QueueStats { latencies, ..QueueStats::of_counters(&state.counts) }
    }
}

/// Counters of the health of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HealthState {
    halts: u64,
    stalls: u64,
    /// By the name of the kind: another version may have further ones.
    failures: Vec<(String, u64)>,
}

impl HealthState {
    /// The state of these counters; `None`: all are 0.
    pub(crate) fn of(totals: HealthTotals) -> Option<Self> {
        let HealthTotals { halts, stalls, failures } = totals;
        let names = FailureKind::ALL.iter().map(|kind| kind.name().to_owned());
        let failures = names.zip(failures).filter(|(_, count)| *count > 0).collect();
        (totals != HealthTotals::default()).then_some(HealthState { halts, stalls, failures })
    }
}

impl From<&HealthState> for HealthTotals {
    fn from(state: &HealthState) -> Self {
        let count = |kind: FailureKind| {
            let known = state.failures.iter().filter(|(name, _)| name == kind.name());
            known.map(|(_, count)| count).sum()
        };
        let failures = FailureKind::ALL.map(count);
        HealthTotals { halts: state.halts, stalls: state.stalls, failures }
    }
}

/// The selected data planes, each with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlaneState {
    current: (PlaneName, String),
    preferred: (PlaneName, String),
    pub(crate) packed: bool,
    /// [`Selected::left_kernel`]. Older programs do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    left_kernel: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PlaneName {
    Kernel,
    Uring,
}

impl From<Selected> for PlaneState {
    fn from(selected: Selected) -> Self {
        let named = |Selection { plane, reason }: Selection| match plane {
            PlaneKind::Kernel => (PlaneName::Kernel, reason),
            PlaneKind::Uring => (PlaneName::Uring, reason),
        };
        PlaneState {
            current: named(selected.current),
            preferred: named(selected.preferred),
            packed: selected.packed,
            left_kernel: selected.left_kernel,
        }
    }
}

impl From<PlaneState> for Selected {
    fn from(state: PlaneState) -> Self {
        let selection = |(name, reason)| match name {
            PlaneName::Kernel => Selection { plane: PlaneKind::Kernel, reason },
            PlaneName::Uring => Selection { plane: PlaneKind::Uring, reason },
        };
        Selected {
            current: selection(state.current),
            preferred: selection(state.preferred),
            packed: state.packed,
            left_kernel: state.left_kernel,
        }
    }
}

/// Reasons not to take over a device.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The options have another number of queues.
    #[error("the device has {has} queues, and --num-queues says {wanted}; restart to change it")]
    Queues {
        /// Queues of the running device.
        has: u16,
        /// Queues by the options.
        wanted: u16,
    },
    /// A queue is larger than the options allow.
    #[error("a queue has {has} descriptors, and --queue-size says {wanted}; restart to change it")]
    QueueSize {
        /// Descriptors of the queue.
        has: u16,
        /// Descriptors by the options.
        wanted: u16,
    },
    /// The options have another logical block size or access.
    #[error("the options change {0}, which the guest has read; restart to change it")]
    Disk(&'static str),
    /// The storage has become smaller.
    #[error("the disk has {has} sectors, and its storage has {present}; enlarge the storage")]
    Capacity {
        /// Capacity that the guest has.
        has: u64,
        /// Capacity of the storage.
        present: u64,
    },
    /// The guest uses a feature that this program does not offer.
    #[error("the guest uses features {0:#x} that this program or these options lack")]
    Features(u64),
    /// The state names a descriptor that is not in the table, or names it twice.
    #[error("descriptor {0} of the state is missing")]
    Descriptor(usize),
    /// The state cannot be restored.
    #[error(transparent)]
    Restore(#[from] std::io::Error),
    /// The kernel refuses the limits.
    #[error(transparent)]
    Kernel(#[from] data_plane::KernelError),
    /// The limits cannot be taken over.
    #[error(transparent)]
    Limits(#[from] data_plane::LimitError),
}

impl DeviceState {
    /// Returns whether a front-end was connected.
    pub fn has_front_end(&self) -> bool {
        self.connection.is_some()
    }

    /// Checks that a device with this disk and these options can take over the state.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, info: &Info, options: &DeviceOptions) -> Result<(), StateError> {
        let (has, wanted) = (self.num_queues, options.num_queues);
        if has != wanted {
            return Err(StateError::Queues { has, wanted });
        }
        let (has, present) = (self.capacity_sectors, info.capacity_sectors);
        if present < has {
            return Err(StateError::Capacity { has, present });
        }
        if self.logical_block_bytes != info.logical_block_bytes {
            return Err(StateError::Disk("the logical block size"));
        }
        if self.read_only != info.read_only {
            return Err(StateError::Disk("--read-only"));
        }
        let Some(connection) = &self.connection else { return Ok(()) };
        let (largest, wanted) =
            (connection.queues.iter().map(|slot| slot.size).max(), options.queue_size_max);
        if let Some(has) = largest.filter(|&size| size > wanted) {
            return Err(StateError::QueueSize { has, wanted });
        }
        let missing = connection.features & !crate::handover::served_features(info, options)
            | connection.protocol_features & !crate::handler::protocol_features().bits();
        match missing {
            0 => Ok(()),
            missing => Err(StateError::Features(missing)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_the_health_pass_on_by_name_and_no_counter_is_no_state() {
        let totals = HealthTotals { halts: 1, stalls: 2, failures: [3, 0, 4, 0, 5] };
        let state = HealthState::of(totals).expect("some count");
        assert_eq!(HealthTotals::from(&state), totals);
        assert_eq!(HealthState::of(HealthTotals::default()), None);
        let mut newer = state;
        newer.failures.insert(0, ("of_another_version".to_owned(), 9));
        assert_eq!(HealthTotals::from(&newer), totals);
    }
}
