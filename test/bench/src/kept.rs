// SPDX-License-Identifier: Apache-2.0
//! Instructions of paths, compared with those that the repository keeps.

use anyhow::{Context, Result, bail};
use kit::metric::{Metric, Row, Set};
use kit::outcome::PARTLY_SKIPPED;
use kit::report::Report;

use crate::setup::KERNEL_NAME;

/// A report of path lengths, as `--json` writes it.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Its file, for messages.
    pub file: &'static str,
    /// Its content.
    pub text: &'static str,
    /// Title of its section.
    pub title: &'static str,
    /// Name of the length.
    pub metric: Metric,
}

impl Kept {
    /// Checks that no path of `rows` is longer than the kept one by more than `tolerance` percent. The kernel's share
    /// changes with the kernel: another one than `kernel` is not compared.
    ///
    /// # Errors
    /// A path that is longer or is not kept; a report that cannot be read.
    pub fn check<'a>(
        &self,
        rows: impl IntoIterator<Item = &'a Row>,
        kernel: &str,
        tolerance: f64,
    ) -> Result<()> {
        match self.compare(rows, kernel, tolerance)? {
            Some(reason) => println!("{PARTLY_SKIPPED}{reason}"),
            None => {
                println!("No path has grown by more than {tolerance} % over those that are kept.")
            }
        }
        Ok(())
    }

    /// The same, without a word; returns the reason if nothing could be compared.
    fn compare<'a>(
        &self,
        rows: impl IntoIterator<Item = &'a Row>,
        kernel: &str,
        tolerance: f64,
    ) -> Result<Option<String>> {
        let Kept { file, .. } = self;
        let report = self.report()?;
        let of = kernel_of(&report).with_context(|| format!("{file} names no kernel"))?;
        if of != kernel {
            let reason = format!(
                "path lengths were kept on {of} and this is {kernel}: keep new ones ({file})"
            );
            return Ok(Some(reason));
        }
        let kept = self.paths_of(report)?;
        let rows = Vec::from_iter(rows);
        if rows.is_empty() {
            bail!("no path of {file} was measured");
        }
        if let Some(row) = rows.iter().find(|row| kept.at(&row.subject, &row.point).is_none()) {
            bail!("{file} has none for {}", place(row));
        }
        let longer = self.longer_than(&rows, &kept, tolerance);
        if !longer.is_empty() {
            bail!("paths have grown by more than {tolerance} %: {}", longer.join("; "));
        }
        Ok(None)
    }

    /// The whole report.
    ///
    /// # Errors
    /// The text is no report.
    pub fn report(&self) -> Result<Report> {
        serde_json::from_str(self.text).with_context(|| format!("{} is no report", self.file))
    }

    /// The path lengths of a report.
    fn paths_of(&self, report: Report) -> Result<Set> {
        let section = report.sections.into_iter().find(|section| section.title == self.title);
        Ok(section.with_context(|| format!("{} holds no path lengths", self.file))?.rows)
    }

    fn longer_than(&self, rows: &[&Row], kept: &Set, tolerance: f64) -> Vec<String> {
        let longer = |row: &&Row| {
            let before = kept.at(&row.subject, &row.point)?.median(self.metric);
            let now = row.median(self.metric);
            (now > before * (1.0 + tolerance / 100.0))
                .then(|| format!("{}: {before:.0} to {now:.0}", place(row)))
        };
        rows.iter().filter_map(longer).collect()
    }
}

/// The kernel that a report describes.
fn kernel_of(report: &Report) -> Option<&str> {
    let mut setup = report.setup.iter();
    setup.find(|(name, _)| name == KERNEL_NAME).map(|(_, kernel)| kernel.as_str())
}

/// The subject and the labels of a row.
fn place(row: &Row) -> String {
    let labels = row.point.iter().map(|(name, value)| format!("{name} {value}"));
    [row.subject.clone()].into_iter().chain(labels).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::metric::point;

    const LENGTH: Metric = Metric::new("length", "instructions");
    const KEPT: Kept = Kept {
        file: "kept.json",
        text: r#"{"title": "Instructions", "setup": [["kernel", "6.12"]], "goals": [], "not_judged": [],
            "left_out": [], "sections": [{"title": "Paths", "method": "", "columns": [], "rows": [
            {"subject": "a", "point": {"depth": "1"},
             "metrics": {"length": {"unit": "instructions", "values": [1000.0]}}}]}]}"#,
        title: "Paths",
        metric: LENGTH,
    };

    fn compare(subject: &str, length: f64, kernel: &str) -> Result<Option<String>> {
        let mut set = Set::default();
        set.add(subject, &point(&[("depth", &1)]), vec![(LENGTH, length)]);
        KEPT.compare(set.rows(), kernel, 3.0)
    }

    #[test]
    fn a_path_may_grow_by_the_tolerance_and_must_be_kept() {
        assert_eq!(compare("a", 1029.0, "6.12").unwrap(), None);
        let told = compare("a", 1031.0, "6.12").unwrap_err().to_string();
        assert!(told.ends_with("a, depth 1: 1000 to 1031"), "{told}");
        let told = compare("b", 1.0, "6.12").unwrap_err().to_string();
        assert_eq!(told, "kept.json has none for b, depth 1");
        let told = compare("a", 2000.0, "6.18").unwrap().unwrap();
        assert!(told.contains("kept on 6.12 and this is 6.18"), "{told}");
    }
}
