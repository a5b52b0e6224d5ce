//! Why a config cannot be served.

use std::path::PathBuf;

use thiserror::Error;

/// A config that baton refuses, with the field, what it holds and what would be accepted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The text is not a JSON object.
    #[error("the config is not a JSON object: {0}")]
    Json(String),
    /// A field that has no default is absent.
    #[error("the config has no {field:?}: expected {expected}")]
    Missing {
        /// The field.
        field: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A field holds something that cannot be used.
    #[error("{field} is {found}, expected {expected}")]
    Invalid {
        /// The field.
        field: String,
        /// What it holds.
        found: String,
        /// What is accepted.
        expected: String,
    },
    /// Two fields that describe the same thing disagree.
    #[error("{first_field} and {second_field} disagree: {first} against {second}")]
    Disagree {
        /// One field.
        first_field: String,
        /// What it says.
        first: String,
        /// The other.
        second_field: String,
        /// What that says.
        second: String,
    },
    /// Two forms of the index schedule disagree.
    #[error("layer {layer}: {first_form} makes it {first}, {second_form} makes it {second}")]
    ScheduleDisagrees {
        /// First layer on which they differ.
        layer: usize,
        /// One form.
        first_form: &'static str,
        /// Its kind for the layer.
        first: &'static str,
        /// The other form.
        second_form: &'static str,
        /// Its kind for the layer.
        second: &'static str,
    },
    /// A per-layer list has the wrong length.
    #[error("{field} has {found} entries, expected one for each of the {layers} layers")]
    ListLength {
        /// The field.
        field: &'static str,
        /// Its entries.
        found: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// An entry of a per-layer list is not a kind of layer.
    #[error("layer {layer}: {field} says {found:?}, expected {expected}")]
    LayerKind {
        /// The layer.
        layer: usize,
        /// The field.
        field: &'static str,
        /// The entry.
        found: String,
        /// What is accepted.
        expected: &'static str,
    },
    /// Layer 0 has no earlier layer to reuse.
    #[error("layer 0 is shared ({form}): it has no earlier layer whose index rows it could reuse")]
    FirstLayerShared {
        /// Which form says so.
        form: &'static str,
    },
}
