//! What the benchmarks share: one model in one process, the floor its work has, and the peer that runs beside it.

pub mod floor;
pub mod model;
pub mod peer;

/// The middle of some measurements.
///
/// # Panics
/// When there are none.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
