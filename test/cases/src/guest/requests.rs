// SPDX-License-Identifier: Apache-2.0
//! Each kind of request, and its failures.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use anyhow::{Context as _, Result, bail, ensure};
use kit::disks::Lie;
use kit::outcome::expect_io_errors;
use kit::rng::Rng;
use kit::system::run;
use rustix::io::{Errno, ReadWriteFlags};

use crate::case::cases;
use crate::guest::load::fio::{Background, Engine};
use crate::guest::load::memory::Aligned;
use crate::guest::load::open_direct;
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::{Driver, Mode};
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-ranges", Modes::of(Mode::ALL).at_every_change(&[Mode::Request, Mode::Bio]).and_long(),
        "zeroed ranges read as zeroes, discarded and zeroed ones leave their neighbours alone, also when they are split",
        ranges;
    "guest-errors", Modes::of(Mode::ALL).at_every_change(&[Mode::Request, Mode::Bio]),
        "a read, a write and a flush that the device fails, as a whole or in part, fail for the program, and the next ones do not",
        errors;
    "guest-one-segment", Modes::of(Mode::OURS).at_every_change(&[Mode::Request, Mode::Bio]),
        "a device whose requests have one segment and whose blocks are pages gets aligned memory only, and one segment each",
        one_segment;
    "guest-read-only", Modes::of(Mode::ALL),
        "a read-only disk is one for the kernel, can be read, and takes no write",
        read_only;
    "guest-nowait", Modes::of(Mode::INTERRUPTS).at_every_change(&[Mode::Bio]),
        "requests that must not wait are told to come again while the ring is full, and are served afterwards",
        nowait;
    "guest-serial", Modes::of(Mode::ALL),
        "sysfs shows the serial number that the device has",
        serial;
}

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;

fn ranges(context: &Context) -> Result<()> {
    // These limits split most ranges into several requests.
    let plug = Plug::file(32).with("max-write-zeroes-sectors", 333);
    let disk = Disk::plug(&context.machine, &plug.with("max-discard-sectors", 517))?;
    let path = disk.path()?;
    let file = open_direct(&path)?;
    let mut rng = Rng::new(context.seed);
    let mut model = vec![0; 16 * MIB];
    let mut buffer = Aligned::new(model.len());
    for round in 0..context.effort.rounds.min(10) {
        rng.fill(&mut model);
        buffer.bytes().copy_from_slice(&model);
        file.write_all_at(buffer.bytes(), 0)?;
        let mut undefined = Vec::new();
        for _ in 0..12 {
            let start = rng.below((model.len() - MIB) as u64) as usize / BLOCK * BLOCK;
            let len = (1 + rng.below((MIB / BLOCK) as u64) as usize) * BLOCK;
            let zero = rng.one_in(2);
            let (offset, length) = (start.to_string(), len.to_string());
            let how: &[&str] = if zero { &["-z"] } else { &[] };
            run("blkdiscard", &[how, &["-f", "-o", &offset, "-l", &length, &path]].concat())?;
            if zero {
                model[start..start + len].fill(0);
                undefined.retain(|&block| block < start || block >= start + len);
            } else {
                undefined.extend((start..start + len).step_by(BLOCK));
            }
        }
        file.read_exact_at(buffer.bytes(), 0)?;
        for (at, block) in buffer.bytes().chunks(BLOCK).enumerate() {
            let at = at * BLOCK;
            let right = undefined.contains(&at) || block == &model[at..at + BLOCK];
            ensure!(right, "round {round}: byte {at} and on is wrong");
        }
    }
    ensure!(disk.stat()?.discards > 0, "no discard came to the disk");
    Ok(())
}

fn errors(context: &Context) -> Result<()> {
    expect_io_errors();
    for kind in ["read", "write", "flush"] {
        let sector = (kind != "flush").then_some(2048);
        let backing = Backing::Failing { bytes: 16 << 20, kind, sector };
        let disk = Disk::plug(&context.machine, &Plug::of(backing))?;
        let file = open_direct(&disk.path()?)?;
        let mut buffer = Aligned::new(BLOCK);
        for _ in 0..context.effort.rounds {
            let outcomes = [
                ("read", file.read_exact_at(buffer.bytes(), MIB as u64)),
                ("write", file.write_all_at(buffer.bytes(), MIB as u64)),
                ("flush", file.sync_data()),
            ];
            for (what, outcome) in outcomes {
                expect(what == kind, outcome).with_context(|| format!("{what}, {kind} fails"))?;
            }
            // The blocks next to the range.
            file.read_exact_at(buffer.bytes(), (MIB - BLOCK) as u64).context("the block before")?;
            file.write_all_at(buffer.bytes(), (MIB + BLOCK) as u64).context("the block behind")?;
        }
        if kind != "flush" {
            parts(&disk, &file, kind).with_context(|| format!("in parts, {kind} fails"))?;
        }
        ensure!(disk.attribute("inflight")?.split_whitespace().all(|count| count == "0"));
    }
    Ok(())
}

