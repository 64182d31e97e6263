// SPDX-License-Identifier: Apache-2.0
//! The events of a run and their pauses.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::plan::Kind;
use crate::metric::percentile;

/// The events so far, and the verified data.
#[derive(Debug)]
pub struct Report {
    seed: u64,
    events: Vec<(Kind, Option<Duration>)>,
    /// Number of events after which the disk was on each data plane.
    planes: BTreeMap<String, usize>,
    verified: Option<Verified>,
    /// The other disks of the daemon, and their requests.
    others: Vec<(String, u64)>,
}

/// Data that the guest compared without a difference.
#[derive(Clone, Copy, Debug)]
pub(super) struct Verified {
    /// Rounds of fio.
    pub(super) rounds: u64,
    /// Requests of the writer.
    pub(super) requests: u64,
}

impl Report {
    pub(super) fn new(seed: u64) -> Self {
        let (events, planes, verified, others) = Default::default();
        Self { seed, events, planes, verified, others }
    }

    pub(super) fn begin(&mut self, kind: Kind) {
        self.events.push((kind, None));
    }

    pub(super) fn end(&mut self, pause: Duration, plane: &str) {
        *self.planes.entry(plane.to_owned()).or_default() += 1;
        if let Some((_, ended)) = self.events.last_mut() {
            *ended = Some(pause);
        }
    }

    pub(super) fn verified(&mut self, verified: Verified, others: Vec<(String, u64)>) {
        self.verified = Some(verified);
        self.others = others;
    }

    /// The kinds of all events that ended, in order.
    pub fn kinds(&self) -> impl Iterator<Item = Kind> {
        self.events.iter().filter(|(_, pause)| pause.is_some()).map(|(kind, _)| *kind)
    }

    /// The data planes that the disk was on after its events.
    pub fn planes(&self) -> impl Iterator<Item = &str> {
        self.planes.keys().map(String::as_str)
    }

    fn pauses(&self) -> BTreeMap<Kind, Vec<Duration>> {
        let mut pauses: BTreeMap<Kind, Vec<Duration>> = BTreeMap::new();
        for (kind, pause) in &self.events {
            pauses.entry(*kind).or_default().extend(*pause);
        }
        pauses.values_mut().for_each(|of_kind| of_kind.sort());
        pauses
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "  {:<8} {:>6}   longest request, ms", "event", "number")?;
        writeln!(f, "  {:<8} {:>6} {:>7} {:>7} {:>7}", "", "", "p50", "p90", "max")?;
        for (kind, pauses) in self.pauses() {
            write!(f, "  {kind:<8} {:>6}", pauses.len())?;
            for percent in [50, 90, 100].into_iter().filter(|_| !pauses.is_empty()) {
                write!(f, " {:>7}", percentile(&pauses, percent).as_millis())?;
            }
            writeln!(f)?;
        }
        let ended = self.kinds().count();
        match self.verified {
            Some(Verified { rounds, requests }) => {
                let planes = self.planes.iter().map(|(plane, count)| format!("{count} on {plane}"));
                let planes = planes.collect::<Vec<_>>().join(", ");
                writeln!(f, "  events:      {ended} ({planes}), seed {}", self.seed)?;
                writeln!(f, "  verified:    {rounds} rounds of fio, {requests} requests")?;
                for (name, requests) in &self.others {
                    writeln!(f, "  beside it:   {requests} requests to {name}")?;
                }
                writeln!(f, "  I/O errors:  0\n  wrong bytes: 0\n  hangs:       0")
            }
            None => {
                writeln!(f, "  FAILED after {ended} events, seed {}", self.seed)?;
                let order: Vec<_> = self.events.iter().map(|(kind, _)| kind.to_string()).collect();
                writeln!(f, "  order: {}", order.join(" "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_without_an_end_names_seed_and_order() {
        let mut report = Report::new(7);
        report.begin(Kind::Kill);
        report.end(Duration::from_millis(30), "uring");
        report.begin(Kind::Memory);
        let text = report.to_string();
        assert!(text.contains("FAILED after 1 events, seed 7"), "{text}");
        assert!(text.contains("order: kill memory") && !text.contains("wrong bytes"), "{text}");
        report.end(Duration::from_millis(9), "kernel");
        report.verified(Verified { rounds: 3, requests: 40 }, vec![("other".to_owned(), 8)]);
        let text = report.to_string();
        assert!(text.contains("beside it:   8 requests to other"), "{text}");
        assert!(text.contains("wrong bytes: 0") && text.contains("hangs:       0"), "{text}");
        assert!(text.contains("events:      2 (1 on kernel, 1 on uring), seed 7"), "{text}");
        assert!(text.contains("kill          1      30      30      30"), "{text}");
    }
}
