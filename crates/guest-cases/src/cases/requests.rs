// SPDX-License-Identifier: Apache-2.0
//! Kinds of requests, one by one, and how they fail.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use anyhow::{Context as _, Result, bail, ensure};
use lab_case::rng::Rng;
use lab_case::system::run;
use rustix::io::ReadWriteFlags;

use crate::case::{Case, Context};
use crate::load::fio::{Background, Engine, Job};
use crate::load::memory::Aligned;
use crate::load::open_direct;
use crate::machine::backing::Backing;
use crate::machine::disk::{Disk, Plug};
use crate::mode::Mode;

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "guest-ranges",
        short: &[Mode::Request, Mode::Bio],
        modes: Mode::ALL,
        has_long: true,
        about: "zeroed ranges read as zeroes, discarded and zeroed ones leave their neighbours alone, also when they are split",
        run: ranges,
    },
    Case {
        name: "guest-errors",
        short: &[Mode::Request, Mode::Bio],
        modes: Mode::ALL,
        has_long: false,
        about: "a read, a write and a flush that the device fails, as a whole or in part, fail for the program, and the next ones do not",
        run: errors,
    },
    Case {
        name: "guest-read-only",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "a read-only disk is one for the kernel, can be read, and takes no write",
        run: read_only,
    },
    Case {
        name: "guest-nowait",
        short: &[Mode::Bio],
        modes: Mode::INTERRUPTS,
        has_long: false,
        about: "requests that must not wait are told to come again while the ring is full, and are served afterwards",
        run: nowait,
    },
    Case {
        name: "guest-serial",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "sysfs shows the serial number that the device has",
        run: serial,
    },
];

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;

fn ranges(context: &Context) -> Result<()> {
    // Limits that make several requests of most ranges.
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
            // The neighbours.
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

/// A request that becomes several, of which one in the middle fails, fails as a whole.
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

fn read_only(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::of(Backing::ReadOnly { bytes: 16 << 20 }))?;
    ensure!(disk.attribute("ro")? == "1", "the disk is not read-only");
    let path = disk.path()?;
    let file = File::open(&path)?;
    let mut bytes = vec![1; MIB];
    file.read_exact_at(&mut bytes, 0)?;
    ensure!(bytes.iter().all(|byte| *byte == 0), "an empty disk is not empty");
    // Since 6.5 it cannot even be opened for writing; before, the write fails.
    let written = open_direct(&path).and_then(|file| {
        let mut buffer = Aligned::new(BLOCK);
        Ok(file.write_all_at(buffer.bytes(), 0)?)
    });
    ensure!(written.is_err(), "a write went well");
    Ok(())
}

fn nowait(context: &Context) -> Result<()> {
    let backing = Backing::Throttled { bytes: 64 << 20, iops: 40 };
    let plug = Plug::of(backing).queues(1).queue_size(4);
    let disk = Disk::plug(&context.machine, &plug)?;
    let path = disk.path()?;
    let job = Job::new("full", &path, Engine::Uring);
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
