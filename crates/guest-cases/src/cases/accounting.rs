// SPDX-License-Identifier: Apache-2.0
//! What /sys/block says was done.

use std::os::unix::fs::FileExt;

use anyhow::{Context as _, Result, ensure};
use lab_case::system::run;

use crate::case::{Case, Context};
use crate::load::memory::Aligned;
use crate::load::open_direct;
use crate::machine::backing::Backing;
use crate::machine::disk::{Disk, Plug};
use crate::mode::Mode;
use crate::system::wait_for;

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "guest-accounting",
        short: &[Mode::Request, Mode::Bio],
        modes: Mode::ALL,
        has_long: false,
        about: "the disk's statistics count each sector that is read, written and discarded once, and each flush",
        run: sectors,
    },
    Case {
        name: "guest-in-flight",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "requests count as in flight while the device has them, and not afterwards",
        run: in_flight,
    },
];

/// Fields of Documentation/block/stat.rst.
const READS: usize = 0;
const READ_SECTORS: usize = 2;
const WRITES: usize = 4;
const WRITTEN_SECTORS: usize = 6;
const IN_FLIGHT: usize = 8;
const BUSY_MS: usize = 9;
const DISCARDED_SECTORS: usize = 13;
const FLUSHES: usize = 15;

fn stat(disk: &Disk<'_>) -> Result<Vec<u64>> {
    let text = disk.attribute("stat")?;
    let fields: Result<Vec<u64>, _> = text.split_whitespace().map(str::parse).collect();
    let fields = fields.with_context(|| text.clone())?;
    ensure!(fields.len() > FLUSHES, "/sys/block has only {} numbers", fields.len());
    Ok(fields)
}

fn sectors(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(64))?;
    let path = disk.path()?;
    let file = open_direct(&path)?;
    let mut buffer = Aligned::new(1 << 20);
    let before = stat(&disk)?;
    for index in 0..40_u64 {
        file.write_all_at(&buffer.bytes()[..4096], index << 16)?;
        file.read_exact_at(&mut buffer.bytes()[..65536], index << 16)?;
    }
    for index in 0..4_u64 {
        file.write_all_at(buffer.bytes(), index << 20)?;
        file.sync_data()?;
    }
    run("blkdiscard", &["-f", "-o", "8M", "-l", "2M", &path])?;
    let after = stat(&disk)?;
    let grown = |field: usize| after[field] - before[field];
    println!("{before:?}\n{after:?}");
    ensure!(grown(READ_SECTORS) == 40 * 128, "{} sectors read", grown(READ_SECTORS));
    ensure!(grown(WRITTEN_SECTORS) == 40 * 8 + 4 * 2048, "{} written", grown(WRITTEN_SECTORS));
    ensure!(grown(DISCARDED_SECTORS) == 4096, "{} discarded", grown(DISCARDED_SECTORS));
    ensure!(grown(READS) >= 40 && grown(WRITES) >= 44, "too few requests");
    ensure!(grown(FLUSHES) >= 4, "{} flushes", grown(FLUSHES));
    ensure!(after[IN_FLIGHT] == 0, "{} in flight", after[IN_FLIGHT]);
    ensure!(grown(BUSY_MS) > 0, "the disk was never busy");
    Ok(())
}

fn in_flight(context: &Context) -> Result<()> {
    let args = vec!["--num-queues=4".to_owned()];
    let disk = Disk::plug(&context.machine, &Plug::of(Backing::Daemon { bytes: 64 << 20, args }))?;
    let path = disk.path()?;
    disk.signal("STOP")?;
    let mut readers = Vec::new();
    for index in 0..4_u64 {
        let file = open_direct(&path)?;
        readers.push(std::thread::spawn(move || {
            let mut buffer = Aligned::new(4096);
            file.read_exact_at(buffer.bytes(), index << 20)
        }));
    }
    let seen = wait_for("four requests in flight", || {
        let count = stat(&disk).ok()?[IN_FLIGHT];
        (count == 4).then_some(count)
    });
    disk.signal("CONT")?;
    for reader in readers {
        reader.join().ok().context("a reader panicked")??;
    }
    seen?;
    ensure!(stat(&disk)?[IN_FLIGHT] == 0, "some are still in flight");
    ensure!(disk.attribute("inflight")?.split_whitespace().all(|count| count == "0"));
    Ok(())
}
