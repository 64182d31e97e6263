// SPDX-License-Identifier: Apache-2.0
//! Range commands that take long, and events that end them early.

use crate::case::cases;
use crate::host::disks::usual;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{
    DISK_BYTES, Disk, Dm, DmKind, FileSystem, NullBlkOptions, image, null_blk, wait_until,
};
use crate::host::target::{options, serve, serve_with};
use crate::host::visibility::counters;
use anyhow::{Context, Result, ensure};
use driver::kernel::{KernelOptions, abi};
use driver::{Device, Options, Placed, Request, Segment};
use kit::set::Set::{Gating, Plain};
use kit::stat::Stat;
use kit::system::run;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;
use virtio_spec::blk::{RangeSegment, S_IOERR, S_OK, T_WRITE_ZEROES, WRITE_ZEROES_F_UNMAP};

cases! { Host;
    "discard-read-only", Plain,
        "a discard that takes long ends with an error when its disk becomes read-only",
        become_read_only;
    "discard-closed", Plain,
        "a discard that takes long does not keep the device from being closed",
        closed;
    "discard-stopped", Gating,
        "a stop does not wait for the rest of a discard that takes long",
        stopped;
    "write-zeroes-bounded", Plain,
        "a queue takes no more WRITE_ZEROES while many bytes are being zeroed",
        |env| bounded(&env.on(Plane::Direct));
    "write-zeroes-sum", Gating,
        "a WRITE_ZEROES whose ranges are larger than the limit together is refused",
        |env| sum_is_limited(&env.on(Plane::Direct));
    "write-zeroes-many", Gating,
        "a WRITE_ZEROES of 2^32 + 1 ranges is refused",
        |env| many(&env.on(Plane::Direct));
    "write-zeroes-no-unmap", Plain,
        "a WRITE_ZEROES that may unmap keeps the space of an image whose owner forbids unmapping",
        no_unmap;
}

/// A disk on which each discard takes the same time, whatever its size, and to which the module
/// sends the discard in four pieces.
const SLOW: NullBlkOptions = NullBlkOptions {
    mib: 4 << 10,
    irqmode: 2,
    completion_ns: PIECE.as_nanos() as u64,
    ..NullBlkOptions::USUAL
};
/// Time of a piece, shorter than the timeout of the disk.
const PIECE: Duration = Duration::from_secs(3);
/// Bytes to zero.
const BYTES: usize = 1 << 20;

/// The disk becomes read-only.
pub(crate) fn become_read_only(env: &Env) -> Result<()> {
    let (disk, _) = null_blk(SLOW)?;
    let mut device = discards_all(env, &disk)?;
    let path = disk.path.to_string_lossy();
    run("blockdev", &["--setro", &path])?;
    let outcome = device.queue(0).collect();
    run("blockdev", &["--setrw", &path])?;
    let status = outcome?.1.status;
    ensure!(status == Some(S_IOERR), "the discard ended with {status:?}");
    was_cut_short(&disk)
}

/// The device is closed, so nothing waits for the command.
pub(crate) fn closed(env: &Env) -> Result<()> {
    let (disk, _) = null_blk(SLOW)?;
    drop(discards_all(env, &disk)?);
    was_cut_short(&disk)
}

/// The queue is stopped: the discard ends early, and well, because it is a hint.
pub(crate) fn stopped(env: &Env) -> Result<()> {
    let (disk, _) = null_blk(SLOW)?;
    let mut device = discards_all(env, &disk)?;
    device.session().stop_queue(0)?;
    let status = device.queue(0).collect()?.1.status;
    ensure!(status == Some(S_OK), "the discard ended with {status:?}");
    was_cut_short(&disk)
}

/// Bytes that a device zeroes at once: the default of the module's `inflight_bytes_max`.
const ZEROED_BYTES: u64 = 256 << 20;
/// WRITE_ZEROES that the driver makes available, each of the whole disk.
const ZEROES: u64 = 6;
/// Time in which a queue would take more. On a slow machine it may be too short to find that.
const TAKES: Duration = Duration::from_millis(500);

/// The disk keeps all requests for a while.
pub(crate) fn bounded(env: &Env) -> Result<()> {
    let (disk, dm) = Dm::over(usual()?, "zeroed", DmKind::Linear)?;
    let mut device = serve(env, &disk, &options())?.device;
    let wanted = ZEROED_BYTES / DISK_BYTES;
    let taken = dm.hold(|| takes_some(&mut device, &disk, wanted))?;
    ensure!(taken == wanted, "{taken} requests were taken, not {wanted}");
    for n in 0..ZEROES {
        let status = device.queue(0).collect().with_context(|| format!("request {n}"))?.1.status;
        ensure!(status == Some(S_OK), "request {n} ended with {status:?}");
    }
    Ok(())
}

/// Waits until the queue has taken so many. Returns those that it has taken some time later.
fn takes_some(device: &mut Device, disk: &Disk, wanted: u64) -> Result<u64> {
    let layout = device.layout();
    let range = RangeSegment { sector: 0, num_sectors: u32::try_from(disk.sectors())?, flags: 0 };
    for _ in 0..ZEROES {
        device.queue(0).submit(&Request::write_zeroes(&[range]), &layout)?;
    }
    let mut inflight = || Ok(counters(device)?["inflight"]);
    wait_until("requests to be taken", || Ok((inflight()? >= wanted).then_some(())))?;
    std::thread::sleep(TAKES);
    inflight()
}

