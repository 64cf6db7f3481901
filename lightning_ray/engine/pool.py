"""Routes calls over the engines: a rollout stays on one engine, and moves when that engine is gone.

`Router` is pure: rendezvous hashing keeps a rollout where its prefix is cached, and when an engine
is lost only the rollouts of that engine move. `EnginePool` is the I/O around it: it asks the
engine, and when Ray says that the engine died it marks it as down and asks the next one.

Invariants: as long as the set of engines that are up does not change, a rollout is always routed to
the same one; a call fails only when every engine failed it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_ray.engine.actor import Generation
from lightning_ray.engine.courier import Courier, EngineDead

log = logging.getLogger(__name__)

# A lost engine is back (started again, weights loaded) after tens of seconds; asking it sooner only
# waits.
DOWN_SECONDS = 30.0


class NoEngine(RuntimeError):
    """Every engine failed the call."""


@dataclass
class Router:
    """Which engine (0 ... count-1) serves a rollout. Times are seconds of any monotonic clock."""

    count: int
    down_until: dict[int, float] = field(default_factory=dict)

    def choose(self, rollout_id: str, now: float, excluded: Sequence[int] = ()) -> int | None:
        """The engine for `rollout_id`, or None if all are excluded. Engines that are down come
        last."""
        candidates = [engine for engine in range(self.count) if engine not in excluded]
        if not candidates:
            return None
        up = [engine for engine in candidates if self.down_until.get(engine, 0.0) <= now]
        return max(up or candidates, key=lambda engine: _weight(rollout_id, engine))

    def lost(self, engine: int, now: float) -> None:
        self.down_until[engine] = now + DOWN_SECONDS


def _weight(rollout_id: str, engine: int) -> bytes:
    """Rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998."""
    return hashlib.blake2b(f"{engine}:{rollout_id}".encode(), digest_size=8).digest()


class EnginePool:
    """The engines of a run. `engines` are handles of `EngineActor`s."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self._couriers = [Courier(engine) for engine in engines]
        self._router = Router(len(engines))

    async def generate(self, rollout_id: str, prompt: np.ndarray, **sampling: Any) -> Generation:
        """`EngineActor.generate` on the engine of `rollout_id`, or on the next one if that one is
        gone.

        Raises:
            NoEngine: every engine failed.
        """
        failed: list[int] = []
        while (engine := self._router.choose(rollout_id, time.monotonic(), failed)) is not None:
            try:
                generation: Generation = await self._couriers[engine].generate(prompt, sampling)
                return generation
            except EngineDead as error:
                log.warning("engine %d failed a call of %s: %s", engine, rollout_id, error)
                self._router.lost(engine, time.monotonic())
                failed.append(engine)
        raise NoEngine(
            f"all {len(self._couriers)} engines failed; see the Ray dashboard for their logs"
        )
