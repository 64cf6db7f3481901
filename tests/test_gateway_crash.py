"""A gateway replica is killed around the moment at which a call is recorded."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import openai
import psutil
import pytest
import ray
from runs import process_of
from support import HELLO, Running

from lightning_ray.gateway import deploy
from lightning_ray.records import Outcome

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("gateway"), [["unset"]], restarts=-1)
    running.start()
    yield running
    deploy.stop()
    ray.shutdown()


def replica() -> psutil.Process:
    return process_of(os.getpid(), "ray::ServeReplica:lightning_ray:gateway")


def kill_at_the_record(log: Path, victim: psutil.Process) -> None:
    """Kills as soon as the log grows: the call is on disk, and its reply has some way to go."""
    before = log.stat().st_size
    while log.stat().st_size == before:
        time.sleep(0.0003)
    victim.kill()


def ask(gateway: Running, attempt: str, killing: threading.Thread) -> tuple[str, int]:
    """What a client of the SDK gets, and how often it tried again."""
    client = openai.OpenAI(
        base_url=f"{gateway.url}/rollout/{attempt}/v1",
        api_key="secret",
        max_retries=20,
        timeout=120,
    )
    killing.start()
    raw = client.chat.completions.with_raw_response.create(model="m", messages=HELLO)
    killing.join()
    return raw.parse().choices[0].message.content, raw.retries_taken


def test_a_call_that_was_recorded_is_answered_by_the_next_replica(gateway):
    gateway.attempt()  # whoever uses the store first opens it
    [log] = (gateway.folder / "store" / "calls").glob("*.log")
    for number in range(2):
        ray.get(gateway.engines[0].script.remote([f"answer {number}", "another"], 1.0))
        attempt = gateway.attempt()
        killing = threading.Thread(target=kill_at_the_record, args=(log, replica()))
        said, tries = ask(gateway, attempt, killing)
        [call] = ray.get(gateway.store.calls.remote(attempt))
        assert (said, call.text) == (f"answer {number}", f"answer {number}")
        assert tries > 0


def test_a_call_that_was_not_recorded_is_sampled_anew_and_recorded_once(gateway):
    ray.get(gateway.engines[0].script.remote(["never seen", "another"], 3.0))
    attempt = gateway.attempt()
    said, tries = ask(gateway, attempt, threading.Timer(1.5, replica().kill))
    [call] = ray.get(gateway.store.calls.remote(attempt))
    assert said == call.text == "another"
    assert tries > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_whose_only_engine_dies_goes_on_with_the_next_life_of_it(gateway, stream):
    [engine] = gateway.engines
    ray.get(engine.script.remote(["lost with the engine"], 60.0))
    attempt = gateway.attempt()
    threading.Timer(1.5, process_of(os.getpid(), "ray::ScriptedEngine").kill).start()
    client = gateway.client(attempt)  # it does not try again
    reply = client.chat.completions.create(model="m", messages=HELLO, stream=stream)
    if stream:
        said = "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)
    else:
        said = reply.choices[0].message.content
    [call] = ray.get(gateway.store.calls.remote(attempt))
    assert said == call.text == "unset"
    summary = ray.get(gateway.store.end_attempt.remote(attempt, Outcome.COMPLETED, "", time.time()))
    assert summary.last_fault is None


def test_a_stream_is_not_cut_when_the_store_dies_under_it(gateway):
    ray.get(gateway.engines[0].script.remote(["kept"], 8.0))
    attempt = gateway.attempt()
    killing = threading.Timer(6.0, process_of(os.getpid(), "ray::StoreActor").kill)
    killing.start()
    reply = gateway.client(attempt).chat.completions.create(model="m", messages=HELLO, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)
    killing.join()
    [call] = ray.get(gateway.store.calls.remote(attempt))
    assert said == call.text == "kept"
