"""Rollouts as containers of a real podman: controller, gateway and store as in a run, harness and
graders of `test_pods`, in an image that has nothing of this machine but a Python."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import podman_images
import pytest
import ray
import runs
from support import Running
from swe import images
from test_pods import RECIPE, Site, coded, for_repositories, running

from lightning_ray import metrics
from lightning_ray.records import Outcome, RolloutSpec, Split, Task
from lightning_ray.rollouts import harness, installation
from lightning_ray.rollouts.pods.podman import way
from lightning_ray.tasks.swe import sources
from lightning_ray.tasks.swe.preparation import command

__all__ = ["running"]  # the fixture
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("podman") and shutil.which("runc")),
        reason="podman is not installed, or runc",
    ),
]
IMAGE = "localhost/lightning-ray-test:1"


class Machine:
    """What `Site` asks a cluster for."""

    def kubeconfig(self) -> str:
        return "/none"

    def until(self, what: Any, seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, "not in time"
            time.sleep(0.2)
        return found


class Place(Site):
    """A site whose rollouts are containers."""

    def folder_of_containers(self) -> Path:
        return Path(tempfile.gettempdir(), f"lr-podman-{os.getuid()}-{self.folder.name}")

    def containers(self) -> list[Any]:
        label = f"label=lightning-ray/run={self.folder.name}"
        argv = ["podman", "ps", "--all", "--format=json", "--filter", label]
        found: list[Any] = json.loads(subprocess.check_output(argv) or b"[]")
        return found

    def left(self) -> list[str]:
        """Whatever there is of this run."""
        label = f"label=lightning-ray/run={self.folder.name}"
        volumes = subprocess.check_output(["podman", "volume", "ls", "-q", "--filter", label])
        return [*(one["Names"][0] for one in self.containers()), *volumes.decode().split()]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    podman_images.configure(tmp_path_factory.mktemp("podman"))
    yield podman_images.base(IMAGE)
    podman_images.remove(IMAGE)
    del os.environ["CONTAINERS_CONF"]


# `image` first: the workers of Ray inherit podman's settings.
@pytest.fixture
def place(image: str, running: Running, tmp_path: Path) -> Iterator[Any]:
    made: list[Place] = []

    def make(*settings: str, name: str = "run") -> Place:
        ours = ("rollout.launcher=podman", f"kubernetes.image={image}")
        folder = tmp_path / f"{tmp_path.name}-{name}"
        more = ("kubernetes.start_timeout_s=60", *settings)
        made.append(Place(running, Machine(), folder, *ours, *more))
        return made[-1]

    yield make
    for one in made:
        one.stop()
        assert one.left() == []
        assert not one.folder_of_containers().exists()


def test_a_harness_runs_in_a_container_and_is_graded_in_another_one(place) -> None:
    here = place()
    ended = here.one("work")
    assert ended.outcome is Outcome.COMPLETED, ended.detail
    assert ended.reward is not None and ended.reward.solved, ended
    assert ended.reward.metrics == {"link": 1.0, "gone": 1.0, "peeked": 0.0, "forged": 0.0}
    calls = ray.get(here.running.store.calls.remote(ended.attempt_id))
    assert [call.text for call in calls] == ["done"]
    log = here.config.run_dir / "rollouts" / ended.attempt_id / "harness.log"
    assert log.read_text() == "done\n"
    here.cluster.until(lambda: not here.left())


def test_each_end_of_a_container_is_the_outcome_that_it_means(place, tmp_path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("""
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
        - name: agent
          image: "{{ task.fields.get('image') or image }}"
          resources: {limits: {memory: "{{ task.fields.get('memory', '1Gi') }}"}}
""")
    here = place(f"kubernetes.template={job}", "rollout.timeout_s=20")
    of = dict[str, str]()
    for what, task, fields in (
        ("ends well", "work", {}),
        ("fails", "fail", {}),
        ("is too loud", "noise", {}),
        ("takes too long", "sleep", {}),
        ("takes too much memory", "eat", {"memory": "96Mi"}),
        ("has no image", "work", {"image": "localhost/no-such:1"}),
        ("has no valid image", "work", {"image": "Localhost/NO:::"}),
    ):
        [spec] = here.submit(task, name=what.replace(" ", "-"), **fields)
        of[spec.rollout_id] = what
    ended = {of[name]: one for name, one in here.results(len(of), 180).items()}
    assert {what: one.outcome for what, one in ended.items()} == {
        "ends well": Outcome.COMPLETED,
        "fails": Outcome.HARNESS_ERROR,
        "is too loud": Outcome.OUTPUT_LIMIT,
        "takes too long": Outcome.TIMEOUT,
        "takes too much memory": Outcome.OUT_OF_MEMORY,
        "has no image": Outcome.LAUNCH_FAULT,
        "has no valid image": Outcome.LAUNCH_FAULT,
    }, ended
    assert "localhost/no-such:1" in ended["has no image"].detail


def test_a_container_reaches_the_gateway_and_nothing_else(place, tmp_path) -> None:
    """Nor another rollout's folder, nor this machine's processes."""
    look = f"""
