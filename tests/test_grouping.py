"""Group commit."""

from __future__ import annotations

import asyncio

import pytest

from lightning_ray.store.grouping import Grouped


class Slow:
    """Takes a moment for each message, and remembers what was in it."""

    def __init__(self) -> None:
        self.messages: list[list[int]] = []

    async def send(self, items: list[int]) -> list[int | Exception]:
        self.messages.append(items)
        await asyncio.sleep(0.01)
        if 13 in items:
            raise OSError("no disk")
        return [item * 2 if item >= 0 else ValueError(str(item)) for item in items]


async def test_what_arrives_while_a_message_is_under_way_goes_together_in_the_next_one():
    slow = Slow()
    double = Grouped(slow.send, 3)
    first = double(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await asyncio.gather(first, *map(double, [2, 3, 4, 5])) == [2, 4, 6, 8, 10]
    assert slow.messages == [[1], [2, 3, 4], [5]]


async def test_an_error_of_one_item_is_nobody_elses_and_a_failed_message_is_everybodys():
    double = Grouped(Slow().send, 8)
    results = await asyncio.gather(*map(double, [1, -2, 3]), return_exceptions=True)
    assert results[::2] == [2, 6] and isinstance(results[1], ValueError)
    results = await asyncio.gather(*map(double, [1, 13]), return_exceptions=True)
    assert [type(result) for result in results] == [OSError, OSError]
    assert await double(4) == 8


async def test_a_waiter_that_is_cancelled_leaves_the_others_alone():
    double = Grouped(Slow().send, 8)
    waiters = [double(item) for item in (1, 2)]
    await asyncio.sleep(0.005)
    waiters[0].cancel()
    assert await waiters[1] == 4
    with pytest.raises(asyncio.CancelledError):
        await waiters[0]
