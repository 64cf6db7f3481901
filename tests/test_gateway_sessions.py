"""Whole conversations with the real SDK clients: streaming, continuity, retries, pauses."""

from __future__ import annotations

import asyncio
import glob
import json
import re
import threading
import time
from itertools import pairwise
from pathlib import Path

import anthropic
import httpx
import numpy as np
import pytest
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import CALL, HELLO, TOOLS, Running, tokens_by_fate

from lightning_ray.engine.pool import EnginePool
from lightning_ray.gateway import deploy
from lightning_ray.gateway.dialects import Answer, Head, Usage
from lightning_ray.gateway.inflight import Answers
from lightning_ray.gateway.service import SHORT_PAUSE_S
from lightning_ray.records import Branch, FinishReason, SideCall
from lightning_ray.samples import forest, rows

HOLD_S = 2.0
PARALLEL = f"I will look.\n{CALL}\n{CALL.replace('ls', 'pwd')}"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    running = Running(
        tmp_path_factory.mktemp("gateway"),
        [["unset"]],
        f"gateway.hold_s={HOLD_S}",
        f"gateway.longest_hold_s={HOLD_S}",
        "sampling.max_tokens=400",
        "model.max_model_len=3000",
    )
    running.start()
    yield running
    deploy.stop()
    ray.shutdown()


def say(gateway, *texts: str, seconds: float = 0.0) -> None:
    ray.get(gateway.engines[0].script.remote(list(texts), seconds))


def calls_of(gateway, attempt):
    return ray.get(gateway.store.calls.remote(attempt))


def serve_proxy(url: str) -> str:
    """The address of the proxy behind HAProxy."""
    [config] = glob.glob(f"/tmp/lr-haproxy-{url.rsplit(':', 1)[1]}/*/haproxy.cfg")
    found = re.search(
        r"server SERVE_PROXY_ACTOR-fallback\S* (\S+) check backup", Path(config).read_text()
    )
    assert found
    return f"http://{found[1]}"


def assert_one_chain(calls) -> None:
    """Every call continues the one before it with the tokens that were sampled."""
    for before, after in pairwise(calls):
        assert np.array_equal(after.prompt[: len(before.full)], before.full)
    assert [call.branch for call in calls] == [
        Branch.ROOT, *[Branch.CONTINUED] * (len(calls) - 1)
    ]  # fmt: skip
    assert len(forest.branches(calls)) == 1


