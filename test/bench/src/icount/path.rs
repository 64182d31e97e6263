// SPDX-License-Identifier: Apache-2.0
//! The measured paths: a server, its storage, and a load.

use kit::metric::{Point, Row, point};

use crate::host::disk::Storage;
use crate::host::subject::{Programs, Who};
use crate::load::{Load, Op};
use crate::rig::Speed;

/// Label of the number of queues, of which one is busy.
pub(super) const QUEUES: &str = "queues";
/// Label of the storage.
pub(super) const STORAGE: &str = "storage";
/// Label of the load.
pub(super) const LOAD: &str = "load";

/// The labels of random reads of a null_blk by one queue.
pub(crate) const USUAL: [(&str, &str); 3] =
    [(QUEUES, "1"), (STORAGE, "null_blk"), (LOAD, "randread")];

/// The storage of most paths.
const NULL: Storage = Storage::Device(Speed::Null);
/// Most measurements of another path.
const FURTHER_ROUNDS: usize = 3;
/// The planes of this project.
const OURS: [Who; 2] = [Who::Kernel, Who::Uring];

/// A path, whose length depends on the number of requests in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    pub(super) who: Who,
    pub(super) storage: Storage,
    op: Op,
    packed: bool,
    /// Queues, of which one is busy. Sixteen threads serve more than one.
    pub(super) queues: u16,
}

impl Path {
    /// Random reads of a null_blk by one queue.
    fn usual(who: Who) -> Self {
        Self { who, storage: NULL, op: Op::Randread, packed: false, queues: 1 }
    }

    /// The programs with the options of this path.
    pub(super) fn programs(&self, programs: &Programs) -> Programs {
        let mut programs = programs.clone();
        if self.queues > 1 {
            programs.ours_args.push("--threads=16".to_owned());
        }
        programs
    }

    /// True for random reads of a null_blk, the most exact rows.
    fn is_exact(&self) -> bool {
        (self.storage, self.op, self.packed) == (NULL, Op::Randread, false)
    }

    /// The measured ones of these depths: the first and the last one for most paths.
    pub(super) fn depths(&self, depths: &[u16]) -> Vec<u16> {
        match depths {
            [first, .., last] if !self.is_exact() => vec![*first, *last],
            _ => depths.to_vec(),
        }
    }

    /// Measurements of the path, where an exact one has `rounds`.
    pub(super) fn rounds(&self, rounds: usize) -> usize {
        if self.is_exact() { rounds } else { rounds.min(FURTHER_ROUNDS) }
    }

    pub(super) fn load(&self, depth: u16) -> Load {
        let Self { op, packed, queues, .. } = *self;
        Load { op, packed, queues, ..Load::random_reads(depth) }
    }

    /// The point of its row.
    pub(super) fn point(&self, depth: u16) -> Point {
        let load = format!("{}{}", self.op, if self.packed { ", packed" } else { "" });
        point(&[
            ("depth", &depth),
            (QUEUES, &self.queues),
            (STORAGE, &self.storage.name()),
            (LOAD, &load),
        ])
    }
}

/// All paths of these servers; `wide` is the number of queues of this project's wide disk.
pub(super) fn all(who: &[Who], wide: u16) -> Vec<Path> {
    let ours = || OURS.into_iter().filter(|ours| who.contains(ours)).map(Path::usual);
    let mut paths: Vec<Path> = who.iter().copied().map(Path::usual).collect();
    paths.extend(ours().map(|path| Path { queues: wide, ..path }));
    for op in [Op::Randwrite, Op::Writeflush] {
        paths.extend(ours().map(|path| Path { op, ..path }));
    }
    for (storage, op) in [
        (Storage::Device(Speed::Polled), Op::Randread),
        (Storage::Raw, Op::Randread),
        (Storage::Raw, Op::Writeflush),
    ] {
        paths.extend(ours().map(|path| Path { storage, op, ..path }));
    }
    // Neither is in the kernel.
    let uring = || ours().filter(|path| path.who == Who::Uring);
    paths.extend(uring().map(|path| Path { packed: true, ..path }));
    for op in [Op::Randread, Op::Randwrite] {
        paths.extend(uring().map(|path| Path { storage: Storage::Qcow2, op, ..path }));
    }
    paths
}

/// True for a row with the labels [`USUAL`].
pub(crate) fn is_usual(row: &Row) -> bool {
    USUAL.iter().all(|&(label, value)| row.point.get(label).is_some_and(|own| own == value))
}

/// Subject, depth, and the labels that are not those of [`USUAL`].
pub(super) fn place(row: &Row) -> String {
    let unusual = USUAL.iter().map(|&(label, usual)| (label, usual, row.label(label)));
    let unusual = unusual.filter(|(_, usual, own)| usual != own);
    let unusual: String = unusual.map(|(label, _, own)| format!(", {label} {own}")).collect();
    format!("depth {}, {}{unusual}", row.label("depth"), row.subject)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_has_a_row_of_its_own() {
        let all = all(&[Who::Kernel, Who::Uring, Who::VhostScsi], 64);
        let mut rows: Vec<_> = all.iter().map(|path| (path.who, path.point(1))).collect();
        assert!(rows.iter().any(|(who, _)| *who == Who::VhostScsi));
        rows.sort();
        rows.dedup();
        assert_eq!(rows.len(), all.len());
    }

    #[test]
    fn the_usual_labels_are_those_of_the_first_paths() {
        let point = Path::usual(Who::Kernel).point(4);
        let labels: Vec<_> =
            point.iter().map(|(label, value)| (label.as_str(), value.as_str())).collect();
        assert!(USUAL.iter().all(|usual| labels.contains(usual)), "{labels:?}");
    }

    #[test]
    fn a_server_that_is_not_measured_has_no_path() {
        let all = all(&[Who::Kernel], 64);
        assert!(all.iter().all(|path| path.who == Who::Kernel) && all.len() > 2);
    }
}
