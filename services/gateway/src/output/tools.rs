//! The functions that a request offers.

use serde_json::Value;

use super::schema::Types;

/// One function.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// JSON schema of its arguments; null when it has none.
    pub(crate) parameters: Value,
}

/// All of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tools(pub(crate) Vec<Tool>);

impl Tools {
    pub(crate) fn get(&self, name: &str) -> Option<&Tool> {
        self.0.iter().find(|tool| tool.name == name)
    }

    /// What an argument may be.
    pub(super) fn types(&self, function: &str, key: &str) -> Types {
        let Some(tool) = self.get(function) else { return Types::default() };
        let schema = tool.parameters.get("properties").and_then(|p| p.get(key));
        schema.map_or_else(Types::default, |schema| Types::of(&tool.parameters, schema))
    }
}
