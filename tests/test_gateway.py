"""The gateway over HTTP, on real Ray Serve, with a scripted engine behind it."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import ray
from support import CALL, HELLO, MAX_MODEL_LEN, TOOLS, Running

from lightning_ray import canary
from lightning_ray.gateway import deploy
from lightning_ray.records import Outcome, Reward
from lightning_ray.tasks.swe import canaries, embedded, grading
from lightning_ray.tasks.swe.record import RepositoryTask


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    scripts = [["hello", CALL, "plain"], ["spare"]]
    running = Running(tmp_path_factory.mktemp("gateway"), scripts, "engine.restart_timeout_s=1")
    running.start()
    yield running
    deploy.stop()
    ray.shutdown()


def test_the_openai_client_gets_an_answer_and_the_call_is_on_disk(gateway):
    attempt = gateway.attempt()
    reply = gateway.client(attempt).chat.completions.create(model="anything", messages=HELLO)
    call = ray.get(gateway.store.calls.remote(attempt))[0]
    prompt = gateway.tokenizer.apply_chat_template(
        HELLO, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert call.prompt.tolist() == prompt
    said = reply.choices[0].message.content or CALL
    assert gateway.tokenizer.decode(call.tokens[:-1].tolist()) == said
    assert call.model == "anything"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (
        len(prompt),
        len(call.tokens),
    )


def test_tool_calls_are_parsed_and_their_ids_are_unique(gateway):
    attempt = gateway.attempt()
    ids = set()
    for _ in range(6):
        reply = gateway.client(attempt).chat.completions.create(
            model="m", messages=HELLO, tools=TOOLS
        )
        for call in reply.choices[0].message.tool_calls or []:
            assert reply.choices[0].finish_reason == "tool_calls"
            assert (call.function.name, call.function.arguments) == ("bash", '{"command": "ls"}')
            ids.add(call.id)
    texts = ray.get(gateway.store.texts.remote(attempt))
    assert len(ids) == sum("tool_call" in t or "bash" in t for t in texts)


def test_a_history_with_tool_calls_and_parts_is_rendered(gateway):
    attempt = gateway.attempt()
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command": "ls"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a.txt"}]},
    ]
    gateway.client(attempt).chat.completions.create(model="m", messages=history, tools=TOOLS)
    prompt = gateway.tokenizer.decode(
        ray.get(gateway.store.calls.remote(attempt))[0].prompt.tolist()
    )
    assert "<|im_start|>system\nbe brief" in prompt
    assert "a.txt" in prompt and '"command": "ls"' in prompt


def test_a_canary_in_a_prompt_is_noted_with_its_call(gateway):
    attempt, other = gateway.attempt(), gateway.attempt()
    client, seen = gateway.client(attempt), canaries.mint("git")
    leak = [{"role": "user", "content": f"object 12: {seen}"}]
    for messages in (HELLO, leak, leak):
        client.chat.completions.create(model="m", messages=messages)
    gateway.client(other).chat.completions.create(model="m", messages=HELLO)
    noted = ray.get(gateway.store.canary.remote(attempt))
    assert noted == f"call 1 of attempt {attempt} read or said a canary ({seen})"
    assert ray.get(gateway.store.canary.remote(other)) is None


@pytest.mark.parametrize("place", ["a hidden test", "a stored patch"])
def test_whoever_reads_what_agents_must_not_is_noted(gateway, place):
    patch = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"
    row = {"instance_id": "i", "repo": "r", "patch": patch, "FAIL_TO_PASS": ["t.py::test_a"]}
    order = grading.plan(embedded.train()[0], {})
    assert order is not None
    leaked = {
        "a hidden test": next(iter(json.loads(order.say)["tests"].values()))[-200:],
        "a stored patch": json.dumps(RepositoryTask.from_row(row).to_task().fields),
    }[place]
    attempt = gateway.attempt()
    history = [*HELLO, {"role": "user", "content": leaked}]
    gateway.client(attempt).chat.completions.create(model="m", messages=history)
    noted = ray.get(gateway.store.canary.remote(attempt))
    assert noted == f"call 0 of attempt {attempt} read or said a canary ({canary.seen(leaked)[0]})"


def test_several_choices_are_several_recorded_samples(gateway):
    attempt = gateway.attempt()
    reply = gateway.client(attempt).chat.completions.create(model="m", messages=HELLO, n=3)
    assert len(reply.choices) == 3
    assert len(ray.get(gateway.store.calls.remote(attempt))) == 3


def test_a_reply_cut_by_max_tokens_says_so(gateway):
    attempt = gateway.attempt()
    reply = gateway.client(attempt).chat.completions.create(model="m", messages=HELLO, max_tokens=2)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 2


def test_context_overflow_has_vllms_wording_and_code(gateway):
    attempt = gateway.attempt()
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client(attempt).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x" * MAX_MODEL_LEN}]
        )
    assert caught.value.code == "context_length_exceeded"
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in str(caught.value)


BAD_BODIES = {
    "not JSON": b"{",
    "not an object": b"[]",
    "not UTF-8": b'{"messages": "\xff"}',
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": NaN}',
    "nested too deeply": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no messages": b"{}",
    "empty messages": b'{"messages": []}',
    "a message that is text": b'{"messages": ["hi"]}',
    "an unknown role": b'{"messages": [{"role": "robot", "content": "x"}]}',
    "content that is a number": b'{"messages": [{"role": "user", "content": 1}]}',
    "an image": b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    "tool calls without a function": b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}',
    "tools that are text": b'{"messages": [{"role": "user", "content": "x"}], "tools": "bash"}',
    "too many choices": b'{"messages": [{"role": "user", "content": "x"}], "n": 100000}',
    "no choices": b'{"messages": [{"role": "user", "content": "x"}], "n": 0}',
    "no tokens": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    "a forced tool": b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}',
    "a schema that is none": b'{"messages": [{"role": "user", "content": "x"}], '
    b'"response_format": {"type": "json_schema"}}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body_is_a_400_in_openais_shape(gateway, name):
    attempt = gateway.attempt()
    reply = gateway.post(attempt, BAD_BODIES[name])
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert ray.get(gateway.store.calls.remote(attempt)) == []


def test_unknown_fields_are_ignored(gateway):
    reply = gateway.post(
        gateway.attempt(), {"messages": HELLO, "prompt_cache_key": 7, "client_metadata": {}}
    )
    assert reply.status_code == 200, reply.text


def test_x_api_key_is_a_key_too(gateway):
    attempt = gateway.attempt(key="mine")
    reply = httpx.get(f"{gateway.url}/rollout/{attempt}/v1/models", headers={"x-api-key": "mine"})
    assert reply.json()["data"][0]["max_model_len"] == MAX_MODEL_LEN


def test_the_model_list_and_unknown_routes(gateway):
    assert httpx.get(f"{gateway.url}/v1/models").json()["data"][0]["id"] == "policy"
    reply = httpx.get(f"{gateway.url}/nothing/here")
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    assert httpx.put(f"{gateway.url}/v1/models").status_code == 405


def test_a_grader_outside_posts_one_reward_with_its_own_key(gateway):
    gateway.attempt(rollout="graded")
    url = f"{gateway.url}/rollout/graded/reward"
    key = {"x-api-key": ray.get(gateway.store.grader_key.remote("graded"))}
    assert httpx.post(url, json={"reward": 1.0}, headers={"x-api-key": "secret"}).status_code == 401
    for bad in (
        b'{"reward": NaN}',
        b'{"reward": "1"}',
        b'{"reward": true}',
        b"{}",
        b'{"reward": 1, "metrics": 3}',
    ):
        assert httpx.post(url, content=bad, headers=key).status_code == 400
    good = {"reward": 0.5, "solved": False, "metrics": {"tests": 2}}
    for _ in range(2):  # a retry is the same reward
        assert httpx.post(url, json=good, headers=key).status_code == 200
    assert httpx.post(url, json=good | {"reward": 1}, headers=key).status_code == 409
    assert ray.get(gateway.store.wait_reward.remote("graded", 1.0)) == Reward(
        0.5, False, {"tests": 2}
    )


def test_concurrent_calls_are_all_recorded(gateway):
    attempt = gateway.attempt()
    with ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(lambda _: gateway.post(attempt, {"messages": HELLO}), range(64)))
    assert {reply.status_code for reply in replies} == {200}
    calls = ray.get(gateway.store.calls.remote(attempt))
    assert sorted(call.seq for call in calls) == list(range(64))


def test_a_rollout_moves_when_its_engine_is_gone_and_503_says_when_to_retry(gateway):
    attempt = gateway.attempt()
    assert gateway.post(attempt, {"messages": HELLO}).status_code == 200
    gateway.engines[0].die.remote()
    for _ in range(8):  # eight rollouts: some had their engine on the dead one
        assert gateway.post(gateway.attempt(), {"messages": HELLO}).status_code == 200
    gateway.engines[1].die.remote()
    time.sleep(0.5)
    reply = gateway.post(attempt, {"messages": HELLO})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "20")
    summary = ray.get(gateway.store.end_attempt.remote(attempt, Outcome.COMPLETED, "", time.time()))
    assert summary.last_fault == 503


def test_without_the_store_every_route_says_when_to_retry(gateway):
    attempt = gateway.attempt()
    ray.kill(gateway.store)
    body = {"messages": HELLO, "max_tokens": 5}
    routes = [
        ("POST", f"/rollout/{attempt}/v1/chat/completions"),
        ("POST", f"/rollout/{attempt}/v1/messages/count_tokens"),
        ("GET", f"/rollout/{attempt}/v1/models"),
        ("POST", "/rollout/r0/reward"),
        ("GET", "/api/v1/rollouts"),
    ]
    for method, path in routes:
        reply = httpx.request(
            method, gateway.url + path, json=body, headers={"x-api-key": "secret"}, timeout=30
        )
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "20"), (path, reply.text)
        assert reply.json()["error"]["message"] == "The store is starting again."
