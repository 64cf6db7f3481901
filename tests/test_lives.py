"""Rollouts as Jobs over several lives of a run, and an API server that goes away: the real store,
launcher and client of Kubernetes, against an API server in memory."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from kube_api import KubeApi
from test_store import make_call, make_spec

from lightning_ray.config import ConfigError, RunConfig, load
from lightning_ray.placement import Device
from lightning_ray.records import Outcome
from lightning_ray.report.console import Console
from lightning_ray.rollouts import harness
from lightning_ray.rollouts.grading import GraderFault
from lightning_ray.rollouts.lifecycle import Attempt
from lightning_ray.rollouts.pods import attempts, manifest
from lightning_ray.rollouts.pods.api import Away
from lightning_ray.rollouts.pods.attempts import Pods, attempts_in_pods, run_id
from lightning_ray.rollouts.pods.launcher import Launcher
from lightning_ray.rollouts.pods.manifest import Frame, Room
from lightning_ray.rollouts.pods.template import JobTemplate, Names
from lightning_ray.run import command, driver, waiting
from lightning_ray.run.stack import Stack
from lightning_ray.run.waiting import ProcessLost, RunError, Waiting
from lightning_ray.store.actor import StoreActor
from lightning_ray.views import RolloutQuery

RUN, KEY = "run", "the key of a room"


def settings(api: KubeApi, folder: Path, *more: str) -> RunConfig:
    return load(
        None,
        [
            "rollout.launcher=kubernetes",
            f"kubernetes.kubeconfig={api.kubeconfig(folder / 'kubeconfig')}",
            "kubernetes.image=agent:1",
            "kubernetes.grade=cluster",
            "task.prepare=null",
            "task.collect=null",
            f"run.dir={folder}",
            *more,
        ],
    )


class Direct:
    """A store actor without Ray, behind the face of its handle."""

    def __init__(self, actor: StoreActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))


class Site:
    """A store with the attempt `r-a0`, and what runs its Jobs."""

    def __init__(self, folder: Path) -> None:
        self.api, self.folder = KubeApi(), folder
        self.store = StoreActor(str(folder / "store"))
        self.attempt = Attempt("r-a0", 0, make_spec())
        self.made: list[Pods] = []

    def pods(self, *kept: str, **more: Any) -> Pods:
        config = settings(self.api, self.folder)
        recipe = harness.load(config.harness.recipe, config.harness.args, config.harness.env)

        async def wait(_: Attempt, ref: Any) -> Any:
            return await ref

        url = "http://gateway"
        pods = Pods(config, Direct(self.store), recipe, url, RUN, list(kept), wait, **more)
        self.made.append(pods)
        pods.start()
        return pods

    async def earlier_life(self) -> str:
        """The attempt has begun, made a call, and its Job runs; the Job's name."""
        await self.store.create_rollouts([make_spec()])
        await self.store.start_attempt("r-a0", "r", 0, "hash", 1.0)
        await self.store.open_room("r-a0", hashlib.sha256(KEY.encode()).hexdigest(), {})
        await self.call("first")
        return self.make("r-a0")

    def make(self, room: str, run: str = RUN) -> str:
        template = JobTemplate(None, "agent:1")
        rendered = template.render(make_spec().task, Names("a", "r", "g", "s", "u"))
        frame = Frame(run, None, 1, 1, 1, 1.0, None)
        job = self.api.make(
            manifest.build(rendered, Room(room, "u", KEY, manifest.AGENT, 1.0), frame)
        )
        name: str = job["metadata"]["name"]
        return name

    async def call(self, name: str) -> None:
        [seqs] = await self.store.record_calls([([make_call(name, [1, 2], [3])], 1)])
        assert isinstance(seqs, list), seqs


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    yield site
    site.api.away = False
    for pods in site.made:
        await pods.stop()
    await site.store.close()
    site.api.shutdown()


async def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


# -- what an earlier life left ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "since", "outcome"),
    [
        ("delivered", "", Outcome.COMPLETED),
        ("", "call", Outcome.COMPLETED),
        ("", "", Outcome.NODE_LOST),
        # It may have sent back what it had when the gateway was away, as soon as it was there.
        ("", "delivered", Outcome.NODE_LOST),
    ],
)
async def test_an_attempt_of_an_earlier_life_counts_if_no_outage_can_have_ended_it(
    site: Site, before: str, since: str, outcome: Outcome
) -> None:
    job = await site.earlier_life()
    if before == "delivered":
        assert await site.store.bring_result("r-a0", KEY, b"what it did") is None
    stood = await site.store.open_attempts()
    # The gateway is there again, and only then whoever adopts the Jobs.
    if since == "call":
        await site.call("second")
    elif since == "delivered":
        assert await site.store.bring_result("r-a0", KEY, b"what it did") is None
    pods = site.pods("r-a0", stood=stood)
    site.api.end(job)
    result = await asyncio.wait_for(pods.resume(site.attempt), 20)
    assert result.outcome is outcome, result