import json, os, socket, subprocess, urllib.request
found = dict(interfaces=sorted(os.listdir("/sys/class/net")))
for name, host in (("machine", "{ray.util.get_node_ip_address()}"), ("outside", "1.1.1.1")):
    try:
        socket.create_connection((host, 53), 3)
        found[name] = "reached"
    except OSError as error:
        found[name] = error.strerror
processes = [name for name in os.listdir("/proc") if name.isdigit()]
found["processes"], found["told"] = len(processes), []
for name in processes:
    try:
        said = open(f"/proc/{{name}}/environ").read() + open(f"/proc/{{name}}/cmdline").read()
        found["told"] += ["LIGHTNING_RAY_KEY=" in said] * (name != str(os.getpid()))
    except PermissionError:
        found["told"].append("refused")
found["way"] = os.listdir("/lightning-way")
found["key"] = [n for n in os.environ if n.startswith("LIGHTNING_RAY")]
found["root"] = os.access("/", os.W_OK) or os.access("/usr", os.W_OK)
print("LOOK", json.dumps(found))
"""
    here = place()
    recipe = dict(RECIPE, command=[*RECIPE["command"][:1], "-c", "{task}"])
    [spec] = here.submit("x")  # it is begun, and ends by itself
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    other = place(f"harness.recipe={path}", "task.grader=null", "task.collect=null", name="look")
    [spec] = other.submit(look, name="look")
    one = other.results(1)[spec.rollout_id]
    log = (other.config.run_dir / "rollouts" / one.attempt_id / "harness.log").read_text()
    found = json.loads(log.partition("LOOK ")[2])
    assert found == {
        "interfaces": ["lo"],
        "machine": "Network is unreachable",
        "outside": "Network is unreachable",
        "processes": 3,  # our program, the way out, the harness
        "told": ["refused", False],  # the first of them keeps everything from us
        "way": ["gateway"],
        "key": [],
        "root": False,
    }
    here.results(1)


def test_a_controller_that_starts_again_adopts_its_containers(place, tmp_path) -> None:
    """They go on meanwhile, and reach the gateway also while no controller is there."""
    flags = tmp_path / "flags"
    flags.mkdir()
    job = tmp_path / "job.yaml"
    job.write_text(f"""
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      volumes: [{{name: flags, hostPath: {{path: {flags}}}}}]
      containers:
        - name: agent
          image: {IMAGE}
          volumeMounts: [{{name: flags, mountPath: /flags, readOnly: true}}]
""")
    here = place("rollout.timeout_s=150", f"kubernetes.template={job}")
    [again] = here.submit("wait /flags/go again", name="again")
    [stray] = here.submit("wait /flags/never no", name="stray")
    here.cluster.until(lambda: here.calls(again) and here.calls(stray))
    assert len(here.containers()) == 2
    ray.kill(here.controller)
    (flags / "go").touch()
    here.cluster.until(lambda: here.calls(again) == 2)
    kept = f"{again.rollout_id}-a0"
    ray.get(here.running.store.end_orphans.remote(time.time(), [kept]))
    here.start((kept,))
    assert ray.get(here.controller.submit.remote([again])) == []
    ended = here.results(1)[again.rollout_id]
    assert ended.attempts == 1 and here.calls(again) == 2
    assert ended.outcome in (Outcome.COMPLETED, Outcome.NODE_LOST), ended
    here.cluster.until(lambda: not here.left())


def test_a_way_out_that_is_killed_is_there_again(place, tmp_path) -> None:
    here = place()
    [spec] = here.submit("sleep")
    here.cluster.until(lambda: here.calls(spec))
    here.cluster.until(lambda: ways(here))
    subprocess.run(["kill", "-9", *map(str, ways(here))], check=True)
    assert here.one("work").outcome is Outcome.COMPLETED
    assert ways(here)
    ray.get(here.controller.cancel.remote([spec.rollout_id]))
    here.stop()
    here.cluster.until(lambda: not ways(here))


def ways(here: Place) -> list[int]:
    argv = ["pgrep", "-f", f"{Path(way.__file__).name} outside {here.folder_of_containers()}"]
    return [int(pid) for pid in subprocess.run(argv, capture_output=True).stdout.split()]


def test_a_container_that_somebody_removes_is_a_lost_node(place) -> None:
    here = place()
    [spec] = here.submit("sleep")
    here.cluster.until(lambda: here.calls(spec))
    subprocess.run(["podman", "rm", "-f", here.containers()[0]["Names"][0]], check=True)
    ended = here.results(1)[spec.rollout_id]
    assert ended.outcome is Outcome.NODE_LOST, ended


def test_a_cancelled_rollout_ends_its_container(place) -> None:
    here = place()
    [spec] = here.submit("sleep")
    here.cluster.until(lambda: here.calls(spec))
    assert ray.get(here.controller.cancel.remote([spec.rollout_id])) == [spec.rollout_id]
    here.cluster.until(lambda: not here.left())


# -- repository tasks ------------------------------------------------------------------------------

TEMPLATE = Path(__file__).parents[2] / "examples/kubernetes/swe.yaml"
LOOK = """
import pathlib, subprocess
history = subprocess.run(["git", "log", "--all", "--oneline"], capture_output=True, text=True)
assert len(history.stdout.splitlines()) == 1, history
assert "a - b" in pathlib.Path("calc/core.py").read_text()
assert not pathlib.Path("tests/test_add.py").exists()
assert pathlib.Path("/opt/harness/harness.txt").read_text() == "copied"
"""


@pytest.fixture
def testbeds(image: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The images of two rows, one of each form, and one that has the harness: as the documented
    template wants them."""
    bins = {"/opt/miniconda3/envs/testbed": sources.environment()}
    with_tests = podman_images.with_folders("localhost/lightning-ray-tests:1", image, bins)
    harness = tmp_path / "harness"
    harness.mkdir()
    (harness / "harness.txt").write_text("copied")
    (harness / "bin").mkdir()
    names = {"harness": "localhost/lightning-ray-agent:1"}
    podman_images.with_folders(names["harness"], image, {"/opt/harness": harness})
    for form in images.ROWS:
        folder = images.image(tmp_path / form, form)
        names[form] = f"localhost/lightning-ray-{form}:1"
        podman_images.with_folders(names[form], with_tests, {"/testbed": folder})
    yield names
    podman_images.remove(*names.values(), with_tests)


