// SPDX-License-Identifier: Apache-2.0
//! All request types, layouts and errors on one disk: status byte, written length and data.

mod errors;
mod large;
mod layouts;
mod model;
mod types;

use crate::case::cases;
use crate::host::disks::{BLOCKS_4096, USUAL, disk_like, mapped, usual};
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, FileSystem, NullBlkOptions, brd, image, loop_4096, scsi_debug};
use crate::host::target::{self, Target};
use anyhow::{Context, Result, ensure};
use driver::kernel::{KernelOptions, abi};
use driver::{Completion, Device, Layout, Options, Request};
use kit::rng::Rng;
use kit::set::Set::{Full, Gating, Plain};
use virtio_spec::blk::{F_DISCARD, F_SECURE_ERASE, F_WRITE_ZEROES, RangeSegment, S_OK, S_UNSUPP};
use virtio_spec::features::bit;

cases! { Host;
    "requests-null-blk", Gating,
        "every request type, layout and error on null_blk",
        |env| all(env, usual());
    "requests-null-blk-4096", Plain,
        "every request type, layout and error on null_blk with blocks of 4096 bytes",
        |env| all(env, disk_like(BLOCKS_4096));
    "requests-null-blk-cache", Full,
        "every request type, layout and error on null_blk with a volatile write cache",
        |env| all(env, disk_like(NullBlkOptions { cache_mib: 8, ..USUAL }));
    "requests-brd", Plain,
        "every request type, layout and error on a RAM disk, which completes at once",
        |env| all(env, brd());
    "requests-loop-4096", Full,
        "every request type, layout and error on a loop device with blocks of 4096 bytes",
        |env| all(env, loop_4096());
    "requests-scsi-debug-4096", Plain,
        "every request type, layout and error on a SCSI disk with blocks of 4096 bytes",
        |env| all(env, scsi_debug());
    "requests-dm", Full,
        "every request type, layout and error on a device-mapper device",
        |env| all(env, mapped());
    "requests-ext4-direct", Plain,
        "every request type, layout and error on an image on ext4, opened with O_DIRECT",
        |env| all(env, image(FileSystem::Ext4, true));
    "requests-ext4-cached", Plain,
        "every request type, layout and error on an image on ext4, by way of the page cache",
        |env| all(env, image(FileSystem::Ext4, false));
    "requests-xfs-direct", Full,
        "every request type, layout and error on an image on XFS, opened with O_DIRECT",
        |env| all(env, image(FileSystem::Xfs, true));
    "requests-xfs-cached", Full,
        "every request type, layout and error on an image on XFS, by way of the page cache",
        |env| all(env, image(FileSystem::Xfs, false));
}

/// A device on a disk, with the expected answer to each command.
struct Subject<'a> {
    device: Device,
    disk: &'a Disk,
    env: &'a Env,
    /// Lives as long as the device.
    _daemon: Option<crate::host::daemon::Daemon>,
}

impl<'a> Subject<'a> {
    fn new(env: &'a Env, disk: &'a Disk, options: &Options, flags: u32) -> Result<Self> {
        let options = Options { scratch_bytes: 24 << 20, queue_size: 1024, ..options.clone() };
        let kernel = KernelOptions {
            options: abi::BlkOptions::with_flags(flags),
            ..KernelOptions::default()
        };
        let Target { device, daemon } = target::serve_with(env, disk, &options, &kernel)?;
        Ok(Self { device, disk, env, _daemon: daemon })
    }

    /// A sector number in logical blocks.
    fn at(&self, block: u64) -> u64 {
        block * self.disk.unit()
    }

    /// Bytes of `count` logical blocks.
    fn len(&self, count: u64) -> usize {
        (count * self.disk.block_bytes) as usize
    }

    /// A range of logical blocks.
    fn range(&self, block: u64, count: u64, flags: u32) -> RangeSegment {
        RangeSegment { sector: self.at(block), num_sectors: self.at(count) as u32, flags }
    }

    /// Executes a request in the usual layout and checks how it ends.
    fn ends(&mut self, request: &Request, status: u8, written: u32) -> Result<Completion> {
        let layout = self.device.layout();
        self.ends_in(request, &layout, status, written)
    }

