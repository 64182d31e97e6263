// SPDX-License-Identifier: Apache-2.0
//! Power cuts with a file system on the served disk: after each cut it mounts, is sound, and has
//! all files that `fsync` made durable.

use super::{Logged, cuts, log, marks};
use crate::host::env::{Env, Plane};
use crate::host::fixture::{FileSystem, Nbd};
use crate::host::target::{self, Target, options};
use anyhow::{Context, Result, ensure};
use driver::{Options, kernel::KernelOptions};
use kit::loop_device::LoopDevice;
use kit::rng::Rng;
use kit::system::{modprobe, run};
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Bytes of the largest file.
const FILE_MAX: u64 = 32 << 10;

/// Content of a file.
fn content(number: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed ^ (number as u64) << 20);
    let len = 1 + rng.below(FILE_MAX) as usize;
    rng.bytes(len)
}

/// Writes `files` durable files, cuts the power `count` times, and checks the files after each cut.
pub(crate) fn keeps_promises(
    env: &Env,
    plane: Plane,
    kind: FileSystem,
    files: usize,
    count: u64,
) -> Result<()> {
    let env = &env.on(plane);
    let logged = Logged::new()?;
    let options = Options { scratch_bytes: 64 << 20, ..options() };
    let Target { device, daemon } =
        target::serve_with(env, &logged.disk, &options, &KernelOptions::default())?;
    let nbd = Nbd::serve(device, logged.disk.bytes)?;
    let written = on_mount(Path::new(Nbd::PATH), kind, true, |place| {
        (0..files).try_for_each(|number| {
            write_files(place, number, env.seed()).with_context(|| format!("file {number}"))?;
            logged.dm.message(&["mark", &number.to_string()])
        })
    });
    nbd.end()?;
    drop(daemon);
    written?;
    let bytes = logged.disk.bytes;
    let entries = logged.into_log()?;
    let (marks, mut rng) = (marks(&entries, files)?, Rng::new(env.seed()));
    let mut replay = log::Replay::new(&entries, bytes, kind.physical_block_bytes());
    let mut dropped = 0;
    for at in cuts(&entries, &marks, count, &mut rng) {
        let kept = marks.iter().take_while(|&&mark| mark < at).count();
        let cut = replay.cut(at, &mut rng)?;
        dropped += cut.lost;
        let image = tempfile::NamedTempFile::new()?;
        cut.write_to(image.path())?;
        check(image.path(), kind, kept, env.seed())
            .with_context(|| format!("after a loss of power at entry {at}, seed {}", env.seed()))?;
    }
    println!(
        "{plane:?}, {kind:?}: {count} losses of power, {files} files; {dropped} writes dropped"
    );
    ensure!(dropped > 0, "nothing was at stake");
    Ok(())
}

/// Writes one file that is durable, and one that may be lost.
fn write_files(place: &Path, number: usize, seed: u64) -> Result<()> {
    let bytes = content(number, seed);
    std::fs::write(place.join(format!("lost-{number}")), &bytes)?;
    let mut file = File::create(place.join(format!("kept-{number}")))?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    Ok(File::open(place)?.sync_all()?)
}

fn check(image: &Path, kind: FileSystem, kept: usize, seed: u64) -> Result<()> {
    modprobe("loop", &[])?;
    let device = LoopDevice::attach(image, &[])?;
    let looked = on_mount(&device.path, kind, false, |place| {
        (0..kept).try_for_each(|number| {
            let name = format!("kept-{number}");
            let found = std::fs::read(place.join(&name)).with_context(|| name.clone())?;
            ensure!(found == content(number, seed), "{name} has other content than was written");
            Ok(())
        })
    });
    looked.and(kind.check(&device.path.to_string_lossy()))
}

/// Mounts a device, optionally with a new file system, and calls a function with the mount point.
fn on_mount(
    device: &Path,
    kind: FileSystem,
    format: bool,
    act: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let device = device.to_string_lossy();
    if format {
        kind.make(&device)?;
    }
    let directory = tempfile::tempdir()?;
    let place = directory.path().to_string_lossy();
    run("mount", &[&device, &place])?;
    let done = act(directory.path());
    run("umount", &[&place])?;
    done
}
