// SPDX-License-Identifier: Apache-2.0
//! Ceph RBD by the kernel's client: OSDs are killed and return, the image grows.

use super::{STEP, Serving, changed, doctor_says, wait_out};
use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::Ceph;
use crate::host::operate::wait_for_size;
use anyhow::{Context, Result, ensure};
use kit::set::Set;

cases! { Host;
    "engine-rbd", Set::Ceph,
        "an image of a Ceph cluster on the kernel plane: an OSD is killed, then both, they return, and the image grows under load, without an I/O error",
        |env| cluster(&env.over_daemon());
    "engine-rbd-uring", Set::Ceph,
        "the same on the io_uring plane",
        |env| cluster(&env.on(Plane::Uring));
}

const MIB: u64 = 1 << 20;

fn cluster(env: &Env) -> Result<()> {
    let (mut ceph, disk) = Ceph::start()?;
    let done = changed(env, &disk, &Serving::default(), |handles, daemon, _| {
        handles.wait_for_progress(STEP).context("before")?;
        let message = doctor_says(env, &disk, "device_engine", "ok")?;
        ensure!(message.contains("disks/disk1"), "doctor: {message}");
        ceph.kill(1)?;
        ceph.wait_for_up(1)?;
        handles.wait_for_progress(STEP).context("on one OSD")?;
        ceph.start_osd(1)?;
        ceph.wait_for_up(2)?;
        handles.wait_for_progress(STEP).context("on both OSDs")?;
        ceph.kill(0)?;
        ceph.kill(1)?;
        wait_out(handles)?;
        (0..2).try_for_each(|osd| ceph.start_osd(osd))?;
        handles.wait_for_progress(STEP).context("after the loss of both OSDs")?;
        let bytes = disk.bytes + MIB;
        ceph.grow(bytes)?;
        wait_for_size(handles, daemon, bytes)?;
        handles.wait_for_progress(STEP).context("after the growth")
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    Ok(())
}
