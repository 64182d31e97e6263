// SPDX-License-Identifier: Apache-2.0
//! The host loses power, and with it the volatile cache of its disk. dm-log-writes below the served
//! disk logs all writes in the order in which they became durable. From the log, the cases make the
//! disk at any moment, without the writes that were not flushed.

mod images;
mod log;
mod mounted;
mod writer;

pub(crate) use mounted::keeps_promises as mounted;

use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, Dm, FileSystem, NullBlkOptions, image_on, null_blk};
use crate::host::load::stamp::{self, SECTOR};
use crate::host::target::{self, Target, options};
use anyhow::{Context, Result, ensure};
use driver::Options;
use driver::kernel::{KernelOptions, abi};
use kit::outcome::expect_log;
use kit::power_cut;
use kit::rng::Rng;
use kit::set::Set::{Full, Plain, Uring};
use kit::system::{modprobe, run, run_quietly};
use log::{Cut, Entry, Replay};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use writer::{SECTORS, Writer};

cases! { Host;
    "power-loss-block-device", Plain,
        "80 losses of power with the disk's volatile cache, in each mode of each plane: all that a FLUSH or a write-through write made durable is there",
        |env| keeps_promises(env, &on_planes(Storage::BlockDevice, 16, 80));
    "power-loss-images", Uring,
        "losses of power while a disk on ext4 goes to an overlay and back: the old chain or the new one, with all that a FLUSH made durable",
        |env| images::keep_promises(env, 2, 16);
    "power-loss-images-long", Full,
        "hundreds of them",
        |env| images::keep_promises(env, 20, 300);
    "power-loss-ext4", Full,
        "losses of power below an image on ext4, on each plane",
        |env| keeps_promises(env, &SHORT_ON_EXT4);
    "power-loss-lies", Full,
        "a daemon or a disk that answers a FLUSH without doing it loses data, and that is noticed",
        |env| notices_lies(env, &[Storage::BlockDevice, ON_EXT4]);
    "power-loss-mounted-ext4", Full,
        "hundreds of losses of power with ext4 mounted on the served disk, on each plane: sound, with every file that fsync made durable",
        |env| [Plane::Direct, Plane::Uring].into_iter().try_for_each(|plane| {
            mounted(env, plane, FileSystem::Ext4, 60, 120)
        });
    "power-loss-mounted-xfs", Full,
        "the same with XFS",
        |env| [Plane::Direct, Plane::Uring].into_iter().try_for_each(|plane| {
            mounted(env, plane, FileSystem::Xfs, 60, 120)
        });
    "power-loss-block-device-long", Full,
        "thousands of losses of power on each plane, and on the kernel's by way of the daemon",
        |env| keeps_promises(env, &on_planes(Storage::BlockDevice, 600, 2000));
    "power-loss-ext4-long", Full,
        "hundreds of losses of power below an image on ext4, with O_DIRECT and without",
        |env| keeps_promises(env, &both_ways(FileSystem::Ext4));
    "power-loss-xfs-long", Full,
        "hundreds of losses of power below an image on XFS, with O_DIRECT and without",
        |env| keeps_promises(env, &both_ways(FileSystem::Xfs));
    "power-loss-lies-xfs", Full,
        "a daemon or a disk that lies, below an image on XFS",
        |env| notices_lies(env, &[Storage::Image(FileSystem::Xfs, true)]);
}

const ON_EXT4: Storage = Storage::Image(FileSystem::Ext4, false);
const SHORT_ON_EXT4: [Trial; 3] = [
    trial(Plane::Direct, ON_EXT4, false, 10, 8),
    trial(Plane::Uring, ON_EXT4, false, 10, 8),
    trial(Plane::Uring, Storage::Image(FileSystem::Ext4, true), true, 10, 8),
];

const fn trial(
    plane: Plane,
    storage: Storage,
    write_through: bool,
    rounds: u64,
    cuts: u64,
) -> Trial {
    Trial { plane, storage, write_through, rounds, cuts }
}

/// Trials on both planes, with and without a write cache.
fn on_planes(storage: Storage, rounds: u64, cuts: u64) -> Vec<Trial> {
    let both = |plane| [false, true].map(|through| trial(plane, storage, through, rounds, cuts));
    [Plane::Direct, Plane::Uring].into_iter().flat_map(both).collect()
}

fn both_ways(kind: FileSystem) -> Vec<Trial> {
    let on = |direct| on_planes(Storage::Image(kind, direct), 100, 100);
    [true, false]
        .into_iter()
        .flat_map(on)
        .chain([trial(Plane::Kernel, Storage::Image(kind, true), false, 100, 100)])
        .collect()
}

const QUEUES: u16 = 2;
/// MiB of the log's device; it takes memory as it is written.
const LOG_MIB: u64 = 512;
/// MiB of the disk, or of the file system that contains an image.
const DISK_MIB: u64 = 512;
/// Wrapper that completes a FLUSH without executing it.
const NO_FLUSH: &str = "lie:ops=flush";

