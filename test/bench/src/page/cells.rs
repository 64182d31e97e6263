// SPDX-License-Identifier: Apache-2.0
//! Cells: a subject of this project at a point, beside its best peer and the bare device.

use kit::metric::{IOPS, Point, Row, Set};

use super::parts::Parts;
use crate::host::subject::Who;
use crate::server::{
    OURS_FRAGMENTED, OURS_QCOW2, is_bare, is_ours, is_qsd, is_qsd_fragmented, is_qsd_qcow2,
};

/// The subject of fio on the bare device in the part `nested`.
const NO_GUEST: &str = "no guest";

/// True for this project made slower on purpose, to show what a means brings: neither ours nor a
/// peer.
pub(super) fn is_foil(subject: &str) -> bool {
    let foils = [Who::KernelPlain, Who::KernelInterrupts, Who::UringInterrupts];
    foils.iter().any(|who| who.name() == subject)
}

/// True for QEMU: its own device or qemu-storage-daemon, on the same storage as ours.
pub(super) fn is_qemu(subject: &str) -> bool {
    is_qsd(subject) || subject.starts_with("QEMU ")
}

/// True for a subject that does the same work as `ours`: a qcow2 image is compared with a qcow2
/// image.
fn is_peer_of(ours: &str, subject: &str) -> bool {
    is_peer(subject)
        && (ours == OURS_QCOW2) == is_qsd_qcow2(subject)
        && (ours == OURS_FRAGMENTED) == is_qsd_fragmented(subject)
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
    /// The section of the part; points of two sections may have the same labels.
    pub(super) section: &'a str,
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

    /// The section and all labels of the point.
    pub(super) fn place(&self) -> String {
        let labels = self.row.point.iter().map(|(name, value)| format!("{name} {value}"));
        let labels: Vec<_> = labels.collect();
        format!("{}: {}", self.section, labels.join(", "))
    }
}

/// The fastest bare device at a point; it has no client that waits.
pub(super) fn device<'a>(set: &'a Set, point: &Point) -> Option<&'a Row> {
    let mut without = point.clone();
    without.remove("client");
    let same = |point| set.most(point, IOPS, is_device);
    same(&without).or_else(|| same(point))
}

/// All cells with a rate, without those that are slower on purpose.
pub(super) fn all(parts: &Parts) -> Vec<Cell<'_>> {
    let mut cells = Vec::new();
    for (part, report) in parts.measured() {
        for section in &report.sections {
            let set = &section.rows;
            let is_cell = |row: &&Row| is_ours(&row.subject) && !is_foil(&row.subject);
            let rows = set.rows().iter().filter(is_cell);
            for row in rows.filter(|row| row.median(IOPS) > 0.0) {
                let peer = set.most(&row.point, IOPS, |name| is_peer_of(&row.subject, name));
                let peer = peer.filter(|peer| peer.median(IOPS) > 0.0);
                let device = device(set, &row.point);
                let (part, section) = (part.name, section.title.as_str());
                cells.push(Cell { part, section, row, peer, device });
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::parts::HOST;
    use crate::server::OURS;
    use kit::metric::{Set, point};
    use kit::report::{Report, Section};

    fn parts(rows: &[(&str, f64)]) -> Parts {
        let mut set = Set::default();
        for (subject, rate) in rows {
            set.add(subject, &point(&[("depth", &1)]), vec![(IOPS, *rate)]);
        }
        let mut report = Report::new("x", Vec::new());
        report.sections.push(Section::new("Measurements", "", &set, &[]));
        let mut parts = Parts::read(None, None, None).unwrap();
        let host = parts.0.iter_mut().find(|part| part.name == HOST).unwrap();
        host.report = Some(report);
        parts
    }

    #[test]
    fn what_is_slower_on_purpose_is_neither_a_cell_nor_a_peer() {
        let parts = parts(&[
            (Who::Kernel.name(), 2.0),
            (Who::KernelPlain.name(), 1.0),
            (Who::KernelInterrupts.name(), 9.0),
            (Who::UringInterrupts.name(), 1.0),
            (Who::QsdNative.name(), 3.0),
        ]);
        let cells = all(&parts);
        let found: Vec<_> =
            cells.iter().map(|c| (c.row.subject.as_str(), c.peer.unwrap().median(IOPS))).collect();
        assert_eq!(found, [(Who::Kernel.name(), 3.0)]);
        let behind: Vec<_> = behind(&cells).iter().map(Cell::place).collect();
        assert_eq!(behind, ["Measurements: depth 1"]);
    }

    #[test]
    fn an_image_is_compared_with_an_image_and_a_file_with_a_file() {
        let rows = [(OURS, 4.0), (OURS_QCOW2, 2.0), ("qsd native", 3.0), ("qsd qcow2 native", 1.0)];
        let ratios: Vec<_> = all(&parts(&rows)).iter().map(|cell| cell.ratio().unwrap()).collect();
        assert_eq!(ratios, [4.0 / 3.0, 2.0]);
    }
}
