"""Group commit: what arrives while a message is under way goes together in the next one.

A single item is sent at once; under load a message carries many, and costs little more than one.
Invariants: items are sent in the order in which they came; each gets its own result or error; a
waiter that is cancelled leaves the others alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Grouped(Generic[Item, Result]):
    """`send` takes a list of items and gives for each a result, or the exception that its waiter
    gets; what it raises, all of them get. At most `most` items go together."""

    def __init__(
        self, send: Callable[[list[Item]], Awaitable[Sequence[Result | BaseException]]], most: int
    ) -> None:
        self._send, self._most = send, most
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._sending: asyncio.Task[None] | None = None

    def __call__(self, item: Item) -> asyncio.Future[Result]:
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        return done

    async def _send_all(self) -> None:
        while self._waiting:
            group = self._waiting[: self._most]
            del self._waiting[: len(group)]
            results: Sequence[Result | BaseException]
            try:
                results = await self._send([item for item, _ in group])
            except Exception as error:  # the waiters' to handle
                results = [error] * len(group)
            for (_, done), result in zip(group, results, strict=True):
                if done.cancelled():
                    continue
                if isinstance(result, BaseException):
                    done.set_exception(result)
                else:
                    done.set_result(result)
