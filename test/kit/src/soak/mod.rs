// SPDX-License-Identifier: Apache-2.0
//! A guest writes and verifies while its disk is operated, killed and broken in random order.
//!
//! * `plan`: the kinds of events, and their order.
//! * `served`: the daemon.
//! * `writer`: the load in the guest, which also measures pauses.
//! * `event`: the effect of each event.
//! * `images`: the files of the disk and its backups.
//! * `moment`: the check of a copy.
//! * `report`: the result.
//!
//! [`run`] needs a booted guest ([`Machine`]) on a daemon ([`Served`]). QEMU needs [`memory_args`]
//! for the memory that is plugged in.

mod event;
mod images;
mod moment;
mod plan;
mod report;
mod served;
mod writer;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

pub use plan::Kind;
use plan::Parts;
pub use report::Report;
pub use served::{Beside, Device, SERIAL, Served};

use crate::agent::Shell;
use crate::interrupt;
use crate::load::Round;
use crate::outcome::skip_part;
use crate::rng::{Rng, mix};
use writer::Writer;

/// The device node of the kernel plane.
const KERNEL_PLANE: &str = "/dev/vhost-blk";

/// Modules of memory that a run plugs in at most.
pub const MODULES_MAX: usize = 6;

/// QEMU's arguments for a guest of this memory that gets more.
pub fn memory_args(mib: u32) -> Vec<String> {
    vec!["-m".to_owned(), format!("{mib}M,slots={MODULES_MAX},maxmem=4G")]
}

/// A guest under QEMU.
pub trait Machine: Shell {
    /// Runs a command of QEMU's monitor.
    fn monitor(&mut self, command: &str, arguments: Value) -> Result<Value>;

    /// The end of QEMU's output and of the guest's console.
    fn tail(&self) -> String;
}

/// The length of a run.
#[derive(Clone, Copy, Debug)]
pub enum Length {
    /// Number of events.
    Events(usize),
    /// Events begin until this time is over.
    Time(Duration),
}

/// One run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed of the order and the values of the events.
    pub seed: u64,
    /// The length.
    pub length: Length,
    /// The device nodes of the disks in the guest, in the order of [`Served::serials`].
    pub nodes: Vec<String>,
    /// The command that repeats this run.
    pub repeat: String,
}

/// A run in progress.
struct Soak<'a, M> {
    machine: &'a mut M,
    served: &'a mut Served,
    node: &'a str,
    writer: Writer,
    /// The writers of the other disks of the daemon.
    beside: Vec<Writer>,
    /// Modules of memory so far.
    modules: usize,
    /// The words of the last `ctl limit`.
    limit: Vec<String>,
}

/// Runs the events, then ends the load and compares all data once more. The file system in the
/// guest is unmounted then.
///
/// # Errors
/// An event failed, or the guest saw an error, wrong bytes or a hang. Stderr has the logs, the events
/// so far, the seed, and the command that repeats the run.
pub fn run<M: Machine>(machine: &mut M, served: &mut Served, options: &Options) -> Result<Report> {
    let has_kernel = Path::new(KERNEL_PLANE).exists();
    if !has_kernel {
        skip_part(format!("no {KERNEL_PLANE}: load the kernel module, or run this in the lab"));
    }
    let mut report = Report::new(options.seed);
    println!("soak: seed {}", options.seed);
    let ended = run_events(machine, served, options, has_kernel, &mut report);
    interrupt::check()?;
    if ended.is_err() {
        // Not in the error, whose root can be the reason to skip a case.
        let (log, tail) = (served.log_tail(), machine.tail());
        eprintln!("{log}{tail}{report}  repeat with: {}", options.repeat);
    }
    ended.with_context(|| format!("soak with seed {}", options.seed))?;
    Ok(report)
}

fn run_events<M: Machine>(
    machine: &mut M,
    served: &mut Served,
    options: &Options,
    has_kernel: bool,
    report: &mut Report,
) -> Result<()> {
    let (node, others) = options.nodes.split_first().context("no disk")?;
    let round = if others.is_empty() { Round::Usual } else { Round::Light };
    let writer = Writer::start(machine, node, round)?;
    let beside = served.serials().skip(1).zip(others);
    let beside = beside.map(|(serial, node)| Writer::beside(machine, serial, node));
    let beside = beside.collect::<Result<Vec<_>>>()?;
    let limit = vec!["--none".to_owned()];
    let mut soak = Soak { machine, served, node, writer, beside, modules: 0, limit };
    let began = Instant::now();
    let parts = Parts { kernel: has_kernel, images: soak.served.device().is_none() };
    for (number, kind) in plan::order(options.seed, options.length, parts).enumerate() {
        if matches!(options.length, Length::Time(limit) if began.elapsed() >= limit) {
            break;
        }
        // Each event has its own numbers, which do not depend on the time that earlier ones took.
        let mut rng = Rng::new(mix(options.seed) ^ number as u64);
        report.begin(kind);
        let pause = soak.one(kind, &mut rng).with_context(|| format!("event {number}: {kind}"))?;
        let plane = soak.served.status("data_plane")?;
        let plane = plane.as_str().unwrap_or("none");
        report.end(pause, plane);
        let ms = pause.as_millis();
        println!("soak: event {number}: {kind}, then on {plane}, longest request {ms} ms");
    }
    soak.end(report)
}

impl<M: Machine> Soak<'_, M> {
    /// Carries one event out under load. Returns the time of the longest request of the writer.
    fn one(&mut self, kind: Kind, rng: &mut Rng) -> Result<Duration> {
        interrupt::check()?;
        // The next event begins at another point of the load each time.
        self.writer.wait_for_more(self.machine, 1 + rng.below(8))?;
        let before = self.writer.count(self.machine)?;
        self.carry_out(kind, rng)?;
        self.writer.wait_for_more(self.machine, 3)?;
        self.others_go_on()?;
        self.writer.longest_since(self.machine, before)
    }

    /// Waits for requests of all other disks of the daemon, whatever the state of the one with the events.
    fn others_go_on(&mut self) -> Result<()> {
        for writer in &self.beside {
            let waited = writer.wait_for_more(self.machine, 2);
            waited.with_context(|| format!("the disk {} of the same daemon", writer.name()))?;
        }
        Ok(())
    }

    fn end(self, report: &mut Report) -> Result<()> {
        self.served.ctl(&["limit", "--none"])?;
        let verified = self.writer.finish(self.machine)?;
        let mut others = Vec::new();
        for writer in self.beside {
            let name = writer.name().to_owned();
            others.push((name, writer.end(self.machine)?));
        }
        let complaints = writer::complaints(self.machine)?;
        ensure!(complaints.is_empty(), "the guest's kernel complains:\n{complaints}");
        report.verified(verified, others);
        Ok(())
    }
}
