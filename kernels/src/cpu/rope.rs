//! Rotary position embedding, in place.

use crate::backend::{RopeLayout, RopeTable};

/// Cosine and sine of every pair at one position.
pub(crate) struct Angles(Vec<(f32, f32)>);

impl Angles {
    pub(crate) fn new(table: &RopeTable, position: usize) -> Self {
        let position = position as f32;
        let pair = |freq: &f32| {
            let (sin, cos) = (position * freq).sin_cos();
            (cos * table.magnitude, sin * table.magnitude)
        };
        Self(table.inv_freq.iter().map(pair).collect())
    }

    /// Rotates the first `2 * pairs` values of `v`; they keep their places.
    pub(crate) fn rotate(&self, v: &mut [f32], layout: RopeLayout) {
        let pairs = self.0.len();
        for (i, (cos, sin)) in self.0.iter().enumerate() {
            let (a, b) = match layout {
                RopeLayout::Interleaved => (2 * i, 2 * i + 1),
                RopeLayout::HalfSplit => (i, i + pairs),
            };
            let (x, y) = (v[a], v[b]);
            v[a] = x * cos - y * sin;
            v[b] = y * cos + x * sin;
        }
    }
}
