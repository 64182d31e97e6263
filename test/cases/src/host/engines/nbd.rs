// SPDX-License-Identifier: Apache-2.0
//! NBD: servers die and come back, are slow, fail requests, and grow.

use super::{NO_FLUSHES, STEP, Serving, changed, wait_for_any, wait_out};
use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{NbdExport, NbdOptions, NbdProxy, wait_until};
use crate::host::load::allow_errors;
use crate::host::operate::wait_for_size;
use anyhow::{Context, Result, ensure};
use kit::outcome::expect_io_errors;
use kit::set::Set::{Full, Plain, Uring};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

cases! { Host;
    "engine-nbd-reconnect", Plain,
        "NBD over two gateways: one is lost, then both, and new connections replace the lost ones under load on the kernel plane, without an I/O error",
        |env| reconnect(&env.over_daemon());
    "engine-nbd-reconnect-uring", Full,
        "the same on the io_uring plane",
        |env| reconnect(&env.on(Plane::Uring));
    "engine-nbd-lost", Full,
        "all gateways are lost for longer than the dead-connection time-out on the kernel plane: requests fail until they are back",
        |env| lost(&env.over_daemon());
    "engine-nbd-lost-uring", Full,
        "the same on the io_uring plane",
        |env| lost(&env.on(Plane::Uring));
    "engine-nbd-slow-uring", Full,
        "a slow server of NBD is told by --io-timeout, and so is its end",
        |env| slow(&env.on(Plane::Uring));
    "engine-nbd-errors", Plain,
        "a server of NBD fails reads and writes for a while on the kernel plane: the guest gets these errors, and no other",
        |env| errors(&env.over_daemon());
    "engine-nbd-errors-uring", Full,
        "the same on the io_uring plane",
        |env| errors(&env.on(Plane::Uring));
    "engine-nbd-halt", Full,
        "a server of NBD fails reads and writes on the kernel plane: the disk halts, tells it, and loses no request when it is resumed",
        |env| halt(&env.over_daemon());
    "engine-nbd-halt-uring", Full,
        "the same on the io_uring plane",
        |env| halt(&env.on(Plane::Uring));
    "engine-nbd-retry", Full,
        "a server of NBD fails a third of its requests and tries them again on the kernel plane: the guest gets no error",
        |env| retry(&env.over_daemon());
    "engine-nbd-retry-uring", Full,
        "the same on the io_uring plane",
        |env| retry(&env.on(Plane::Uring));
    "engine-nbd-grow", Full,
        "an export of NBD grows under load on the kernel plane, and the daemon notices it",
        |env| grow(&env.over_daemon());
    "engine-nbd-grow-uring", Uring,
        "the same on the io_uring plane",
        |env| grow(&env.on(Plane::Uring));
    "engine-nbd-proxy", Full,
        "nbd-client on a local nbdkit that reconnects: the server is lost and comes back under load on the kernel plane, without an I/O error",
        |env| proxy(&env.over_daemon());
    "engine-nbd-proxy-uring", Full,
        "the same on the io_uring plane",
        |env| proxy(&env.on(Plane::Uring));
}

const MIB: u64 = 1 << 20;
/// Seconds without a connection after which requests fail, where it shall happen.
const DEAD_SOON: u32 = 2;

