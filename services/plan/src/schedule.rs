//! Which layers choose positions and which reuse the choice of an earlier one.

/// What a layer does about its index rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Runs its own indexer.
    Full,
    /// Reuses the rows of the nearest earlier full layer.
    Shared,
}

/// One kind per layer; layer 0 is full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexSchedule {
    pub(crate) kinds: Vec<LayerKind>,
}

impl IndexSchedule {
    /// Number of layers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// True for a model without layers; no valid config has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// What the layer does.
    ///
    /// # Panics
    /// When there is no such layer.
    #[must_use]
    pub fn kind(&self, layer: usize) -> LayerKind {
        self.kinds[layer]
    }

    /// Whether the layer runs its indexer.
    #[must_use]
    pub fn is_full(&self, layer: usize) -> bool {
        self.kind(layer) == LayerKind::Full
    }

    /// The full layer whose rows `layer` uses: itself, or the nearest earlier one.
    #[must_use]
    pub fn source(&self, layer: usize) -> usize {
        (0..=layer).rev().find(|&l| self.is_full(l)).expect("layer 0 is full in every schedule")
    }
}
