"""Rollouts on a real, local Ray, with a small script as harness and a stand-in for the store."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from runs import process_of

from lightning_ray.config import RunConfig
from lightning_ray.records import (
    FinishedRollout,
    Json,
    Outcome,
    Reward,
    RolloutSpec,
    RolloutState,
    Split,
    Task,
)
from lightning_ray.rollouts import controller, grading, local, process
from lightning_ray.rollouts.grading import Episode, GradeRequest, GraderFault
from lightning_ray.rollouts.harness import Recipe
from lightning_ray.rollouts.lifecycle import judge
from lightning_ray.rollouts.local import AttemptRequest, AttemptResult, run_attempt
from lightning_ray.rollouts.process import EndedBy, ExitReport, Limits
from lightning_ray.store.attempts import Known

HERE = Path(__file__).parent
GATEWAY = "http://gateway:1"

# What the agent does is said by its task; the harness reads it from its command line.
HARNESS = """
import json, os, sys, time, pathlib
task = sys.argv[1]
pathlib.Path("seen.json").write_text(json.dumps({"argv": sys.argv, "env": dict(os.environ)}))
print("working on", task, flush=True)
if task == "sleep":
    time.sleep(60)
sys.exit(3 if task == "fail" else 0)
"""


# -- a task family -------------------------------------------------------------------------------


def prepare(task: Task, workspace: Path) -> None:
    if task.statement == "unpreparable":
        raise OSError("no such repository")
    (workspace / "given.txt").write_text(task.fields["given"])


def collect(task: Task, workspace: Path) -> Json:
    return {
        "given": (workspace / "given.txt").read_text(),
        "seen": (workspace / "seen.json").read_text(),
    }


def grader(task: Task, result: Json | None, episode: Episode) -> Reward:
    print("graders may print")
    if task.statement == "ungradable":
        return 1.0  # type: ignore[return-value]
    assert result is not None
    solved = episode.outcome is Outcome.COMPLETED
    return Reward(
        float(len(episode.texts)), solved, {"same": float(result["given"] == task.fields["given"])}
    )


# -- the store's protocol, in memory --------------------------------------------------------------


@dataclass
class Summary:
    calls: int
    last_fault: int | None


@ray.remote(num_cpus=0)
class MemoryStore:
    """`calls` and `faults` say, by a word in the rollout id, how an attempt's model calls went."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.finished: dict[str, FinishedRollout] = {}
        self.rewards: dict[str, Reward] = {}

    async def create_rollouts(self, specs: list[RolloutSpec]) -> dict[str, Known]:
        ids = [spec.rollout_id for spec in specs]
        return {name: Known(2 if "resumed" in name else 0, False, True) for name in ids}

    async def unfinished(self) -> list[RolloutSpec]:
        return []

    async def start_attempt(
        self, attempt_id: str, rollout_id: str, number: int, key_hash: str, started_at: float
    ) -> None:
        self.log.append(("start", attempt_id, rollout_id, number, key_hash))

    async def end_attempt(
        self, attempt_id: str, outcome: Outcome, detail: str, ended_at: float
    ) -> Summary:
        self.log.append(("end", attempt_id, outcome, detail))
        calls = 0 if "silent" in attempt_id else 2
        return Summary(calls, 503 if "faulty" in attempt_id else None)

    async def said(self, attempt_id: str) -> tuple[list[str], int]:
        return ["one", "two"], 7

    async def canary(self, attempt_id: str) -> str | None:
        return f"call 1 of attempt {attempt_id} read a canary" if "spy" in attempt_id else None

    async def wait_reward(self, rollout_id: str, timeout_s: float) -> Reward | None:
        return self.rewards.get(rollout_id)

    async def finish_rollout(self, finished: FinishedRollout) -> None:
        self.finished.setdefault(finished.spec.rollout_id, finished)

    async def grader_key(self, rollout_id: str) -> str:
        return f"key of {rollout_id}"

    async def post(self, rollout_id: str, reward: Reward) -> None:
        self.rewards[rollout_id] = reward

    async def all(self) -> tuple[list[tuple[Any, ...]], dict[str, FinishedRollout]]:
        return self.log, self.finished