def compact(call) -> dict:
    """A tool call as OpenCode and qwen-code send it back."""
    arguments = json.dumps(json.loads(call.function.arguments), separators=(",", ":"))
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_chat_turns_continue_with_the_sampled_tokens(gateway, stream):
    attempt = gateway.attempt()
    say(gateway, PARALLEL, "Done.")
    client = gateway.client(attempt).chat.completions
    asked = {"model": "m", "messages": HELLO, "tools": TOOLS}
    if stream:
        with client.stream(**asked) as events:
            for _ in events:
                pass
            message = events.get_final_completion().choices[0].message
    else:
        message = client.create(**asked).choices[0].message
    assert message.content.strip() == "I will look."
    history = [
        *HELLO,
        {"role": "assistant", "content": message.content.strip(),
         "tool_calls": [compact(call) for call in message.tool_calls]},
        # In the order of completion, not of the calls.
        {"role": "tool", "tool_call_id": message.tool_calls[1].id, "content": "/tmp"},
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.txt"},
    ]  # fmt: skip
    reply = client.create(model="m", messages=history, tools=TOOLS)
    assert reply.choices[0].message.content == "Done."
    calls = calls_of(gateway, attempt)
    assert_one_chain(calls)
    text = gateway.tokenizer.decode(calls[1].prompt.tolist())
    assert text.index("a.txt") < text.index("/tmp")
    assert reply.usage.prompt_tokens == len(calls[1].prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_turns_continue_with_the_sampled_tokens(gateway, stream):
    attempt = gateway.attempt()
    say(gateway, PARALLEL, "Done.")
    client = gateway.client(attempt).responses
    tools = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    asked = {"model": "m", "input": HELLO, "tools": tools, "store": False}
    if stream:
        with client.stream(**asked) as events:
            for _ in events:
                pass
            first = events.get_final_response()
    else:
        first = client.create(**asked)
    assert first.status == "completed"
    history = [*HELLO, *(item.model_dump() for item in first.output)]
    history += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "a.txt"}
        for item in first.output
        if item.type == "function_call"
    ]
    assert len(history) == 1 + 3 + 2
    assert client.create(model="m", input=history, tools=tools).output_text == "Done."
    assert_one_chain(calls_of(gateway, attempt))


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_turns_continue_with_the_sampled_tokens(gateway, stream):
    attempt = gateway.attempt()
    say(gateway, PARALLEL, "Done.")
    client = anthropic.Anthropic(
        base_url=f"{gateway.url}/rollout/{attempt}", api_key="secret", max_retries=0
    )
    function = TOOLS[0]["function"]
    tools = [{"name": function["name"], "input_schema": function["parameters"]}]
    asked = {"model": "m", "max_tokens": 300, "messages": HELLO, "tools": tools}
    if stream:
        with client.messages.stream(**asked) as events:
            first = events.get_final_message()
    else:
        first = client.messages.create(**asked)
    assert first.stop_reason == "tool_use"
    used = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "a.txt"}
        for block in reversed(used)
    ]
    history = [
        *HELLO,
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in first.content]},
        {"role": "user", "content": results},
    ]
    assert client.messages.count_tokens(model="m", messages=HELLO).input_tokens > 0
    second = client.messages.create(**asked | {"messages": history})
    assert second.content[0].text == "Done."
    calls = calls_of(gateway, attempt)
    assert_one_chain(calls)
    assert second.usage.input_tokens == len(calls[1].prompt)


def test_a_turn_that_was_cut_gets_closing_tokens_that_nobody_sampled(gateway):
    attempt = gateway.attempt()
    say(gateway, "A long story", "More.")
    client = gateway.client(attempt).chat.completions
    cut = client.create(model="m", messages=HELLO, max_tokens=6)
    assert cut.choices[0].finish_reason == "length"
    said = {"role": "assistant", "content": cut.choices[0].message.content}
    client.create(model="m", messages=[*HELLO, said, {"role": "user", "content": "go on"}])
    calls = calls_of(gateway, attempt)
    assert_one_chain(calls)
    added = calls[1].prompt[len(calls[0].full) :]
    assert gateway.tokenizer.decode(added.tolist()).startswith(
        "<|im_end|>\n<|im_start|>user\ngo on"
    )


def test_an_edited_history_is_a_named_branch(gateway):
    attempt = gateway.attempt()
    say(gateway, "One.", "Two.", "Three.")
    client = gateway.client(attempt).chat.completions
    more = {"role": "user", "content": "more"}
    history = [*HELLO]
    for _ in range(2):
        reply = client.create(model="m", messages=history).choices[0].message
        history += [{"role": "assistant", "content": reply.content}, more]
    client.create(model="m", messages=[{"role": "user", "content": "changed"}, *history[1:]])
    calls = calls_of(gateway, attempt)
    assert calls[2].branch is Branch.EDITED
    assert len(forest.branches(calls)) == 2


