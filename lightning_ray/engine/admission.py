"""How many calls may be in vLLM at a time: as many as its KV cache holds, and not one constant.

vLLM takes whatever it is given. When what runs outgrows the KV cache it throws sequences out and
computes them again, and the prefixes of rollouts that are between two calls go even before. `Limit`
follows what vLLM says of itself: additive increase and multiplicative decrease (Chiu and Jain,
1989; for the KV cache of agents: CONCUR, arXiv 2601.22705), with a band between the two in which it
rests. `Door` is the asyncio around it: a call that is one too many waits.

Invariants: one call may always be inside; calls enter in the order in which they came; one that is
cancelled leaves its place to the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

# The KV cache is about to overflow above this share of its blocks in use ...
FULL = 0.95
# ... and has room for more below this one.
ROOMY = 0.85
# After an overflow the limit is this share of what ran: a step from above to within the band.
CUT = 0.9
# The limit grows by this share, and at least by one, while as many calls end as are inside.
GROWTH = 1 / 8


@dataclass(frozen=True)
class Load:
    """What vLLM says after a step: the share of KV cache blocks in use by sequences that run, the
    length of its own queue, and how many sequences it has thrown out of the cache."""

    kv_usage: float
    waiting: int
    preempted: int


@dataclass
class Limit:
    """See the module; pure. `calls` is the limit: it begins as what vLLM decodes at a time, and
    goes beyond as long as vLLM's own queue is empty."""

    calls: float
    inside: int = 0
    _roomy: bool = False
    _shrinking: bool = False  # what an overflow has made too many has not left yet

    def admits(self) -> bool:
        return self.inside < max(1, int(self.calls))

    def observe(self, load: Load) -> None:
        """Cuts the limit after an overflow, once until as few calls are inside as it allows."""
        overflow = load.preempted > 0 or load.kv_usage > FULL
        self._roomy = load.kv_usage < ROOMY and not load.waiting and not overflow
        self._shrinking = self._shrinking and self.inside > self.calls
        if overflow and not self._shrinking:
            self.calls = max(1.0, CUT * min(self.calls, self.inside - load.waiting))
            self._shrinking = True

    def left(self, others_wait: bool) -> None:
        """A call has ended; `others_wait` for a place."""
        self.inside -= 1
        if others_wait and self._roomy:
            self.calls += max(GROWTH, 1 / self.calls)


@dataclass
class Door:
    """Lets calls in as `limit` allows."""

    limit: Limit
    _queue: deque[asyncio.Future[None]] = field(default_factory=deque)

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Waits for a place, and keeps it as long as the block runs."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self._let_in()
        try:
            await place
            yield
        finally:
            if not place.cancelled():  # such a one never had the place; `_let_in` passes it over
                self.limit.left(others_wait=bool(self._queue))
                self._let_in()

    def observe(self, load: Load) -> None:
        self.limit.observe(load)
        self._let_in()

    def _let_in(self) -> None:
        while self._queue and self.limit.admits():
            place = self._queue.popleft()
            if not place.done():
                place.set_result(None)
                self.limit.inside += 1
