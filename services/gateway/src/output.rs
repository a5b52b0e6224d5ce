//! What GLM writes, taken apart: reasoning, content and tool calls, as the text comes.
//!
//! Reasoning ends at `</think>`, or where a call begins. A call is
//! `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>`, with any whitespace between its parts and with no
//! arguments at all if it has none. What may still become a tag is held back.

mod arguments;
mod scan;
mod schema;
#[cfg(test)]
mod tests;
mod tools;

use std::sync::Arc;

use arguments::Arguments;
use scan::{Found, find};
pub(crate) use schema::only_text;
pub(crate) use tools::{Tool, Tools};

const THINK: &str = "<think>";
const END_THINK: &str = "</think>";
const CALL: &str = "<tool_call>";
const END_CALL: &str = "</tool_call>";
const KEY: &str = "<arg_key>";
const END_KEY: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const END_VALUE: &str = "</arg_value>";

/// What a message grows by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Delta {
    Reasoning(String),
    Content(String),
    /// A call begins; its name is complete.
    Call {
        index: usize,
        name: String,
    },
    /// More of the JSON text of the call's arguments.
    Arguments {
        index: usize,
        text: String,
    },
}

#[derive(Debug)]
enum State {
    /// Nothing but whitespace yet; the model may open its reasoning itself.
    Opening,
    Reasoning,
    Content,
    /// Behind a call: whitespace before the next one is nothing.
    AfterCall,
    Name,
    /// Between the arguments of a call.
    Between(Arguments),
    Key(Arguments),
    BeforeValue(Arguments, String),
    Value(Arguments),
}

/// Takes one choice's text apart. All deltas together do not depend on how the text was cut into pieces.
#[derive(Debug)]
pub(crate) struct OutputParser {
    state: State,
    held: String,
    tools: Option<Arc<Tools>>,
    calls: usize,
}

impl OutputParser {
    /// `thinking` when the prompt has opened the reasoning. Without `tools` calls are content.
    pub(crate) fn new(thinking: bool, tools: Option<Arc<Tools>>) -> Self {
        let state = if thinking { State::Reasoning } else { State::Opening };
        Self { state, held: String::new(), tools, calls: 0 }
    }

    /// Calls that have begun.
    pub(crate) fn calls(&self) -> usize {
        self.calls
    }

