use proptest::prelude::*;
use serde_json::{Value, json};

use super::schema::Types;
use super::*;

fn tools() -> Arc<Tools> {
    let parameters = json!({
        "type": "object",
        "$defs": {"Size": {"enum": ["small", "large"]}, "Loop": {"$ref": "#/$defs/Loop"}},
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"},
            "size": {"$ref": "#/$defs/Size"}, "loop": {"$ref": "#/$defs/Loop"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "fixed": {"const": 3}, "either": {"type": ["string", "number"]},
        },
    });
    let tool = |name: &str| Tool { name: name.into(), parameters: parameters.clone() };
    Arc::new(Tools(vec![tool("weather"), tool("now")]))
}

/// A message, put together from its deltas.
#[derive(Debug, Default, PartialEq)]
struct Message {
    reasoning: String,
    content: String,
    calls: Vec<(String, String)>,
}

impl Message {
    fn add(&mut self, delta: Delta) {
        match delta {
            Delta::Reasoning(text) => self.reasoning += &text,
            Delta::Content(text) => self.content += &text,
            Delta::Call { index, name } => {
                assert_eq!(index, self.calls.len(), "a name comes once");
                self.calls.push((name, String::new()));
            }
            Delta::Arguments { index, text } => {
                assert_eq!(index + 1, self.calls.len());
                self.calls[index].1 += &text;
            }
        }
    }
}

fn parse<'a>(thinking: bool, pieces: impl IntoIterator<Item = &'a str>) -> Message {
    let mut parser = OutputParser::new(thinking, Some(tools()));
    let mut message = Message::default();
    for piece in pieces {
        parser.push(piece).into_iter().for_each(|delta| message.add(delta));
    }
    parser.finish().into_iter().for_each(|delta| message.add(delta));
    message
}

fn arguments(text: &str) -> Value {
    let message = parse(false, [text]);
    serde_json::from_str(&message.calls[0].1).unwrap_or_else(|e| panic!("{e}: {message:?}"))
}

const CALLS: &str = "Let me see.</think>I look it up.<tool_call>weather<arg_key>city</arg_key>\
    <arg_value>São \"Paulo\"\n</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>\n\
    <tool_call>now</tool_call>";

#[test]
fn reasoning_content_and_calls() {
    let message = parse(true, [CALLS]);
    assert_eq!(message.reasoning, "Let me see.");
    assert_eq!(message.content, "I look it up.");
    let city = r#"{"city": "São \"Paulo\"\n", "days": 3}"#;
    assert_eq!(
        message.calls,
        [("weather".into(), city.into()), ("now".to_owned(), "{}".to_owned())]
    );
}

#[test]
fn what_never_ends_its_reasoning_is_reasoning_and_the_model_may_open_it_itself() {
    assert_eq!(parse(true, ["hm", "m </thin"]).reasoning, "hmm </thin");
    let own = parse(false, ["\n<thi", "nk>a", "</think>b"]);
    assert_eq!((own.reasoning.as_str(), own.content.as_str()), ("a", "b"));
    assert_eq!(parse(false, [" <thin air>"]).content, " <thin air>");
}

#[test]
fn a_call_ends_reasoning_and_without_tools_it_is_text() {
    let message = parse(true, ["so<tool_call>now</tool_call>"]);
    assert_eq!((message.reasoning.as_str(), message.calls.len()), ("so", 1));
    let mut parser = OutputParser::new(true, None);
    let deltas = parser.push("a</think><tool_call>now</tool_call>");
    let content = Delta::Content("<tool_call>now</tool_call>".into());
    assert_eq!(deltas, [Delta::Reasoning("a".into()), content]);
}

#[test]
fn the_older_form_has_line_breaks() {
    let text =
        "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>\n7\n</arg_value>\n</tool_call>";
    assert_eq!(arguments(text), json!({"days": 7}));
}

#[test]
fn schemas_decide_what_is_text() {
    let value = |key: &str, raw: &str| {
        let text = format!(
            "<tool_call>weather<arg_key>{key}</arg_key><arg_value>{raw}</arg_value></tool_call>"
        );
        arguments(&text)[key].clone()
    };
    assert_eq!(value("city", "12"), json!("12"));
    assert_eq!(value("days", "12"), json!(12));
    assert_eq!(value("days", "a dozen"), json!("a dozen"));
    assert_eq!(value("tags", r#"["a", 1]"#), json!(["a", 1]));
    assert_eq!(value("size", "3"), json!("3"));
    assert_eq!(value("maybe", "null"), Value::Null);
    assert_eq!(value("maybe", "12"), json!("12"));
    assert_eq!(value("maybe", "None"), Value::Null);
    assert_eq!(value("fixed", "3"), json!(3));
    assert_eq!(value("either", "3.5"), json!(3.5));
    assert_eq!(value("either", "true"), json!("true"));
    assert_eq!(value("unknown", r#"{"a": 1}"#), json!({"a": 1}));
    assert_eq!(value("unknown", "plain words"), json!("plain words"));
    assert_eq!(value("loop", "4"), json!(4), "a circle says nothing");
    assert_eq!(
        Types::of(&Value::Null, &json!({"nullable": true, "type": "string"})).value("null"),
        Value::Null
    );
}

#[test]
fn what_is_cut_off_stays_so() {
    let cut = parse(false, ["<tool_call>weather<arg_key>city</arg_key><arg_value>Par"]);
    assert_eq!(cut.calls, [("weather".to_owned(), "{\"city\": \"Par".to_owned())]);
    assert_eq!(parse(false, ["x<tool_call>wea"]).content, "x<tool_call>wea");
    assert_eq!(parse(false, ["x<tool_c"]).content, "x<tool_c");
}

proptest! {
    #[test]
    fn pieces_change_nothing(
        cuts in prop::collection::vec(0usize..CALLS.len(), 0..12),
        tail in prop::sample::select(vec!["", " and text", "\n<tool_call>weather<arg_key>city</arg_key><arg_value>Pa"]),
    ) {
        let text = format!("{CALLS}{tail}");
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|c| text.is_char_boundary(*c)).collect();
        cuts.sort_unstable();
        let mut pieces = Vec::new();
        let mut from = 0;
        for cut in cuts.into_iter().chain([text.len()]) {
            pieces.push(&text[from..cut]);
            from = cut;
        }
        prop_assert_eq!(parse(true, pieces), parse(true, [text.as_str()]));
        let characters: Vec<String> = text.chars().map(String::from).collect();
        prop_assert_eq!(parse(true, characters.iter().map(String::as_str)), parse(true, [text.as_str()]));
    }
}
