// SPDX-License-Identifier: Apache-2.0
//! A mirror of md over two servers, each of which is lost and returns.

use super::{Length, STEP, Serving, changed};
use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::Raid;
use anyhow::{Context, Result, ensure};
use kit::outcome::expect_io_errors;
use kit::set::Set::{Full, Uring};

cases! { Host;
    "engine-raid1-leg-uring", Uring,
        "a mirror of md over two servers of NBD: a leg is lost and returns under load on the io_uring plane, without an I/O error, and both are equal in the end",
        |env| mirror(&env.on(Plane::Uring), Length::Short);
    "engine-raid1", Full,
        "a mirror of md over two servers of NBD: each leg is lost and returns under load on the kernel plane, without an I/O error, and both are equal in the end",
        |env| mirror(&env.over_daemon(), Length::Long);
    "engine-raid1-uring", Full,
        "the same on the io_uring plane",
        |env| mirror(&env.on(Plane::Uring), Length::Long);
}

/// Bytes of a leg.
const LEG_BYTES: u64 = 8 << 20;
/// The same in the short case: the synchronisation under load takes a tenth of a second for 64 KiB.
const SHORT_LEG_BYTES: u64 = 4 << 20;

fn mirror(env: &Env, length: Length) -> Result<()> {
    // Requests of the lost leg fail; the array hides that.
    expect_io_errors();
    let (bytes, lost): (u64, &[usize]) = match length {
        Length::Short => (SHORT_LEG_BYTES, &[1]),
        Length::Long => (LEG_BYTES, &[1, 0]),
    };
    let mut raid = Raid::create(bytes)?;
    let (disk, legs) = raid.parts();
    let done = changed(env, disk, &Serving::default(), |handles, _, _| {
        for &leg in lost {
            let step = |what: &str| format!("leg {leg} {what}");
            handles.wait_for_progress(STEP).with_context(|| step("before"))?;
            Raid::lose(legs, leg).with_context(|| step("lost"))?;
            handles.wait_for_progress(STEP).with_context(|| step("is lost"))?;
            Raid::return_leg(legs, leg).with_context(|| step("returns"))?;
        }
        handles.wait_for_progress(STEP).context("on both legs")
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    raid.compare()
}
