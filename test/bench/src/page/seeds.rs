// SPDX-License-Identifier: Apache-2.0
//! Published tables of earlier work, beside this project's figures for the nearest load.

use kit::metric::{IOPS, Metric, P50, Row, Set};

use super::cells::{device, is_qemu};
use super::document::{Block, Table};
use super::parts::{GUEST, NATIVE, Parts, QUEUES};
use crate::host::subject::Who;
use crate::rig::Speed;

/// The other side of a ratio.
#[derive(Clone, Copy)]
enum Over {
    /// QEMU: the best of its variants.
    Qemu,
    /// The bare device.
    Device,
    /// Another subject.
    Subject(&'static str),
    /// The same subject with one queue.
    OneQueue,
}

/// A published ratio, and the rows that give ours.
struct Entry {
    load: String,
    seed: f64,
    /// Rates, or latencies (here: medians).
    metric: Metric,
    part: &'static str,
    subject: &'static str,
    labels: Vec<(&'static str, String)>,
    over: Over,
}

/// One published table.
struct Seed {
    title: &'static str,
    about: &'static str,
    entries: Vec<Entry>,
}

/// All tables with our figures; a dash for a part that was not measured.
pub(super) fn blocks(parts: &Parts) -> Vec<Block> {
    let mut blocks = Vec::new();
    for seed in [seed_2011(), seed_2022_host(), seed_2022_polling(), seed_2012()] {
        let mut table = Table::new(&["load", "ratio in the seed", "ratio here", "measured by"]);
        for entry in &seed.entries {
            let ours = ours(parts, entry).map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
            let seed = format!("{:.2}", entry.seed);
            table.rows.push(vec![entry.load.clone(), seed, ours, entry.part.to_owned()]);
        }
        blocks.push(Block::Heading(3, seed.title.to_owned()));
        blocks.push(Block::Text(seed.about.to_owned()));
        blocks.push(Block::Table(table));
    }
    blocks
}

fn ours(parts: &Parts, entry: &Entry) -> Option<f64> {
    let fits = |row: &&Row| entry.labels.iter().all(|(name, value)| row.label(name) == value);
    let find = |set: &'_ Set| -> Option<f64> {
        let row = set.of(entry.subject).find(fits)?;
        let metric = entry.metric;
        let other = match entry.over {
            Over::Qemu if metric == IOPS => set.most(&row.point, IOPS, is_qemu),
            Over::Qemu => set.least(&row.point, metric, is_qemu),
            Over::Device => device(set, &row.point),
            Over::Subject(subject) => set.at(subject, &row.point),
            Over::OneQueue => {
                let mut point = row.point.clone();
                point.insert("queues".to_owned(), "1".to_owned());
                set.at(entry.subject, &point)
            }
        }?;
        (other.median(metric) > 0.0).then(|| row.over(other, metric))
    };
    parts.of(entry.part)?.sections.iter().find_map(|section| find(&section.rows))
}

impl Entry {
    /// The same with latencies in place of rates.
    fn latency(mut self) -> Self {
        self.load += ", latency";
        self.metric = P50;
        self
    }
}

fn native(load: &str, block: u32, depth: u16, seed: f64, over: Over) -> Entry {
    let over_name = if matches!(over, Over::Device) { "bare device" } else { "QEMU" };
    let labels = [
        ("storage", "disk".to_owned()),
        ("load", load.to_owned()),
        ("block", block.to_string()),
        ("client", "event".to_owned()),
        ("queues", "1".to_owned()),
        ("depth", depth.to_string()),
    ];
    Entry {
        load: format!("{load}, depth {depth}, over {over_name}"),
        seed,
        metric: IOPS,
        part: NATIVE,
        subject: "ours",
        labels: labels.into(),
        over,
    }
}

fn seed_2011() -> Seed {
    let mut entries = Vec::new();
    // Requests a second, then microseconds: vhost-blk and virtio-blk at depths 1, 2, 3.
    for (load, rates, latencies) in [
        (
            "read",
            [4755.0 / 4116.0, 8645.0 / 7814.0, 10084.0 / 8867.0],
            [183.0 / 214.0, 202.0 / 222.0, 266.0 / 306.0],
        ),
        (
            "write",
            [4370.0 / 3848.0, 7009.0 / 6505.0, 9938.0 / 9335.0],
            [198.0 / 228.0, 249.0 / 275.0, 264.0 / 291.0],
        ),
    ] {
        for (depth, (rate, latency)) in (1..).zip(rates.into_iter().zip(latencies)) {
            entries.push(native(load, 512, depth, rate, Over::Qemu));
            entries.push(native(load, 512, depth, latency, Over::Qemu).latency());
        }
    }
    Seed {
        title: "2011: vhost-blk with kernel AIO, 512 bytes, sequential",
        about: "The seed compares with QEMU's virtio-blk in a guest on a SATA disk. Here: the \
                io_uring plane over the best of qemu-storage-daemon on the real disk, without a \
                guest. Latencies: the seed has means, here they are medians; less is better.",
        entries,
    }
}

fn seed_2022_host() -> Seed {
    let mut entries = vec![
        native("randread", 4096, 128, 95.6 / 57.5, Over::Qemu),
        native("randwrite", 4096, 128, 84.3 / 79.4, Over::Qemu),
        native("randread", 4096, 128, 95.6 / 95.8, Over::Device),
        native("randwrite", 4096, 128, 84.3 / 85.3, Over::Device),
    ];
    let ram = |op: &str, queues: u16, seed, over| Entry {
        load: match over {
            Over::OneQueue => format!("{op}, RAM, {queues} queues over one"),
            _ => format!("{op}, RAM, {queues} queues, over QEMU"),
        },
        seed,
        metric: IOPS,
        part: QUEUES,
        subject: Who::Kernel.name(),
        labels: vec![
            ("device", Speed::Null.name()),
            ("load", op.to_owned()),
            ("block", "4096".to_owned()),
            ("client", "event".to_owned()),
            ("CPUs", "shared".to_owned()),
            ("depth", "32".to_owned()),
            ("queues", queues.to_string()),
        ],
        over,
    };
    let (reads, writes) = ("randread", "randwrite");
    for (queues, read, write) in [
        (1, 110.0 / 123.0, 113.0 / 129.0),
        (2, 247.0 / 253.0, 252.0 / 250.0),
        (4, 576.0 / 158.0, 567.0 / 154.0),
    ] {
        entries.push(ram(reads, queues, read, Over::Qemu));
        entries.push(ram(writes, queues, write, Over::Qemu));
    }
    entries.push(ram(reads, 4, 576.0 / 110.0, Over::OneQueue));
    entries.push(ram(writes, 4, 567.0 / 113.0, Over::OneQueue));
    Seed {
        title: "2022: vhost-blk with bio, several queues",
        about: "The seed has depth 128 in a guest: an SSD, and a RAM disk with as many queues as \
                virtual CPUs. Here: the real disk without a guest, and the kernel plane on \
                null_blk at depth 32, client and server both on as many CPUs as there are queues.",
        entries,
    }
}

fn seed_2022_polling() -> Seed {
    let mut entries = Vec::new();
    for (jobs, rate, latency) in [
        (1, 385.0 / 339.0, 165.94 / 188.33),
        (2, 408.0 / 367.0, 313.28 / 347.33),
        (4, 424.0 / 383.0, 613.05 / 682.06),
    ] {
        let entry = |seed| Entry {
            load: format!("randread of 512 bytes, depth 64, {jobs} jobs, polled over interrupts"),
            seed,
            metric: IOPS,
            part: GUEST,
            subject: "ours, request, polled",
            labels: vec![("load", format!("randread, depth 64, {jobs} jobs"))],
            over: Over::Subject("ours, request, interrupts"),
        };
        entries.extend([entry(rate), entry(latency).latency()]);
    }
    Seed {
        title: "2022: the guest driver's polled queues",
        about: "Both in a guest with four virtual CPUs; this project's request path. Latencies: \
                the seed has means, here they are medians; less is better.",
        entries,
    }
}

fn seed_2012() -> Seed {
    let disks: [(&str, [f64; 4]); 3] = [
        (
            "ram",
            [
                233_991.0 / 182_147.0,
                201_658.0 / 161_449.0,
                224_268.0 / 184_211.0,
                192_396.0 / 165_630.0,
            ],
        ),
        (
            "fast",
            [
                117_840.0 / 105_791.0,
                128_616.0 / 115_711.0,
                119_266.0 / 104_773.0,
                125_985.0 / 114_619.0,
            ],
        ),
        ("slow", [9060.0 / 10037.0, 6065.0 / 6722.0, 520.0 / 498.0, 384.0 / 382.0]),
    ];
    let mut entries = Vec::new();
    for (disk, seeds) in disks {
        for (load, seed) in ["read", "write", "randread", "randwrite"].into_iter().zip(seeds) {
            let labels = [("disk", disk.to_owned()), ("load", format!("{load}, depth 32"))];
            entries.push(Entry {
                load: format!("{disk}, {load}, bio over request"),
                seed,
                metric: IOPS,
                part: GUEST,
                subject: "ours, bio, interrupts",
                labels: labels.into(),
                over: Over::Subject("ours, request, interrupts"),
            });
        }
    }
    Seed {
        title: "2012: the guest driver's bio path",
        about: "The seed has a RAM disk, Fusion-io and SATA; here zeros that take no time, 50 us \
                a request, or 300 requests and 32 MiB a second.",
        entries,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::tests::parts;
    use kit::metric::point;
    use kit::report::{Report, Section};

    #[test]
    fn ours_stands_beside_the_seed_and_a_dash_for_a_missing_part() {
        let blocks = blocks(&parts(false));
        let Block::Table(table) = &blocks[2] else { panic!("{blocks:?}") };
        assert_eq!(table.rows[0][1..], ["1.16", "0.80", "native"]);
        let Block::Table(table) = &blocks[8] else { panic!("{blocks:?}") };
        assert_eq!(table.rows[0][1..], ["1.14", "-", "guest"]);
    }

    #[test]
    fn latencies_of_2011_stand_beside_ours() {
        let blocks = blocks(&parts(false));
        let Block::Table(table) = &blocks[2] else { panic!("{blocks:?}") };
        let row = &table.rows[1];
        assert_eq!(row[..], ["read, depth 1, over QEMU, latency", "0.86", "1.25", "native"]);
    }

    #[test]
    fn queues_are_compared_with_qemu_on_the_same_cpus_and_with_one_queue() {
        let mut parts = parts(false);
        let mut set = Set::default();
        for (subject, cpus, queues, rate) in [
            (Who::Kernel, "apart", 1, 90.0),
            (Who::Kernel, "shared", 1, 20.0),
            (Who::Kernel, "shared", 4, 60.0),
            (Who::QsdUring, "apart", 1, 45.0),
            (Who::QsdUring, "shared", 1, 5.0),
            (Who::QsdUring, "shared", 4, 10.0),
            // The best peer, but not QEMU.
            (Who::VhostScsi, "shared", 1, 20.0),
            (Who::VhostScsi, "shared", 4, 30.0),
        ] {
            let at = point(&[
                ("device", &Speed::Null.name()),
                ("load", &"randread"),
                ("block", &4096),
                ("client", &"event"),
                ("CPUs", &cpus),
                ("depth", &32),
                ("queues", &queues),
            ]);
            set.add(subject.name(), &at, vec![(IOPS, rate)]);
        }
        let mut report = Report::new("x", Vec::new());
        report.sections.push(Section::new("Measurements", "", &set, &[]));
        parts.0.iter_mut().find(|part| part.name == QUEUES).unwrap().report = Some(report);
        let blocks = blocks(&parts);
        let Block::Table(table) = &blocks[5] else { panic!("{blocks:?}") };
        let of = |load: &str| table.rows.iter().find(|row| row[0] == load).unwrap()[1..3].to_vec();
        assert_eq!(of("randread, RAM, 1 queues, over QEMU"), ["0.89", "4.00"]);
        assert_eq!(of("randread, RAM, 4 queues, over QEMU"), ["3.65", "6.00"]);
        assert_eq!(of("randread, RAM, 4 queues over one"), ["5.24", "3.00"]);
        assert_eq!(of("randwrite, RAM, 2 queues, over QEMU"), ["1.01", "-"]);
    }
}
