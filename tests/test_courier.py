"""Calls carried in groups between a gateway replica and an engine actor: real Ray actors without a
model."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import numpy as np
import pytest
import ray

from lightning_ray.engine.courier import Courier, EngineDead, Exchange

PROMPT = np.arange(3, dtype=np.int32)


class Engine(Exchange):
    """Says after some seconds what it was told to say."""

    def __init__(self) -> None:
        self._exchanges, self._stopped = 0, []

    async def exchange(self, courier: str, parcel: bytes) -> bytes:
        self._exchanges += 1
        return await super().exchange(courier, parcel)

    async def generate(self, prompt, *, say, seconds=0.0):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._stopped.append(say)
            raise
        if say == "refuse":
            raise ValueError("a bad request")
        if say == "die":
            os._exit(1)
        return say, int(prompt.sum())

    async def seen(self):
        return self._exchanges, self._stopped


@pytest.fixture(scope="module")
def engine():
    """An engine's actor that can be started again once."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(Engine).options(num_cpus=0, max_concurrency=100, max_restarts=1).remote()
    ray.get(actor.seen.remote())
    yield actor
    ray.shutdown()


async def test_calls_that_come_together_go_together_and_each_gets_its_own_answer_or_error(engine):
    courier = Courier(engine)
    before, _ = await engine.seen.remote()
    asked = [courier.generate(PROMPT + i, {"say": f"{i}"}) for i in range(50)]
    refused = courier.generate(PROMPT, {"say": "refuse"})
    *answers, error = await asyncio.gather(*asked, refused, return_exceptions=True)
    assert answers == [(f"{i}", 3 + 3 * i) for i in range(50)]
    assert isinstance(error, ValueError) and str(error) == "a bad request"
    after, _ = await engine.seen.remote()
    assert after - before <= 3


async def test_a_slow_call_keeps_no_other_waiting(engine):
    courier = Courier(engine)
    slow = asyncio.create_task(courier.generate(PROMPT, {"say": "slow", "seconds": 30.0}))
    for i in range(5):
        assert await courier.generate(PROMPT, {"say": f"{i}"}) == (f"{i}", 3)
    assert not slow.done()
    slow.cancel()


async def test_a_call_that_is_cancelled_stops_in_the_engine_and_leaves_the_others_alone(engine):
    courier = Courier(engine)
    kept, left = (
        asyncio.create_task(courier.generate(PROMPT, {"say": say, "seconds": seconds}))
        for say, seconds in (("kept", 2.0), ("left", 30.0))
    )
    assert await courier.generate(PROMPT, {"say": "both are running"})
    left.cancel()
    assert await kept == ("kept", 3)
    with pytest.raises(asyncio.CancelledError):
        await left
    assert (await engine.seen.remote())[1][-1] == "left"


async def test_when_the_engine_dies_its_calls_fail_and_the_engine_that_is_back_serves_the_next(
    engine,
):
    courier = Courier(engine)
    running = [courier.generate(PROMPT, {"say": "slow", "seconds": 30.0}) for _ in range(3)]
    dying = courier.generate(PROMPT, {"say": "die", "seconds": 0.5})
    errors = await asyncio.gather(*running, dying, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineDead] * 4
    deadline = time.monotonic() + 20
    while True:
        try:
            assert await courier.generate(PROMPT, {"say": "back"}) == ("back", 3)
            return
        except EngineDead:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)


async def test_an_engine_that_was_started_again_unnoticed_has_lost_what_came_before():
    class Handle:
        """An actor's handle whose first exchange is answered by an earlier life of the actor."""

        def __init__(self) -> None:
            self._lives = [Engine(), Engine()]
            self.exchange, self._count = self, 0

        async def remote(self, courier: str, parcel: bytes) -> bytes:
            self._count += 1
            return await self._lives[self._count > 2].exchange(courier, parcel)

    courier = Courier(Handle())
    lost = asyncio.create_task(courier.generate(PROMPT, {"say": "lost", "seconds": 30.0}))
    await asyncio.sleep(0.01)
    assert await courier.generate(PROMPT, {"say": "first life"}) == ("first life", 3)
    with pytest.raises(EngineDead, match="started again"):
        await lost
    assert await courier.generate(PROMPT, {"say": "second life"}) == ("second life", 3)


async def test_an_engine_stops_what_a_courier_that_fell_silent_had_asked_for(monkeypatch):
    monkeypatch.setattr("lightning_ray.engine.courier.SILENT_S", 0.1)
    engine = Engine()

    class Handle:
        """Delivers an exchange, and then nothing."""

        def __init__(self) -> None:
            self.exchange, self._delivered = self, False

        async def remote(self, courier: str, parcel: bytes) -> bytes:
            if self._delivered:
                await asyncio.Event().wait()
            self._delivered = True
            return await engine.exchange(courier, parcel)

    courier = Courier(Handle())
    asked = [
        asyncio.create_task(courier.generate(PROMPT, {"say": say, "seconds": seconds}))
        for say, seconds in (("said", 0.0), ("never heard", 30.0))
    ]
    assert await asked[0] == ("said", 3)
    deadline = time.monotonic() + 5
    while (await engine.seen())[1] != ["never heard"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    asked[1].cancel()
