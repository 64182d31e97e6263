// SPDX-License-Identifier: Apache-2.0
//! The parts of one request, in instructions.

use anyhow::{Context, Result};
use kit::report::{Report, Section};

use super::document::{Block, Table};
use super::parts::{ICOUNT, Parts};
use super::{charts, tables};
use crate::icount::{KEPT, PATHS_TITLE, STAGES_TITLE};

const ABOUT: &str = "Instructions, not time: a system call, a cache miss and a VM exit count \
    little. Stages between trace events exist for the kernel plane only, with one request in \
    flight; `submit` to `completion` is the block layer and the device. For every other path the \
    split is that between the client, the server's threads and everything else (`whole`).";

/// The stages that were measured, or the kept path lengths, marked as such.
pub(super) fn blocks(parts: &Parts) -> Result<Vec<Block>> {
    let mut blocks = vec![Block::Text(ABOUT.to_owned())];
    if let Some(report) = parts.of("icount") {
        for title in [STAGES_TITLE, PATHS_TITLE] {
            match section(report, title) {
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
    let kept: Report = serde_json::from_str(KEPT).context("the kept path lengths are no report")?;
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
