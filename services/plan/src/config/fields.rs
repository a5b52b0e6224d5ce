//! Reading typed values out of a JSON object, with errors that name field, value and expectation.

use serde_json::{Map, Value};

use super::error::ConfigError;

/// A JSON object whose fields are asked for by name; `null` counts as absent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Prefix of field names in messages: "" or "rope_parameters.".
    prefix: &'a str,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(object: &'a Map<String, Value>, prefix: &'a str) -> Self {
        Self { object, prefix }
    }

    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|v| !v.is_null())
    }

    pub(crate) fn invalid(&self, field: &str, expected: impl Into<String>) -> ConfigError {
        ConfigError::Invalid {
            field: format!("{}{field}", self.prefix),
            found: self.get(field).map_or_else(|| "absent".to_owned(), ToString::to_string),
            expected: expected.into(),
        }
    }

    pub(crate) fn missing(&self, field: &str, expected: &'static str) -> ConfigError {
        ConfigError::Missing { field: format!("{}{field}", self.prefix), expected }
    }

    /// A whole number; 8.0 counts, since some writers turn integers into floats.
    pub(crate) fn count(&self, field: &str) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let whole = value.as_u64().or_else(|| {
            value
                .as_f64()
                .filter(|f| f.fract() == 0.0 && (0.0..=9e15).contains(f))
                .map(|f| f as u64)
        });
        match whole.and_then(|n| usize::try_from(n).ok()) {
            Some(n) => Ok(Some(n)),
            None => Err(self.invalid(field, "a whole number")),
        }
    }

    /// A whole number above 0 that has no default.
    pub(crate) fn size(&self, field: &str) -> Result<usize, ConfigError> {
        match self.count(field)? {
            Some(0) => Err(self.invalid(field, "a whole number above 0")),
            Some(n) => Ok(n),
            None => Err(self.missing(field, "a whole number above 0")),
        }
    }

    /// A whole number above 0, or the default when absent.
    pub(crate) fn size_or(&self, field: &str, default: usize) -> Result<usize, ConfigError> {
        if self.get(field).is_none() { Ok(default) } else { self.size(field) }
    }

    pub(crate) fn number(&self, field: &str) -> Result<Option<f64>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|f| f.is_finite()) {
                Some(f) => Ok(Some(f)),
                None => Err(self.invalid(field, "a number")),
            },
        }
    }

    /// A number above 0.
    pub(crate) fn positive(&self, field: &str) -> Result<Option<f64>, ConfigError> {
        match self.number(field)? {
            Some(f) if f <= 0.0 => Err(self.invalid(field, "a number above 0")),
            other => Ok(other),
        }
    }

    pub(crate) fn flag(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(field) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.invalid(field, "true or false")),
        }
    }

    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.invalid(field, "a string")),
        }
    }

    pub(crate) fn object(
        &self,
        field: &str,
    ) -> Result<Option<&'a Map<String, Value>>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(value) => {
                value.as_object().map(Some).ok_or_else(|| self.invalid(field, "an object"))
            }
        }
    }

    pub(crate) fn list(&self, field: &str) -> Result<Option<&'a [Value]>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(value) => value
                .as_array()
                .map(|list| Some(list.as_slice()))
                .ok_or_else(|| self.invalid(field, "a list")),
        }
    }

    /// The field must be absent or hold `only`.
    pub(crate) fn only(&self, field: &str, only: &str) -> Result<(), ConfigError> {
        match self.text(field)? {
            Some(found) if found != only => Err(self.invalid(field, format!("{only:?}"))),
            _ => Ok(()),
        }
    }

    /// The same number under several names; they may not disagree.
    pub(crate) fn aliased(&self, names: &[&str]) -> Result<Option<usize>, ConfigError> {
        let mut found: Option<(&str, usize)> = None;
        for &name in names {
            let Some(value) = self.count(name)? else { continue };
            match found {
                Some((first, other)) if other != value => {
                    return Err(ConfigError::Disagree {
                        first_field: first.to_owned(),
                        first: other.to_string(),
                        second_field: name.to_owned(),
                        second: value.to_string(),
                    });
                }
                _ => found = Some((name, value)),
            }
        }
        Ok(found.map(|(_, value)| value))
    }
}
