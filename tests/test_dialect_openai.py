"""The OpenAI dialects, judged by the client of the real SDK."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lightning_ray.gateway.dialects import Answer, Head, Usage, openai_chat, openai_responses
from lightning_ray.gateway.errors import ApiError, context_overflow
from lightning_ray.records import FinishReason, ToolCall, Turn

HEAD = Head("abc", 1_700_000_000, 7)
USAGE = Usage(prompt_tokens=7, sampled_tokens=5, cached_tokens=3)
ARGUMENTS = '{ "command":  "ls \u00e9"}'  # odd spacing and a letter outside ASCII stay as they are
TURN = Turn(
    "I look.\n", "hm ", (ToolCall("call_1", "bash", ARGUMENTS), ToolCall("call_2", "bash", "{"))
)
PLAIN = Turn("hello")
CUT = Turn("hel", finish_reason=FinishReason.LENGTH)
EMPTY = Turn(None)
TURNS = {"a turn with everything": TURN, "text": PLAIN, "a cut text": CUT, "nothing": EMPTY}

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
TOOLS = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
USER = {"role": "user", "content": "hi"}


class Server:
    """The SDK's client, against one dialect that always gives the same turns."""

    def __init__(self, dialect, *turns, error=None, keepalives=0):
        self.dialect, self.turns, self.error, self.keepalives = dialect, turns, error, keepalives
        self.client = openai.OpenAI(
            base_url="http://gateway/v1",
            api_key="key",
            max_retries=0,
            http_client=httpx.Client(transport=httpx.MockTransport(self._serve)),
        )

    def _serve(self, http):
        try:
            self.request = self.dialect.parse(json.loads(http.content))
        except ApiError as error:
            return httpx.Response(error.status, json=self.dialect.error(error))
        answer = Answer(HEAD, self.turns, USAGE)
        if not self.request.stream:
            return httpx.Response(200, json=self.dialect.respond(self.request, answer))
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, content=b"".join(self._stream(answer)), headers=headers)

    def _stream(self, answer):
        yield self.dialect.start(self.request, HEAD)
        for _ in range(self.keepalives):
            yield self.dialect.keepalive(self.request, HEAD)
        if self.error:
            yield self.dialect.failure(self.request, HEAD, self.error)
        else:
            yield from self.dialect.finish(self.request, answer)


def events_of(dialect, body, turn):
    """The data of all events of a stream."""
    request = dialect.parse(body)
    stream = [
        dialect.start(request, HEAD),
        dialect.keepalive(request, HEAD),
        *dialect.finish(request, Answer(HEAD, (turn,) * request.samples, USAGE)),
    ]
    events = b"".join(stream).decode().removesuffix("\n\n").split("\n\n")
    lines = [event.splitlines() for event in events]
    if dialect is openai_responses:
        assert all(e.removeprefix("event: ") == json.loads(d[6:])["type"] for e, d in lines)
    return [event[-1].removeprefix("data: ") for event in lines]


def chat(**fields):
    return openai_chat.parse({"model": "m", "messages": [USER], **fields})


def responses(items, **fields):
    return openai_responses.parse({"model": "m", "input": items, **fields})


def expect_refusal(parse, param):
    with pytest.raises(ApiError) as caught:
        parse()
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param.split("[")[0].split(".")[0] in caught.value.message


# Chat Completions.


@pytest.mark.parametrize("name", TURNS)
def test_a_chat_stream_adds_up_to_the_chat_answer(name):
    turn = TURNS[name]
    server = Server(openai_chat, turn, keepalives=2)
    whole = server.client.chat.completions.create(model="m", messages=[USER])
    with server.client.chat.completions.stream(
        model="m", messages=[USER], stream_options={"include_usage": True}
    ) as stream:
        # The SDK's final completion refuses turns that were cut.
        pieces = stream.until_done().current_completion_snapshot
    assert whole.id == pieces.id == "chatcmpl-abc"
    assert whole.usage == pieces.usage and whole.usage.prompt_tokens_details.cached_tokens == 3
    a, b = whole.choices[0], pieces.choices[0]
    assert a.finish_reason == b.finish_reason
    assert a.message.content == b.message.content == turn.content
    thoughts = [getattr(choice.message, "reasoning_content", None) for choice in (a, b)]
    assert thoughts == [turn.reasoning] * 2
    for message in (a.message, b.message):
        calls = [
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        ]
        assert tuple(calls) == turn.tool_calls


