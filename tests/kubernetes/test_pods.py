"""Rollouts as Jobs on a real API server: controller, gateway and store as in a run, an engine that
says what it is told, and a shell script as harness."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import support
from control_plane import Cluster
from kubernetes import client
from lossy import lossy
from support import Running
from swe import images
from swe.attacks import ATTACKS

from lightning_ray.config import RunConfig, load
from lightning_ray.records import FinishedRollout, Json, Outcome, Reward, RolloutSpec, Split, Task
from lightning_ray.rollouts import controller
from lightning_ray.rollouts.grading import Episode, RoomOrder, RoomReport
from lightning_ray.rollouts.pods import manifest
from lightning_ray.rollouts.pods.launcher import Launcher
from lightning_ray.rollouts.pods.manifest import Room
from lightning_ray.rollouts.pods.template import Names
from lightning_ray.tasks.swe import examination, offline, sources
from lightning_ray.tasks.swe.evidence import Verdict

pytestmark = pytest.mark.slow

# What the agent does is said by its task. It asks the model once, with nothing but its environment.
HARNESS = """
import json, os, pathlib, signal, sys, time, urllib.error, urllib.request
task = sys.argv[1]
call = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "m", "messages": [{"role": "user", "content": task}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
if task != "silent":
    print(json.load(urllib.request.urlopen(call))["choices"][0]["message"]["content"])
pathlib.Path("made.txt").write_text(pathlib.Path("given.txt").read_text().upper())
pathlib.Path("gone.txt").unlink()
pathlib.Path("link").symlink_to("/etc/passwd")
environ = pathlib.Path("/proc/1/environ")
try:
    pathlib.Path("peeked.txt").write_text(str("LIGHTNING_RAY_KEY" in environ.read_text()))
except PermissionError:
    pathlib.Path("peeked.txt").write_text("refused")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP):
    os.kill(1, number)
forged = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"][:-3] + "/files/result", b"forged", call.headers, method="PUT"
)
try:
    pathlib.Path("forged.txt").write_text(str(urllib.request.urlopen(forged).status))
except urllib.error.HTTPError as error:
    pathlib.Path("forged.txt").write_text(str(error.code))
if task == "sleep":
    time.sleep(600)
if task.startswith("wait "):
    _, path, again = task.split()
    while not os.path.exists(path):
        time.sleep(0.1)
    if again == "again":
        urllib.request.urlopen(call)
if task == "noise":
    print("x" * (3 << 20))
if task == "eat":
    bytearray(1 << 30)
if task == "fill":
    pathlib.Path("big.bin").write_bytes(bytes(4 << 20))
if task == "overfill":
    pathlib.Path("big.bin").write_bytes(bytes(40 << 20))
    time.sleep(600)
