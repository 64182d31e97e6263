// SPDX-License-Identifier: Apache-2.0
//! Reads return the data that was written, with all methods of I/O.

use anyhow::Result;

use crate::case::cases;
use crate::guest::load::fio::{Engine, fio, verified};
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::Mode;
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-verify", Modes::of(Mode::ALL).at_every_change(Mode::OURS).and_long(),
        "fio reads what it wrote, in all sizes and directions, by system calls, io_uring and polled io_uring, alone and mixed",
        |context| verify(context, &Plug::file(512), 512);
    "guest-verify-daemon", Modes::of(Mode::ALL),
        "fio reads what it wrote on a disk that this project's daemon serves",
        verify_daemon;
    "guest-verify-4k", Modes::of(Mode::ALL),
        "fio reads what it wrote on a disk with blocks of 4096 bytes",
        verify_4k;
    "guest-verify-packed", Modes::of(Mode::ALL),
        "fio reads what it wrote through packed virtqueues",
        |context| verify(context, &Plug::file(512).with("packed", true), 512);
    "guest-verify-direct", Modes::of(Mode::ALL),
        "fio reads what it wrote without indirect tables and event index",
        verify_direct;
    "guest-verify-dma", Modes::of(Mode::ALL),
        "fio reads what it wrote on a device that wants addresses of the DMA interface",
        |context| verify(context, &Plug::file(512).with("iommu_platform", true), 512);
}

fn verify(context: &Context, plug: &Plug, block: u32) -> Result<()> {
    let disk = Disk::plug(&context.machine, plug)?;
    verify_all(context, &disk.path()?, block)
}

fn verify_4k(context: &Context) -> Result<()> {
    let plug = Plug::file(512).with("logical_block_size", 4096);
    verify(context, &plug.with("physical_block_size", 4096), 4096)
}

fn verify_direct(context: &Context) -> Result<()> {
    let plug = Plug::file(512).with("indirect_desc", false);
    verify(context, &plug.with("event_idx", false), 512)
}

fn verify_daemon(context: &Context) -> Result<()> {
    let args = vec!["--num-queues=4".to_owned(), "--cache=writeback".to_owned()];
    let plug = Plug::of(Backing::Daemon { bytes: 512 << 20, args });
    let disk = Disk::plug(&context.machine, &plug)?;
    verify_all(context, &disk.path()?, 512)
}

/// Runs each engine alone, then all at once in separate parts of the disk.
pub(crate) fn verify_all(context: &Context, path: &str, block: u32) -> Result<()> {
    let size = verified(context.effort.mib);
    let mut engines = vec![Engine::Sync, Engine::Uring];
    if context.mode.polls() {
        engines.push(Engine::Hipri);
    }
    let mut mixed = Vec::new();
    for (index, &engine) in engines.iter().enumerate() {
        let job = |name: &str| engine.job(name, path).with(&size);
        fio(&[job("random").with(&format!("--rw=randwrite --bsrange={block}-64k"))])?;
        fio(&[job("sequential").with("--rw=write --bs=128k")])?;
        fio(&[job("large").with("--rw=write --bs=1M")])?;
        let offset = index as u32 * context.effort.mib;
        let how = format!("--rw=randrw --bsrange=4k-32k --offset={offset}M");
        mixed.push(job("mixed").with(&how));
    }
    fio(&mixed)
}
