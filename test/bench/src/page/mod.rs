// SPDX-License-Identifier: Apache-2.0
//! `bench report`: one page from the JSON of all parts.
//!
//! * `parts`: the files.
//! * `cells`, `reasons`: comparisons with peers and with the bare device, and why some are behind.
//! * `tables`, `charts`, `stages`, `timeline`, `seeds`: the contents.
//! * `model`, `costs`: a prediction for real hardware.
//! * `readme`, `figure`: the table and the figure of the README.
//! * `document`, `chart`, `flow`: HTML, Markdown and SVG.

mod cells;
mod chart;
mod charts;
mod costs;
mod document;
mod figure;
mod flow;
mod model;
mod parts;
mod readme;
mod reasons;
mod seeds;
mod stages;
mod tables;
mod timeline;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args as ClapArgs;
use kit::report::Report;

use self::document::{Block, Document};
use self::parts::{NATIVE, Part, Parts};
use crate::timeline::WINDOW_TITLE;

/// Options of `bench report`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Args {
    /// JSON of the part without a VM (`bench --json`)
    #[arg(long, value_name = "FILE")]
    native: Option<PathBuf>,
    /// Directory with the JSON of `bench density` and `bench operations`, each named after its program
    #[arg(long, value_name = "DIR")]
    others: Option<PathBuf>,
    /// Directory with the JSON of the lab's parts (`make bench-lab`)
    #[arg(long, value_name = "DIR")]
    lab: Option<PathBuf>,
    /// Also write the rows of the README's table, which `readme.md` has, and the figure of them, beside it with the
    /// extension svg
    #[arg(long, value_name = "FILE", requires = "native")]
    keep: Option<PathBuf>,
    /// Directory of the report
    #[arg(long, value_name = "DIR", default_value = "report")]
    out: PathBuf,
}

