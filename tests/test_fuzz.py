"""Whatever a client sends and whatever the model says: no 5xx, no broken stream, no hang.

Requests over HTTP come from two sources: schemathesis makes them from the gateway's OpenAPI
document, and hypothesis bends good bodies (`test_fuzz_inputs` does without HTTP, and far more of
it). LIGHTNING_RAY_FUZZ=2000 makes that many of each, new ones every time; by default they are few,
and the same ones.
"""

from __future__ import annotations

import hashlib
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
from fuzzing import KNOWN_BAD, ROUTES, bend, continued, say
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi import checks
from support import Running

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
randoms = st.randoms(use_true_random=False)

# -- the model's routes --------------------------------------------------------------------------

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


@pytest.mark.parametrize("route", ROUTES)
def test_no_body_and_no_turn_of_the_model_breaks_a_model_route(gateway, route):
    client = httpx.Client(headers={"x-api-key": "secret"}, timeout=TIMEOUT_S)

    @fuzz
    @given(
        body=randoms.map(lambda random: bend(random, ROUTES[route])),
        text=randoms.map(say),
        stream=st.booleans(),
    )
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
    for body in map(json.dumps, KNOWN_BAD[route]):
        url = f"{gateway.url}/rollout/{gateway.attempt()}/v1/{route}"
        if len(body) < 1 << 20:  # larger ones are for another test
            check_refusal(client.post(url, content=body))


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
    @given(body=randoms.map(lambda random: bend(random, OPERATOR[route])))
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
    ids = {"attempt_id": "known-a0", "rollout_id": "known", "room": "known-a0", "name": "order"}
    opened = hashlib.sha256(b"secret").hexdigest()
    ray.get(gateway.store.open_room.remote("known-a0", opened, {"order": b"{}"}))
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
