// SPDX-License-Identifier: Apache-2.0
//! DRBD: the peer and the own disk are lost and return.

use super::{Length, STEP, Serving, changed, doctor_says};
use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::Drbd;
use anyhow::{Context, Result, ensure};
use kit::set::Set::{Full, Plain};

cases! { Host;
    "engine-drbd-peer", Plain,
        "DRBD on the kernel plane: the peer is lost and synchronised again under load, without an I/O error, and the legs are equal in the end",
        |env| mirror(&env.over_daemon(), Length::Short);
    "engine-drbd", Full,
        "DRBD on the kernel plane: the peer, then the own disk is lost and synchronised again under load, without an I/O error, and the legs are equal in the end",
        |env| mirror(&env.over_daemon(), Length::Long);
    "engine-drbd-uring", Full,
        "the same on the io_uring plane",
        |env| mirror(&env.on(Plane::Uring), Length::Long);
}

fn mirror(env: &Env, length: Length) -> Result<()> {
    let drbd = Drbd::create()?;
    let (disk, legs) = drbd.parts();
    let says = |wanted: &str| doctor_says(env, disk, "device_engine", wanted);
    let done = changed(env, disk, &Serving::default(), |handles, _, _| {
        let rounds = if length == Length::Short { 1 } else { env.rounds(2) };
        for round in 0..rounds {
            let step = |what: &str| format!("round {round}, {what}");
            handles.wait_for_progress(STEP).with_context(|| step("before"))?;
            says("ok")?;
            Drbd::lose_peer()?;
            handles.wait_for_progress(STEP).with_context(|| step("without the peer"))?;
            says("warn")?;
            Drbd::return_peer()?;
            if length == Length::Short {
                continue;
            }
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
