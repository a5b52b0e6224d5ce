//! Reading a request's JSON object field by field, so that every complaint names its field.
//!
//! `null` counts as absent, as OpenAI's clients send it; fields nobody reads are ignored.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of a request.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

/// What a JSON value is, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn wrong_type(name: &str, expected: &str, value: &Value) -> ApiError {
    let got = match value {
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        other => kind(other).to_owned(),
    };
    ApiError::field(name, format!("{name:?} is {got}, expected {expected}"))
}

/// A whole number, also when it is written `16.0`.
pub(crate) fn whole(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let float = value.as_f64().filter(|f| f.fract() == 0.0 && f.abs() < 9e15)?;
        Some(float as i64)
    })
}

impl Fields {
    /// The fields of a parsed body.
    pub(crate) fn new(body: Value) -> Result<Self, ApiError> {
        match body {
            Value::Object(map) => Ok(Self(map)),
            other => Err(ApiError::invalid(format!(
                "the request body is {}, expected a JSON object",
                kind(&other)
            ))),
        }
    }

    /// The value, unless it is absent or null.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|v| !v.is_null())
    }

    /// Takes the value out.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.get_mut(name).map(Value::take).filter(|v| !v.is_null())
    }

    pub(crate) fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.get(name)
            .map(|v| v.as_bool().ok_or_else(|| wrong_type(name, "true or false", v)))
            .transpose()
    }

    pub(crate) fn string(&self, name: &str) -> Result<Option<&str>, ApiError> {
        self.get(name)
            .map(|v| v.as_str().ok_or_else(|| wrong_type(name, "a string", v)))
            .transpose()
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<&Map<String, Value>>, ApiError> {
        self.get(name)
            .map(|v| v.as_object().ok_or_else(|| wrong_type(name, "an object", v)))
            .transpose()
    }

    pub(crate) fn list(&self, name: &str) -> Result<Option<&Vec<Value>>, ApiError> {
        self.get(name)
            .map(|v| v.as_array().ok_or_else(|| wrong_type(name, "a list", v)))
            .transpose()
    }

    /// Any whole number.
    pub(crate) fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        self.get(name)
            .map(|v| whole(v).ok_or_else(|| wrong_type(name, "a whole number", v)))
            .transpose()
    }

    /// A whole number in a range.
    pub(crate) fn integer_in(
        &self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        in_range(name, self.integer(name)?, &range)
    }

    /// A number in a range.
    pub(crate) fn number_in(
        &self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ApiError> {
        let value = self
            .get(name)
            .map(|v| v.as_f64().ok_or_else(|| wrong_type(name, "a number", v)))
            .transpose()?;
        in_range(name, value, &range)
    }

    /// Refuses a field that asks for something not built, unless its value is one that changes nothing.
    pub(crate) fn refuse_unless(
        &self,
        name: &str,
        neutral: impl Fn(&Value) -> bool,
        accepted: &str,
    ) -> Result<(), ApiError> {
        match self.get(name) {
            Some(value) if !neutral(value) => Err(ApiError::unsupported(name, accepted)),
            _ => Ok(()),
        }
    }
}

fn in_range<T: PartialOrd + Display>(
    name: &str,
    value: Option<T>,
    range: &RangeInclusive<T>,
) -> Result<Option<T>, ApiError> {
    match value {
        Some(v) if !range.contains(&v) => Err(ApiError::field(
            name,
            format!("{name:?} is {v}, expected {} to {}", range.start(), range.end()),
        )),
        other => Ok(other),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value) -> Fields {
        Fields::new(value).unwrap()
    }

    #[test]
    fn null_is_absent() {
        let fields = fields(json!({"n": null, "stream": null, "user": null}));
        assert_eq!(fields.integer("n").unwrap(), None);
        assert_eq!(fields.boolean("stream").unwrap(), None);
        assert_eq!(fields.string("user").unwrap(), None);
    }

    #[test]
    fn whole_numbers_may_be_written_as_floats_only_when_whole() {
        assert_eq!(fields(json!({"n": 2.0})).integer("n").unwrap(), Some(2));
        for bad in [json!(1.5), json!("2"), json!(true), json!([1]), json!(1e300)] {
            assert!(fields(json!({"n": bad})).integer("n").is_err(), "{bad}");
        }
    }

    #[test]
    fn complaints_name_field_value_and_range() {
        let error = fields(json!({"top_p": 1.5})).number_in("top_p", 0.0..=1.0).unwrap_err();
        assert_eq!(error.body()["error"]["message"], "\"top_p\" is 1.5, expected 0 to 1");
        assert_eq!(error.body()["error"]["param"], "top_p");
    }

    #[test]
    fn only_an_object_is_a_request() {
        let error = Fields::new(json!([1])).unwrap_err();
        assert_eq!(
            error.body()["error"]["message"],
            "the request body is a list, expected a JSON object"
        );
    }
}
