"""Routes calls over the engines: a rollout stays on one engine, and moves when that engine is gone.

`Router` is pure: rendezvous hashing spreads rollouts in the same way everywhere, each stays on the
engine that served it last, where its prefix is cached, and an engine that has too many calls gets
no more (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam, 2016).
`EnginePool` is the I/O around it: it asks the engine, and when Ray says that the engine died it
marks it as down and asks the next one.

Invariants: a rollout moves only when its engine is gone or has `BOUND` times the mean load; no
engine gets a call that takes it above that; a call fails only when every engine failed it, and
none came back in time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_ray.engine.courier import Courier, EngineDead
from lightning_ray.engine.partial import Generation

log = logging.getLogger(__name__)

# A lost engine is back (started again, weights loaded) after tens of seconds; asking it sooner only
# waits.
DOWN_SECONDS = 30.0
# The fullest engine has a quarter more than its share; with less, more rollouts would have to leave
# the engine that knows their prefix.
BOUND = 1.25
# Between two tries of engines that all failed.
AGAIN_S = 1.0
# Rollouts whose engine is remembered; one that was forgotten starts where hashing puts it.
REMEMBERED = 10_000


class NoEngine(RuntimeError):
    """Every engine failed the call."""


@dataclass
class Router:
    """Which engine (0 ... count-1) serves a rollout. Times are seconds of any monotonic clock; the
    load of an engine is the calls that run between the ends of `serving`."""

    count: int
    down_until: dict[int, float] = field(default_factory=dict)
    load: Counter[int] = field(default_factory=Counter)
    _last: dict[str, int] = field(default_factory=dict)  # by rollout id, the latest at the end

    def choose(self, rollout_id: str, now: float, excluded: Sequence[int] = ()) -> int | None:
        """The engine for a call of `rollout_id`, or None if all are excluded. Engines that are down
        come last."""
        candidates = [engine for engine in range(self.count) if engine not in excluded]
        if not candidates:
            return None
        up = [engine for engine in candidates if self.down_until.get(engine, 0.0) <= now]
        up = up or candidates
        most = math.ceil(BOUND * (sum(self.load[engine] for engine in up) + 1) / len(up))
        last = self._last.pop(rollout_id, None)
        engine = max(
            (engine for engine in up if self.load[engine] < most),
            key=lambda engine: (engine == last, _weight(rollout_id, engine)),
        )
        self._last[rollout_id] = engine
        if len(self._last) > REMEMBERED:
            del self._last[next(iter(self._last))]
        return engine

    @contextmanager
    def serving(self, engine: int) -> Iterator[None]:
        """Counts a call that the engine serves as long as the block runs."""
        self.load[engine] += 1
        try:
            yield
        finally:
            self.load[engine] -= 1

    def lost(self, engine: int, now: float) -> None:
        self.down_until[engine] = now + DOWN_SECONDS


def _weight(rollout_id: str, engine: int) -> bytes:
    """Rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998."""
    return hashlib.blake2b(f"{engine}:{rollout_id}".encode(), digest_size=8).digest()


class EnginePool:
    """The engines of a run. `engines` are handles of `EngineActor`s; while none of them runs, a
    call waits `patience_s` seconds for one that is started again."""

    def __init__(self, engines: Sequence[Any], patience_s: float) -> None:
        self._patience_s = patience_s
        self._couriers = [Courier(engine) for engine in engines]
        self._router = Router(len(engines))

    async def generate(self, rollout_id: str, prompt: np.ndarray, **sampling: Any) -> Generation:
        """`EngineActor.generate` on the engine of `rollout_id`, or on the next one if that one is
        gone, or on the first that is there again.

        Raises:
            NoEngine: every engine failed, for `patience_s` seconds.
        """
        failed: list[int] = []
        deadline = time.monotonic() + self._patience_s
        while True:
            engine = self._router.choose(rollout_id, time.monotonic(), failed)
            if engine is None and time.monotonic() < deadline:
                await asyncio.sleep(AGAIN_S)
                failed.clear()
                continue
            if engine is None:
                raise NoEngine(
                    f"all {len(self._couriers)} engines failed for {self._patience_s:g} s; see the "
                    "Ray dashboard for their logs"
                )
            try:
                courier = self._couriers[engine]
                with self._router.serving(engine):
                    generation: Generation = await courier.generate(prompt, sampling)
                return generation
            except EngineDead as error:
                log.warning("engine %d failed a call of %s: %s", engine, rollout_id, error)
                self._router.lost(engine, time.monotonic())
                failed.append(engine)
