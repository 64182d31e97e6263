// SPDX-License-Identifier: Apache-2.0
//! The parameters of a load and its results.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use hdrhistogram::Histogram;
use kit::metric::{Figures, IOPS, P50, P99};

/// Wait of the client on an empty used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Arm calls and sleep on the call eventfd.
    Event,
    /// Poll the used ring, calls suppressed.
    Spin,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(if *self == Self::Event { "event" } else { "spin" })
    }
}

/// Reads, writes or both, in fio's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Op {
    /// Random reads.
    Randread,
    /// Random writes.
    Randwrite,
    /// Random: 70 % reads, 30 % writes.
    Randrw,
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Sequential writes, each followed by a FLUSH of its own, as one request: a log.
    Writeflush,
    /// Random, as `randrw`, and of sizes from 512 bytes to 64 KiB instead of `--block-size`: 10 %
    /// 512 bytes, 50 % 4 KiB, 25 % 16 KiB, 15 % 64 KiB, at multiples of 4 KiB.
    Mixed,
}

/// Percentage of reads among mixed requests.
pub const READS_PERCENT: u64 = 70;

/// Sizes of `Op::Mixed` in bytes, the greatest one last, each with its percentage.
pub const MIXED_SIZES: [(u32, u64); 4] = [(512, 10), (4096, 50), (16 << 10, 25), (64 << 10, 15)];
/// Alignment of these requests in bytes.
pub const MIXED_ALIGN: u32 = 4096;

/// The size of a request of `Op::Mixed` for a random number below 100.
pub fn mixed_bytes(percent: u64) -> u32 {
    let mut below = 0;
    let size = MIXED_SIZES.iter().find(|(_, share)| {
        below += share;
        percent < below
    });
    size.map_or(MIXED_ALIGN, |(bytes, _)| *bytes)
}

impl Op {
    /// True if there are writes.
    pub fn writes(self) -> bool {
        !matches!(self, Self::Randread | Self::Read)
    }

    /// The greatest size of its requests, if `wanted` is the chosen one.
    pub fn block_bytes(self, wanted: u32) -> u32 {
        let [.., (greatest, _)] = MIXED_SIZES;
        if self == Self::Mixed { greatest } else { wanted }
    }

    /// True if blocks follow each other.
    pub fn is_sequential(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::Writeflush)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Randread => "randread",
            Self::Randwrite => "randwrite",
            Self::Randrw => "randrw",
            Self::Read => "read",
            Self::Write => "write",
            Self::Writeflush => "writeflush",
            Self::Mixed => "mixed",
        })
    }
}

/// Layout of requests in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Chains {
    /// Indirect tables if negotiated, as Linux guests use them.
    Auto,
    /// Descriptors in the ring.
    Direct,
}

/// One point of measurement.
#[derive(Clone, Debug)]
pub struct Load {
    /// Reads or writes.
    pub op: Op,
    /// Bytes of each request; of the greatest one if they are mixed.
    pub block_bytes: u32,
    /// Requests in flight on each queue.
    pub depth: u16,
    /// Wait of the client.
    pub mode: Mode,
    /// Queues, each with a client thread.
    pub queues: u16,
    /// Descriptors of each queue.
    pub queue_size: u16,
    /// Packed rings.
    pub packed: bool,
    /// Direct or indirect chains.
    pub chains: Chains,
    /// CPUs of the client threads, taken in turn; none: not pinned.
    pub cpus: Vec<usize>,
}

impl Load {
    /// Random reads of 4 KiB on one queue by a driver that sleeps.
    pub fn random_reads(depth: u16) -> Self {
        Self {
            op: Op::Randread,
            block_bytes: 4096,
            depth,
            mode: Mode::Event,
            queues: 1,
            queue_size: 256,
            packed: false,
            chains: Chains::Auto,
            cpus: Vec::new(),
        }
    }
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Completed requests.
    pub ios: u64,
    /// From the first submission to the last completion.
    pub elapsed: Duration,
    /// Latency of each request.
    pub latency_ns: Histogram<u64>,
    /// Time that the client's threads were ready to run while another task had their CPU.
    pub waited: Duration,
    /// Time that the client's threads were on a CPU.
    pub busy: Duration,
}

impl Outcome {
    /// Requests a second.
    pub fn iops(&self) -> f64 {
        self.ios as f64 / self.elapsed.as_secs_f64()
    }

    /// A latency in microseconds.
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        self.latency_ns.value_at_quantile(quantile) as f64 / 1e3
    }

    /// Rate and latencies.
    pub fn figures(&self) -> Figures {
        let [p50, p99] = [0.5, 0.99].map(|quantile| self.quantile_us(quantile));
        vec![(IOPS, self.iops()), (P50, p50), (P99, p99)]
    }

    /// The share of each request in a time, in microseconds.
    pub fn us_per_io(&self, time: Duration) -> f64 {
        time.as_secs_f64() * 1e6 / self.ios as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixed_requests_have_each_size_as_often_as_told() {
        let of = |bytes| (0..100).filter(|percent| mixed_bytes(*percent) == bytes).count() as u64;
        for (bytes, percent) in MIXED_SIZES {
            assert_eq!(of(bytes), percent, "{bytes} bytes");
        }
        assert_eq!([Op::Mixed, Op::Read].map(|op| op.block_bytes(512)), [64 << 10, 512]);
    }

    #[test]
    fn the_word_in_tables_is_the_one_that_options_take() {
        for op in Op::value_variants() {
            assert_eq!(Op::from_str(&op.to_string(), false), Ok(*op));
        }
    }
}
