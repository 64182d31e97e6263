// SPDX-License-Identifier: Apache-2.0
//! `bench compare`: the change from one report to another.

use std::fmt::Write;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args as ClapArgs;
use kit::metric::{Row, median};
use kit::report::{Goal, Report};

use crate::significance::{ALPHA, p_value};

/// Options of `bench compare`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// JSON of the earlier run
    old: PathBuf,
    /// JSON of the later run
    new: PathBuf,
    /// Also print the cells without a significant change
    #[arg(long)]
    all: bool,
}

/// Prints the changes; an error if a goal was met before and is missed or not judged now.
pub fn run(args: &Args) -> Result<()> {
    let [old, new] = [&args.old, &args.new].map(|path| Report::read(path));
    let (old, new) = (old?, new?);
    print!("{}", markdown(&old, &new, args.all));
    no_goal_lost(&old, &new)
}

/// The options that name earlier runs.
#[derive(Clone, Debug, Default, ClapArgs)]
pub struct Baseline {
    /// JSON of an earlier run; a goal that it met and this run misses or does not judge is a failure
    #[arg(long, value_name = "FILE", conflicts_with = "keep_goals")]
    baseline: Option<PathBuf>,
    /// File with the goals that runs on this machine have met; one that this run misses is a
    /// failure, and those that it meets are added
    #[arg(long, value_name = "FILE")]
    keep_goals: Option<PathBuf>,
}

/// The earlier runs.
#[derive(Debug, Default)]
pub struct Earlier {
    report: Option<Report>,
    kept: Option<(PathBuf, Vec<Goal>)>,
}

impl Baseline {
    /// Leaves kept goals alone.
    pub fn keep_none(&mut self) {
        self.keep_goals = None;
    }

    /// Reads the earlier runs, if any are named. Called before the measurement, so that a file that
    /// cannot be read is reported at once. A file of kept goals need not exist.
    ///
    /// # Errors
    /// A file cannot be read, or is none of this program's.
    pub fn read(&self) -> Result<Earlier> {
        let report = self.baseline.as_deref().map(Report::read).transpose()?;
        let read = |path: &PathBuf| anyhow::Ok((path.clone(), kept_goals(path)?));
        Ok(Earlier { report, kept: self.keep_goals.as_ref().map(read).transpose()? })
    }
}

impl Earlier {
    /// Judges a run, and adds the goals that it meets to the kept ones.
    ///
    /// # Errors
    /// A goal was met before, and `report` misses it; or the report of an earlier run met a goal
    /// that `report` does not judge; or the kept goals cannot be written.
    pub fn judge(self, report: &Report) -> Result<()> {
        if let Some(earlier) = &self.report {
            no_goal_lost(earlier, report)?;
        }
        let Some((path, mut kept)) = self.kept else { return Ok(()) };
        let is_kept = |kept: &[Goal], name: &str| kept.iter().any(|goal| goal.name == name);
        let (met, missed): (Vec<_>, Vec<_>) = report.goals.iter().partition(|goal| goal.met);
        let lost: Vec<_> = missed.into_iter().filter(|goal| is_kept(&kept, &goal.name)).collect();
        for goal in met {
            if !is_kept(&kept, &goal.name) {
                kept.push(goal.clone());
            }
        }
        write_goals(&path, &kept)?;
        if lost.is_empty() {
            return Ok(());
        }
        let lost: Vec<_> = lost.iter().map(|goal| goal.title()).collect();
        bail!(
            "goals that this machine has met before and missed now (remove {} to forget them):\n  {}",
            path.display(),
            lost.join("\n  ")
        )
    }
}

/// The goals in a file; none if there is no such file.
fn kept_goals(path: &Path) -> Result<Vec<Goal>> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    serde_json::from_slice(&text)
        .with_context(|| format!("{} is no file of kept goals", path.display()))
}

/// Replaces the file of kept goals.
fn write_goals(path: &Path, kept: &[Goal]) -> Result<()> {
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let write = || -> Result<()> {
        fs::create_dir_all(directory)?;
        let file = tempfile::NamedTempFile::new_in(directory)?;
        serde_json::to_writer_pretty(&file, kept)?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("cannot keep the goals in {}", path.display()))
}

/// An error if a goal was met before and is missed or not judged now.
fn no_goal_lost(old: &Report, new: &Report) -> Result<()> {
    let lost: Vec<_> = lost(old, new).iter().map(|goal| goal.title()).collect();
    let vanished: Vec<_> = vanished(old, new).iter().map(|goal| goal.title()).collect();
    let mut reasons = Vec::new();
    if !lost.is_empty() {
        let lost = lost.join("\n  ");
        reasons.push(format!("goals that were met before and are missed now:\n  {lost}"));
    }
    if !vanished.is_empty() {
        let vanished = vanished.join("\n  ");
        reasons.push(format!(
            "goals that were met before and are not judged now (measure the same loads with the \
             same peers):\n  {vanished}"
        ));
    }
    if reasons.is_empty() {
        return Ok(());
    }
    bail!("{}", reasons.join("\n"));
}

