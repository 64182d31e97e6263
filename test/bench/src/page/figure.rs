// SPDX-License-Identifier: Apache-2.0
//! The figure of the README, as a file of its own: the rates of its rows over depth, a panel for each storage.

use anyhow::{Result, anyhow};
use kit::metric::{IOPS, Row};
use kit::report::Report;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::chart::{DrawError, TEXT, TEXT_IN_SVG, category, colour, mesh};
use super::readme::{DEPTHS, STORAGE, with_peer};
use crate::server::OURS;

const WIDTH: u32 = 840;
const HEIGHT: u32 = 300;
/// Height of the line that explains the colours.
const LEGEND: u32 = 24;
/// Subject with the colour of the peer.
const PEER: &str = "qsd native";
/// The colour of text in an image follows the page's, which an image does not see otherwise.
const STYLE: &str =
    "<style>svg{color:#24292f}@media (prefers-color-scheme:dark){svg{color:#e6edf3}}</style>\n";

/// One storage: depth with our rate and the peer's, in thousands a second.
struct Panel {
    title: String,
    points: Vec<(&'static str, f64, f64)>,
}

/// The figure of the kept rows, as text of an SVG file.
///
/// # Errors
/// The library cannot draw it.
pub(super) fn svg(kept: &Report) -> Result<String> {
    let panels: Vec<Panel> = STORAGE.iter().filter_map(|&storage| panel(kept, storage)).collect();
    let mut text = String::new();
    draw(&panels, &mut text).map_err(|error| anyhow!("cannot draw the figure: {error}"))?;
    let (head, body) = text.split_once(">\n").ok_or_else(|| anyhow!("the figure is empty"))?;
    Ok(format!("{head}>\n{STYLE}{}", body.replace(TEXT_IN_SVG, "currentColor").trim_end()) + "\n")
}

fn panel(kept: &Report, (storage, name): (&str, &str)) -> Option<Panel> {
    let rate = |row: &Row| row.median(IOPS) / 1000.0;
    let points: Vec<_> = DEPTHS
        .into_iter()
        .filter_map(|depth| {
            with_peer(kept, storage, depth).map(|(ours, peer)| (depth, rate(ours), rate(peer)))
        })
        .collect();
    let title = name.replace('`', "");
    (!points.is_empty()).then_some(Panel { title, points })
}

fn draw(panels: &[Panel], text: &mut String) -> Result<(), DrawError> {
    let root = SVGBackend::with_string(text, (WIDTH, HEIGHT)).into_drawing_area();
    let (legend, plots) = root.split_vertically(LEGEND);
    draw_legend(&legend)?;
    for (panel, area) in panels.iter().zip(plots.split_evenly((1, panels.len().max(1)))) {
        draw_panel(panel, &area)?;
    }
    root.present()?;
    Ok(())
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn font(size: i32, horizontal: HPos) -> TextStyle<'static> {
    let centered = Pos::new(horizontal, VPos::Center);
    ("sans-serif", size).into_font().color(&TEXT).pos(centered)
}

fn draw_legend(area: &Area<'_>) -> Result<(), DrawError> {
    let y = LEGEND as i32 / 2;
    for (x, subject, name) in
        [(60, OURS, "vhost-blk, io_uring plane"), (270, PEER, "qemu-storage-daemon, its fastest")]
    {
        area.draw(&Circle::new((x, y), 5, colour(subject).filled()))?;
        area.draw(&Text::new(name, (x + 12, y), font(13, HPos::Left)))?;
    }
    let about = "thousands of 4 KiB reads a second, over depth";
    area.draw(&Text::new(about, (WIDTH as i32 - 12, y), font(13, HPos::Right)))?;
    Ok(())
}

fn draw_panel(panel: &Panel, area: &Area<'_>) -> Result<(), DrawError> {
    let last = (panel.points.len() - 1) as f64;
    let most = panel.points.iter().fold(f64::MIN_POSITIVE, |most, at| most.max(at.1).max(at.2));
    let mut context = ChartBuilder::on(area)
        .margin(8)
        .caption(&panel.title, font(14, HPos::Center))
        .x_label_area_size(24)
        .y_label_area_size(44)
        .build_cartesian_2d(-0.35..last + 0.35, 0.0..most * 1.15)?;
    let label = |x: &f64| category(&panel.points, *x).map_or("", |point| point.0).to_owned();
    mesh(&mut context)
        .label_style(font(12, HPos::Center))
        .x_labels(20)
        .y_labels(5)
        .x_label_formatter(&label)
        .y_label_formatter(&|y| format!("{y:.0}"))
        .draw()?;
    let line = |rate: fn(&(&str, f64, f64)) -> f64| -> Vec<(f64, f64)> {
        panel.points.iter().enumerate().map(|(at, point)| (at as f64, rate(point))).collect()
    };
    for (subject, points) in [(PEER, line(|point| point.2)), (OURS, line(|point| point.1))] {
        let colour = colour(subject);
        context.draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))?;
        context.draw_series(points.iter().map(|&at| Circle::new(at, 3, colour.filled())))?;
    }
    let ratio = |(at, &(_, ours, peer)): (usize, &(&str, f64, f64))| {
        let above = ours.max(peer) + most * 0.07;
        Text::new(format!("{:.2}", ours / peer), (at as f64, above), font(12, HPos::Center))
    };
    context.draw_series(panel.points.iter().enumerate().map(ratio))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::readme::KEPT;
    use super::*;

    #[test]
    fn the_figure_of_the_readme_is_that_of_the_kept_rows() {
        let kept: Report = serde_json::from_str(KEPT).unwrap();
        let figure = include_str!("../../../../docs/measurements/readme.svg");
        assert!(svg(&kept).unwrap() == figure, "write it again: bench report --keep");
        assert!(figure.contains("currentColor") && !figure.contains(TEXT_IN_SVG));
        let readme = include_str!("../../../../README.md");
        assert!(readme.contains("](docs/measurements/readme.svg)"));
    }
}
