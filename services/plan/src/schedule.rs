//! Which layers choose positions and which reuse the choice of an earlier one.

use crate::config::{ConfigError, Fields};

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

const TYPES: &str = "indexer_types";
const PATTERN: &str = "index_topk_pattern";
const RULE: &str = "index_topk_freq";

impl LayerKind {
    fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Shared => "shared",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "full" | "F" => Some(Self::Full),
            "shared" | "S" => Some(Self::Shared),
            _ => None,
        }
    }
}

impl IndexSchedule {
    /// Takes one kind per layer.
    ///
    /// # Errors
    /// When layer 0 is shared or the list is empty.
    pub fn new(kinds: Vec<LayerKind>) -> Result<Self, ConfigError> {
        Self::checked("the given list", kinds)
    }

    /// The periodic rule: layer `i` is full when `max(i - offset + 1, 0)` is a multiple of `freq`.
    #[must_use]
    pub fn periodic(layers: usize, freq: usize, offset: usize) -> Self {
        let kinds = (0..layers)
            .map(|layer| match (layer + 1).saturating_sub(offset) % freq.max(1) {
                0 => LayerKind::Full,
                _ => LayerKind::Shared,
            })
            .collect();
        Self { kinds }
    }

    /// Layers that run their indexer.
    #[must_use]
    pub fn full(&self) -> Vec<usize> {
        (0..self.len()).filter(|&layer| self.is_full(layer)).collect()
    }

    /// Layers that reuse an earlier choice.
    #[must_use]
    pub fn shared(&self) -> Vec<usize> {
        (0..self.len()).filter(|&layer| !self.is_full(layer)).collect()
    }

    /// Resolves `indexer_types`, `index_topk_pattern` and the periodic rule, in this order; forms that are present must
    /// agree, since engines differ in which one they read.
    pub(crate) fn parse(fields: &Fields<'_>, layers: usize) -> Result<Self, ConfigError> {
        let mut forms: Vec<(&'static str, Self)> = Vec::new();
        if let Some(list) = fields.list(TYPES)? {
            forms.push((TYPES, Self::checked(TYPES, from_list(TYPES, list, layers)?)?));
        }
        match fields.get(PATTERN) {
            None => {}
            Some(serde_json::Value::String(pattern)) => {
                forms.push((PATTERN, Self::checked(PATTERN, from_pattern(pattern, layers)?)?));
            }
            Some(_) => {
                let list = fields.list(PATTERN)?.unwrap_or_default();
                forms.push((PATTERN, Self::checked(PATTERN, from_list(PATTERN, list, layers)?)?));
            }
        }
        let freq = fields.count(RULE)?;
        if freq.is_some() || forms.is_empty() {
            let offset = fields.count("index_skip_topk_offset")?.unwrap_or(2);
            let rule = Self::periodic(layers, freq.unwrap_or(1), offset);
            forms.push((RULE, Self::checked(RULE, rule.kinds)?));
        }
        let (first_form, first) = forms.remove(0);
        for (second_form, second) in forms {
            if let Some(layer) = (0..layers).find(|&l| first.kind(l) != second.kind(l)) {
                return Err(ConfigError::ScheduleDisagrees {
                    layer,
                    first_form,
                    first: first.kind(layer).name(),
                    second_form,
                    second: second.kind(layer).name(),
                });
            }
        }
        Ok(first)
    }

    fn checked(form: &'static str, kinds: Vec<LayerKind>) -> Result<Self, ConfigError> {
        match kinds.first() {
            Some(LayerKind::Full) => Ok(Self { kinds }),
            Some(LayerKind::Shared) => Err(ConfigError::FirstLayerShared { form }),
            None => Err(ConfigError::ListLength { field: form, found: 0, layers: 1 }),
        }
    }
}

fn from_list(
    field: &'static str,
    list: &[serde_json::Value],
    layers: usize,
) -> Result<Vec<LayerKind>, ConfigError> {
    if list.len() != layers {
        return Err(ConfigError::ListLength { field, found: list.len(), layers });
    }
    list.iter()
        .enumerate()
        .map(|(layer, entry)| {
            entry.as_str().and_then(LayerKind::parse).ok_or_else(|| ConfigError::LayerKind {
                layer,
                field,
                found: entry.as_str().map_or_else(|| entry.to_string(), str::to_owned),
                expected: "\"full\" or \"shared\"",
            })
        })
        .collect()
}

fn from_pattern(pattern: &str, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    let letters: Vec<char> = pattern.chars().collect();
    if letters.len() != layers {
        return Err(ConfigError::ListLength { field: PATTERN, found: letters.len(), layers });
    }
    letters
        .into_iter()
        .enumerate()
        .map(|(layer, letter)| {
            LayerKind::parse(&letter.to_string()).ok_or_else(|| ConfigError::LayerKind {
                layer,
                field: PATTERN,
                found: letter.to_string(),
                expected: "F or S",
            })
        })
        .collect()
}
