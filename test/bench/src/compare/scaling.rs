// SPDX-License-Identifier: Apache-2.0
//! N queues on N cores.

use anyhow::Result;
use kit::metric::{Set, in_turn};

use super::args::Args;
use super::sample::sample;
use crate::load::{Load, Mode};
use crate::plan::point_of;
use crate::server::{Spec, Storage};

/// Method of the scaling measurement, for the report.
pub(super) const METHOD: &str = "One queue: server and client share one core. Two queues: the \
    server may use two cores, and the client's thread of each queue is pinned to one of them. With \
    four cores also `apart`: the server has one or two, and the client as many others. The client \
    sleeps on the call eventfd. A server that scales doubles its rate; the goal is that of the depth 32.";

/// Label of the rows whose client and server have cores of their own.
pub(super) const CPUS: &str = "CPUs";
pub(super) const APART: &str = "apart";

/// Measures one and two queues of each server, which starts anew on its cores each time.
pub(super) fn measure(
    args: &Args,
    storage: Storage,
    specs: &[Spec],
    usable: &[usize],
    set: &mut Set,
) -> Result<()> {
    for (queues, is_apart) in [(1_u16, false), (2, false), (1, true), (2, true)] {
        let Some((cpus, client_cpus)) = cpus(usable, queues.into(), is_apart) else { continue };
        let servers = specs.iter().map(|s| s.start(cpus)).collect::<Result<Vec<_>>>()?;
        for round in 0..args.rounds() {
            for depth in args.scaling_depths() {
                let client_cpus = client_cpus.to_vec();
                let load = Load { queues, cpus: client_cpus, ..args.load(Mode::Event, depth) };
                let mut point = point_of(storage, &load);
                if is_apart {
                    point.insert(CPUS.to_owned(), APART.to_owned());
                }
                for server in in_turn(&servers, round) {
                    set.add(&server.name, &point, sample(args, server, &load, cpus)?);
                }
            }
        }
    }
    Ok(())
}

/// CPUs of the server and of the client; none: there are too few. The servers of one and of two
/// queues begin with the same CPU.
fn cpus(usable: &[usize], queues: usize, is_apart: bool) -> Option<(&[usize], &[usize])> {
    let (server, others) = usable.split_at_checked(2)?;
    let server = &server[..queues];
    let client = if is_apart { others.get(..2)?.get(..queues)? } else { server };
    Some((server, client))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_and_server_are_apart_where_there_are_four_cpus() {
        let two = [4, 5];
        assert_eq!(cpus(&two, 2, false), Some((&two[..], &two[..])));
        assert_eq!([1, 2].map(|queues| cpus(&[4, 5, 6], queues, true)), [None, None]);
        let four = [4, 5, 6, 7];
        assert_eq!(cpus(&four, 1, true), Some((&four[..1], &four[2..3])));
        assert_eq!(cpus(&four, 2, true), Some((&four[..2], &four[2..])));
    }
}
