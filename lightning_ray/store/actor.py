"""The Ray actor that owns a `RolloutStore`: durable answers, grouped commits.

Every operation runs on one thread, in the order it arrived. Calls that arrive while an fsync is
under way are written together by the next one (`Grouped`). If the actor dies, Ray starts it
again and it opens the same folder; what it had answered is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_ray.records import Call, FinishedRollout, Json, Outcome, Reward, RolloutSpec
from lightning_ray.store.attempts import AttemptInfo, AttemptSummary, Known
from lightning_ray.store.claims import Claims, Opening, Verdict
from lightning_ray.store.errors import StoreError
from lightning_ray.store.grouping import Grouped
from lightning_ray.store.rollouts import RolloutStore
from lightning_ray.views import (
    CallPage,
    CallQuery,
    Event,
    EventPage,
    PageQuery,
    RolloutDetail,
    RolloutPage,
    RolloutQuery,
)

# Calls in one commit: bounds the latency of the first of them, not the throughput.
MOST_CALLS_PER_COMMIT = 512


@dataclass(frozen=True)
class Asked:
    """A request that a gateway replica has. `request` is its fingerprint; the replica has the first
    `known` calls of the attempt."""

    attempt_id: str
    request: str
    replica: str
    is_retry: bool
    known: int


class StoreActor:
    """Async face of a `RolloutStore`; see there for what each method does."""

    def __init__(self, directory: str) -> None:
        self._store = RolloutStore(Path(directory))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._append: Grouped[Call, int] = Grouped(
            partial(self._run, self._store.append), MOST_CALLS_PER_COMMIT
        )
        self._rewarded: dict[str, asyncio.Event] = {}
        self._claims = Claims()
        self._gate = asyncio.Event()
        self._gate.set()

    # -- the gateway's side ---------------------------------------------------------------------

    async def packed(self, method: str, argument: bytes) -> bytes:
        """Another method's result for one argument, both as pickles: Ray pickles each object apart,
        with hooks in Python, which takes longer than all else that a replica's messages need."""
        return pickle.dumps(await getattr(self, method)(pickle.loads(argument)), 5)

    async def open_calls(
        self, asked: list[Asked]
    ) -> list[tuple[Opening | None, list[Call]] | StoreError]:
        """What a gateway replica does with each request (None: the gate is closed), and the calls
        of its attempt after the first `known` ones. Or UnknownAttempt, AttemptOver: there is none,
        or it takes no more calls."""
        live = await self._run(self._live, [request.attempt_id for request in asked])
        return [
            calls if isinstance(calls, StoreError) else self._open(request, calls)
            for request, calls in zip(asked, live, strict=True)
        ]

    def _live(self, attempt_ids: list[str]) -> list[list[Call] | StoreError]:
        found: list[list[Call] | StoreError] = []
        for attempt_id in attempt_ids:
            try:
                found.append(self._store.live_calls(attempt_id))
            except StoreError as error:
                found.append(error)
        return found

    def _open(self, asked: Asked, calls: list[Call]) -> tuple[Opening | None, list[Call]]:
        if not self._gate.is_set():
            return None, []
        opening = self._claims.open(
            asked.attempt_id, asked.request, asked.replica, asked.is_retry, time.monotonic()
        )
        if asked.is_retry and opening.verdict is Verdict.ANSWER:
            # The claims are gone with an earlier life of this actor, the calls are not.
            again = tuple(call.call_id for call in calls if call.request == asked.request)
            if again:
                self._claims.recorded(asked.attempt_id, opening.claim_id, again)
                opening = Opening(Verdict.REPLAY, opening.claim_id, again)
        return opening, calls[asked.known :]

    async def detach_call(self, attempt_id: str, claim_id: int) -> None:
        self._claims.detached(attempt_id, claim_id)

    async def drop_call(self, attempt_id: str, claim_id: int) -> None:
        self._claims.dropped(attempt_id, claim_id)

    async def replica_alive(self, replica: str, attempt_ids: list[str]) -> tuple[list[str], bool]:
        """A sign of life of a gateway replica. Returns those of its attempts that have ended, and
        whether the gate is open."""
        self._claims.alive(replica, time.monotonic())
        return await self._run(self._ended, attempt_ids), self._gate.is_set()

    def _ended(self, attempt_ids: list[str]) -> list[str]:
        known = [(attempt_id, self._store.attempt(attempt_id)) for attempt_id in attempt_ids]
        return [attempt_id for attempt_id, attempt in known if not (attempt and attempt.live)]

    async def close_gate(self) -> None:
        """Model calls that arrive from here on are held."""
        self._gate.clear()

    async def open_gate(self) -> None:
        self._gate.set()

    async def wait_gate(self, timeout_s: float) -> bool:
        """True as soon as the gate is open, False after `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._gate.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def record_calls(
        self, groups: list[tuple[list[Call], int]]
    ) -> list[list[int] | BaseException]:
        """Records the calls of several answers, each with its claim. For each answer the `seq`s of
        its calls, which are on disk, or why not: the attempt is unknown or over (StoreError), or
        the disk refused (OSError)."""
        return await asyncio.gather(*starmap(self._record, groups), return_exceptions=True)

    async def _record(self, calls: list[Call], claim_id: int) -> list[int]:
        recorded = list(await asyncio.gather(*map(self._append, calls)))
        ids = tuple(call.call_id for call in calls)
        self._claims.recorded(calls[0].attempt_id, claim_id, ids)
        return recorded

    # -- the controller's and the driver's side -------------------------------------------------

    async def create_rollouts(self, specs: list[RolloutSpec]) -> dict[str, Known]:
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
        self._claims.ended(attempt_id)
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

    async def operator_key(self) -> str:
        return self._store.operator_key()

    async def calls(self, attempt_id: str) -> list[Call]:
        return await self._run(self._store.calls, attempt_id)

    async def texts(self, attempt_id: str) -> list[str]:
        return await self._run(self._store.texts, attempt_id)

    # -- the operator's side: see `Queries` -----------------------------------------------------

    async def unfinished(self) -> list[RolloutSpec]:
        return await self._run(self._store.queries.unfinished)

    async def list_rollouts(self, query: RolloutQuery) -> RolloutPage:
        return await self._run(self._store.queries.rollouts, query)

    async def show_rollout(self, rollout_id: str, with_fields: bool) -> RolloutDetail | None:
        return await self._run(self._store.queries.rollout, rollout_id, with_fields)

    async def list_calls(self, rollout_id: str, query: CallQuery) -> CallPage | None:
        return await self._run(self._store.queries.calls, rollout_id, query)

    async def add_event(
        self, event_id: str, rollout_id: str, kind: str, data: Json, time: float
    ) -> Event | None:
        return await self._run(
            self._store.queries.add_event, event_id, rollout_id, kind, data, time
        )

    async def list_events(self, rollout_id: str, query: PageQuery) -> EventPage | None:
        return await self._run(self._store.queries.events, rollout_id, query)

    # -------------------------------------------------------------------------------------------

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