# -- a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        _temp_dir="/tmp/ray_rollouts_test",
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}},
    )
    yield
    ray.shutdown()


class Run:
    """A controller, its store, and what came out."""

    def __init__(self, folder: Path, **sections: Json) -> None:
        script = folder / "harness.py"
        script.write_text(HARNESS)
        recipe = folder / "recipe.yaml"
        recipe.write_text(
            f"name: script\n"
            f"command: [{sys.executable}, -S, '{script}', '{{task}}', '{{base_url}}']\n"
            "env: {THE_KEY: '{api_key}'}\nartifacts: ['{workspace}/seen.json']\n"
        )
        tree: dict[str, Json] = {
            "run": {"dir": str(folder / "run")},
            "harness": {"recipe": str(recipe)},
            "rollout": {"concurrency": 4, "retries": 1, "timeout_s": 30},
            "task": {
                "prepare": "test_rollouts_controller:prepare",
                "collect": "test_rollouts_controller:collect",
                "grader": "test_rollouts_controller:grader",
            },
        }
        for name, section in sections.items():
            tree[name] = tree[name] | section
        self.config = RunConfig.model_validate(tree)
        self.store: Any = MemoryStore.remote()  # type: ignore[attr-defined]
        self.controller = controller.start(self.config, self.store, GATEWAY + "/")

    def submit(self, **statements: str) -> None:
        specs = [
            RolloutSpec(name, "g", Task(f"t-{name}", text, {"given": "aé"}), Split.TRAIN, 0)
            for name, text in statements.items()
        ]
        ray.get(self.controller.submit.remote(specs))

    def wait(self, number: int, seconds: float = 60) -> dict[str, FinishedRollout]:
        taken: list[FinishedRollout] = []
        deadline = time.monotonic() + seconds
        while len(taken) < number and time.monotonic() < deadline:
            taken += ray.get(self.controller.next_finished.remote(1.0))
        assert len(taken) == number, f"{len(taken)} of {number} rollouts finished in {seconds} s"
        return {finished.spec.rollout_id: finished for finished in taken}

    def harness_pid(self, attempt_id: str) -> int:
        deadline = time.monotonic() + 30
        log = self.config.run_dir / "rollouts" / attempt_id / "harness.log"
        while not (log.exists() and log.read_text() and process.marked(attempt_id)):
            assert time.monotonic() < deadline, f"{attempt_id} was not started"
            time.sleep(0.05)
        return process.marked(attempt_id)[0]


