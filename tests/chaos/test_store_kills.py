"""The bare store process is killed at random moments, again and again: while it opens, commits,
opens the next segment, seals.

LIGHTNING_RAY_CHAOS_KILLS is the number of kills, LIGHTNING_RAY_CHAOS_SEED the seed of the moments.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from forking import forking
from test_store import make_call, same

from lightning_ray.records import Call, Outcome, Reward, RolloutSpec, Split, Task
from lightning_ray.store.errors import DuplicateReward
from lightning_ray.store.rollouts import RolloutStore

KILLS = int(os.environ.get("LIGHTNING_RAY_CHAOS_KILLS", "50"))
SEED = int(os.environ.get("LIGHTNING_RAY_CHAOS_SEED", "0"))
SEGMENT_BYTES = 8_000
CALLS = 12  # of an attempt
# A process is killed within this time, in seconds, of its start or of its first answer.
LIFE_S = 0.4


def attempt_of(number: int) -> str:
    return f"r{number // CALLS}-a0"


def call_of(number: int) -> Call:
    """The call with this number: most continue the one before."""
    attempt, seq = divmod(number, CALLS)
    talk = np.random.default_rng(attempt).integers(0, 1000, 20 * CALLS).tolist()
    prompt = talk[: 20 * seq + 10] if number % 5 else [number]
    return make_call(f"c{number}", prompt, talk[20 * seq + 10 :][:10], attempt_of(number))


def live(directory: Path, first: int, answers: Connection) -> None:
    """Goes on at call `first`, which nobody has been told of; reports each call as it is
    recorded."""
    store = RolloutStore(directory, SEGMENT_BYTES)
    if first and not first % CALLS:
        end(store, first - 1)
    for number in itertools.count(first):
        if number == first or not number % CALLS:
            rollout_id = attempt_of(number)[:-3]
            spec = RolloutSpec(rollout_id, "g", Task("t", "s"), Split.TRAIN, 0)
            store.create_rollouts([spec])
            store.start_attempt(attempt_of(number), rollout_id, 0, "hash", 1.0)
        assert store.append([call_of(number)]) == [number % CALLS]
        answers.send_bytes(number.to_bytes(4, "little"))
        if number % CALLS == CALLS - 1:
            end(store, number)


def end(store: RolloutStore, number: int) -> None:
    """Ends the attempt of its last call."""
    summary = store.end_attempt(attempt_of(number), Outcome.COMPLETED, "", 2.0)
    assert summary.calls == CALLS, summary
    rollout_id = attempt_of(number)[:-3]
    store.post_reward(rollout_id, Reward(1.0, True), "grader")
    try:
        store.post_reward(rollout_id, Reward(0.0, False), "grader")
    except DuplicateReward:
        return
    raise AssertionError("a second reward was taken")


def check(directory: Path, first: int, answered: int) -> None:
    """The calls from `first` up to `answered`, and at most one more, are there once each."""
    store = RolloutStore(directory, SEGMENT_BYTES)
    for attempt in range(first // CALLS, answered // CALLS + 1):
        numbers = range(attempt * CALLS, min((attempt + 1) * CALLS, answered + 1))
        found = store.calls(attempt_of(attempt * CALLS))
        assert len(numbers) <= len(found) <= len(numbers) + (numbers[-1] == answered)
        expected = [call_of(attempt * CALLS + seq) for seq in range(len(found))]
        assert all(same(*pair) for pair in zip(found, expected, strict=True))
    store.close()


def copy(source: str, target: str) -> None:
    """Sealed segments, which nobody writes to, are many in the end: they are linked."""
    (os.link if source.endswith(".arrow") else shutil.copy2)(source, target)


def recorded(directory: Path) -> list[str]:
    """The ids of all calls in the log, index or not."""
    store = RolloutStore(directory, SEGMENT_BYTES)
    log = store._log
    ids = [
        call_id
        for segment in log.segments
        for batch in range(log.batches(segment))
        for call_id in log.read(segment, batch)["call_id"].to_pylist()
    ]
    store.close()
    return ids


@pytest.mark.slow
def test_what_was_answered_is_there_once_however_often_the_store_is_killed(
    tmp_path: Path, monkeypatch
):
    context = forking([__name__], monkeypatch)
    chance, directory, answered = random.Random(SEED), tmp_path / "store", -1
    for kill in range(KILLS):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=live, args=(directory, answered + 1, writer))
        process.start()
        writer.close()
        if chance.random() < 0.5:
            reader.poll(60)
        time.sleep(chance.random() * LIFE_S)
        process.kill()
        process.join()
        assert process.exitcode == -9, f"kill {kill}: the store failed by itself"
        before = answered
        try:
            while True:
                answered = int.from_bytes(reader.recv_bytes(), "little")
        except EOFError:
            reader.close()
        # A copy: the next process finds the folder as this one left it.
        if answered >= 0:
            shutil.copytree(directory, tmp_path / "copy", copy_function=copy)
            check(tmp_path / "copy", max(0, before - CALLS), answered)
            shutil.rmtree(tmp_path / "copy")
    check(directory, 0, answered)
    ids = recorded(directory)
    assert len(ids) == len(set(ids)) in (answered + 1, answered + 2)
    assert answered > KILLS / 3 and len(list((directory / "calls").glob("*.arrow"))) > 2
