"""Calls of an engine actor, carried in groups.

What a gateway replica wants from an engine goes in *exchanges*: one carries the calls that came
since the last one there, and brings the generations that ended meanwhile back. The engine holds an
exchange until something ends or the next one comes, so a single call is one message, and many
together are few.

`Courier` is the replica's end, `Exchange` the engine's; `Box` is what the engine keeps for one
courier. Invariants: each call gets its own result or error; a call that is cancelled stops in the
engine and leaves the others alone; when the engine dies, also if it is back before anybody noticed,
exactly the calls that were there fail with `EngineDead`; what a courier that fell silent had asked
for is stopped.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import pickle
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from ray.exceptions import RayActorError

from lightning_ray.line import Line, LineEnd, LineLost, portable

log = logging.getLogger(__name__)

# Exchanges of a courier under way: one that the engine holds, and one that relieves it.
MOST_EXCHANGES = 2
# A courier waits for its calls all the time; one that is silent for so long is gone.
SILENT_S = 60.0


class EngineDead(RuntimeError):
    """The engine's process, or vLLM's core, is gone; Ray starts the actor again."""


@dataclass
class Box:
    """The calls of one courier: those that run and, by number, what has ended."""

    running: dict[int, asyncio.Task[Any]] = field(default_factory=dict)
    ended: list[tuple[int, Any]] = field(default_factory=list)
    _held: asyncio.Future[None] | None = None
    _silent: asyncio.TimerHandle | None = None

    def start(self, number: int, making: Coroutine[Any, Any, Any]) -> None:
        task = self.running[number] = asyncio.create_task(making)
        task.add_done_callback(lambda task: self._end(number, task))

    def stop(self, number: int) -> None:
        if task := self.running.get(number):
            task.cancel()

    async def wait(self) -> list[tuple[int, Any]]:
        """What has ended since the last time: at least one, if any is running and nobody else waits
        after this."""
        self._release()
        if self.running and not self.ended:
            held = self._held = asyncio.get_running_loop().create_future()
            await held
        ended, self.ended = self.ended, []
        if self._silent:
            self._silent.cancel()
        self._silent = asyncio.get_running_loop().call_later(SILENT_S, self._abandon)
        return ended

    def _end(self, number: int, task: asyncio.Task[Any]) -> None:
        del self.running[number]
        if not task.cancelled():
            error = task.exception()
            self.ended.append((number, portable(error) if error else task.result()))
        self._release()

    def _release(self) -> None:
        if self._held and not self._held.done():
            self._held.set_result(None)
        self._held = None

    def _abandon(self) -> None:
        if self._held is None:
            for task in self.running.values():
                task.cancel()
            self.ended.clear()


class Exchange(LineEnd):
    """Gives an actor with `generate(prompt, **sampling)` the engine's end."""

    LINE = "exchange"

    @cached_property
    def _boxes(self) -> dict[str, Box]:
        return {}

    @cached_property
    def _life(self) -> str:
        return uuid.uuid4().hex

    async def exchange(self, courier: str, parcel: bytes) -> bytes:
        """Takes calls to start and numbers of calls to stop; returns what has ended, and a name
        that is another one after the actor was started again."""
        starts, stops = pickle.loads(parcel)
        box = self._boxes.setdefault(courier, Box())
        for number, prompt, sampling in starts:
            box.start(number, self.generate(prompt, **sampling))  # type: ignore[attr-defined]
        for number in stops:
            box.stop(number)
        return pickle.dumps((self._life, await box.wait()), 5)


class Courier:
    """Calls `engine`, the handle of an actor that is an `Exchange`."""

    def __init__(self, engine: Any) -> None:
        self._line, self._name, self._life = Line(engine, "exchange"), uuid.uuid4().hex, ""
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._starts: list[tuple[int, np.ndarray, dict[str, Any]]] = []
        self._stops: list[int] = []
        self._numbers, self._sent = 0, 0  # calls so far, and those that are in an exchange
        self._exchanges: set[asyncio.Task[None]] = set()
        self._scheduled = False

    async def generate(self, prompt: np.ndarray, sampling: dict[str, Any]) -> Any:
        """What the engine's `generate` returns or raises.

        Raises:
            EngineDead: the engine was lost.
        """
        self._numbers += 1
        number = self._numbers
        done = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._starts.append((number, prompt, sampling))
        self._schedule()
        try:
            return await done
        except asyncio.CancelledError:
            self._waiting.pop(number, None)
            self._stops.append(number)
            self._schedule()
            raise

    def _schedule(self) -> None:
        """Sends soon, so that what happens at one time goes together."""
        if not self._scheduled and len(self._exchanges) < MOST_EXCHANGES:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._scheduled = False
        starts, stops, before = self._starts, self._stops, self._sent
        self._starts, self._stops, self._sent = [], [], self._numbers
        # In a context of its own: see `gateway.service`.
        task = asyncio.get_running_loop().create_task(
            self._exchange((starts, stops), before, self._sent), context=contextvars.Context()
        )
        self._exchanges.add(task)
        task.add_done_callback(self._over)

    async def _exchange(self, parcel: Any, before: int, sent: int) -> None:
        try:
            packed = pickle.dumps(parcel, 5)
            life, ended = pickle.loads(await self._line.send(self._name, packed))
        except (RayActorError, LineLost) as error:
            self._life = ""
            self._lose(sent, str(error))
            return
        if self._life not in ("", life):  # it knows only what came with this exchange
            self._lose(before, "it was started again")
        self._life = life
        for number, result in ended:
            self._settle(number, result)

    def _lose(self, last: int, reason: str) -> None:
        for number in [number for number in self._waiting if number <= last]:
            self._settle(number, EngineDead(reason))

    def _settle(self, number: int, result: Any) -> None:
        done = self._waiting.pop(number, None)
        if done is None or done.done():
            return  # nobody waits for it any longer
        if isinstance(result, BaseException):
            done.set_exception(result)
        else:
            done.set_result(result)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._exchanges.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("an exchange with an engine failed", exc_info=error)
            self._lose(self._sent, str(error))
        if self._starts or self._stops or (self._waiting and not self._exchanges):
            self._schedule()
