// SPDX-License-Identifier: Apache-2.0
//! Counters of a daemon's disks at a moment, and the rates between two moments.

use crate::control::percentile_below_us;
use crate::ctl::job_text;
use data_plane::{Histogram, LATENCY_BUCKETS, Operation};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Instant;

/// The counters of all disks.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    /// By name.
    pub(super) disks: BTreeMap<String, DiskSample>,
}

/// A row of the daemon's list, with the counters of each queue.
#[derive(Clone, Debug, Default)]
pub(super) struct DiskSample {
    state: String,
    plane: String,
    connected: bool,
    jobs: Vec<String>,
    queues: Vec<Counters>,
}

/// Counters of a queue since the start of the disk.
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    completed: u64,
    failed: u64,
    read_bytes: u64,
    write_bytes: u64,
    kicks: u64,
    calls: u64,
    throttled: u64,
    suppressed: u64,
    polls: u64,
    polls_won: u64,
    poll_ns: u64,
    /// Requests that an in-flight region had, since the start of the disk.
    recovered: u64,
    latencies: Histogram,
    choices: Choices,
}

/// The present choices for a running queue; `None`: it does not run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Choices {
    pub(super) batch_size: Option<u64>,
    /// Calls are held.
    pub(super) coalescing: Option<bool>,
}

/// Rates of a queue or a disk, for each second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    pub(super) iops: f64,
    pub(super) read_bytes: f64,
    pub(super) write_bytes: f64,
    pub(super) failed: f64,
    pub(super) kicks: f64,
    pub(super) calls: f64,
    pub(super) throttled: f64,
    pub(super) suppressed: f64,
    pub(super) polls: f64,
    pub(super) poll_hits: f64,
    /// Share of a CPU that polls take.
    pub(super) polling: f64,
    /// Bounds below which half and 99 % of the latencies are; `None`: no request, or no bound.
    pub(super) p50_us: Option<u64>,
    pub(super) p99_us: Option<u64>,
    /// Requests that an in-flight region had: no rate, but their number.
    pub(super) recovered: u64,
    /// The choices for a queue; a disk has none.
    pub(super) choices: Choices,
}

/// A disk between two samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Disk {
    pub(super) name: String,
    pub(super) state: String,
    pub(super) plane: String,
    pub(super) connected: bool,
    /// The work in progress, one in each line.
    pub(super) jobs: Vec<String>,
    /// All queues together.
    pub(super) rates: Rates,
    pub(super) queues: Vec<Rates>,
}

impl DiskSample {
    /// A disk of the replies to `List` and `Stats`; `Null` if it has not answered.
    pub(super) fn of(summary: &Value, stats: &Value) -> DiskSample {
        let text = |name: &str| summary[name].as_str().unwrap_or("-").to_owned();
        let queues = stats["queues"].as_array();
        DiskSample {
            state: text("state"),
            plane: text("data_plane"),
            connected: summary["front_end_connected"] == true,
            jobs: summary["jobs"].as_array().into_iter().flatten().map(job_text).collect(),
            queues: queues.into_iter().flatten().map(Counters::of).collect(),
        }
    }
}

impl Counters {
    fn of(queue: &Value) -> Counters {
        let count = |name: &str| queue[name].as_u64().unwrap_or(0);
        let mut latencies = Histogram::default();
        for operation in Operation::ALL {
            let buckets = queue["latency"][operation.name()]["buckets"].as_array();
            let counts = buckets.into_iter().flatten().map(|it| it.as_u64().unwrap_or(0));
            latencies.buckets.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
        }
        Counters {
            completed: count("completed"),
            failed: count("failed"),
            read_bytes: count("read_bytes"),
            write_bytes: count("write_bytes"),
            kicks: count("kicks"),
            calls: count("calls"),
            throttled: count("throttled"),
            suppressed: count("suppressed"),
            polls: count("polls"),
            polls_won: count("polls_won"),
            poll_ns: count("poll_ns"),
            recovered: count("recovered"),
            latencies,
            choices: Choices {
                batch_size: queue["batch_size"].as_u64(),
                coalescing: queue["coalescing"].as_u64().map(|on| on > 0),
            },
        }
    }

