//! The grammar of GLM's tool calls, for requests that demand one.

use std::fmt::Write as _;

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use crate::output::{Tool, Tools, only_text};
use crate::tokenizer::TextTokenizer;

/// One call, or with `several` any number of them, of these functions, with arguments that their schemas allow.
pub(crate) fn grammar(tokenizer: &TextTokenizer, tools: &Tools, several: bool) -> TopLevelGrammar {
    let tag = |text: &str| match tokenizer.id_of_added(text) {
        Some(id) => format!("<[{id}]>"),
        None => quoted(text),
    };
    let mut rules = String::new();
    let names: Vec<String> = (0..tools.0.len()).map(|i| format!("call_{i}")).collect();
    let _ = writeln!(rules, "start: call{}", if several { "+" } else { "" });
    let _ = writeln!(rules, "call: {}", names.join(" | "));
    for (i, tool) in tools.0.iter().enumerate() {
        let mut parts = vec![tag("<tool_call>"), quoted(&tool.name)];
        for (j, (key, schema, required)) in arguments(tool).into_iter().enumerate() {
            let value = value(&tool.parameters, schema);
            let _ = writeln!(
                rules,
                "arg_{i}_{j}: {} {} {} {} {value} {}",
                tag("<arg_key>"),
                quoted(key),
                tag("</arg_key>"),
                tag("<arg_value>"),
                tag("</arg_value>"),
            );
            parts.push(format!("arg_{i}_{j}{}", if required { "" } else { "?" }));
        }
        parts.push(tag("</tool_call>"));
        let _ = writeln!(rules, "call_{i}: {}", parts.join(" "));
    }
    // Tags that are tokens never occur in a text; those spelled out must not.
    let text =
        if tokenizer.id_of_added("</arg_value>").is_some() { r"/(.|\n)*/" } else { "/[^<]*/" };
    let _ = writeln!(rules, "text: {text}");
    TopLevelGrammar::from_lark(rules)
}

/// The arguments in the schema's order, with their schemas and whether they must come.
fn arguments(tool: &Tool) -> Vec<(&str, &Value, bool)> {
    let required = tool.parameters["required"].as_array();
    let must = |key: &str| required.is_some_and(|list| list.iter().any(|name| name == key));
    let properties = tool.parameters["properties"].as_object().into_iter().flatten();
    properties.map(|(key, schema)| (key.as_str(), schema, must(key))).collect()
}

/// The rule for a value: texts stand as they are, everything else is JSON.
fn value(root: &Value, schema: &Value) -> String {
    if only_text(root, schema) {
        let choices = schema["enum"].as_array().map(|list| {
            let quoted = list.iter().filter_map(Value::as_str).map(quoted);
            format!("({})", quoted.collect::<Vec<_>>().join(" | "))
        });
        return choices.unwrap_or_else(|| "text".into());
    }
    let mut schema = match schema {
        Value::Object(map) => map.clone(),
        _ => Default::default(),
    };
    // References point into the whole schema.
    for name in ["$defs", "definitions"] {
        if let Some(definitions) = root.get(name) {
            schema.entry(name).or_insert_with(|| definitions.clone());
        }
    }
    format!("%json {}", json!(schema))
}

/// A text as a literal of a Lark grammar.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
