//! A report as one self-contained page.

use minijinja::value::Serde;
use minijinja::{Environment, context};
use plotters::prelude::*;

use crate::plot::{Area, Drawn, svg};
use crate::report::{Report, Verdict};

const PAGE: &str = include_str!("report.html.jinja");
/// Points that are averaged for the curve: single tokens jump.
const WINDOW: usize = 8;
const REFERENCE: RGBColor = RGBColor(31, 119, 180);
const CANDIDATE: RGBColor = RGBColor(214, 39, 40);

/// The page: verdict, plots and figures; it loads nothing from elsewhere.
///
/// # Errors
/// When a plot cannot be drawn; the message says which.
pub fn to_html(report: &Report) -> Result<String, String> {
    let mut environment = Environment::new();
    environment.add_template("report.html", PAGE).map_err(|e| e.to_string())?;
    let template = environment.get_template("report.html").map_err(|e| e.to_string())?;
    let due = report.carries.iter().any(|c| c.prefill.all + c.decode.all > 0);
    let rows = if due { Some(svg(220, |area| rows(area, report))?) } else { None };
    let copies =
        if report.copies.is_empty() { None } else { Some(svg(260, |area| copies(area, report))?) };
    template
        .render(context! {
            report => Serde(report),
            same => report.verdict == Verdict::Same,
            table => report.to_string(),
            loss_plot => svg(340, |area| loss(area, report))?,
            rows_plot => rows,
            copies_plot => copies,
        })
        .map_err(|e| e.to_string())
}

