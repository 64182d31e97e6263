// SPDX-License-Identifier: Apache-2.0
//! Reasons for cells that are behind their best peer.
//!
//! A cell whose samples do not differ from the peer's needs none. For the others the reasons that profiles of such
//! cells have given are kept here; their evidence is in `docs/measurements/misses.md`. A cell without one, or far below
//! those of the profile, asks for a profile.

use kit::metric::IOPS;

use super::cells::Cell;
use super::parts::{GUEST, HOST, LOADS, NATIVE, NESTED, QCOW2, QUEUES};
use crate::compare::ALLOCATION_TITLE;
use crate::significance::{ALPHA, p_value};

/// A kept reason, and the cells that it explains.
struct Kept {
    /// Names of parts.
    parts: &'static [&'static str],
    /// Labels of the point, each with the values that have the reason.
    labels: &'static [(&'static str, &'static [&'static str])],
    /// The section of the parts; empty: all.
    title: &'static str,
    /// A part of the names of the subjects.
    subject: &'static str,
    /// The least rate over the peer's that the profile explains.
    least: f64,
    text: &'static str,
    /// The section of `misses.md` with the evidence.
    section: &'static str,
}

const SMALL_DEPTHS: &[&str] = &["1", "3", "4"];
const LARGE_DEPTHS: &[&str] = &["4", "8", "16", "32", "64", "128"];

/// A reason for every cell.
const ANY: Kept =
    Kept { parts: &[], labels: &[], title: "", subject: "", least: 1.0, text: "", section: "" };

/// The first one that fits a cell counts.
const KEPT: [Kept; 12] = [
    Kept {
        parts: &[HOST, LOADS],
        labels: &[
            ("block", &["1048576"]),
            ("device", &["null_blk", "null_blk 80 us", "NVMe, poll queues"]),
        ],
        subject: "io_uring",
        least: 0.35,
        text: "the kernel pins 256 pages for each request; on null_blk --pin-memory on has 1.84",
        section: "`bench host`",
        ..ANY
    },
    Kept {
        parts: &[NATIVE],
        labels: &[("storage", &["disk"]), ("load", &["writeflush"])],
        least: 0.9,
        text: "the flush of the disk takes most of the time, and the peer also syncs once for all",
        section: "`make bench`",
        ..ANY
    },
    Kept {
        parts: &[NATIVE],
        labels: &[("storage", &["disk"]), ("depth", LARGE_DEPTHS)],
        least: 0.8,
        text: "both have the rate of the disk, which completes a batch with one interrupt",
        section: "`make bench`",
        ..ANY
    },
    Kept {
        parts: &[NATIVE, QCOW2],
        labels: &[
            ("storage", &["file", "null"]),
            ("block", &["512", "4096"]),
            ("client", &["event"]),
            ("depth", SMALL_DEPTHS),
        ],
        least: 0.9,
        text: "the wake-up of the client, which sleeps, is most of the time",
        section: "`make bench`",
        ..ANY
    },
    Kept {
        parts: &[QCOW2],
        title: ALLOCATION_TITLE,
        subject: "qcow2",
        least: 0.7,
        text: "writes all over a large image need more tables than the qcow2 library keeps",
        section: "`make bench`",
        ..ANY
    },
    Kept {
        parts: &[HOST, LOADS],
        labels: &[
            ("device", &["null_blk 80 us", "null_blk 200 us"]),
            ("client", &["event"]),
            ("depth", SMALL_DEPTHS),
        ],
        least: 0.9,
        text: "the virtual CPUs are idle for half of the time: emulated timers and wake-ups",
        section: "`bench host`",
        ..ANY
    },
    Kept {
        parts: &[HOST],
        labels: &[("device", &["null_blk, poll queues"])],
        least: 0.85,
        text: "null_blk completes in the submission: there is no interrupt to save",
        section: "`bench host`",
        ..ANY
    },
    Kept {
        parts: &[HOST, LOADS],
        labels: &[("device", &["NVMe, poll queues"]), ("client", &["spin"])],
        least: 0.3,
        text: "client and server poll, and take both cores from QEMU, which is the device",
        section: "`bench host`",
        ..ANY
    },
    Kept {
        parts: &[HOST, LOADS, QUEUES],
        labels: &[("client", &["event"]), ("depth", &["1"])],
        least: 0.9,
        text: "the emulated wake-up of the driver takes longer than a queue polls",
        section: "`bench host`",
        ..ANY
    },
    Kept {
        parts: &[NESTED],
        least: 0.5,
        text: "the emulation of exits takes nine tenths of a request",
        section: "`cases nested-bench`",
        ..ANY
    },
    Kept {
        parts: &[GUEST],
        subject: "polled",
        least: 0.75,
        text: "polling CPUs of the guest take the cores of the thread that serves the disk",
        section: "`cases guest-bench`",
        ..ANY
    },
    Kept {
        parts: &[GUEST],
        subject: "bio",
        least: 0.85,
        text: "blk-mq is 6 to 9 % of a request: no path can save more",
        section: "`cases guest-bench`",
        ..ANY
    },
];

