"""How many calls are in vLLM at a time: against a toy engine whose KV cache overflows."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import pytest

from lightning_ray.engine.admission import Door, Limit, Load

PREFILL = 25  # tokens that the toy computes in the time of one decoding step
CACHE = 10_000  # tokens of KV cache
MOST = 64  # sequences that it decodes at a time


@dataclass
class Sequence:
    prompt: int
    wanted: int
    made: int = 0


@dataclass
class Toy:
    """vLLM in small: runs what fits, throws the youngest out when what runs outgrows the cache, and
    computes that again. `step` is one token for each that runs; `time` counts in such steps."""

    running: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    time: float = 0.0
    preempted: int = 0

    @property
    def used(self) -> int:
        return sum(s.prompt + s.made for s in self.running)

    def step(self) -> tuple[list[Sequence], Load]:
        thrown = 0
        while self.used + len(self.running) > CACHE and len(self.running) > 1:
            self.waiting.appendleft(self.running.pop())
            thrown += 1
        while self.waiting and len(self.running) < MOST and not thrown:
            size = self.waiting[0].prompt + self.waiting[0].made
            if self.running and self.used + size + len(self.running) >= CACHE:
                break
            self.running.append(self.waiting.popleft())
            self.time += size / PREFILL
        self.time += 1
        for sequence in self.running:
            sequence.made += 1
        ended = [s for s in self.running if s.made >= s.wanted]
        load = Load(min(1.0, self.used / CACHE), len(self.waiting), thrown)
        self.running = [s for s in self.running if s.made < s.wanted]
        self.preempted += thrown
        return ended, load


def serve(calls: list[Sequence], limit: Limit, fixed: bool = False) -> tuple[Toy, list[Sequence]]:
    """Runs all `calls`, which are there from the beginning; also the order in which they ended."""
    toy, outside, done = Toy(), deque(calls), []
    while outside or limit.inside:
        while outside and limit.admits():
            limit.inside += 1
            toy.waiting.append(outside.popleft())
        ended, load = toy.step()
        if not fixed:
            limit.observe(load)
        for sequence in ended:
            done.append(sequence)
            limit.left(others_wait=bool(outside) and not fixed)
    return toy, done


def long(count: int) -> list[Sequence]:
    """About ten of these fill the cache, and they enter at a third of their length."""
    return [Sequence(350 + 7 * (i % 13), 600 + 11 * (i % 17)) for i in range(count)]


def short(count: int) -> list[Sequence]:
    """Of these the toy decodes as many as it can at a time."""
    return [Sequence(40 + i % 5, 60 + i % 11) for i in range(count)]


def fresh(calls: list[Sequence]) -> list[Sequence]:
    return [Sequence(s.prompt, s.wanted) for s in calls]


@pytest.mark.parametrize("calls", [long(300), short(2000)], ids=["long", "short"])
def test_it_settles_near_the_best_constant_limit(calls: list[Sequence]) -> None:
    constants = {n: serve(fresh(calls), Limit(n), fixed=True)[0] for n in range(4, MOST + 1, 4)}
    best = min(toy.time for toy in constants.values())
    toy, done = serve(fresh(calls), Limit(MOST))
    assert len(done) == len(calls)
    assert toy.time < 1.1 * best
    naive = constants[MOST]
    assert toy.preempted <= naive.preempted / 4
    assert toy.time < 1.02 * naive.time


def test_it_follows_a_load_that_changes() -> None:
    limit = Limit(MOST)
    serve(short(500), limit)
    assert limit.calls >= MOST
    serve(long(100), limit)
    assert limit.calls < 20
    serve(short(1500), limit)
    assert limit.calls > 0.8 * MOST


def test_a_call_that_fills_the_cache_alone_is_served_and_so_are_those_behind_it() -> None:
    giants = [Sequence(9_000, 800) for _ in range(5)]
    _, done = serve([*long(40), *giants, *long(40)], limit := Limit(MOST))
    assert len(done) == 85 and limit.inside == 0
    assert limit.calls >= 1


def test_one_overflow_is_one_cut_however_long_it_takes_to_leave() -> None:
    limit = Limit(40, inside=40)
    for _ in range(50):
        limit.observe(Load(0.99, 3, 1))
    assert limit.calls == 0.9 * 37 and not limit.admits()
    for _ in range(7):
        limit.left(others_wait=True)
    limit.observe(Load(0.99, 0, 0))
    assert limit.calls == 0.9 * 33


def test_nothing_grows_without_need() -> None:
    for load, others_wait in (
        (Load(0.5, 0, 0), False),
        (Load(0.5, 2, 0), True),
        (Load(0.9, 0, 0), True),
    ):
        limit = Limit(8, inside=8)
        limit.observe(load)
        limit.left(others_wait)
        assert limit.calls == 8


def test_calls_enter_in_order_and_a_cancelled_one_leaves_no_gap() -> None:
    async def scene() -> list[int]:
        door, entered, go = Door(Limit(2)), list[int](), asyncio.Event()

        async def call(number: int) -> None:
            async with door.inside():
                entered.append(number)
                await go.wait()

        tasks = [asyncio.create_task(call(number)) for number in range(7)]
        await asyncio.sleep(0)
        assert entered == [0, 1]
        tasks[3].cancel()  # waits for a place
        tasks[0].cancel()  # has one
        await asyncio.sleep(0)
        door.observe(Load(0.1, 0, 0))
        await asyncio.sleep(0)
        assert entered == [0, 1, 2]
        tasks[2].cancel()
        await asyncio.sleep(0)
        tasks[4].cancel()  # was let in in this very moment
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert door.limit.inside == 2
        go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert door.limit.inside == 0
        return entered

    assert asyncio.run(scene()) == [0, 1, 2, 5, 6]
