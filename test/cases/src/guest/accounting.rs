// SPDX-License-Identifier: Apache-2.0
//! Statistics in /sys/block, compared with the requests that were made.

use std::os::unix::fs::FileExt;

use anyhow::{Context as _, Result, ensure};
use kit::stat::Stat;
use kit::system::run;

use crate::case::cases;
use crate::guest::load::fio::{Engine, fio};
use crate::guest::load::memory::Aligned;
use crate::guest::load::open_direct;
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::Mode;
use crate::guest::system::wait_for;
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-accounting", Modes::of(Mode::ALL).at_every_change(&[Mode::Request, Mode::Bio]),
        "the disk's statistics count each sector that is read, written and discarded once, and each flush",
        sectors;
    "guest-merges", Modes::of(Mode::INTERRUPTS).at_every_change(&[Mode::Bio]),
        "neighbouring requests of one batch count as merged, and each once",
        merges;
    "guest-in-flight", Modes::of(Mode::ALL),
        "requests count as in flight while the device has them, and not afterwards",
        in_flight;
}

/// The disk's statistics with nothing in flight. The kernel counts a request after it has told its end.
fn settled(disk: &Disk) -> Result<Stat> {
    wait_for("no request in flight", || disk.stat().ok().filter(|stat| stat.in_flight == 0))
}

fn sectors(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(64))?;
    let path = disk.path()?;
    let file = open_direct(&path)?;
    let mut buffer = Aligned::new(1 << 20);
    let before = settled(&disk)?;
    for index in 0..40_u64 {
        file.write_all_at(&buffer.bytes()[..4096], index << 16)?;
        file.read_exact_at(&mut buffer.bytes()[..65536], index << 16)?;
    }
    for index in 0..4_u64 {
        file.write_all_at(buffer.bytes(), index << 20)?;
        file.sync_data()?;
    }
    run("blkdiscard", &["-f", "-o", "8M", "-l", "2M", &path])?;
    let after = settled(&disk)?;
    let grown = |field: fn(&Stat) -> u64| field(&after) - field(&before);
    let read = grown(|stat| stat.read_sectors);
    let written = grown(|stat| stat.written_sectors);
    let discarded = grown(|stat| stat.discarded_sectors);
    let flushes = grown(|stat| stat.flushes);
    println!("{before:?}\n{after:?}");
    ensure!(read == 40 * 128, "{read} sectors read");
    ensure!(written == 40 * 8 + 4 * 2048, "{written} written");
    ensure!(discarded == 4096, "{discarded} discarded");
    ensure!(grown(|stat| stat.reads) >= 40 && grown(|stat| stat.writes) >= 44, "too few requests");
    ensure!(flushes >= 4, "{flushes} flushes");
    ensure!(grown(|stat| stat.busy_ms) > 0, "the disk was never busy");
    Ok(())
}

/// Requests per plug, so that neighbours merge into one.
const BATCH: u64 = 16;
const REQUESTS: u64 = 64 * BATCH;

fn merges(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(64))?;
    let path = disk.path()?;
    for (rw, sectors) in [("read", 0), ("write", REQUESTS * 8)] {
        let before = settled(&disk)?;
        let job = Engine::Uring.job("merges", &path).with(&format!(
            "--rw={rw} --bs=4k --number_ios={REQUESTS} --iodepth_batch_submit={BATCH} \
             --iodepth_batch_complete_min={BATCH}"
        ));
        fio(&[job])?;
        let after = settled(&disk)?;
        println!("{rw}: {before:?}\n{after:?}");
        let submitted = after.submitted() - before.submitted();
        let merged = |stat: &Stat| stat.read_merges + stat.write_merges;
        let merged = merged(&after) - merged(&before);
        ensure!(submitted >= REQUESTS, "{rw}: {submitted} of {REQUESTS} requests are counted");
        ensure!(merged >= REQUESTS / 2, "{rw}: {merged} of {REQUESTS} requests were merged");
        let written = after.written_sectors - before.written_sectors;
        ensure!(written == sectors, "{rw}: {written} sectors written");
    }
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
        let count = disk.stat().ok()?.in_flight;
        (count == 4).then_some(count)
    });
    disk.signal("CONT")?;
    for reader in readers {
        reader.join().ok().context("a reader panicked")??;
    }
    seen?;
    settled(&disk)?;
    ensure!(disk.attribute("inflight")?.split_whitespace().all(|count| count == "0"));
    Ok(())
}
