"""Small disks, full ones, and what a store does on them: `test_store_full_disk.py` runs this module
on a file system of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_store import make_call, make_spec, same

from lightning_ray.records import Call, Outcome, Reward
from lightning_ray.store import actor
from lightning_ray.store.actor import NO_ROOM, Asked, StoreActor
from lightning_ray.store.rollouts import RolloutStore

ROUNDS = 25
SEGMENT_BYTES = 40_000


class SmallSegments(RolloutStore):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, SEGMENT_BYTES)


def some_calls(first: int, count: int) -> list[Call]:
    """Calls that share nothing: some KB each."""
    return [
        make_call(f"c{i}", [i, *range(i, i + 600)], list(range(i, i + 300)))
        for i in range(first, first + count)
    ]


def skip_without(tried: subprocess.CompletedProcess[str]) -> None:
    """Skips the test if this way to a small file system failed; in CI that is a failure."""
    if tried.returncode:
        say = pytest.fail if "CI" in os.environ else pytest.skip
        say(f"no small file system on this machine: {tried.stderr.strip()}")


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """`folder` is a file system of 4 MiB; skips the test where that cannot be had."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    tried = subprocess.run(mount, capture_output=True, text=True)
    skip_without(tried)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def full(folder: Path, but_for: int = 0) -> Iterator[None]:
    """The disk has room for `but_for` more bytes only, for a while."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with ballast.open("r+b") as file:
        file.truncate(max(0, ballast.stat().st_size - but_for))
    yield
    ballast.unlink()


async def pause(folder: Path) -> None:
    """A full disk holds everything that is written, closes the gate, and loses nothing."""
    store = StoreActor(str(folder / "store"))
    await store.create_rollouts([make_spec()])
    await store.start_attempt("r-a0", "r", 0, "hash", 1.0)
    calls = some_calls(0, 30)
    with full(folder):
        writes = [asyncio.create_task(store.record_calls([([call], 0)])) for call in calls]
        writes.append(asyncio.create_task(store.post_reward("r", Reward(1.0, True), "grader")))
        writes.append(asyncio.create_task(store.start_attempt("r-a1", "r", 1, "hash", 1.0)))
        writes.append(asyncio.create_task(store.record_fault("r-a0", 503)))
        await asyncio.sleep(3 * actor.AGAIN_S)
        assert sum(write.done() for write in writes) < 10
        assert await store.wait_gate(0.01) == NO_ROOM
        assert "is full" in (await store.health())[0]
        assert await store.open_calls([Asked("r-a0", "x", "replica", False, 10**6)]) == [(None, [])]
        assert (await store.attempt("r-a0")).live  # what only reads goes on
        assert (await store.show_rollout("r", False)).rollout_id == "r"
    await asyncio.gather(*writes)
    assert await store.wait_gate(5) == ""
    assert await store.health() == ("", [])
    with full(folder):
        await store.close()
        store = StoreActor(str(folder / "store"))
        ending = asyncio.create_task(store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0))
        await asyncio.sleep(3 * actor.AGAIN_S)
        assert not ending.done() and "is full" in (await store.health())[0]
    assert (await ending).calls == len(calls)
    await check(store, folder, calls)


async def rounds(folder: Path, seed: int) -> None:
    """The disk is full at random moments: in the middle of a call, a commit, a seal."""
    chance, calls = random.Random(seed), list[Call]()
    store = StoreActor(str(folder / "store"))
    await store.create_rollouts([make_spec()])
    await store.start_attempt("r-a0", "r", 0, "hash", 1.0)
    for number in range(1, ROUNDS + 1):
        fresh = some_calls(len(calls), 6)
        calls += fresh
        with full(folder, chance.randrange(60_000)):
            writes = [asyncio.create_task(store.record_calls([([call], 0)])) for call in fresh]
            attempt = f"r-a{number}"
            writes.append(
                asyncio.create_task(store.start_attempt(attempt, "r", number, "hash", 1.0))
            )
            await asyncio.sleep(chance.random() * 0.2)
        recorded = await asyncio.gather(*writes)
        assert all(len(answer) == 1 for [answer] in recorded[:-1])
        assert (await store.attempt(attempt)).live
    await store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0)
    await check(store, folder, calls)
    assert len(list((folder / "store" / "calls").glob("*.arrow"))) > 3


async def check(store: StoreActor, folder: Path, calls: list[Call]) -> None:
    """Every call is there once, also for the next owner."""
    in_this_life = await store.calls("r-a0")
    await store.close()
    later = RolloutStore(folder / "store")
    for found in (in_this_life, later.calls("r-a0")):
        by_id = {call.call_id: call for call in found}
        assert len(found) == len(by_id) == len(calls)
        assert all(same(by_id[call.call_id], call) for call in calls)
    assert not later.torn
    later.close()
    assert not list(folder.rglob("*.tmp"))


if __name__ == "__main__":
    actor.AGAIN_S = 0.1
    actor.RolloutStore = SmallSegments
    scenario, directory = {"pause": pause, "rounds": rounds}[sys.argv[1]], Path(sys.argv[2])
    asyncio.run(scenario(directory, *map(int, sys.argv[3:])))