sys.exit(3 if task == "fail" else 0)
"""


def prepare(task: Task, workspace: Path) -> None:
    (workspace / "given.txt").write_text(task.fields["given"])
    (workspace / "gone.txt").write_text("soon")
    (workspace / "harness.py").write_text(HARNESS)


def collect(task: Task, workspace: Path) -> Json:
    link = workspace / "link"
    return {
        "made": (workspace / "made.txt").read_text(),
        "gone": not (workspace / "gone.txt").exists(),
        "peeked": (workspace / "peeked.txt").read_text(),
        "forged": (workspace / "forged.txt").read_text(),
        "link": str(link.readlink()) if link.is_symlink() else None,
    }


GRADER = """
import os, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
secret = channel.makefile().readline().strip()
made = open("made.txt").read()
print("graded", made)
channel.sendall((secret + " " + made).encode())
sys.exit(0 if made.isupper() else 1)
"""


def grade(task: Task, result: Json | None, episode: Episode) -> Reward:
    raise AssertionError("it is graded in a pod")


def plan(task: Task, result: Json | None) -> RoomOrder | None:
    if result is None:
        return None
    say = task.fields.get("secret", "nonce") + "\n"
    return RoomOrder(
        files={"made.txt": result["made"]},
        argv=["{python}", "-I", "-c", GRADER, "{fd}"],
        env={},
        say=say,
        timeout_s=20,
    )


def judge(
    task: Task,
    result: Json | None,
    episode: Episode,
    order: RoomOrder | None,
    report: RoomReport | None,
) -> Reward:
    if result is None or report is None:
        return Reward(0.0, False)
    solved = report.status == 0 and report.said == "nonce " + task.fields["given"].upper()
    facts = {"link": result["link"] == "/etc/passwd", "gone": result["gone"]}
    facts |= {"peeked": result["peeked"] == "True", "forged": result["forged"] != "401"}
    return Reward(float(solved), solved, {name: float(fact) for name, fact in facts.items()})


RECIPE = {
    "name": "shell",
    # The real one: a virtual environment below /tmp would be hidden by the pod's own.
    "command": [os.path.realpath(sys.executable), "harness.py", "{task}"],
    "env": {"OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{api_key}"},
}


class Site:
    """A gateway, a store and a controller whose rollouts run in `cluster`."""

    def __init__(self, running: Running, cluster: Cluster, folder: Path, *settings: str) -> None:
        self.cluster, self.running, self.folder = cluster, running, folder
        folder.mkdir(parents=True, exist_ok=True)
        recipe = folder / "recipe.yaml"
        recipe.write_text(json.dumps(RECIPE))
        here = "test_pods"
        self.config: RunConfig = load(
            None,
            [
                f"run.dir={folder}",
                "model.max_model_len=600",
                "sampling.max_tokens=100",
                f"gateway.port={running.config.gateway.port}",
                "gateway.max_body_mib=1",
                f"harness.recipe={recipe}",
                "rollout.launcher=kubernetes",
                "rollout.concurrency=300",
                "rollout.retries=0",
                "rollout.timeout_s=60",
                "rollout.output_mib=1",
                "rollout.cpus=0.5",
                "rollout.memory_mib=1024",
                f"kubernetes.kubeconfig={cluster.kubeconfig()}",
                "kubernetes.image=python",
                f"kubernetes.harness_venv={sys.prefix}",
                "kubernetes.fault_timeout_s=4",
                "kubernetes.start_timeout_s=8",
                f"task.prepare={here}:prepare",
                f"task.collect={here}:collect",
                f"task.grader={here}:grade",
                *settings,
            ],
        )
        self.start()

    def start(self, kept: tuple[str, ...] = ()) -> None:
        self.controller = controller.start(
            self.config, self.running.store, self.running.url, self.folder.name, kept
        )

    def submit(self, *tasks: str, name: str = "", **fields: Any) -> list[RolloutSpec]:
        specs = [
            RolloutSpec(
                f"{self.folder.name}-{name}{number}",
                "g",
                Task(f"t{number}", task, {"given": "hello", **fields}),
                Split.TRAIN,
                1,
            )
            for number, task in enumerate(tasks)
        ]
        ray.get(self.controller.submit.remote(specs))
        return specs

    def results(self, count: int, seconds: float = 90) -> dict[str, FinishedRollout]:
        """The rollouts that end, by id."""
        found: dict[str, FinishedRollout] = {}
        deadline = time.monotonic() + seconds
        while len(found) < count:
            status = ray.get(self.controller.status.remote())
            assert time.monotonic() < deadline, (status, found)
            for finished in ray.get(self.controller.next_finished.remote(1.0)):
                found[finished.spec.rollout_id] = finished
        return found

    def one(self, task: str, **fields: Any) -> FinishedRollout:
        [spec] = self.submit(task, name=f"{task}-", **fields)
        return self.results(1)[spec.rollout_id]

    def jobs(self) -> list[Any]:
        return list(self.cluster.batch.list_namespaced_job("default").items)

    def calls(self, spec: RolloutSpec) -> int:
        """Model calls of the first attempt."""
        return len(ray.get(self.running.store.calls.remote(f"{spec.rollout_id}-a0")))

    def pods(self) -> list[Any]:
        return list(self.cluster.core.list_namespaced_pod("default").items)

    def stop(self) -> None:
        if self.controller is None:
            return
        ray.get(self.controller.shutdown.remote())
        ray.kill(self.controller)
        self.controller = None


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    ray.cloudpickle.register_pickle_by_value(support)
    # Ray's workers import the task family below.
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    running = Running(tmp_path_factory.mktemp("gateway"), [["done"]])
    running.start()
    yield running
    from lightning_ray.gateway import deploy

    deploy.stop()
    ray.shutdown()
    patch.undo()


@pytest.fixture
def site(running: Running, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[Site] = []

    def make(*settings: str, name: str = "run") -> Site:
        made.append(Site(running, cluster, tmp_path / f"{tmp_path.name}-{name}", *settings))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def flags() -> Iterator[Path]:
    """A folder that pods see: their /tmp is their own."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def test_a_harness_runs_in_a_pod_and_is_graded_in_another_one(site) -> None:
    here = site()
    ended = here.one("work")
    assert ended.outcome is Outcome.COMPLETED, ended.detail
    assert ended.reward is not None and ended.reward.solved, ended
    assert ended.reward.metrics == {"link": 1.0, "gone": 1.0, "peeked": 0.0, "forged": 0.0}
    calls = ray.get(here.running.store.calls.remote(ended.attempt_id))
    assert [call.text for call in calls] == ["done"]
    log = here.config.run_dir / "rollouts" / ended.attempt_id / "harness.log"
    assert log.read_text() == "done\n"
    here.cluster.until(lambda: not here.jobs() and not here.pods())
    assert not here.cluster.core.list_namespaced_secret(
        "default", label_selector="lightning-ray/run"
    ).items