    /// The difference to an earlier moment. A disk that was added anew meanwhile counts from 0.
    fn since(&self, before: &Counters) -> Counters {
        let is_new = self.completed < before.completed;
        let before = if is_new { &Counters::default() } else { before };
        let mut latencies = Histogram::default();
        for bucket in 0..LATENCY_BUCKETS {
            latencies.buckets[bucket] =
                self.latencies.buckets[bucket].saturating_sub(before.latencies.buckets[bucket]);
        }
        Counters {
            completed: self.completed.saturating_sub(before.completed),
            failed: self.failed.saturating_sub(before.failed),
            read_bytes: self.read_bytes.saturating_sub(before.read_bytes),
            write_bytes: self.write_bytes.saturating_sub(before.write_bytes),
            kicks: self.kicks.saturating_sub(before.kicks),
            calls: self.calls.saturating_sub(before.calls),
            throttled: self.throttled.saturating_sub(before.throttled),
            suppressed: self.suppressed.saturating_sub(before.suppressed),
            polls: self.polls.saturating_sub(before.polls),
            polls_won: self.polls_won.saturating_sub(before.polls_won),
            poll_ns: self.poll_ns.saturating_sub(before.poll_ns),
            recovered: self.recovered,
            latencies,
            choices: self.choices,
        }
    }

    fn plus(&self, other: &Counters) -> Counters {
        let mut latencies = self.latencies;
        let more = other.latencies.buckets;
        latencies.buckets.iter_mut().zip(more).for_each(|(all, count)| *all += count);
        Counters {
            completed: self.completed + other.completed,
            failed: self.failed + other.failed,
            read_bytes: self.read_bytes + other.read_bytes,
            write_bytes: self.write_bytes + other.write_bytes,
            kicks: self.kicks + other.kicks,
            calls: self.calls + other.calls,
            throttled: self.throttled + other.throttled,
            suppressed: self.suppressed + other.suppressed,
            polls: self.polls + other.polls,
            polls_won: self.polls_won + other.polls_won,
            poll_ns: self.poll_ns + other.poll_ns,
            recovered: self.recovered + other.recovered,
            latencies,
            choices: Choices::default(),
        }
    }

    fn rates(&self, seconds: f64) -> Rates {
        let rate = |count: u64| count as f64 / seconds;
        Rates {
            iops: rate(self.completed),
            read_bytes: rate(self.read_bytes),
            write_bytes: rate(self.write_bytes),
            failed: rate(self.failed),
            kicks: rate(self.kicks),
            calls: rate(self.calls),
            throttled: rate(self.throttled),
            suppressed: rate(self.suppressed),
            polls: rate(self.polls),
            poll_hits: rate(self.polls_won),
            polling: rate(self.poll_ns) / 1e9,
            p50_us: percentile_below_us(&self.latencies, 50),
            p99_us: percentile_below_us(&self.latencies, 99),
            recovered: self.recovered,
            choices: self.choices,
        }
    }
}

impl Rates {
    /// Bytes read and written.
    pub(super) fn bytes(&self) -> f64 {
        self.read_bytes + self.write_bytes
    }

    fn value(&self) -> Value {
        json!({
            "iops": self.iops,
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "failed": self.failed,
            "kicks": self.kicks,
            "calls": self.calls,
            "throttled": self.throttled,
            "suppressed": self.suppressed,
            "polls": self.polls,
            "poll_hits": self.poll_hits,
            "polling": self.polling,
            "recovered": self.recovered,
            "p50_below_us": self.p50_us,
            "p99_below_us": self.p99_us,
        })
    }

    fn value_of_queue(&self) -> Value {
        let mut value = self.value();
        value["batch_size"] = self.choices.batch_size.into();
        value["coalescing"] = self.choices.coalescing.into();
        value
    }
}

impl Disk {
    /// The rates as JSON.
    pub(super) fn value(&self) -> Value {
        let mut value = self.rates.value();
        value["name"] = self.name.as_str().into();
        value["state"] = self.state.as_str().into();
        value["data_plane"] = self.plane.as_str().into();
        value["front_end_connected"] = self.connected.into();
        value["queues"] = self.queues.iter().map(Rates::value_of_queue).collect();
        value
    }
}