/// Goals that `old` met and `new` does not have.
fn vanished<'a>(old: &'a Report, new: &Report) -> Vec<&'a Goal> {
    let is_known = |goal: &Goal| new.goals.iter().any(|now| now.name == goal.name);
    old.goals.iter().filter(|goal| goal.met && !is_known(goal)).collect()
}

/// Goals of `new` that it misses and `old` met.
fn lost<'a>(old: &Report, new: &'a Report) -> Vec<&'a Goal> {
    let was_met = |goal: &&Goal| old.goals.iter().any(|was| was.name == goal.name && was.met);
    new.goals.iter().filter(|goal| !goal.met).filter(was_met).collect()
}

/// One metric of one cell in both reports.
struct Change<'a> {
    section: &'a str,
    row: &'a Row,
    metric: &'a str,
    /// Median of the later run over that of the earlier one.
    ratio: f64,
    p: Option<f64>,
}

impl Change<'_> {
    fn is_significant(&self) -> bool {
        self.p.is_some_and(|p| p < ALPHA)
    }

    fn line(&self) -> String {
        let labels: Vec<_> = self.row.point.iter().map(|(k, v)| format!("{k} {v}")).collect();
        let (p, verdict) = match self.p {
            None => ("-".to_owned(), "too few samples"),
            Some(p) if p >= ALPHA => (format!("{p:.3}"), "no difference shown"),
            Some(p) if self.ratio > 1.0 => (format!("{p:.3}"), "greater"),
            Some(p) => (format!("{p:.3}"), "less"),
        };
        format!(
            "| {} | {} | {} | {} | {:.3} | {p} | {verdict} |",
            self.section,
            labels.join(", "),
            self.row.subject,
            self.metric,
            self.ratio
        )
    }
}

/// All metrics of all cells that both reports have.
fn changes<'a>(old: &Report, new: &'a Report) -> Vec<Change<'a>> {
    let mut changes = Vec::new();
    for section in &new.sections {
        let Some(was) = old.sections.iter().find(|was| was.title == section.title) else {
            continue;
        };
        for row in section.rows.rows() {
            let Some(before) = was.rows.at(&row.subject, &row.point) else { continue };
            for (metric, _, values) in row.metrics() {
                let earlier = before.metrics().find(|(name, ..)| *name == metric);
                let Some((_, _, earlier)) = earlier else { continue };
                let medians = [values, earlier].map(|values| median(values.iter().copied()));
                if medians[1] == 0.0 {
                    continue;
                }
                let (ratio, p) = (medians[0] / medians[1], p_value(earlier, values));
                changes.push(Change { section: &section.title, row, metric, ratio, p });
            }
        }
    }
    changes
}

/// The number of rows of `a` that `b` lacks.
fn missing(a: &Report, b: &Report) -> usize {
    let has = |title: &str, row: &Row| {
        let sections = b.sections.iter().filter(|section| section.title == title);
        sections.into_iter().any(|section| section.rows.at(&row.subject, &row.point).is_some())
    };
    let rows = a.sections.iter().flat_map(|s| s.rows.rows().iter().map(move |row| (&s.title, row)));
    rows.filter(|(title, row)| !has(title, row)).count()
}