def test_each_task_says_whether_it_runs_in_a_pod_or_on_a_node(site, tmp_path) -> None:
    functions = [f"task.{name}=both_ways:{name}" for name in ("prepare", "collect")]
    here = site("rollout.launcher=task", "task.grader=both_ways:grade", *functions)
    [pod] = here.submit("work", name="pod", launcher="kubernetes")
    [node] = here.submit("work", name="node", launcher="local")
    [unsaid] = here.submit("work", name="unsaid")
    ended = here.results(3)
    found = {}
    for spec in (pod, node, unsaid):
        one = ended[spec.rollout_id]
        assert one.outcome is Outcome.COMPLETED and one.reward is not None, one
        assert one.reward.solved, one
        found[spec.rollout_id] = one.reward.metrics["in_pod"]
        assert here.calls(spec) == 1
    assert list(found.values()) == [1.0, 0.0, 0.0]
    # What was ever made in this namespace, by the job controller's own account.
    events = here.cluster.core.list_namespaced_event("default").items
    made = {one.involved_object.name for one in events if one.involved_object.kind == "Job"}
    names = [
        manifest.job_name(here.folder.name, f"{one.rollout_id}-a0") for one in (pod, node, unsaid)
    ]
    assert made & set(names) == {names[0]}


TEMPLATE = """
apiVersion: batch/v1
kind: Job
metadata: {labels: {team: blue}}
spec:
  template:
    spec:
      nodeSelector: {kubernetes.io/hostname: "{{ task.fields.node }}"}
      terminationGracePeriodSeconds: 0
      tolerations:
        - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute,
           tolerationSeconds: "{{ task.fields.patience }}"}
        - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute,
           tolerationSeconds: "{{ task.fields.patience }}"}
      containers:
        - name: agent
          image: "{{ task.fields.image }}"
          env:
            - name: SETTING
              valueFrom:
                secretKeyRef: {name: "{{ task.fields.get('secret', 'setting') }}", key: s}
"""


