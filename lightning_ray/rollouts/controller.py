"""The actor that runs rollouts: the lifecycle at work on a Ray cluster.

`RolloutController` asks `Lifecycle` what to do and does it: an attempt is a Ray task on any node
(`local.run_attempt`), its end is reported to the store, which says how its model calls went, and a
second task grades it. Whoever wants the results polls `next_finished`.

Invariants: a rollout is in its final state in the store before it is handed out, and is handed out
once, in order; nothing starts after `shutdown`, and what it cancels stays open in the store, for
the run's next life; only the hash of an attempt's key leaves this
actor, except to the attempt itself; a lost worker or node is an outcome, while a failure of the
store or of this code is raised by the next `next_finished`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_ray.config import RunConfig
from lightning_ray.records import FinishedRollout, Json, Outcome, Reward, RolloutSpec, RolloutState
from lightning_ray.rollouts import handle, harness
from lightning_ray.rollouts.grading import (
    Episode,
    GradeRequest,
    GraderFault,
    ask_outside,
    grade,
)
from lightning_ray.rollouts.handle import ControllerStopped
from lightning_ray.rollouts.lifecycle import Attempt, ControllerStatus, Lifecycle, Next, judge
from lightning_ray.rollouts.local import (
    AttemptRequest,
    AttemptResult,
    FamilyError,
    limits,
    run_attempt,
)
from lightning_ray.rollouts.places import in_pod
from lightning_ray.rollouts.sandbox import wanted
from lightning_ray.store.attempts import Known, Open
from lightning_ray.store.keys import hash_key

if TYPE_CHECKING:
    from lightning_ray.rollouts.pods.attempts import Pods

RESULT_EVENT = "result"  # the kind of the event that keeps what task.collect read
_MAX_CONCURRENCY = 1000  # method calls at a time; a long poll must not hold up the others
_INSIST_S = 5.0  # longer than a worker needs to kill a harness and remove its workspace
_SHUTDOWN_S = 30  # a cancelled harness is dead within a second; a node that hangs is not waited for

_run_attempt = ray.remote(max_retries=0)(run_attempt)
_grade = ray.remote(max_retries=0)(grade)


def start(
    config: RunConfig,
    store: Any,
    gateway_url: str,
    run_id: str = "",
    kept: Sequence[str] = (),
    stood: Mapping[str, Open] | None = None,
) -> Any:
    """Starts the controller, which first queues what operators asked an earlier one for; returns
    its actor handle. For `run_id`, `kept` and `stood` see `pods.attempts.Pods`."""
    actor = ray.remote(num_cpus=0, max_concurrency=_MAX_CONCURRENCY)(RolloutController)
    # Where the driver is: only the head's pod may speak to Kubernetes.
    here = ray.get_runtime_context().get_node_id()
    named = actor.options(
        name=handle.name(config),
        namespace=handle.NAMESPACE,
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
    )
    controller = named.remote(config, store, gateway_url, run_id, list(kept), stood)
    controller.submit.remote(store.unfinished.remote())
    return controller


class RolloutController:
    """Runs submitted rollouts against the gateway at `gateway_url`. `store` is the store's actor
    handle.

    Raises:
        RecipeError: the configured harness recipe cannot be used.
    """

    def __init__(
        self,
        config: RunConfig,
        store: Any,
        gateway_url: str,
        run_id: str = "",
        kept: Sequence[str] = (),
        stood: Mapping[str, Open] | None = None,
    ) -> None:
        self._config = config
        self._store = store
        self._gateway_url = gateway_url.rstrip("/")
        self._recipe = harness.load(config.harness.recipe, config.harness.args, config.harness.env)
        self._life = Lifecycle(config.rollout.concurrency, config.rollout.retries)
        self._options = {"num_cpus": config.rollout.cpus, "scheduling_strategy": "SPREAD"}
        self._pods: Pods | None = None
        if config.rollout.launcher != "local":
            # Here, so that other runs do not load Kubernetes' client.
            from lightning_ray.rollouts.pods.attempts import Pods

            self._pods = Pods(
                config, store, self._recipe, self._gateway_url, run_id, kept, self._wait, stood
            )
        self._work: set[asyncio.Task[None]] = set()
        self._driven: dict[str, asyncio.Task[None]] = {}  # by attempt id
        self._refs: dict[str, Any] = {}  # attempt id -> the Ray task that works on it
        self._stopped: set[str] = set()  # attempts that were cancelled and have not ended yet
        self._lacks: dict[str, str] = {}  # node -> what it lacks of the sandbox
        self._ready: list[FinishedRollout] = []
        self._news = asyncio.Event()
        self._failure: BaseException | None = None
        self._closed = False

    async def submit(self, specs: list[RolloutSpec]) -> list[str]:
        """Queues rollouts; those that are queued already, or over, are left alone. Returns the ids
        under which the store knows others than these, which are left alone too.

        Raises:
            ControllerStopped: after `shutdown`.
        """
        if self._closed:
            raise ControllerStopped("the run is ending and takes no more rollouts")
        if self._pods:
            self._pods.start()
        known = await self._store.create_rollouts.remote(specs)
        for spec in specs:
            rollout = known[spec.rollout_id]
            if rollout.same and not rollout.over and not self._adopt(spec, rollout):
                self._life.submit(spec, time.time(), rollout.attempts)
        self._start_more()
        return [rollout_id for rollout_id, rollout in known.items() if not rollout.same]

    async def next_finished(self, wait_s: float) -> list[FinishedRollout]:
        """Rollouts that reached a final state since the last call; waits for one, `wait_s` at
        most."""
        if not self._ready and self._failure is None:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), wait_s)
            except TimeoutError:
                return []
        if self._failure is not None:
            raise self._failure
        taken, self._ready = self._ready, []
        return taken

    async def status(self) -> ControllerStatus:
        trouble = self._pods.trouble if self._pods else ""
        return replace(self._life.status(), trouble=trouble, lacks=dict(self._lacks))

    async def cancel(self, rollout_ids: list[str]) -> list[str]:
        """Ends rollouts that are not over and waits until their harnesses are dead; returns which
        they were."""
        live = set(self._life.live)
        attempts = self._life.cancel(rollout_ids, time.time())
        working = [self._driven[attempt] for attempt in attempts if attempt in self._driven]
        self._stop(attempts)
        await self._publish()
        if working:
            await asyncio.wait(working, timeout=_SHUTDOWN_S)
        return [rollout_id for rollout_id in rollout_ids if rollout_id in live]

    async def shutdown(self) -> str:
        """Cancels everything and waits until the harnesses are dead. Returns what a person must
        know of those that may not be."""
        self._closed = True
        self._stop(self._life.cancel(self._life.live, time.time()))
        await self._publish()
        if self._work:
            _, late = await asyncio.wait(self._work, timeout=_SHUTDOWN_S)
            for task in late:
                task.cancel()
        return await self._pods.stop() if self._pods else ""

    # -- one attempt ----------------------------------------------------------------------------

    def _start_more(self) -> None:
        if self._closed:
            return
        for attempt in self._life.start(time.time()):
            self._begin(attempt)

    def _begin(self, attempt: Attempt, *, resumed: bool = False) -> None:
        task = asyncio.create_task(self._drive(attempt, resumed))
        self._driven[attempt.attempt_id] = task
        self._work.add(task)
        task.add_done_callback(self._done)
        task.add_done_callback(lambda _: self._driven.pop(attempt.attempt_id, None))

    def _adopt(self, spec: RolloutSpec, known: Known) -> bool:
        """Goes on with the attempt of an earlier life whose Job runs on, if there is one."""
        if self._pods is None or known.open is None:
            return False
        if not self._pods.can_resume(f"{spec.rollout_id}-a{known.open}"):
            return False
        if attempt := self._life.adopt(spec, known.open, time.time()):
            self._begin(attempt, resumed=True)
        return True

    def _done(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._news.set()

    async def _drive(self, attempt: Attempt, resumed: bool) -> None:
        """One attempt from its key to its reward."""
        attempt_id = attempt.attempt_id
        if resumed and self._pods:
            ended = await self._pods.resume(attempt)
        else:
            key, pods = secrets.token_urlsafe(32), self._pods_of(attempt)
            key_hash = hash_key(pods.harness_key(key) if pods else key)
            await self._store.start_attempt.remote(
                attempt_id, attempt.spec.rollout_id, attempt.number, key_hash, time.time()
            )
            ended = await self._run(attempt, key)
        if ended.lack:
            self._lacks[ended.node] = ended.lack
        elif ended.node:  # it told of none: a lack may have been for a moment
            self._lacks.pop(ended.node, None)
        summary = await self._store.end_attempt.remote(
            attempt_id, ended.outcome, ended.detail, time.time()
        )
        outcome, detail = judge(ended.outcome, summary.calls, summary.last_fault), ended.detail
        if outcome is not ended.outcome:
            fault = f", last answer HTTP {summary.last_fault}" if summary.last_fault else ""
            detail = f"{ended.outcome}, {detail}; {summary.calls} model calls{fault}"
        leads_to = self._life.attempt_ended(attempt_id, outcome, detail, time.time())
        self._start_more()
        if leads_to is Next.GRADE:
            verdict = await self._reward(attempt, outcome, detail, ended.result)
            if isinstance(verdict, Reward):
                self._life.graded(attempt_id, verdict, time.time())
            else:
                self._life.grader_failed(attempt_id, verdict.outcome, verdict.reason, time.time())
                self._start_more()
        self._stopped.discard(attempt_id)
        await self._publish()

    async def _run(self, attempt: Attempt, key: str) -> AttemptResult:
        if attempt.attempt_id in self._stopped:
            return AttemptResult(Outcome.CANCELLED, "cancelled")
        try:
            pods = self._pods_of(attempt)
            work = pods.run(attempt, key) if pods else self._run_on_node(attempt, key)
            return await work
        except TaskCancelledError:
            return AttemptResult(Outcome.CANCELLED, "cancelled")
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, FamilyError) else error
            return AttemptResult(Outcome.LAUNCH_FAULT, _line(cause, -1))
        except RayError as error:
            return AttemptResult(Outcome.NODE_LOST, f"{type(error).__name__}: {_line(error, 0)}")

    async def _run_on_node(self, attempt: Attempt, key: str) -> AttemptResult:
        config = self._config
        request = AttemptRequest(
            attempt_id=attempt.attempt_id,
            task=attempt.spec.task,
            recipe=self._recipe,
            root_url=f"{self._gateway_url}/rollout/{attempt.attempt_id}",
            model=harness.MODEL_NAME,
            context_tokens=config.context_tokens,
            limits=limits(config),
            log_dir=config.run_dir / "rollouts" / attempt.attempt_id,
            prepare=config.task.prepare,
            collect=config.task.collect,
            keep_workspaces=config.rollout.keep_workspaces,
            api_key=key,
            sandbox=wanted(config),
        )
        result: AttemptResult = await self._wait(
            attempt, _run_attempt.options(**self._options).remote(request)
        )
        return result

    async def _reward(
        self, attempt: Attempt, outcome: Outcome, detail: str, result: Json | None
    ) -> Reward | GraderFault:
        task, attempt_id = self._config.task, attempt.attempt_id
        if self._config.rollout.keep_results and result is not None:
            kept = {"attempt_id": attempt_id, "result": result}
            await self._store.add_event.remote(
                f"{attempt_id}.result", attempt.spec.rollout_id, RESULT_EVENT, kept, time.time()
            )
        grader = task.grader or task.grader_command
        if seen := await self._store.canary.remote(attempt_id):
            return GraderFault(f"{seen}: the agent saw what it must not", Outcome.VOID)
        if grader is None:
            key = await self._store.grader_key.remote(attempt.spec.rollout_id)
            ask_outside(
                self._config.run_dir / "to_grade" / f"{attempt_id}.json",
                {
                    "url": f"{self._gateway_url}/rollout/{attempt.spec.rollout_id}/reward",
                    "key": key,
                    "rollout_id": attempt.spec.rollout_id,
                    "task_id": attempt.spec.task.task_id,
                    "outcome": outcome,
                    "result": result,
                },
            )
            posted = await self._store.wait_reward.remote(
                attempt.spec.rollout_id, task.grader_timeout_s
            )
            return posted or GraderFault(f"no reward was posted within {task.grader_timeout_s:g} s")
        texts, prompt_tokens = await self._store.said.remote(attempt_id)
        if attempt_id in self._stopped:
            return GraderFault("cancelled")
        request = GradeRequest(
            task=attempt.spec.task,
            result=result,
            episode=Episode(
                attempt.spec.rollout_id,
                attempt_id,
                outcome,
                detail,
                tuple(texts),
                attempt.spec.split,
                prompt_tokens,
                task.grader_options,
            ),
            grader=grader,
            limits=limits(self._config, grader=True),
            log=self._config.run_dir / "rollouts" / attempt_id / "grader.log",
            sandbox=wanted(self._config),
        )
        try:
            pods = self._pods_of(attempt)
            if pods and self._config.kubernetes.grade == "job":
                return await pods.grade(attempt, request)
            verdict: Reward | GraderFault = await self._wait(
                attempt, _grade.options(**self._options).remote(request)
            )
            return verdict
        except RayError as error:
            return GraderFault(f"the grader's Ray task failed: {_line(error, -1)}")

    def _pods_of(self, attempt: Attempt) -> Pods | None:
        """What runs the attempt's Jobs; None if it runs on a node of Ray."""
        return self._pods if in_pod(self._config, attempt.spec.task) else None

    async def _wait(self, attempt: Attempt, ref: Any) -> Any:
        """The result of a Ray task, which `cancel` can find meanwhile."""
        self._refs[attempt.attempt_id] = ref
        try:
            return await ref
        finally:
            del self._refs[attempt.attempt_id]

    def _stop(self, attempt_ids: Iterable[str]) -> None:
        for attempt_id in attempt_ids:
            self._stopped.add(attempt_id)
            if self._pods:
                self._pods.cancel(attempt_id)
            if attempt_id in self._refs:
                task = asyncio.create_task(self._insist(attempt_id))
                self._work.add(task)
                task.add_done_callback(self._done)

    async def _insist(self, attempt_id: str) -> None:
        # Not by force: the exception in the worker lets it kill the harness and clean up. A worker
        # that is just beginning the task can miss it, so it is asked again.
        while attempt_id in self._refs:
            ray.cancel(self._refs[attempt_id], force=False)
            await asyncio.sleep(_INSIST_S)

    async def _publish(self) -> None:
        """Stores what is over, then makes it available."""
        for finished in self._life.take_finished():
            if not (self._closed and finished.state is RolloutState.CANCELLED):
                await self._store.finish_rollout.remote(finished)
            self._ready.append(finished)
            self._news.set()


def _line(error: BaseException, number: int) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[number]
