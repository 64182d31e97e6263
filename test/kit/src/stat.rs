// SPDX-License-Identifier: Apache-2.0
//! The kernel's counters of a block device: `stat` in its directory of sysfs
//! (Documentation/block/stat.rst).

use std::path::Path;

use anyhow::{Context, Result, ensure};

/// Numbers up to the last one that is looked at.
const FIELDS: usize = 16;

/// Counters since the device exists, except those of requests in flight. Sectors have 512 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Reads that ended.
    pub reads: u64,
    /// Reads that were merged into others.
    pub read_merges: u64,
    /// Sectors that were read.
    pub read_sectors: u64,
    /// Writes that ended.
    pub writes: u64,
    /// Writes that were merged into others.
    pub write_merges: u64,
    /// Sectors that were written.
    pub written_sectors: u64,
    /// Requests that have not ended yet.
    pub in_flight: u64,
    /// Milliseconds with something in flight.
    pub busy_ms: u64,
    /// Discards that ended.
    pub discards: u64,
    /// Sectors that were discarded.
    pub discarded_sectors: u64,
    /// Flushes that ended.
    pub flushes: u64,
}

impl Stat {
    /// Of the device with this directory below /sys/block.
    pub fn of(sysfs: &Path) -> Result<Self> {
        let path = sysfs.join("stat");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    /// From the text of the file.
    ///
    /// # Errors
    /// If it is not a list of numbers, or has too few.
    pub fn parse(text: &str) -> Result<Self> {
        let fields: Result<Vec<u64>, _> = text.split_whitespace().map(str::parse).collect();
        let fields = fields.with_context(|| text.to_owned())?;
        ensure!(fields.len() >= FIELDS, "'{}' has too few numbers", text.trim());
        Ok(Self {
            reads: fields[0],
            read_merges: fields[1],
            read_sectors: fields[2],
            writes: fields[4],
            write_merges: fields[5],
            written_sectors: fields[6],
            in_flight: fields[8],
            busy_ms: fields[9],
            discards: fields[11],
            discarded_sectors: fields[13],
            flushes: fields[15],
        })
    }

    /// Reads and writes as their submitters counted them: before any were merged.
    pub fn submitted(&self) -> u64 {
        self.reads + self.read_merges + self.writes + self.write_merges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_has_its_name() {
        let stat = Stat::parse(" 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17\n").unwrap();
        let expected = Stat {
            reads: 1,
            read_merges: 2,
            read_sectors: 3,
            writes: 5,
            write_merges: 6,
            written_sectors: 7,
            in_flight: 9,
            busy_ms: 10,
            discards: 12,
            discarded_sectors: 14,
            flushes: 16,
        };
        assert_eq!(stat, expected);
        assert_eq!(stat.submitted(), 14);
    }

    #[test]
    fn what_older_kernels_count_is_not_enough() {
        assert!(Stat::parse("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15").is_err());
        assert!(Stat::parse("1 2 3 - 5 6 7 8 9 10 11 12 13 14 15 16 17").is_err());
    }
}
