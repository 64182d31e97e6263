// SPDX-License-Identifier: Apache-2.0
//! Path lengths between the module's trace events.

use anyhow::{Result, bail};
use kit::metric::{Metric, Set, median, point};
use kit::report::{Column, Section};

use crate::tracing::{Clock, Event, Trace, Tracing, What};

/// Heading of the section.
pub const TITLE: &str = "Kernel plane, stage by stage";

/// The trace events in a request's order, one request in flight.
const STAGES: [&str; 6] = ["chain", "request", "submit", "completion", "used", "notify"];

/// KiB of the buffer of the trace.
pub(super) const BUFFER_KIB: u32 = 16 << 10;

/// Instructions from one event to the next.
pub(crate) const LENGTH: Metric = Metric::new("length", "instructions");

/// The module's trace events, by a clock that counts instructions.
///
/// # Errors
/// The module is not loaded, or tracefs cannot be used.
pub(super) fn tracing() -> Result<Tracing> {
    let tracing = Tracing::new(Clock::Counter, BUFFER_KIB)?;
    if !tracing.add("vhost_blk")? {
        bail!("the kernel has no events of vhost_blk");
    }
    Ok(tracing)
}

/// (stage, instructions so far) of each event.
fn events(trace: &Trace) -> Vec<(usize, f64)> {
    let stage = |event: &Event| {
        let What::Module(name) = &event.what else { return None };
        Some((STAGES.iter().position(|stage| stage == name)?, event.at))
    };
    trace.events.iter().filter_map(stage).collect()
}

/// The table: from each event to the next, the events' own cost taken off.
pub(super) fn section(trace: &Trace, plain: f64, traced: f64) -> Result<Section> {
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
        let trace = Trace::parse(&trace).unwrap();
        let section = section(&trace, 54_000.0, 60_000.0).unwrap();
        let row = &section.rows.rows()[0];
        assert_eq!([row.label("from"), row.label("to")], ["chain", "request"]);
        assert_eq!(row.median(LENGTH), 9000.0);
        assert!(section.method.contains("median with tracing: 60000"), "{}", section.method);
    }

    #[test]
    fn a_trace_without_a_stage_is_an_error() {
        let trace = Trace::parse(" a-1 [000] ... 1000001: vhost_blk_chain: x\n").unwrap();
        assert!(section(&trace, 1.0, 2.0).unwrap_err().to_string().contains("lacks a stage"));
    }
}
