"""Everything that turns tasks into graded rollouts: store, engines, gateway, controller.

`Stack.start` brings them up in the order in which they need each other; `collect` runs rollouts and
returns them when all are in a final state, `submit` and `poll` let them go on meanwhile.
Invariants: a rollout that the store knows as finished is not run again; `stop` ends every harness
before it ends what they talk to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_ray.config import RunConfig
from lightning_ray.engine import actor as engine_actor
from lightning_ray.engine.actor import Drained, Policy
from lightning_ray.engine.courier import EngineDead
from lightning_ray.gateway import deploy
from lightning_ray.placement import Bundles, Device
from lightning_ray.records import (
    Call,
    FinishedRollout,
    Json,
    PolicyVersion,
    RolloutSpec,
    RolloutState,
)
from lightning_ray.report.console import View
from lightning_ray.rollouts import controller
from lightning_ray.rollouts.controller import RESULT_EVENT
from lightning_ray.rollouts.lifecycle import ControllerStatus
from lightning_ray.run.telling import Telling
from lightning_ray.run.waiting import ProcessLost, RunError, Waiting, check_nodes
from lightning_ray.samples import forest
from lightning_ray.store import actor as store_actor
from lightning_ray.store.attempts import Open
from lightning_ray.views import PageQuery

# Seconds between two looks at the controller: how fresh the console is.
POLL_SECONDS = 1.0
# Model calls that one engine actor holds at a time; vLLM queues what it cannot decode yet.
ENGINE_CONCURRENCY = 4096

# Events of a rollout among which its results are: one an attempt, and what operators add meanwhile.
RESULTS_READ = 500
# Longest wait for a process that is told to end.
STOP_S = 60.0

Progress = Callable[[Sequence[FinishedRollout], ControllerStatus], None]


class Stack:
    """See the module. Made by `start`. `say` tells the user what is waited for.

    Raises:
        ProcessLost: from every method, when a process of it died or does not answer. Engines are
            waited for, since Ray starts them again.
    """

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        self.config, self._model_dir, self._run_dir = config, model_dir, run_dir
        self._say, self._trouble, self._torn = say, "", list[Path]()
        self._wait = Waiting(config.run.wait_timeout_s, say, self._look_at_store)
        self.pointer = run_dir / "policy.json"
        self._telling = Telling(say)
        self._run_id, self._kept, self._stood = "", list[str](), dict[str, Open]()
        self.store: Any = None
        self.engines: list[Any] = []
        self._controller: Any = None
        self._serving = False
        self._bound: set[str] = set()  # nodes without which an engine cannot be
        self._awaited: set[str] = set()  # rollouts that run
        self._results: dict[str, FinishedRollout] = {}  # ended, and taken by nobody yet

    def know(self, lacks: Mapping[str, str]) -> None:
        """What nodes lack of the sandbox, which the user was told: it is not told again."""
        self._telling.know(lacks)

    def open_store(self, keep: Callable[[str], bool] = lambda attempt_id: True) -> None:
        """Opens the run's store and ends what a killed run left open, but for attempts in pods that
        are to go on: those which `keep` wants, asked when the store is open.

        Raises:
            StoreLocked: another run uses this run directory.
            CorruptSegment: see there.
        """
        self.store = store_actor.start(self._run_dir / "store")
        self._kept = self._still_running(keep)
        orphans = self.store.end_orphans.remote(time.time(), self._kept)
        self._wait.get(orphans, "opening the store")
        # Rollouts that run on in pods call as soon as there is a gateway, and must not be answered
        # by a model that is on its way to the one of the last checkpoint.
        self._wait.get(self.store.close_gate.remote(), "closing the gate")
        self._look_at_store()

    def start(self, bundles: Bundles, version: PolicyVersion) -> None:
        """Starts the engines (serving the base model as `version`), the gateway and the
        controller. Model calls wait for `open`, or for `load`.

        Raises:
            EngineStartError: vLLM refused the model.
            GatewayStartError: the port is taken.
        """
        self.pointer.unlink(missing_ok=True)
        engine_actor.asleep(self.pointer).unlink(missing_ok=True)
        on_gpu = bundles.device is Device.GPU
        for number in range(self.config.engine.count):
            options = bundles.engine_options(number)
            if isinstance(where := options["scheduling_strategy"], NodeAffinitySchedulingStrategy):
                self._bound.add(where.node_id)
            env = engine_actor.environment(self.config, on_gpu)
            env |= options.pop("runtime_env", {}).get("env_vars", {})
            actor = ray.remote(engine_actor.EngineActor).options(
                **options,
                max_restarts=-1,
                max_concurrency=ENGINE_CONCURRENCY,
                runtime_env={"env_vars": env},
            )
            self.engines.append(
                actor.remote(self.config, str(self._model_dir), str(self.pointer), version, on_gpu)
            )
        # Both take a while, so at the same time.
        ready = [engine.ready.remote() for engine in self.engines]
        self._serving = True
        url = deploy.start(self.config, self._model_dir, self.engines, self.store)
        for one in ready:
            self._wait.get(one, "starting the engines")
        self._controller = controller.start(
            self.config, self.store, url, self._run_id, self._kept, self._stood
        )

    def _still_running(self, keep: Callable[[str], bool]) -> list[str]:
        """Attempts of an earlier life of the run that run on in pods, or ended there and were not
        read."""
        if self.config.rollout.launcher == "local":
            return []
        from lightning_ray.rollouts.pods.api import Away
        from lightning_ray.rollouts.pods.attempts import attempts_in_pods, run_id

        self._run_id = run_id(self._wait.get(self.store.operator_key.remote(), "its key"))
        self._stood = self._wait.get(self.store.open_attempts.remote(), "its open attempts")
        if not self._stood:
            return []
        ask = partial(attempts_in_pods, self.config, self._run_id)
        ended = self._wait.insist(ask, Away)
        kept = [attempt for attempt in self._stood if attempt in ended and keep(attempt)]
        over = sum(ended[attempt] for attempt in kept)
        if over < len(kept):
            self._say(f"{len(kept) - over} rollouts run on in pods since the run was stopped")
        if over:
            self._say(f"{over} rollouts have ended in pods since the run was stopped")
        return kept

    def open(self) -> None:
        """Lets model calls through to what the engines serve."""
        self._wait.get(self.store.open_gate.remote(), "opening the gate")

    def drain(self, within_s: float | None) -> tuple[list[Drained], ControllerStatus]:
        """Closes the gate and lets model calls in flight end; those that have not after `within_s`
        seconds are interrupted (None: all are waited for). Then frees the engines' GPU memory.
        Returns how it went in each engine, and how the rollouts stood."""
        self._wait.get(self.store.close_gate.remote(), "closing the gate")
        engine_actor.asleep(self.pointer).touch()
        drained = self._engines("drain", within_s, what="waiting for model calls to end")
        status = self._controlled("status")
        self._engines("sleep", what="putting the engines to sleep")
        return drained, status

    def feed(
        self,
        version: PolicyVersion,
        doors: Sequence[str],
        limit_s: float,
        verify: bool,
        send: Callable[[], None],
    ) -> None:
        """Has the drained engines take the weights of `version` that `send` sends to `doors` (one
        for each vLLM worker). An engine that does not get them all ends; it is started again, and
        `load` has it read them from disk."""
        each = self.config.engine.tensor_parallel
        taking = [
            engine.receive_policy.remote(
                version, doors[number * each : (number + 1) * each], limit_s, verify
            )
            for number, engine in enumerate(self.engines)
        ]
        send()
        for one in taking:
            try:
                self._wait.get(one, "handing the weights to the engines")
            except (ProcessLost, EngineDead) as error:
                self._say(f"an engine reads the weights from disk, as {error}")

    def load(self, policy: Policy, checksum: str | None) -> None:
        """Wakes every engine, puts new weights into it and opens the gate; with a `checksum`,
        checks that they arrived whole. What it was not fed, it reads from disk."""
        self._wait.get(self.store.close_gate.remote(), "closing the gate")
        self._engines("drain", what="waiting for model calls to end")
        verify = checksum is not None
        for digest in self._engines("load_policy", policy, verify, what="loading the weights"):
            if verify and digest != checksum:
                raise RunError(
                    f"an engine was handed weights with checksum {digest}, "
                    f"the trainer wrote {checksum}; "
                    "the disk or memory is faulty"
                )
        engine_actor.asleep(self.pointer).unlink(missing_ok=True)
        self.open()

    def remember(self, policy: Policy) -> None:
        """Has an engine that is started again serve these weights, whose file is whole."""
        policy.write(self.pointer)

    def _engines(self, method: str, *args: Any, what: str) -> list[Any]:
        return self._wait.each(self.engines, method, *args, what=what)

    # -- rollouts -------------------------------------------------------------------------------

    def submit(self, specs: Sequence[RolloutSpec]) -> None:
        """Has rollouts run; those that the store knows as finished are in `results` at once.

        Raises:
            RunError: the tasks have changed since the run was stopped.
        """
        done = {f.spec.rollout_id: f for f in self.finished(specs)}
        self._results |= done
        fresh = [spec for spec in specs if spec.rollout_id not in done]
        self._awaited |= set(_ids(fresh))
        if others := self._controlled("submit", fresh):
            raise RunError(
                f"rollout {others[0]} was begun with another task: the tasks have changed since "
                "this run was stopped; put them back, or choose another run.name"
            )

    def finished(self, specs: Sequence[RolloutSpec]) -> list[FinishedRollout]:
        """Those of `specs` that the store knows as finished, in the order of `specs`."""
        found = self._wait.get(self.store.finished.remote(_ids(specs)), "asking the store")
        done = {finished.spec.rollout_id: finished for finished in found}
        return [done[rollout_id] for rollout_id in _ids(specs) if rollout_id in done]

    def poll(self) -> ControllerStatus:
        """Waits a moment for rollouts to end; says how all stand."""
        check_nodes(self._bound, "an engine of several GPUs")
        for finished in self._controlled("next_finished", POLL_SECONDS):
            if finished.spec.rollout_id in self._awaited:
                self._awaited.remove(finished.spec.rollout_id)
                self._results[finished.spec.rollout_id] = finished
        self._look_at_store()
        status: ControllerStatus = self._controlled("status")
        self._telling.sandboxes(status.lacks)
        self._telling.pods(status.trouble, time.monotonic())
        return status

    @property
    def results(self) -> list[FinishedRollout]:
        """Rollouts in a final state that nobody has taken."""
        return list(self._results.values())

    def has(self, rollout_ids: Sequence[str]) -> bool:
        """True if all of these are in a final state."""
        return all(rollout_id in self._results for rollout_id in rollout_ids)

    def peek(self, rollout_ids: Sequence[str]) -> list[FinishedRollout]:
        return [self._results[rollout_id] for rollout_id in rollout_ids]

    def take(self, rollout_ids: Sequence[str]) -> list[FinishedRollout]:
        """These rollouts, which `has` promised."""
        return [self._results.pop(rollout_id) for rollout_id in rollout_ids]

    def cancel(self, rollout_ids: Sequence[str]) -> None:
        """Ends those of these rollouts that are not over."""
        self._controlled("cancel", list(rollout_ids))

    def _controlled(self, method: str, *args: Any) -> Any:
        answer = getattr(self._controller, method).remote(*args)
        return self._wait.get(answer, "asking the controller")

    def collect(self, specs: Sequence[RolloutSpec], progress: Progress) -> list[FinishedRollout]:
        """Runs `specs` and returns each in a final state, in the order of `specs`.

        Raises:
            RunError: see `submit` and `check_overdue`.
        """
        ids, started = _ids(specs), time.monotonic()
        self.submit(specs)
        while True:
            status = self.poll()
            progress([self._results[i] for i in ids if i in self._results], status)
            if self.has(ids):
                return self.take(ids)
            self.check_overdue(started, status)

    def check_overdue(self, started: float, status: ControllerStatus) -> None:
        """Raises RunError if a phase that began at `started` has waited for too long."""
        limit = self.config.run.collect_timeout_s
        if time.monotonic() - started > limit:
            raise RunError(
                f"{len(self._awaited)} rollouts did not finish within "
                f"run.collect_timeout_s={limit:g} s, "
                f"among them {min(self._awaited, default='none')} "
                f"({status.running} running, {status.grading} in grading, {status.queued} queued); "
                f"their logs are in {self._run_dir / 'rollouts'}"
            )

    def attempts(self, rollouts: Sequence[FinishedRollout]) -> list[str]:
        """The ids of every attempt of `rollouts`."""
        return [f"{r.spec.rollout_id}-a{n}" for r in rollouts for n in range(r.attempts)]

    def calls(self, rollouts: Sequence[FinishedRollout]) -> dict[str, list[Call]]:
        """The calls of every attempt of `rollouts`, by attempt id."""
        attempts = self.attempts(rollouts)
        found = [self.store.calls.remote(attempt) for attempt in attempts]
        read = (self._wait.get(calls, "reading calls from the store") for calls in found)
        # They come with whole prompts, whose sum grows with the square of the turns.
        return dict(zip(attempts, map(forest.shared, read), strict=True))

    def result(self, rollout: FinishedRollout) -> Json | None:
        """What `task.collect` read of the attempt that counts; None if it is not kept."""
        query = PageQuery(limit=RESULTS_READ)
        page = self._wait.get(
            self.store.list_events.remote(rollout.spec.rollout_id, query), "reading a result"
        )
        for event in page.events if page else ():
            if event.kind == RESULT_EVENT and event.data["attempt_id"] == rollout.attempt_id:
                kept: Json = event.data["result"]
                return kept
        return None

    def _look_at_store(self) -> None:
        """Says what the store has to say: that its disk is full, say, while it is waited for."""
        try:
            trouble, torn = ray.get(self.store.health.remote(), timeout=POLL_SECONDS)
        except RayError:  # it is starting again, or busy
            return
        if trouble != self._trouble:
            self._say(f"store: {trouble or 'there is room again; the run goes on'}")
        for path in set(torn) - set(self._torn):
            self._say(f"store: cut off the unfinished write of a crash, which is kept in {path}")
        self._trouble, self._torn = trouble, torn

    def stop(self, *, leave: bool = False) -> None:
        """Ends harnesses, gateway, engines and the store, in this order; what is gone already, or
        does not answer, is killed. With `leave`, pods run on, for who starts the run again."""
        if self._controller is not None and leave and self.config.rollout.launcher != "local":
            ray.kill(self._controller)
        elif self._controller is not None:
            left = _end(self._controller, self._controller.shutdown.remote())
            if left:
                self._say(f"pods: {left}")
        if self._serving:
            with contextlib.suppress(RayError):
                deploy.stop()
        for engine in self.engines:
            ray.kill(engine)
        if self.store is not None:
            _end(self.store, self.store.close.remote())


def _end(actor: Any, last_words: Any) -> Any:
    said = None
    with contextlib.suppress(RayError):  # a time-out is one, too
        said = ray.get(last_words, timeout=STOP_S)
    ray.kill(actor)
    return said


def _ids(specs: Sequence[RolloutSpec]) -> list[str]:
    return [spec.rollout_id for spec in specs]


def with_counts(view: View, done: Sequence[FinishedRollout], status: ControllerStatus) -> View:
    """`view` with the counts and the rewards of the rollouts of the present phase."""
    rewards = [r.reward for r in done if r.reward is not None]
    return replace(
        view,
        queued=status.queued,
        running=status.running,
        grading=status.grading,
        finished=sum(r.state is RolloutState.FINISHED for r in done),
        failed=sum(r.state is RolloutState.FAILED for r in done),
        reward=sum(r.value for r in rewards) / len(rewards) if rewards else None,
        solve_rate=sum(r.solved for r in rewards) / len(rewards) if rewards else None,
    )