/// Loss of both sides over the position in a segment.
fn loss(area: &Area<'_>, report: &Report) -> Drawn {
    let by_position = &report.loss.by_position;
    let curve = |side: usize| -> Vec<(f64, f64)> {
        by_position
            .chunks(WINDOW)
            .enumerate()
            .map(|(at, points)| {
                let mean = points.iter().map(|p| p[side]).sum::<f64>() / points.len() as f64;
                ((at * WINDOW + points.len() / 2) as f64, mean)
            })
            .collect()
    };
    let curves = [curve(0), curve(1)];
    let highest = curves.iter().flatten().map(|point| point.1).fold(0.5, f64::max);
    let mut chart =
        ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(38)
            .y_label_area_size(48)
            .build_cartesian_2d(0.0..by_position.len().max(1) as f64, 0.0..highest * 1.05)?;
    chart
        .configure_mesh()
        .x_desc("position in the segment, tokens")
        .y_desc("loss, nats per token")
        .light_line_style(WHITE.mix(0.0))
        .draw()?;
    for ((points, colour), name) in
        curves.into_iter().zip([REFERENCE, CANDIDATE]).zip(["reference", "candidate"])
    {
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        // The loss of a text lies well above zero.
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}

/// Share of equal index rows per stage.
fn rows(area: &Area<'_>, report: &Report) -> Drawn {
    let bars: Vec<(usize, f64)> = report
        .carries
        .iter()
        .filter(|c| c.prefill.all + c.decode.all > 0)
        .map(|c| {
            let all = c.prefill.all + c.decode.all;
            (c.stage, 100.0 * (c.prefill.equal + c.decode.equal) as f64 / all as f64)
        })
        .collect();
    let stages = report.carries.len();
    let mut chart =
        ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(38)
            .y_label_area_size(48)
            .build_cartesian_2d((0..stages.saturating_sub(1)).into_segmented(), 0.0..105.0)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_desc("stage")
        .y_desc("equal index rows, %")
        .light_line_style(WHITE.mix(0.0))
        .draw()?;
    chart.draw_series(bars.into_iter().map(|(stage, share)| {
        let colour = if share < 100.0 { CANDIDATE } else { REFERENCE };
        let mut bar = Rectangle::new(
            // A thin bar where nothing is equal, so that it can be seen.
            [(SegmentValue::Exact(stage), 0.0), (SegmentValue::Exact(stage + 1), share.max(1.0))],
            colour.filled(),
        );
        bar.set_margin(0, 0, 24, 24);
        bar
    }))?;
    Ok(())
}

/// Share of exact copies by the length of the list.
fn copies(area: &Area<'_>, report: &Report) -> Drawn {
    let count = report.copies.len();
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        .x_label_area_size(38)
        .y_label_area_size(48)
        .build_cartesian_2d(0.0..count as f64, 0.0..105.0)?;
    let words: Vec<usize> = report.copies.iter().map(|c| c.words).collect();
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * count + 1)
        .x_label_formatter(&|at| {
            // A label in the middle of each group.
            let middle = (at.fract() - 0.5).abs() < 0.01;
            words
                .get(*at as usize)
                .filter(|_| middle)
                .map_or(String::new(), |n| format!("{n} words"))
        })
        .y_desc("exact copies, %")
        .light_line_style(WHITE.mix(0.0))
        .draw()?;
    for (side, colour) in [REFERENCE, CANDIDATE].into_iter().enumerate() {
        let bars = report.copies.iter().enumerate().map(|(at, copies)| {
            let exact = [copies.reference, copies.candidate][side];
            let share = 100.0 * exact as f64 / copies.trials.max(1) as f64;
            let left = at as f64 + 0.2 + 0.3 * side as f64;
            Rectangle::new([(left, 0.0), (left + 0.28, share.max(1.0))], colour.filled())
        });
        chart
            .draw_series(bars)?
            .label(["reference", "candidate"][side])
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;
    use crate::report::{Carries, Copies, Loss, Prefix, Rows, Speed};

    fn report() -> Report {
        let carries = Carries {
            stage: 1,
            layers: [3, 6],
            from_layer: Some(2),
            prefill: Rows { all: 10, equal: 0 },
            decode: Rows { all: 4, equal: 4 },
        };
        Report {
            reference: "<model>".into(),
            candidate: "cut".into(),
            reproduced: Some("stale".into()),
            carries: vec![Carries { layers: [0, 3], ..Carries::default() }, carries],
            first_diverging_layer: Some(3),
            loss: Loss {
                segments: 1,
                tokens: 40,
                by_position: (0..40).map(|i| [2.0, 2.0 + f64::from(i)]).collect(),
                ..Loss::default()
            },
            copies: vec![Copies { words: 10, trials: 4, reference: 4, candidate: 0, identical: 0 }],
            prefixes: vec![Prefix { common: 3, of: 9 }],
            reference_speed: Speed::default(),
            candidate_speed: Speed::default(),
            differences: Vec::new(),
            verdict: Verdict::Same,
        }
        .decide(true)
    }

    #[test]
    fn the_page_holds_every_plot_and_loads_nothing() {
        let report = report();
        assert_eq!(report.verdict, Verdict::Differs);
        let page = to_html(&report).unwrap();
        assert_eq!(page.matches("<svg").count(), 3);
        assert!(page.contains("&lt;model&gt;"), "text is escaped");
        assert!(!page.contains("src=") && !page.contains("href="));
        for said in ["layer 2 did not compute", "layer 3 is the first", "continuations part"] {
            assert!(page.contains(said), "{said}");
        }
    }

    #[test]
    fn a_server_that_rounds_otherwise_is_the_same() {
        let mut report = report();
        report.carries.clear();
        report.first_diverging_layer = None;
        report.loss = Loss { difference: 0.001, tolerance: 0.005, ..Loss::default() };
        report.copies[0].candidate = 3;
        assert_eq!(report.clone().decide(false).verdict, Verdict::Same);
        report.copies[0].candidate = 0;
        assert_eq!(report.clone().decide(false).verdict, Verdict::Differs);
        report.copies.clear();
        report.loss.difference = f64::NAN;
        assert_eq!(report.decide(false).verdict, Verdict::Differs);
    }
}