/// Writes the report in all forms.
pub fn run(args: &Args) -> Result<()> {
    let parts = Parts::read(args.native.as_deref(), args.others.as_deref(), args.lab.as_deref())?;
    let document = document(&parts)?;
    fs::create_dir_all(&args.out).with_context(|| args.out.display().to_string())?;
    write(&args.out, "index.html", &document.html()?)?;
    write(&args.out, "report.md", &document.markdown())?;
    write(&args.out, "report.json", &(serde_json::to_string_pretty(&parts)? + "\n"))?;
    let Some(native) = parts.of(NATIVE) else { return Ok(()) };
    let kept = readme::kept(native)?;
    let figure = figure::svg(&kept)?;
    write(&args.out, "readme.md", &(readme::section(&kept) + "\n"))?;
    write(&args.out, "readme.svg", &figure)?;
    let Some(file) = &args.keep else { return Ok(()) };
    let rows = serde_json::to_string_pretty(&kept)? + "\n";
    for (file, text) in [(file.clone(), rows), (file.with_extension("svg"), figure)] {
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

fn write(directory: &Path, name: &str, text: &str) -> Result<()> {
    let path = directory.join(name);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

fn document(parts: &Parts) -> Result<Document> {
    let mut blocks = head(parts);
    blocks.push(Block::Heading(2, "Charts".to_owned()));
    blocks.extend(charts(parts));
    blocks.push(Block::Heading(2, "Stages of one request".to_owned()));
    blocks.extend(stages::blocks(parts)?);
    blocks.push(Block::Heading(2, "Time line of requests".to_owned()));
    blocks.extend(timeline::blocks(parts));
    blocks.push(Block::Heading(2, "Prediction for real hardware".to_owned()));
    blocks.extend(model::blocks(parts));
    blocks.push(Block::Heading(2, "Published tables of earlier work".to_owned()));
    blocks.extend(seeds::blocks(parts));
    for (part, report) in parts.measured() {
        blocks.extend(body(part, report));
    }
    Ok(Document { title: "vhost-blk: measured performance".to_owned(), blocks })
}

/// The worst cells, the summary and the goals.
fn head(parts: &Parts) -> Vec<Block> {
    let cells = cells::all(parts);
    let behind = cells::behind(&cells);
    let compared = cells.iter().filter(|cell| cell.peer.is_some()).count();
    let mut blocks = missing(parts);
    blocks.push(Block::Heading(2, "Worst cells".to_owned()));
    blocks.push(Block::Text(format!(
        "{} of {compared} cells are behind their best peer (ratio of the median rates below 1.0). {} \
         Ratios of one run only.",
        behind.len(),
        reasons::summary(&behind)
    )));
    if !behind.is_empty() {
        blocks.push(Block::Table(tables::cells(&behind)));
    }
    blocks.push(Block::Heading(2, "Summary".to_owned()));
    match parts.of(NATIVE) {
        Some(report) => {
            let about = "4 KiB random reads on one queue, without a VM: medians, ours over the \
                         best of all variants.";
            blocks.push(Block::Text(about.to_owned()));
            blocks.push(Block::Table(tables::summary_of(&cells, report)));
        }
        None => blocks.push(Block::Text("The part without a VM was not measured.".to_owned())),
    }
    blocks.push(Block::Heading(2, "Goals".to_owned()));
    blocks.push(Block::Text(
        "Reasons and profiles for missed goals are in `docs/measurements/misses.md`.".to_owned(),
    ));
    blocks.push(Block::Table(tables::goals(parts)));
    blocks
}

/// The parts and measurements that the report lacks.
fn missing(parts: &Parts) -> Vec<Block> {
    let absent = parts.missing().map(|part| {
        format!("{} ({}): not measured in this report; `{}`", part.name, part.about, part.command)
    });
    let left_out = parts.measured().flat_map(|(part, report)| {
        report.left_out.iter().map(move |reason| format!("{}: {reason}", part.name))
    });
    let lines: Vec<_> = absent.chain(left_out).collect();
    if lines.is_empty() {
        return Vec::new();
    }
    vec![Block::Heading(2, "Not in this report".to_owned()), Block::List(lines)]
}

fn charts(parts: &Parts) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (part, report) in parts.measured() {
        let sections = report.sections.iter();
        let charts: Vec<_> =
            sections.flat_map(|section| charts::of(part.name, &section.rows)).collect();
        if !charts.is_empty() {
            blocks.push(Block::Heading(3, format!("{}: {}", part.name, part.about)));
            blocks.push(Block::Charts(charts));
        }
    }
    if blocks.is_empty() {
        blocks.push(Block::Text("No part has charts.".to_owned()));
    }
    blocks
}

/// Command, machine, options of the peers, and all rows of a part.
fn body(part: &Part, report: &Report) -> Vec<Block> {
    let mut blocks = vec![
        Block::Heading(2, format!("{}: {}", part.name, part.about)),
        Block::Text(format!("Repeat with `{}`.", part.command)),
    ];
    let setup = report.setup.iter().map(|(name, value)| format!("{name}: `{value}`"));
    blocks.push(Block::List(setup.collect()));
    for section in &report.sections {
        blocks.push(Block::Heading(3, section.title.clone()));
        if !section.method.is_empty() {
            blocks.push(Block::Text(section.method.clone()));
        }
        if section.title == WINDOW_TITLE {
            blocks.push(Block::Text("Its rows are drawn above, and in `report.json`.".to_owned()));
            continue;
        }
        blocks.push(Block::Table(tables::rows(&section.rows)));
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::document::tests::texts;
    use super::*;
    use kit::metric::{CPU, Figures, IOPS, P50, P99, Set, point};
    use kit::report::{Goal, Section};

    fn figures(rate: f64) -> Figures {
        vec![(IOPS, 1000.0 * rate), (P50, 1.0 / rate), (P99, 2.0 / rate), (CPU, 3.0 / rate)]
    }

    /// A part without a VM: depths 1, 32, 128 of random reads, and the load of 2011.
    pub(super) fn native() -> Report {
        let mut set = Set::default();
        for depth in [1_u16, 32, 128] {
            let at =
                [("storage", "disk"), ("load", "randread"), ("block", "4096"), ("queues", "1")];
            let depth = depth.to_string();
            let mut labels: Vec<(&str, &dyn std::fmt::Display)> =
                at.iter().map(|(name, value)| (*name, value as &dyn std::fmt::Display)).collect();
            labels.push(("depth", &depth));
            let bare = point(&labels);
            labels.push(("client", &"event"));
            let here = point(&labels);
            set.add("ours", &here, figures(1.5));
            set.add("qsd native", &here, figures(1.0));
            set.add("bare fio psync", &bare, figures(1.0));
            set.add("bare fio io_uring", &bare, figures(2.0));
        }
        let read = point(&[
            ("storage", &"disk"),
            ("load", &"read"),
            ("block", &512),
            ("queues", &1),
            ("depth", &1),
            ("client", &"event"),
        ]);
        set.add("ours", &read, figures(0.8));
        set.add("qsd native", &read, figures(1.0));
        let mut report = Report::new("Set-up", vec![("CPU".to_owned(), "<fast> & new".to_owned())]);
        report.sections.push(Section::new("Measurements", "By `hand`.", &set, &[]));
        report.goals.push(Goal::at_least("rate".to_owned(), 1.5, 2.0).over("qsd native"));
        report.left_out.push("null: FLUSH".to_owned());
        report
    }

    /// The native part, with or without path lengths of the lab.
    pub(super) fn parts(lab: bool) -> Parts {
        let mut parts = Parts::read(None, None, None).unwrap();
        for part in &mut parts.0 {
            part.report = match part.name {
                NATIVE => Some(native()),
                "icount" if lab => Some(crate::icount::KEPT.report().unwrap()),
                _ => None,
            };
        }
        parts
    }

    #[test]
    fn the_page_is_well_formed_and_has_every_cell() {
        let parts = parts(false);
        let html = document(&parts).unwrap().html().unwrap();
        let cells = texts(&html, "td");
        let of = |subject: &str| cells.iter().filter(|cell| *cell == subject).count();
        // Once more among the worst cells: the one that is behind, and its peer. The kept path
        // lengths have three depths of the peer.
        assert_eq!([of("ours"), of("qsd native")], [4 + 1, 4 + 1 + 3]);
        assert_eq!([of("bare fio psync"), of("bare fio io_uring")], [3, 3]);
        assert!(html.contains("<figcaption>disk: rate, 4 KiB random reads, event</figcaption>"));
    }

    #[test]
    fn the_page_needs_no_network_and_no_script_and_has_dark_colours() {
        let html = document(&parts(true)).unwrap().html().unwrap();
        for forbidden in ["http:", "https:", "//", "<script", "<link", "url(", "@import", "src="] {
            assert!(!html.contains(forbidden), "{forbidden}");
        }
        assert!(html.contains("prefers-color-scheme: dark"));
    }

    #[test]
    fn the_worst_cell_comes_first_by_name() {
        let markdown = document(&parts(false)).unwrap().markdown();
        let worst = markdown.split("## Worst cells").nth(1).unwrap();
        assert!(worst.trim_start().starts_with("1 of 4 cells are behind"), "{worst}");
        let place =
            "Measurements: block 512, client event, depth 1, load read, queues 1, storage disk";
        assert!(
            worst.contains(&format!(
                "| native | ours | {place} | 0.80 | qsd native | - | NOT EXPLAINED |"
            )),
            "{worst}"
        );
        assert!(
            worst.contains("| native | rate (qsd native) | 1.500 | >= 2 | MISSED |"),
            "{worst}"
        );
    }

    #[test]
    fn missing_parts_and_left_out_loads_are_told() {
        let markdown = document(&parts(false)).unwrap().markdown();
        for part in
            ["host", "loads", "queues", "icount", "stages", "nested", "guest", "guest-icount"]
        {
            assert!(markdown.contains(&format!("--only {part}\"`")), "{part}: {markdown}");
        }
        assert!(markdown.contains("- native: null: FLUSH"), "{markdown}");
        assert!(markdown.contains("NOT measured in this report: the base lines"), "{markdown}");
        let with_lab = document(&parts(true)).unwrap().markdown();
        assert!(!with_lab.contains("--only icount\"`: not") && !with_lab.contains("base lines of"));
        assert!(with_lab.contains("Kernel plane, stage by stage: not measured."), "{with_lab}");
    }

    #[test]
    fn the_json_has_every_sample_and_the_machine() {
        let directory = tempfile::tempdir().unwrap();
        let native_file = directory.path().join("native.json");
        native().publish(Some(&native_file)).unwrap();
        let out = directory.path().join("report");
        let others = directory.path().join("others");
        fs::create_dir(&others).unwrap();
        let mut density = Report::new("Many", Vec::new());
        density.goals.push(Goal::below("idle of many".to_owned(), 0.0, 0.1));
        density.publish(Some(&others.join("density.json"))).unwrap();
        let (file, others) = (Some(native_file), Some(others));
        run(&Args { native: file, others, lab: None, keep: None, out: out.clone() }).unwrap();
        let page = fs::read_to_string(out.join("report.md")).unwrap();
        assert!(page.contains("| density | idle of many |"), "{page}");
        assert!(page.contains("- operations (the wait of a busy driver"), "{page}");
        assert!(!page.contains("- density ("), "{page}");
        let text = fs::read_to_string(out.join("report.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json[0]["report"]["setup"][0][1], "<fast> & new");
        let read: Report = serde_json::from_value(json[0]["report"].clone()).unwrap();
        assert_eq!(read.sections[0].rows, native().sections[0].rows);
        assert!(out.join("index.html").exists() && out.join("report.md").exists());
    }
}
