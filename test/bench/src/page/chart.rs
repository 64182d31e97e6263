// SPDX-License-Identifier: Apache-2.0
//! Plots as SVG, for light and dark pages.

use anyhow::{Result, anyhow};
use plotters::chart::{ChartContext, MeshStyle};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::server::is_bare;

pub(super) const WIDTH: u32 = 560;
pub(super) const HEIGHT: u32 = 300;
/// Stands for the page's colour of text, which the SVG takes over.
pub(super) const TEXT: RGBColor = RGBColor(1, 2, 3);
pub(super) const TEXT_IN_SVG: &str = "#010203";

/// The colour of each subject, the same in all plots, readable on white and on black.
const COLOURS: &[(&str, RGBColor)] = &[
    ("ours", RGBColor(38, 120, 240)),
    ("vhost-blk kernel", RGBColor(0, 160, 170)),
    ("vhost-blk io_uring", RGBColor(38, 120, 240)),
    ("qsd native", RGBColor(200, 80, 30)),
    ("qsd native +iothread", RGBColor(235, 145, 70)),
    ("qsd io_uring", RGBColor(40, 140, 70)),
    ("qsd io_uring +iothread", RGBColor(105, 185, 110)),
    ("qsd threads", RGBColor(145, 70, 200)),
    ("qsd threads +iothread", RGBColor(190, 135, 225)),
    ("qsd null-co", RGBColor(200, 80, 30)),
    ("qsd null-co +iothread", RGBColor(235, 145, 70)),
    ("vhost-scsi", RGBColor(200, 60, 120)),
    ("QEMU native", RGBColor(200, 80, 30)),
    ("QEMU io_uring", RGBColor(40, 140, 70)),
    ("QEMU vq-mapping", RGBColor(145, 70, 200)),
    (BARE_BEST, RGBColor(130, 130, 130)),
    ("no guest", RGBColor(130, 130, 130)),
    ("vhost-blk kernel, interrupts", RGBColor(105, 205, 210)),
    ("vhost-blk io_uring, interrupts", RGBColor(135, 175, 250)),
    ("vhost-blk io_uring, batches of 32", RGBColor(150, 150, 60)),
    ("vhost-blk kernel, plain", RGBColor(150, 150, 60)),
    ("vhost-blk kernel, calls held", RGBColor(105, 205, 210)),
    ("vhost-blk io_uring, calls held", RGBColor(135, 175, 250)),
    ("ours, qcow2", RGBColor(135, 175, 250)),
    ("ours, fragmented qcow2", RGBColor(105, 205, 210)),
    ("ours, request, interrupts", RGBColor(38, 120, 240)),
    ("ours, request, polled", RGBColor(135, 175, 250)),
    ("ours, bio, interrupts", RGBColor(0, 160, 170)),
    ("ours, bio, polled", RGBColor(105, 205, 210)),
    ("in-tree, interrupts", RGBColor(200, 80, 30)),
    ("in-tree, polled", RGBColor(235, 145, 70)),
    ("one daemon", RGBColor(38, 120, 240)),
    ("a serve for each", RGBColor(135, 175, 250)),
    ("a qsd for each", RGBColor(235, 145, 70)),
];
const OTHER: RGBColor = RGBColor(170, 130, 40);

/// The name of the line of the bare device.
pub(super) const BARE_BEST: &str = "bare device (best of fio)";

/// The values of one subject.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Series {
    pub(super) name: String,
    /// (index of the category, value)
    pub(super) points: Vec<(usize, f64)>,
}

/// Lines over categories such as depths.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) x: String,
    pub(super) y: String,
    pub(super) categories: Vec<String>,
    /// The categories are numbers, so that lines between the points have a meaning.
    pub(super) is_scale: bool,
    pub(super) series: Vec<Series>,
}

/// The colour of a subject.
pub(super) fn colour(name: &str) -> RGBColor {
    let name = if is_bare(name) { BARE_BEST } else { name };
    COLOURS.iter().find(|(known, _)| *known == name).map_or(OTHER, |(_, colour)| *colour)
}

/// The colour of a subject, for style sheets.
pub(super) fn css_colour(name: &str) -> String {
    let RGBColor(red, green, blue) = colour(name);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn is_dashed(name: &str) -> bool {
    name == BARE_BEST || name == "no guest"
}

/// The chart as an SVG element.
pub(super) fn svg(chart: &Chart) -> Result<String> {
    let mut text = String::new();
    draw(chart, &mut text).map_err(|error| anyhow!("cannot draw {}: {error}", chart.title))?;
    Ok(element(&text))
}

/// A drawing of this size as an element of a page, in the page's colour of text.
pub(super) fn element(text: &str) -> String {
    let start = text.find("<svg").unwrap_or(0);
    let scaled = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\"");
    // In HTML an SVG needs no name space, and the page sets its width.
    let body = text[start..].split_once('>').map_or("", |(_, body)| body);
    format!("{scaled}>{}", body.replace(TEXT_IN_SVG, "currentColor"))
}