/// A request that is split into several fails as a whole if one in the middle fails.
fn parts(disk: &Disk, file: &File, kind: &str) -> Result<()> {
    disk.set("queue/max_sectors_kb", "64")?;
    let mut buffer = Aligned::new(MIB / 2);
    let start = (MIB - MIB / 4) as u64;
    expect(kind == "read", file.read_exact_at(buffer.bytes(), start)).context("read")?;
    expect(kind == "write", file.write_all_at(buffer.bytes(), start)).context("write")
}

fn expect(fails: bool, outcome: io::Result<()>) -> Result<()> {
    match outcome {
        Ok(()) if fails => bail!("it went well"),
        Err(why) if fails && why.raw_os_error() == Some(5) => Ok(()),
        other => Ok(other?),
    }
}

/// Linux 6.12 submits a block that lies in two pages as two segments, whatever the limit is.
fn one_segment(context: &Context) -> Result<()> {
    const BYTES: usize = 16 * BLOCK;
    let liar = Backing::Liar { lie: Lie::OneSegment, after: 0, seed: context.seed };
    let disk = Disk::plug(&context.machine, &Plug::of(liar))?;
    for (name, wanted) in [("logical_block_size", "4096"), ("max_segments", "1")] {
        let found = disk.attribute(&format!("queue/{name}"))?;
        ensure!(found == wanted, "{name} is {found}, not {wanted}");
    }
    let path = disk.path()?;
    let file = open_direct(&path)?;
    let mut memory = Aligned::new(BYTES + BLOCK);
    for _ in 0..context.effort.rounds {
        let pages = &mut memory.bytes()[..BYTES];
        file.read_exact_at(pages, 0).context("a read into pages")?;
        file.write_all_at(pages, 0).context("a write of pages")?;
        let across = &mut memory.bytes()[512..][..BYTES];
        let outcomes = [file.read_exact_at(across, 0), file.write_all_at(across, 0)];
        for (name, outcome) in ["read", "write"].into_iter().zip(outcomes) {
            let error = outcome.as_ref().err().and_then(Errno::from_io_error);
            ensure!(error == Some(Errno::INVAL), "a {name} of blocks across pages: {outcome:?}");
        }
    }
    File::open(&path)?.read_exact_at(&mut vec![0; MIB], 0).context("a read through the page cache")
}

fn read_only(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::of(Backing::ReadOnly { bytes: 16 << 20 }))?;
    ensure!(disk.attribute("ro")? == "1", "the disk is not read-only");
    let path = disk.path()?;
    let file = File::open(&path)?;
    let mut bytes = vec![1; MIB];
    file.read_exact_at(&mut bytes, 0)?;
    ensure!(bytes.iter().all(|byte| *byte == 0), "an empty disk is not empty");
    // Since 6.5 opening it for writing fails; before, the write fails.
    let written = open_direct(&path).and_then(|file| {
        let mut buffer = Aligned::new(BLOCK);
        Ok(file.write_all_at(buffer.bytes(), 0)?)
    });
    ensure!(written.is_err(), "a write went well");
    Ok(())
}

fn nowait(context: &Context) -> Result<()> {
    let backing = Backing::Throttled { bytes: 64 << 20, iops: 40 };
    let _driver = Driver::load(context.mode, &["queue_depth=4"])?;
    let disk = Disk::plug(&context.machine, &Plug::of(backing).queues(1))?;
    let path = disk.path()?;
    let job = Engine::Uring.job("full", &path);
    let job = job.with("--rw=randread --bs=4k --time_based --runtime=8");
    let mut full = Background::start(&[job])?;
    full.wait_until_open(&path)?;
    let file = open_direct(&path)?;
    let mut buffer = Aligned::new(BLOCK);
    let (mut again, mut served) = (0, 0);
    let mut try_one = || {
        let mut slices = [io::IoSliceMut::new(buffer.bytes())];
        match rustix::io::preadv2(&file, &mut slices, 0, ReadWriteFlags::NOWAIT) {
            Ok(BLOCK) => Ok(true),
            Err(rustix::io::Errno::AGAIN) => Ok(false),
            other => bail!("a read that must not wait: {other:?}"),
        }
    };
    while again < 10 && full.is_running()? {
        match try_one()? {
            true => served += 1,
            false => again += 1,
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    full.wait_for_success()?;
    println!("{again} were told to come again, {served} were served");
    ensure!(again > 0, "no request was told to come again");
    ensure!(try_one()?, "the ring is empty, and still a request was told to come again");
    Ok(())
}

fn serial(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(16))?;
    let (seen, expected) = (disk.attribute("serial")?, disk.expected_serial());
    ensure!(seen == expected, "the serial number is '{seen}', not '{expected}'");
    Ok(())
}