@pytest.mark.parametrize("path", ["replica", "serve proxy"])
def test_a_client_that_lost_its_connection_gets_the_same_answer_again(gateway, path):
    """HAProxy sends calls through Serve's own proxy while it thinks that no replica is up; there a
    request is a Ray task, and Ray cancels what a cancelled task has asked for. The body comes after
    the headers: HAProxy must see that the client leaves."""
    attempt = gateway.attempt()
    say(gateway, "first", "second", seconds=6.0)
    body = {"model": "m", "messages": HELLO}
    encoded = json.dumps(body).encode()

    def slowly():
        yield encoded[:10]
        time.sleep(0.1)
        yield encoded[10:]

    base = gateway.url if path == "replica" else serve_proxy(gateway.url)
    url = f"{base}/rollout/{attempt}/v1/chat/completions"
    key = {"authorization": "Bearer secret"}
    length = {"content-length": str(len(encoded)), "content-type": "application/json"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, content=slowly(), headers=key | length, timeout=1.5)
    time.sleep(2.5)  # the gateway notices that nobody listens, also on a busy machine
    reply = httpx.post(url, json={**body, "stream": False}, headers=key, timeout=30)
    assert reply.json()["choices"][0]["message"]["content"] == "first"
    assert len(calls_of(gateway, attempt)) == 1
    # Its retry header says that the answer did not arrive; without one it is a new sample.
    again = httpx.post(url, json=body, headers=key | {"x-stainless-retry-count": "1"}, timeout=30)
    assert again.json()["id"] == reply.json()["id"]
    other = httpx.post(url, json=body, headers=key, timeout=30)
    assert other.json()["choices"][0]["message"]["content"] == "second"
    assert len(calls_of(gateway, attempt)) == 2


def test_a_stream_that_is_slow_to_come_sends_signs_of_life_first(gateway):
    attempt = gateway.attempt()
    say(gateway, "slow", seconds=6.5)
    started = time.monotonic()
    arrivals = []
    with gateway.client(attempt).chat.completions.stream(model="m", messages=HELLO) as events:
        for event in events:
            if event.type == "chunk":
                arrivals.append(time.monotonic() - started)
        said = events.get_final_completion().choices[0].message.content
    assert said == "slow"
    assert arrivals[0] < 6 < arrivals[-1]
    assert len(calls_of(gateway, attempt)) == 1


def test_a_closed_gate_holds_calls_and_then_asks_to_come_back(gateway):
    attempt = gateway.attempt()
    say(gateway, "after the pause")
    ray.get(gateway.store.close_gate.remote())
    started = time.monotonic()
    refused = gateway.post(attempt, {"messages": HELLO})
    assert HOLD_S <= time.monotonic() - started < HOLD_S + 5
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "20")
    timer = threading.Timer(0.7, lambda: ray.get(gateway.store.open_gate.remote()))
    timer.start()
    answered = gateway.post(attempt, {"messages": HELLO})
    timer.join()
    assert answered.json()["choices"][0]["message"]["content"] == "after the pause"
    assert len(calls_of(gateway, attempt)) == 1


@pytest.mark.slow
def test_a_call_that_an_update_holds_up_is_parked_and_its_retry_joins_it(gateway):
    """Interrupted in the engine, it would otherwise wait for the whole update without a word."""
    attempt = gateway.attempt()
    say(gateway, "once", "twice", seconds=18.0)
    threading.Timer(0.5, lambda: ray.get(gateway.store.close_gate.remote())).start()
    started = time.monotonic()
    parked = gateway.post(attempt, {"messages": HELLO})
    assert (parked.status_code, parked.headers["retry-after"]) == (503, "20")
    assert SHORT_PAUSE_S < time.monotonic() - started < SHORT_PAUSE_S + 5
    ray.get(gateway.store.open_gate.remote())
    assert gateway.post(attempt, {"messages": HELLO}).json()["choices"][0]["message"][
        "content"
    ] == ("once")
    assert len(calls_of(gateway, attempt)) == 1


def test_side_calls_and_constrained_calls_are_marked(gateway):
    attempt = gateway.attempt()
    say(gateway, "A title", '{"a": 1}', CALL)
    client = gateway.client(attempt).chat.completions
    title = [{"role": "system", "content": "You are a title generator."}, *HELLO]
    client.create(model="m", messages=title)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    client.create(model="m", messages=HELLO, response_format=form)
    forced = client.create(model="m", messages=HELLO, tools=TOOLS, tool_choice="required")
    assert forced.choices[0].message.tool_calls[0].function.name == "bash"
    calls = calls_of(gateway, attempt)
    assert [call.side for call in calls] == [SideCall.TITLE, None, None]
    assert [call.constrained for call in calls] == [False, True, True]
    constraints = ray.get(gateway.engines[0].constraints.remote())
    assert constraints[0] is None
    assert constraints[1].json == schema
    assert "bash" in constraints[2].structural_tag  # vLLM's, in the format of the tool parser


