// SPDX-License-Identifier: Apache-2.0
//! What is written is what is read, however it is done.

use anyhow::Result;

use crate::case::{Case, Context};
use crate::load::fio::{Engine, Job, fio, verified};
use crate::machine::backing::Backing;
use crate::machine::disk::{Disk, Plug};
use crate::mode::Mode;

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "guest-verify",
        short: Mode::OURS,
        modes: Mode::ALL,
        has_long: true,
        about: "fio reads what it wrote, in all sizes and directions, by system calls, io_uring and polled io_uring, alone and mixed",
        run: |context| verify(context, &Plug::file(512), 512),
    },
    Case {
        name: "guest-verify-daemon",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "fio reads what it wrote on a disk that this project's daemon serves",
        run: verify_daemon,
    },
    Case {
        name: "guest-verify-4k",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "fio reads what it wrote on a disk with blocks of 4096 bytes",
        run: |context| {
            let plug = Plug::file(512).with("logical_block_size", 4096);
            verify(context, &plug.with("physical_block_size", 4096), 4096)
        },
    },
    Case {
        name: "guest-verify-packed",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "fio reads what it wrote through packed virtqueues",
        run: |context| verify(context, &Plug::file(512).with("packed", true), 512),
    },
    Case {
        name: "guest-verify-direct",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "fio reads what it wrote without indirect tables and event index",
        run: |context| {
            let plug = Plug::file(512).with("indirect_desc", false);
            verify(context, &plug.with("event_idx", false), 512)
        },
    },
    Case {
        name: "guest-verify-dma",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "fio reads what it wrote on a device that wants addresses of the DMA interface",
        run: |context| verify(context, &Plug::file(512).with("iommu_platform", true), 512),
    },
];

fn verify(context: &Context, plug: &Plug, block: u32) -> Result<()> {
    let disk = Disk::plug(&context.machine, plug)?;
    verify_all(context, &disk.path()?, block)
}

fn verify_daemon(context: &Context) -> Result<()> {
    let args = vec!["--num-queues=4".to_owned(), "--cache=writeback".to_owned()];
    let plug = Plug::of(Backing::Daemon { bytes: 512 << 20, args });
    let disk = Disk::plug(&context.machine, &plug)?;
    verify_all(context, &disk.path()?, 512)
}

/// Every engine alone, then all at once in parts of their own.
pub(crate) fn verify_all(context: &Context, path: &str, block: u32) -> Result<()> {
    let size = verified(context.effort.mib);
    let mut engines = vec![Engine::Sync, Engine::Uring];
    if context.mode.polls() {
        engines.push(Engine::Hipri);
    }
    let mut mixed = Vec::new();
    for (index, &engine) in engines.iter().enumerate() {
        let job = |name: &str| Job::new(name, path, engine).with(&size);
        fio(&[job("random").with(&format!("--rw=randwrite --bsrange={block}-64k"))])?;
        fio(&[job("sequential").with("--rw=write --bs=128k")])?;
        fio(&[job("large").with("--rw=write --bs=1M")])?;
        let offset = index as u32 * context.effort.mib;
        let how = format!("--rw=randrw --bsrange=4k-32k --offset={offset}M");
        mixed.push(job("mixed").with(&how));
    }
    fio(&mixed)
}
