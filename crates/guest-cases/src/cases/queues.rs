// SPDX-License-Identifier: Apache-2.0
//! Numbers of queues, of CPUs, of descriptors.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::case::{Case, Context};
use crate::load::Errors;
use crate::load::everything::Everything;
use crate::load::fio::{Engine, Job, fio, verified};
use crate::machine::backing::Backing;
use crate::machine::disk::{Disk, Plug, cpus_online};
use crate::mode::{Mode, POLL_QUEUES};
use crate::system::write;

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "guest-queues",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "disks with 1 to 8 queues hold what was written, with 1 to 4 CPUs",
        run: counts,
    },
    Case {
        name: "guest-cpus",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "CPUs go and come under load, and nothing is lost",
        run: cpus,
    },
    Case {
        name: "guest-rings",
        short: &[Mode::Bio],
        modes: Mode::ALL,
        has_long: true,
        about: "rings of 2 to 1024 descriptors hold more requests than fit, with and without indirect tables",
        run: rings,
    },
];

/// A CPU that is off until dropped.
struct Off(u32);

impl Off {
    fn new(cpu: u32) -> Result<Self> {
        write(online(cpu), "0")?;
        Ok(Self(cpu))
    }
}

impl Drop for Off {
    fn drop(&mut self) {
        if let Err(why) = write(online(self.0), "1") {
            eprintln!("clean-up: {why:#}");
        }
    }
}

fn online(cpu: u32) -> String {
    format!("/sys/devices/system/cpu/cpu{cpu}/online")
}

fn engine(mode: Mode) -> Engine {
    if mode.polls() { Engine::Hipri } else { Engine::Uring }
}

fn counts(context: &Context) -> Result<()> {
    let cpus = cpus_online()?;
    let mut off = Vec::new();
    for left in (1..=cpus).rev() {
        for queues in [1, 2, 3, 4, 8] {
            let what = format!("{queues} queues, {left} CPUs");
            let disk = Disk::plug(&context.machine, &Plug::file(64).queues(queues))?;
            let path = disk.path()?;
            let has_polled = context.mode.polls() && queues > 1;
            let how = if has_polled { engine(context.mode) } else { Engine::Uring };
            let jobs = [Engine::Sync, how].into_iter().zip([0, 16]).map(|(engine, offset)| {
                let size = verified(4);
                let job = Job::new("queues", &path, engine);
                job.with(&format!("{size} --rw=randwrite --bs=4k --offset={offset}M --numjobs=1"))
            });
            fio(&jobs.collect::<Vec<_>>()).context(what)?;
        }
        if left > 1 {
            off.push(Off::new(left - 1)?);
        }
    }
    Ok(())
}

fn cpus(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    let mut load = Everything::start(context, &disk, Errors::Fail)?;
    for _ in 0..context.effort.rounds.min(5) {
        let mut off = Vec::new();
        for cpu in 1..cpus_online()? {
            off.push(Off::new(cpu)?);
            load.goes_on()?;
        }
        drop(off);
        load.goes_on()?;
    }
    load.finish()
}

fn rings(context: &Context) -> Result<()> {
    let sizes: &[u16] = match context.effort.rounds {
        0..=3 => &[2, 4, 64],
        _ => &[2, 4, 8, 16, 64, 256, 1024],
    };
    for &size in sizes {
        for indirect in [true, false] {
            // A request needs three descriptors where there are no indirect tables.
            if size < 4 && !indirect {
                continue;
            }
            ring(context, size, indirect)
                .with_context(|| format!("a ring of {size}, indirect tables: {indirect}"))?;
        }
    }
    Ok(())
}

fn ring(context: &Context, size: u16, indirect: bool) -> Result<()> {
    let backing = if size < 4 {
        let args = vec!["--num-queues=4".to_owned(), format!("--queue-size={size}")];
        Backing::Daemon { bytes: 64 << 20, args }
    } else {
        Backing::File { bytes: 64 << 20 }
    };
    let plug = Plug::of(backing).queues(2 + POLL_QUEUES).queue_size(size);
    let disk = Disk::plug(&context.machine, &plug.with("indirect_desc", indirect))?;
    let path = disk.path()?;
    ensure!(Path::new(&path).exists());
    let job = |engine, rw: &str, offset: u32| {
        let how = format!("{} --rw={rw} --bsrange=4k-64k --offset={offset}M", verified(8));
        Job::new("ring", &path, engine).with(&how).with("--iodepth=64")
    };
    fio(&[
        job(Engine::Uring, "randwrite", 0),
        job(engine(context.mode), "randwrite", 16),
        job(Engine::Sync, "write", 32),
    ])
}