def test_a_sub_agent_is_a_tree_of_its_own_and_is_trained(gateway):
    attempt = gateway.attempt()
    say(gateway, CALL, "Found it.", "Done.")
    client = gateway.client(attempt).chat.completions
    first = client.create(model="m", messages=HELLO, tools=TOOLS).choices[0].message
    # In between a sub-agent with a prompt of its own, on the same URL and key.
    other = [{"role": "system", "content": "You search."}, {"role": "user", "content": "find x"}]
    client.create(model="m", messages=other, tools=TOOLS)
    history = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [compact(first.tool_calls[0])]},
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "found"},
    ]
    client.create(model="m", messages=history, tools=TOOLS)
    calls = calls_of(gateway, attempt)
    assert [call.branch for call in calls] == [Branch.ROOT, Branch.ROOT, Branch.CONTINUED]
    assert [call.side for call in calls] == [None] * 3
    made, fates = rows.rows("r", calls, rows.Layout(3000))
    trained = [sorted(set(row.calls_T[row.trainable_T].tolist())) for row in made]
    assert sorted(trained) == [[0, 2], [1]]
    assert tokens_by_fate(fates)[rows.Fate.TRAINED] == sum(len(call.tokens) for call in calls)


def test_a_call_whose_arguments_the_harness_mended_makes_an_edited_branch(gateway):
    attempt = gateway.attempt()
    say(gateway, CALL, "Done.")
    client = gateway.client(attempt).chat.completions
    first = client.create(model="m", messages=HELLO, tools=TOOLS).choices[0].message
    # qwen-code's sub-agents turn "false" into false, so that the tool's schema is met.
    mended = compact(first.tool_calls[0])
    mended["function"]["arguments"] = '{"command":["ls"]}'
    history = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [mended]},
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "found"},
    ]
    client.create(model="m", messages=history, tools=TOOLS)
    calls = calls_of(gateway, attempt)
    assert [call.branch for call in calls] == [Branch.ROOT, Branch.EDITED]
    _, fates = rows.rows("r", calls, rows.Layout(3000))
    assert tokens_by_fate(fates)[rows.Fate.TRAINED] == sum(len(call.tokens) for call in calls)


def test_a_compaction_is_a_side_call_and_what_follows_it_a_named_branch(gateway):
    attempt = gateway.attempt()
    say(gateway, "Working.", "The summary.", "Going on.")
    client = gateway.client(attempt).chat.completions
    client.create(model="m", messages=HELLO, tools=TOOLS)
    said = {"role": "assistant", "content": "Working."}
    ask = {"role": "user", "content": "You are performing a CONTEXT CHECKPOINT COMPACTION."}
    client.create(model="m", messages=[*HELLO, said, ask])
    rest = [{"role": "user", "content": "Before: The summary. Go on."}]
    client.create(model="m", messages=rest, tools=TOOLS)
    calls = calls_of(gateway, attempt)
    assert [call.side for call in calls] == [None, SideCall.COMPACTION, None]
    assert [call.branch for call in calls] == [Branch.ROOT, Branch.ROOT, Branch.COMPACTED]
    _, fates = rows.rows("r", calls, rows.Layout(3000))
    assert tokens_by_fate(fates)[rows.Fate.SIDE] == len(calls[1].tokens)


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**53) | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "tool", "text", "function", "auto", "message"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id",
             "input", "output", "tools", "parameters", "input_schema", "call_id", "thinking"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip
