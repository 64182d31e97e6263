// SPDX-License-Identifier: Apache-2.0
//! Numbers of queues and descriptors.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use kit::outcome::skip_part;

use crate::case::cases;
use crate::guest::cpus::Off;
use crate::guest::load::fio::{Engine, fio, verified};
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug, cpus_online};
use crate::guest::mode::{Driver, Mode, POLL_QUEUES};
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-queues", Modes::of(Mode::ALL),
        "disks with 1 to 8 queues hold what was written, with 1 to 4 CPUs",
        counts;
    "guest-rings", Modes::of(Mode::ALL).at_every_change(&[Mode::Bio]).and_long(),
        "rings of 2 to 1024 descriptors hold more requests than fit, with and without indirect tables",
        rings;
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
                let job = engine.job("queues", &path);
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

fn rings(context: &Context) -> Result<()> {
    let sizes: &[u16] = match context.effort.rounds {
        0..=3 => &[2, 4, 64],
        _ => &[2, 4, 8, 16, 64, 256, 1024],
    };
    let plug = Plug::file(1).queue_size(sizes[0].max(4));
    if Disk::plug(&context.machine, &plug)?.ring_size()? != u64::from(plug.queue_size) {
        skip_part("this QEMU gives every queue 1024 descriptors");
        return depths(context, sizes);
    }
    for &size in sizes {
        for indirect in [true, false] {
            // A request needs three descriptors without indirect tables.
            if size < 4 && !indirect {
                continue;
            }
            ring(context, size, indirect)
                .with_context(|| format!("a ring of {size}, indirect tables: {indirect}"))?;
        }
    }
    Ok(())
}

/// Tests short queues in rings of QEMU's size.
fn depths(context: &Context, sizes: &[u16]) -> Result<()> {
    for &depth in sizes {
        let _driver = Driver::load(context.mode, &[&format!("queue_depth={depth}")])?;
        for indirect in [true, false] {
            ring(context, 1024, indirect)
                .with_context(|| format!("a depth of {depth}, indirect tables: {indirect}"))?;
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
    let job = |engine: Engine, rw: &str, offset: u32| {
        let how = format!("{} --rw={rw} --bsrange=4k-64k --offset={offset}M", verified(8));
        engine.job("ring", &path).with(&how).with("--iodepth=64")
    };
    fio(&[
        job(Engine::Uring, "randwrite", 0),
        job(engine(context.mode), "randwrite", 16),
        job(Engine::Sync, "write", 32),
    ])
}
