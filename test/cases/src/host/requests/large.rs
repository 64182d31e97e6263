// SPDX-License-Identifier: Apache-2.0
//! Requests larger than the module's largest piece (32 MiB), as firmware sends them.

use super::{pattern, same};
use crate::case::cases;
use crate::host::disks::usual;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, FileSystem, image};
use crate::host::target::{self, Target, options};
use crate::host::visibility::counters;
use anyhow::{Context, Result, ensure};
use driver::{Device, Layout, Options, Request};
use kit::set::Set::Plain;
use kit::system::run;
use virtio_spec::blk::{S_IOERR, S_OK};

cases! { Host;
    "requests-large", Plain,
        "requests of more than the module moves at a time, on null_blk",
        |env| large(env, usual());
    "requests-large-file", Plain,
        "requests of more than the module moves at a time, on an image opened with O_DIRECT",
        |env| large(env, image(FileSystem::Ext4, true));
    "requests-large-frozen", Plain,
        "a large write that waits for a frozen file system keeps no other request waiting",
        |env| frozen(&env.on(Plane::Direct));
}

/// One whole piece, a part of another, and an odd end.
const BYTES: usize = (40 << 20) + 4096;
/// First sector of the requests.
const SECTOR: u64 = 8;
/// Bytes of the small requests that check the data.
const CHUNK: usize = 1 << 20;

/// Writes and reads large requests, in buffers that the disk can use directly and in others.
fn large(env: &Env, disk: Result<Disk>) -> Result<()> {
    let disk = disk?;
    println!("on {disk}");
    let options = Options { scratch_bytes: 64 << 20, ..options() };
    let Target { mut device, daemon: _daemon } = target::serve(env, &disk, &options)?;
    for (seed, misalign) in [(1, 0), (2, 3)] {
        let layout = Layout { misalign, ..device.layout() };
        moves(&mut device, &layout, seed).with_context(|| format!("misaligned by {misalign}"))?;
    }
    // The disk ends inside the second piece.
    let layout = device.layout();
    let beyond = Request::read(disk.sectors() - (34 << 11), BYTES);
    let status = device.queue(0).execute(&beyond, &layout)?.status;
    ensure!(status == Some(S_IOERR), "a read beyond the end ended with {status:?}");
    Ok(())
}

fn moves(device: &mut Device, layout: &Layout, seed: u64) -> Result<()> {
    let data = pattern(BYTES, seed);
    let wrote = device.queue(0).execute(&Request::write(SECTOR, &data), layout)?;
    let got = (wrote.status, wrote.written);
    ensure!(got == (Some(S_OK), 1), "the write ended with {got:?}");
    for (n, expected) in data.chunks(CHUNK).enumerate() {
        let mut found = vec![0; expected.len()];
        device.read(SECTOR + (n * CHUNK / 512) as u64, &mut found)?;
        same(&found, expected).with_context(|| format!("MiB {n} of the write"))?;
    }
    let read = device.queue(0).execute(&Request::read(SECTOR, BYTES), layout)?;
    let got = (read.status, read.written);
    ensure!(got == (Some(S_OK), BYTES as u32 + 1), "the read ended with {got:?}");
    same(&read.data, &data).context("the read")
}

/// Reads beside the write that waits.
const READS: usize = 3;

/// Starts a large write on a frozen file system: the queue serves reads, and answers questions.
fn frozen(env: &Env) -> Result<()> {
    let disk = image(FileSystem::Ext4, true)?;
    println!("on {disk}");
    let options = Options { scratch_bytes: 64 << 20, ..options() };
    let Target { mut device, daemon: _daemon } = target::serve(env, &disk, &options)?;
    let directory = disk.path.parent().context("the image has no directory")?.to_string_lossy();
    let data = pattern(BYTES, 3);
    run("fsfreeze", &["--freeze", &directory])?;
    let served = beside_a_write_that_waits(&mut device, &data);
    run("fsfreeze", &["--unfreeze", &directory])?;
    served.context("while the file system is frozen")?;
    let (_, wrote) = device.queue(0).collect().context("after the thaw")?;
    ensure!(wrote.status == Some(S_OK), "the write ended with {:?}", wrote.status);
    let mut found = vec![0; CHUNK];
    device.read(SECTOR, &mut found)?;
    same(&found, &data[..CHUNK])
}

fn beside_a_write_that_waits(device: &mut Device, data: &[u8]) -> Result<()> {
    let layout = device.layout();
    let write = device.queue(0).submit(&Request::write(SECTOR, data), &layout)?;
    for n in 0..READS {
        device.queue(0).submit(&Request::read(0, 4096), &layout)?;
        let (id, read) = device.queue(0).collect().with_context(|| format!("read {n}"))?;
        ensure!(id != write, "the write has ended");
        ensure!(read.status == Some(S_OK), "read {n} ended with {:?}", read.status);
    }
    let inflight = counters(device)?.get("inflight").copied();
    ensure!(inflight == Some(1), "{inflight:?} requests are in flight, not the write alone");
    Ok(())
}
