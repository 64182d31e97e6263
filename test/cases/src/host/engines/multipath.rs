// SPDX-License-Identifier: Apache-2.0
//! Device-mapper multipath over two sessions of iSCSI: paths fail and return, the unit grows.

use super::{Length, STEP, Serving, changed, doctor_says, wait_out};
use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Iscsi, Multipath, SessionState};
use crate::host::operate::wait_for_size;
use anyhow::{Context, Result, ensure};
use kit::outcome::expect_io_errors;
use kit::set::Set::{Full, Uring};

cases! { Host;
    "engine-multipath-path-uring", Uring,
        "device-mapper multipath over two portals of iSCSI on the io_uring plane: a path is lost and returns under load, without an I/O error",
        |env| paths(&env.on(Plane::Uring), Length::Short);
    "engine-multipath", Full,
        "device-mapper multipath over two portals of iSCSI on the kernel plane: each path is lost and returns, then both, and the unit grows, without an I/O error",
        |env| paths(&env.over_daemon(), Length::Long);
    "engine-multipath-uring", Full,
        "the same on the io_uring plane",
        |env| paths(&env.on(Plane::Uring), Length::Long);
}

const MIB: u64 = 1 << 20;
/// Seconds after which requests of a lost session fail, so that the other path gets them.
const WAIT_SHORT: u32 = 1;

fn return_path(iscsi: &Iscsi, multipath: &Multipath, path: u16) -> Result<()> {
    iscsi.mend(path)?;
    iscsi.wait_for(path, SessionState::LoggedIn)?;
    multipath.reinstate(path)
}

fn paths(env: &Env, length: Length) -> Result<()> {
    // Requests of a lost path fail; the other path serves them.
    expect_io_errors();
    let (iscsi, multipath, disk) = Iscsi::connect_multipath(WAIT_SHORT)?;
    let says = |wanted: &str| doctor_says(env, &disk, "device_paths", wanted);
    let done = changed(env, &disk, &Serving::default(), |handles, daemon, _| {
        let lost: &[u16] = if length == Length::Short { &[0] } else { &[0, 1] };
        for &path in lost {
            let step = |what: &str| format!("path {path} {what}");
            handles.wait_for_progress(STEP).with_context(|| step("before"))?;
            says("ok")?;
            iscsi.cut(path)?;
            multipath.wait_for_failed(path)?;
            handles.wait_for_progress(STEP).with_context(|| step("is lost"))?;
            says("warn")?;
            return_path(&iscsi, &multipath, path)?;
        }
        if length == Length::Short {
            return handles.wait_for_progress(STEP).context("on both paths");
        }
        for path in [0, 1] {
            iscsi.cut(path)?;
        }
        for path in [0, 1] {
            multipath.wait_for_failed(path)?;
        }
        wait_out(handles)?;
        for path in [0, 1] {
            return_path(&iscsi, &multipath, path)?;
        }
        handles.wait_for_progress(STEP).context("on both paths")?;
        let bytes = disk.bytes + MIB;
        iscsi.grow(bytes)?;
        multipath.grow(bytes)?;
        wait_for_size(handles, daemon, bytes)?;
        handles.wait_for_progress(STEP).context("after the growth")
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    Ok(())
}
