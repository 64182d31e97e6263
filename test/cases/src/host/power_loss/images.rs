// SPDX-License-Identifier: Apache-2.0
//! Power cuts while a disk goes from its image to an overlay and back, on ext4: the files that a cut
//! leaves have all promised data, in the old chain or in the new one.

use super::log::{self, Entry};
use super::{Findings, Logged, QUEUES, SECTORS, Writer, cuts, image_after, marks};
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, Dm, FileSystem, image_on};
use crate::host::load::stamp::SECTOR;
use crate::host::target::{self, Target, options};
use anyhow::{Context, Result, ensure};
use driver::{Options, kernel::KernelOptions};
use kit::rng::Rng;
use kit::system::run;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// Rounds of writes between two exchanges.
const ROUNDS: usize = 3;
/// Marks of the log around each exchange.
const BEGIN: &str = "begin";
const END: &str = "end";
/// The mark of an image that has an overlay.
const OVERLAY: &str = "user.vhost-blk.overlay";
/// Exit codes of `vhost-blk check` for an image without errors; the second one means leaks.
const SOUND: [i32; 2] = [0, 3];

/// Images in which the disks of the cuts are.
#[derive(Debug, Default)]
struct Images {
    first: u64,
    overlay: u64,
}

/// Takes `turns` snapshots and merges each, and checks `count` power cuts, half of them during an
/// exchange, and two more, before and after the first snapshot: chance may cut one of the images only.
pub(super) fn keep_promises(env: &Env, turns: u64, count: u64) -> Result<()> {
    let env = &env.on(Plane::Uring);
    let kind = FileSystem::Ext4;
    let Logged { disk, dm, log } = Logged::new()?;
    let bytes = disk.bytes;
    let disk = image_on(kind, disk, true)?;
    run("sync", &[])?;
    let promises = load(env, &disk, &dm, turns)?;
    let entries = Logged { disk, dm, log }.into_log()?;
    let (marks, mut rng) = (marks(&entries, promises.len())?, Rng::new(env.seed()));
    let mut positions = cuts(&entries, &marks, count / 2, &mut rng);
    let exchanges = exchanges(&entries)?;
    positions.extend(in_exchanges(&exchanges, count / 2, &mut rng));
    positions.extend([exchanges[0].0, exchanges[0].1]);
    positions.sort_unstable();
    let count = positions.len();
    let mut replay = log::Replay::new(&entries, bytes, kind.physical_block_bytes());
    let (mut found, mut images) = (Findings::default(), Images::default());
    for at in positions {
        let kept = marks.iter().take_while(|&&mark| mark < at).count();
        let cut = replay.cut(at, &mut rng)?;
        found.dropped += cut.lost;
        let read = |directory: &Path| content(&env.bin.join("vhost-blk"), directory, &mut images);
        let content = image_after(&cut, read).with_context(|| format!("cut at {at}"))?;
        let content = content.unwrap_or_else(|| vec![0; SECTORS as usize * SECTOR]);
        found.compare(&promises[kept - 1], |sector| &content[sector as usize * SECTOR..][..SECTOR]);
    }
    println!("{turns} snapshots and commits, {count} cuts: {found:?}, {images:?}");
    ensure!(found.promised > 0 && found.dropped > 0, "nothing was at stake");
    ensure!(images.first > 0 && images.overlay > 0, "the cuts have one image only: {images:?}");
    ensure!(found.missing == 0, "durable data is gone: {found:?}");
    Ok(())
}

/// Positions of the begin and the end of each exchange; the first one is a snapshot.
fn exchanges(entries: &[Entry]) -> Result<Vec<(usize, usize)>> {
    let places = |text: &str| -> Vec<usize> {
        let is = |entry: &Entry| entry.mark.as_deref() == Some(text);
        entries.iter().enumerate().filter(|(_, entry)| is(entry)).map(|(at, _)| at).collect()
    };
    let spans: Vec<_> = places(BEGIN).into_iter().zip(places(END)).collect();
    ensure!(!spans.is_empty(), "the marks of the exchanges are lost");
    Ok(spans)
}