@pytest.mark.parametrize("name", TURNS)
def test_chat_bodies_have_every_field_that_the_sdk_requires(name):
    request = chat(n=2, stream=True, stream_options={"include_usage": True})
    answer = Answer(HEAD, (TURNS[name],) * 2, USAGE)
    ChatCompletion.model_validate(openai_chat.respond(request, answer))
    body = {"messages": [USER], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events_of(openai_chat, body, TURNS[name])
    parsed = [ChatCompletionChunk.model_validate_json(chunk) for chunk in chunks]
    assert done == "[DONE]"
    assert [chunk.choices[0].delta.role for chunk in parsed[:2]] == ["assistant"] * 2
    assert [chunk.choices[0].index for chunk in parsed[:2]] == [0, 1]
    assert parsed[-1].choices == [] and parsed[-1].usage.total_tokens == 12


def test_the_usage_chunk_comes_only_to_those_who_ask_for_it():
    chunks = events_of(openai_chat, {"messages": [USER], "stream": True}, PLAIN)
    assert not any("usage" in chunk for chunk in chunks)


def test_finish_reasons_of_chat():
    reasons = {}
    for name, turn in TURNS.items():
        body = openai_chat.respond(chat(), Answer(HEAD, (turn,), USAGE))
        reasons[name] = body["choices"][0]["finish_reason"]
    assert list(reasons.values()) == ["tool_calls", "stop", "length", "stop"]


def test_a_chat_stream_that_fails_raises_in_the_client():
    server = Server(openai_chat, error=ApiError(503, "No engine.", code="no_engine"), keepalives=1)
    stream = server.client.chat.completions.create(model="m", messages=[USER], stream=True)
    with pytest.raises(openai.APIError, match=r"No engine\.") as caught:
        list(stream)
    assert caught.value.code == "no_engine"


def test_results_of_parallel_calls_are_put_into_the_order_of_the_calls():
    def call(call_id):
        return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def result(call_id):
        return {"role": "tool", "tool_call_id": call_id, "content": call_id}

    turn = {"role": "assistant", "tool_calls": [call("a"), call("b"), call("c")]}
    later = {"role": "assistant", "tool_calls": [call("d"), call("e")]}
    sent = [USER, turn, *map(result, "xcyab"), USER, result("z"), later, *map(result, "ed"), USER]
    request = openai_chat.parse({"messages": sent})
    ids = [message.get("tool_call_id", "-") for message in request.messages]
    assert "".join(ids) == "--abcxy-z-de-"
    assert [message["role"] for message in request.messages] == [m["role"] for m in sent]


def test_reasoning_comes_back_under_either_name():
    for key in ("reasoning", "reasoning_content"):
        request = chat(messages=[USER, {"role": "assistant", "content": "x", key: "hm"}, USER])
        assert request.messages[1]["reasoning_content"] == "hm"


def test_arguments_that_are_no_object_stay_text():
    for arguments in ("{", "5", "[" * 100_000, '"x"'):
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        request = chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
        assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


NAMED = {"type": "function", "function": {"name": "bash"}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({}, False),
        ({"tools": CHAT_TOOLS}, False),
        ({"tools": CHAT_TOOLS, "tool_choice": "none"}, False),
        ({"tools": CHAT_TOOLS, "tool_choice": None}, False),
        ({"tools": CHAT_TOOLS, "tool_choice": "required"}, True),
        ({"tools": CHAT_TOOLS, "tool_choice": NAMED}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": FORM}, True),
    ],
)
def test_forced_tools_and_formats_are_constraints(fields, constrained):
    assert chat(**fields).constrained is constrained


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"messages": [{**USER, "name": 5}]}, "messages[0].name"),
        ({"tools": "bash"}, "tools"),
        ({"tools": []}, "tools"),
        ({"tools": [{}], "tool_choice": NAMED}, "tools[0]"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": CHAT_TOOLS, "tool_choice": {"function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": True, "stream_options": "all"}, "stream_options"),
        ({"n": 100_000}, "n"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_a_malformed_chat_field_is_named(fields, param):
    expect_refusal(lambda: chat(**fields), param)


def test_fields_that_chat_does_not_know_are_ignored_whatever_they_hold():
    assert chat(structured_outputs="x", temperature="hot", metadata=5).messages == [USER]


# Responses.


@pytest.mark.parametrize("name", TURNS)
def test_a_responses_stream_adds_up_to_the_response(name):
    server = Server(openai_responses, TURNS[name], keepalives=2)
    whole = server.client.responses.create(model="m", input="hi", tools=TOOLS)
    with server.client.responses.stream(model="m", input="hi", tools=TOOLS) as stream:
        events = list(stream)
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.to_dict(mode="json") | {"output": []} == whole.to_dict() | {
        "output": []
    }
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == [item.to_dict() for item in whole.output]
    assert len([e for e in events if e.type == "response.output_item.added"]) == len(done)


@pytest.mark.parametrize("name", TURNS)
def test_every_event_of_responses_has_the_fields_that_the_sdk_requires(name):
    body = {"model": "m", "input": "hi", "stream": True, "tools": TOOLS}
    adapter = TypeAdapter(ResponseStreamEvent)
    texts = events_of(openai_responses, body, TURNS[name])
    events = [adapter.validate_json(text) for text in texts]
    # The SDK's union takes any first fit: the type must be the one that was meant.
    assert [event.type for event in events] == [json.loads(text)["type"] for text in texts]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    Response.model_validate(json.loads(texts[-1])["response"])


def test_a_turn_becomes_reasoning_a_message_and_calls():
    server = Server(openai_responses, TURN)
    reply = server.client.responses.create(model="m", input="hi", tools=TOOLS)
    reasoning, message, *calls = reply.output
    assert (reply.id, reply.status, reply.output_text) == ("resp_abc", "completed", TURN.content)
    assert (reasoning.content[0].text, reasoning.encrypted_content) == ("hm ", "abc")
    assert message.content[0].text == TURN.content
    assert tuple(ToolCall(c.call_id, c.name, c.arguments) for c in calls) == TURN.tool_calls
    assert len({item.id for item in reply.output}) == 4
    usage = reply.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 5, 12)
    assert usage.input_tokens_details.cached_tokens == 3


def test_a_cut_response_is_incomplete():
    server = Server(openai_responses, CUT)
    reply = server.client.responses.create(model="m", input="hi")
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiError(503, "No engine."), "server_error"),
        (ApiError(400, "The template refuses."), "invalid_prompt"),
        (context_overflow(10, 9, 8), "context_length_exceeded"),
    ],
)
def test_a_responses_stream_that_fails_ends_with_the_error(error, code):
    server = Server(openai_responses, error=error, keepalives=1)
    with server.client.responses.stream(model="m", input="hi") as stream:
        last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == (code, error.message)