pub(super) type DrawError = Box<dyn std::error::Error>;

fn draw(chart: &Chart, text: &mut String) -> Result<(), DrawError> {
    let root = SVGBackend::with_string(text, (WIDTH, HEIGHT)).into_drawing_area();
    let last = chart.categories.len().saturating_sub(1).max(1) as f64;
    let values = chart.series.iter().flat_map(|series| &series.points);
    let most = values.map(|(_, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let font = ("sans-serif", 13).into_font().color(&TEXT);
    let mut context = ChartBuilder::on(&root)
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(72)
        .build_cartesian_2d(-0.15..last + 0.15, 0.0..most * 1.08)?;
    let label = |x: &f64| category(&chart.categories, *x).cloned().unwrap_or_default();
    mesh(&mut context)
        .label_style(font.clone())
        .axis_desc_style(font)
        .x_labels(40)
        .y_labels(6)
        .x_label_formatter(&label)
        .y_label_formatter(&|y| if most < 20.0 { format!("{y:.1}") } else { format!("{y:.0}") })
        .x_desc(chart.x.as_str())
        .y_desc(chart.y.as_str())
        .draw()?;
    for series in &chart.series {
        let colour = colour(&series.name);
        let points: Vec<_> = series.points.iter().map(|&(x, y)| (x as f64, y)).collect();
        let width = if series.name.starts_with("ours") { 3 } else { 2 };
        let style = colour.stroke_width(width);
        if is_dashed(&series.name) {
            context.draw_series(DashedLineSeries::new(points, 6, 4, style))?;
        } else {
            let dots = points.iter().map(|&point| Circle::new(point, width + 1, colour.filled()));
            let dots: Vec<_> = dots.collect();
            if chart.is_scale {
                context.draw_series(LineSeries::new(points, style))?;
            }
            context.draw_series(dots)?;
        }
    }
    root.present()?;
    Ok(())
}

/// A chart over categories.
type Context<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Lines and axes of a chart, in the colour of text.
pub(super) fn mesh<'a, 'b>(
    context: &'b mut Context<'a>,
) -> MeshStyle<'a, 'b, RangedCoordf64, RangedCoordf64, SVGBackend<'a>> {
    let mut mesh = context.configure_mesh();
    mesh.disable_x_mesh()
        .light_line_style(TEXT.mix(0.0))
        .bold_line_style(TEXT.mix(0.15))
        .axis_style(TEXT.mix(0.6))
        .set_tick_mark_size(LabelAreaPosition::Bottom, 0);
    mesh
}

/// The category at a place of the axis; none is between two of them.
pub(super) fn category<T>(categories: &[T], x: f64) -> Option<&T> {
    let index = x.round();
    let is_exact = (x - index).abs() < 1e-6 && index >= 0.0;
    is_exact.then(|| categories.get(index as usize)).flatten()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::host::subject::Who;

    #[test]
    fn a_chart_has_a_line_for_each_subject_in_its_constant_colour() {
        let series =
            |name: &str, y: f64| Series { name: name.into(), points: vec![(0, y), (1, y)] };
        let chart = Chart {
            title: "Rate".into(),
            x: "depth".into(),
            y: "kIOPS".into(),
            categories: vec!["1".into(), "32".into()],
            is_scale: true,
            series: vec![series("ours", 2.0), series("qsd native", 1.0), series(BARE_BEST, 3.0)],
        };
        let svg = svg(&chart).unwrap();
        for series in &chart.series {
            let colour = css_colour(&series.name);
            assert!(svg.to_lowercase().contains(&colour), "{}: {svg}", series.name);
        }
        for part in ["currentColor", ">\n32\n<", "depth", "kIOPS"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert!(!svg.contains("http"), "{svg}");
    }

    #[test]
    fn no_two_servers_of_a_chart_have_the_same_colour() {
        let all = [
            Who::Kernel,
            Who::Uring,
            Who::QsdNative,
            Who::QsdUring,
            Who::VhostScsi,
            Who::KernelPlain,
            Who::KernelInterrupts,
            Who::UringInterrupts,
        ];
        let colours: BTreeSet<_> = all.iter().map(|who| css_colour(who.name())).collect();
        assert_eq!(colours.len(), all.len());
        assert!(!colours.contains(&css_colour("any other")));
    }
}
