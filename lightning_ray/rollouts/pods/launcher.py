"""Runs attempts as Kubernetes Jobs: the reconciler's actions carried out, its news brought in.

`run` wishes a Job and waits for its end; a thread follows the Jobs of this run and another their
pods; a loop does what the reconciler says, in worker threads. All state that decides is in
`Reconciler`; after a restart it comes back from the labels of what is there.

Invariants: a Job lives until `release`, then it and its Secret are deleted; an API server that is
away delays, and ends nothing; a Job that the server refuses for good ends with the server's words
and the template's line.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from kubernetes.client import ApiException

from lightning_ray.config import RunConfig
from lightning_ray.records import Json, Outcome, Task
from lightning_ray.rollouts.pods import freedoms, manifest
from lightning_ray.rollouts.pods.api import OUTAGE, Api, Cluster, Follower
from lightning_ray.rollouts.pods.manifest import GRADER, Frame, Room
from lightning_ray.rollouts.pods.outcomes import End, Patience
from lightning_ray.rollouts.pods.podman.api import Podman
from lightning_ray.rollouts.pods.reconcile import (
    Action,
    Create,
    Delete,
    Finish,
    Kind,
    Reconciler,
)
from lightning_ray.rollouts.pods.template import JobTemplate, Names

_WORKERS = 8  # requests to the API server at a time
# Logs at a time, beside these: that of a pod whose node is gone takes half a minute to be refused.
_READERS = 8
_TICK_S = 0.5  # longest wait for news
_LOOK_S = 1.0  # between two looks at what only time changes: all Jobs are looked at
_STOP_S = 20.0  # for the API server to have deleted what is left
_GRACE_S = 120.0  # for staging and sending back, on top of a program's time and its start
_FOR_GOOD = frozenset(
    {400, 403, 404, 405, 413, 415, 422}
)  # statuses that another try will not change

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Wanted:
    job: Json
    secret: Mapping[str, str]
    end: asyncio.Future[End]


class Launcher:
    """The Jobs of one run. `run_id` is the same in every life of the run.

    Raises:
        ConfigError: no cluster, or a template that cannot be used.
    """

    def __init__(self, config: RunConfig, run_id: str) -> None:
        settings, rollout = config.kubernetes, config.rollout
        self._api = connect(config, run_id)
        self._template = JobTemplate(settings.template, settings.image)
        self._selector = manifest.selector(run_id)
        self.namespace = self._api.namespace
        self._frame = Frame(
            run_id=run_id,
            owner=self._api.owner(),
            cpus=rollout.cpus,
            memory_mib=rollout.memory_mib,
            disk_mib=rollout.disk_mib,
            spare_s=settings.start_timeout_s + _GRACE_S,
            keep_s=settings.keep_s,
            python=settings.python,
        )
        patience = Patience(settings.start_timeout_s, settings.fault_timeout_s)
        keep = settings.keep_s is not None  # Kubernetes deletes them then
        self._reconciler = Reconciler(
            patience, settings.max_pods, settings.creates_per_s, keep=keep
        )
        self._wanted: dict[str, _Wanted] = {}
        self._cancelled: set[str] = set()  # also before they are wished
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="kubernetes")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kubernetes-logs")
        self._news = asyncio.Event()
        self._away: dict[Kind, tuple[str, float]] = {}
        self._followers: list[Follower] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to follow what is there. Call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        kinds: tuple[Kind, ...] = ("jobs", "pods")
        for kind in kinds:
            self._followers.append(self._follow(kind))
        self._spawn(self._reconcile())

    def address(self, gateway_url: str) -> str:
        """Where pods reach the gateway, which is at `gateway_url` for us.

        Raises:
            ConfigError: they cannot.
        """
        return self._api.address(gateway_url)

    async def synced(self) -> None:
        """Waits until it is known what there is, of earlier lives of the run as well."""
        while not self._reconciler.synced:
            await asyncio.sleep(_TICK_S / 5)

    @property
    def place(self) -> str:
        """What rollouts are, and where."""
        return self._api.place

    def check(self, task: Task) -> list[str]:
        """Has the template filled for `task` and the API server look at it, without making
        anything. Returns what a person should know.

        Raises:
            TemplateFault: what is wrong, with the line of the template.
            ConfigError: the API server forbids it.
            OUTAGE: it does not answer.
        """
        room = Room("check", "http://gateway", "", "check", 1.0)
        job = self._build(task, room, Names("a", "r", "g", "s", "u"))
        try:
            warned = [f"{self._api.called} warns: {text}" for text in self._api.dry_run(job)]
        except ApiException as error:
            raise self._template.explain(error) from error
        weak = "; ".join(freedoms.weaknesses(job))
        said = [f"the template gives pods more than they need: {weak}"] if weak else []
        return said + warned

    def rendered(self, task: Task, names: Names) -> Json:
        """The template for a task, as the user wrote it."""
        return self._template.render(task, names)

    async def run(self, task: Task, room: Room, names: Names) -> End:
        """Runs a Job to its end.

        Raises:
            TemplateFault: the template cannot be filled for this task.
        """
        job = self._build(task, room, names)
        return await self._until_end(room.name, job, room.secret, urgent=room.role == GRADER)

    async def adopt(self, room: str) -> End:
        """Waits for the end of a Job that an earlier life of this run made."""
        return await self._until_end(room, {}, {}, there=True)

    def cancel(self, room: str) -> None:
        """Ends the Job of this room, if it runs: whoever waits for it is told."""
        name = self._name(room)
        self._cancelled.add(name)
        wanted = self._wanted.get(name)
        if wanted and not wanted.end.done():
            wanted.end.set_result(End(Outcome.CANCELLED, "cancelled"))

    def release(self, room: str) -> None:
        """Nobody needs the Job of this room any more: it is deleted, unless ended ones are kept."""
        name = self._name(room)
        wanted = self._wanted.pop(name, None)
        self._cancelled.discard(name)
        ended = wanted and wanted.end.done() and not wanted.end.cancelled()
        keep = ended and self._frame.keep_s is not None
        if keep and wanted and wanted.end.result().outcome is not Outcome.CANCELLED:
            self._reconciler.forget(name)
        else:
            self._reconciler.release(name)
        self._news.set()

    async def gone(self, room: str, within_s: float) -> None:
        """Waits until nothing of a released room runs, `within_s` seconds at most."""
        deadline = time.monotonic() + within_s
        while self._reconciler.runs(self._name(room)) and time.monotonic() < deadline:
            await asyncio.sleep(_TICK_S / 5)

    async def log(self, room: str, most_bytes: int) -> bytes | None:
        """What the pod wrote; None if nobody knows any more, or nobody says it in a few tries."""
        pod = self._reconciler.pod_of(self._name(room))
        if pod is None:
            return None
        for again_s in (1.0, 3.0, None):
            try:
                return await self._in_thread(lambda: self._api.log(*pod, most_bytes), self._readers)
            except (ApiException, *OUTAGE) as error:
                if getattr(error, "status", None) in (403, 404) or again_s is None:
                    break
                await asyncio.sleep(again_s)
        return None

    @property
    def trouble(self) -> str:
        """What a person must know: that the API server is away, or what pods wait for."""
        for problem, since in self._away.values():
            clock = time.strftime("%H:%M:%S", time.localtime(since))
            return f"{self._api.called} has not answered since {clock} ({problem})"
        return self._reconciler.trouble(time.monotonic())

    async def stop(self) -> str:
        """Deletes all Jobs of the run, as far as the API server lets us, and stops following.
        Returns what a person must know of those that are left; empty if none are."""
        for name in list(self._wanted):
            self._wanted.pop(name).end.cancel()
            self._reconciler.release(name)
        deadline = time.monotonic() + _STOP_S
        while self._reconciler.left and not self._away and time.monotonic() < deadline:
            self._news.set()
            await asyncio.sleep(_TICK_S / 5)
        for follower in self._followers:
            follower.stop()
        for task in self._tasks:
            task.cancel()
        await self._in_thread(self._api.close)
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        left = self._reconciler.left
        why = f", since {self.trouble}" if self._away else ""
        delete = self._api.removal(self._selector)
        if not left:
            return ""
        return (
            f"{left} Jobs are left{why}. The same command finds them if it goes on; else each ends "
            f"at its deadline, or at once with: {delete}"
        )

    # -------------------------------------------------------------------------------------------

    def _build(self, task: Task, room: Room, names: Names) -> Json:
        return manifest.build(self._template.render(task, names), room, self._frame)

    def _name(self, room: str) -> str:
        return manifest.job_name(self._frame.run_id, room)

    async def _until_end(
        self,
        room: str,
        job: Json,
        secret: Mapping[str, str],
        *,
        there: bool = False,
        urgent: bool = False,
    ) -> End:
        name = self._name(room)
        if name in self._cancelled:
            return End(Outcome.CANCELLED, "cancelled")
        end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._wanted[name] = _Wanted(job, secret, end)
        self._reconciler.want(name, time.monotonic(), there=there, urgent=urgent)
        self._news.set()
        return await end

    async def _reconcile(self) -> None:
        """Does what there is to do, whenever there is news and after each tick."""
        last = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _TICK_S)
            self._news.clear()
            now = time.monotonic()
            everything = now - last >= _LOOK_S
            last = now if everything else last
            for action in self._reconciler.actions(now, everything=everything):
                self._do(action)

    def _do(self, action: Action) -> None:
        wanted = self._wanted.get(action.name)
        match action:
            case Finish(_, end):
                if wanted and not wanted.end.done():
                    wanted.end.set_result(end)
            case Delete(name, uid):
                self._spawn(self._delete(name, uid))
            case Create(name) if wanted:
                self._spawn(self._create(name, wanted))

    async def _create(self, name: str, wanted: _Wanted) -> None:
        try:
            job = await self._in_thread(lambda: self._make(wanted))
            self._reconciler.created(name, job, time.monotonic())
        except ApiException as error:
            # A quota is a matter of waiting, and no one's fault.
            quota = error.status == 403 and "quota" in str(error.body)
            for_good = error.status in _FOR_GOOD and not quota
            problem = str(self._template.explain(error))
            self._reconciler.refused(name, problem, time.monotonic(), for_good=for_good)
        except OUTAGE as error:
            problem = f"{self._api.called}: {error}"
            self._reconciler.refused(name, problem, time.monotonic(), for_good=False)
        self._news.set()

    def _make(self, wanted: _Wanted) -> Json:
        """Makes the Job and then its Secret. Both may be there, if an answer was lost."""
        metadata = wanted.job["metadata"]
        try:
            job = self._api.create_job(wanted.job)
        except ApiException as error:
            if error.status != 409:
                raise
            try:
                job = self._api.read_job(metadata["name"])
            except ApiException:
                raise error from None  # the conflict was another one, a quota's say
            if (job["metadata"].get("labels") or {}).get(manifest.RUN_LABEL) != self._frame.run_id:
                raise
        self._api.create_secret(manifest.secret(wanted.job, job["metadata"]["uid"], wanted.secret))
        return job

    async def _delete(self, name: str, uid: str) -> None:
        pod = self._reconciler.pod_of(name)
        try:
            await self._in_thread(lambda: self._api.delete_job(name, uid))
            if pod:  # at once: nothing in it has anything to save
                await self._in_thread(lambda: self._api.delete_pod(pod[0]))
        except (ApiException, *OUTAGE):
            await asyncio.sleep(_TICK_S)
            self._reconciler.not_deleted(name)

    async def _in_thread(
        self, function: Callable[[], _Result], threads: ThreadPoolExecutor | None = None
    ) -> _Result:
        assert self._loop is not None
        return await self._loop.run_in_executor(threads or self._workers, function)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of ours: whoever waits must not wait for ever.
            for wanted in self._wanted.values():
                if not wanted.end.done():
                    wanted.end.set_exception(error)

    def _follow(self, kind: Kind) -> Follower:
        def soon(function: Callable[..., None], *args: object) -> None:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop is closed: we are ending
                self._loop.call_soon_threadsafe(function, *args)

        def listed(objects: list[Json], asked_at: float) -> None:
            self._reconciler.listed(kind, objects, asked_at)
            self._news.set()

        def event(type: str, thing: Json) -> None:
            self._reconciler.event(kind, type, thing)
            self._news.set()

        def away(problem: str) -> None:
            if problem:
                since = self._away.get(kind, ("", time.time()))[1]
                self._away[kind] = problem, since
                self._reconciler.lost(kind)
            else:
                self._away.pop(kind, None)

        follower = Follower(
            self._api,
            kind,
            self._selector,
            lambda objects, asked_at: soon(listed, objects, asked_at),
            lambda type, thing: soon(event, type, thing),
            lambda problem: soon(away, problem),
        )
        follower.start()
        return follower


def connect(config: RunConfig, run_id: str) -> Cluster:
    """What the Jobs of a run are made on.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    if config.rollout.launcher == "podman":
        return Podman(run_id)
    return Api(config.kubernetes)
