// SPDX-License-Identifier: Apache-2.0
//! When data is durable: how often the disk below is told to flush its cache.

use crate::env::Env;
use crate::fixture::{Disk, FileSystem, NullBlkOptions, image_on, null_blk};
use crate::target::{self, Target, options};
use crate::visibility::counters;
use anyhow::{Context, Result, ensure};
use driver::kernel::{KernelOptions, abi};
use driver::{Device, Options, Request};
use lab_case::stat::Stat;
use lab_case::system::run;
use std::path::PathBuf;
use virtio_spec::blk::{F_CONFIG_WCE, F_FLUSH, S_OK};
use virtio_spec::features::bit;

/// A disk with a volatile cache that it must be told to flush, also for a FUA write.
const CACHED: NullBlkOptions =
    NullBlkOptions { cache_mib: 16, fua: false, ..NullBlkOptions::USUAL };
/// Writes of each kind.
const WRITES: u64 = 10;
/// Tries of what depends on the file system, too, and on how busy the machine is.
const TRIES: usize = 100;

/// Counts flushes of a block device, by its folder in sysfs.
struct Flushes(PathBuf);

impl Flushes {
    /// How many it takes to do something.
    fn of(&self, act: impl FnOnce() -> Result<()>) -> Result<u64> {
        let before = Stat::of(&self.0)?.flushes;
        act()?;
        Ok(Stat::of(&self.0)?.flushes - before)
    }
}

/// On a block device.
pub(crate) fn block_device(env: &Env) -> Result<()> {
    let (disk, _) = null_blk(CACHED)?;
    let flushes = Flushes(disk.sysfs()?);
    check(env, &disk, &flushes)
}

/// On an image, with and without the page cache.
pub(crate) fn file(env: &Env) -> Result<()> {
    for direct in [true, false] {
        let (below, _) = null_blk(NullBlkOptions { mib: 512, ..CACHED })?;
        let flushes = Flushes(below.sysfs()?);
        let disk = image_on(FileSystem::Ext4, below, direct)?;
        check(env, &disk, &flushes).with_context(|| format!("direct {direct}"))?;
    }
    Ok(())
}

/// Who waits for the disk below: the queue's worker must not.
pub(crate) fn waits(env: &Env) -> Result<()> {
    let (below, _) = null_blk(NullBlkOptions { mib: 512, ..CACHED })?;
    let disk = image_on(FileSystem::Xfs, below, false)?;
    let all = options().features;
    let mut back = device(env, &disk, 0, all)?;
    write_all(&mut back, 1)?;
    // The first write of a clock tick changes the file's times, which waits; so do all others that
    // come before that is done.
    let mut counts = Vec::new();
    while counts.len() < TRIES && counts.last().is_none_or(|&count| count >= WRITES / 2) {
        back.write(0, &[2; 4096])?;
        counts.push(slow(&mut back, 2)?);
    }
    println!("of {WRITES} writes to the page cache {counts:?} were handed on");
    ensure!(counts.last() < Some(&(WRITES / 2)), "writes to the page cache are handed on");
    drop(back);
    let count = slow(&mut device(env, &disk, abi::OPT_WRITE_THROUGH, all)?, 3)?;
    ensure!(count == WRITES, "{count} of {WRITES} durable writes were handed on");
    let folder = disk.path.parent().context("an image has a folder")?;
    run("mount", &["-o", "remount,sync", &folder.to_string_lossy()])?;
    let count = slow(&mut device(env, &disk, 0, all)?, 4)?;
    ensure!(count == WRITES, "{count} of {WRITES} writes on a sync mount were handed on");
    Ok(())
}

/// How many of [`WRITES`] writes that come at once the workqueue did.
fn slow(device: &mut Device, value: u8) -> Result<u64> {
    let count = |device: &mut Device| {
        let counters = counters(device)?;
        counters.get("slow").copied().context("no count of what the workqueue did")
    };
    let before = count(device)?;
    let layout = device.layout();
    let queue = device.queue(0);
    for n in 0..WRITES {
        queue.submit(&Request::write(n * 8, &[value; 4096]), &layout)?;
    }
    for _ in 0..WRITES {
        let status = queue.collect()?.1.status;
        ensure!(status == Some(S_OK), "a write ended with {status:?}");
    }
    Ok(count(device)? - before)
}

fn device(env: &Env, disk: &Disk, flags: u32, features: u64) -> Result<Device> {
    let kernel =
        KernelOptions { options: abi::BlkOptions::with_flags(flags), ..KernelOptions::default() };
    let options = Options { features, ..options() };
    let Target { device, .. } = target::serve_with(env, disk, &options, &kernel)?;
    Ok(device)
}

/// The first writes make space in a file, which file systems flush for; these come after.
fn write_all(device: &mut Device, value: u8) -> Result<()> {
    (0..WRITES).try_for_each(|n| device.write(n * 8, &[value; 4096])).map_err(Into::into)
}

fn check(env: &Env, disk: &Disk, flushes: &Flushes) -> Result<()> {
    println!("on {disk}");
    let all = options().features;
    let mut back = device(env, disk, 0, all)?;
    write_all(&mut back, 1)?;
    back.flush()?;
    let count = flushes.of(|| write_all(&mut back, 2))?;
    // A file system has reasons of its own, now and then.
    ensure!(count < WRITES / 2, "{count} flushes for {WRITES} writes in write-back mode");
    for n in 0..3_u8 {
        let count = flushes.of(|| {
            back.write(0, &[n; 4096])?;
            Ok(back.flush()?)
        })?;
        ensure!(count >= 1, "a FLUSH did not reach the disk");
    }
    drop(back);
    durable(&mut device(env, disk, abi::OPT_WRITE_THROUGH, all)?, flushes)
        .context("write-through mode")?;
    let without = all & !bit(F_FLUSH) & !bit(F_CONFIG_WCE);
    durable(&mut device(env, disk, 0, without)?, flushes).context("FLUSH was not negotiated")
}

fn durable(device: &mut Device, flushes: &Flushes) -> Result<()> {
    let count = flushes.of(|| write_all(device, 3))?;
    ensure!(count >= WRITES, "{count} flushes for {WRITES} writes");
    let count = flushes.of(|| Ok(device.write_zeroes(0, 8, 0)?))?;
    ensure!(count >= 1, "{count} flushes for a WRITE_ZEROES");
    Ok(())
}
