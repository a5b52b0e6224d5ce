//! `generation_config.json`: what the model's makers suggest when a request says nothing.

use std::path::Path;

use serde_json::Value;

use super::error::ConfigError;
use super::fields::Fields;
use super::parse::token_ids;

/// Suggested sampling, every part optional.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Softmax temperature.
    pub temperature: Option<f64>,
    /// Nucleus mass.
    pub top_p: Option<f64>,
    /// Most likely tokens kept.
    pub top_k: Option<usize>,
    /// Ids that end a generation.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationDefaults {
    /// Reads the file of a model directory; a directory without one suggests nothing.
    ///
    /// # Errors
    /// When the file is there and cannot be read or used.
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        let path = dir.join("generation_config.json");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => return Err(ConfigError::Read { path, source }),
        };
        let value: Value =
            serde_json::from_str(&text).map_err(|e| ConfigError::Json(e.to_string()))?;
        let object = value.as_object().ok_or_else(|| ConfigError::Json("not an object".into()))?;
        let fields = Fields::new(object, "generation_config.");
        // Greedy by default is written as do_sample: false, whatever temperature stands beside it.
        let greedy = fields.get("do_sample") == Some(&Value::Bool(false))
            && fields.get("temperature").is_some();
        Ok(Self {
            temperature: if greedy { Some(0.0) } else { fields.number("temperature")? },
            top_p: fields.number("top_p")?,
            top_k: fields.count("top_k")?,
            eos_token_ids: token_ids(&fields, "eos_token_id")?,
        })
    }
}
