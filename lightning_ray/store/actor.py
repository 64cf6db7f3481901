"""The Ray actor that owns a `RolloutStore`: durable answers, grouped commits, a gate.

Every operation runs on one thread. Calls that arrive while an fsync is under way are written
together by the next one (`Grouped`). If the actor dies, Ray starts it again and it opens the same
folder; what it had answered is on disk. While the disk is full, what could not be written waits and
is tried again each second, and the gate is closed.

Invariants: the calls of one answer are recorded together; a gate that was closed stays closed when
the actor is started again; a full disk fails nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sqlite3
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_ray import canary
from lightning_ray.line import LineEnd
from lightning_ray.records import Call, Outcome, Reward
from lightning_ray.store.attempts import AttemptSummary, Open
from lightning_ray.store.claims import Claims, Opening, Verdict
from lightning_ray.store.depot import Depot
from lightning_ray.store.disk import FULL, disk_fault
from lightning_ray.store.errors import StoreError, StoreLocked
from lightning_ray.store.grouping import Grouped
from lightning_ray.store.queries import Queries
from lightning_ray.store.rollouts import RolloutStore

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Part = TypeVar("_Part")
_Method = Callable[Concatenate[_Part, _P], _R]
_AsyncMethod = Callable[Concatenate["StoreActor", _P], Coroutine[Any, Any, _R]]

# Answers in one commit: bounds the latency of the first of them, not the throughput.
MOST_CALLS_PER_COMMIT = 512
# How long another owner is waited for: a killed actor, or the one of a killed run, is about to go.
LOCKED_S = 30.0
# Between two attempts to write to a full disk, or to open a store that is locked.
AGAIN_S = 1.0
# Why the gate is closed, as harnesses are told.
UPDATING = "The policy is being updated"
NO_ROOM = "The disk of the store is full"


@dataclass(frozen=True)
class Asked:
    """A request that a gateway replica has. `request` is its fingerprint, `samples` the number of
    calls that answer it; the replica has the first `known` calls of the attempt."""

    attempt_id: str
    request: str
    replica: str
    is_retry: bool
    known: int
    samples: int = 1


# Methods of the actor that only pass a call on to a part of the store.
def _stored(method: _Method[RolloutStore, _P, _R]) -> _AsyncMethod[_P, _R]:
    @wraps(method)
    async def passed(self: StoreActor, *args: _P.args, **more: _P.kwargs) -> _R:
        return await self._run(method, *args, **more)

    return passed


def _queried(method: _Method[Queries, _P, _R]) -> _AsyncMethod[_P, _R]:
    @wraps(method)
    async def passed(self: StoreActor, *args: _P.args, **more: _P.kwargs) -> _R:
        return await self._run(lambda store: method(store.queries, *args, **more))

    return passed


def _filed(method: _Method[Depot, _P, _R]) -> _AsyncMethod[_P, _R]:
    @wraps(method)
    async def passed(self: StoreActor, *args: _P.args, **more: _P.kwargs) -> _R:
        return await self._depots(method, self._depot, *args, **more)

    return passed


class StoreActor(LineEnd):
    """Async face of the `RolloutStore` in `directory`; see there for what each method does. All
    raise StoreLocked or CorruptSegment if it cannot be opened, and OSError if the disk fails."""

    LINE = "packed"

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._store: RolloutStore | None = None
        self._opening = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._append: Grouped[list[Call], list[int]] = Grouped(
            self._append_all, MOST_CALLS_PER_COMMIT
        )
        self._rewarded: dict[str, asyncio.Event] = {}
        self._depot = Depot(self._directory / "depot")
        self._claims = Claims()
        self._updating = False
        self._held = 0  # operations that wait for room on the disk
        self._gate = asyncio.Event()
        self._gate.set()

    # -- the gateway's side ---------------------------------------------------------------------

    async def packed(self, method: str, arguments: bytes) -> bytes:
        """Another method's result, as a pickle like its arguments: what a `Line` carries."""
        return pickle.dumps(await getattr(self, method)(*pickle.loads(arguments)), 5)

    async def open_calls(
        self, asked: list[Asked]
    ) -> list[tuple[Opening | None, list[Call]] | StoreError]:
        """What a gateway replica does with each request (None: the gate is closed), and the calls
        of its attempt after the first `known` ones. Or UnknownAttempt, AttemptOver: there is none,
        or it takes no more calls."""
        live = await self._run(_live, [request.attempt_id for request in asked])
        return [
            calls if isinstance(calls, StoreError) else self._open(request, calls)
            for request, calls in zip(asked, live, strict=True)
        ]

    def _open(self, asked: Asked, calls: list[Call]) -> tuple[Opening | None, list[Call]]:
        if not self._gate.is_set():
            return None, []
        opening = self._claims.open(
            asked.attempt_id, asked.request, asked.replica, asked.is_retry, time.monotonic()
        )
        if asked.is_retry and opening.verdict is Verdict.ANSWER:
            # The claims are gone with an earlier life of this actor, the calls are not. Those of
            # one answer follow each other.
            same = [call.call_id for call in calls if call.request == asked.request]
            if again := tuple(same[-asked.samples :]):
                self._claims.recorded(asked.attempt_id, opening.claim_id, again)
                opening = Opening(Verdict.REPLAY, opening.claim_id, again)
        return opening, calls[asked.known :]

    async def detach_call(self, attempt_id: str, claim_id: int) -> None:
        self._claims.detached(attempt_id, claim_id)

    async def drop_call(self, attempt_id: str, claim_id: int) -> None:
        self._claims.dropped(attempt_id, claim_id)

    async def replica_alive(self, replica: str, attempt_ids: list[str]) -> tuple[list[str], str]:
        """A sign of life of a gateway replica. Returns those of its attempts that have ended, and
        why the gate is closed; empty if it is open."""
        self._claims.alive(replica, time.monotonic())
        return await self._run(_ended, attempt_ids), self._closed

    async def close_gate(self) -> None:
        """Model calls that arrive from here on are held, also by a later life of this actor."""
        await self._run(RolloutStore.set_gate, False)
        self._set_gate(updating=True)

    async def open_gate(self) -> None:
        await self._run(RolloutStore.set_gate, True)
        self._set_gate(updating=False)

    async def wait_gate(self, timeout_s: float) -> str:
        """Empty as soon as the gate is open; why it is closed after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gate.wait(), timeout_s)
        return self._closed

    async def health(self) -> tuple[str, list[Path]]:
        """Why nothing is written, empty if all is well; and `RolloutStore.torn`."""
        waits = f"the disk of {self._directory} is full; the run waits until there is room"
        return waits if self._held else "", self._store.torn if self._store else []

    @property
    def _closed(self) -> str:
        return NO_ROOM if self._held else UPDATING if self._updating else ""

    def _set_gate(self, *, updating: bool | None = None, held: int = 0) -> None:
        self._held += held
        self._updating = self._updating if updating is None else updating
        if self._closed:
            self._gate.clear()
        else:
            self._gate.set()

    async def record_calls(
        self, groups: list[tuple[list[Call], int]]
    ) -> list[list[int] | BaseException]:
        """Records the calls of several answers, each with its claim. For each answer the `seq`s of
        its calls, which are on disk, or why not: the attempt is unknown or over (StoreError), or
        the disk fails (OSError)."""
        answers = [self._append(calls) for calls, _ in groups]
        results = await asyncio.gather(*answers, return_exceptions=True)
        for (calls, claim_id), result in zip(groups, results, strict=True):
            if not isinstance(result, BaseException):
                ids = tuple(call.call_id for call in calls)
                self._claims.recorded(calls[0].attempt_id, claim_id, ids)
        return results

    async def _append_all(self, answers: list[list[Call]]) -> list[list[int] | StoreError]:
        calls = [call for answer in answers for call in answer]
        results = iter(await self._run(RolloutStore.append, calls))
        return [_of_one_answer(list(islice(results, len(answer)))) for answer in answers]

    # -- the controller's and the driver's side -------------------------------------------------

    create_rollouts = _stored(RolloutStore.create_rollouts)
    start_attempt = _stored(RolloutStore.start_attempt)

    async def end_attempt(
        self, attempt_id: str, outcome: Outcome, detail: str, ended_at: float
    ) -> AttemptSummary:
        self._claims.ended(attempt_id)
        return await self._run(RolloutStore.end_attempt, attempt_id, outcome, detail, ended_at)

    async def end_orphans(self, ended_at: float, keep: list[str]) -> int:
        await self._depots(self._depot.sweep, keep)
        return await self._run(RolloutStore.end_orphans, ended_at, keep)

    async def open_attempts(self) -> dict[str, Open]:
        calls = await self._opened_calls()
        delivered = await self._depots(self._depot.delivered)
        return {name: Open(count, name in delivered) for name, count in calls.items()}

    _opened_calls = _queried(Queries.open_attempts)
    attempt = _stored(RolloutStore.attempt)
    record_fault = _stored(RolloutStore.record_fault)
    finish_rollout = _stored(RolloutStore.finish_rollout)
    finished = _stored(RolloutStore.finished)

    async def post_reward(self, rollout_id: str, reward: Reward, source: str) -> None:
        await self._run(RolloutStore.post_reward, rollout_id, reward, source)
        self._rewarded.setdefault(rollout_id, asyncio.Event()).set()

    async def wait_reward(self, rollout_id: str, timeout_s: float) -> Reward | None:
        """The rollout's reward as soon as it is there; None after `timeout_s` seconds."""
        event = self._rewarded.setdefault(rollout_id, asyncio.Event())
        reward = await self._run(RolloutStore.reward, rollout_id)
        if reward is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout_s)
            reward = await self._run(RolloutStore.reward, rollout_id)
        self._rewarded.pop(rollout_id, None)
        return reward

    grader_key = _stored(RolloutStore.grader_key)
    operator_key = _stored(RolloutStore.operator_key)
    calls = _stored(RolloutStore.calls)
    texts = _stored(RolloutStore.texts)
    said = _stored(RolloutStore.said)

    # -- files for and from pods: see `Depot` ---------------------------------------------------

    open_room = _filed(Depot.open)
    take_file = _filed(Depot.take)
    opens_room = _filed(Depot.opens)
    bring_result = _filed(Depot.bring)
    room_result = _filed(Depot.result)
    room_file = _filed(Depot.file)
    close_room = _filed(Depot.close)

    async def _depots(self, function: Callable[_P, _R], *args: _P.args, **more: _P.kwargs) -> _R:
        # On threads of their own: megabytes of one pod must not hold up the calls of all others.
        await self._opened()
        return await asyncio.to_thread(function, *args, **more)

    # -- the operator's side: see `Queries` -----------------------------------------------------

    unfinished = _queried(Queries.unfinished)
    list_rollouts = _queried(Queries.rollouts)
    show_rollout = _queried(Queries.rollout)
    list_calls = _queried(Queries.calls)
    add_event = _queried(Queries.add_event)
    note_canary = _queried(Queries.note_canary)
    _noted_canary = _queried(Queries.canary)
    list_events = _queried(Queries.events)

    async def canary(self, attempt_id: str) -> str | None:
        """`Queries.canary`, of what the gateway noted and of the replies."""
        if said := canary.first_seen(await self.texts(attempt_id)):
            await self.note_canary(attempt_id, *said)
        return await self._noted_canary(attempt_id)

    # -------------------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._store is not None:
            await self._run(RolloutStore.close)

    async def _run(
        self,
        function: Callable[Concatenate[RolloutStore, _P], _R],
        *args: _P.args,
        **more: _P.kwargs,
    ) -> _R:
        """What `function` of the store returns; while the disk is full it is tried again."""
        store = await self._opened()
        return await self._insist(lambda: function(store, *args, **more))

    async def _opened(self) -> RolloutStore:
        if self._store is not None:
            return self._store
        async with self._opening:
            if self._store is None:
                store = await self._insist(lambda: RolloutStore(self._directory))
                # No claim of an earlier life has a number of this one.
                self._claims.next_id = (store.epoch << 32) + 1
                self._set_gate(updating=not store.gate_is_open)
                self._store = store
        return self._store

    async def _insist(self, function: Callable[[], _R]) -> _R:
        loop, held, started = asyncio.get_running_loop(), 0, time.monotonic()
        try:
            while True:
                try:
                    return await loop.run_in_executor(self._thread, function)
                except StoreLocked:
                    if self._store is not None or time.monotonic() - started > LOCKED_S:
                        raise
                except (OSError, sqlite3.OperationalError) as error:
                    fault = disk_fault(error, self._directory)
                    if fault is None or fault.errno not in FULL:
                        raise fault or error from error
                    if not held:
                        held = 1
                        self._set_gate(held=1)
                await asyncio.sleep(AGAIN_S)
        finally:
            self._set_gate(held=-held)


def _live(store: RolloutStore, attempt_ids: list[str]) -> list[list[Call] | StoreError]:
    found: list[list[Call] | StoreError] = []
    for attempt_id in attempt_ids:
        try:
            found.append(store.live_calls(attempt_id))
        except StoreError as error:
            found.append(error)
    return found


def _ended(store: RolloutStore, attempt_ids: list[str]) -> list[str]:
    known = [(attempt_id, store.attempt(attempt_id)) for attempt_id in attempt_ids]
    return [attempt_id for attempt_id, attempt in known if not (attempt and attempt.live)]


def _of_one_answer(results: list[int | StoreError]) -> list[int] | StoreError:
    """All calls of an answer belong to one attempt, so all are refused or none."""
    seqs = [result for result in results if not isinstance(result, StoreError)]
    return seqs or next(result for result in results if isinstance(result, StoreError))


def start(directory: Path) -> Any:
    """A handle of a new store actor on this node (the one that has the disk)."""
    actor = ray.remote(StoreActor).options(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=10_000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        ),
    )
    return actor.remote(str(directory))
