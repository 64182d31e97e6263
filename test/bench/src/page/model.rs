// SPDX-License-Identifier: Apache-2.0
//! A prediction for real hardware: path lengths and exits, with published costs.

use kit::metric::{EXITS, INTERRUPTS, Metric, Row};
use kit::report::Report;

use super::costs::{self, CORE_HZ, EXIT, INTERRUPT, PER_CYCLE};
use super::document::{Block, Table};
use super::parts::{ICOUNT, NESTED, Parts};
use crate::host::subject::Who;
use crate::icount::{PATHS_TITLE, WHOLE, is_usual};
use crate::rig::Speed;

/// Numbers of cores for which a rate is predicted.
const CORES: [u16; 7] = [1, 2, 4, 8, 16, 32, 64];

/// A server in `icount`, and the way to attach its disk in `nested`. qemu-storage-daemon stands for
/// QEMU's own virtio-blk, whose instructions are not counted.
const WAYS: [(Who, &str); 5] = [
    (Who::Kernel, "vhost-blk kernel"),
    (Who::Uring, "vhost-blk io_uring"),
    (Who::QsdNative, "QEMU native"),
    (Who::QsdUring, "QEMU io_uring"),
    (Who::VhostScsi, "vhost-scsi"),
];

const ABOUT: &str = "PREDICTION, NOT MEASURED. No machine of this project runs guests under KVM, so \
    these rates come from counts, which emulation does not distort, and from published costs of \
    other machines. For each request of 4 KiB (random reads, null_blk, one queue): \
    cycles = instructions / instructions of a cycle + exits x cycles of an exit + interrupts x \
    cycles of an interrupt; rate = cores x 3e9 / cycles. Instructions: the whole path of `icount`, \
    whose client stands for the guest's driver. Exits (halts among them) and interrupts: `nested`, \
    one virtual CPU. The cores do everything, guest included. The prediction is linear: storage \
    takes no time, and locks, caches and memory are shared without cost, so that real rates of \
    many cores are lower. For QEMU's own virtio-blk the instructions are those of \
    qemu-storage-daemon. A range goes from all costs at their worst to all at their best; ways \
    whose ranges overlap are not told apart.";

/// Counts of one request.
#[derive(Clone, Copy, Debug)]
struct Counts {
    instructions: f64,
    exits: f64,
    interrupts: f64,
}

impl Counts {
    fn cycles(self, per_cycle: f64, exit: f64, interrupt: f64) -> f64 {
        self.instructions / per_cycle + self.exits * exit + self.interrupts * interrupt
    }

    /// Requests a second of this many cores: the least and the greatest rate.
    fn rates(self, cores: u16) -> [f64; 2] {
        let worst = self.cycles(PER_CYCLE.worst, EXIT.worst, INTERRUPT.worst);
        let best = self.cycles(PER_CYCLE.best, EXIT.best, INTERRUPT.best);
        [worst, best].map(|cycles| f64::from(cores) * CORE_HZ / cycles)
    }
}

/// The prediction, or the reason why there is none.
pub(super) fn blocks(parts: &Parts) -> Vec<Block> {
    let (Some(icount), Some(nested)) = (parts.of(ICOUNT), parts.of(NESTED)) else {
        let missing: Vec<_> =
            [ICOUNT, NESTED].into_iter().filter(|part| parts.of(part).is_none()).collect();
        return vec![absent(&format!("it needs the part {}", missing.join(" and the part ")))];
    };
    let mut table = Table::new(&["disk", "depth", "instructions", "exits", "interrupts"]);
    table.head.extend(CORES.map(|cores| match cores {
        1 => "kIOPS, 1 core".to_owned(),
        _ => format!("{cores} cores"),
    }));
    for (who, way) in WAYS {
        for (depth, counts) in counts(icount, nested, who, way) {
            let Counts { instructions, exits, interrupts } = counts;
            let mut row = vec![way.to_owned(), depth, format!("{instructions:.0}")];
            row.extend([exits, interrupts].map(|count| format!("{count:.2}")));
            row.extend(CORES.map(|cores| {
                let [least, most] = counts.rates(cores).map(|rate| rate / 1e3);
                format!("{least:.0} to {most:.0}")
            }));
            table.rows.push(row);
        }
    }
    if table.rows.is_empty() {
        return vec![absent("no disk has both path lengths and exits at the same depth")];
    }
    let costs_table = Table {
        head: ["constant", "unit", "best", "worst", "source"].map(str::to_owned).to_vec(),
        rows: costs::ALL
            .map(|cost| {
                let text = |text: &str| text.to_owned();
                let [best, worst] = [cost.best, cost.worst].map(|value| value.to_string());
                vec![text(cost.name), text(cost.unit), best, worst, text(cost.source)]
            })
            .to_vec(),
    };
    vec![Block::Text(ABOUT.to_owned()), Block::Table(table), Block::Table(costs_table)]
}