@pytest.fixture
def template(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """TEMPLATE as a file, and the Secret that it names."""
    secret = {"metadata": {"name": "setting"}, "stringData": {"s": "value"}}
    cluster.core.create_namespaced_secret("default", secret)
    path = tmp_path / "job.yaml"
    path.write_text(TEMPLATE)
    yield path
    cluster.core.delete_namespaced_secret("setting", "default")


def test_each_fault_of_a_pod_is_the_outcome_that_it_means(site, template) -> None:
    here = site(
        f"kubernetes.template={template}",
        "rollout.timeout_s=12",
        "rollout.disk_mib=32",
        "kubernetes.start_timeout_s=20",
    )
    asked = {
        # by what the harness does
        "fail": (("fail", "python"), Outcome.HARNESS_ERROR, "exit status 3"),
        "silent": (("silent", "python"), Outcome.LAUNCH_FAULT, "0 model calls"),
        "noise": (("noise", "python"), Outcome.OUTPUT_LIMIT, "output"),
        "fill": (("fill", "python"), Outcome.OUTPUT_LIMIT, "larger than 1048576 bytes"),
        "full": (("overfill", "python"), Outcome.OUTPUT_LIMIT, "exceeds the limit"),
        "sleep": (("sleep", "python"), Outcome.TIMEOUT, "time"),
        "oom": (("work", "oom"), Outcome.OUT_OF_MEMORY, "OOMKilled"),
        # by what happens to it
        "missing": (("work", "missing:1"), Outcome.LAUNCH_FAULT, "ImagePullBackOff"),
        "invalid": (("work", "invalid::"), Outcome.LAUNCH_FAULT, "InvalidImageName"),
        "unset": (("work", "python"), Outcome.LAUNCH_FAULT, "secret 'unknown' not found"),
        "evicted": (("work", "evict"), Outcome.NODE_LOST, "low on resource"),
        "nowhere": (("work", "python"), Outcome.LAUNCH_FAULT, "Unschedulable"),
    }
    for name, ((task, image), _, _) in asked.items():
        node = "no-such-node" if name == "nowhere" else "node-0"
        more = {"secret": "unknown"} if name == "unset" else {}
        here.submit(task, name=name, image=image, node=node, patience=1, **more)
    here.cluster.until(lambda: "Unschedulable" in ray.get(here.controller.status.remote()).trouble)
    ended = here.results(len(asked))
    for name, (_, outcome, said) in asked.items():
        one = ended[f"{here.folder.name}-{name}0"]
        assert (one.outcome, said in one.detail) == (outcome, True), (name, one)
    # What the policy caused is graded: each of these has a reward.
    graded = {name for name in asked if ended[f"{here.folder.name}-{name}0"].reward is not None}
    assert graded == {"fail", "noise", "fill", "full", "sleep", "oom"}


def test_a_pod_that_a_more_important_one_displaces_is_a_lost_node(site, template, flags) -> None:
    here = site(f"kubernetes.template={template}")
    scheduling = client.SchedulingV1Api()
    first = {"metadata": {"name": "first"}, "value": 1000}
    scheduling.create_priority_class(first)
    here.cluster.start_node("node-1", CPUS="1")
    try:
        [spec] = here.submit(f"wait {flags}/go no", image="python", node="node-1", patience=60)
        here.cluster.until(lambda: here.calls(spec))
        container = {"name": "c", "image": "python", "command": ["sleep", "600"]}
        container["resources"] = {"requests": {"cpu": "900m"}}
        selector = {"kubernetes.io/hostname": "node-1"}
        wanted = {"priorityClassName": "first", "nodeSelector": selector, "containers": [container]}
        here.cluster.core.create_namespaced_pod(
            "default", {"metadata": {"name": "important"}, "spec": wanted}
        )
        ended = here.results(1)[spec.rollout_id]
        events = here.cluster.core.list_namespaced_event("default").items
        assert "Preempted" in {event.reason for event in events}
        assert ended.outcome is Outcome.NODE_LOST, ended
        assert here.calls(spec) == 1
    finally:
        here.cluster.core.delete_namespaced_pod("important", "default", grace_period_seconds=0)
        here.cluster.kill("node-1")
        here.cluster.core.delete_node("node-1")
        scheduling.delete_priority_class("first")


def test_a_job_past_its_deadline_is_no_doing_of_the_harness(site, template, flags) -> None:
    """Its own time limit is shorter, so here somebody else has shortened the Job's."""
    here = site(f"kubernetes.template={template}", "kubernetes.start_timeout_s=60")
    asked = {"image": "python", "patience": 1}
    [ran] = here.submit(f"wait {flags}/go no", name="ran", node="node-0", **asked)
    [never] = here.submit("work", name="never", node="no-such-node", **asked)
    here.cluster.until(lambda: here.calls(ran) and len(here.pods()) == 2)
    for job in here.jobs():
        here.cluster.batch.patch_namespaced_job(
            job.metadata.name, "default", {"spec": {"activeDeadlineSeconds": 1}}
        )
    ended = here.results(2)
    found = {spec.rollout_id: ended[spec.rollout_id] for spec in (ran, never)}
    assert found[ran.rollout_id].outcome is Outcome.NODE_LOST, found
    assert found[never.rollout_id].outcome is Outcome.LAUNCH_FAULT, found
    assert all("deadline of its Job" in one.detail for one in found.values()), found


def test_no_more_jobs_at_a_time_than_the_cap(site) -> None:
    here = site("kubernetes.max_pods=20", "kubernetes.grade=cluster", "task.grader=null")
    most = 0
    here.submit(*["silent"] * 200)
    ended: dict[str, FinishedRollout] = {}
    deadline = time.monotonic() + 240
    while len(ended) < 200:
        assert time.monotonic() < deadline, len(ended)
        found = ray.get(here.controller.next_finished.remote(0.2))
        ended |= {one.spec.rollout_id: one for one in found}
        alive = [pod for pod in here.pods() if pod.status.phase in ("Pending", "Running")]
        most = max(most, len(alive))
    assert 10 <= most <= 20
    assert {one.outcome for one in ended.values()} == {Outcome.LAUNCH_FAULT}
    others = [one.detail for one in ended.values() if "0 model calls" not in one.detail]
    assert not others


def test_what_somebody_deletes_is_a_lost_node_and_no_harness_runs_twice(site, flags) -> None:
    here = site()
    [job] = here.submit(f"wait {flags}/go no", name="job")
    [pod] = here.submit(f"wait {flags}/go no", name="pod")
    here.cluster.until(lambda: [p.status.phase for p in here.pods()] == ["Running"] * 2)
    here.cluster.until(lambda: all(here.calls(s) for s in (job, pod)))
    for one in here.jobs():
        if "job0" in one.metadata.name:
            here.cluster.batch.delete_namespaced_job(
                one.metadata.name, "default", propagation_policy="Background"
            )
    for one in here.pods():
        if "pod0" in one.metadata.name:
            here.cluster.core.delete_namespaced_pod(one.metadata.name, "default")
    ended = here.results(2)
    assert {one.outcome for one in ended.values()} == {Outcome.NODE_LOST}, ended
    assert [here.calls(spec) for spec in (job, pod)] == [1, 1]


def test_the_api_server_dies_and_nothing_is_lost(site, flags) -> None:
    here = site("rollout.timeout_s=150")
    specs = here.submit(*[f"wait {flags}/go again"] * 4)
    here.cluster.until(lambda: all(here.calls(spec) for spec in specs))
    here.cluster.kill("kube-apiserver")
    late = here.submit("work", "work", name="late")
    here.cluster.until(
        lambda: "has not answered" in ray.get(here.controller.status.remote()).trouble
    )
    (flags / "go").touch()
    here.cluster.start_api()
    # A watch from before is refused: all must be listed anew.
    here.cluster.compact()
    ended = here.results(6)
    assert {one.outcome for one in ended.values()} == {Outcome.COMPLETED}, ended
    assert all(one.reward and one.reward.solved for one in ended.values())
    assert [here.calls(spec) for spec in [*specs, *late]] == [2, 2, 2, 2, 1, 1]
    assert ray.get(here.controller.status.remote()).trouble == ""


def test_an_answer_that_is_lost_makes_no_second_job(site, cluster) -> None:
    """What was made is found by the conflict (409) with the next try."""

    def scheduled() -> set[str]:
        events = cluster.core.list_namespaced_event("default").items
        return {e.involved_object.name for e in events if e.reason == "Scheduled"}

    before = scheduled()
    with lossy(cluster.kubeconfig(), "jobs", "secrets") as (kubeconfig, made):
        here = site(f"kubernetes.kubeconfig={kubeconfig}")
        ended = here.one("work")
        assert ended.outcome is Outcome.COMPLETED, ended
        assert ended.reward is not None and ended.reward.solved
        assert len(ray.get(here.running.store.calls.remote(ended.attempt_id))) == 1
        # The harness's Job and that of its grader, and what was asked for twice.
        assert made["jobs"] > 2 and made["secrets"] > 2
        assert len(scheduled() - before) == 2, scheduled() - before
        here.stop()


def test_what_owns_the_controllers_pod_owns_its_jobs_and_takes_them_with_it(
    cluster, monkeypatch
) -> None:
    """As a RayCluster owns its head. A ConfigMap stands for it."""
    core = cluster.core
    owner = core.create_namespaced_config_map("default", {"metadata": {"name": "owner"}})
    named = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid}
    head = {"name": "head", "ownerReferences": [{**named, "controller": True}]}
    container = {"name": "c", "image": "python", "command": ["sleep", "600"]}
    core.create_namespaced_pod("default", {"metadata": head, "spec": {"containers": [container]}})
    # As in that pod.
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("HOSTNAME", "head")
    settings = [f"kubernetes.kubeconfig={cluster.kubeconfig()}", "kubernetes.image=python"]
    config = load(None, ["rollout.launcher=kubernetes", *settings])

    def jobs() -> list[Any]:
        return list(cluster.batch.list_namespaced_job("default").items)

    async def make() -> None:
        launcher = Launcher(config, "owned")
        launcher.start()
        room = Room("r", "http://127.0.0.1:9", "key", manifest.AGENT, 60)
        names = Names("r", "r", "g", "train", "http://127.0.0.1:9")
        running = asyncio.ensure_future(launcher.run(Task("t", "work", {}), room, names))
        while not jobs():
            await asyncio.sleep(0.1)
        running.cancel()

    asyncio.run(make())
    [job] = jobs()
    assert [one.uid for one in job.metadata.owner_references] == [owner.metadata.uid]
    core.delete_namespaced_config_map("owner", "default")
    cluster.until(lambda: not jobs())
    pods = f"job-name={job.metadata.name}"
    cluster.until(lambda: not core.list_namespaced_pod("default", label_selector=pods).items)


