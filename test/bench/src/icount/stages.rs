// SPDX-License-Identifier: Apache-2.0
//! Path lengths between the module's trace events.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use kit::metric::{Metric, Set, median, point};
use kit::report::{Column, Section};

/// Heading of the section.
pub const TITLE: &str = "Kernel plane, stage by stage";

/// The trace events in a request's order, one request in flight.
const STAGES: [&str; 6] = ["chain", "request", "submit", "completion", "used", "notify"];

/// Instructions from one event to the next.
pub(crate) const LENGTH: Metric = Metric::new("length", "instructions");

/// Trace events of the module, on until finished or dropped.
#[derive(Debug)]
pub(super) struct Tracing {
    folder: PathBuf,
}

impl Tracing {
    pub(super) fn start() -> Result<Self> {
        let folder = PathBuf::from("/sys/kernel/tracing");
        if !folder.join("events/vhost_blk").exists() {
            bail!("{} has no events of vhost_blk: mount tracefs there", folder.display());
        }
        let this = Self { folder };
        // Under -icount the time stamp counter counts instructions; other clocks print microseconds.
        this.set("trace_clock", "x86-tsc")?;
        this.set("buffer_size_kb", "4096")?;
        this.set("trace", "")?;
        this.set("events/vhost_blk/enable", "1")?;
        Ok(this)
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        let path: &Path = &self.folder.join(name);
        fs::write(path, value).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Ends tracing; gives the trace.
    pub(super) fn finish(self) -> Result<String> {
        self.set("events/vhost_blk/enable", "0")?;
        Ok(fs::read_to_string(self.folder.join("trace"))?)
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        // Already off if the tracing was finished.
        let _ = self.set("events/vhost_blk/enable", "0");
    }
}

/// (stage, instructions so far) of each event.
fn events(trace: &str) -> Vec<(usize, f64)> {
    let lines = trace.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let (before, after) = line.split_once(": vhost_blk_")?;
            let name = after.split(':').next()?;
            let stage = STAGES.iter().position(|&stage| stage == name)?;
            Some((stage, before.split_whitespace().last()?.parse().ok()?))
        })
        .collect()
}

/// The table: from each event to the next, the events' own cost taken off.
pub(super) fn section(trace: &str, plain: f64, traced: f64) -> Result<Section> {
    let events = events(trace);
    let mut spans: Vec<Vec<f64>> = vec![Vec::new(); STAGES.len()];
    for pair in events.windows(2) {
        let [(from, start), (to, end)] = pair else { continue };
        if *to == (*from + 1) % STAGES.len() {
            spans[*from].push(end - start);
        }
    }
    if spans.iter().any(Vec::is_empty) {
        bail!("the trace lacks a stage: {} events in all", events.len());
    }
    let each_event = (traced - plain) / STAGES.len() as f64;
    let mut set = Set::default();
    for (i, span) in spans.iter().enumerate() {
        let to = STAGES.get(i + 1).copied().unwrap_or("the next chain (client, kick, wake-up)");
        let length = median(span.iter().copied()) - each_event;
        let point = point(&[("from", &STAGES[i]), ("to", &to)]);
        set.add("vhost-blk kernel", &point, vec![(LENGTH, length)]);
    }
    let whole: Vec<f64> = chains(&events).windows(2).map(|pair| pair[1] - pair[0]).collect();
    let method = format!(
        "One request in flight: {plain:.0} instructions, {traced:.0} with tracing; an event costs \
         {each_event:.0}, which is taken off. Medians. From chain to chain, median with tracing: \
         {:.0}",
        median(whole)
    );
    let columns = [
        Column::label("from"),
        Column::label("to"),
        Column::median("instructions", LENGTH, 1.0, 0),
    ];
    Ok(Section::new(TITLE, &method, &set, &columns))
}

fn chains(events: &[(usize, f64)]) -> Vec<f64> {
    events.iter().filter(|(stage, _)| *stage == 0).map(|(_, time)| *time).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_taken_between_neighbouring_stages() {
        let mut trace = String::from("# tracer: nop\n");
        for (request, base) in [(0, 0), (1, 60_000)] {
            for (i, stage) in STAGES.iter().enumerate() {
                let at = 5_000_000 + base + 10_000 * i;
                trace += &format!(" vhost-1-2 [000] ..... {at}: vhost_blk_{stage}: {request}\n");
            }
        }
        let section = section(&trace, 54_000.0, 60_000.0).unwrap();
        let row = &section.rows.rows()[0];
        assert_eq!([row.label("from"), row.label("to")], ["chain", "request"]);
        assert_eq!(row.median(LENGTH), 9000.0);
        assert!(section.method.contains("median with tracing: 60000"), "{}", section.method);
    }

    #[test]
    fn a_trace_without_a_stage_is_an_error() {
        let trace = " a [000] ... 1000001: vhost_blk_chain: x\n";
        assert!(section(trace, 1.0, 2.0).unwrap_err().to_string().contains("lacks a stage"));
    }
}
