"""Attempts and gradings in pods, for the controller: what a node does in `local.py`, by Jobs.

An attempt: the task family fills a workspace on a node of Ray; workspace and order go into a room
of the store's depot; a Job is wished; what its pod sent back is read by the family, again on a
node. A grading: the grader says what to run (`grading.advance`), further Jobs of the same template
run it on clean trees, and the grader says what came of it, or what to run next.

Invariants: hidden tests are never in the agent's pod, and the agent's key opens none of their
rooms; each order of a grader has a pod of its own; a pod that was lost while it graded is tried
again, and is no verdict; code that ends its pod is not passed.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from kubernetes.client import ApiException
from ray.exceptions import RayError, RayTaskError

from lightning_ray.config import ConfigError, RunConfig
from lightning_ray.records import Outcome, Reward
from lightning_ray.rollouts import grading
from lightning_ray.rollouts.grading import (
    GradeRequest,
    GraderFault,
    RoomOrder,
    RoomReport,
    RoomRun,
)
from lightning_ray.rollouts.harness import MODEL_NAME, Recipe, RecipeError
from lightning_ray.rollouts.lifecycle import Attempt
from lightning_ray.rollouts.local import AttemptResult
from lightning_ray.rollouts.pods import manifest, staging
from lightning_ray.rollouts.pods.api import OUTAGE, Away
from lightning_ray.rollouts.pods.entry import MOST_SETUP_S
from lightning_ray.rollouts.pods.launcher import Launcher, connect
from lightning_ray.rollouts.pods.manifest import Room
from lightning_ray.rollouts.pods.outcomes import End, finished
from lightning_ray.rollouts.pods.staging import PodLimits, Stage
from lightning_ray.rollouts.pods.template import Names, TemplateFault
from lightning_ray.store.attempts import Open
from lightning_ray.store.keys import hash_key

# An attempt that an earlier life of the run began and that nobody asks for again.
_UNCLAIMED_S = 600.0
# A pod is dead a moment after its Job is deleted; a node that hangs is not waited for.
_DYING_S = 30.0

_pack = ray.remote(max_retries=2)(staging.pack)
_outcome_of = ray.remote(max_retries=2)(staging.outcome_of)
_advance = ray.remote(max_retries=2)(grading.advance)
_room_files = ray.remote(max_retries=2)(staging.room_files)

# Awaits a Ray task on behalf of an attempt, so that the attempt can be cancelled meanwhile.
Wait = Callable[[Attempt, Any], Awaitable[Any]]


def run_id(operator_key: str) -> str:
    """Names a run in labels: the same in every life of its run directory."""
    return hashlib.sha256(f"kubernetes:{operator_key}".encode()).hexdigest()[:16]


def attempts_in_pods(config: RunConfig, run_id: str) -> dict[str, bool]:
    """The attempts of this run whose Jobs are there, and whether these have ended.

    Raises:
        Away: the API server does not answer.
        ConfigError: it refuses to say.
    """
    try:
        jobs, _ = connect(config, run_id).list("jobs", manifest.selector(run_id, manifest.AGENT))
    except ApiException as error:
        why = f"HTTP {error.status} {error.reason}"
        if error.status >= 500 or error.status == 429:  # of a proxy before it, or it is busy
            raise Away(f"kubernetes: the API server does not answer: {why}") from error
        raise ConfigError(f"kubernetes: this run may not list its Jobs: {why}") from error
    except OUTAGE as error:
        raise Away(f"kubernetes: the API server does not answer: {error}") from error
    return {
        room: finished(job)
        for job in jobs
        if "deletionTimestamp" not in (metadata := job["metadata"])
        and (room := (metadata.get("annotations") or {}).get(manifest.ROOM_ANNOTATION))
    }


class Pods:
    """Runs attempts in pods. `kept` are the attempts of an earlier life whose Jobs are there, and
    `stood` says how they stood before the gateway was started again.

    Raises:
        ConfigError: see `Launcher`.
    """

    harness_key = staticmethod(staging.harness_key)

    def __init__(
        self,
        config: RunConfig,
        store: Any,
        recipe: Recipe,
        gateway_url: str,
        run_id: str,
        kept: Sequence[str],
        wait: Wait,
        stood: Mapping[str, Open] | None = None,
    ) -> None:
        self._config, self._store, self._recipe = config, store, recipe
        self._launcher = Launcher(config, run_id)
        self._gateway_url, self._wait = self._launcher.address(gateway_url), wait
        self._kept, self._adopted = kept, dict[str, asyncio.Task[End]]()
        self._stood = stood or {}
        # Attempt id -> the rooms in which it is graded. Who is cancelled is not there any more.
        self._grading: dict[str, set[str]] = {}
        self._options = {"num_cpus": config.rollout.cpus, "scheduling_strategy": "SPREAD"}
        self._late: asyncio.Task[None] | None = None
        self._started = False

    def start(self) -> None:
        """Begins to follow the Jobs, once; those of `kept` are wished from the first moment."""
        if self._started:
            return
        self._started = True
        self._launcher.start()
        for attempt_id in self._kept:
            work = self._launcher.adopt(attempt_id)
            self._adopted[attempt_id] = asyncio.ensure_future(work)
        if self._kept:
            self._late = asyncio.create_task(self._give_up_unclaimed())

    async def run(self, attempt: Attempt, key: str) -> AttemptResult:
        """One attempt from its workspace to its result. `key` opens its room; the harness gets
        `harness_key` of it.

        Raises:
            RayError: the task family failed, a node was lost, or the attempt was cancelled.
        """
        attempt_id, task = attempt.attempt_id, attempt.spec.task
        try:
            stage: Stage | None = None
            if self._config.task.prepare:
                work = _pack.options(**self._options).remote(task, self._config.task.prepare)
                stage = await self._wait(attempt, work)
            names = self._names(attempt)
            rendered = self._launcher.rendered(task, names)
            order = staging.harness_order(
                self._recipe,
                staging.pod_values(
                    url=names.gateway_url,
                    model=MODEL_NAME,
                    task=task,
                    attempt_id=attempt_id,
                    context_tokens=self._config.context_tokens,
                    venv=self._config.kubernetes.harness_venv,
                    recipe=self._recipe,
                ),
                manifest.command_of(rendered),
                manifest.workdir_of(rendered),
                stage,
                self._limits(self._config.rollout.timeout_s),
            )
            files = {"order": order} | ({staging.WORKSPACE: stage.workspace} if stage else {})
            await self._open(attempt_id, key, files)
            program_s = self._config.rollout.timeout_s + (
                MOST_SETUP_S if stage and stage.setup else 0
            )
            room = Room(attempt_id, names.gateway_url, key, manifest.AGENT, program_s)
            end = await self._launcher.run(task, room, names)
            return await self._ended(attempt, end)
        except (TemplateFault, RecipeError) as error:
            return AttemptResult(Outcome.LAUNCH_FAULT, str(error))
        finally:
            await self._close(attempt_id)

    async def resume(self, attempt: Attempt) -> AttemptResult:
        """Waits for the end of an attempt that an earlier life began."""
        attempt_id = attempt.attempt_id
        before = self._stood.get(attempt_id)
        if before is None:
            before = Open(len(await self._store.texts.remote(attempt_id)), delivered=False)
        try:
            result = await self._ended(attempt, await self._adopted.pop(attempt_id))
        except RayError as error:
            result = AttemptResult(Outcome.NODE_LOST, f"{type(error).__name__}: {error}")
        finally:
            await self._close(attempt_id)
        calls = len(await self._store.texts.remote(attempt_id))
        silent = calls == before.calls and not before.delivered
        if result.outcome.caused_by_policy and silent:
            # It may have ended because the gateway was away, however it puts that.
            detail = f"no model call since the run was started again; {result.detail}"
            return replace(result, outcome=Outcome.NODE_LOST, detail=detail)
        return result

    def can_resume(self, attempt_id: str) -> bool:
        return attempt_id in self._adopted

    async def grade(self, attempt: Attempt, request: GradeRequest) -> Reward | GraderFault:
        """The reward, by hidden tests in further pods.

        Raises:
            RayError: a node was lost.
        """
        self._grading[attempt.attempt_id] = set()
        try:
            return await self._graded(attempt, request)
        finally:
            self._grading.pop(attempt.attempt_id, None)

    def cancel(self, attempt_id: str) -> None:
        """Ends the attempt's Jobs."""
        self._launcher.cancel(attempt_id)
        for room in self._grading.pop(attempt_id, ()):
            self._launcher.cancel(room)

    async def stop(self) -> str:
        if self._late:
            self._late.cancel()
        return await self._launcher.stop()

    @property
    def trouble(self) -> str:
        """What a person must know; empty if all is well."""
        return self._launcher.trouble

    # -------------------------------------------------------------------------------------------

    async def _graded(self, attempt: Attempt, request: GradeRequest) -> Reward | GraderFault:
        runs: list[RoomRun] = []
        most_sent = self._config.gateway.max_body_mib << 20
        while True:
            work = _advance.options(**self._options).remote(request, runs)
            answer = await self._wait(attempt, work)
            if not isinstance(answer, list):
                verdict: Reward | GraderFault = answer
                return verdict
            try:
                lay_out = _room_files.options(**self._options).remote(answer, most_sent)
                files = await self._wait(attempt, lay_out)
            except RayTaskError as error:
                return GraderFault(f"what the grader wants cannot be laid out: {_said(error)}")
            reports = await self._carry_out(attempt, answer, files)
            for order, report in zip(answer, reports, strict=True):
                if isinstance(report, GraderFault):
                    return report
                # Without the tree: the grader knows it, and it would travel with each question.
                order = replace(order, files={}, binary={})
                runs.append(RoomRun(order, report))

    async def _carry_out(
        self, attempt: Attempt, orders: list[RoomOrder], files: list[dict[str, bytes]]
    ) -> list[RoomReport | GraderFault]:
        """What came of orders, each in a room of its own."""
        works = [
            asyncio.ensure_future(self._in_room(attempt, order.timeout_s, one))
            for order, one in zip(orders, files, strict=True)
        ]
        try:
            return await asyncio.gather(*works)
        finally:  # where one of them raised, the others are of no use
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _in_room(
        self, attempt: Attempt, timeout_s: float, files: dict[str, bytes]
    ) -> RoomReport | GraderFault:
        fault, ended_it = "", False
        for _ in range(self._config.rollout.retries + 1):
            # The pod's host name has it: whoever runs there learns neither which room this is of a
            # verdict, nor which try.
            room = f"{attempt.attempt_id}.{secrets.token_hex(4)}"
            key = secrets.token_urlsafe(32)
            rooms = self._grading.get(attempt.attempt_id)
            if rooms is None:
                return GraderFault("cancelled")
            rooms.add(room)
            try:
                await self._open(room, key, files)
                names = self._names(attempt, room)
                wanted = Room(room, names.gateway_url, key, manifest.GRADER, timeout_s)
                end = await self._launcher.run(attempt.spec.task, wanted, names)
                result = await self._store.room_result.remote(room)
            finally:
                rooms.discard(room)
                await asyncio.shield(self._close(room))
            if end.outcome is Outcome.CANCELLED:
                return GraderFault("cancelled")
            if result is not None:
                try:
                    return staging.room_report(result)
                except ValueError as error:
                    return GraderFault(f"a pod that graded {attempt.attempt_id}: {error}")
            if end.outcome in (Outcome.OUT_OF_MEMORY, Outcome.OUTPUT_LIMIT):
                # The code under test did that: it is no fault of the room.
                return RoomReport(None, "", end.detail, overran=True)
            fault = f"the pod that graded: {end.outcome}, {end.detail}"
            # Perhaps not by the code under test; another try tells.
            ended_it = end.outcome is Outcome.HARNESS_ERROR
        return RoomReport(None, "", fault, overran=True) if ended_it else GraderFault(fault)

    async def _ended(self, attempt: Attempt, end: End) -> AttemptResult:
        """The result of an attempt whose pod has ended: its log is kept, its workspace read."""
        config, attempt_id = self._config, attempt.attempt_id
        folder = config.run_dir / "rollouts" / attempt_id  # the grader writes there, too
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = await self._launcher.log(attempt_id, config.rollout.output_mib << 20)
        if log is not None:
            (folder / "harness.log").write_bytes(log)
        outcome, detail, read = end.outcome, end.detail, None
        sent = await self._store.room_result.remote(attempt_id)
        if outcome.caused_by_policy and config.task.collect and sent is not None:
            workspace = await self._store.room_file.remote(attempt_id, staging.WORKSPACE)
            work = _outcome_of.options(**self._options)
            try:
                ref = work.remote(attempt.spec.task, workspace, sent, config.task.collect)
                read, problem = await self._wait(attempt, ref)
                if problem:
                    outcome, detail = Outcome.OUTPUT_LIMIT, f"{problem} (harness: {detail})"
            except RayTaskError as error:
                outcome, detail = Outcome.GRADER_FAULT, f"{_said(error)} (harness: {detail})"
        where = "" if end.lack is None else f"pods of {self._launcher.namespace}"
        return AttemptResult(outcome, detail, read, node=where, lack=end.lack or "")

    async def _open(self, room: str, key: str, files: dict[str, bytes]) -> None:
        await self._store.open_room.remote(room, hash_key(key), files)

    async def _close(self, room: str) -> None:
        self._launcher.release(room)
        await self._launcher.gone(room, _DYING_S)
        await self._store.close_room.remote(room)

    def _names(self, attempt: Attempt, room: str = "") -> Names:
        spec = attempt.spec
        return Names(
            attempt=attempt.attempt_id,
            rollout=spec.rollout_id,
            group=spec.group_id,
            split=spec.split,
            gateway_url=f"{self._gateway_url}/rollout/{room or attempt.attempt_id}",
        )

    def _limits(self, timeout_s: float) -> PodLimits:
        config = self._config
        return PodLimits(
            timeout_s, config.rollout.output_mib << 20, config.gateway.max_body_mib << 20
        )

    async def _give_up_unclaimed(self) -> None:
        await asyncio.sleep(_UNCLAIMED_S)
        for attempt_id in list(self._adopted):
            if (work := self._adopted.pop(attempt_id, None)) is None:
                continue  # somebody did while we closed another one
            work.cancel()
            why = "nobody asked for it after the run was started again"
            await self._store.end_attempt.remote(attempt_id, Outcome.NODE_LOST, why, time.time())
            await self._close(attempt_id)


def _said(error: RayTaskError) -> str:
    return (str(error.cause).strip().splitlines() or [type(error.cause).__name__])[-1]