fn reconnect(env: &Env) -> Result<()> {
    let (disk, mut export) = NbdExport::attach(&NbdOptions::default())?;
    let done = changed(env, &disk, &Serving::default(), |handles, _, _| {
        for round in 0..env.rounds(1) {
            let gateway = (round % 2) as usize;
            let step = |what: &str| format!("round {round}, gateway {gateway} {what}");
            handles.wait_for_progress(STEP).with_context(|| step("before"))?;
            export.kill(gateway)?;
            handles.wait_for_progress(STEP).with_context(|| step("is lost"))?;
            export.start(&[])?;
            export.reconnect(gateway)?;
            handles.wait_for_progress(STEP).with_context(|| step("is back"))?;
            export.kill_all()?;
            wait_out(handles)?;
            export.start(&[])?;
            export.reconnect_all()?;
        }
        handles.wait_for_progress(STEP).context("after the last round")
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    Ok(())
}

fn lost(env: &Env) -> Result<()> {
    expect_io_errors();
    let options = NbdOptions { dead: DEAD_SOON, ..NbdOptions::default() };
    let (disk, mut export) = NbdExport::attach(&options)?;
    let done = changed(env, &disk, &NO_FLUSHES, |handles, daemon, specs| {
        handles.wait_for_progress(STEP).context("before the loss")?;
        allow_errors(specs, true);
        export.kill_all()?;
        wait_for_any(daemon, "queue_failed_requests_total")?;
        handles.wait_for_progress(STEP).context("after the loss")?;
        export.start(&[])?;
        export.reconnect_all()?;
        allow_errors(specs, false);
        handles.wait_for_progress(STEP).context("after the return")
    })?;
    ensure!(done.errors > 0, "the guest got no error");
    Ok(())
}

fn slow(env: &Env) -> Result<()> {
    let slow = ["--filter=delay", "rdelay=2", "wdelay=2"];
    let options = NbdOptions { arguments: &slow, ..NbdOptions::default() };
    let (disk, mut export) = NbdExport::attach(&options)?;
    let serving = Serving { options: &["--io-timeout", "1"], ..Serving::default() };
    let done = changed(env, &disk, &serving, |handles, daemon, _| {
        wait_until("a stalled queue", || Ok((daemon.total("stalled_queues")? > 0).then_some(())))?;
        let lines = daemon.lines_with("the storage does not answer");
        ensure!(!lines.is_empty(), "the log does not tell of the slow server");
        export.kill_all()?;
        export.start(&[])?;
        export.reconnect_all()?;
        handles.wait_for_progress(STEP).context("on the fast server")?;
        wait_until("the end of the stall", || {
            Ok((daemon.total("stalled_queues")? == 0).then_some(()))
        })
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    Ok(())
}

/// Starts servers that fail half of the reads and writes while the returned file exists.
fn start_failing(export: &mut NbdExport) -> Result<PathBuf> {
    let trigger = export.path("fail");
    let file = format!("error-file={}", trigger.display());
    let failing = ["--filter=error", "error-pread-rate=50%", "error-pwrite-rate=50%", &file];
    export.kill_all()?;
    export.start(&failing)?;
    export.reconnect_all()?;
    Ok(trigger)
}

fn halt(env: &Env) -> Result<()> {
    expect_io_errors();
    let (disk, mut export) = NbdExport::attach(&NbdOptions::default())?;
    let serving = Serving { options: &["--on-error", "stop"], ..Serving::default() };
    let done = changed(env, &disk, &serving, |handles, daemon, _| {
        let trigger = start_failing(&mut export)?;
        for round in 1..=env.rounds(3) {
            handles.wait_for_progress(STEP).with_context(|| format!("before halt {round}"))?;
            let mut events = daemon.events()?;
            std::fs::write(&trigger, "")?;
            let halted = events.wait_for("halted")?;
            ensure!(daemon.total("halted")? == 1, "no halt in the metrics: {halted}");
            std::fs::remove_file(&trigger)?;
            // A request that had met the trigger halts the disk again.
            wait_until("the end of the halt", || {
                daemon.control(&["resume"])?;
                let left = daemon.total("halted")? + daemon.total("queue_kept_requests")?;
                Ok((left == 0).then_some(()))
            })?;
            events.wait_for("halt_ended")?;
            ensure!(daemon.total("halts_total")? >= round, "halt {round} is not counted");
        }
        ensure!(!daemon.lines_with("the disk is halted").is_empty(), "the log tells no halt");
        handles.wait_for_progress(STEP).context("after the last halt")
    })?;
    ensure!(done.errors == 0, "the guest got {} errors", done.errors);
    Ok(())
}

fn errors(env: &Env) -> Result<()> {
    expect_io_errors();
    let (disk, mut export) = NbdExport::attach(&NbdOptions::default())?;
    let done = changed(env, &disk, &Serving::default(), |handles, daemon, specs| {
        let trigger = start_failing(&mut export)?;
        handles.wait_for_progress(STEP).context("before the errors")?;
        let failed = daemon.total("queue_failed_requests_total")?;
        ensure!(failed == 0, "{failed} requests failed without a trigger");
        allow_errors(specs, true);
        std::fs::write(&trigger, "")?;
        wait_for_any(daemon, "queue_failed_requests_total")?;
        std::fs::remove_file(&trigger)?;
        // Requests that met the trigger complete.
        handles.wait_for_progress(STEP).context("after the errors")?;
        allow_errors(specs, false);
        handles.wait_for_progress(STEP).context("without errors")
    })?;
    ensure!(done.errors > 0, "the guest got no error");
    Ok(())
}

fn retry(env: &Env) -> Result<()> {
    let arguments = [
        "--filter=retry-request",
        "retry-request-retries=50",
        "retry-request-delay=10ms",
        "--filter=error",
        "error-pread-rate=30%",
        "error-pwrite-rate=30%",
    ];
    let options = NbdOptions { arguments: &arguments, ..NbdOptions::default() };
    let (disk, _export) = NbdExport::attach(&options)?;
    let done = changed(env, &disk, &Serving::default(), |handles, _, _| {
        handles.wait_for_progress(env.rounds(40))
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    Ok(())
}

fn grow(env: &Env) -> Result<()> {
    let (disk, mut export) = NbdExport::attach(&NbdOptions::default())?;
    changed(env, &disk, &Serving::default(), |handles, daemon, _| {
        handles.wait_for_progress(STEP).context("before the growth")?;
        let bytes = disk.bytes + MIB;
        export.grow(bytes)?;
        // A gateway tells the size at the handshake, and refuses requests beyond it.
        for gateway in 0..2 {
            export.kill(gateway)?;
            export.start(&[])?;
            export.reconnect(gateway)?;
        }
        export.resize_device(bytes)?;
        wait_for_size(handles, daemon, bytes)?;
        handles.wait_for_progress(STEP).context("after the growth")
    })?;
    // Beyond the old end.
    let (file, data, at) = (disk.open_as(false, false)?, vec![0x5a; 4096], disk.bytes);
    file.write_all_at(&data, at)?;
    file.sync_all()?;
    let exported = std::fs::read(export.file())?;
    ensure!(exported[at as usize..][..4096] == data, "other bytes than were written");
    Ok(())
}

fn proxy(env: &Env) -> Result<()> {
    let arguments = ["--filter=retry", "retries=100", "retry-delay=1", "retry-exponential=no"];
    let (disk, mut proxy) = NbdProxy::attach(&arguments)?;
    let done = changed(env, &disk, &Serving::default(), |handles, _, _| {
        for round in 0..env.rounds(2) {
            handles.wait_for_progress(STEP).with_context(|| format!("before round {round}"))?;
            proxy.server.kill_all()?;
            wait_out(handles)?;
            proxy.server.start(&[])?;
        }
        handles.wait_for_progress(STEP).context("after the last round")
    })?;
    ensure!(done.errors == 0, "{} errors", done.errors);
    Ok(())
}