    /// Executes a request in the given layout and checks how it ends.
    fn ends_in(
        &mut self,
        request: &Request,
        layout: &Layout,
        status: u8,
        written: u32,
    ) -> Result<Completion> {
        let head: Vec<u8> = request.readable.iter().take(16).copied().collect();
        let what = || {
            let readable = request.readable.len();
            format!("header {head:02x?}, {readable} readable bytes, {}", brief(layout))
        };
        let completion = self.device.queue(0).execute(request, layout).with_context(what)?;
        let got = (completion.status, completion.written);
        let expected = (Some(status), written);
        ensure!(got == expected, "{}: got {got:?}, expected {expected:?}", what());
        Ok(completion)
    }

    fn writes(&mut self, sector: u64, data: &[u8]) -> Result<()> {
        self.ends(&Request::write(sector, data), S_OK, 1).map(drop)
    }

    fn reads_as(&mut self, sector: u64, expected: &[u8]) -> Result<()> {
        let request = Request::read(sector, expected.len());
        let read = self.ends(&request, S_OK, expected.len() as u32 + 1)?;
        same(&read.data, expected).with_context(|| format!("read at sector {sector}"))
    }

    fn has(&self, feature: u32) -> bool {
        self.device.features() & bit(feature) != 0
    }

    /// Status of a well-formed DISCARD.
    fn discard_status(&self) -> u8 {
        if self.has(F_DISCARD) && self.disk.discard { S_OK } else { S_UNSUPP }
    }

    /// Status of a well-formed WRITE_ZEROES.
    fn write_zeroes_status(&self) -> u8 {
        if self.has(F_WRITE_ZEROES) { S_OK } else { S_UNSUPP }
    }

    /// True if SECURE_ERASE was negotiated and the disk supports it.
    fn can_secure_erase(&mut self) -> Result<bool> {
        let negotiated = self.has(F_SECURE_ERASE);
        match self.device.session().kernel() {
            Some(kernel) => {
                Ok(negotiated && kernel.device().info()?.flags & abi::INFO_SECURE_ERASE != 0)
            }
            None => Ok(negotiated),
        }
    }

    /// Most ranges per command.
    fn ranges_max(&self) -> u64 {
        if self.env.plane == Plane::Uring { 32 } else { abi::BLK_RANGES_MAX.into() }
    }
}

/// A layout in one line.
fn brief(layout: &Layout) -> String {
    let Layout { readable, writable, indirect, align, misalign } = layout;
    let mut cuts = format!("{readable:?} / {writable:?}");
    if cuts.len() > 120 {
        cuts.truncate(120);
        cuts.push_str("...");
    }
    format!("cut {cuts}, indirect {indirect}, aligned {align} + {misalign}")
}

/// Checks that two buffers are equal; the error shows the first difference.
pub(crate) fn same(got: &[u8], expected: &[u8]) -> Result<()> {
    ensure!(got.len() == expected.len(), "{} bytes instead of {}", got.len(), expected.len());
    let first = got.iter().zip(expected).position(|(a, b)| a != b);
    let Some(at) = first else { return Ok(()) };
    let end = (at + 16).min(got.len());
    let (got, expected) = (&got[at..end], &expected[at..end]);
    anyhow::bail!("other bytes from byte {at} on: {got:02x?} instead of {expected:02x?}")
}

/// Bytes that depend on the seed.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    Rng::new(seed ^ 0x7a77).bytes(len)
}

/// Event index and indirect tables: both on, and both off.
fn ring_options() -> Vec<Options> {
    let mut all = Vec::new();
    for (event_idx, indirect) in [(true, true), (false, false)] {
        all.push(Options { event_idx, indirect, ..target::options() });
    }
    all
}

/// Runs all of these checks on one disk.
pub(crate) fn all(env: &Env, disk: Result<Disk>) -> Result<()> {
    let disk = match Disk::given(env)? {
        Some(given) => given,
        None => disk?,
    };
    println!("on {disk}");
    for options in ring_options() {
        let rings = format!("event index {}, indirect {}", options.event_idx, options.indirect);
        let mut subject = Subject::new(env, &disk, &options, 0)?;
        types::all(&mut subject).with_context(|| rings.clone())?;
        errors::all(&mut subject).context(rings)?;
    }
    let mut subject = Subject::new(env, &disk, &target::options(), 0)?;
    layouts::all(&mut subject)?;
    model::random_requests(&mut subject, env.rounds(200))?;
    errors::becomes_read_only(&mut subject).context("a disk that becomes read-only")?;
    drop(subject);
    errors::read_only(env, &disk)?;
    errors::not_negotiated(env, &disk)?;
    types::write_through(env, &disk)
}