@pytest.mark.slow
def test_rollouts_end_with_the_outcome_and_reward_they_deserve(
    cluster: None, tmp_path: Path
) -> None:
    run = Run(tmp_path, rollout={"retries": 1, "timeout_s": 30})
    statements = {
        "good": "do it",
        "bad": "fail",
        "silent": "do it",
        "faulty": "do it",
        "resumed": "do it",
        "lost": "unpreparable",
        "odd": "ungradable",
        "spy": "do it",
    }
    run.submit(**statements)
    run.submit(**statements)
    done = run.wait(len(statements))
    assert ray.get(run.controller.next_finished.remote(0.2)) == []

    assert done["good"].state is RolloutState.FINISHED
    assert done["good"].outcome is Outcome.COMPLETED
    assert done["good"].reward == Reward(2.0, True, {"same": 1.0})
    assert done["good"].attempt_id == "good-a0"
    assert done["good"].running_s > 0
    assert done["bad"].outcome is Outcome.HARNESS_ERROR
    assert done["bad"].reward == Reward(2.0, False, {"same": 1.0})
    assert "exit status 3" in done["bad"].detail
    assert done["resumed"].attempt_id == "resumed-a2"

    faults = {
        "silent": (Outcome.LAUNCH_FAULT, "0 model calls"),
        "faulty": (Outcome.GATEWAY_FAULT, "last answer HTTP 503"),
        "lost": (Outcome.LAUNCH_FAULT, "no such repository"),
        "odd": (Outcome.GRADER_FAULT, "must return a lightning_ray.records.Reward, got 1.0"),
        "spy": (Outcome.VOID, "call 1 of attempt spy-a0 read a canary"),
    }
    for name, (outcome, detail) in faults.items():
        assert (done[name].state, done[name].outcome) == (RolloutState.FAILED, outcome), name
        attempts = 2 if outcome.retryable else 1
        assert (done[name].attempts, done[name].reward) == (attempts, None), name
        assert detail in done[name].detail

    log, finished = ray.get(run.store.all.remote())
    assert finished == done
    starts = {entry[1]: entry for entry in log if entry[0] == "start"}
    assert len(starts) == 3 + 2 * len(faults) - 1
    artifact = json.loads((run.config.run_dir / "rollouts/good-a0/seen.json").read_text())
    assert artifact["argv"][1:] == ["do it", f"{GATEWAY}/rollout/good-a0/v1"]
    key = artifact["env"]["THE_KEY"]
    assert starts["good-a0"][4] == hashlib.sha256(key.encode()).hexdigest()
    assert not [name for name in artifact["env"] if name.startswith("RAY_")]
    assert not Path(artifact["env"]["HOME"]).exists()
    assert "working on do it" in (run.config.run_dir / "rollouts/good-a0/harness.log").read_text()
    assert (run.config.run_dir / "rollouts/good-a0").stat().st_mode & 0o777 == 0o700

    status = ray.get(run.controller.status.remote())
    assert (status.finished, status.failed, status.queued, status.running) == (3, 5, 0, 0)
    assert (status.outcomes[Outcome.GRADER_FAULT], status.outcomes[Outcome.VOID]) == (2, 1)


@pytest.mark.slow
def test_a_lost_worker_costs_an_attempt_and_a_cancelled_harness_dies(
    cluster: None, tmp_path: Path
) -> None:
    run = Run(tmp_path, rollout={"retries": 1, "concurrency": 1})
    run.submit(first="sleep", second="sleep")
    run.harness_pid("first-a0")
    process_of(os.getpid(), "ray::run_attempt").kill()
    again = run.harness_pid("first-a1")
    assert process.marked("first-a0") == []
    ray.get(run.controller.cancel.remote(["first"]))
    run.harness_pid("second-a0")
    assert not Path(f"/proc/{again}").exists()
    ray.get(run.controller.shutdown.remote())
    assert process.marked("second-a0") == []
    done = run.wait(2)
    assert {finished.state for finished in done.values()} == {RolloutState.CANCELLED}
    log, finished = ray.get(run.store.all.remote())
    assert list(finished) == ["first"]  # the other one is for the run's next life
    ends = {entry[1]: entry[2] for entry in log if entry[0] == "end"}
    assert ends == {
        "first-a0": Outcome.NODE_LOST,
        "first-a1": Outcome.CANCELLED,
        "second-a0": Outcome.CANCELLED,
    }


@pytest.mark.slow
def test_a_reward_may_be_posted_from_outside(cluster: None, tmp_path: Path) -> None:
    run = Run(tmp_path, task={"grader": None, "grader_timeout_s": 5}, rollout={"retries": 0})
    ray.get(run.store.post.remote("posted", Reward(0.5, False)))
    run.submit(posted="do it", forgotten="do it")
    done = run.wait(2)
    assert done["posted"].reward == Reward(0.5, False)
    assert done["forgotten"].outcome is Outcome.GRADER_FAULT
    assert "no reward was posted within 5 s" in done["forgotten"].detail