def test_a_controller_that_starts_again_adopts_its_jobs(site, flags) -> None:
    here = site("rollout.timeout_s=150")
    [again] = here.submit(f"wait {flags}/go again", name="again")
    [quiet] = here.submit(f"wait {flags}/go no", name="quiet")
    [stray] = here.submit(f"wait {flags}/never no", name="stray")
    every = [again, quiet, stray]
    here.cluster.until(lambda: all(here.calls(spec) for spec in every))
    names = {job.metadata.name for job in here.jobs()}
    ray.kill(here.controller)
    kept = [f"{spec.rollout_id}-a0" for spec in (again, quiet)]
    ray.get(here.running.store.end_orphans.remote(time.time(), kept))
    here.start(tuple(kept))
    assert ray.get(here.controller.submit.remote([again, quiet])) == []
    # Nobody wants the third one any more.
    here.cluster.until(lambda: len(here.jobs()) == 2)
    assert {job.metadata.name for job in here.jobs()} < names
    (flags / "go").touch()
    ended = here.results(2)
    one = ended[again.rollout_id]
    assert (one.outcome, one.attempts, here.calls(again)) == (Outcome.COMPLETED, 1, 2), one
    assert one.reward is not None and one.reward.solved
    # It may have given up because the gateway was away: nobody can tell.
    assert ended[quiet.rollout_id].outcome is Outcome.NODE_LOST
    assert "no model call since" in ended[quiet.rollout_id].detail