    /// Takes the next piece of text.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Delta> {
        self.held.push_str(text);
        let mut deltas = Vec::new();
        while self.advance(&mut deltas) {}
        merge(deltas)
    }

    /// The text ends here: what was held back is text after all. A call that was cut off stays so.
    pub(crate) fn finish(&mut self) -> Vec<Delta> {
        let rest = std::mem::take(&mut self.held);
        let delta = match std::mem::replace(&mut self.state, State::Content) {
            State::Opening | State::Content => Delta::Content(rest),
            State::Reasoning => Delta::Reasoning(rest),
            State::AfterCall if rest.trim().is_empty() => return Vec::new(),
            State::AfterCall => Delta::Content(rest),
            // No name, no call.
            State::Name => Delta::Content(format!("{CALL}{rest}")),
            State::Value(arguments) => {
                let text = arguments.cut_off(&rest);
                Delta::Arguments { index: self.calls - 1, text }
            }
            State::Between(_) | State::Key(_) | State::BeforeValue(..) => return Vec::new(),
        };
        merge(vec![delta])
    }

    /// One transition; false when more text is needed.
    fn advance(&mut self, deltas: &mut Vec<Delta>) -> bool {
        let call = self.tools.is_some().then_some(CALL);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Opening => {
                let text = self.held.trim_start();
                if let Some(rest) = text.strip_prefix(THINK) {
                    self.held = rest.to_owned();
                    self.state = State::Reasoning;
                } else if THINK.starts_with(text) {
                    self.state = State::Opening;
                    return false;
                }
                true
            }
            State::Reasoning => match find(&self.held, [Some(END_THINK), call]) {
                Found::Tag { at, tag } => {
                    let text: String = self.take(at, if tag == CALL { 0 } else { tag.len() });
                    deltas.push(Delta::Reasoning(text));
                    true
                }
                Found::Open { at } => {
                    deltas.push(Delta::Reasoning(self.take(at, 0)));
                    self.state = State::Reasoning;
                    false
                }
            },
            State::Content => match find(&self.held, [call, None]) {
                Found::Tag { at, tag } => {
                    deltas.push(Delta::Content(self.take(at, tag.len())));
                    self.state = State::Name;
                    true
                }
                Found::Open { at } => {
                    deltas.push(Delta::Content(self.take(at, 0)));
                    false
                }
            },
            State::AfterCall => {
                let text = self.held.trim_start();
                if let Some(rest) = text.strip_prefix(CALL) {
                    self.held = rest.to_owned();
                    self.state = State::Name;
                    return true;
                }
                if CALL.starts_with(text) {
                    self.state = State::AfterCall;
                    return false;
                }
                true
            }
            State::Name => match find(&self.held, [Some(KEY), Some(END_CALL)]) {
                Found::Tag { at, .. } => {
                    let name = self.take(at, 0).trim().to_owned();
                    let arguments = Arguments::new(self.tools.clone(), &name);
                    deltas.push(Delta::Call { index: self.calls, name });
                    self.calls += 1;
                    self.state = State::Between(arguments);
                    true
                }
                Found::Open { .. } => self.wait(State::Name),
            },
            State::Between(arguments) => match find(&self.held, [Some(KEY), Some(END_CALL)]) {
                Found::Tag { at, tag } => {
                    self.take(at, tag.len());
                    if tag == KEY {
                        self.state = State::Key(arguments);
                    } else {
                        self.argument_text(arguments.close(), deltas);
                        self.state = State::AfterCall;
                    }
                    true
                }
                Found::Open { .. } => self.wait(State::Between(arguments)),
            },
            State::Key(arguments) => match find(&self.held, [Some(END_KEY), None]) {
                Found::Tag { at, tag } => {
                    let key = self.take(at, tag.len()).trim().to_owned();
                    self.state = State::BeforeValue(arguments, key);
                    true
                }
                Found::Open { .. } => self.wait(State::Key(arguments)),
            },
            State::BeforeValue(mut arguments, key) => match find(&self.held, [Some(VALUE), None]) {
                Found::Tag { at, tag } => {
                    self.take(at, tag.len());
                    let text = arguments.open(&key);
                    self.argument_text(text, deltas);
                    self.state = State::Value(arguments);
                    true
                }
                Found::Open { .. } => self.wait(State::BeforeValue(arguments, key)),
            },
            State::Value(mut arguments) => match find(&self.held, [Some(END_VALUE), None]) {
                Found::Tag { at, tag } => {
                    let value = self.take(at, tag.len());
                    let text = arguments.finish(&value);
                    self.argument_text(text, deltas);
                    self.state = State::Between(arguments);
                    true
                }
                Found::Open { at } => {
                    let value = self.take(at, 0);
                    let text = arguments.push(&value);
                    self.argument_text(text, deltas);
                    self.wait(State::Value(arguments))
                }
            },
        }
    }

    fn wait(&mut self, state: State) -> bool {
        self.state = state;
        false
    }

    /// Takes the text up to `at` and drops `skip` bytes behind it.
    fn take(&mut self, at: usize, skip: usize) -> String {
        let rest = self.held.split_off(at + skip);
        let mut text = std::mem::replace(&mut self.held, rest);
        text.truncate(at);
        text
    }

    fn argument_text(&self, text: String, deltas: &mut Vec<Delta>) {
        deltas.push(Delta::Arguments { index: self.calls - 1, text });
    }
}

/// Joins what follows each other and belongs together, and drops what is empty.
fn merge(deltas: Vec<Delta>) -> Vec<Delta> {
    let mut merged: Vec<Delta> = Vec::new();
    for delta in deltas {
        match (merged.last_mut(), delta) {
            (_, Delta::Reasoning(text) | Delta::Content(text) | Delta::Arguments { text, .. })
                if text.is_empty() => {}
            (Some(Delta::Reasoning(before)), Delta::Reasoning(text))
            | (Some(Delta::Content(before)), Delta::Content(text))
            | (Some(Delta::Arguments { text: before, .. }), Delta::Arguments { text, .. }) => {
                before.push_str(&text);
            }
            (_, delta) => merged.push(delta),
        }
    }
    merged
}
