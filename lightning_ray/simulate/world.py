"""Engines and rollouts in virtual time.

An engine shares itself among the calls that it runs: all go equally fast, alone at full speed, and
each further one slows every one down by `slowdown`; above `most` they wait in order. A rollout
alternates between a call and its tools. Events happen in the order of their times, those of one
time in the order in which they were made.

Invariants: time never goes back; a call gets exactly the seconds of work that it asked for, however
often its engine is stopped; at most `concurrency` rollouts run.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from lightning_ray.engine.pool import Router

Then = Callable[[], None]

# What rounding may leave of a call, in seconds.
TINY_S = 1e-6


@dataclass(frozen=True)
class Script:
    """What a rollout does: it starts, and then each of its `turns` is a call (seconds that it takes
    alone) and what follows that (seconds of tools); at last it is graded."""

    turns: tuple[tuple[float, float], ...]
    start_s: float = 0.0
    grading_s: float = 0.0


@dataclass
class Rollout:
    """A script that is followed; `started` and `ended` are told when."""

    rollout_id: str
    script: Script
    started: Then
    ended: Then
    turn: int = 0


@dataclass
class Engine:
    """See the module. It has served each call that runs for `_served` seconds of work in all, so a
    call ends when that has grown by what it asked for."""

    most: int
    slowdown: float
    open: bool = True  # takes new calls
    stopped: bool = False  # does not go on with those that it has
    busy_s: float = 0.0
    _served: float = 0.0
    _running: list[tuple[float, int, Then]] = field(default_factory=list)
    _waiting: deque[tuple[float, Then]] = field(default_factory=deque)
    _number: count[int] = field(default_factory=count)

    @property
    def running(self) -> int:
        return len(self._running)

    def take(self, seconds: float, then: Then) -> None:
        self._waiting.append((seconds, then))

    def ends_in(self) -> float:
        """Seconds until the next call ends."""
        return (self._running[0][0] - self._served) / self._rate if self._rate else math.inf

    def go_on(self, seconds: float) -> list[Then]:
        """Works, no longer than until a call ends; what follows those that have ended."""
        self._served += seconds * self._rate
        self.busy_s += seconds if self._rate else 0.0
        ended = []
        while self._running and self._running[0][0] - self._served <= TINY_S:
            ended.append(heapq.heappop(self._running)[2])
        return ended

    def let_in(self) -> None:
        while self.open and self._waiting and self.running < self.most:
            seconds, then = self._waiting.popleft()
            heapq.heappush(self._running, (self._served + seconds, next(self._number), then))

    @property
    def _rate(self) -> float:
        """Seconds of work for each call in a second."""
        if self.stopped or not self._running:
            return 0.0
        return 1 / (1 + self.slowdown * (self.running - 1))


class World:
    """See the module."""

    def __init__(self, engines: int, most: int, slowdown: float, concurrency: int) -> None:
        self.now = 0.0
        self.engines = [Engine(most, slowdown) for _ in range(engines)]
        self._router = Router(engines)
        self._events: list[tuple[float, int, Then]] = []
        self._number = count()
        self._places = concurrency
        self._queue: deque[Rollout] = deque()

    def begin(self, rollout: Rollout) -> None:
        """Runs a rollout as soon as there is a place for it."""
        self._queue.append(rollout)
        self._fill_places()

    def advance(self, until: float = math.inf) -> None:
        """Goes to the next event, not beyond `until`.

        Raises:
            ValueError: nothing will ever happen again.
        """
        at = min([until, *(self.now + engine.ends_in() for engine in self.engines)])
        if self._events:
            at = min(at, self._events[0][0])
        if at == math.inf:
            raise ValueError("the simulated run waits for something that does not come")
        ended = [then for e in self.engines for then in e.go_on(max(0.0, at - self.now))]
        self.now = max(self.now, at)
        while self._events and self._events[0][0] <= self.now:
            ended.append(heapq.heappop(self._events)[2])
        for then in ended:
            then()
        for engine in self.engines:
            engine.let_in()

    def spend(self, seconds: float) -> None:
        """Lets `seconds` pass."""
        end = self.now + seconds
        while self.now < end:
            self.advance(end)

    def switch(self, *, open: bool, stopped: bool) -> None:
        """Whether engines take new calls, and whether they leave those that they have."""
        for engine in self.engines:
            engine.open, engine.stopped = open, stopped
            engine.let_in()

    def _after(self, seconds: float, then: Then) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), then))

    def _fill_places(self) -> None:
        while self._queue and self._places:
            self._places -= 1
            rollout = self._queue.popleft()
            rollout.started()
            self._after(rollout.script.start_s, partial(self._call, rollout))

    def _call(self, rollout: Rollout) -> None:
        if rollout.turn == len(rollout.script.turns):
            self._places += 1
            self._fill_places()
            self._after(rollout.script.grading_s, rollout.ended)
            return
        engine = self._router.choose(rollout.rollout_id, self.now)
        assert engine is not None  # none is ever lost here
        self._router.load[engine] += 1
        seconds, _ = rollout.script.turns[rollout.turn]
        self.engines[engine].take(seconds, partial(self._answered, rollout, engine))

    def _answered(self, rollout: Rollout, engine: int) -> None:
        self._router.load[engine] -= 1
        _, tools_s = rollout.script.turns[rollout.turn]
        rollout.turn += 1
        self._after(tools_s, partial(self._call, rollout))
