// SPDX-License-Identifier: Apache-2.0
//! N queues on N cores.

use anyhow::Result;

use crate::compare::{Args, sample};
use crate::load::{Load, Mode};
use crate::report::Row;
use crate::server::{Spec, Storage};

/// Method of the scaling measurement, for the report.
pub const METHOD: &str = "One queue: server and client share one core. Two queues: the server may \
    use two cores, and the client's thread of each queue is pinned to one of them. The client \
    sleeps on the call eventfd. A server that scales doubles its rate.";

/// Measures one and two queues of each server, which starts anew on its cores each time.
pub fn measure(
    args: &Args,
    storage: Storage,
    specs: &[Spec],
    cpus: [usize; 2],
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for queues in [1_u16, 2] {
        let cpus = &cpus[..queues.into()];
        let depth = args.depths.iter().copied().max().unwrap_or(32);
        let mut load = args.load(Mode::Event, depth);
        load.queues = queues;
        load.cpus = cpus.to_vec();
        rows.extend(one_point(args, storage, specs, &load)?);
    }
    Ok(rows)
}

fn one_point(args: &Args, storage: Storage, specs: &[Spec], load: &Load) -> Result<Vec<Row>> {
    let servers = specs.iter().map(|s| s.start(&load.cpus)).collect::<Result<Vec<_>>>()?;
    let mut rows: Vec<_> = servers.iter().map(|s| Row::new(storage, load, s)).collect();
    for _ in 0..args.rounds() {
        for (server, row) in servers.iter().zip(&mut rows) {
            row.samples.push(sample(args, server, load, &load.cpus)?);
        }
    }
    Ok(rows)
}
