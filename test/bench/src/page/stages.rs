// SPDX-License-Identifier: Apache-2.0
//! The parts of one request, in instructions.

use anyhow::Result;
use kit::report::{Report, Section};

use super::document::{Block, Table};
use super::parts::{ICOUNT, Parts};
use super::{charts, tables, timeline};
use crate::icount::{KEPT, PATHS_TITLE, SPAN, SPANS, SPANS_TITLE, STAGES_TITLE};

const ABOUT: &str = "Instructions, not time: a system call, a cache miss and a VM exit count \
    little. The stages of all paths are divided by the kernel's trace events, at depth 1 and 32. The \
    kernel plane has also the lengths between its own events with one request in flight, where \
    `submit` to `completion` is the block layer and the device. The path lengths are split between \
    the client, the server's threads and everything else (`whole`).";

/// The stages that were measured, in time and in instructions, or the kept path lengths, marked as
/// such.
pub(super) fn blocks(parts: &Parts) -> Result<Vec<Block>> {
    let mut blocks = Vec::new();
    let in_time = timeline::stages(parts);
    if in_time.is_empty() {
        let text = "Stages in time: not measured in this report; `make bench ARGS=timeline`, and in \
            a VM `make bench-lab ARGS=\"--only stages\"`.";
        blocks.push(Block::Text(text.to_owned()));
    }
    for (part, section, charts) in in_time {
        blocks.push(Block::Heading(3, format!("{}, part {part}", section.title)));
        blocks.push(Block::Text(section.method.clone()));
        blocks.push(Block::Charts(charts));
    }
    blocks.push(Block::Heading(3, "In instructions".to_owned()));
    blocks.push(Block::Text(ABOUT.to_owned()));
    if let Some(report) = parts.of("icount") {
        for title in [SPANS_TITLE, STAGES_TITLE, PATHS_TITLE] {
            match section(report, title) {
                Some(section) if title == SPANS_TITLE => {
                    blocks.push(Block::Heading(3, format!("{title}, measured in this report")));
                    blocks.push(Block::Text(section.method.clone()));
                    let charts = timeline::stage_charts(&section.rows, SPAN, &SPANS);
                    blocks.push(Block::Charts(charts));
                    blocks.push(Block::Table(tables::rows(&section.rows)));
                }
                Some(section) => {
                    blocks.push(Block::Heading(3, format!("{title}, measured in this report")));
                    blocks.extend(
                        charts::of_stages(&section.rows).map(|chart| Block::Charts(vec![chart])),
                    );
                    blocks.push(Block::Table(tables::rows(&section.rows)));
                }
                None => blocks.push(Block::Text(format!("{title}: not measured."))),
            }
        }
        return Ok(blocks);
    }
    let kept = KEPT.report()?;
    let date = kept.setup.iter().find(|(name, _)| name == "date");
    let date = date.map_or("an unknown date", |(_, date)| date);
    blocks.push(Block::Heading(3, format!("{PATHS_TITLE}: kept base lines of {date}")));
    blocks.push(Block::Text(format!(
        "NOT measured in this report: the base lines of `test/bench/path-lengths.json`, kept on \
         {date}. The stages of the kernel plane are not kept. `make bench-lab ARGS=\"--only \
         icount\"` measures both."
    )));
    let drawn = section(&kept, PATHS_TITLE).map(|section| charts::of(ICOUNT, &section.rows));
    blocks.extend(drawn.map(Block::Charts));
    let table = section(&kept, PATHS_TITLE).map(|section| tables::rows(&section.rows));
    blocks.push(Block::Table(table.unwrap_or_else(|| Table::new(&[PATHS_TITLE]))));
    Ok(blocks)
}

fn section<'a>(report: &'a Report, title: &str) -> Option<&'a Section> {
    report.sections.iter().find(|section| section.title == title)
}
