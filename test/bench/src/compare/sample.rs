// SPDX-License-Identifier: Apache-2.0
//! Samples of one server.

use std::time::Duration;

use anyhow::{Context, Result};
use kit::metric::{CPU, Figures, IDLE_CPU, Metric};

use super::args::Args;
use crate::client::Client;
use crate::cpu;
use crate::load::{Load, Mode};
use crate::server::Server;
use crate::syscalls::{SYSCALLS, Syscalls};

/// Share of the time that server and client waited for a CPU which another task had.
pub(super) const WAITED: Metric = Metric::new("waited", "%");
/// A sample counts as disturbed above this share.
const WAITED_PERCENT_MAX: f64 = 3.0;

/// One measurement; repeats a disturbed one a few times and keeps the least disturbed.
pub(super) fn sample(
    args: &Args,
    server: &Server,
    load: &Load,
    server_cpus: &[usize],
) -> Result<Figures> {
    let once = || {
        let what = || format!("measuring {} at depth {}", server.name, load.depth);
        sample_once(args, server, load, server_cpus).with_context(what)
    };
    let (mut best, mut least) = once()?;
    let shared = server_cpus.iter().any(|cpu| load.cpus.contains(cpu));
    let tries = if shared { 0 } else { args.retries };
    for _ in 0..tries {
        if least <= WAITED_PERCENT_MAX {
            break;
        }
        let (again, waited) = once()?;
        if waited < least {
            (best, least) = (again, waited);
        }
    }
    best.push((WAITED, least));
    Ok(best)
}

/// One measurement of a server whose storage is new, without a warm-up or a repetition: both would leave it used.
pub(super) fn sample_new(
    args: &Args,
    server: &Server,
    load: &Load,
    cpus: &[usize],
) -> Result<Figures> {
    let mut client = Client::connect(&server.socket, load)?;
    server.pin(cpus)?;
    let (mut figures, waited) = measure(args, &mut client, server, load)?;
    figures.push((WAITED, waited));
    Ok(figures)
}

/// Connects, warms up, measures, hangs up; gives the percentage of waiting as well.
fn sample_once(
    args: &Args,
    server: &Server,
    load: &Load,
    cpus: &[usize],
) -> Result<(Figures, f64)> {
    args.go_on()?;
    let mut client = Client::connect(&server.socket, load)?;
    server.pin(cpus)?;
    client.run(args.duration() / 5, &load.cpus)?;
    let (mut figures, waited) = measure(args, &mut client, server, load)?;
    if args.syscalls {
        let mut calls = Syscalls::of(server.pid)?;
        let ios = client.run(args.duration() / 5, &load.cpus)?.ios;
        figures.push((SYSCALLS, calls.count()? as f64 / ios.max(1) as f64));
    }
    Ok((figures, waited))
}

/// Measures a connected client once; gives the percentage of waiting as well.
fn measure(
    args: &Args,
    client: &mut Client,
    server: &Server,
    load: &Load,
) -> Result<(Figures, f64)> {
    let before = cpu::times(server.pid)?;
    let outcome = client.run(args.duration(), &load.cpus)?;
    let spent = cpu::times(server.pid)?.since(&before);
    let waited = spent.waited + outcome.waited;
    let mut figures = outcome.figures();
    figures.push((CPU, outcome.us_per_io(spent.busy)));
    Ok((figures, 100.0 * waited.as_secs_f64() / outcome.elapsed.as_secs_f64()))
}

/// CPU time with a client that has worked for a moment and then does nothing.
pub(super) fn idle(args: &Args, server: &Server) -> Result<Figures> {
    let load = args.load(Mode::Event, 1);
    let mut client = Client::connect(&server.socket, &load)?;
    client.run(args.duration() / 5, &load.cpus)?;
    std::thread::sleep(Duration::from_millis(500));
    let time = Duration::from_secs(if args.quick { 1 } else { 5 });
    let before = cpu::times(server.pid)?;
    std::thread::sleep(time);
    let busy = cpu::times(server.pid)?.since(&before).busy;
    Ok(vec![(IDLE_CPU, 100.0 * busy.as_secs_f64() / time.as_secs_f64())])
}