def test_tasks_with_images_are_mended_and_judged_in_them_by_the_documented_template(
    place, testbeds, tmp_path
) -> None:
    """Rows of SWE-smith's form and of SWE-bench's, and then their reference runs."""
    settings = for_repositories(tmp_path, TEMPLATE.read_text())
    here = place(*settings, f"kubernetes.image={testbeds['harness']}")
    mend = LOOK + f"pathlib.Path('calc/core.py').write_text({images.CLEAN!r})"
    specs = []
    for form, what, script in (("swe-bench", "mended", mend), ("swe-smith", "untouched", LOOK)):
        fields = {**images.task(form).fields, "image_name": testbeds[form]}
        name = f"{here.folder.name}-{form}-{what}"
        task = Task(images.ROW["instance_id"], coded(script), fields)
        specs.append(RolloutSpec(name, "g", task, Split.TRAIN, 1))
    ray.get(here.controller.submit.remote(specs))
    ended = here.results(len(specs), 400)
    for name, one in ended.items():
        assert one.outcome is Outcome.COMPLETED and one.reward is not None, one
        assert one.reward.solved == name.endswith("-mended"), one
    rows = []
    for form, row in images.ROWS.items():
        path = tmp_path / f"{form}.json"
        # Of two packages: else one is the other's near duplicate.
        known = {"instance_id": form, "repo": f"somebody/{form}", "image_name": testbeds[form]}
        path.write_text(json.dumps([{**row, **known}]))
        rows.append(str(path))
    out = tmp_path / "clean"
    asked = ("runner=podman", "reference_runs=1", "validation_share=0")
    assert command.main(Path, [*rows, "--out", str(out), *asked]) == 0
    kept = [json.loads(line)["task_id"] for line in (out / "train.jsonl").open()]
    assert sorted(kept) == sorted(images.ROWS), (out / "dropped.jsonl").read_text()


# -- a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.demand)])
def test_a_run_trains_on_rollouts_of_the_real_harness_in_containers(
    image: str, tmp_path: Path, killed: bool
) -> None:
    """With a trainer rank killed on the way, the run goes on and so do the containers; that takes
    minutes, since the harness waits longer from try to try while there is no gateway."""
    steps = 1 + killed
    venv = installation.install(harness.load("mini-swe-agent"))
    job = tmp_path / "job.yaml"
    job.write_text(f"""
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      volumes: [{{name: harness, hostPath: {{path: {venv}}}}}]
      containers:
        - name: agent
          image: "{{{{ image }}}}"
          volumeMounts: [{{name: harness, mountPath: {venv}, readOnly: true}}]
""")
    log = tmp_path / "log"
    run = runs.start(
        tmp_path / "run",
        log,
        f"run.steps={steps}",
        "rollout.launcher=podman",
        f"kubernetes.image={image}",
        f"kubernetes.template={job}",
        f"kubernetes.harness_venv={venv}",
        "gateway.port=8798",
    )
    try:
        if killed:
            runs.wait_for(run, log, lambda: " 4 running" in log.read_text())
            runs.process_of(run.pid, "ray::PolicyWorker").kill()
        assert run.wait(runs.PATIENCE) == 0, log.read_text()[-4000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGKILL)
    said = log.read_text()
    assert "podman: rollouts are containers of podman on" in said
    assert ("going on from the last checkpoint, try 1" in said) == killed
    assert ("in pods since the run was stopped" in said) == killed
    rows = metrics.read(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2][:steps]
    for row in rows:
        assert row["rollouts/finished"] == 8 and row["rollouts/failed"] == 0, json.dumps(row)
    left = ["podman", "ps", "--all", "--quiet", "--filter", "label=lightning-ray/run"]
    assert subprocess.check_output(left) == b""
    kept = sorted((tmp_path / "run" / "rollouts").glob("*/harness.log"))
    assert len(kept) >= 8 and all("Saved trajectory" in one.read_text() for one in kept)
