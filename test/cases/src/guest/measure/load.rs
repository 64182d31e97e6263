// SPDX-License-Identifier: Apache-2.0
//! Measured loads.

use std::time::Duration;

use anyhow::{Context, Result};
use kit::fio::{Job, Outcome};

use super::generator::{Generator, Operation};

/// Seconds by which a load may exceed its expected time before it counts as hung.
const GRACE_S: f64 = 300.0;

/// Milliseconds before the measurement in which caches, governors and token buckets settle.
const RAMP_MS: u32 = 300;

/// Length of a load.
#[derive(Clone, Copy, Debug)]
pub(super) enum Length {
    /// Length in seconds.
    Seconds(f64),
    /// Number of requests.
    Requests(u64),
    /// Size in KiB of the part of the disk that is transferred.
    Kib(u64),
}

/// A load for one disk.
#[derive(Clone, Debug)]
pub(super) struct Load {
    /// Name in tables.
    pub(super) name: String,
    /// fio's arguments without the disk and the length.
    words: String,
    length: Length,
    /// The load of this program's own generator, instead of fio.
    fixed: Option<Generator>,
}

impl Load {
    /// Direct I/O through io_uring: `rw` as in fio, `bytes` per request, `depth` in flight.
    pub(super) fn direct(rw: &str, bytes: u32, depth: u32, length: Length) -> Self {
        let words =
            format!("--ioengine=io_uring --direct=1 --rw={rw} --bs={bytes} --iodepth={depth}");
        Self { name: format!("{rw}, depth {depth}"), words, length, fixed: None }
    }

    /// Sequential I/O of 4 KiB through the page cache; writes end with an fsync.
    pub(super) fn buffered(rw: &str, kib: u64) -> Self {
        let words =
            format!("--ioengine=psync --direct=0 --invalidate=1 --rw={rw} --bs=4096 --end_fsync=1");
        Self { name: format!("{rw}, buffered"), words, length: Length::Kib(kib), fixed: None }
    }

    /// Random requests of 4 KiB through io_uring with a registered file and buffers, `batch` in each
    /// system call, without fio.
    pub(super) fn fixed(operation: Operation, depth: u32, batch: u32, requests: u64) -> Self {
        let rw = if operation == Operation::Write { "randwrite" } else { "randread" };
        let batches = if batch > 1 { format!(", batches of {batch}") } else { String::new() };
        Self {
            name: format!("fixed {rw}, depth {depth}{batches}"),
            words: String::new(),
            length: Length::Requests(requests),
            fixed: Some(Generator { operation, depth, batch, is_polled: false }),
        }
    }

    /// The generator of a load without fio.
    pub(super) fn generator(&self) -> Option<Generator> {
        self.fixed
    }

    /// Submits and reaps requests `count` at a time, so that a plug holds the same number.
    pub(super) fn in_batches(mut self, count: u32) -> Self {
        self.name += &format!(", batches of {count}");
        self.words +=
            &format!(" --iodepth_batch_submit={count} --iodepth_batch_complete_min={count}");
        self
    }

    /// Sets the number of processes.
    pub(super) fn jobs(mut self, count: u32) -> Self {
        self.name += &format!(", {count} jobs");
        self.words += &format!(" --numjobs={count}");
        self
    }

    /// fio's job; with `hipri`, it polls for completions.
    fn job(&self, path: &str, hipri: bool) -> Job {
        let job = Job::new("load", path)
            .with("--allow_file_create=0 --thread=1 --group_reporting=1 --norandommap")
            .with(&self.words)
            .with(if hipri { "--hipri=1" } else { "" });
        match self.length {
            Length::Seconds(seconds) => job.timed(seconds, RAMP_MS),
            Length::Requests(count) => job.with(&format!("--number_ios={count}")),
            Length::Kib(kib) => job.with(&format!("--size={kib}k")),
        }
    }

    /// Runs the load once.
    pub(super) fn measure(&self, path: &str, hipri: bool) -> Result<Outcome> {
        if let (Some(generator), Length::Requests(count)) = (self.fixed, self.length) {
            let generator = Generator { is_polled: hipri, ..generator };
            let run = generator.run(path, count).with_context(|| self.name.clone())?;
            let iops = run.requests as f64 / run.elapsed.as_secs_f64();
            // It notes no time for each request.
            return Ok(Outcome { iops, busy_percent: 0.0, p50_us: 0.0, p99_us: 0.0 });
        }
        let expected = if let Length::Seconds(seconds) = self.length { seconds } else { 0.0 };
        let limit = Duration::from_secs_f64(expected + GRACE_S);
        self.job(path, hipri).measure(limit).with_context(|| self.name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_says_in_its_name_what_differs() {
        let load = Load::direct("read", 4096, 32, Length::Seconds(0.5)).in_batches(16).jobs(2);
        assert_eq!(load.name, "read, depth 32, batches of 16, 2 jobs");
        let job = load.job("/dev/vda", true);
        for word in ["--iodepth_batch_submit=16", "--numjobs=2", "--runtime=500ms", "--hipri=1"] {
            assert!(job.arguments().iter().any(|known| known == word), "{word}");
        }
    }

    #[test]
    fn a_buffered_load_waits_for_the_disk_and_is_not_bounded_by_time() {
        let words = Load::buffered("write", 64).job("/dev/vda", false).command_line();
        assert!(words.contains("--end_fsync=1") && words.contains("--size=64k"), "{words}");
        assert!(!words.contains("--time_based") && !words.contains("--hipri"), "{words}");
    }
}