/// Storage of the served sectors.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Storage {
    /// The disk itself.
    BlockDevice,
    /// An image on a file system on the disk, opened with O_DIRECT or not.
    Image(FileSystem, bool),
}

/// Parameters of a trial.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trial {
    /// Data plane that runs the queues.
    pub(crate) plane: Plane,
    /// Storage of the served disk.
    pub(crate) storage: Storage,
    /// The device has no write cache: each write is durable when it ends.
    pub(crate) write_through: bool,
    /// Number of rounds of writes, each of which ends with promises.
    pub(crate) rounds: u64,
    /// Number of power cuts.
    pub(crate) cuts: u64,
}

/// The part that ignores a FLUSH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Liar {
    Nobody,
    /// The daemon, with a hidden wrapper.
    Daemon,
    /// The disk: it reports no volatile cache, so the kernel sends it no flush.
    Disk,
}

/// Totals over the disks of all cuts.
#[derive(Debug, Default)]
struct Findings {
    /// Writes that the cuts lost, completely or in part.
    dropped: u64,
    /// Promised sectors.
    promised: u64,
    /// Promised sectors that were missing.
    missing: u64,
    /// Description of the first missing sector.
    first: Option<String>,
}

/// A disk with a log of all writes.
struct Logged {
    /// The disk.
    disk: Disk,
    dm: Dm,
    log: Disk,
}

impl Logged {
    fn new() -> Result<Self> {
        let plain = NullBlkOptions { mib: DISK_MIB, ..NullBlkOptions::USUAL };
        let (log, _) = null_blk(NullBlkOptions { mib: LOG_MIB, ..plain })?;
        let (disk, dm) = Dm::logged(null_blk(plain)?.0, &log)?;
        Ok(Self { disk, dm, log })
    }

    /// Reads the log, which is complete when the logging target is gone.
    fn into_log(self) -> Result<Vec<Entry>> {
        drop(self.disk);
        log::read(&self.log.path)
    }
}

/// Positions of the marks whose text is their number.
fn marks(log: &[Entry], count: usize) -> Result<Vec<usize>> {
    let place = |n: usize| {
        let text = n.to_string();
        log.iter().position(|entry| entry.mark.as_deref() == Some(&text)).context("a mark is lost")
    };
    (0..count).map(place).collect()
}

/// Positions of the power cuts, in ascending order. Every second cut is right after a promise, when
/// all promised data must be present; every fourth one is where the disk's cache holds most.
fn cuts(log: &[Entry], marks: &[usize], count: u64, rng: &mut Rng) -> Vec<usize> {
    let full = log::full_caches(log, marks[0] + 1);
    let mut cut = |n: u64| match n % 4 {
        0 | 2 => rng.pick(marks) + 1,
        1 if !full.is_empty() => *rng.pick(&full),
        _ => marks[0] + 1 + rng.below((log.len() - marks[0]) as u64) as usize,
    };
    let mut cuts: Vec<_> = (0..count).map(&mut cut).collect();
    cuts.sort_unstable();
    cuts
}

/// Checks that each trial finds all promised data at every cut.
pub(crate) fn keeps_promises(env: &Env, trials: &[Trial]) -> Result<()> {
    for trial in trials {
        let found = findings(env, trial, Liar::Nobody).with_context(|| format!("{trial:?}"))?;
        println!("{trial:?}: {found:?}");
        // The cache never holds write-through writes.
        let at_stake = found.dropped > 0 || trial.write_through;
        ensure!(found.promised > 0 && at_stake, "nothing was at stake: {found:?}");
        ensure!(found.missing == 0, "{trial:?}: durable data is gone: {found:?}");
    }
    Ok(())
}

/// The inverse check: if a FLUSH has no effect, promised data must be missing.
pub(crate) fn notices_lies(env: &Env, storages: &[Storage]) -> Result<()> {
    expect_log("EXT4-fs error (device loop");
    for &storage in storages {
        for (plane, liar) in
            [(Plane::Uring, Liar::Daemon), (Plane::Uring, Liar::Disk), (Plane::Direct, Liar::Disk)]
        {
            let trial = Trial { plane, storage, write_through: false, rounds: 6, cuts: 4 };
            let found = findings(env, &trial, liar).with_context(|| format!("{trial:?}"))?;
            println!("{trial:?}, {liar:?} lies: {found:?}");
            ensure!(found.missing > 0, "{trial:?}: nothing is missing although {liar:?} lies");
        }
    }
    Ok(())
}

