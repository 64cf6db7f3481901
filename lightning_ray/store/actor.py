"""The Ray actor that owns a `RolloutStore`: durable answers, grouped commits.

Every operation runs on one thread, in the order it arrived. Calls that arrive while an fsync is
under way are written together by the next one (group commit). If the actor dies, Ray starts it
again and it opens the same folder; what it had answered is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_ray.records import Call, FinishedRollout, Outcome, Reward, RolloutSpec
from lightning_ray.store.errors import StoreError
from lightning_ray.store.rollouts import AttemptInfo, AttemptSummary, RolloutStore

# Calls in one commit: bounds the latency of the first of them, not the throughput.
MOST_CALLS_PER_COMMIT = 512


class StoreActor:
    """Async face of a `RolloutStore`; see there for what each method does."""

    def __init__(self, directory: str) -> None:
        self._store = RolloutStore(Path(directory))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._pending: list[tuple[Call, asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._rewarded: dict[str, asyncio.Event] = {}

    async def record_call(self, call: Call) -> None:
        """Returns when the call is on disk.

        Raises:
            StoreError: the attempt is unknown or over.
            OSError: the disk refused.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((call, done))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())
        await done

    async def _flush(self) -> None:
        while self._pending:
            batch = self._pending[:MOST_CALLS_PER_COMMIT]
            del self._pending[: len(batch)]
            try:
                results: Sequence[Exception | None] = await self._run(
                    self._store.append, [c for c, _ in batch]
                )
            except OSError as error:
                results = [error] * len(batch)
            for (_, done), result in zip(batch, results, strict=True):
                if done.cancelled():
                    continue
                if result is None:
                    done.set_result(None)
                else:
                    done.set_exception(result)

    async def create_rollouts(self, specs: list[RolloutSpec]) -> dict[str, int]:
        return await self._run(self._store.create_rollouts, specs)

    async def start_attempt(
        self, attempt_id: str, rollout_id: str, number: int, key_hash: str, started_at: float
    ) -> None:
        await self._run(
            self._store.start_attempt, attempt_id, rollout_id, number, key_hash, started_at
        )

    async def end_attempt(
        self, attempt_id: str, outcome: Outcome, detail: str, ended_at: float
    ) -> AttemptSummary:
        return await self._run(self._store.end_attempt, attempt_id, outcome, detail, ended_at)

    async def end_orphans(self, ended_at: float) -> int:
        return await self._run(self._store.end_orphans, ended_at)

    async def attempt(self, attempt_id: str) -> AttemptInfo | None:
        return await self._run(self._store.attempt, attempt_id)

    async def record_fault(self, attempt_id: str, status: int) -> None:
        await self._run(self._store.record_fault, attempt_id, status)

    async def finish_rollout(self, finished: FinishedRollout) -> None:
        await self._run(self._store.finish_rollout, finished)

    async def finished(self, rollout_ids: list[str]) -> list[FinishedRollout]:
        return await self._run(self._store.finished, rollout_ids)

    async def post_reward(self, rollout_id: str, reward: Reward, source: str) -> None:
        await self._run(self._store.post_reward, rollout_id, reward, source)
        self._rewarded.setdefault(rollout_id, asyncio.Event()).set()

    async def wait_reward(self, rollout_id: str, timeout_s: float) -> Reward | None:
        """The rollout's reward as soon as it is there; None after `timeout_s` seconds."""
        event = self._rewarded.setdefault(rollout_id, asyncio.Event())
        reward = await self._run(self._store.reward, rollout_id)
        if reward is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout_s)
            reward = await self._run(self._store.reward, rollout_id)
        self._rewarded.pop(rollout_id, None)
        return reward

    async def grader_key(self, rollout_id: str) -> str:
        return self._store.grader_key(rollout_id)

    async def calls(self, attempt_id: str) -> list[Call]:
        return await self._run(self._store.calls, attempt_id)

    async def texts(self, attempt_id: str) -> list[str]:
        return await self._run(self._store.texts, attempt_id)

    async def torn_bytes(self) -> int:
        return self._store.torn_bytes

    async def close(self) -> None:
        await self._run(self._store.close)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, partial(function, *args)
        )


def start(directory: Path) -> Any:
    """A handle of a new store actor on this node (the one that has the disk). Raises `StoreError`
    at the first use if another run owns the folder."""
    actor = ray.remote(StoreActor).options(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=3,
        max_concurrency=10_000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        ),
    )
    return actor.remote(str(directory))


__all__ = ["StoreActor", "StoreError", "start"]
