// SPDX-License-Identifier: Apache-2.0
//! DRBD: the peer and the own disk are lost and return.

use super::{STEP, Serving, changed, doctor_says};
use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::Drbd;
use anyhow::{Context, Result, ensure};
use kit::set::Set::Full;

cases! { Host;
    "engine-drbd", Full,
        "DRBD on the kernel plane: the peer, then the own disk is lost and synchronised again under load, without an I/O error, and the legs are equal in the end",
        |env| mirror(&env.over_daemon());
    "engine-drbd-uring", Full,
        "the same on the io_uring plane",
        |env| mirror(&env.on(Plane::Uring));
}

fn mirror(env: &Env) -> Result<()> {
    let drbd = Drbd::create()?;
    let (disk, legs) = drbd.parts();
    let says = |wanted: &str| doctor_says(env, disk, "device_engine", wanted);
    let done = changed(env, disk, &Serving::default(), |handles, _, _| {
        for round in 0..env.rounds(2) {
            let step = |what: &str| format!("round {round}, {what}");
            handles.wait_for_progress(STEP).with_context(|| step("before"))?;
            says("ok")?;
            Drbd::lose_peer()?;
            handles.wait_for_progress(STEP).with_context(|| step("without the peer"))?;
            says("warn")?;
            Drbd::return_peer()?;
            Drbd::lose_leg()?;
            handles.wait_for_progress(STEP).with_context(|| step("without the own disk"))?;
            says("warn")?;
            Drbd::return_leg(legs)?;
        }
        handles.wait_for_progress(STEP).context("on both legs")
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    drbd.compare()
}
