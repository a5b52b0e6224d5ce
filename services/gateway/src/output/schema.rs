//! Which JSON types a schema allows, to tell texts from other values.

use serde_json::Value;

/// References deeper than this are taken to be circular.
const DEPTH: usize = 16;
const NAMES: [&str; 6] = ["string", "number", "boolean", "null", "object", "array"];
const TEXT: u8 = 1;

/// A set of JSON types; empty when nothing is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Types(u8);

impl Types {
    /// The types that `schema`, a part of `root`, allows.
    pub(super) fn of(root: &Value, schema: &Value) -> Self {
        collect(root, schema, DEPTH)
    }

    pub(super) fn only_text(self) -> bool {
        self.0 == TEXT
    }

    fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// What a raw value stands for. A text is written as it is, everything else as JSON.
    pub(super) fn value(self, raw: &str) -> Value {
        let text = || Value::from(raw);
        if self.only_text() {
            return text();
        }
        match serde_json::from_str::<Value>(raw.trim()) {
            // Where a text may be meant, JSON of another type that the schema does not allow is one.
            Ok(value) if !self.has(Self(TEXT)) || self.has(kind(&value)) && !value.is_string() => {
                value
            }
            Ok(_) => text(),
            Err(_) => literal(raw.trim()).filter(|v| self.has(kind(v))).unwrap_or_else(text),
        }
    }
}

/// Constants as models write them now and then.
fn literal(raw: &str) -> Option<Value> {
    match raw {
        "True" => Some(true.into()),
        "False" => Some(false.into()),
        "None" => Some(Value::Null),
        _ => None,
    }
}

/// Whether `schema`, a part of `root`, allows texts and nothing else.
pub(crate) fn only_text(root: &Value, schema: &Value) -> bool {
    Types::of(root, schema).only_text()
}

fn named(name: &str) -> Types {
    let name = if name == "integer" { "number" } else { name };
    NAMES.iter().position(|n| *n == name).map_or_else(Types::default, |at| Types(1 << at))
}

fn kind(value: &Value) -> Types {
    named(match value {
        Value::String(_) => "string",
        Value::Number(_) => "number",
        Value::Bool(_) => "boolean",
        Value::Null => "null",
        Value::Object(_) => "object",
        Value::Array(_) => "array",
    })
}

fn union(types: impl Iterator<Item = Types>) -> Types {
    types.fold(Types::default(), |all, one| Types(all.0 | one.0))
}

fn collect(root: &Value, schema: &Value, depth: usize) -> Types {
    if depth == 0 {
        return Types::default();
    }
    let each = |name: &str| {
        let parts = schema[name].as_array().into_iter().flatten();
        union(parts.map(|part| collect(root, part, depth - 1)))
    };
    let found = match &schema["type"] {
        Value::String(name) => named(name),
        Value::Array(names) => union(names.iter().filter_map(Value::as_str).map(named)),
        _ => Types::default(),
    };
    let reference = schema["$ref"].as_str().and_then(|path| root.pointer(path.strip_prefix('#')?));
    let candidates = [
        found,
        schema.get("const").map_or_else(Types::default, kind),
        union(schema["enum"].as_array().into_iter().flatten().map(kind)),
        reference.map_or_else(Types::default, |schema| collect(root, schema, depth - 1)),
        union(["anyOf", "oneOf"].into_iter().map(each)),
        each("allOf"),
        if schema["properties"].is_object() { named("object") } else { Types::default() },
        if schema["items"].is_object() { named("array") } else { Types::default() },
    ];
    let found = candidates.into_iter().find(|types| *types != Types::default());
    match (found, schema["nullable"].as_bool()) {
        (Some(types), Some(true)) => Types(types.0 | named("null").0),
        (found, _) => found.unwrap_or_default(),
    }
}
