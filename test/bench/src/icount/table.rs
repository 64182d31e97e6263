// SPDX-License-Identifier: Apache-2.0
//! The table of path lengths, and the comparison with a stored one.

use std::fmt::Write;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::host::subject::Who;

/// Instructions of one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Path {
    /// The subject of the path.
    pub(super) who: Who,
    /// Requests in flight.
    pub(super) depth: u16,
    /// From one request to the next: client, server, switches between them, interrupts.
    pub(super) whole: f64,
    /// In the client's thread.
    pub(super) client: f64,
    /// In the server's threads.
    pub(super) server: f64,
}

/// All path lengths of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Table {
    /// The paths, in order of measurement.
    pub(super) paths: Vec<Path>,
}

impl Table {
    fn find(&self, who: Who, depth: u16) -> Option<&Path> {
        self.paths.iter().find(|path| (path.who, path.depth) == (who, depth))
    }

    /// The table as markdown, with the goal.
    pub(super) fn markdown(&self) -> String {
        let mut text = String::from(
            "## Path lengths\n\nInstructions for each 4 KiB random read on null_blk, nothing polls. \
             `whole`: everything, client included; `server`: its threads alone.\n\n\
             | server | depth | whole | client | server | whole, over the kernel plane's |\n\
             |---|---:|---:|---:|---:|---:|\n",
        );
        for path in &self.paths {
            let ratio = self
                .find(Who::Kernel, path.depth)
                .map_or_else(|| "-".to_owned(), |ours| format!("{:.2}", path.whole / ours.whole));
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {ratio} |",
                path.who.name(),
                path.depth,
                path.whole,
                path.client,
                path.server
            );
        }
        text + &self.goals()
    }

    /// The goal: fewer instructions than the io_uring plane and than vhost-scsi.
    fn goals(&self) -> String {
        let mut text = String::from("\n| | goal | measured | wanted |\n|---|---|---:|---:|\n");
        for ours in self.paths.iter().filter(|path| path.who == Who::Kernel) {
            for other in [Who::Uring, Who::VhostScsi] {
                let Some(theirs) = self.find(other, ours.depth) else { continue };
                let ratio = ours.whole / theirs.whole;
                let verdict = if ratio < 1.0 { "PASS" } else { "MISS" };
                let _ = writeln!(
                    text,
                    "| {verdict} | instructions, depth {}: kernel plane over {} | {ratio:.3} | < 1 |",
                    ours.depth,
                    other.name()
                );
            }
        }
        text
    }

    /// Checks that no path of this project is longer than in the file by more than `tolerance`
    /// percent.
    pub(super) fn check(&self, kept: &str, tolerance: f64) -> Result<()> {
        let kept: Self =
            serde_json::from_str(kept).context("path-lengths.json holds no path lengths")?;
        let new = self.paths.iter().find(|path| {
            matches!(path.who, Who::Kernel | Who::Uring)
                && kept.find(path.who, path.depth).is_none()
        });
        if let Some(path) = new {
            bail!("path-lengths.json has none for {}, depth {}", path.who.name(), path.depth);
        }
        let longer = self.longer_than(&kept, tolerance);
        if !longer.is_empty() {
            bail!("paths have grown by more than {tolerance} %: {}", longer.join("; "));
        }
        println!("No path has grown by more than {tolerance} % over those that are kept.");
        Ok(())
    }

    fn longer_than(&self, kept: &Self, tolerance: f64) -> Vec<String> {
        let ours = self.paths.iter().filter(|p| matches!(p.who, Who::Kernel | Who::Uring));
        ours.filter_map(|path| {
            let before = kept.find(path.who, path.depth)?.whole;
            (path.whole > before * (1.0 + tolerance / 100.0)).then(|| {
                format!("{}, depth {}: {before} to {}", path.who.name(), path.depth, path.whole)
            })
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(kernel: f64, scsi: f64) -> Table {
        let path = |who, whole| Path { who, depth: 1, whole, client: 0.0, server: 0.0 };
        Table { paths: vec![path(Who::Kernel, kernel), path(Who::VhostScsi, scsi)] }
    }

    #[test]
    fn only_our_own_paths_are_kept_from_growing() {
        let kept = table(1000.0, 1000.0);
        assert!(table(1029.0, 5000.0).longer_than(&kept, 3.0).is_empty());
        assert_eq!(table(1031.0, 900.0).longer_than(&kept, 3.0).len(), 1);
    }

    #[test]
    fn the_kept_path_lengths_can_be_read() {
        let kept: Table = serde_json::from_str(super::super::KEPT).unwrap();
        assert!(kept.find(Who::Kernel, 1).is_some() && kept.find(Who::Uring, 32).is_some());
    }

    #[test]
    fn a_shorter_path_than_vhost_scsi_passes() {
        assert!(table(900.0, 1000.0).markdown().contains("| PASS |"));
        assert!(table(1100.0, 1000.0).markdown().contains("| MISS |"));
    }
}