def test_a_node_that_dies_is_a_lost_node(site, template) -> None:
    here = site(f"kubernetes.template={template}")
    here.cluster.start_node("node-1")
    try:
        [spec] = here.submit("sleep", image="python", node="node-1", patience=1)
        here.cluster.until(lambda: here.calls(spec))
    finally:
        here.cluster.kill("node-1")
    ended = here.results(1)[spec.rollout_id]
    assert ended.outcome is Outcome.NODE_LOST, ended
    here.cluster.core.delete_node("node-1")


def test_a_cancelled_rollout_ends_its_pod(site) -> None:
    here = site()
    [spec] = here.submit("sleep")
    here.cluster.until(lambda: here.calls(spec))
    assert ray.get(here.controller.cancel.remote([spec.rollout_id])) == [spec.rollout_id]
    assert [pod for pod in here.pods() if pod.status.phase == "Running"] == []
    here.cluster.until(lambda: not here.jobs())


def test_a_cancelled_rollout_ends_all_pods_that_grade_it(site) -> None:
    here = site("task.grader=sleepy_rooms:grade")
    [spec] = here.submit("work")

    def grade() -> int:
        labels = [p.metadata.labels for p in here.pods() if p.status.phase == "Running"]
        return sum(label["lightning-ray/role"] == "grader" for label in labels)

    here.cluster.until(lambda: grade() == 2)
    # Who runs there reads the host name: it must not say which run of a verdict this is.
    graders = [p for p in here.pods() if p.metadata.labels["lightning-ray/role"] == "grader"]
    names = {re.sub(r"-[0-9a-f]{8}-[0-9a-f]{10}-\w+$", "", p.metadata.name) for p in graders}
    assert len(graders) == 2 and len(names) == 1, graders
    assert ray.get(here.controller.cancel.remote([spec.rollout_id])) == [spec.rollout_id]
    here.cluster.until(lambda: grade() == 0)
    here.cluster.until(lambda: not here.jobs())


