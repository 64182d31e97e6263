// SPDX-License-Identifier: Apache-2.0
//! Parses the kernel's counters in `fdinfo` of the open device: a line for each queue of the form
//! `queueN: STATE name=count name=count ...`, its latencies, and lines for the whole device.

use crate::latency::{LATENCY_BUCKETS, Latencies, Operation};
use crate::plane::{Choices, QueueReport};
use crate::stats::QueueStats;

/// The lines of the module, without the lines that every open file has.
pub(super) fn of_fdinfo(text: &str) -> Vec<(String, String)> {
    const OF_EVERY_FILE: [&str; 4] = ["pos", "flags", "mnt_id", "ino"];
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    let pairs = pairs.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()));
    pairs.filter(|(name, _)| !OF_EVERY_FILE.contains(&name.as_str())).collect()
}

/// Words of a queue's line that are no counters.
const NO_COUNTERS: [&str; 4] = ["inflight", "kept", "batch", "coalescing"];

/// One queue in `lines`. Missing counters, which an older module does not have, are 0.
pub(super) fn of_queue(lines: &[(String, String)], index: u16) -> QueueReport {
    let Some(line) = find(lines, &format!("queue{index}")) else { return QueueReport::default() };
    let mut counts: Vec<(String, u64)> = counts_of(line).collect();
    let mut stats = QueueStats::of_counters(&counts);
    stats.latencies = latencies(lines, index);
    let own = |wanted: &str| counts.iter().find(|(name, _)| name == wanted).map_or(0, |it| it.1);
    let (inflight, kept) = (own("inflight"), own("kept"));
    stats.chains += kept; // those of the module lack the kept ones
    let choices = Choices { batch_size: own("batch"), coalescing: own("coalescing") > 0 };
    counts.retain(|(name, _)| !NO_COUNTERS.contains(&&**name) && !QueueStats::has(name));
    let faulted = line.split_whitespace().next() == Some("faulted");
    QueueReport { stats, inflight, choices, faulted, kept, more: counts }
}

fn find<'a>(lines: &'a [(String, String)], name: &str) -> Option<&'a str> {
    lines.iter().find(|(known, _)| known == name).map(|(_, line)| line.as_str())
}

/// The words `name=count` of a line.
fn counts_of(line: &str) -> impl Iterator<Item = (String, u64)> {
    let pairs = line.split_whitespace().filter_map(|word| word.split_once('='));
    pairs.filter_map(|(name, count)| Some((name.to_owned(), count.parse().ok()?)))
}

/// Lines `latencyN_OPERATION_us: sum=S BOUND=COUNT ...`.
fn latencies(lines: &[(String, String)], index: u16) -> Latencies {
    let mut latencies = Latencies::default();
    for operation in Operation::ALL {
        let line = find(lines, &format!("latency{index}_{}_us", operation.name()));
        let histogram = &mut latencies.0[operation as usize];
        for (name, count) in counts_of(line.unwrap_or_default()) {
            match name.parse::<u64>() {
                Ok(bound) if bound.is_power_of_two() => {
                    let bucket = (bound.ilog2() as usize).min(LATENCY_BUCKETS - 1);
                    histogram.buckets[bucket] += count;
                }
                _ if name == "sum" => histogram.sum_us = count,
                _ => {}
            }
        }
    }
    latencies
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_a_queue_are_taken_apart() {
        let text = "pos:\t0\nflags:\t02100002\nmnt_id:\t27\nino:\t5\nbackend:\tfile\n\
                    queue0:\trunning size=128 chains=1 kicks=9\n\
                    queue1:\tfaulted size=128 inflight=3 kept=2 chains=17 refused=2 kicks=3 calls=4 \
                    suppressed=5 polls=6 polls_won=1 poll_ns=70 failed_removed=1 batch=16 coalescing=1\n\
                    latency1_write_us:\tsum=99 8=15 16=2 8388608=1 \n";
        let lines = of_fdinfo(text);
        let names: Vec<&str> = lines.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["backend", "queue0", "queue1", "latency1_write_us"]);
        let report = of_queue(&lines, 1);
        let mut latencies = Latencies::default();
        let written = &mut latencies.0[Operation::Write as usize];
        written.sum_us = 99;
        (written.buckets[3], written.buckets[4], written.buckets[23]) = (15, 2, 1);
        let (suppressed, failures) = (5, [0, 0, 0, 1, 0]);
        let stats = QueueStats { chains: 19, refused: 2, kicks: 3, calls: 4, ..Default::default() };
        let stats =
            QueueStats { suppressed, failures, polls: 6, polls_won: 1, poll_ns: 70, ..stats };
        let expected = QueueReport {
            stats: QueueStats { latencies, ..stats },
            inflight: 3,
            choices: Choices { batch_size: 16, coalescing: true },
            faulted: true,
            kept: 2,
            more: vec![("size".to_owned(), 128)],
        };
        assert_eq!(report, expected);
        assert!(!of_queue(&lines, 0).faulted);
        assert_eq!(of_queue(&lines, 2), QueueReport::default());
    }

    #[test]
    fn a_real_files_fdinfo_has_nothing_of_ours() {
        use std::os::fd::AsRawFd;
        let file = tempfile::tempfile().unwrap();
        let path = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
        assert_eq!(of_fdinfo(&std::fs::read_to_string(path).unwrap()), []);
    }
}
