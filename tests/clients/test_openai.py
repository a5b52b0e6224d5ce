"""The `openai` package as a client of a running server.

Run: BATON_URL=http://127.0.0.1:8000 pytest tests/clients/test_openai.py

Nothing here depends on what the model says, only on how it is asked and answered, so any checkpoint will do, one with
random weights too. Tests of chat are skipped where the checkpoint has no template.
"""

import asyncio
import json
import math
import os
import urllib.error
import urllib.request

import openai
import pytest

URL = os.environ.get("BATON_URL", "http://127.0.0.1:8000").rstrip("/")
PROMPT = "The river runs to the sea and"
MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="session")
def client():
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id


@pytest.fixture(scope="session")
def chat(client, model):
    """Asks a chat; skips where the checkpoint has no template."""

    def ask(**kwargs):
        kwargs = {"messages": MESSAGES, "max_completion_tokens": 16, **kwargs}
        try:
            return client.chat.completions.create(model=model, **kwargs)
        except openai.BadRequestError as error:
            if "chat template" in str(error) and "no" in str(error):
                pytest.skip("the checkpoint has no chat template")
            raise

    ask(max_completion_tokens=1)
    return ask


@pytest.fixture(scope="session")
def complete(client, model):
    """Asks a greedy completion of exactly 24 tokens, unless told otherwise."""

    def ask(**kwargs):
        extra = {"ignore_eos": True, **kwargs.pop("extra_body", {})}
        kwargs = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, **kwargs}
        return client.completions.create(model=model, extra_body=extra, **kwargs)

    return ask


