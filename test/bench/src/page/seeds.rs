// SPDX-License-Identifier: Apache-2.0
//! Published tables of earlier work, beside this project's figures for the nearest load.

use kit::metric::{IOPS, Row, Set};

use super::cells::{device, is_peer};
use super::document::{Block, Table};
use super::parts::{NATIVE, Parts};

/// The other side of a ratio.
#[derive(Clone, Copy)]
enum Over {
    /// The fastest peer.
    Peer,
    /// The bare device.
    Device,
    /// Another subject.
    Subject(&'static str),
}

/// A published ratio, and the rows that give ours.
struct Entry {
    load: String,
    seed: f64,
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
        let other = match entry.over {
            Over::Peer => set.most(&row.point, IOPS, is_peer),
            Over::Device => device(set, &row.point),
            Over::Subject(subject) => set.at(subject, &row.point),
        }?;
        (other.median(IOPS) > 0.0).then(|| row.over(other, IOPS))
    };
    parts.of(entry.part)?.sections.iter().find_map(|section| find(&section.rows))
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
        part: NATIVE,
        subject: "ours",
        labels: labels.into(),
        over,
    }
}

fn seed_2011() -> Seed {
    let mut entries = Vec::new();
    for (load, seeds) in [
        ("read", [4755.0 / 4116.0, 8645.0 / 7814.0, 10084.0 / 8867.0]),
        ("write", [4370.0 / 3848.0, 7009.0 / 6505.0, 9938.0 / 9335.0]),
    ] {
        for (depth, seed) in (1..).zip(seeds) {
            entries.push(native(load, 512, depth, seed, Over::Peer));
        }
    }
    Seed {
        title: "2011: vhost-blk with kernel AIO, 512 bytes, sequential",
        about: "The seed compares with QEMU's virtio-blk in a guest on a SATA disk. Here: the \
                io_uring plane over the best of qemu-storage-daemon on the real disk, without a \
                guest.",
        entries,
    }
}

fn seed_2022_host() -> Seed {
    let mut entries = vec![
        native("randread", 4096, 128, 95.6 / 57.5, Over::Peer),
        native("randwrite", 4096, 128, 84.3 / 79.4, Over::Peer),
        native("randread", 4096, 128, 95.6 / 95.8, Over::Device),
        native("randwrite", 4096, 128, 84.3 / 85.3, Over::Device),
    ];
    for (queues, seed) in [(1, 110.0 / 123.0), (2, 247.0 / 253.0), (4, 576.0 / 158.0)] {
        let labels = [("device", "null_blk".to_owned()), ("queues", queues.to_string())];
        entries.push(Entry {
            load: format!("randread, RAM, {queues} queues, over QEMU"),
            seed,
            part: "queues",
            subject: "vhost-blk kernel",
            labels: labels.into(),
            over: Over::Peer,
        });
    }
    Seed {
        title: "2022: vhost-blk with bio, several queues",
        about: "The seed has depth 128 in a guest: an SSD, and a RAM disk with as many queues as \
                virtual CPUs. Here: the real disk without a guest, and the kernel plane on \
                null_blk at depth 32.",
        entries,
    }
}

fn seed_2022_polling() -> Seed {
    let seeds = [(1, 385.0 / 339.0), (2, 408.0 / 367.0), (4, 424.0 / 383.0)];
    let entry = |(jobs, seed)| Entry {
        load: format!("randread of 512 bytes, depth 64, {jobs} jobs, polled over interrupts"),
        seed,
        part: "guest",
        subject: "ours, request, polled",
        labels: vec![("load", format!("randread, depth 64, {jobs} jobs"))],
        over: Over::Subject("ours, request, interrupts"),
    };
    Seed {
        title: "2022: the guest driver's polled queues",
        about: "Both in a guest with four virtual CPUs; this project's request path.",
        entries: seeds.into_iter().map(entry).collect(),
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
                part: "guest",
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

    #[test]
    fn ours_stands_beside_the_seed_and_a_dash_for_a_missing_part() {
        let blocks = blocks(&parts(false));
        let Block::Table(table) = &blocks[2] else { panic!("{blocks:?}") };
        assert_eq!(table.rows[0][1..], ["1.16", "0.80", "native"]);
        let Block::Table(table) = &blocks[8] else { panic!("{blocks:?}") };
        assert_eq!(table.rows[0][1..], ["1.14", "-", "guest"]);
    }
}