fn absent(why: &str) -> Block {
    Block::Text(format!("There is no prediction in this report: {why}."))
}

/// The counts of a way at each depth that both parts have.
fn counts(icount: &Report, nested: &Report, who: Who, way: &str) -> Vec<(String, Counts)> {
    let paths = icount.sections.iter().filter(|section| section.title == PATHS_TITLE);
    let paths = paths.flat_map(|section| section.rows.of(who.name()));
    let paths = paths.filter(|row| is_usual(row));
    let attached: Vec<&Row> =
        nested.sections.iter().flat_map(|section| section.rows.of(way)).collect();
    paths
        .filter_map(|path| {
            let depth = path.label("depth");
            let at = [Speed::Null.name().as_str(), "randread", "1", depth].map(str::to_owned);
            let is_here =
                |row: &&&Row| ["device", "rw", "vcpus", "depth"].map(|name| row.label(name)) == at;
            let row = attached.iter().find(is_here)?;
            let counts = Counts {
                instructions: measured(path, WHOLE)?,
                exits: measured(row, EXITS)?,
                interrupts: measured(row, INTERRUPTS)?,
            };
            Some((depth.to_owned(), counts))
        })
        .collect()
}

/// The median of a metric that was measured.
fn measured(row: &Row, metric: Metric) -> Option<f64> {
    (!row.values(metric).is_empty()).then(|| row.median(metric))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::tests::parts;
    use kit::metric::{IOPS, Set, point};
    use kit::report::Section;

    /// All parts of a report, the guest with these ways and depths.
    fn with_guest(rows: &[(&str, u16)]) -> Parts {
        let mut set = Set::default();
        for (way, depth) in rows {
            let at = point(&[
                ("device", &Speed::Null.name()),
                ("rw", &"randread"),
                ("vcpus", &1),
                ("depth", depth),
            ]);
            set.add(way, &at, vec![(IOPS, 1.0), (EXITS, 2.0), (INTERRUPTS, 1.0)]);
        }
        let mut report = Report::new("x", Vec::new());
        report.sections.push(Section::new("Measurements", "", &set, &[]));
        let mut parts = parts(true);
        parts.0.iter_mut().find(|part| part.name == NESTED).unwrap().report = Some(report);
        parts
    }

    #[test]
    fn the_rate_is_the_cores_cycles_over_those_of_a_request() {
        let counts = Counts { instructions: 10_000.0, exits: 2.0, interrupts: 1.0 };
        // 10000 + 2 x 1344 + 3644.8, and 10000 / 0.78 + 2 x 2576 + 6059.
        let [least, most] = counts.rates(1);
        assert!((most - 3e9 / 16_332.8).abs() < 1e-6, "{most}");
        assert!((least - 3e9 / 24_031.512_820_512_82).abs() < 1e-6, "{least}");
        assert_eq!(counts.rates(64), [64.0 * least, 64.0 * most]);
    }

    #[test]
    fn each_constant_is_a_range_with_a_source() {
        for cost in costs::ALL {
            // Fewer cycles and more instructions of a cycle are better.
            let is_range = match cost.unit {
                "cycles" => cost.best < cost.worst,
                _ => cost.best > cost.worst,
            };
            assert!(is_range && !cost.source.is_empty(), "{cost:?}");
        }
    }

    #[test]
    fn a_way_with_both_counts_has_a_row_for_each_common_depth() {
        // `icount` has the depths 1, 4 and 32.
        let rows = [("vhost-blk kernel", 1), ("vhost-blk kernel", 128), ("QEMU io_uring", 32)];
        let blocks = blocks(&with_guest(&rows));
        let [Block::Text(about), Block::Table(table), Block::Table(costs)] = &blocks[..] else {
            panic!("{blocks:?}")
        };
        assert!(about.starts_with("PREDICTION, NOT MEASURED"), "{about}");
        let found: Vec<_> = table.rows.iter().map(|row| row[..2].join(" ")).collect();
        assert_eq!(found, ["vhost-blk kernel 1", "QEMU io_uring 32"]);
        assert_eq!(table.rows[0].len(), table.head.len());
        assert_eq!(costs.rows.len(), costs::ALL.len());
    }

    #[test]
    fn a_missing_part_is_the_reason_for_no_prediction() {
        let text = |parts: &Parts| match &blocks(parts)[..] {
            [Block::Text(text)] => text.clone(),
            other => panic!("{other:?}"),
        };
        assert!(
            text(&parts(true)).contains("no prediction in this report: it needs the part nested.")
        );
        assert!(text(&parts(false)).contains("the part icount and the part nested"));
        assert!(text(&with_guest(&[("vhost-blk kernel", 2)])).contains("at the same depth"));
    }
}
