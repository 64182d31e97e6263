// SPDX-License-Identifier: Apache-2.0
//! Images in memory: the queue's worker copies, and nothing goes to the workqueue that need not.

use crate::case::cases;
use crate::host::durability::handed_on;
use crate::host::env::{Env, Plane};
use crate::host::fixture::image_in_memory;
use crate::host::integrity::{self, Setup};
use crate::host::target::{self, options};
use anyhow::{Context, Result, ensure};
use driver::Device;
use driver::kernel::KernelOptions;
use kit::outcome::expect_io_errors;
use kit::set::Set::Gating;

cases! { Host;
    "in-memory", Gating,
        "an image on a tmpfs is read, written and flushed by the queue's worker; its file system gets full",
        in_memory;
}

/// Requests of each kind.
const REQUESTS: u64 = 20;
/// Bytes of each request.
const BYTES: usize = 64 << 10;

fn in_memory(env: &Env) -> Result<()> {
    let env = env.on(Plane::Direct);
    for direct in [true, false] {
        // Room for all of the image.
        integrity::run(&env, image_in_memory(160, direct), Setup::usual(20))
            .with_context(|| format!("the load, O_DIRECT {direct}"))?;
        by_the_worker(&env, direct).with_context(|| format!("O_DIRECT {direct}"))?;
    }
    without_room(&env)
}

fn by_the_worker(env: &Env, direct: bool) -> Result<()> {
    let disk = image_in_memory(160, direct)?;
    let mut device = target::serve_with(env, &disk, &options(), &KernelOptions::default())?.device;
    let before = handed_on(&mut device)?;
    for number in 0..REQUESTS {
        let (sector, value) = (number * (BYTES as u64 / 512), number as u8 + 1);
        device.write(sector, &vec![value; BYTES])?;
        device.flush()?;
        let mut data = vec![0; BYTES];
        device.read(sector, &mut data)?;
        ensure!(data == vec![value; BYTES], "the image has {} at sector {sector}", data[0]);
    }
    let by_others = handed_on(&mut device)? - before;
    ensure!(by_others == 0, "the workqueue did {by_others} requests");
    device.discard(0, 8)?;
    ensure!(handed_on(&mut device)? == before + 1, "the counter does not count a DISCARD");
    Ok(())
}

/// Fills the file system, which fails writes and nothing else.
fn without_room(env: &Env) -> Result<()> {
    const ROOM_MIB: u64 = 4;
    const MIB_SECTORS: u64 = (1 << 20) / 512;
    expect_io_errors();
    let disk = image_in_memory(ROOM_MIB, true)?;
    let mut device = target::serve_with(env, &disk, &options(), &KernelOptions::default())?.device;
    let write = |device: &mut Device, mib: u64| {
        let mut parts = (0..MIB_SECTORS).step_by(BYTES / 512);
        parts.try_for_each(|part| device.write(mib * MIB_SECTORS + part, &[7; BYTES]))
    };
    for mib in 0..ROOM_MIB {
        write(&mut device, mib).with_context(|| format!("{mib} MiB of {ROOM_MIB}"))?;
    }
    ensure!(write(&mut device, ROOM_MIB).is_err(), "a write without room succeeded");
    let mut data = [0; BYTES];
    device.read(0, &mut data)?;
    ensure!(data == [7; BYTES], "the image has {}", data[0]);
    device.discard(0, MIB_SECTORS as u32)?;
    write(&mut device, ROOM_MIB).context("after a DISCARD has made room")
}