/// The rates of each disk between two samples. A disk without an earlier sample has none.
pub(super) fn rates(before: &Sample, now: &Sample) -> Vec<Disk> {
    let seconds = now.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3);
    let disk = |(name, disk): (&String, &DiskSample)| {
        let earlier = before.disks.get(name).map_or(&[][..], |earlier| &earlier.queues);
        let queues =
            disk.queues.iter().enumerate().map(|(index, queue)| match earlier.get(index) {
                Some(earlier) => queue.since(earlier),
                None => Counters::default(),
            });
        let queues: Vec<Counters> = queues.collect();
        let all = queues.iter().fold(Counters::default(), |all, queue| all.plus(queue));
        Disk {
            name: name.clone(),
            state: disk.state.clone(),
            plane: disk.plane.clone(),
            connected: disk.connected,
            jobs: disk.jobs.clone(),
            rates: all.rates(seconds),
            queues: queues.iter().map(|queue| queue.rates(seconds)).collect(),
        }
    };
    now.disks.iter().map(disk).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn sample(at: Instant, completed: &[u64]) -> Sample {
        let queue = |&completed: &u64| {
            let mut buckets = vec![0; LATENCY_BUCKETS];
            (buckets[4], buckets[10]) = (completed * 98 / 100, completed * 2 / 100);
            json!({
                "completed": completed, "read_bytes": completed * 4096,
                "latency": {"read": {"buckets": buckets}},
            })
        };
        let queues: Vec<Value> = completed.iter().map(queue).collect();
        let summary =
            json!({"state": "serving", "data_plane": "uring", "front_end_connected": true});
        let disk = DiskSample::of(&summary, &json!({"queues": queues}));
        Sample { at, disks: [("a".to_owned(), disk)].into() }
    }

    #[test]
    fn rates_are_differences_by_time_and_percentiles_those_of_the_interval() {
        let start = Instant::now();
        let before = sample(start, &[1000, 0]);
        let now = sample(start + Duration::from_secs(2), &[1200, 100]);
        let [disk] = &rates(&before, &now)[..] else { panic!("one disk") };
        assert_eq!((disk.rates.iops, disk.rates.read_bytes), (150.0, 150.0 * 4096.0));
        assert_eq!((disk.rates.p50_us, disk.rates.p99_us), (Some(16), Some(1024)));
        assert_eq!(disk.queues.iter().map(|it| it.iops).collect::<Vec<_>>(), [100.0, 50.0]);
        let idle = rates(&now, &sample(start + Duration::from_secs(3), &[1200, 100]));
        assert_eq!((idle[0].rates.iops, idle[0].rates.p50_us), (0.0, None));
    }

    #[test]
    fn polls_have_a_rate_a_share_of_a_cpu_and_the_choices_are_those_of_now() {
        let start = Instant::now();
        let sample = |at, polls: u64, batch: u64| {
            let queue = json!({
                "polls": polls, "polls_won": polls / 2, "poll_ns": polls * 10_000_000,
                "suppressed": 3 * polls, "recovered": 5, "batch_size": batch, "coalescing": batch / 16,
            });
            let disk = DiskSample::of(&Value::Null, &json!({"queues": [queue]}));
            Sample { at, disks: [("a".to_owned(), disk)].into() }
        };
        let before = sample(start, 100, 16);
        let now = sample(start + Duration::from_secs(2), 200, 4);
        let [disk] = &rates(&before, &now)[..] else { panic!("one disk") };
        let queue = &disk.queues[0];
        assert_eq!((queue.polls, queue.poll_hits, queue.polling), (50.0, 25.0, 0.5));
        assert_eq!((queue.suppressed, queue.recovered), (150.0, 5));
        let choices = Choices { batch_size: Some(4), coalescing: Some(false) };
        assert_eq!(queue.choices, choices);
        let value = disk.value();
        assert_eq!((&value["polling"], &value["batch_size"]), (&json!(0.5), &Value::Null));
        assert_eq!(value["queues"][0]["batch_size"], 4);
    }

    #[test]
    fn a_disk_that_was_added_anew_counts_from_zero_and_a_new_one_not_yet() {
        let start = Instant::now();
        let later = start + Duration::from_secs(1);
        let anew = rates(&sample(start, &[1000]), &sample(later, &[10]));
        assert_eq!(anew[0].rates.iops, 10.0);
        let nothing = Sample { at: start, disks: BTreeMap::new() };
        assert_eq!(rates(&nothing, &sample(later, &[10]))[0].rates.iops, 0.0);
    }

    #[test]
    fn a_silent_disk_has_its_state_and_no_queues() {
        let disk = DiskSample::of(&json!({"state": "silent"}), &Value::Null);
        assert_eq!(
            (disk.state.as_str(), disk.plane.as_str(), disk.queues.len()),
            ("silent", "-", 0)
        );
    }
}
