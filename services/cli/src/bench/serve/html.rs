//! A summary as one self-contained page.

use baton_verify::plot::{Area, Drawn, svg};
use minijinja::value::Serde;
use minijinja::{Environment, context};
use plotters::prelude::*;

use super::load::Outcome;
use super::summary::{Spread, Summary, percentile, under_way};

const PAGE: &str = include_str!("page.html.jinja");
const BLUE: RGBColor = RGBColor(31, 119, 180);
const RED: RGBColor = RGBColor(214, 39, 40);
/// Points along a line over time.
const BINS: usize = 100;

/// The page: plots and figures; it loads nothing from elsewhere.
///
/// # Errors
/// When a plot cannot be drawn.
pub(crate) fn page(summary: &Summary, outcome: &Outcome) -> Result<String, String> {
    let mut environment = Environment::new();
    environment.add_template("page.html", PAGE).map_err(|e| e.to_string())?;
    let template = environment.get_template("page.html").map_err(|e| e.to_string())?;
    let percentiles = |spread: &Spread, colour| {
        let points = (0..=1000).map(|at| f64::from(at) / 10.0);
        let points = points.map(|p| (p, percentile(&spread.sorted, p))).collect();
        line("percentile", "ms", points, colour)
    };
    template
        .render(context! {
            summary => Serde(summary),
            figures => summary.to_string(),
            first => percentiles(&summary.time_to_first_token_ms, BLUE)?,
            between => percentiles(&summary.inter_token_ms, RED)?,
            written => line("seconds", "tokens/s", written(outcome), BLUE)?,
            under_way => line("seconds", "requests under way", steps(outcome), RED)?,
            by_prompt => svg(260, |area| by_prompt(area, outcome))?,
        })
        .map_err(|e| e.to_string())
}

/// Pieces of text per second, over time.
fn written(outcome: &Outcome) -> Vec<(f64, f64)> {
    let width = (outcome.seconds / BINS as f64).max(1e-3);
    let mut bins = vec![0.0; BINS];
    for answer in &outcome.answers {
        // Pieces may hold several tokens, or a part of one: the answer's own ratio.
        let each = answer.completion_tokens as f64 / answer.pieces.len().max(1) as f64;
        for piece in &answer.pieces {
            bins[((piece.as_secs_f64() / width) as usize).min(BINS - 1)] += each / width;
        }
    }
    bins.into_iter().enumerate().map(|(at, rate)| ((at as f64 + 0.5) * width, rate)).collect()
}

fn steps(outcome: &Outcome) -> Vec<(f64, f64)> {
    let mut before = 0.0;
    let changes = under_way(&outcome.answers).into_iter().flat_map(|(at, count)| {
        let corner = (at, std::mem::replace(&mut before, count as f64));
        [corner, (at, count as f64)]
    });
    changes.collect()
}

/// The largest value of each axis, with some room above.
fn bounds(points: &[(f64, f64)]) -> (f64, f64) {
    let largest = points.iter().fold((0.0, 0.0), |(x, y), p| (f64::max(x, p.0), f64::max(y, p.1)));
    (largest.0.max(1e-3), (largest.1 * 1.05).max(1e-3))
}

fn line(x: &str, y: &str, points: Vec<(f64, f64)>, colour: RGBColor) -> Result<String, String> {
    let draw = |area: &Area<'_>| -> Drawn {
        let (right, top) = bounds(&points);
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(38)
            .y_label_area_size(58)
            .build_cartesian_2d(0.0..right, 0.0..top)?;
        chart.configure_mesh().x_desc(x).y_desc(y).light_line_style(WHITE.mix(0.0)).draw()?;
        chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
        Ok(())
    };
    svg(220, draw)
}

/// Time to first token of every answer by the length of its prompt.
fn by_prompt(area: &Area<'_>, outcome: &Outcome) -> Drawn {
    let answers = outcome.answers.iter();
    let points: Vec<(f64, f64)> =
        answers.filter_map(|a| Some((a.prompt_tokens as f64, a.first_ms()?))).collect();
    let (right, top) = bounds(&points);
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        .x_label_area_size(38)
        .y_label_area_size(58)
        .build_cartesian_2d(0.0..right * 1.02, 0.0..top)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("prompt tokens").y_desc("ms").light_line_style(WHITE.mix(0.0)).draw()?;
    chart.draw_series(points.into_iter().map(|point| Circle::new(point, 2, BLUE.filled())))?;
    Ok(())
}
