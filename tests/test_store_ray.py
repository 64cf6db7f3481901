"""The store under Ray: what its actor's death costs, and what a run says of its store."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest
import ray
from small_disk import full, mounted
from test_store import make_call, make_spec, same
from test_store_damage import begin, newest_log

from lightning_ray.config import load
from lightning_ray.run import cluster
from lightning_ray.run.stack import Stack
from lightning_ray.store import actor
from lightning_ray.store.actor import UPDATING
from lightning_ray.store.errors import CorruptSegment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def on_ray(tmp_path_factory):
    cluster.connect(load(None, [f"run.dir={tmp_path_factory.mktemp('run')}"]))
    yield
    ray.shutdown()


def store_process() -> psutil.Process:
    for process in psutil.Process().children(recursive=True):
        if process.name().startswith("ray::StoreActor"):
            return process
    raise LookupError("no store")


def open_store(run_dir: Path) -> tuple[Stack, list[str]]:
    """A stack whose store is open, and what was said."""
    said: list[str] = []
    stack = Stack(load(None, [f"run.dir={run_dir}"]), run_dir, run_dir, said.append)
    stack.open_store()
    return stack, said


def test_a_store_that_is_killed_again_and_again_has_every_call_once(tmp_path: Path):
    store = actor.start(tmp_path)
    ray.get(store.create_rollouts.remote([make_spec()]))
    ray.get(store.start_attempt.remote("r-a0", "r", 0, "hash", 1.0))
    ray.get(store.close_gate.remote())
    calls = [make_call(f"c{i}", [*range(i), i], [i + 1, 7]) for i in range(400)]
    chance = random.Random(0)
    for number in range(8):
        ray.get(store.wait_gate.remote(0))  # it is there again
        process = store_process()
        sent = [
            store.record_calls.remote([([call], 0)])
            for call in calls[number * 50 : (number + 1) * 50]
        ]
        time.sleep(chance.random() * 0.1)
        process.kill()
        assert all(len(answer) == 1 for [answer] in ray.get(sent, timeout=60))
    found = ray.get(store.calls.remote("r-a0"))
    by_id = {call.call_id: call for call in found}
    assert len(found) == len(by_id) == len(calls)
    assert all(same(by_id[call.call_id], call) for call in calls)
    assert ray.get(store.wait_gate.remote(0.1)) == UPDATING
    ray.get(store.close.remote())


@pytest.mark.parametrize("was_open", [False, True])
def test_a_run_says_what_was_cut_off_its_store_and_holds_calls_until_it_opens_the_gate(
    tmp_path: Path, was_open: bool
):
    """Else what runs on in pods would be answered before the engines have their weights."""
    store = begin(tmp_path / "store", 2)
    store.set_gate(was_open)
    store.close()
    path = newest_log(tmp_path / "store")
    path.write_bytes(path.read_bytes() + b"unfinished")
    stack, said = open_store(tmp_path)
    assert len(said) == 1 and ".torn" in said[0]
    assert ray.get(stack.store.wait_gate.remote(0.1)) == UPDATING
    stack.open()
    assert ray.get(stack.store.wait_gate.remote(0.1)) == ""
    assert not ray.get(stack.store.attempt.remote("r-a0")).live
    stack.stop()


def test_a_damaged_store_stops_the_run_with_a_message(tmp_path: Path):
    begin(tmp_path / "store", 2).close()
    path = newest_log(tmp_path / "store")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptSegment) as caught:
        open_store(tmp_path)
    assert str(caught.value.cause).startswith(f"{path} is damaged at byte")


def test_a_run_says_that_its_disk_is_full_and_that_it_goes_on(tmp_path: Path):
    with mounted(tmp_path / "store"):
        stack, said = open_store(tmp_path)
        with full(tmp_path / "store"):
            closing = stack.store.close_gate.remote()
            deadline = time.monotonic() + 60
            while not said and time.monotonic() < deadline:
                stack._look_at_store()
            assert f"the disk of {tmp_path / 'store'} is full" in said[0]
        ray.get(closing)
        stack._look_at_store()
        assert len(said) == 2 and "there is room again" in said[1]
        stack.stop()
