// SPDX-License-Identifier: Apache-2.0
//! N queues on N cores.

use anyhow::Result;
use kit::metric::{Set, in_turn};

use super::args::Args;
use super::plan::point_of;
use super::sample::sample;
use crate::load::{Load, Mode};
use crate::server::{Spec, Storage};

/// Method of the scaling measurement, for the report.
pub(super) const METHOD: &str = "One queue: server and client share one core. Two queues: the \
    server may use two cores, and the client's thread of each queue is pinned to one of them. The \
    client sleeps on the call eventfd. A server that scales doubles its rate.";

/// Measures one and two queues of each server, which starts anew on its cores each time.
pub(super) fn measure(
    args: &Args,
    storage: Storage,
    specs: &[Spec],
    cpus: [usize; 2],
    set: &mut Set,
) -> Result<()> {
    for queues in [1_u16, 2] {
        let cpus = &cpus[..queues.into()];
        let depth = args.depths.iter().copied().max().unwrap_or(32);
        let load = Load { queues, cpus: cpus.to_vec(), ..args.load(Mode::Event, depth) };
        let servers = specs.iter().map(|s| s.start(cpus)).collect::<Result<Vec<_>>>()?;
        for round in 0..args.rounds() {
            for server in in_turn(&servers, round) {
                let figures = sample(args, server, &load, cpus)?;
                set.add(&server.name, &point_of(storage, &load), figures);
            }
        }
    }
    Ok(())
}