/// The explanation of a cell that is behind.
#[derive(Clone, Copy)]
pub(super) enum Reason {
    /// The samples of both do not differ.
    Noise,
    /// The profile of such cells.
    Profile(&'static str, &'static str),
    /// None is known.
    Unknown,
}

impl Reason {
    /// The reason of a cell with a peer.
    pub(super) fn of(cell: &Cell<'_>) -> Self {
        if is_noise(cell) {
            return Self::Noise;
        }
        let kept = KEPT.iter().find(|kept| kept.explains(cell));
        kept.map_or(Self::Unknown, |kept| Self::Profile(kept.text, kept.section))
    }

    /// The text of a table.
    pub(super) fn text(self) -> String {
        match self {
            Self::Noise => "within the noise".to_owned(),
            Self::Profile(text, section) => format!("{text} (misses.md, {section})"),
            Self::Unknown => "NOT EXPLAINED".to_owned(),
        }
    }
}

impl Kept {
    fn explains(&self, cell: &Cell<'_>) -> bool {
        let fits = |(name, values): &(&str, &[&str])| values.contains(&cell.row.label(name));
        self.parts.contains(&cell.part)
            && (self.title.is_empty() || self.title == cell.section)
            && cell.row.subject.contains(self.subject)
            && self.labels.iter().all(fits)
            && cell.ratio().is_some_and(|ratio| ratio >= self.least)
    }
}

/// True if the samples of a cell and of its peer could come from the same source. The ranges count if the samples are
/// too few for the test.
fn is_noise(cell: &Cell<'_>) -> bool {
    let Some(peer) = cell.peer else { return false };
    match p_value(cell.row.values(IOPS), peer.values(IOPS)) {
        Some(p) => p >= ALPHA,
        None => cell.row.range(IOPS).1 >= peer.range(IOPS).0,
    }
}

/// A line that counts the reasons of cells that are behind.
pub(super) fn summary(behind: &[Cell<'_>]) -> String {
    let reasons: Vec<_> = behind.iter().map(Reason::of).collect();
    let count = |is: fn(&Reason) -> bool| reasons.iter().filter(|reason| is(reason)).count();
    format!(
        "{} of them are within the noise (Mann-Whitney, {ALPHA}; with fewer than four samples a side, ranges that \
         overlap), {} have a reason by profile (docs/measurements/misses.md), and {} are not explained.",
        count(|reason| matches!(reason, Reason::Noise)),
        count(|reason| matches!(reason, Reason::Profile(..))),
        count(|reason| matches!(reason, Reason::Unknown)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::disk::Storage;
    use crate::rig::Speed;
    use kit::metric::{Set, point};

    const MISSES: &str = include_str!("../../../../docs/measurements/misses.md");

    #[test]
    fn each_reason_has_its_section_with_the_evidence() {
        for kept in &KEPT {
            assert!(MISSES.contains(&format!("\n## {}\n", kept.section)), "{}", kept.section);
        }
    }

    #[test]
    fn devices_of_reasons_are_those_of_the_measurements() {
        let speeds = [Speed::Null, Speed::Polled, Speed::Slow(80), Speed::Slow(200)];
        let names: Vec<_> = speeds
            .map(Storage::Device)
            .into_iter()
            .chain([Storage::Nvme])
            .map(Storage::name)
            .collect();
        let labels = KEPT.iter().flat_map(|kept| kept.labels);
        let devices = labels.filter(|(name, _)| *name == "device").flat_map(|(_, values)| *values);
        for device in devices {
            assert!(names.iter().any(|name| name == device), "{device}");
        }
    }

    /// The reason of a cell with these rates beside a peer with these.
    fn reason(part: &'static str, depth: u16, ours: &[f64], theirs: &[f64]) -> String {
        let (mut set, place) = (Set::default(), point(&[("storage", &"disk"), ("depth", &depth)]));
        for (subject, rates) in [("ours", ours), ("qsd native", theirs)] {
            rates.iter().for_each(|rate| set.add(subject, &place, vec![(IOPS, *rate)]));
        }
        let [row, peer] = set.rows() else { panic!("two rows") };
        let cell = Cell { part, section: "Measurements", row, peer: Some(peer), device: None };
        Reason::of(&cell).text()
    }

    #[test]
    fn a_difference_within_the_noise_needs_no_reason_and_another_one_its_own() {
        let noise = "within the noise";
        assert_eq!(reason(NATIVE, 1, &[1.0, 3.0], &[2.0, 4.0]), noise);
        let (ours, theirs) = ([1.0, 1.1, 1.2, 3.0], [2.0, 2.1, 2.2, 2.3]);
        assert_eq!(reason(NATIVE, 1, &ours, &theirs), noise);
        assert_eq!(reason(NATIVE, 1, &[1.0], &[2.0]), "NOT EXPLAINED");
        assert_eq!(reason(NATIVE, 1, &[1.0, 1.1, 1.2, 1.3], &theirs), "NOT EXPLAINED");
        assert!(reason(NATIVE, 32, &[1.8], &[2.0]).contains("the rate of the disk"));
        assert_eq!(reason(NATIVE, 32, &[1.5], &[2.0]), "NOT EXPLAINED");
        assert!(reason(NESTED, 1, &[1.0], &[2.0]).ends_with("(misses.md, `cases nested-bench`)"));
    }
}