/// Largest WRITE_ZEROES that the owner allows.
const LIMIT_SECTORS: u32 = 64;

/// The limit holds for the ranges together.
pub(crate) fn sum_is_limited(env: &Env) -> Result<()> {
    let disk = usual()?;
    let limited = abi::BlkOptions {
        max_write_zeroes_sectors: LIMIT_SECTORS,
        max_discard_sectors: LIMIT_SECTORS,
        ..abi::BlkOptions::with_flags(0)
    };
    let kernel = KernelOptions { options: limited, ..KernelOptions::default() };
    let mut device = serve_with(env, &disk, &options(), &kernel)?.device;
    let range = |sector, num_sectors| RangeSegment { sector, num_sectors, flags: 0 };
    let (half, more) = (LIMIT_SECTORS / 2, LIMIT_SECTORS / 2 + 8);
    let cases = [
        (Request::write_zeroes(&[range(0, half), range(512, half)]), S_OK),
        (Request::write_zeroes(&[range(0, half), range(512, more)]), S_IOERR),
        (Request::discard(&[range(0, half), range(512, more)]), S_OK),
    ];
    let layout = device.layout();
    for (n, (request, expected)) in cases.iter().enumerate() {
        let status = device.queue(0).execute(request, &layout)?.status;
        ensure!(status == Some(*expected), "request {n} ended with {status:?}");
    }
    Ok(())
}

/// Bytes of a segment that is named again and again, and its number: together 2^32 ranges.
const SEGMENT: (u32, usize) = (128 << 20, 512);

fn many(env: &Env) -> Result<()> {
    let disk = usual()?;
    let regions = vec![(0, 2 * u64::from(SEGMENT.0))];
    let options = Options { regions, ..options() };
    let mut device = serve_with(env, &disk, &options, &KernelOptions::default())?.device;
    let memory = device.memory().clone();
    let (header, range) = (memory.alloc(16, 16), memory.alloc(16, 16));
    memory.write(header, &[&T_WRITE_ZEROES.to_le_bytes()[..], &[0; 12]].concat());
    // Eight sectors from the first one on.
    memory.write(range, &[&[0; 8][..], &8_u32.to_le_bytes(), &[0; 4]].concat());
    let (rest, status) = (memory.alloc(SEGMENT.0 as usize, 4096), memory.alloc(1, 1));
    let mut segments = vec![Segment::readable(header, 16), Segment::readable(range, 16)];
    segments.extend(vec![Segment::readable(rest, SEGMENT.0); SEGMENT.1]);
    segments.push(Segment::writable(status, 1));
    device.queue(0).add_placed(Placed { segments }, true)?;
    device.queue(0).queue().publish();
    device.queue(0).queue().kick();
    let (_, done) = device.queue(0).collect()?;
    ensure!(done.status == Some(S_IOERR), "status {:?}", done.status);
    Ok(())
}

/// The image keeps its blocks with the option, and loses them without it.
pub(crate) fn no_unmap(env: &Env) -> Result<()> {
    let disk = image(FileSystem::Ext4, true)?;
    let blocks = || -> Result<u64> { Ok(std::fs::metadata(&disk.path)?.blocks()) };
    for (flags, keeps) in [(abi::OPT_NO_UNMAP, true), (0, false)] {
        let kernel = KernelOptions {
            options: abi::BlkOptions::with_flags(flags),
            ..KernelOptions::default()
        };
        let mut device = serve_with(&env.on(Plane::Direct), &disk, &options(), &kernel)?.device;
        device.write(0, &[1; BYTES])?;
        device.flush()?;
        let before = blocks()?;
        device.write_zeroes(0, (BYTES / 512) as u32, WRITE_ZEROES_F_UNMAP)?;
        device.flush()?;
        let lost = before - blocks()?;
        ensure!((lost == 0) == keeps, "with the options {flags:#x} it lost {lost} blocks");
        let mut data = vec![1; BYTES];
        device.read(0, &mut data)?;
        ensure!(data.iter().all(|&byte| byte == 0), "not all is zero");
    }
    Ok(())
}

/// A device whose first queue has begun to discard the whole disk.
fn discards_all(env: &Env, disk: &Disk) -> Result<Device> {
    let mut device = serve(env, disk, &options())?.device;
    let layout = device.layout();
    let range = RangeSegment { sector: 0, num_sectors: u32::try_from(disk.sectors())?, flags: 0 };
    device.queue(0).submit(&Request::discard(&[range]), &layout)?;
    wait_until("the first piece to be on its way", || {
        Ok((stat(disk)?.in_flight > 0).then_some(()))
    })?;
    Ok(device)
}

fn stat(disk: &Disk) -> Result<Stat> {
    Stat::of(&disk.sysfs()?)
}

fn was_cut_short(disk: &Disk) -> Result<()> {
    // The disk counts a piece, and frees its tag, after it has told its end.
    let at_end = stat(disk)?;
    let stat = wait_until("the end of its pieces", || {
        Ok(Some(stat(disk)?).filter(|stat| stat.in_flight == 0 && stat.discards > 0))
    })?;
    println!("{at_end:?}\n{stat:?}");
    ensure!(stat.discards <= at_end.discards + at_end.in_flight, "a piece began after its end");
    ensure!(stat.discarded_sectors < disk.sectors(), "the whole disk was discarded");
    Ok(())
}
