"""Whatever a client sends and whatever the model says: no 5xx, no broken stream, no hang.

Requests come from two sources: schemathesis makes them from the gateway's OpenAPI document, and
hypothesis bends good bodies. LIGHTNING_RAY_FUZZ=2000 makes that many of each, new ones every time;
by default they are few, and the same ones.
"""

from __future__ import annotations

import functools
import json
import os
import re

import httpx
import openai.types.chat
import openai.types.responses
import pytest
import ray
import schemathesis
from anthropic.types import Message
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi import checks
from support import CALL, TOOLS, Running

from lightning_ray.gateway import deploy
from lightning_ray.rollouts import controller

LENGTH = os.environ.get("LIGHTNING_RAY_FUZZ")
fuzz = settings(
    max_examples=int(LENGTH or 40),
    derandomize=LENGTH is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
# Far longer than any answer takes; past it, the gateway hangs.
TIMEOUT_S = 30

# -- the model's routes --------------------------------------------------------------------------

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
TERMINAL = {
    "chat/completions": r"data: \[DONE\]",
    "responses": r"event: response\.(completed|incomplete)\n.*",
    "messages": r"event: message_stop\n.*",
}
ANSWERS = {
    "chat/completions": openai.types.chat.ChatCompletion,
    "responses": openai.types.responses.Response,
    "messages": Message,
}
# What the client said of itself comes back to it as it was, odd or not.
ECHOED = {"responses": {"instructions": None, "tools": [], "tool_choice": "auto"}}

# -- odd values ----------------------------------------------------------------------------------


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
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
odd = st.one_of(values, *map(st.sampled_from, ODD.values())).map(fresh)


@st.composite
def place(draw: st.DrawFn, body: dict | list) -> tuple[dict | list, object]:
    """A part of `body`: what holds it, and its key or index there. Every level is as likely."""
    while True:
        key = draw(st.sampled_from(list(body) if isinstance(body, dict) else range(len(body))))
        inner = body[key]
        if not (isinstance(inner, dict | list) and inner) or draw(st.booleans()):
            return body, key
        body = inner


@st.composite
def bent(draw: st.DrawFn, bodies: list) -> dict | list:
    """One of `bodies` with some parts replaced, added, taken out, doubled or moved."""
    body = fresh(draw(st.sampled_from(bodies)))
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        if not body:
            break
        holder, key = draw(place(body))
        match draw(st.sampled_from(("odd", "odd", "more", "out", "twice", "move"))):
            case "out":
                del holder[key]
            case "more" if isinstance(holder, dict):
                holder["more"] = draw(odd)
            case "twice" if isinstance(holder, list):
                holder.append(fresh(holder[key]))
            case "move":
                other, name = draw(place(body))
                holder[key] = fresh(other[name])
            case _:
                holder[key] = draw(odd)
    return body


TURN = {"name": "bash", "arguments": {"command": "ls"}}
told = bent([TURN]).map(lambda call: f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
said = st.one_of(
    st.sampled_from(["hello", CALL, CALL + CALL, CALL[:30], CALL[:-14], "", "é\x00", "x" * 200]),
    told,
    told.map(lambda text: "I look.\n" + text + CALL),
    st.text(max_size=30),
    bent([[{"name": "bash", "parameters": {"command": "ls"}}]]).map(json.dumps),  # a forced call
    odd.map(json.dumps),
)

# -- the gateway ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    recipe = {"name": "sleep", "command": ["sleep", "3600"]}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    running = Running(
        folder,
        [["unset"]],
        f"harness.recipe={folder}/recipe.yaml",
        "model.max_model_len=60000",
        "rollout.concurrency=1",
        "rollout.timeout_s=3600",
        "task.prepare=null",
        "task.collect=null",
    )
    running.start()
    actor = controller.start(running.config, running.store, running.url)
    yield running
    ray.get(actor.shutdown.remote())
    deploy.stop()
    ray.shutdown()


@pytest.fixture(scope="module")
def operator_client(gateway):
    """A client with the operator's key. One rollout sleeps in the only place there is, so that all
    others stay in the queue."""
    key = {"x-api-key": ray.get(gateway.store.operator_key.remote())}
    gateway.attempt(rollout="known")
    with httpx.Client(base_url=gateway.url, headers=key, timeout=TIMEOUT_S) as client:
        body = {"task_id": "t", "statement": "sleep", "rollout_id": "asleep"}
        assert client.post("/api/v1/rollouts", json=body).status_code == 201
        yield client


def check_refusal(reply: httpx.Response) -> None:
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.json()["error"]["message"]


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


@pytest.mark.parametrize("route", ROUTES)
def test_no_body_and_no_turn_of_the_model_breaks_a_model_route(gateway, route):
    client = httpx.Client(headers={"x-api-key": "secret"}, timeout=TIMEOUT_S)

    @fuzz
    @given(body=bent(ROUTES[route]), text=said, stream=st.booleans())
    def run(body, text, stream):
        url = f"{gateway.url}/rollout/{gateway.attempt()}/v1/{route}"
        ray.get(gateway.engines[0].script.remote([text]))
        if stream:
            body = {**body, "stream": True}
        reply = client.post(url, content=json.dumps(body))
        note(f"{reply.status_code} {reply.text[:500]}")
        if reply.status_code != 200:
            return check_refusal(reply)
        if route == "messages/count_tokens":
            assert reply.json()["input_tokens"] > 0
        elif "event-stream" in reply.headers["content-type"]:
            assert re.fullmatch(TERMINAL[route], reply.text.strip().split("\n\n")[-1])
        else:
            ANSWERS[route].model_validate(reply.json() | ECHOED.get(route, {}))
            again = json.dumps(continued(route, body, reply.json()))
            second = client.post(url, content=again)
            # What the gateway said, it takes back.
            assert second.status_code == 200, second.text
        return None

    run()


OPERATOR = {
    "/api/v1/rollouts": [
        {"task_id": "t", "statement": "s", "fields": {"a": [1]}, "split": "train", "step": 0},
        {"task_id": "t", "statement": "s", "rollout_id": "asleep"},
    ],
    "/api/v1/rollouts/known/events": [{"kind": "k", "data": {"a": [1]}, "time": 1.5}],
    "/rollout/known/reward": [{"reward": 0.5, "solved": True, "metrics": {"tests": 1}}],
}


@pytest.mark.parametrize("route", OPERATOR)
def test_no_body_breaks_the_operators_and_graders_routes(gateway, operator_client, route):
    grader = {"x-api-key": ray.get(gateway.store.grader_key.remote("known"))}
    headers = grader if route.endswith("reward") else {}

    @fuzz
    @given(body=bent(OPERATOR[route]))
    def run(body):
        reply = operator_client.post(route, content=json.dumps(body), headers=headers)
        note(f"{reply.status_code} {reply.text[:500]}")
        if not reply.is_success:
            check_refusal(reply)

    run()
    for query in ("", "?fields=1", "/events", "/calls"):
        reply = operator_client.get(f"/api/v1/rollouts/known{query}")
        assert reply.status_code == 200, reply.text
    assert operator_client.get("/api/v1/rollouts?limit=500").status_code == 200


def test_no_request_made_from_the_openapi_document_fails(gateway, operator_client):
    ids = {"attempt_id": "known-a0", "rollout_id": "known"}
    harness, operators = {"x-api-key": "secret"}, dict(operator_client.headers)

    def check(operation):
        headers = operators if operation.path.startswith("/api/") else harness

        @fuzz
        @given(case=operation.as_strategy(), known=st.booleans())
        def run(case, known):
            if known:
                case.path_parameters = {name: ids[name] for name in case.path_parameters or {}}
            reply = case.call(headers=headers, timeout=TIMEOUT_S)
            case.validate_response(reply, checks=CHECKS, headers=headers)

        run()

    schema = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 15
    for operation in operations:
        check(operation)
