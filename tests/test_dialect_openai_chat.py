"""The Chat Completions dialect, judged by the client of the real SDK."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from sdk import (
    CHAT_TOOLS,
    HEAD,
    PLAIN,
    SCHEMA,
    TURNS,
    USAGE,
    USER,
    Server,
    chat,
    events_of,
    expect_refusal,
)

from lightning_ray.gateway.dialects import Answer, openai_chat
from lightning_ray.gateway.errors import ApiError
from lightning_ray.records import ToolCall


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