def test_a_pod_that_grades_and_is_lost_is_no_verdict(site) -> None:
    here = site("rollout.retries=1")
    [spec] = here.submit("work", secret="nonce")
    pod = here.cluster.until(
        lambda: next(
            (p for p in here.pods() if p.metadata.labels["lightning-ray/role"] == "grader"), None
        ),
    )
    here.cluster.core.delete_namespaced_pod(pod.metadata.name, "default", grace_period_seconds=0)
    ended = here.results(1)[spec.rollout_id]
    assert ended.reward is not None and ended.reward.solved, ended
    assert here.calls(spec) == 1


def test_a_pod_that_is_killed_and_nobody_says_so_is_judged(site) -> None:
    """As an agent, or code under test, would be that found a way to do it."""
    here = site("task.grader=sleepy_rooms:grade")
    [spec] = here.submit("sleep")
    here.cluster.until(lambda: here.calls(spec))
    killed: set[str] = set()

    def kill() -> bool:
        """Kills each pod once; true when all three were: the agent's and two that grade."""
        running = {p.metadata.uid for p in here.pods() if p.status.phase == "Running"}
        for process in psutil.process_iter(["name", "cmdline"]):
            named = {
                u for u in running - killed if any(u in a for a in process.info["cmdline"] or ())
            }
            if process.info["name"] == "bwrap" and named:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        killed.update(running)
        return len(killed) == 3

    here.cluster.until(kill)
    ended = here.results(1)[spec.rollout_id]
    assert ended.outcome is Outcome.HARNESS_ERROR, ended
    assert "no node says that it did that" in ended.detail
    assert ended.reward is not None and not ended.reward.solved, ended
    assert ended.reward.metrics == {"overran": 2.0}


# -- repository tasks ------------------------------------------------------------------------------

# Asks the model once, and then does what its task says in Python.
AGENT = """
import base64, json, os, sys, urllib.request
urllib.request.urlopen(urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "m", "messages": [{"role": "user", "content": "mend it"}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)).read()
exec(base64.b64decode(sys.argv[1]))
"""
# The image is this machine's file system, so which Python has pytest is for its PATH to say.
WITH_PYTEST = """
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
        - name: agent
          image: "{{ task.fields.get('image_name') or image }}"
          env: [{name: PATH, value: "BIN:/usr/local/bin:/usr/bin:/bin"}]
"""


def coded(script: str) -> str:
    """Recipes have placeholders in braces, and so have scripts."""
    return base64.b64encode(script.encode()).decode()


def for_repositories(folder: Path, template: str, *more: str) -> list[str]:
    """Settings of a run whose agent does what its task says."""
    job, recipe = folder / "job.yaml", folder / "agent.yaml"
    job.write_text(template.replace("BIN", str(sources.environment() / "bin")))
    command = [
        RECIPE["command"][0],
        "-c",
        f"import base64; exec(base64.b64decode('{coded(AGENT)}'))",
    ]
    recipe.write_text(json.dumps({**RECIPE, "command": [*command, "{task}"]}))
    family = "lightning_ray.tasks.swe.repository"
    return [
        f"kubernetes.template={job}",
        "kubernetes.max_pods=4",
        "kubernetes.start_timeout_s=120",
        f"harness.recipe={recipe}",
        f"task.prepare={family}:prepare",
        f"task.collect={family}:collect",
        f"task.grader={family}:grade",
        *more,
    ]


