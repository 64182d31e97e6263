// SPDX-License-Identifier: Apache-2.0
//! Time lines: the number of requests that have passed each stage, over time. The distance of two
//! curves along the time is the time between the stages; the other one is the number of requests
//! between them.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::chart::{DrawError, HEIGHT, TEXT, WIDTH, element, mesh};

/// The colour of each stage, readable on white and on black.
const COLOURS: [(&str, RGBColor); 6] = [
    ("available", RGBColor(130, 130, 130)),
    ("taken", RGBColor(145, 70, 200)),
    ("submitted", RGBColor(38, 120, 240)),
    ("done", RGBColor(200, 80, 30)),
    ("called", RGBColor(40, 140, 70)),
    ("seen", RGBColor(0, 160, 170)),
];

/// A time line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Flow {
    pub(super) title: String,
    /// Each stage with the microseconds at which requests passed it, sorted.
    pub(super) curves: Vec<(&'static str, Vec<f64>)>,
}

fn colour(stage: &str) -> RGBColor {
    COLOURS.iter().find(|(known, _)| *known == stage).map_or(TEXT, |(_, colour)| *colour)
}

/// The colour of a stage, for style sheets.
pub(super) fn css_colour(stage: &str) -> String {
    let RGBColor(red, green, blue) = colour(stage);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// The time line as an SVG element.
///
/// # Errors
/// The library cannot draw it.
pub(super) fn svg(flow: &Flow) -> Result<String> {
    let mut text = String::new();
    draw(flow, &mut text).map_err(|error| anyhow!("cannot draw {}: {error}", flow.title))?;
    Ok(element(&text))
}

/// The corners of the stairs that count the times.
fn stairs(times: &[f64]) -> Vec<(f64, f64)> {
    let corners = times.iter().enumerate().flat_map(|(n, &at)| {
        let before = n as f64;
        [(at, before), (at, before + 1.0)]
    });
    corners.collect()
}

fn draw(flow: &Flow, text: &mut String) -> Result<(), DrawError> {
    let root = SVGBackend::with_string(text, (WIDTH, HEIGHT)).into_drawing_area();
    let times = flow.curves.iter().flat_map(|(_, times)| times).copied();
    let (first, last) = times.fold((0.0, 1.0), |(a, b): (f64, f64), at| (a.min(at), b.max(at)));
    let most = flow.curves.iter().map(|(_, times)| times.len()).max().unwrap_or(0).max(1);
    let font = ("sans-serif", 13).into_font().color(&TEXT);
    let mut context = ChartBuilder::on(&root)
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(72)
        .build_cartesian_2d(first..last, 0.0..most as f64 * 1.02)?;
    mesh(&mut context)
        .label_style(font.clone())
        .axis_desc_style(font)
        .x_labels(8)
        .y_labels(6)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .x_desc("us")
        .y_desc("requests")
        .draw()?;
    for (stage, times) in &flow.curves {
        context.draw_series(LineSeries::new(stairs(times), colour(stage).stroke_width(2)))?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::STAGES;

    #[test]
    fn each_stage_has_a_colour_of_its_own() {
        let mut colours: Vec<_> = STAGES.iter().map(|stage| css_colour(stage)).collect();
        colours.sort();
        colours.dedup();
        assert_eq!(colours.len(), STAGES.len());
        assert!(!colours.contains(&"#010203".to_owned()));
    }

    #[test]
    fn the_stairs_rise_by_one_at_each_time() {
        assert_eq!(stairs(&[3.0, 7.0]), [(3.0, 0.0), (3.0, 1.0), (7.0, 1.0), (7.0, 2.0)]);
        let curves = vec![("done", vec![3.0, 7.0]), ("seen", vec![9.0, 9.0])];
        let svg = svg(&Flow { title: "x".to_owned(), curves }).unwrap();
        for part in [css_colour("done"), css_colour("seen"), "currentColor".to_owned()] {
            assert!(svg.to_lowercase().contains(&part.to_lowercase()), "{part}: {svg}");
        }
    }
}
