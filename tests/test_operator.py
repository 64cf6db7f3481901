"""The operator API: what the store shows, what the gateway lets through, what the client gives."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from runs import process_of
from support import HELLO, Running
from test_store import make_call, make_spec

from lightning_ray.client import Client, ClientError
from lightning_ray.gateway import deploy
from lightning_ray.records import (
    Call,
    FinishedRollout,
    Outcome,
    Reward,
    RolloutSpec,
    RolloutState,
    Split,
    Task,
)
from lightning_ray.rollouts import controller, process
from lightning_ray.store import queries
from lightning_ray.store.attempts import Known
from lightning_ray.store.rollouts import RolloutStore
from lightning_ray.views import CallQuery, PageQuery, RolloutQuery

# -- the store -----------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path):
    store = RolloutStore(tmp_path / "store")
    yield store
    store.close()


def test_the_operators_key_lies_in_the_run_directory_for_its_owner_only(tmp_path: Path):
    path = tmp_path / "operator.key"
    path.touch(mode=0o644)
    keys = []
    for _ in range(2):
        store = RolloutStore(tmp_path / "store")
        keys.append(store.operator_key())
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text() == keys[-1] != store.grader_key("operator")
        store.close()
    assert keys[0] == keys[1]


def test_pages_hold_every_rollout_once_in_the_order_of_their_creation(store: RolloutStore):
    specs = [
        RolloutSpec(f"r{i}", "g", Task("t", "s"), list(Split)[i % 2], i // 2) for i in range(7)
    ]
    store.create_rollouts(specs)

    def listed(**query: object) -> list[str]:
        ids, after = [], None
        while True:
            page = store.queries.rollouts(RolloutQuery(after=after, **query))
            assert len(page.rollouts) <= query.get("limit", 100)
            ids += [rollout.rollout_id for rollout in page.rollouts]
            after = page.next
            if after is None:
                return ids

    for limit in (1, 3, 7, 100):
        assert listed(limit=limit) == [spec.rollout_id for spec in specs]
    assert listed(limit=1, split=Split.VALIDATION) == ["r1", "r3", "r5"]
    assert listed(step=2, split=Split.TRAIN) == ["r4"]
    store.start_attempt("r3-a0", "r3", 0, "hash", 1.0)
    assert listed(state=RolloutState.RUNNING) == ["r3"]
    assert listed(state=RolloutState.FINISHED) == []


def test_a_rollout_shows_its_tries_and_its_end_but_no_key_and_no_fields(store: RolloutStore):
    spec = make_spec()
    store.create_rollouts([spec])
    assert store.queries.rollout("r").tries == []
    store.start_attempt("r-a0", "r", 0, "hash0", 1.0)
    store.record_fault("r-a0", 503)
    store.end_attempt("r-a0", Outcome.GATEWAY_FAULT, "503", 2.0)
    store.start_attempt("r-a1", "r", 1, "hash1", 3.0)
    store.append([make_call("c0", [1], [2, 3], "r-a1")])
    store.end_attempt("r-a1", Outcome.TIMEOUT, "60 s", 4.0)
    reward = Reward(0.5, False, {"tests": 2.0})
    store.post_reward("r", reward, "post")
    assert store.queries.rollout("r").reward == reward
    store.finish_rollout(
        FinishedRollout(
            spec, RolloutState.FINISHED, Outcome.TIMEOUT, "r-a1", 2, reward, "60 s", 1.0, 2.0, 3.0
        )
    )
    shown = store.queries.rollout("r")
    assert (shown.state, shown.outcome, shown.reward) == ("finished", "timeout", reward)
    assert (shown.detail, shown.queued_s, shown.grading_s) == ("60 s", 1.0, 3.0)
    assert (shown.task_id, shown.statement, shown.reward_source) == ("t", "do it", "post")
    first, second = shown.tries
    assert (first.outcome, first.last_fault, first.calls) == (Outcome.GATEWAY_FAULT, 503, 0)
    assert (second.number, second.ended_at, second.sampled_tokens) == (1, 4.0, 2)
    assert "hash" not in shown.model_dump_json()
    assert "a.txt" not in shown.model_dump_json()
    assert store.queries.rollout("r", with_fields=True).fields == {"file": "a.txt"}
    assert store.queries.rollout("nobody") is None


def test_a_reward_of_the_runs_own_grader_is_shown_too(store: RolloutStore):
    store.create_rollouts([make_spec()])
    reward = Reward(1.0, True, {"tests": 3.0})
    store.finish_rollout(
        FinishedRollout(
            make_spec(), RolloutState.FINISHED, Outcome.COMPLETED, "r-a0", 1, reward, "ok"
        )
    )
    shown = store.queries.rollout("r")
    assert (shown.reward, shown.reward_source) == (reward, None)
    assert store.queries.rollouts(RolloutQuery()).rollouts[0].reward == reward


def test_calls_come_in_pages_of_bounded_size(store: RolloutStore, monkeypatch):
    store.create_rollouts([make_spec()])
    assert store.queries.calls("r", CallQuery()).calls == []
    for number in (0, 1):
        attempt = f"r-a{number}"
        store.start_attempt(attempt, "r", number, "hash", 1.0)
        store.append([make_call(f"{attempt}-{i}", [1, i], [7, 8], attempt) for i in range(5)])
        store.end_attempt(attempt, Outcome.COMPLETED, "", 2.0)
    page = store.queries.calls("r", CallQuery(limit=3))
    assert [call.call_id for call in page.calls] == ["r-a1-0", "r-a1-1", "r-a1-2"]
    assert page.calls[0].tokens is None and page.calls[0].prompt_tokens == 2
    rest = store.queries.calls("r", CallQuery(limit=3, after=page.next))
    assert ([call.seq for call in rest.calls], rest.next) == ([3, 4], None)

    monkeypatch.setattr(queries, "MOST_TOKENS", 9)
    page = store.queries.calls("r", CallQuery(attempt=0, tokens=True))
    assert [call.attempt_id for call in page.calls] == ["r-a0", "r-a0"]
    assert (page.calls[1].tokens.prompt, page.calls[1].tokens.sampled) == ([1, 1], [7, 8])
    assert page.calls[1].tokens.logprobs == [-1.0, 0.0]
    monkeypatch.setattr(queries, "MOST_TOKENS", 1)
    page = store.queries.calls("r", CallQuery(tokens=True, after=3))
    assert ([call.seq for call in page.calls], page.next) == ([4], None)
    assert store.queries.calls("r", CallQuery(attempt=2)) is None
    assert store.queries.calls("nobody", CallQuery()) is None


def test_events_outlive_the_process_and_one_stored_twice_is_one(tmp_path: Path):
    store = RolloutStore(tmp_path / "store")
    store.create_rollouts([make_spec("r"), make_spec("other")])
    first = store.queries.add_event("e1", "r", "note", {"text": "a"}, 1.0)
    assert store.queries.add_event("e1", "r", "note", {"text": "a"}, 1.0) == first
    store.queries.add_event("e2", "other", "note", {}, 2.0)
    store.queries.add_event("e3", "r", "note", {"text": "b"}, 3.0)
    assert store.queries.add_event("e4", "nobody", "note", {}, 3.0) is None
    store.close()
    store = RolloutStore(tmp_path / "store")
    page = store.queries.events("r", PageQuery(limit=1))
    assert page.events == [first]
    rest = store.queries.events("r", PageQuery(after=page.next))
    assert ([event.data for event in rest.events], rest.next) == ([{"text": "b"}], None)
    assert store.queries.events("nobody", PageQuery()) is None
    store.close()


def test_what_operators_asked_for_waits_for_the_runs_next_life(tmp_path: Path):
    store = RolloutStore(tmp_path / "store")
    task = Task("t", "s", {"b": 1, "a": [True, "é"]})
    mine, done = (RolloutSpec(name, name, task, Split.TRAIN, 3) for name in ("mine", "done"))
    assert store.create_rollouts([make_spec(), mine, done])["mine"] == Known(0, False, True)
    store.finish_rollout(
        FinishedRollout(done, RolloutState.CANCELLED, Outcome.CANCELLED, "", 0, None)
    )
    store.start_attempt("mine-a0", "mine", 0, "hash", 1.0)
    store.close()
    store = RolloutStore(tmp_path / "store")
    store.end_orphans(2.0)
    assert store.queries.unfinished() == [mine]
    same = replace(mine, task=Task("t", "s", {"a": [True, "é"], "b": 1}))
    other = replace(mine, task=Task("t", "other"))
    for asked, is_same in ((same, True), (replace(mine, step=4), True), (other, False)):
        assert store.create_rollouts([asked]) == {"mine": Known(1, False, is_same)}
    assert store.create_rollouts([done])["done"].over
    store.close()


# -- the gateway ---------------------------------------------------------------------------------

HARNESS = f"""
import json, os, signal, sys, time, urllib.error, urllib.request
request = urllib.request.Request(
    sys.argv[2] + "/chat/completions",
    json.dumps({{"messages": {HELLO!r}}}).encode(),
    {{"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}},
)
if sys.argv[1] == "stubborn":
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        request.data = request.data.replace(b"hi", b"the child")
    while True:
        try:
            urllib.request.urlopen(request).read()
        except urllib.error.HTTPError:
            pass
        time.sleep(0.05)
for _ in range(3):
    urllib.request.urlopen(request).read()
time.sleep(60 if sys.argv[1] == "sleep" else 0)
"""
GRADER = 'print(\'{"value": 0.5, "solved": true}\')'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operator")
    (folder / "harness.py").write_text(HARNESS)
    recipe = {
        "name": "script",
        "command": [sys.executable, "-S", f"{folder}/harness.py", "{task}", "{base_url}"],
        "env": {"KEY": "{api_key}"},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    running = Running(
        folder,
        [["hello"]],
        f"harness.recipe={folder}/recipe.yaml",
        "rollout.concurrency=1",
        "task.prepare=null",
        "task.collect=null",
        "task.grader=null",
        f"task.grader_command={json.dumps([sys.executable, '-S', '-c', GRADER])}",
    )
    running.start()
    running.attempt(key="harness", rollout="mine")
    yield running
    deploy.stop()
    ray.shutdown()


@pytest.fixture(scope="module")
def client(gateway):
    with Client(gateway.url + "/", (gateway.folder / "operator.key").read_text() + "\n") as client:
        yield client


def test_without_a_controller_the_answer_says_when_to_try_again(gateway, client):
    with pytest.raises(ClientError, match="No controller runs") as caught:
        client.create("t", "do it")
    assert caught.value.status == 503
    gateway.attempt(rollout="waiting")
    with pytest.raises(ClientError) as caught:
        client.cancel("waiting")
    assert caught.value.status == 503


DEEP = b'{"kind": "k", "data": {"a": ' + b"[" * 200 + b"]" * 200 + b"}}"
BAD = [
    ("GET", "/rollouts?limit=0", b"", 400),
    ("GET", "/rollouts?limit=501", b"", 400),
    ("GET", "/rollouts?limit=-1", b"", 400),
    ("GET", "/rollouts?limit=ten", b"", 400),
    ("GET", "/rollouts?limit=" + "9" * 5000, b"", 400),
    ("GET", "/rollouts?after=-1", b"", 400),
    ("GET", "/rollouts?after=99999999999999999999", b"", 400),
    ("GET", "/rollouts?state=asleep", b"", 400),
    ("GET", "/rollouts?split=%ff%00", b"", 400),
    ("GET", "/rollouts?step=1e3", b"", 400),
    ("GET", "/rollouts/known?fields=perhaps", b"", 400),
    ("GET", "/rollouts/nobody", b"", 404),
    ("GET", "/rollouts/..%2f..%2fetc", b"", 404),
    ("GET", "/rollouts/%00%ff';drop table rollouts--", b"", 404),
    ("GET", "/rollouts/" + "x" * 4000, b"", 404),
    ("POST", "/rollouts/nobody/cancel", b"", 404),
    ("GET", "/rollouts/nobody/calls", b"", 404),
    ("GET", "/rollouts/known/calls?attempt=7", b"", 404),
    ("GET", "/rollouts/known/calls?attempt=-7", b"", 400),
    ("GET", "/rollouts/known/calls?tokens=2", b"", 400),
    ("GET", "/rollouts/nobody/events", b"", 404),
    ("POST", "/rollouts/nobody/events", b'{"kind": "k"}', 404),
    ("POST", "/rollouts/known/events", b"", 400),
    ("POST", "/rollouts/known/events", b"[]", 400),
    ("POST", "/rollouts/known/events", b"{}", 400),
    ("POST", "/rollouts/known/events", b'{"kind": ""}', 400),
    ("POST", "/rollouts/known/events", b'{"kind": 1}', 400),
    ("POST", "/rollouts/known/events", b'{"kind": "\\ud800"}', 400),
    ("POST", "/rollouts/known/events", b'{"kind": "k", "data": []}', 400),
    ("POST", "/rollouts/known/events", b'{"kind": "k", "data": {"a": NaN}}', 400),
    ("POST", "/rollouts/known/events", DEEP, 400),
    ("POST", "/rollouts/known/events", b'{"kind": "k", "time": "noon"}', 400),
    ("POST", "/rollouts/known/events", b'{"kind": "k", "time": -1}', 400),
    ("POST", "/rollouts/known/events", b'{"kind": "k", "time": 1e300}', 400),
    ("POST", "/rollouts/known/events", b'{"kind":"k","data":{"a":"%s"}}' % (b"x" * 65536), 413),
    ("POST", "/rollouts/known/events", b'{"kind":"k","data":{"a":"%s"}}' % (b"x" * 2**21), 413),
    ("POST", "/rollouts", b"{", 400),
    ("POST", "/rollouts", b'{"task_id": "t"}', 400),
    ("POST", "/rollouts", b'{"task_id": "t", "statement": 1}', 400),
    ("POST", "/rollouts", b'{"task_id": "t", "statement": "s", "fields": "x"}', 400),
    ("POST", "/rollouts", b'{"task_id": "t", "statement": "s", "split": "test"}', 400),
    ("POST", "/rollouts", b'{"task_id": "t", "statement": "s", "step": 1e99}', 400),
    ("POST", "/rollouts", b'{"task_id": "t", "statement": "s", "rollout_id": ""}', 400),
    ("POST", "/rollouts", b'{"task_id": "t", "statement": "s", "rollout_id": "../a"}', 400),
    ("POST", "/rollouts", b'{"task_id": "t", "statement": "s", "rollout_id": "a\\n"}', 400),
    ("DELETE", "/rollouts/known", b"", 405),
]


def test_what_a_request_has_wrong_is_a_4xx_in_openais_shape(gateway):
    gateway.attempt(rollout="known")
    key = {"x-api-key": ray.get(gateway.store.operator_key.remote())}
    for method, path, body, status in BAD:
        reply = httpx.request(
            method, f"{gateway.url}/api/v1{path}", content=body, headers=key, timeout=30
        )
        assert reply.status_code == status, (method, path[:80], body[:80], reply.text[:300])
        assert reply.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert reply.json()["error"]["message"]


def test_the_openapi_document_describes_bodies_and_answers(gateway):
    document = httpx.get(f"{gateway.url}/openapi.json").json()
    create = document["paths"]["/api/v1/rollouts"]["post"]
    body = create["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["task_id", "statement"]
    known = document["components"]["schemas"]
    text = json.dumps(document)
    for part in text.split("#/components/schemas/")[1:]:
        assert part[: part.index('"')] in known
    assert "422" not in create["responses"]


def test_events_are_kept_in_their_order(gateway, client):
    gateway.attempt(rollout="eventful")
    for number in range(5):
        client.add_event("eventful", "progress", {"n": number, "text": "é\x00"})
    past = client.add_event("eventful", "note", time=12.5)
    assert (past.time, past.data) == (12.5, {})
    events = list(client.events("eventful", page=2))
    assert [event.data.get("n") for event in events] == [0, 1, 2, 3, 4, None]
    assert list(client.events("eventful", after=events[3].seq)) == events[4:]
    assert abs(events[0].time - time.time()) < 60


# -- with a controller ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(gateway):
    gateway.controller = controller.start(gateway.config, gateway.store, gateway.url)
    ray.get(gateway.controller.status.remote())
    yield gateway
    ray.get(gateway.controller.shutdown.remote())


def until(condition, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


def test_a_created_rollout_runs_and_can_be_looked_into(running, client):
    rollout_id = client.create("t-1", "do it", {"hidden": "x"}, Split.VALIDATION, step=7)
    shown = until(lambda: (r := client.rollout(rollout_id)).state.final and r)
    assert (shown.state, shown.outcome) == (RolloutState.FINISHED, Outcome.COMPLETED), shown
    assert shown.reward == Reward(0.5, True)
    assert [attempt.calls for attempt in shown.tries] == [3]
    assert shown.fields is None
    assert client.rollout(rollout_id, with_fields=True).fields == {"hidden": "x"}
    found = list(client.rollouts(split=Split.VALIDATION, step=7, page=1))
    assert [rollout.rollout_id for rollout in found] == [rollout_id]

    calls = list(client.calls(rollout_id, page=2))
    recorded = ray.get(running.store.calls.remote(f"{rollout_id}-a0"))
    assert [call.call_id for call in calls] == [call.call_id for call in recorded]
    assert [call.turn for call in calls] == [call.turn for call in recorded]
    assert [call.spans for call in calls] == [list(call.spans) for call in recorded]
    assert all(call.tokens is None for call in calls)
    for call, stored in zip(client.calls(rollout_id, tokens=True), recorded, strict=True):
        assert call.tokens.prompt + call.tokens.sampled == stored.full.tolist()
        assert call.tokens.logprobs == stored.logprobs.tolist()
    with pytest.raises(ClientError, match="is over: finished") as caught:
        client.cancel(rollout_id)
    assert caught.value.status == 409


def test_a_cancelled_rollout_leaves_no_harness(running, client):
    first, second = client.create("t", "sleep"), client.create("t", "sleep")
    until(lambda: len(list(client.calls(first))) == 3)
    assert process.marked(f"{first}-a0")
    for rollout_id, attempts in ((second, 0), (first, 1)):
        shown = client.cancel(rollout_id)
        assert process.marked(f"{rollout_id}-a0") == []
        assert (shown.state, shown.outcome) == (RolloutState.CANCELLED, Outcome.CANCELLED)
        assert len(shown.tries) == attempts
        with pytest.raises(ClientError, match="is over: cancelled"):
            client.cancel(rollout_id)
    until(lambda: client.rollout(first).tries[0].outcome is Outcome.CANCELLED)


def test_a_rollout_of_an_earlier_life_cannot_be_cancelled(running, client):
    running.attempt(rollout="orphan")
    with pytest.raises(ClientError, match="not in this run's queue") as caught:
        client.cancel("orphan")
    assert caught.value.status == 409


# -- the client ----------------------------------------------------------------------------------


def test_what_is_no_gateway_is_a_client_error():
    with pytest.raises(ClientError) as caught:
        Client(f"http://127.0.0.1:{deploy.free_port()}", "key").rollout("r")
    assert caught.value.status is None


def test_a_gateway_refuses_a_wrong_key_with_its_reason(gateway):
    with pytest.raises(ClientError, match="HTTP 401: This key does not open this") as caught:
        list(Client(gateway.url, "wrong").rollouts())
    assert (caught.value.status, caught.value.message) == (401, "This key does not open this.")


def test_a_rollout_asked_for_again_under_its_id_is_the_same_rollout(running, client):
    asked = {"task_id": "t", "statement": "sleep", "fields": {"b": 1, "a": 2}}
    assert client.create(**asked, rollout_id="chosen") == "chosen"
    until(lambda: len(list(client.calls("chosen"))) == 3)
    for is_over in (False, True):
        assert client.create("t", "sleep", {"a": 2, "b": 1}, rollout_id="chosen") == "chosen"
        with pytest.raises(ClientError, match="with another task or split") as caught:
            client.create("t", "do it", rollout_id="chosen")
        assert caught.value.status == 409
        shown = client.rollout("chosen")
        assert (shown.state.final, shown.attempts) == (is_over, 1)
        if not is_over:
            client.cancel("chosen")
    # A training step's rollout is not one of an operator's.
    running.attempt(rollout="of-a-group")
    with pytest.raises(ClientError, match="HTTP 409"):
        client.create("t", "s", step=1, rollout_id="of-a-group")


def start_again(running):
    ray.kill(running.controller)
    ray.get(running.store.end_orphans.remote(time.time(), []))
    running.controller = controller.start(running.config, running.store, running.url)


def test_a_rollout_outlives_the_controller_that_it_was_asked_of(running, client):
    first, second = client.create("t", "sleep"), client.create("t", "do it")
    until(lambda: len(list(client.calls(first))) == 3)
    start_again(running)  # as after `kill -9`
    until(lambda: client.rollout(first).attempts == 2 and len(list(client.calls(first))) == 3)
    ray.get(running.controller.shutdown.remote())  # as when the user stops the run
    assert process.marked(f"{first}-a1") == []
    assert not client.rollout(first).state.final
    start_again(running)
    until(lambda: client.rollout(first).attempts == 3)
    client.cancel(first)
    shown = until(lambda: (r := client.rollout(second)).state.final and r)
    assert (shown.state, shown.attempts) == (RolloutState.FINISHED, 1)


def test_harnesses_that_outlive_their_controller_are_killed_and_never_doubled(running, client):
    rollout = client.create("t", "stubborn")
    first, second = f"{rollout}-a0", f"{rollout}-a1"

    def answered(attempt: str) -> list[Call]:
        """The answered calls of an attempt, once both of its processes have some."""
        calls = ray.get(running.store.calls.remote(attempt))
        return calls if len({call.request for call in calls}) == 2 else []

    def key_of(attempt: str) -> str:
        return psutil.Process(process.marked(attempt)[-1]).environ()["KEY"]

    until(lambda: answered(first))
    key = key_of(first)
    process_of(os.getpid(), "ray::RolloutController").kill()
    with pytest.raises(ray.exceptions.RayActorError):  # this is how a run notices
        ray.get(running.controller.status.remote())
    start_again(running)
    later = until(lambda: answered(second))
    until(lambda: not process.marked(first))
    assert max(c.started_at + c.seconds for c in answered(first)) < later[0].started_at
    assert key != key_of(second)
    refused = running.post(first, {"messages": HELLO}, key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "attempt_over")
    client.cancel(rollout)
    assert process.marked(second) == []
    outcomes = [one.outcome for one in client.rollout(rollout).tries]
    assert outcomes == [Outcome.NODE_LOST, Outcome.CANCELLED]