def test_repository_tasks_are_judged_in_pods_as_on_a_node(site, tmp_path) -> None:
    here = site(*for_repositories(tmp_path, WITH_PYTEST))
    records = {record.instance_id: record for record in offline.records()}
    [easy] = [name for name in records if "b96d2ehw" in name]
    other = next(name for name, record in records.items() if record.package == "xmltodict")
    mend = "import subprocess; subprocess.run(['git', 'apply', '-'], input={!r}, check=True)"
    scripts = {
        f"{what}-{number}": (name, script.format(records[name].gold_patch.encode()))
        for number, name in enumerate((easy, other))
        for what, script in (("mended", mend), ("untouched", ""))
    }
    attacks = {
        "forged": "takes the nonce from the witness's frame and forges everything",
        "left": "leaves at import with status 0",
    }
    every = {attack.name: attack for attack in ATTACKS}
    scripts |= {what: (easy, every[name].script) for what, name in attacks.items()}
    tasks = {task.task_id: task for task in offline.train() + offline.validation()}
    specs = [
        RolloutSpec(
            f"{here.folder.name}-{what}",
            "g",
            Task(name, coded(script), tasks[name].fields),
            Split.TRAIN,
            1,
        )
        for what, (name, script) in scripts.items()
    ]
    ray.get(here.controller.submit.remote(specs))
    ended = here.results(len(specs), 300)
    found = {}
    for what in scripts:
        one = ended[f"{here.folder.name}-{what}"]
        assert one.outcome is Outcome.COMPLETED and one.reward is not None, one
        tampered = Verdict.TAMPERED if one.reward.metrics["tampered"] else Verdict.UNSOLVED
        found[what] = Verdict.SOLVED if one.reward.solved else tampered
        # As often as it is on a node, where it is SOLVED. Else the first run that says no is the
        # last, unless that is the last mixed one: in pods it is run together with the rest.
        runs, whole = one.reward.metrics["test_runs"], examination.ROUNDS + 2
        assert runs == whole if one.reward.solved else 1 <= runs <= whole, one
    assert found == {
        "mended-0": Verdict.SOLVED,
        "mended-1": Verdict.SOLVED,
        "untouched-0": Verdict.UNSOLVED,
        "untouched-1": Verdict.UNSOLVED,
        "forged": every[attacks["forged"]].expect,
        "left": every[attacks["left"]].expect,
    }
    here.cluster.until(lambda: not here.jobs() and not here.pods())


def test_a_repository_that_only_its_image_has_is_mended_and_judged_there(site, tmp_path) -> None:
    """Rows of both forms, in copies of one folder, at the place where their images have it. What is
    learnt of them goes to the cache of this machine, by the folder's name."""
    template = WITH_PYTEST + "          workingDir: /testbed\n"
    here = site(*for_repositories(tmp_path, template))
    look = """
import pathlib, subprocess
history = subprocess.run(["git", "log", "--all", "--oneline"], capture_output=True, text=True)
assert len(history.stdout.splitlines()) == 1, history
assert "a - b" in pathlib.Path("calc/core.py").read_text()
assert not pathlib.Path("tests/test_add.py").exists()
"""
    mend = look + f"pathlib.Path('calc/core.py').write_text({images.CLEAN!r})"
    specs = []
    for form in images.ROWS:
        folder = images.image(tmp_path / form, form)
        fields = {**images.task(form).fields, "image_name": f"folder:{folder}"}
        for what, script in (("mended", mend), ("untouched", look)):
            name = f"{here.folder.name}-{form}-{what}"
            task = Task(images.ROW["instance_id"], coded(script), fields)
            specs.append(RolloutSpec(name, "g", task, Split.TRAIN, 1))
    ray.get(here.controller.submit.remote(specs))
    ended = here.results(len(specs), 300)
    for name, one in ended.items():
        assert one.outcome is Outcome.COMPLETED and one.reward is not None, one
        mended = name.endswith("-mended")
        assert one.reward.solved == mended, one
        if mended:
            assert one.reward.metrics["hidden_tests_with_twins"] == 1.0
    here.cluster.until(lambda: not here.jobs() and not here.pods())