@pytest.mark.slow
def test_a_store_that_fails_stops_the_run_instead_of_losing_rollouts(
    cluster: None, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    ray.get(run.controller.status.remote())
    ray.get(run.store.all.remote())
    run.submit(r="do it")
    ray.kill(run.store)
    with pytest.raises(ray.exceptions.RayError):
        run.wait(1)


# -- one attempt, without a cluster ----------------------------------------------------------------


def collect_from_a_pipe(task: Task, workspace: Path) -> Json:
    return {"text": (workspace / "answer").read_text()}


def attempt(folder: Path, script: str, **changes: Any) -> AttemptResult:
    request = AttemptRequest(
        attempt_id=f"attempt-{os.getpid()}",
        task=Task("t", "do it", {"given": "x"}),
        recipe=Recipe(
            name="script",
            command=[sys.executable, "-S", "-c", script],
            artifacts=["{workspace}/kept", "{workspace}/link"],
        ),
        root_url=f"{GATEWAY}/rollout/a",
        model="policy",
        context_tokens=4096,
        limits=Limits(timeout_s=20),
        log_dir=folder / "rollouts" / "a",
        prepare="test_rollouts_controller:prepare",
        collect=None,
        keep_workspaces=False,
        api_key="the-key",
    )
    assert "the-key" not in repr(request)
    return run_attempt(dataclasses.replace(request, **changes))


def test_an_attempt_leaves_its_log_and_its_artifacts_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    script = """
import os, sys
print(open("given.txt").read(), sys.stdin.read())
os.makedirs("kept/deep")
open("kept/deep/file", "w").write("trajectory")
os.mkfifo("kept/pipe")
os.symlink("/etc/passwd", "link")
os.makedirs("locked/in")
os.chmod("locked", 0)
"""
    assert attempt(tmp_path, script).outcome is Outcome.COMPLETED
    log_dir = tmp_path / "rollouts" / "a"
    kept = {str(path.relative_to(log_dir)) for path in log_dir.rglob("*") if path.is_file()}
    assert kept == {"harness.log", "kept/deep/file"}
    assert (log_dir / "harness.log").read_text() == "x do it\n"
    assert list((tmp_path / "node").iterdir()) == []


def test_a_booby_trapped_workspace_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_FAMILY_S", 0.5)
    monkeypatch.syspath_prepend(str(HERE))
    trap = "import os; os.mkfifo('answer')"
    ended = attempt(tmp_path, trap, collect="test_rollouts_controller:collect_from_a_pipe")
    assert ended.outcome is Outcome.GRADER_FAULT
    assert "task.collect" in ended.detail
    assert "not done after 0.5 s" in ended.detail


@pytest.mark.parametrize(
    ("ended_by", "status", "outcome"),
    [
        (EndedBy.EXIT, 0, Outcome.COMPLETED),
        (EndedBy.EXIT, 1, Outcome.HARNESS_ERROR),
        (EndedBy.SIGNAL, 11, Outcome.HARNESS_ERROR),
        (EndedBy.PROCESSES, None, Outcome.HARNESS_ERROR),
        (EndedBy.TIME, None, Outcome.TIMEOUT),
        (EndedBy.MEMORY, None, Outcome.OUT_OF_MEMORY),
        (EndedBy.OUTPUT, None, Outcome.OUTPUT_LIMIT),
        (EndedBy.DISK, None, Outcome.OUTPUT_LIMIT),
        (EndedBy.NOT_STARTED, None, Outcome.LAUNCH_FAULT),
        (EndedBy.LOST, None, Outcome.NODE_LOST),
    ],
)
def test_each_way_to_end_is_one_outcome(
    ended_by: EndedBy, status: int | None, outcome: Outcome
) -> None:
    assert local.classify(ExitReport(ended_by, status, 1.0, 0, 0.0, "", "")) is outcome


# -- grading, without a cluster --------------------------------------------------------------------


def grade_with(folder: Path, argv: str | list[str], timeout_s: float = 20) -> Reward | GraderFault:
    episode = Episode("r", "r-a0", Outcome.COMPLETED, "", ("one",))
    task = Task("t", "do it", {"given": "x"})
    return grading.grade(
        GradeRequest(task, {"given": "x"}, episode, argv, Limits(timeout_s), folder / "grader.log")
    )


def test_a_grader_may_be_any_command_that_reads_and_writes_json(tmp_path: Path) -> None:
    code = """
import json, sys
q = json.load(sys.stdin)
print("noise", file=sys.stderr)
value = len(q["episode"]["texts"]) + len(q["result"]["given"])
json.dump({"value": value, "solved": q["episode"]["outcome"] == "completed"}, sys.stdout)
"""
    assert grade_with(tmp_path, [sys.executable, "-c", code]) == Reward(2, True)


def test_a_grader_needs_no_run_directory_on_its_node(tmp_path: Path) -> None:
    """As on a rollout node, where a harness's pod has what the run's rollouts write and no more."""
    elsewhere = tmp_path / "runs" / "other" / "rollouts" / "r-a0"
    say = 'print(\'{"value": 1, "solved": true}\')'
    assert grade_with(elsewhere, [sys.executable, "-c", say]) == Reward(1, True)
    fault = grade_with(elsewhere, [sys.executable, "-c", "raise SystemExit('no such test')"])
    assert isinstance(fault, GraderFault) and "no such test" in fault.reason, fault
    assert "does not have the run directory" in fault.reason
    assert list(tmp_path.iterdir()) == []
    elsewhere.parent.mkdir(parents=True)
    assert grade_with(elsewhere, [sys.executable, "-c", say]) == Reward(1, True)
    assert (elsewhere / "grader.log").exists()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "expected one JSON object"),
        ('print(\'{"value": NaN, "solved": true}\')', "must be finite"),
        ('print(\'{"value": "1", "solved": true}\')', "must be a number"),
        ('print(\'{"value": true, "solved": true}\')', "must be a number"),
        ("print('{\"value\": 1}')", "expected {"),
        ('print(\'{"value": 1, "value": 0, "solved": true}\')', "stands twice"),
        ('print(\'{"value": 1, "solved": true}\\n\' * 2)', "expected one JSON object"),
        ("import sys; sys.exit('no database')", "no database"),
        ("import time; time.sleep(60)", "time limit"),
    ],
)
def test_whatever_is_no_reward_is_a_fault_with_its_reason(
    tmp_path: Path, code: str, reason: str
) -> None:
    verdict = grade_with(tmp_path, [sys.executable, "-S", "-c", code], timeout_s=2)
    assert isinstance(verdict, GraderFault)
    assert reason in verdict.reason


def test_a_grader_function_runs_in_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    verdict = grade_with(tmp_path, "test_rollouts_controller:grader")
    assert verdict == Reward(1.0, True, {"same": 1.0})
    assert "graders may print" in (tmp_path / "grader.log").read_text()


@pytest.mark.parametrize(
    ("outcome", "calls", "fault", "judged"),
    [
        (Outcome.COMPLETED, 3, None, Outcome.COMPLETED),
        (Outcome.TIMEOUT, 3, None, Outcome.TIMEOUT),
        (Outcome.HARNESS_ERROR, 0, None, Outcome.LAUNCH_FAULT),
        (Outcome.HARNESS_ERROR, 3, 503, Outcome.GATEWAY_FAULT),
        (Outcome.TIMEOUT, 0, 503, Outcome.GATEWAY_FAULT),
        (Outcome.NODE_LOST, 0, 503, Outcome.NODE_LOST),
    ],
)
def test_an_end_that_the_policy_cannot_have_caused_is_not_held_against_it(
    outcome: Outcome, calls: int, fault: int | None, judged: Outcome
) -> None:
    assert judge(outcome, calls, fault) is judged