bodies = st.dictionaries(
    st.sampled_from(
        ["messages", "input", "tools", "tool_choice", "max_tokens", "stream", "stop", "system", "n",
         "response_format", "text", "instructions", "stop_sequences", "output_config", "model",
         "temperature", "stream_options", "max_completion_tokens", "reasoning", "store"]
    ),
    junk,
    max_size=6,
)  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["chat/completions", "responses", "messages"]), bodies)
def test_no_body_makes_a_500(gateway, path, body):
    attempt = gateway.attempt()
    say(gateway, "x")
    reply = httpx.post(
        f"{gateway.url}/rollout/{attempt}/v1/{path}",
        content=json.dumps(body),
        headers={"x-api-key": "secret"},
        timeout=30,
    )
    assert reply.status_code in (200, 400), (reply.status_code, reply.text, body)


def test_a_malformed_tool_call_comes_back_as_the_text_it_is(gateway):
    attempt = gateway.attempt()
    broken = '<tool_call>\n{"name": "bash", "argum</tool_call>'
    say(gateway, broken)
    reply = gateway.client(attempt).chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
    assert not reply.choices[0].message.tool_calls
    assert reply.choices[0].message.content == broken


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/messages", {"messages": HELLO}),
        ("v1/messages", {"messages": [{"role": "user", "content": 1}], "max_tokens": 5}),
        ("v1/messages", {"messages": [{"role": "user", "content": "x" * 4000}], "max_tokens": 5}),
        ("v1/responses", {"input": [{"role": "user", "content": {}}]}),
        ("v1/responses", {"input": "hi", "previous_response_id": "resp_1"}),
    ],
)
def test_bad_bodies_of_the_other_protocols_are_a_400_in_their_shape(gateway, path, body):
    reply = httpx.post(
        f"{gateway.url}/rollout/{gateway.attempt()}/{path}",
        json=body,
        headers={"x-api-key": "secret"},
    )
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]
    assert (reply.json().get("type") == "error") == (path == "v1/messages")


def test_a_cancelled_generation_stops_in_the_engine(gateway):
    say(gateway, "never", seconds=30)

    async def start_and_cancel():
        pool = EnginePool(gateway.engines, 0)
        asked = pool.generate("r", np.array([1], np.int32), temperature=1.0, max_tokens=5)
        running = asyncio.ensure_future(asked)
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(0.1)  # to tell the engine

    asyncio.run(start_and_cancel())
    deadline = time.monotonic() + 10
    while not ray.get(gateway.engines[0].cancelled.remote()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_generation_that_nobody_listens_to_ends_in_time_and_not_before():
    async def scenario():
        done = asyncio.Event()

        async def make() -> Answer:
            await done.wait()
            return Answer(Head("c", 0, 1), (), Usage(1, 0))

        async def listen(making):
            async with making.listening():
                return await making.answer()

        closed, detached = [True], []
        answers = Answers(lambda: closed[0])
        making = answers.start("a", "r", Head("c", 0, 1), make(), lambda: detached.append(1))
        making.detached_s = 0.2
        first, second = (asyncio.ensure_future(listen(making)) for _ in range(2))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.sleep(0.3)
        assert not making.task.done()  # the second one still listens
        second.cancel()
        await asyncio.sleep(0.05)
        assert detached == [1]
        third = asyncio.ensure_future(listen(answers.find("a", "r")))  # it came back in time
        await asyncio.sleep(0.3)
        assert not making.task.done()
        third.cancel()
        await asyncio.sleep(0.4)
        assert not making.task.done()  # the gate is closed: it was told to come back later
        closed[0] = False
        await asyncio.sleep(0.4)
        assert making.task.cancelled()
        assert answers.find("a", "r") is None

    asyncio.run(scenario())


def test_finish_reasons_are_kept(gateway):
    attempt = gateway.attempt()
    say(gateway, "x")
    gateway.client(attempt).chat.completions.create(model="m", messages=HELLO)
    assert calls_of(gateway, attempt)[0].turn.finish_reason is FinishReason.STOP
