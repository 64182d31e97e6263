// SPDX-License-Identifier: Apache-2.0
//! Counters that both data planes have.

use crate::failure::FailureKind;
use crate::latency::{Latencies, Nanos};
use std::ops::AddAssign;

/// Number of counters with a name.
const COUNTERS: usize = 22;

/// Counters of a queue since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Taken chains, each one once: those to resubmit count at the start of the queue.
    pub chains: u64,
    /// Chains put into the used ring.
    pub completed: u64,
    /// Requests that were answered without I/O, because they are wrong or not supported.
    pub refused: u64,
    /// Requests whose I/O failed.
    pub failed: u64,
    /// Bytes that successful reads have read.
    pub read_bytes: u64,
    /// Bytes that successful writes have written.
    pub write_bytes: u64,
    /// Successful DISCARDs.
    pub discards: u64,
    /// Bytes of their ranges.
    pub discarded_bytes: u64,
    /// Received kicks.
    pub kicks: u64,
    /// Sent calls.
    pub calls: u64,
    /// Calls that came with a later one.
    pub coalesced: u64,
    /// Publications for which the driver wanted no call, and for which none was held.
    pub suppressed: u64,
    /// Waits for a limit of the disk.
    pub throttled: u64,
    /// Chains that were taken again because the in-flight region had them at the start of the queue.
    pub recovered: u64,
    /// Polls of the thread, before a sleep, while the queue was active.
    pub polls: u64,
    /// Such polls that found work.
    pub polls_won: u64,
    /// The time of the polls in nanoseconds; active queues of a thread share it.
    pub poll_ns: u64,
    /// I/Os that the storage has failed, by the number of their [`FailureKind`].
    pub failures: [u64; FailureKind::ALL.len()],
    /// Latencies of completed requests.
    pub latencies: Latencies,
}

impl QueueStats {
    /// Names of the counters, in the order of the fields. The kernel module has the same.
    const NAMES: [&str; COUNTERS] = [
        "chains",
        "completed",
        "refused",
        "failed",
        "read_bytes",
        "write_bytes",
        "discards",
        "discarded_bytes",
        "kicks",
        "calls",
        "coalesced",
        "suppressed",
        "throttled",
        "recovered",
        "polls",
        "polls_won",
        "poll_ns",
        "failed_io",
        "failed_no_space",
        "failed_read_only",
        "failed_removed",
        "failed_timeout",
    ];

    fn values(&mut self) -> [&mut u64; COUNTERS] {
        let [io, no_space, read_only, removed, timeout] = &mut self.failures;
        [
            &mut self.chains,
            &mut self.completed,
            &mut self.refused,
            &mut self.failed,
            &mut self.read_bytes,
            &mut self.write_bytes,
            &mut self.discards,
            &mut self.discarded_bytes,
            &mut self.kicks,
            &mut self.calls,
            &mut self.coalesced,
            &mut self.suppressed,
            &mut self.throttled,
            &mut self.recovered,
            &mut self.polls,
            &mut self.polls_won,
            &mut self.poll_ns,
            io,
            no_space,
            read_only,
            removed,
            timeout,
        ]
    }

    /// Counts a poll of `nanos` that has ended.
    #[inline]
    pub(crate) fn polled(&mut self, won: bool, nanos: Nanos) {
        self.polls += 1;
        self.polls_won += u64::from(won);
        self.poll_ns += nanos;
    }

    /// Returns whether a counter has this name.
    pub(crate) fn has(name: &str) -> bool {
        Self::NAMES.contains(&name)
    }

    /// Name and value of each counter, without the latencies.
    pub fn counters(mut self) -> Vec<(String, u64)> {
        let values = self.values().into_iter();
        Self::NAMES.iter().zip(values).map(|(name, value)| (name.to_string(), *value)).collect()
    }

    /// The counters among `counts`. A missing one is 0; latencies are no counters.
    pub fn of_counters(counts: &[(String, u64)]) -> Self {
        let mut stats = QueueStats::default();
        for (name, value) in Self::NAMES.iter().zip(stats.values()) {
            *value = counts.iter().find(|(known, _)| known == name).map_or(0, |pair| pair.1);
        }
        stats
    }
}

impl AddAssign for QueueStats {
    fn add_assign(&mut self, mut more: Self) {
        for (own, more) in self.values().into_iter().zip(more.values()) {
            *own += *more;
        }
        self.latencies += more.latencies;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_by_name_give_the_same_counters() {
        let stats = QueueStats {
            chains: 1,
            completed: 2,
            refused: 3,
            failed: 4,
            read_bytes: 5,
            write_bytes: 6,
            kicks: 7,
            calls: 8,
            coalesced: 9,
            throttled: 10,
            discards: 11,
            discarded_bytes: 12,
            suppressed: 13,
            recovered: 14,
            polls: 15,
            polls_won: 16,
            poll_ns: 17,
            failures: [18, 19, 20, 21, 22],
            latencies: Latencies::default(),
        };
        let mut counts = stats.counters();
        assert_eq!(counts[4], ("read_bytes".to_owned(), 5));
        counts.reverse();
        assert_eq!(QueueStats::of_counters(&counts), stats);
        assert_eq!(QueueStats::of_counters(&[]), QueueStats::default());
    }

    #[test]
    fn each_kind_of_failure_has_a_counter_of_its_name() {
        let failures = [1, 2, 3, 4, 5];
        let counts = QueueStats { failures, ..QueueStats::default() }.counters();
        for (kind, count) in FailureKind::ALL.iter().zip(failures) {
            let counter = (format!("failed_{}", kind.name()), count);
            assert!(counts.contains(&counter), "{counter:?} is not in {counts:?}");
        }
    }

    #[test]
    fn counters_add_up() {
        let mut sum = QueueStats { chains: 1, calls: 2, ..QueueStats::default() };
        sum += QueueStats { chains: 10, failed: 20, ..QueueStats::default() };
        assert_eq!(sum, QueueStats { chains: 11, failed: 20, calls: 2, ..QueueStats::default() });
    }
}