/// Positions of power cuts during exchanges.
fn in_exchanges(exchanges: &[(usize, usize)], count: u64, rng: &mut Rng) -> Vec<usize> {
    let mut cut = |_| {
        let &(begin, end) = rng.pick(exchanges);
        begin + 1 + rng.below((end - begin) as u64) as usize
    };
    (0..count).map(&mut cut).collect()
}

/// A load whose promises are in the log.
struct Load<'a> {
    writer: Writer<'a>,
    logged: &'a Dm,
    promises: Vec<Vec<u32>>,
}

impl Load<'_> {
    fn round(&mut self) -> Result<()> {
        let number = self.promises.len();
        let promised = self.writer.round().with_context(|| format!("round {number}"))?;
        self.promises.push(promised.to_vec());
        self.logged.message(&["mark", &number.to_string()])
    }
}

/// Writes while the images change; returns the promises of each round.
fn load(env: &Env, disk: &Disk, logged: &Dm, turns: u64) -> Result<Vec<Vec<u32>>> {
    let options = Options { num_queues: QUEUES, ..options() };
    let Target { mut device, daemon } =
        target::serve_with(env, disk, &options, &KernelOptions::default())?;
    let daemon = daemon.context("there is no daemon")?;
    let writer = Writer::new(&mut device, QUEUES.into(), false, env.seed());
    let mut load = Load { writer, logged, promises: Vec::new() };
    let overlay = disk.path.with_file_name("overlay.qcow2");
    let path = overlay.to_string_lossy();
    for _ in 0..env.rounds(turns) {
        for words in [&["snapshot", "--to", &path][..], &["commit"]] {
            (0..ROUNDS).try_for_each(|_| load.round())?;
            logged.message(&["mark", BEGIN])?;
            thread::scope(|scope| {
                let order = scope.spawn(|| daemon.control(words));
                load.round()?;
                while !order.is_finished() {
                    load.round()?;
                }
                order.join().expect("the command does not panic").map(drop)
            })
            .with_context(|| format!("{words:?}"))?;
            logged.message(&["mark", END])?;
        }
        (0..ROUNDS).try_for_each(|_| load.round())?;
        std::fs::remove_file(&overlay)?;
    }
    Ok(load.promises)
}

/// Content of the disk in a directory that a cut left, by the mark of its first image.
fn content(program: &Path, directory: &Path, images: &mut Images) -> Result<Vec<u8>> {
    let first = directory.join("image.raw");
    let raw = directory.join("content.raw");
    let (file, path) = match overlay_of(&first)? {
        None => {
            images.first += 1;
            (File::open(&first)?, first)
        }
        Some(name) => {
            images.overlay += 1;
            let overlay = directory.join(name.file_name().context("a mark without a name")?);
            let (from, to) = (overlay.to_string_lossy(), raw.to_string_lossy());
            let checked = Command::new(program).args(["check", &from]).output()?;
            let is_sound = checked.status.code().is_some_and(|code| SOUND.contains(&code));
            ensure!(is_sound, "{from} is not sound: {checked:?}");
            let options = ["--format", "qcow2", "--allow-backing", "same-dir"];
            run(
                &program.to_string_lossy(),
                &[&["convert"][..], &options, &[&*from, &*to]].concat(),
            )?;
            (File::open(&raw)?, raw)
        }
    };
    let mut bytes = vec![0; SECTORS as usize * SECTOR];
    file.read_exact_at(&mut bytes, 0).with_context(|| path.display().to_string())?;
    Ok(bytes)
}

/// The overlay in the mark of an image.
fn overlay_of(image: &Path) -> Result<Option<PathBuf>> {
    let mut path = vec![0; 4096];
    match rustix::fs::getxattr(image, OVERLAY, &mut path[..]) {
        Ok(len) => Ok(Some(PathBuf::from(std::str::from_utf8(&path[..len])?))),
        Err(rustix::io::Errno::NODATA) => Ok(None),
        Err(error) => Err(error).context("the mark cannot be read"),
    }
}
