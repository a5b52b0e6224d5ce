//! Plots as SVG, to stand in a self-contained page.

use plotters::coord::Shift;
use plotters::prelude::*;

/// Width of a plot, in pixels.
const WIDTH: u32 = 860;

/// Where a plot is drawn.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// What drawing ends with.
pub type Drawn = Result<(), Box<dyn std::error::Error>>;

/// The SVG element of a plot of this height, in pixels.
///
/// # Errors
/// When it cannot be drawn.
pub fn svg(height: u32, draw: impl FnOnce(&Area<'_>) -> Drawn) -> Result<String, String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        draw(&area).and_then(|()| Ok(area.present()?)).map_err(|e| e.to_string())?;
    }
    Ok(svg)
}