def test_the_output_of_a_response_comes_back_as_one_message_with_its_turn_id():
    server = Server(openai_responses, TURN)
    reply = server.client.responses.create(model="m", input="hi", tools=TOOLS)
    results = [
        {"type": "function_call_output", "call_id": "call_2", "output": "two"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "one"}],
        },
    ]
    history = [USER, *reply.output, *results]
    server.client.responses.create(
        model="m", instructions="be brief", input=history, tools=TOOLS, stream=True
    )
    request = server.request
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "bash"}},
        {"id": "call_2", "type": "function", "function": {"name": "bash", "arguments": "{"}},
    ]
    calls[0]["function"]["arguments"] = json.loads(ARGUMENTS)
    assert request.messages == [
        {"role": "system", "content": "be brief"},
        USER,
        {
            "role": "assistant",
            "content": TURN.content,
            "reasoning_content": "hm ",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "call_2", "content": "two"},
    ]
    assert request.turn_ids == ("", "", "abc", "", "")


def reasoning(turn_id, **fields):
    return {"type": "reasoning", "summary": [], "encrypted_content": turn_id, **fields}


def said(text):
    return {"type": "message", "role": "assistant", "content": text, "phase": None}


def called(call_id, **fields):
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": "bash",
        "arguments": "{}",
        "caller": None,
        **fields,
    }


