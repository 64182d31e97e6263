// SPDX-License-Identifier: Apache-2.0
//! A busy disk of a daemon, alone and beside a disk whose storage does not answer.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use driver::{Device, Request};
use kit::metric::{CPU, IOPS, P50, P99, Row, Set, in_turn, point};
use kit::report::{Column, Goal, Section};
use virtio_spec::blk::S_OK;

use super::fleet::null_disk;
use crate::client::Client;
use crate::cpu;
use crate::load::Load;
use crate::one_daemon::{LIGHT_BYTES, OneDaemon, light_driver};

const ALONE: &str = "alone";
const BESIDE: &str = "beside a stalled disk";
/// Requests that the storage of the stalled disk has.
const STUCK: usize = 4;
/// Requests of the busy driver.
const DEPTHS: [u16; 2] = [1, 32];
/// The least part of its rate that the busy disk keeps: two windows differ by as much here.
const RATE_GOAL: f64 = 0.95;

const METHOD: &str = "One daemon with two null disks on one thread. The driver of the first one keeps 4 KiB reads in \
    flight and sleeps. Windows in which the storage of the second disk answers none of its requests, and windows in \
    which it has none, take turns. Medians over the rounds.";

/// Measures both at each depth, as many times as there are rounds.
pub(super) fn measure(program: &Path, rounds: u32, window: Duration, set: &mut Set) -> Result<()> {
    let directory = tempfile::Builder::new().prefix("bench-stalled-").tempdir()?;
    let null = null_disk();
    // An answer that comes after the window.
    let delay = 2 * window + Duration::from_secs(1);
    let stalled = format!("{null}wrap = \"delay:us={},ops=read\"\n", delay.as_micros());
    let served = OneDaemon::start(program, directory.path(), &[null, stalled], &["--threads=1"])?;
    let mut stalled = light_driver(&served.sockets[1])?;
    for depth in DEPTHS {
        let load = Load::random_reads(depth);
        let mut client = Client::connect(&served.sockets[0].display().to_string(), &load)?;
        client.run(window / 5, &[])?;
        let mut run = |subject| -> Result<()> {
            let before = cpu::times(served.daemon.id())?;
            let outcome = client.run(window, &[])?;
            let busy = cpu::times(served.daemon.id())?.since(&before).busy;
            let mut figures = outcome.figures();
            figures.push((CPU, outcome.us_per_io(busy)));
            set.add(subject, &point(&[("depth", &depth)]), figures);
            Ok(())
        };
        for round in 0..rounds {
            for &subject in in_turn(&[ALONE, BESIDE], round) {
                if subject == ALONE {
                    run(subject)?;
                    continue;
                }
                stick(&mut stalled)?;
                run(subject)?;
                release(&mut stalled)?;
            }
        }
    }
    Ok(())
}

/// Sends requests to the stalled disk.
fn stick(device: &mut Device) -> Result<()> {
    let layout = device.layout();
    for _ in 0..STUCK {
        device.queue(0).submit(&Request::read(0, LIGHT_BYTES / STUCK), &layout)?;
    }
    Ok(())
}

/// Waits for their end, before which the window has to be over.
fn release(device: &mut Device) -> Result<()> {
    ensure!(device.queue(0).try_collect()?.is_none(), "the stalled disk answered in the window");
    for _ in 0..STUCK {
        let (_, done) = device.queue(0).collect()?;
        ensure!(done.status == Some(S_OK), "a read ended with {:?}", done.status);
    }
    Ok(())
}

pub(super) fn section(set: &Set) -> Section {
    let columns = [
        Column::count("depth"),
        Column::subject("busy disk"),
        Column::median("kIOPS", IOPS, 1e3, 1),
        Column::median("p50 us", P50, 1.0, 1),
        Column::median("p99 us", P99, 1.0, 1),
        Column::median("CPU us", CPU, 1.0, 2),
    ];
    Section::new("A busy disk beside a stalled one", METHOD, set, &columns)
}

/// The busy disk loses nothing.
pub(super) fn goals(set: &Set) -> Vec<Goal> {
    let goal = |beside: &Row| {
        let alone = set.at(ALONE, &beside.point)?;
        let name = format!("rate {BESIDE} over that {ALONE}, depth {}", beside.label("depth"));
        Some(Goal::at_least(name, beside.over(alone, IOPS), RATE_GOAL))
    };
    set.of(BESIDE).filter_map(goal).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_disk_that_loses_a_tenth_misses_its_goal() {
        let mut set = Set::default();
        for (subject, depth, rate) in
            [(ALONE, 1, 100.0), (BESIDE, 1, 96.0), (ALONE, 32, 100.0), (BESIDE, 32, 90.0)]
        {
            set.add(subject, &point(&[("depth", &depth)]), vec![(IOPS, rate)]);
        }
        let met: Vec<bool> = goals(&set).iter().map(|goal| goal.met).collect();
        assert_eq!(met, [true, false]);
    }
}
