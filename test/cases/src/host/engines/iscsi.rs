// SPDX-License-Identifier: Apache-2.0
//! iSCSI with one session: it is lost and comes back, the target restarts, the unit grows.

use super::{Length, NO_FLUSHES, STEP, Serving, changed, doctor_says, wait_for_any, wait_out};
use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Iscsi, SessionState, wait_until};
use crate::host::load::allow_errors;
use crate::host::operate::wait_for_size;
use anyhow::{Context, Result, ensure};
use kit::outcome::expect_io_errors;
use kit::set::Set::{Full, Plain};

cases! { Host;
    "engine-iscsi-session", Plain,
        "iSCSI on the kernel plane: the session is lost and comes back under load, without an I/O error",
        |env| session(&env.over_daemon(), Length::Short);
    "engine-iscsi", Full,
        "iSCSI on the kernel plane: the session is lost and comes back, the target restarts, and the unit grows under load, without an I/O error",
        |env| session(&env.over_daemon(), Length::Long);
    "engine-iscsi-uring", Full,
        "the same on the io_uring plane",
        |env| session(&env.on(Plane::Uring), Length::Long);
    "engine-iscsi-lost", Full,
        "the session is lost for longer than its time-out on the kernel plane: requests fail until it is back",
        |env| lost(&env.over_daemon());
    "engine-iscsi-lost-uring", Full,
        "the same on the io_uring plane",
        |env| lost(&env.on(Plane::Uring));
    "engine-iscsi-halt", Full,
        "the session is lost for longer than its time-out with --on-error stop on the kernel plane: the disk halts, and a resume after the return leaves no error to the guest",
        |env| halt(&env.over_daemon());
    "engine-iscsi-halt-uring", Full,
        "the same on the io_uring plane",
        |env| halt(&env.on(Plane::Uring));
}

const MIB: u64 = 1 << 20;
/// Seconds for which requests wait for the session: more than any outage.
const WAIT_LONG: u32 = 120;
/// The same where they shall fail.
const WAIT_SHORT: u32 = 2;

fn session(env: &Env, length: Length) -> Result<()> {
    let (mut iscsi, disk) = Iscsi::connect(WAIT_LONG)?;
    let done = changed(env, &disk, &Serving::default(), |handles, daemon, _| {
        let rounds = if length == Length::Short { 1 } else { env.rounds(2) };
        for round in 0..rounds {
            handles.wait_for_progress(STEP).with_context(|| format!("before round {round}"))?;
            let message = doctor_says(env, &disk, "device_engine", "ok")?;
            ensure!(message.contains("LOGGED_IN"), "doctor: {message}");
            iscsi.cut(0)?;
            iscsi.wait_for(0, SessionState::Failed)?;
            wait_out(handles)?;
            if round % 2 == 1 { iscsi.restart() } else { iscsi.mend(0) }?;
            iscsi.wait_for(0, SessionState::LoggedIn)?;
        }
        if length == Length::Short {
            return handles.wait_for_progress(STEP).context("after the return");
        }
        let bytes = disk.bytes + MIB;
        iscsi.grow(bytes)?;
        wait_for_size(handles, daemon, bytes)?;
        handles.wait_for_progress(STEP).context("after the growth")
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    Ok(())
}

fn lost(env: &Env) -> Result<()> {
    expect_io_errors();
    let (iscsi, disk) = Iscsi::connect(WAIT_SHORT)?;
    let done = changed(env, &disk, &NO_FLUSHES, |handles, daemon, specs| {
        handles.wait_for_progress(STEP).context("before the loss")?;
        allow_errors(specs, true);
        iscsi.cut(0)?;
        wait_for_any(daemon, "queue_failed_requests_total")?;
        iscsi.wait_for(0, SessionState::Free)?;
        handles.wait_for_progress(STEP).context("after the loss")?;
        iscsi.mend(0)?;
        iscsi.wait_for(0, SessionState::LoggedIn)?;
        // Requests that met the loss complete.
        handles.wait_for_progress(STEP).context("after the return")?;
        allow_errors(specs, false);
        handles.wait_for_progress(STEP).context("without errors")
    })?;
    ensure!(done.errors > 0, "the guest got no error");
    Ok(())
}

fn halt(env: &Env) -> Result<()> {
    expect_io_errors();
    let (iscsi, disk) = Iscsi::connect(WAIT_SHORT)?;
    let serving = Serving { options: &["--on-error", "stop"], ..NO_FLUSHES };
    let done = changed(env, &disk, &serving, |handles, daemon, _| {
        handles.wait_for_progress(STEP).context("before the loss")?;
        iscsi.cut(0)?;
        wait_until("the disk to halt", || {
            Ok((!daemon.lines_with("the disk is halted").is_empty()).then_some(()))
        })?;
        wait_out(handles)?;
        iscsi.mend(0)?;
        iscsi.wait_for(0, SessionState::LoggedIn)?;
        daemon.control(&["resume"])?;
        handles.wait_for_progress(STEP).context("after the resume")
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    Ok(())
}
