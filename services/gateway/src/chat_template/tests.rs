use super::*;

use crate::tokenizer::tests::fixture;

fn template(source: &str) -> ChatTemplate {
    let eos = json!({"eos_token": "<|endoftext|>"});
    let special = special_tokens(eos.as_object().unwrap());
    ChatTemplate::new(vec![(DEFAULT.into(), source.into())], special).unwrap()
}

fn glm() -> ChatTemplate {
    template(&std::fs::read_to_string(fixture().join("chat_template.jinja")).unwrap())
}

/// Renders a case of the fixture as the chat endpoint does.
fn render(case: &Value, template: &ChatTemplate) -> Result<String, TemplateError> {
    let messages = case["messages"].as_array().unwrap().clone();
    let flag = |name: &str, default| case[name].as_bool().unwrap_or(default);
    template.render(Chat {
        messages: normalise(messages, template).unwrap(),
        tools: case.get("tools").cloned(),
        documents: None,
        add_generation_prompt: flag("add_generation_prompt", true),
        continue_final_message: flag("continue_final_message", false),
        variables: case["kwargs"].as_object().cloned().unwrap_or_default(),
    })
}

#[test]
fn every_case_renders_as_in_transformers() {
    let text = std::fs::read_to_string(fixture().join("chat_cases.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert!(cases.len() > 10);
    for case in &cases {
        let template = match case.get("template") {
            Some(source) => template(source.as_str().unwrap()),
            None => glm(),
        };
        let rendered = render(case, &template).unwrap_or_else(|e| panic!("{}: {e}", case["name"]));
        assert_eq!(rendered, case["expected"].as_str().unwrap(), "{}", case["name"]);
    }
}

#[test]
fn arguments_sent_as_text_render_like_objects() {
    let chat = |arguments: Value| {
        let call = json!({"function": {"name": "f", "arguments": arguments}});
        json!({"messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
        ]})
    };
    let as_text = render(&chat(json!(r#"{"b": [1, "é"], "a": null}"#)), &glm()).unwrap();
    let as_object = render(&chat(json!({"b": [1, "é"], "a": null})), &glm()).unwrap();
    assert_eq!(as_text, as_object);
    assert!(as_text.contains("<arg_key>b</arg_key><arg_value>[1, \"é\"]</arg_value>"), "{as_text}");
}

#[test]
fn arguments_stay_text_for_templates_that_join_texts() {
    let joining = template(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}\
         {{ '<' + c.function.name + '>' + c.function.arguments }}{% endfor %}{% endfor %}",
    );
    assert!(joining.takes_argument_text() && !glm().takes_argument_text());
    let call = json!({"function": {"name": "f", "arguments": "{\"a\":  1}"}});
    let case = json!({"messages": [{"role": "assistant", "content": null, "tool_calls": [call]}]});
    assert_eq!(render(&case, &joining).unwrap(), "<f>{\"a\":  1}");
}

#[test]
fn parts_are_joined_for_templates_that_only_know_strings() {
    let case = json!({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "one"}, {"type": "text", "text": "two"},
    ]}]});
    let plain = template("{% for m in messages %}{{ m.content }};{% endfor %}");
    assert!(!plain.takes_parts() && glm().takes_parts());
    assert_eq!(render(&case, &plain).unwrap(), "one\ntwo;");
}

#[test]
fn developer_messages_become_system_messages_where_the_template_has_none() {
    let case = json!({"messages": [{"role": "developer", "content": "be brief"}]});
    assert!(render(&case, &glm()).unwrap().contains("<|system|>be brief"));
    let own =
        template("{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{% endfor %}");
    assert_eq!(render(&case, &own).unwrap(), "D");
}

#[test]
fn a_template_that_raises_is_a_refusal_with_its_message() {
    let refusing = template("{{ raise_exception('no images, please') }}");
    let case = json!({"messages": [{"role": "user", "content": "x"}]});
    let error = render(&case, &refusing).unwrap_err().to_string();
    assert!(error.contains("no images, please"), "{error}");
}

#[test]
fn a_broken_template_says_where() {
    let templates = vec![(DEFAULT.to_owned(), "{% for m in messages %}\n{{ m. }}".to_owned())];
    let error = ChatTemplate::new(templates, Map::new()).unwrap_err().to_string();
    assert!(error.contains("default") && error.contains("line 2"), "{error}");
}

#[test]
fn messages_out_of_shape_are_refused_by_place() {
    for (messages, place) in [
        (json!([]), "messages"),
        (json!(["hi"]), "messages[0]"),
        (json!([{"content": "x"}]), "messages[0].role"),
        (json!([{"role": "wizard", "content": "x"}]), "messages[0].role"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (json!([{"role": "user", "content": 5}]), "messages[0].content"),
        (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "messages[0].content[0].type",
        ),
        (json!([{"role": "assistant", "tool_calls": {}}]), "messages[0].tool_calls"),
        (
            json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]),
            "messages[0].tool_calls[0].function.arguments",
        ),
    ] {
        let error = normalise(messages.as_array().unwrap().clone(), &glm()).unwrap_err();
        assert_eq!(error.body()["error"]["param"], place, "{messages}");
    }
}

#[test]
fn named_templates_of_a_tokenizer_config() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "eos_token": {"content": "<e>"},
        "chat_template": [
            {"name": "default", "template": "plain{{ eos_token }}"},
            {"name": "tool_use", "template": "tools"},
        ],
    });
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let template = ChatTemplate::load(dir.path()).unwrap().unwrap();
    assert_eq!(template.render(Chat::default()).unwrap(), "plain<e>");
    let chat = Chat { tools: Some(json!([])), ..Chat::default() };
    assert_eq!(template.render(chat).unwrap(), "tools");
}

#[test]
fn no_template_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    assert!(ChatTemplate::load(dir.path()).unwrap().is_none());
}