fn findings(env: &Env, trial: &Trial, liar: Liar) -> Result<Findings> {
    let wrap = (liar == Liar::Daemon).then(|| NO_FLUSH.to_owned());
    let env = &Env { plane: trial.plane, wrap, ..env.clone() };
    let Logged { disk, dm, log } = Logged::new()?;
    let bytes = disk.bytes;
    let cache = disk.sysfs()?.join("queue/write_cache");
    let disk = match trial.storage {
        Storage::BlockDevice => disk,
        Storage::Image(kind, direct) => image_on(kind, disk, direct)?,
    };
    run("sync", &[])?;
    let promises = load(env, trial, &disk, &dm, (liar == Liar::Disk).then_some(&cache))?;
    let entries = Logged { disk, dm, log }.into_log()?;
    judge(trial, &entries, bytes, &promises, &mut Rng::new(env.seed()))
}

/// Writes, and marks each promised round in the log; returns the promises of each round. The
/// attribute `lie` reports no cache as soon as the disk is served.
fn load(
    env: &Env,
    trial: &Trial,
    disk: &Disk,
    logged: &Dm,
    lie: Option<&PathBuf>,
) -> Result<Vec<Vec<u32>>> {
    let flags = if trial.write_through { abi::OPT_WRITE_THROUGH } else { 0 };
    let kernel =
        KernelOptions { options: abi::BlkOptions::with_flags(flags), ..KernelOptions::default() };
    let options = Options { num_queues: QUEUES, ..options() };
    let Target { mut device, daemon: _daemon } = target::serve_with(env, disk, &options, &kernel)?;
    if let Some(attribute) = lie {
        std::fs::write(attribute, "write through")?;
    }
    let mut writer = Writer::new(&mut device, QUEUES.into(), trial.write_through, env.seed());
    let mut promises = Vec::new();
    for round in 0..env.rounds(trial.rounds) {
        promises.push(writer.round().with_context(|| format!("round {round}"))?.to_vec());
        logged.message(&["mark", &round.to_string()])?;
    }
    Ok(promises)
}

fn judge(
    trial: &Trial,
    log: &[Entry],
    bytes: u64,
    promises: &[Vec<u32>],
    rng: &mut Rng,
) -> Result<Findings> {
    let marks = marks(log, promises.len())?;
    let block = match trial.storage {
        Storage::BlockDevice => power_cut::SECTOR,
        Storage::Image(kind, _) => kind.physical_block_bytes(),
    };
    let mut replay = Replay::new(log, bytes, block);
    let mut found = Findings::default();
    for at in cuts(log, &marks, trial.cuts, rng) {
        let kept = marks.iter().take_while(|&&mark| mark < at).count();
        let cut = replay.cut(at, rng)?;
        found.dropped += cut.lost;
        let promised = &promises[kept - 1];
        match trial.storage {
            Storage::BlockDevice => found.compare(promised, |sector| cut.sector(sector)),
            Storage::Image(..) => {
                match image_after(&cut, image_in).with_context(|| format!("cut at {at}"))? {
                    Some(bytes) => {
                        found.compare(promised, |sector| {
                            &bytes[sector as usize * SECTOR..][..SECTOR]
                        });
                    }
                    None => found.compare(promised, |_| &[0; SECTOR]),
                }
            }
        }
    }
    Ok(found)
}

/// Mounts the file system's disk after a cut, which replays its journal; returns the written part
/// of the image that `read` finds there, or `None` if the file system or the image in it is lost.
fn image_after(
    cut: &Cut<'_>,
    read: impl FnOnce(&Path) -> Result<Vec<u8>>,
) -> Result<Option<Vec<u8>>> {
    modprobe("loop", &[])?;
    let directory = tempfile::tempdir()?;
    let (disk, place) = (directory.path().join("disk"), directory.path().join("place"));
    cut.write_to(&disk)?;
    std::fs::create_dir(&place)?;
    let place_name = place.to_string_lossy();
    if let Err(why) = run("mount", &["-o", "loop", &disk.to_string_lossy(), &place_name]) {
        println!("a cut leaves no file system: {why:#}");
        return Ok(None);
    }
    let bytes = read(&place);
    run_quietly("umount", &[&place_name]);
    Ok(bytes.inspect_err(|why| println!("a cut leaves no image: {why:#}")).ok())
}

fn image_in(directory: &Path) -> Result<Vec<u8>> {
    let mut bytes = vec![0; SECTORS as usize * SECTOR];
    File::open(directory.join("image.raw"))?.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

impl Findings {
    fn compare<'a>(&mut self, promised: &[u32], sector: impl Fn(u64) -> &'a [u8]) {
        for (number, &promised) in (0..).zip(promised).filter(|(_, promised)| **promised > 0) {
            self.promised += 1;
            let found = stamp::generation_of(sector(number), number);
            if found.is_none_or(|generation| generation < promised) {
                self.missing += 1;
                self.first.get_or_insert_with(|| {
                    format!("sector {number}: generation {found:?}, promised {promised}")
                });
            }
        }
    }
}
