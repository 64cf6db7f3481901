"""Requests that no harness would send, and turns that no model should say: good ones, bent.

`bend` takes its decisions from a `random.Random`, so a loop can make thousands from numbers, and
hypothesis, which has one too, can make small ones.
"""

from __future__ import annotations

import functools
import json
from random import Random

from support import CALL, TOOLS

SCHEMA = TOOLS[0]["function"]["parameters"]
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command": "ls"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "max_tokens": 50,
    "n": 1,
    "stop": ["x"],
    "response_format": {"type": "text"},
}
RESPONSES = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "t"},
        {"type": "message", "role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
    ],
    "tools": [
        {"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False},
        {
            "type": "namespace",
            "name": "a",
            "description": "more",
            "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}],
        },
    ],
    "tool_choice": "auto",
    "max_output_tokens": 50,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
}
MESSAGES = {
    "model": "m",
    "max_tokens": 50,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "t"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a.txt"}],
        },
    ],
    "tools": [{"name": "bash", "description": "runs", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "output_config": {"effort": "low", "format": None},
    "thinking": {"type": "adaptive"},
}
FORCED = {"tool_choice": "required"}
ROUTES = {
    "chat/completions": [
        CHAT,
        {"messages": CHAT["messages"], "stream": True, "stream_options": {"include_usage": True}},
        CHAT | FORCED,
    ],
    "responses": [RESPONSES, RESPONSES | {"text": None}, RESPONSES | FORCED | {"text": None}],
    "messages": [MESSAGES, MESSAGES | {"tool_choice": {"type": "any"}}],
    "messages/count_tokens": [MESSAGES],
}


def nested(levels: int) -> list:
    return functools.reduce(lambda inner, _: [inner], range(levels), [])


def fresh(value: object) -> object:
    """A copy in which no part stands in two places."""
    return json.loads(json.dumps(value))


ODD = {
    "depth": [nested(90), nested(120), nested(260), "[" * 900 + "]" * 900,
              '{"a":' * 150 + "1" + "}" * 150],
    "numbers": [0, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 0.5, 1e308, float("nan"), float("inf")],
    "words": ["", " ", "\x00", "\ud800", "é\U0001f600", "<|im_end|>", "<tool_call>", CALL, "{",
              "{{ x }}", r'{"a": "\ud800"}', "9" * 5000, "NaN"],
    "names": ["required", "none", "function", "assistant", "tool", "user", "system", "json_schema"],
    "shapes": [None, True, [], {}, [[]], [None], [{}], {"type": "text", "text": "x"},
               {"type": "text"}],
    "schemas": [{"$ref": "#/nowhere"}, {"$defs": 5, "type": "object"}, {"properties": []},
                {"type": ["string"]}, {"type": "string", "pattern": "("}, {"properties": {"a": 5}}],
    "choices": [{"type": "json_object"}, {"type": "function", "function": {"name": "bash"}},
                {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$defs": 5}}},
                {"type": "tool", "name": "bash"}, {"type": "function", "name": "bash"}],
}  # fmt: skip


def odd(random: Random) -> object:
    """A value that somebody may not have thought of."""
    if random.random() < 0.3:
        return value(random, 3)
    return fresh(random.choice(random.choice(list(ODD.values()))))


def value(random: Random, levels: int) -> object:
    """Any JSON, so many levels deep at most."""
    match random.randrange(6 + 2 * (levels > 0)):
        case 0:
            return None
        case 1:
            return random.random() < 0.5
        case 2:
            return random.randint(-(2**70), 2**70)
        case 3:
            return random.uniform(-1e300, 1e300)
        case 4 | 5:
            return word(random)
        case 6:
            return [value(random, levels - 1) for _ in range(random.randrange(4))]
        case _:
            return {word(random): value(random, levels - 1) for _ in range(random.randrange(4))}


def word(random: Random) -> str:
    tops = (0x80, 0x800, 0xFFFF, 0x10FFFF)  # UTF-8 of one byte to four; surrogates too
    return "".join(chr(random.randrange(random.choice(tops))) for _ in range(random.randrange(12)))


def place(random: Random, body: dict | list) -> tuple[dict | list, object]:
    """A part of `body`: what holds it, and its key or index there. Every level is as likely."""
    while True:
        key = random.choice(list(body) if isinstance(body, dict) else range(len(body)))
        inner = body[key]
        if not (isinstance(inner, dict | list) and inner) or random.random() < 0.5:
            return body, key
        body = inner


def bend(random: Random, bodies: list) -> dict | list:
    """One of `bodies` with some parts replaced, added, taken out, doubled or moved."""
    body = fresh(random.choice(bodies))
    for _ in range(random.choice((1, 1, 2, 3))):
        if not body:
            break
        holder, key = place(random, body)
        match random.choice(("odd", "odd", "more", "out", "twice", "move")):
            case "out":
                del holder[key]
            case "more" if isinstance(holder, dict):
                holder["more"] = odd(random)
            case "twice" if isinstance(holder, list):
                holder.append(fresh(holder[key]))
            case "move":
                other, name = place(random, body)
                holder[key] = fresh(other[name])
            case _:
                holder[key] = odd(random)
    return body


SAID = ["hello", CALL, CALL + CALL, CALL[:30], CALL[:-14], "", "é\x00", "x" * 200]
TURN = {"name": "bash", "arguments": {"command": "ls"}}
FORCED_TURN = [{"name": "bash", "parameters": {"command": "ls"}}]


def say(random: Random) -> str:
    """What a model may say."""
    match random.randrange(8):
        case 0:
            return random.choice(SAID)
        case 1:
            return word(random).encode(errors="replace").decode()
        case 2:
            return json.dumps(bend(random, [FORCED_TURN]))
        case 3:
            return json.dumps(odd(random))
    told = f"<tool_call>\n{json.dumps(bend(random, [TURN]))}\n</tool_call>"
    return random.choice(("{}", "I look.\n{}" + CALL)).replace("{}", told)


# What has been wrong before, here or in others' gateways: each is refused.
KNOWN_BAD = {
    "chat/completions": [
        CHAT | {"messages": CHAT["messages"] * 5000},
        CHAT | {"tools": TOOLS * 2000},
        CHAT | {"messages": nested(120)},
        CHAT | {"n": 2**64},
        CHAT | {"max_tokens": float("nan")},
        CHAT | {"messages": [{"role": "user", "content": "\ud800"}]},
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        CHAT | {"response_format": {"type": "json_schema"}},
        CHAT | {"stop": [{}]},
    ],
    "responses": [
        RESPONSES | {"input": RESPONSES["input"] * 5000},
        RESPONSES | {"input": [{"type": "function_call", "call_id": None}]},
        RESPONSES | {"text": {"format": {"type": "json_schema", "schema": 5}}},
        RESPONSES | {"previous_response_id": "r"},
    ],
    "messages": [
        MESSAGES | {"messages": MESSAGES["messages"] * 5000},
        MESSAGES | {"max_tokens": -1},
        MESSAGES | {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        MESSAGES | {"tools": [{"name": "bash", "input_schema": 5}]},
    ],
    "messages/count_tokens": [MESSAGES | {"messages": []}, MESSAGES | {"tools": 5}],
}


def continued(route: str, body: dict, reply: dict) -> dict:
    """The next request of a harness, which sends back what it was given."""
    if route == "chat/completions":
        message = reply["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "done"}
            for call in message.get("tool_calls") or ()
        ]
        more = [message, *results, {"role": "user", "content": "go on"}]
        return body | {"messages": [*body["messages"], *more]}
    if route == "responses":
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
            for item in reply["output"]
            if item["type"] == "function_call"
        ]
        before = body["input"]
        before = [{"role": "user", "content": before}] if isinstance(before, str) else before
        more = [*reply["output"], *results, {"role": "user", "content": "go on"}]
        return body | {"input": [*before, *more]}
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "done"}
        for block in reply["content"]
        if block["type"] == "tool_use"
    ]
    more = [
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]
    return body | {"messages": [*body["messages"], *more]}