async def test_what_an_earlier_life_left_and_nobody_asks_for_is_ended_in_the_store(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_UNCLAIMED_S", 0.2)
    job = await site.earlier_life()
    pods = site.pods("r-a0")
    await until(lambda: job not in site.api.kinds["jobs"])
    assert not pods.can_resume("r-a0")
    info = await site.store.attempt("r-a0")
    assert info is not None and not info.live  # its key makes no calls
    shown = await site.store.show_rollout("r", False)
    assert shown is not None
    assert (shown.state, shown.tries[0].outcome) == ("queued", Outcome.NODE_LOST)
    assert "nobody asked for it" in (shown.tries[0].detail or "")
    running = await site.store.list_rollouts(RolloutQuery(state="running", limit=5))
    assert running.rollouts == []


@pytest.mark.parametrize("keep_s", [None, 600])
async def test_ended_jobs_of_an_earlier_life_stay_only_if_they_are_kept(
    site: Site, keep_s: int | None
) -> None:
    ended, runs = site.make("r-a0"), site.make("r-a1")
    site.api.end(ended)
    config = settings(site.api, site.folder, f"kubernetes.keep_s={keep_s or 'null'}")
    assert attempts_in_pods(config, RUN) == {"r-a0": True, "r-a1": False}
    launcher = Launcher(config, RUN)
    launcher.start()
    stays = {ended} if keep_s else set()
    await until(lambda: set(site.api.kinds["jobs"]) == stays)
    assert runs not in site.api.kinds["jobs"]
    assert await launcher.stop() == ""  # what is kept is not left over
    assert set(site.api.kinds["jobs"]) == stays


# -- faults ----------------------------------------------------------------------------------------


async def test_a_report_that_cannot_be_read_is_a_fault_of_its_grading_and_ends_no_run(
    site: Site,
) -> None:
    pods = site.pods()
    pods._grading["r-a0"] = set()
    graded = asyncio.ensure_future(pods._in_room(site.attempt, 60.0, {"order": b"{}"}))
    await until(lambda: site.api.kinds["secrets"] or graded.done())
    [(job, secret)] = site.api.kinds["secrets"].items()
    [room] = pods._grading["r-a0"]
    key = secret["stringData"]["key"]
    assert await site.store.bring_result(room, key, b"no report") is None
    site.api.end(job)
    verdict = await asyncio.wait_for(graded, 20)
    assert isinstance(verdict, GraderFault)
    assert "r-a0: the pod's report cannot be read" in verdict.reason


async def test_logs_that_no_node_sends_keep_nobody_from_making_and_deleting_jobs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    launcher = Launcher(settings(site.api, site.folder), RUN)
    launcher.start()
    await launcher.synced()
    monkeypatch.setattr(launcher._api, "log", lambda *pod: back.wait() and b"")
    monkeypatch.setattr(launcher._reconciler, "pod_of", lambda name: ("pod", "agent"))
    reading = [asyncio.ensure_future(launcher.log(f"r-a{n}", 1)) for n in range(60)]
    try:
        await asyncio.sleep(0.1)
        unwanted = site.make("r-a0")
        await until(lambda: unwanted in site.api.kinds["jobs"])
        await until(lambda: unwanted not in site.api.kinds["jobs"])
        assert not any(read.done() for read in reading)
    finally:
        back.set()
        await asyncio.gather(*reading)
        await launcher.stop()


@pytest.mark.parametrize("seen", [True, False])
async def test_a_run_that_ends_while_the_api_server_is_away_says_which_jobs_it_leaves(
    site: Site, seen: bool
) -> None:
    config = settings(site.api, site.folder)
    for room in ("r-a0", "r-a1"):
        site.make(room)
    if not seen:
        site.api.go_away()
    launcher = Launcher(config, RUN)
    launcher.start()
    ends = [asyncio.ensure_future(launcher.adopt(room)) for room in ("r-a0", "r-a1")]
    if seen:
        await launcher.synced()
        site.api.go_away()
    await until(lambda: "has not answered" in launcher.trouble)
    said = await launcher.stop()
    assert said.startswith("2 Jobs are left, since the API server has not answered since ")
    assert f"kubectl -n default delete jobs -l lightning-ray/run={RUN}" in said
    await asyncio.gather(*ends, return_exceptions=True)
    assert all(end.cancelled() for end in ends)
    assert len(site.api.kinds["jobs"]) == 2


# -- an outage while a run starts again ------------------------------------------------------------


def test_who_is_away_is_waited_for_and_who_refuses_is_not(monkeypatch) -> None:
    monkeypatch.setattr(waiting, "AGAIN_S", 0.01)
    said: list[str] = []
    # A server that comes back refuses at first what it cannot look up yet.
    ends = [Away("away"), ConfigError("HTTP 403"), Away("away")]

    def ask() -> str:
        if ends:
            raise ends.pop(0)
        return "answer"

    wait = Waiting(20, said.append)
    assert wait.insist(ask, Away) == "answer"
    assert said == ["away; it is waited for (0 of run.wait_timeout_s=20 s)"]
    ends = [ConfigError("HTTP 403")]
    with pytest.raises(ConfigError, match="HTTP 403"):
        wait.insist(ask, Away)
    ends = [Away("away")] * 100
    with pytest.raises(RunError, match=r"away \(0 of run.wait_timeout_s=0.2 s\)"):
        Waiting(0.2, said.append).insist(ask, Away)


@pytest.mark.parametrize("status", [0, 503, 429])
def test_a_server_that_does_not_answer_is_told_from_one_that_refuses(
    tmp_path: Path, status: int
) -> None:
    api = KubeApi()
    config = settings(api, tmp_path)
    api.away, api.status = not status, status
    with pytest.raises(Away, match="the API server does not answer"):
        attempts_in_pods(config, RUN)
    api.away, api.status = False, 403
    with pytest.raises(ConfigError, match="may not list its Jobs: HTTP 403") as refused:
        attempts_in_pods(config, RUN)
    assert not isinstance(refused.value, Away)
    api.shutdown()


class LastWords:
    def shutdown(self) -> str:
        return "2 Jobs are left"


@pytest.mark.slow
def test_an_outage_while_a_run_goes_on_by_itself_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's bundles are not reached: there, each life ends."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    site, made = Site(tmp_path / "jobs"), list[Stack]()
    (tmp_path / "jobs").mkdir()
    config = settings(site.api, tmp_path / "jobs", "gateway.host=0.0.0.0")
    said = Console("test")
    lines: list[str] = []

    def tell(text: object) -> None:
        lines.append(str(text))
        if "it is waited for" in lines[-1]:
            site.api.away = False

    monkeypatch.setattr(said, "print", tell)

    class Noted(Stack):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    def reserve(_: RunConfig, device: Device | None) -> Any:
        assert device is None
        stack = made[-1]
        if len(made) == 1:
            ray.get(stack.store.create_rollouts.remote([make_spec()]))
            for number in range(3):
                name = f"r-a{number}"
                ray.get(stack.store.start_attempt.remote(name, "r", number, "hash", 1.0))
            ray.get(stack.store.end_attempt.remote("r-a2", Outcome.NODE_LOST, "", 2.0))
            run = run_id(ray.get(stack.store.operator_key.remote()))
            jobs = [site.make(f"r-a{number}", run) for number in range(3)]
            site.api.end(jobs[1])
            site.api.end(jobs[2])  # it has ended in the store, and is kept for who looks at it
            stack._controller = ray.remote(LastWords).remote()
            site.api.go_away()
            raise ProcessLost("the controller is gone")
        raise RunError("far enough")

    monkeypatch.setattr(driver, "Stack", Noted)
    monkeypatch.setattr(driver, "reserve", reserve)
    with pytest.raises(RunError, match="far enough"):
        command._until_done(config, tmp_path, said)
    first, second = made
    assert (first._kept, sorted(second._kept)) == ([], ["r-a0", "r-a1"])
    assert second._stood["r-a0"].calls == 0
    out = "\n".join(lines)
    assert "the API server does not answer" in out and "it is waited for" in out, out
    assert "1 rollouts run on in pods since the run was stopped" in out
    assert "1 rollouts have ended in pods since the run was stopped" in out
    # Nobody had them deleted: the controller was not asked for its last words.
    assert "Jobs are left" not in out
    # One dry run for each set of tasks, of the first life: the second one looks at nothing again.
    assert site.api.looks == 2, site.api.looks
    # Nothing of an earlier life runs: an error at once, whatever comes after.
    site.api.away = True
    fresh = settings(site.api, tmp_path / "jobs", f"run.dir={tmp_path / 'fresh'}")
    began = time.monotonic()
    with pytest.raises(ConfigError, match="the API server does not answer"):
        command._until_done(fresh, tmp_path, said)
    assert time.monotonic() - began < 30
    site.api.shutdown()