fn markdown(old: &Report, new: &Report, all: bool) -> String {
    let changes = changes(old, new);
    let significant = changes.iter().filter(|change| change.is_significant()).count();
    let few = changes.iter().filter(|change| change.p.is_none()).count();
    let mut text = format!(
        "{} figures in both reports: {significant} differ (Mann-Whitney U, p < {ALPHA}; chance \
         alone gives {:.0}), {few} have too few samples for the test. Rows in the earlier report \
         only: {}; in the later one only: {}.\n",
        changes.len(),
        ALPHA * (changes.len() - few) as f64,
        missing(old, new),
        missing(new, old)
    );
    let mut shown = changes.iter().filter(|change| all || change.is_significant()).peekable();
    if shown.peek().is_some() {
        text.push_str("\n| section | point | subject | metric | new/old | p | |\n");
        text.push_str("|---|---|---|---|---:|---:|---|\n");
    }
    for change in shown {
        let _ = writeln!(text, "{}", change.line());
    }
    for goal in lost(old, new) {
        let _ = writeln!(
            text,
            "\nLOST: {} is {:.3}, wanted {}",
            goal.title(),
            goal.measured,
            goal.wanted
        );
    }
    for goal in vanished(old, new) {
        let _ = writeln!(text, "\nNOT JUDGED: {} was {:.3}", goal.title(), goal.measured);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::metric::{IOPS, Set, point};
    use kit::report::Section;

    fn report(rates: &[f64], ratio: f64, peer: &str) -> Report {
        let mut set = Set::default();
        for rate in rates {
            set.add("ours", &point(&[("depth", &1)]), vec![(IOPS, *rate)]);
        }
        let mut report = Report::new("Test", Vec::new());
        report.sections.push(Section::new("Rates", "", &set, &[]));
        report.goals.push(Goal::at_least("rate".to_owned(), ratio, 1.0).over(peer));
        report
    }

    const SLOW: [f64; 5] = [1.0, 1.1, 1.2, 1.3, 1.4];
    const FAST: [f64; 5] = [2.0, 2.1, 2.2, 2.3, 2.4];

    #[test]
    fn a_clear_change_is_significant_in_both_directions() {
        let (slow, fast) = (report(&SLOW, 1.0, ""), report(&FAST, 1.0, ""));
        let better = markdown(&slow, &fast, false);
        assert!(better.contains("| ours | iops | 1.833 | 0.008 | greater |"), "{better}");
        let worse = markdown(&fast, &slow, false);
        assert!(worse.contains("| ours | iops | 0.545 | 0.008 | less |"), "{worse}");
    }

    #[test]
    fn noise_is_no_change() {
        let [a, b] =
            [[1.0, 1.4, 1.2, 1.6, 1.5], [1.1, 1.3, 1.5, 1.2, 1.6]].map(|r| report(&r, 1.0, ""));
        assert!(!markdown(&a, &b, false).contains("iops"));
        assert!(markdown(&a, &b, true).contains("no difference shown"));
    }

    #[test]
    fn few_samples_are_told_and_not_judged() {
        let (a, b) = (report(&SLOW[..3], 1.0, ""), report(&FAST[..3], 1.0, ""));
        assert!(markdown(&a, &b, true).contains("| 1.909 | - | too few samples |"));
    }

    #[test]
    fn a_lost_goal_is_an_error_whoever_is_the_best_peer() {
        let (met, missed) = (report(&FAST, 1.2, "qsd a"), report(&FAST, 0.9, "qsd b"));
        let why = no_goal_lost(&met, &missed).unwrap_err().to_string();
        assert!(why.contains("rate (qsd b)"), "{why}");
        for (old, new) in [(&missed, &met), (&met, &met), (&missed, &missed)] {
            assert!(no_goal_lost(old, new).is_ok());
        }
    }

    #[test]
    fn a_goal_that_is_not_judged_any_more_is_an_error_if_it_was_met() {
        let (met, missed) = (report(&FAST, 1.2, "qsd a"), report(&FAST, 0.9, "qsd a"));
        let mut without = report(&FAST, 1.2, "");
        without.goals.clear();
        let judged =
            |old: Option<&Report>, new| Earlier { report: old.cloned(), kept: None }.judge(new);
        let why = judged(Some(&met), &without).unwrap_err().to_string();
        assert!(why.contains("not judged now") && why.contains("rate (qsd a)"), "{why}");
        assert!(!why.contains("missed now"), "{why}");
        assert!(markdown(&met, &without, false).contains("NOT JUDGED: rate (qsd a) was 1.200"));
        assert!(judged(Some(&missed), &without).is_ok());
        assert!(judged(Some(&without), &met).is_ok());
        assert!(judged(None, &without).is_ok());
    }

    #[test]
    fn a_kept_goal_that_is_missed_is_an_error_until_it_is_met_or_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("new/goals.json");
        let judge = |ratio, peer| {
            let baseline = Baseline { baseline: None, keep_goals: Some(file.clone()) };
            baseline.read().unwrap().judge(&report(&FAST, ratio, peer))
        };
        assert!(judge(0.9, "qsd a").is_ok(), "never met");
        assert!(judge(1.2, "qsd a").is_ok());
        for _ in 0..2 {
            let why = judge(0.9, "qsd b").unwrap_err().to_string();
            assert!(why.contains("rate (qsd b)") && why.contains("goals.json"), "{why}");
        }
        assert!(judge(1.1, "qsd b").is_ok());
        fs::write(&file, "{}").unwrap();
        let baseline = Baseline { baseline: None, keep_goals: Some(file.clone()) };
        let why = baseline.read().unwrap_err().to_string();
        assert!(why.contains("no file of kept goals"), "{why}");
        fs::remove_file(&file).unwrap();
        assert!(judge(0.9, "qsd b").is_ok());
    }
}
