// SPDX-License-Identifier: Apache-2.0
//! Cells: a subject of this project at a point, beside its best peer and the bare device.

use kit::metric::{IOPS, Point, Row, Set};

use super::parts::Parts;
use crate::server::{OURS, is_bare};

/// The subject of fio on the bare device in the part `nested`.
const NO_GUEST: &str = "no guest";

/// True for a subject of this project.
pub(super) fn is_ours(subject: &str) -> bool {
    subject == OURS || subject.starts_with("ours, ") || subject.starts_with("vhost-blk ")
}

/// True for the device without any server.
pub(super) fn is_device(subject: &str) -> bool {
    is_bare(subject) || subject == NO_GUEST
}

/// True for other projects' servers, drivers and ways to attach a disk.
pub(super) fn is_peer(subject: &str) -> bool {
    !is_ours(subject) && !is_device(subject)
}

/// One cell.
#[derive(Clone, Debug)]
pub(super) struct Cell<'a> {
    pub(super) part: &'static str,
    pub(super) row: &'a Row,
    pub(super) peer: Option<&'a Row>,
    pub(super) device: Option<&'a Row>,
}

impl Cell<'_> {
    /// The rate over that of the best peer.
    pub(super) fn ratio(&self) -> Option<f64> {
        self.peer.map(|peer| self.row.over(peer, IOPS))
    }

    /// The rate over that of the bare device.
    pub(super) fn of_device(&self) -> Option<f64> {
        self.device.map(|device| self.row.over(device, IOPS))
    }

    /// All labels of the point.
    pub(super) fn place(&self) -> String {
        place(&self.row.point)
    }
}

/// All labels of a point.
pub(super) fn place(point: &Point) -> String {
    let labels: Vec<_> = point.iter().map(|(name, value)| format!("{name} {value}")).collect();
    labels.join(", ")
}

/// The fastest bare device at a point; it has no client that waits.
pub(super) fn device<'a>(set: &'a Set, point: &Point) -> Option<&'a Row> {
    let mut without = point.clone();
    without.remove("client");
    let same = |point| set.most(point, IOPS, is_device);
    same(&without).or_else(|| same(point))
}

/// All cells with a rate.
pub(super) fn all(parts: &Parts) -> Vec<Cell<'_>> {
    let mut cells = Vec::new();
    for (part, report) in parts.measured() {
        for section in &report.sections {
            let set = &section.rows;
            let rows = set.rows().iter().filter(|row| is_ours(&row.subject));
            for row in rows.filter(|row| row.median(IOPS) > 0.0) {
                let peer = set.most(&row.point, IOPS, is_peer).filter(|p| p.median(IOPS) > 0.0);
                let device = device(set, &row.point);
                cells.push(Cell { part: part.name, row, peer, device });
            }
        }
    }
    cells
}

/// The cells that are behind their best peer, the worst one first.
pub(super) fn behind<'a>(cells: &[Cell<'a>]) -> Vec<Cell<'a>> {
    let mut behind: Vec<_> = cells.iter().filter(|c| c.ratio().is_some_and(|r| r < 1.0)).collect();
    behind.sort_by(|a, b| a.ratio().unwrap_or(1.0).total_cmp(&b.ratio().unwrap_or(1.0)));
    behind.into_iter().cloned().collect()
}
