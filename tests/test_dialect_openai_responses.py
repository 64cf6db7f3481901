"""The Responses dialect, judged by the client of the real SDK."""

from __future__ import annotations

import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from sdk import (
    ARGUMENTS,
    CUT,
    HEAD,
    SCHEMA,
    TOOLS,
    TURN,
    TURNS,
    USAGE,
    USER,
    Server,
    events_of,
    expect_refusal,
    responses,
)

from lightning_ray.gateway.dialects import Answer, openai_responses
from lightning_ray.gateway.errors import ApiError, context_overflow
from lightning_ray.records import ToolCall, Turn


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
    with server.client.responses.stream(model="m", input="hi") as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    for cut in (reply, last.response):
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (cut.output[0].status, cut.output[0].content[0].text) == ("incomplete", "hel")


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
