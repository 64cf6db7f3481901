"""Waits for Ray actors with a limit, so that nothing hangs in silence.

Invariant: whatever takes longer than `SAY_S` says what it waits for, and what takes longer than the
limit, or has lost its process, is a `ProcessLost`, from which a run goes on at its last checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError

from lightning_ray.config import ConfigError

_Answer = TypeVar("_Answer")
# Seconds of silence. A weight sync of a large model takes less.
SAY_S = 30.0
# Between two looks at what is waited for.
LOOK_S = 1.0
# Between two tries of an engine that Ray starts again, and at first of one that is away.
AGAIN_S = 1.0
# Longest pause between two tries of one that is away.
MOST_AGAIN_S = 30.0


class RunError(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


class ProcessLost(RunError):
    """A process of the run died or does not answer. Started again, the run goes on from its last
    checkpoint."""


def check_nodes(nodes: Set[str], what: str) -> None:
    """Raises ProcessLost if one of these nodes of Ray (ids) is gone: what is bound to it, `what`,
    is started nowhere again, and nobody would notice before it is asked for something."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if nodes - alive:
        raise ProcessLost(f"{what}: the node is gone")


@dataclass
class Waiting:
    """Waits at most `limit_s` seconds for anything; `say` tells the user, `meanwhile` is called
    once a second."""

    limit_s: float
    say: Callable[[str], None]
    meanwhile: Callable[[], None] = lambda: None

    def get(self, ref: Any, what: str) -> Any:
        """The value of one object reference.

        Raises:
            ProcessLost: its actor is gone, or did not answer in time.
        """
        try:
            return self._get(ref, what, time.monotonic())
        except (RayActorError, ActorUnschedulableError) as error:
            raise ProcessLost(f"{what}: {_reason(error)}") from error

    def each(self, actors: list[Any], method: str, *args: Any, what: str) -> list[Any]:
        """Calls a method of every actor, all at the same time. One whose process dies is asked
        again when Ray has started it anew, so the method must bear being called twice.

        Raises:
            ProcessLost: one did not answer in time, or can be started nowhere: the node that it
                belongs to is gone.
        """
        started = time.monotonic()
        refs = [getattr(actor, method).remote(*args) for actor in actors]
        values = []
        for actor, first in zip(actors, refs, strict=True):
            ref = first
            while True:
                try:
                    values.append(self._get(ref, what, started))
                    break
                except ActorUnschedulableError as error:
                    raise ProcessLost(f"{what}: {_reason(error)}") from error
                except RayActorError as error:
                    self._check(what, started, _reason(error))
                    time.sleep(AGAIN_S)
                    ref = getattr(actor, method).remote(*args)
        return values

    def insist(self, ask: Callable[[], _Answer], away: type[ConfigError]) -> _Answer:
        """What `ask` returns; whoever is `away` is asked again, less and less often.

        Raises:
            RunError: it did not come back in time.
            ConfigError: it was not away, and refused.
        """
        started, told, pause = time.monotonic(), -math.inf, 0.0
        while True:
            try:
                return ask()
            except ConfigError as error:
                # One that comes back may refuse what it cannot look up yet.
                if not pause and not isinstance(error, away):
                    raise
                now = time.monotonic()
                waited = f"{now - started:.0f} of run.wait_timeout_s={self.limit_s:g} s"
                if now - started >= self.limit_s:
                    raise RunError(f"{error} ({waited})") from error
                if now - told >= SAY_S:
                    told = now
                    self.say(f"{error}; it is waited for ({waited})")
            self.meanwhile()
            pause = min(2 * pause or AGAIN_S, MOST_AGAIN_S)
            time.sleep(min(pause, started + self.limit_s - now))

    def _get(self, ref: Any, what: str, started: float) -> Any:
        silent_since = started
        while not ray.wait([ref], timeout=min(LOOK_S, self.limit_s))[0]:
            self.meanwhile()
            now = time.monotonic()
            self._check(what, started, "no answer")
            if now - silent_since >= SAY_S:
                silent_since = now
                self.say(f"{what}: still waiting, {now - started:.0f} of {self.limit_s:g} s")
        return ray.get(ref)

    def _check(self, what: str, started: float, reason: str) -> None:
        if time.monotonic() - started >= self.limit_s:
            raise ProcessLost(f"{what}: {reason} within run.wait_timeout_s={self.limit_s:g} s")


def _reason(error: RayError) -> str:
    return f"the process is gone ({str(error).strip().splitlines()[0]})"