def post(path, body):
    """Plain HTTP, for what the package has no call for. Returns status and JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{URL}{path}", data=data, headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def tokenize(text):
    status, answer = post("/tokenize", {"prompt": text})
    assert status == 200 and answer["count"] == len(answer["tokens"])
    return answer["tokens"]


# --- what is served -------------------------------------------------------------------------------------------------


def test_models(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_tokenize_and_back():
    for text in [PROMPT, "Grüße, 中文 🦀\n\n  x", "a"]:
        status, answer = post("/detokenize", {"tokens": tokenize(text)})
        assert (status, answer["prompt"]) == (200, text)


# --- completions ----------------------------------------------------------------------------------------------------


def test_completion(complete):
    answer = complete()
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.usage.prompt_tokens == len(tokenize(PROMPT))
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_default_length_is_sixteen(client, model):
    answer = client.completions.create(model=model, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_greedy_is_repeatable(complete):
    assert complete().choices[0].text == complete().choices[0].text


def test_token_ids_answer_like_text(complete):
    assert complete(prompt=tokenize(PROMPT)).choices[0].text == complete().choices[0].text


def test_returned_ids_spell_the_text(complete):
    choice = complete(extra_body={"return_token_ids": True}).choices[0]
    assert len(choice.token_ids) == 24
    assert choice.prompt_token_ids == tokenize(PROMPT)


def test_seed_fixes_a_sampled_text(complete):
    ask = lambda seed: complete(temperature=1.0, seed=seed, max_tokens=32).choices[0].text
    assert ask(7) == ask(7)
    assert len({ask(seed) for seed in range(5)}) > 1


def test_n_continues_the_seed(complete):
    several = complete(temperature=1.0, seed=40, n=3).choices
    assert [c.index for c in several] == [0, 1, 2]
    for i, choice in enumerate(several):
        assert choice.text == complete(temperature=1.0, seed=40 + i).choices[0].text


def test_batch_answers_each_prompt_as_alone(complete):
    prompts = [PROMPT, "Once upon a time", "1 2 3 4 5 6 7 8"]
    alone = [complete(prompt=p).choices[0].text for p in prompts]
    together = complete(prompt=prompts)
    assert [c.index for c in together.choices] == [0, 1, 2]
    assert [c.text for c in together.choices] == alone
    as_ids = complete(prompt=[tokenize(p) for p in prompts])
    assert [c.text for c in as_ids.choices] == alone
    assert together.usage.prompt_tokens == sum(len(tokenize(p)) for p in prompts)
    doubled = complete(prompt=prompts, n=2)
    assert [c.index for c in doubled.choices] == list(range(6))
    assert [c.text for c in doubled.choices] == [t for t in alone for _ in range(2)]


def stop_of(text):
    """A stop string in the middle of a text that starts where it first occurs, and what precedes it."""
    for start in range(len(text) // 3, len(text) - 3):
        stop = text[start : start + 3]
        if "\ufffd" not in stop and text.find(stop) == start:
            return stop, text[:start]
    pytest.skip("the model's text has no usable stop string")


def test_stop_string_cuts_the_text(complete):
    text = complete().choices[0].text
    stop, before = stop_of(text)
    for stops in (stop, ["never-in-the-text", stop]):
        choice = complete(stop=stops).choices[0]
        assert (choice.text, choice.finish_reason) == (before, "stop")
    streamed = list(complete(stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == before
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_stop_token_ids_end_the_text(complete):
    ids = complete(extra_body={"return_token_ids": True}).choices[0].token_ids
    stop = ids[5]
    choice = complete(extra_body={"stop_token_ids": [stop], "return_token_ids": True}).choices[0]
    assert choice.finish_reason == "stop"
    first = ids.index(stop)
    assert choice.token_ids[:first] == ids[:first] and len(choice.token_ids) <= first + 1


def test_logprobs(complete):
    plain = complete()
    answer = complete(logprobs=3)
    scores = answer.choices[0].logprobs
    assert answer.choices[0].text == plain.choices[0].text
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == 24
    for own, top in zip(scores.token_logprobs, scores.top_logprobs):
        assert own <= 0 and 3 <= len(top) <= 4
        assert math.isclose(own, max(top.values()), abs_tol=1e-6), "greedy takes the most likely"
    assert scores.text_offset[0] == 0
    assert scores.text_offset == sorted(scores.text_offset)


def test_echo_scores_the_prompt(complete):
    prompt_ids = tokenize(PROMPT)
    answer = complete(echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == PROMPT
    scores = choice.logprobs
    assert len(scores.tokens) == len(prompt_ids)
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    assert all(s <= 0 for s in scores.token_logprobs[1:])
    assert "".join(scores.tokens) == PROMPT
    for token, offset in zip(scores.tokens, scores.text_offset):
        assert PROMPT[offset:].startswith(token)
    assert answer.usage.completion_tokens == 0


def test_echo_then_answer(complete):
    plain = complete(max_tokens=4, logprobs=0).choices[0]
    echoed = complete(max_tokens=4, logprobs=0, echo=True).choices[0]
    assert echoed.text == PROMPT + plain.text
    assert echoed.logprobs.tokens[-4:] == plain.logprobs.tokens
    close = [pytest.approx(s, abs=1e-4) for s in plain.logprobs.token_logprobs]
    assert echoed.logprobs.token_logprobs[-4:] == close


def test_scores_of_a_generated_text_equal_those_of_echoing_it(complete):
    prompt = tokenize(PROMPT)
    choice = complete(logprobs=0, extra_body={"return_token_ids": True}).choices[0]
    echoed = complete(prompt=prompt + choice.token_ids, echo=True, logprobs=0, max_tokens=0)
    scores = echoed.choices[0].logprobs.token_logprobs[len(prompt) :]
    assert scores == [pytest.approx(s, abs=1e-4) for s in choice.logprobs.token_logprobs]


def test_streamed_completion_equals_the_whole(complete):
    for kwargs in ({}, {"logprobs": 2}, {"n": 2, "temperature": 1.0, "seed": 3}):
        whole = complete(**kwargs)
        chunks = list(complete(stream=True, stream_options={"include_usage": True}, **kwargs))
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
        for choice in whole.choices:
            mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
            assert "".join(c.text for c in mine) == choice.text
            assert mine[-1].finish_reason == choice.finish_reason
            if choice.logprobs:
                streamed = [s for c in mine if c.logprobs for s in c.logprobs.token_logprobs]
                assert streamed == choice.logprobs.token_logprobs


# --- chats ----------------------------------------------------------------------------------------------------------


def said(message):
    """All that a message or delta says: reasoning first, as it came."""
    return (getattr(message, "reasoning_content", None) or "") + (message.content or "")


def test_chat(chat):
    answer = chat(temperature=0)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant" and isinstance(said(choice.message), str)
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 16


def test_chat_prompt_is_the_template_s(chat):
    status, rendered = post("/tokenize", {"messages": MESSAGES})
    assert status == 200
    assert chat().usage.prompt_tokens == rendered["count"]
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    assert chat(messages=parts).usage.prompt_tokens == rendered["count"]


def test_chat_stream_equals_the_whole(chat):
    whole = chat(temperature=0, seed=1)
    chunks = list(chat(temperature=0, seed=1, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [c for chunk in chunks for c in chunk.choices]
    assert "".join(said(c.delta) for c in deltas) == said(whole.choices[0].message)
    assert [c.finish_reason for c in deltas if c.finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_logprobs(chat):
    choice = chat(temperature=0, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}).choices[0]
    content = choice.logprobs.content
    assert len(content) == 16
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert math.isclose(entry.logprob, entry.top_logprobs[0].logprob, abs_tol=1e-6)
    spelled = b"".join(bytes(entry.bytes) for entry in content)
    assert spelled.decode(errors="replace").startswith(said(choice.message).rstrip("\ufffd"))


def test_chat_with_tools_and_history(chat):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    answer = chat(messages=messages, tools=[{"type": "function", "function": function}], n=2)
    assert [c.index for c in answer.choices] == [0, 1]


NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}]


def check(value):
    """Whether a value follows SCHEMA."""
    assert set(value) == {"colour", "count"}
    assert value["colour"] in ("red", "green", "blue") and 0 <= value["count"] <= 999


@pytest.mark.parametrize("temperature", [0, 1])
def test_structured_output(chat, temperature):
    schema = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA}}
    for seed in range(4):
        answer = chat(
            response_format=schema, temperature=temperature, seed=seed,
            max_completion_tokens=200, extra_body=NO_THINKING,
        )
        assert answer.choices[0].finish_reason == "stop"
        check(json.loads(answer.choices[0].message.content))


def test_structured_output_parses_into_a_model(client, model, chat):
    pydantic = pytest.importorskip("pydantic")

    class Paint(pydantic.BaseModel):
        colour: str = pydantic.Field(pattern="^(red|green|blue)$")
        count: int = pydantic.Field(ge=0, le=999)

    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Paint, max_completion_tokens=200,
        temperature=1, seed=5, extra_body=NO_THINKING,
    )
    assert answer.choices[0].message.parsed.colour in ("red", "green", "blue")


def test_completion_follows_a_regular_expression(complete):
    text = complete(extra_body={"guided_regex": "[ab]{3}c"}).choices[0].text
    assert len(text) == 4 and set(text[:3]) <= {"a", "b"} and text[3] == "c"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "paint"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_demanded_tool_call(chat, choice, stream):
    answer = chat(
        tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=stream, temperature=1,
        seed=3, max_completion_tokens=200, extra_body=NO_THINKING,
    )
    if stream:
        chunks = [c.choices[0] for c in answer]
        calls = [call for c in chunks for call in c.delta.tool_calls or []]
        assert [call.function.name for call in calls if call.function.name] == ["paint"]
        arguments = "".join(call.function.arguments or "" for call in calls)
        reason = chunks[-1].finish_reason
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "paint" and call.id
        arguments, reason = call.function.arguments, answer.choices[0].finish_reason
    check(json.loads(arguments))
    assert reason == "tool_calls"


def test_without_an_end_all_is_reasoning(chat):
    message = chat(temperature=0, logit_bias={}, extra_body={"ignore_eos": True}).choices[0].message
    if "</think>" not in said(message) and message.content is None:
        assert message.reasoning_content


# --- draws ----------------------------------------------------------------------------------------------------------


def test_bias_decides_and_penalties_spread(complete):
    (token,) = tokenize("a")
    assert complete(logit_bias={str(token): 100}).choices[0].text == "a" * 24
    plain, spread = (
        complete(max_tokens=48, extra_body={"return_token_ids": True}, **kwargs).choices[0].token_ids
        for kwargs in ({}, {"presence_penalty": 2, "frequency_penalty": 2})
    )
    assert len(set(spread)) >= len(set(plain))


def test_best_of_returns_the_likeliest(complete):
    asked = {"temperature": 1, "seed": 11, "logprobs": 0}
    mean = lambda c: sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs)
    several = sorted(complete(n=4, **asked).choices, key=mean, reverse=True)
    best = complete(n=1, best_of=4, **asked).choices
    assert [c.text for c in best] == [several[0].text]


def test_a_repeated_prompt_is_cached(complete):
    prompt = [7 + i % 200 for i in range(150)]
    first, second = complete(prompt=prompt), complete(prompt=prompt)
    assert second.usage.prompt_tokens_details.cached_tokens >= 128
    assert first.choices[0].text == second.choices[0].text


# --- responses ------------------------------------------------------------------------------------------------------


def test_response(client, model, chat):
    answer = client.responses.create(
        model=model, input="Say something.", max_output_tokens=16, temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert (answer.object, answer.status) == ("response", "incomplete")
    assert answer.usage.output_tokens == 16
    same = chat(temperature=0, extra_body={"ignore_eos": True}).choices[0].message
    spoken = [part.text for item in answer.output for part in item.content]
    assert "".join(spoken) == said(same)


def test_response_stream(client, model, chat):
    events = list(
        client.responses.create(
            model=model, input="Say something.", max_output_tokens=16, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )
    )
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    deltas = "".join(event.delta for event in events if event.type.endswith("text.delta"))
    final = events[-1].response
    assert deltas == "".join(part.text for item in final.output for part in item.content)


def test_response_with_a_format_and_a_call(client, model, chat):
    flat = {"type": "function", "name": "paint", "parameters": SCHEMA, "strict": True}
    answer = client.responses.create(
        model=model, input="Paint.", tools=[flat], tool_choice="required", temperature=1,
        parallel_tool_calls=False, max_output_tokens=200, extra_body=NO_THINKING,
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    check(json.loads(call.arguments))
    answer = client.responses.create(
        model=model, input="Paint.", max_output_tokens=200, extra_body=NO_THINKING,
        text={"format": {"type": "json_schema", "name": "paint", "schema": SCHEMA}},
    )
    check(json.loads(answer.output_text))


def test_embeddings_are_refused(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=model, input="x")
    assert "embeddings" in caught.value.message


# --- asynchronous clients -------------------------------------------------------------------------------------------


def test_concurrent_requests_answer_as_alone(complete, model):
    prompts = [f"{PROMPT} number {i}" for i in range(8)]
    alone = [complete(prompt=p).choices[0].text for p in prompts]

    async def ask(client, prompt, stream):
        answer = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=24,
            temperature=0,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
        if not stream:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
            asked = (ask(client, p, stream=i % 2 == 1) for i, p in enumerate(prompts))
            return await asyncio.gather(*asked)

    assert asyncio.run(ask_all()) == alone


def test_leaving_a_stream_does_no_harm(complete):
    for _ in range(4):
        stream = complete(max_tokens=64, stream=True)
        next(iter(stream))
        stream.close()
    assert complete().usage.completion_tokens == 24


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"logprobs": 1000}, "logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1 << 30]}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"extra_body": {"top_k": -5}}, "top_k"),
        ({"extra_body": {"min_p": "low"}}, "min_p"),
    ],
)
def test_wrong_parameters_are_named(complete, kwargs, param):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(**kwargs)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_wrong_parameters_of_a_stream_are_http_errors(complete):
    with pytest.raises(openai.BadRequestError):
        complete(stream=True, temperature=-1)


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="no-such-model", prompt="x")
    assert caught.value.code == "model_not_found"


def test_prompt_longer_than_the_context(client, model, complete):
    longest = post("/tokenize", {"prompt": "x"})[1]["max_model_len"]
    if longest > 100_000:
        pytest.skip("the context is too long for a quick test")
    with pytest.raises(openai.BadRequestError) as caught:
        complete(prompt=[1] * (longest + 1))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": 1}', b"\xff"])
def test_malformed_bodies(body):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        status, answer = post(path, body)
        assert status == 400
        assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_unknown_route():
    status, answer = post("/v1/no-such-route", {})
    assert status == 404 and answer["error"]["message"]
