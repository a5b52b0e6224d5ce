use serde_json::{Value, json};

use super::*;
use crate::fields::Fields;
use crate::output::{Delta, OutputParser, Tool, Tools};
use crate::tokenizer::tests::tokenizer;

const EOS: u32 = 476;
const VOCAB: usize = 512;

fn compiler() -> Compiler {
    Compiler::new(tokenizer(), VOCAB, &[EOS]).unwrap()
}

fn grammar(fields: Value) -> Arc<dyn Grammar> {
    let (_, grammar) = read(&Fields::new(fields).unwrap()).unwrap().unwrap();
    compiler().compile(grammar, false, false).unwrap()
}

fn allows(matcher: &mut Box<dyn Matcher>, token: u32) -> bool {
    let mask = matcher.allowed().unwrap();
    mask.is_none_or(|mask| mask[token as usize / 8] >> (token % 8) & 1 == 1)
}

/// Whether the grammar takes the text as the tokenizer cuts it, and may end there.
fn takes(grammar: &Arc<dyn Grammar>, text: &str) -> bool {
    let mut matcher = grammar.start();
    for token in tokenizer().encode(text, false).unwrap() {
        if !allows(&mut matcher, token) {
            return false;
        }
        if matcher.accept(token).unwrap() {
            return true;
        }
    }
    allows(&mut matcher, EOS)
}

/// Draws at random what the mask allows, until the text ends.
fn draw(grammar: &Arc<dyn Grammar>, seed: u64) -> String {
    let mut matcher = grammar.start();
    let mut state = seed;
    let mut ids = Vec::new();
    for _ in 0..400 {
        let mask = matcher.allowed().unwrap().unwrap();
        let allowed: Vec<u32> =
            (0..VOCAB as u32).filter(|t| mask[*t as usize / 8] >> (t % 8) & 1 == 1).collect();
        if allowed.contains(&EOS) {
            break;
        }
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let token = allowed[(state >> 33) as usize % allowed.len()];
        ids.push(token);
        if matcher.accept(token).unwrap() {
            break;
        }
    }
    tokenizer().decode(&ids, false).unwrap()
}

#[test]
fn each_field_makes_its_grammar() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}},
        "required": ["a"], "additionalProperties": false});
    let nested = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}});
    let flat = json!({"response_format": {"type": "json_schema", "schema": schema}});
    for fields in [
        nested,
        flat,
        json!({"guided_json": schema}),
        json!({"structured_outputs": {"json": schema}}),
    ] {
        let grammar = grammar(fields);
        assert!(takes(&grammar, "{\"a\": 12}"));
        assert!(
            !takes(&grammar, "{\"a\": \"x\"}") && !takes(&grammar, "{}") && !takes(&grammar, "12")
        );
    }
    let object = grammar(json!({"response_format": {"type": "json_object"}}));
    assert!(takes(&object, "{\"b\": [1, null]}") && !takes(&object, "[1]"));
    let regex = grammar(json!({"guided_regex": "[ab]+c"}));
    assert!(takes(&regex, "abac") && !takes(&regex, "abad"));
    let choice = grammar(json!({"guided_choice": ["yes", "no \"way\""]}));
    assert!(takes(&choice, "no \"way\"") && !takes(&choice, "maybe"));
    let lark = grammar(json!({"guided_grammar": "start: \"a\" (\"b\" | \"c\")"}));
    assert!(takes(&lark, "ac") && !takes(&lark, "ad"));
}

#[test]
fn what_is_no_grammar_is_refused_by_name() {
    let error = |fields: Value| read(&Fields::new(fields).unwrap()).unwrap_err().body();
    assert_eq!(
        error(json!({"response_format": {"type": "xml"}}))["error"]["param"],
        "response_format"
    );
    assert_eq!(error(json!({"guided_choice": []}))["error"]["param"], "guided_choice");
    let both = json!({"guided_regex": "a", "guided_json": {}});
    assert_eq!(error(both)["error"]["param"], "guided_regex");
    let broken = read(&Fields::new(json!({"guided_regex": "a("})).unwrap()).unwrap().unwrap();
    assert!(compiler().compile(broken.1, false, false).is_err());
    assert!(
        read(&Fields::new(json!({"response_format": {"type": "text"}})).unwrap())
            .unwrap()
            .is_none()
    );
}

#[test]
fn reasoning_is_free_and_the_grammar_begins_behind_it() {
    let (_, regex) = read(&Fields::new(json!({"guided_regex": "[ab]"})).unwrap()).unwrap().unwrap();
    let grammar = compiler().compile(regex, true, false).unwrap();
    let mut matcher = grammar.start();
    let one = |text: &str| tokenizer().encode(text, false).unwrap()[0];
    for token in [one("x"), one("<tool_call>"), EOS, one("</think>")] {
        assert_eq!(matcher.allowed(), Ok(None));
        assert!(!matcher.accept(token).unwrap());
    }
    assert!(allows(&mut matcher, one("a")) && !allows(&mut matcher, one("x")));
    assert!(matcher.accept(one("b")).unwrap(), "nothing may follow");
}

fn tools() -> Tools {
    let weather = json!({
        "type": "object", "required": ["city", "days"],
        "$defs": {"Unit": {"enum": ["C", "F"]}},
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
    });
    let tool = |name: &str, parameters| Tool { name: name.into(), parameters };
    Tools(vec![tool("weather", weather), tool("now", Value::Null)])
}

#[test]
fn demanded_calls_have_glm_s_form_and_follow_their_schemas() {
    let tokenizer = tokenizer();
    let grammar = call_grammar(&tokenizer, &tools(), true);
    let grammar = compiler().compile(grammar, false, true).unwrap();
    let city = "<tool_call>weather<arg_key>city</arg_key><arg_value>a \"b\" < c\n</arg_value>\
        <arg_key>days</arg_key><arg_value>3</arg_value></tool_call>";
    assert!(takes(&grammar, city));
    assert!(takes(&grammar, &format!("{city}<tool_call>now</tool_call>")));
    assert!(!takes(&grammar, "<tool_call>weather</tool_call>"), "arguments are required");
    assert!(!takes(&grammar, "<tool_call>other</tool_call>"));
    assert!(!takes(&grammar, "I would rather not"));
    let shared = Arc::new(tools());
    for seed in 0..20 {
        let text = draw(&grammar, seed);
        let mut parser = OutputParser::new(false, Some(Arc::clone(&shared)));
        let mut deltas = parser.push(&text);
        deltas.extend(parser.finish());
        let name = deltas.iter().find_map(|d| match d {
            Delta::Call { name, .. } => Some(name.clone()),
            _ => None,
        });
        assert!(shared.get(&name.unwrap()).is_some(), "{text}");
    }
}
