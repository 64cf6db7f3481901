"""Answers that are being made, and who is waiting for them.

An answer is made by a task of its own, so a client that goes away does not stop it: it is
*detached*, and the task goes on for a while in case the client comes back. `InFlight` counts the
listeners; `Answers` finds an answer in the making by its claim.

Invariants: a task is cancelled only if nobody has listened for `DETACHED_S` while the gate was
open (clients are told to come back later while it is closed); a listener that is cancelled leaves
the others alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_ray.gateway.dialects import Answer, ChatRequest, Dialect, Head, Usage
from lightning_ray.records import Call

# How long a generation goes on without a client: longer than any SDK waits before it tries again.
DETACHED_S = 60.0


@dataclass
class InFlight:
    """One answer. `on_detach` is called when the last listener leaves before the end."""

    head: Head
    task: asyncio.Task[Answer]
    on_detach: Callable[[], None]
    is_paused: Callable[[], bool] = lambda: False
    detached_s: float = DETACHED_S
    _listeners: int = 0
    _end: asyncio.TimerHandle | None = field(default=None, repr=False)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Marks the caller as somebody who waits for the answer. Leaving by an exception means
        that it was not delivered."""
        self._listeners += 1
        if self._end:
            self._end.cancel()
            self._end = None
        delivered = False
        try:
            yield
            delivered = True
        finally:
            self._listeners -= 1
            if not delivered and not self._listeners:
                self.on_detach()
                self._await_a_listener()

    async def answer(self) -> Answer:
        """The answer; cancelling this does not cancel its making."""
        return await asyncio.shield(self.task)

    def _await_a_listener(self) -> None:
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(self.detached_s, self._nobody_came)

    def _nobody_came(self) -> None:
        if self.is_paused():
            self._await_a_listener()
        else:
            self.task.cancel()


@dataclass
class Answers:
    """The answers in the making of one gateway replica, by attempt and fingerprint. `is_paused`
    says whether the gate is closed."""

    is_paused: Callable[[], bool] = lambda: False
    _running: dict[tuple[str, str], InFlight] = field(default_factory=dict)

    def find(self, attempt_id: str, request: str) -> InFlight | None:
        """The newest one that is being made for such a request."""
        return self._running.get((attempt_id, request))

    def start(
        self,
        attempt_id: str,
        request: str,
        head: Head,
        making: Coroutine[Any, Any, Answer],
        on_detach: Callable[[], None],
    ) -> InFlight:
        """Starts making an answer."""
        key = (attempt_id, request)
        made = InFlight(head, asyncio.create_task(making), on_detach, self.is_paused)
        self._running[key] = made

        def forget(task: asyncio.Task[Answer]) -> None:
            if self._running.get(key) is made:
                del self._running[key]
            if not task.cancelled():
                task.exception()  # a failure that nobody waits for is not an unhandled one

        made.task.add_done_callback(forget)
        return made

    def __len__(self) -> int:
        return len(self._running)


def answer_of(head: Head, calls: list[Call]) -> Answer:
    """What the client gets for its calls, one for each choice."""
    return Answer(
        head,
        tuple(call.turn for call in calls),
        Usage(
            prompt_tokens=len(calls[0].prompt),
            sampled_tokens=sum(len(call.tokens) for call in calls),
            cached_tokens=max(call.cached_tokens for call in calls),
        ),
    )


async def replay(dialect: Dialect, request: ChatRequest, answer: Answer) -> AsyncIterator[bytes]:
    """The whole stream of an answer that is there."""
    yield dialect.start(request, answer.head)
    for event in dialect.finish(request, answer):
        yield event
