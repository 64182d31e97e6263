// SPDX-License-Identifier: Apache-2.0
//! Measured loads: fio's command lines, and its results.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use bench::report::Sample;

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
}

impl Load {
    /// Direct I/O through io_uring: `rw` as in fio, `bytes` per request, `depth` in flight.
    pub(super) fn direct(rw: &str, bytes: u32, depth: u32, length: Length) -> Self {
        let words =
            format!("--ioengine=io_uring --direct=1 --rw={rw} --bs={bytes} --iodepth={depth}");
        Self { name: format!("{rw}, depth {depth}"), words, length }
    }

    /// Sequential I/O of 4 KiB through the page cache; writes end with an fsync.
    pub(super) fn buffered(rw: &str, kib: u64) -> Self {
        let words =
            format!("--ioengine=psync --direct=0 --invalidate=1 --rw={rw} --bs=4096 --end_fsync=1");
        Self { name: format!("{rw}, buffered"), words, length: Length::Kib(kib) }
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

    /// fio's arguments; with `hipri`, fio polls for completions.
    pub(super) fn arguments(&self, path: &str, hipri: bool) -> Vec<String> {
        let mut words = format!(
            "--name=load --filename={path} --allow_file_create=0 --thread=1 --group_reporting=1 \
             --norandommap --output-format=json {}",
            self.words
        );
        words += &match self.length {
            Length::Seconds(seconds) => {
                let ms = (seconds * 1e3) as u64;
                format!(" --time_based --runtime={ms}ms --ramp_time={RAMP_MS}ms --randrepeat=0")
            }
            Length::Requests(count) => format!(" --number_ios={count}"),
            Length::Kib(kib) => format!(" --size={kib}k"),
        };
        if hipri {
            words += " --hipri=1";
        }
        words.split_whitespace().map(str::to_owned).collect()
    }

    /// Runs the load once.
    pub(super) fn measure(&self, path: &str, hipri: bool) -> Result<Sample> {
        let expected = if let Length::Seconds(seconds) = self.length { seconds } else { 0.0 };
        let output = Command::new("timeout")
            .args(["--kill-after=5", &format!("{}", expected + GRACE_S), "fio"])
            .args(self.arguments(path, hipri))
            .stdin(Stdio::null())
            .output()
            .context("cannot run fio")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let why = said.lines().next().unwrap_or("no reason given");
            bail!("{}: fio: {}: {why}", self.name, output.status);
        }
        bench::fio::parse(&String::from_utf8_lossy(&output.stdout)).context(self.name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_says_in_its_name_what_differs() {
        let load = Load::direct("read", 4096, 32, Length::Seconds(0.5)).in_batches(16).jobs(2);
        assert_eq!(load.name, "read, depth 32, batches of 16, 2 jobs");
        let words = load.arguments("/dev/vda", true);
        for word in ["--iodepth_batch_submit=16", "--numjobs=2", "--runtime=500ms", "--hipri=1"] {
            assert!(words.iter().any(|known| known == word), "{word}");
        }
    }

    #[test]
    fn a_buffered_load_waits_for_the_disk_and_is_not_bounded_by_time() {
        let words = Load::buffered("write", 64).arguments("/dev/vda", false).join(" ");
        assert!(words.contains("--end_fsync=1") && words.contains("--size=64k"), "{words}");
        assert!(!words.contains("--time_based") && !words.contains("--hipri"), "{words}");
    }
}
