//! The arguments of one call, written as a JSON text while they come.

use std::sync::Arc;

use serde_json::Value;

use super::Tools;
use super::schema::Types;

/// The JSON object so far.
#[derive(Debug)]
pub(super) struct Arguments {
    tools: Option<Arc<Tools>>,
    function: String,
    any: bool,
    types: Types,
    /// What is known of a value whose type only shows at its end.
    value: String,
    /// Whether the opening quote of a text is out.
    quoted: bool,
}

impl Arguments {
    pub(super) fn new(tools: Option<Arc<Tools>>, function: &str) -> Self {
        Self {
            tools,
            function: function.to_owned(),
            any: false,
            types: Types::default(),
            value: String::new(),
            quoted: false,
        }
    }

    /// A value begins.
    pub(super) fn open(&mut self, key: &str) -> String {
        let before = if std::mem::replace(&mut self.any, true) { ", " } else { "{" };
        self.types =
            self.tools.as_ref().map_or_else(Types::default, |t| t.types(&self.function, key));
        self.value.clear();
        self.quoted = self.types.only_text();
        let quote = if self.quoted { "\"" } else { "" };
        format!("{before}{}: {quote}", Value::from(key))
    }

    /// More of a value: texts go out at once.
    pub(super) fn push(&mut self, piece: &str) -> String {
        if self.quoted {
            return escaped(piece);
        }
        self.value.push_str(piece);
        String::new()
    }

    /// The end of a value.
    pub(super) fn finish(&mut self, piece: &str) -> String {
        if self.quoted {
            return escaped(piece) + "\"";
        }
        self.value.push_str(piece);
        self.types.value(&self.value).to_string()
    }

    /// What can be said of a value that ends in the middle.
    pub(super) fn cut_off(&self, piece: &str) -> String {
        if self.quoted { escaped(piece) } else { String::new() }
    }

    /// The end of the object.
    pub(super) fn close(&self) -> String {
        if self.any { "}".into() } else { "{}".into() }
    }
}

/// A piece of a JSON string, without quotes.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