def result(call_id):
    return {"type": "function_call_output", "call_id": call_id, "output": "done", "id": "x"}


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([reasoning("t"), said("a"), called("1"), called("2")], [("t", "a", 2)]),
        ([said("a"), called("1")], [("", "a", 1)]),
        ([called("1"), result("1"), called("2"), result("2")], [("", "", 1), ("", "", 1)]),
        ([reasoning("t"), said("a"), reasoning("u"), said("b")], [("t", "a", 0), ("u", "b", 0)]),
        ([said("a"), said("b")], [("", "a", 0), ("", "b", 0)]),
        ([called("1"), said("b")], [("", "", 1), ("", "b", 0)]),
        ([said("a"), {"type": "web_search_call", "id": "w"}, called("1")], [("", "a", 1)]),
        ([reasoning("t"), USER, said("b")], [("t", "", 0), ("", "b", 0)]),
        ([reasoning(None), said("b")], [("", "b", 0)]),
    ],
)
def test_items_of_one_assistant_turn_are_one_message(items, turns):
    request = responses([USER, *items])
    assert len(request.turn_ids) == len(request.messages)
    found = [
        (turn_id, message["content"], len(message.get("tool_calls", ())))
        for turn_id, message in zip(request.turn_ids, request.messages, strict=True)
        if message["role"] == "assistant"
    ]
    assert found == turns


def test_reasoning_text_is_the_content_and_else_the_summary():
    summary = [{"type": "summary_text", "text": "short"}]
    content = [{"type": "reasoning_text", "text": "long"}]
    items = [
        reasoning("t", summary=summary, content=content),
        reasoning("u", summary=summary, content=None),
        reasoning("v"),
    ]
    messages = responses([USER, *items]).messages
    assert [m.get("reasoning_content") for m in messages[1:]] == ["long", "short", None]


def test_namespaces_are_flattened_and_restored():
    spawn, wait = ({"type": "function", "name": name} for name in ("spawn", "wait"))
    tools = [
        *TOOLS,
        {"type": "namespace", "name": "a", "tools": [spawn, wait, {"type": "custom"}]},
        {"type": "namespace", "name": "b", "tools": [spawn]},
        {"type": "web_search", "external_web_access": True},
        {"type": "custom", "name": "apply_patch"},
    ]
    history = [USER, called("1", name="spawn", namespace="b"), called("2", name="gone")]
    request = responses(history, tools=tools, tool_choice="auto")
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["bash", "a__spawn", "wait", "b__spawn"]
    past = [call["function"]["name"] for call in request.messages[1]["tool_calls"]]
    assert past == ["b__spawn", "gone"]
    calls = tuple(ToolCall(name, name, "{}") for name in [*names, "unknown"])
    output = openai_responses.respond(request, Answer(HEAD, (Turn(None, None, calls),), USAGE))
    assert [(item.get("namespace"), item["name"]) for item in output["output"]] == [
        (None, "bash"),
        ("a", "spawn"),
        ("a", "wait"),
        ("b", "spawn"),
        (None, "unknown"),
    ]


def test_what_codex_sends_to_compact_is_served():
    request = responses(
        [{"type": "message", "role": "developer", "content": "x"}, USER],
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=False,
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        prompt_cache_key="k",
        client_metadata={"a": "b"},
    )
    assert request.stream and request.tools is None and not request.constrained
    assert [message["role"] for message in request.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "bash"}}, True),
        ({"text": {"verbosity": "low"}}, False),
        ({"text": {"format": {"type": "text"}}}, False),
        ({"text": {"format": {"type": "json_object"}}}, True),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}, True),
    ],
)
def test_forced_tools_and_text_formats_are_constraints(fields, constrained):
    assert responses("hi", **fields).constrained is constrained


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [reasoning("t"), 5]}, "input[1]"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [called(5)]}, "input[0].call_id"),
        ({"input": [called("1", arguments={})]}, "input[0].arguments"),
        ({"input": [called("1", namespace=["a"])]}, "input[0].namespace"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [reasoning(5)]}, "input[0].encrypted_content"),
        ({"instructions": ["x"]}, "instructions"),
        ({"tools": "bash"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [5]}]}, "tools[0].tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": "json"}, "text"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"model": 5}, "model"),
        ({"stream": "maybe"}, "stream"),
    ],
)
def test_a_malformed_responses_field_is_named(fields, param):
    body = {"model": "m", "input": "hi", **fields}
    expect_refusal(lambda: openai_responses.parse(body), param)


def test_a_refused_response_is_a_bad_request_in_the_client():
    server = Server(openai_responses)
    with pytest.raises(openai.BadRequestError, match="send the whole `input`") as caught:
        server.client.responses.create(model="m", input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
