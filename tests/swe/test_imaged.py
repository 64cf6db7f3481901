"""Repositories that only their image has: what an agent finds, what comes back, how it is judged.
The image is a folder here, and the program of a pod a process; tests/kubernetes has real Jobs."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from images import BROKEN, CLEAN, ROWS, git, image, task
from rooms import carried_out, run_pod

from lightning_ray.records import Json, Outcome, Reward
from lightning_ray.rollouts.grading import Episode, RoomRun
from lightning_ray.rollouts.harness import Recipe
from lightning_ray.rollouts.local import FamilyError, call_family
from lightning_ray.rollouts.pods import changed, staging
from lightning_ray.rollouts.pods.staging import PodLimits
from lightning_ray.tasks.swe import repository as family
from lightning_ray.tasks.swe.examination import PAIRS
from lightning_ray.tasks.swe.grading import GradingError

FAMILY = "lightning_ray.tasks.swe.repository"
# The suite, the bug, the reference; a pair is one run with the hidden test's twin, which has a
# control, and one with the test itself.
RUNS = 3 + 3 * PAIRS
EPISODE = Episode("r", "r-a0", Outcome.COMPLETED, "", ("I mended it.",))
FORMS = pytest.mark.parametrize("form", list(ROWS))


class Site:
    """A task, and fresh copies of its image."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder, self.task = folder, task(form)
        self.image = image(folder / "image", form)
        self._numbers = itertools.count()

    def fresh(self) -> Path:
        copy = self.folder / f"repository-{next(self._numbers)}"
        shutil.copytree(self.image, copy, symlinks=True)
        return copy

    def attempt(self, script: str, repository: Path | None = None) -> tuple[Json, Path]:
        """What `collect` finds after a harness that runs a shell script, and the repository."""
        where = repository or self.fresh()
        recipe = Recipe(name="shell", command=["/bin/sh", "-e", "-c", script])
        values = staging.pod_values(
            url="http://gateway", model="m", task=self.task, attempt_id="a", context_tokens=1,
            venv="/none", recipe=recipe,
        )  # fmt: skip
        stage = staging.pack(self.task, f"{FAMILY}:prepare")
        limits = PodLimits(30, 1 << 20, 1 << 20)
        order = staging.harness_order(recipe, values, None, str(where), stage, limits)
        pod = self.folder / f"pod-{next(self._numbers)}"
        said = json.loads(run_pod({"order": order, staging.WORKSPACE: stage.workspace}, pod))
        assert (said["ended_by"], said["status"]) == ("exit", 0), said
        sent = (pod / "result").read_bytes()
        found, problem = staging.outcome_of(self.task, stage.workspace, sent, f"{FAMILY}:collect")
        assert not problem and found is not None
        return found, where

    def graded(self, result: Json, change: Callable[[Path], None] = lambda copy: None) -> Reward:
        """The reward, each run of the tests in a fresh copy at one place, as in a pod; `change` may
        spoil it."""
        where = self.folder / "testbed"
        episode = replace(EPISODE, options={"repository": str(where)})
        runs: list[RoomRun] = []
        while not isinstance(answer := family.rooms(self.task, result, episode, runs), Reward):
            for order in answer:
                shutil.rmtree(where, ignore_errors=True)
                shutil.copytree(self.image, where, symlinks=True)
                change(where)
                report = carried_out(order, self.folder / f"room-{next(self._numbers)}")
                runs.append(RoomRun(order, report))
        return answer


@pytest.fixture
def site(tmp_path: Path, form: str) -> Site:
    return Site(tmp_path, form)


@FORMS
def test_an_agent_finds_the_bug_in_one_commit_without_history_or_hidden_tests(site, form):
    old = git(site.image, "rev-parse", "HEAD")
    found, here = site.attempt('test -z "$(git status --porcelain)"')
    assert (here / "calc/core.py").read_text() == BROKEN
    assert not (here / "tests/test_add.py").exists() and (here / "tests/test_zero.py").exists()
    assert git(here, "log", "--all", "--format=%s") == "The repository as it is"
    texts = git(here, "cat-file", "--batch-all-objects", "--batch")
    assert "a + b" not in texts and "test_add" not in texts and old not in texts
    assert "fix of calc.1" in texts  # the bait
    assert found["files"] == {} and found["refused"] == []
    _, again = site.attempt("true")
    assert git(here, "rev-parse", "HEAD") == git(again, "rev-parse", "HEAD")


@FORMS
def test_a_repair_comes_back_as_a_patch_and_is_solved(site, form):
    script = "sed -i 's/a - b/a + b/' calc/core.py; rm tests/test_zero.py; echo x > logo.png"
    found, where = site.attempt(script)
    assert found["files"] == {"calc/core.py": CLEAN}
    assert [entry["path"] for entry in found["refused"]] == ["tests/test_zero.py"]
    git(where, "checkout", "-q", ".")
    subprocess.run(["git", "apply"], input=found["patch"].encode(), cwd=where, check=True)
    assert (where / "calc/core.py").read_text() == CLEAN
    reward = site.graded(found)
    assert (reward.solved, reward.metrics["test_runs"]) == (True, RUNS)
    assert reward.metrics["hidden_tests_with_twins"] == 1.0


@FORMS
@pytest.mark.parametrize(
    "script",
    [
        "true",
        "printf 'import os; os._exit(0)' > calc/core.py",
        "mkdir -p conf; printf 'def pytest_runtest_call(item): return' > conftest.py",
        "rm calc/core.py; mkdir calc/core.py; echo x > calc/core.py/deep.py",
        "rm -r calc; echo x > calc",
        "mkdir tests/test_add.py; echo x > tests/test_add.py/x.txt",
    ],
)
def test_what_is_no_repair_is_not_solved(site, form, script):
    found, _ = site.attempt(script)
    reward = site.graded(found)
    assert (reward.value, reward.solved) == (0.0, False)


# Believes nothing to have failed, but for tests in files with odd names: the canaries.
FORGER = """
import _pytest.reports, re
make = _pytest.reports.TestReport.from_item_and_call.__func__
def forged(cls, item, call):
    if not re.search("test_[0-9a-f]{8}", item.nodeid):
        call.excinfo = None
    return make(cls, item, call)
_pytest.reports.TestReport.from_item_and_call = classmethod(forged)
"""


@pytest.mark.parametrize("form", ["swe-smith"])
def test_who_forges_reports_and_spares_canaries_passes_the_twins_too_and_has_tampered(site):
    found, _ = site.attempt("true")
    found["files"]["calc/core.py"] = FORGER + BROKEN
    reward = site.graded(found)
    assert (reward.solved, reward.metrics["tampered"]) == (False, 1.0)


@pytest.mark.parametrize("form", ["swe-smith"])
def test_an_image_in_which_the_reference_solution_fails_judges_nothing(site, tmp_path):
    def spoil(copy: Path) -> None:
        (copy / "calc/core.py").write_text(CLEAN.replace("def double", "BROKEN\n\n\ndef double"))

    found = {"files": {"calc/core.py": CLEAN}, "refused": []}
    with pytest.raises(GradingError, match=r"reference state is unsolved here .* cannot judge it"):
        site.graded(found, spoil)


@pytest.mark.parametrize("form", ["swe-bench"])
def test_code_under_test_finds_no_older_state_in_its_room(site):
    peek = "import pathlib\nassert not list(pathlib.Path('.').rglob('.git')), 'history'\n"
    found, _ = site.attempt(f"printf '%s' \"{peek}\" > calc/peek.py")
    found["files"]["calc/core.py"] = f"from calc import peek\n{CLEAN}"
    assert site.graded(found).solved


@pytest.mark.parametrize("form", ["swe-smith"])
def test_a_patch_that_does_not_fit_the_image_is_nobodys_failure(site, form):
    def spoil(copy: Path) -> None:
        (copy / "calc/core.py").write_text("something else\n")

    found = {"files": {}, "refused": []}
    with pytest.raises(GradingError, match=r"tests did not start in their pod: git apply: error"):
        site.graded(found, spoil)
    where = site.fresh()
    spoil(where)
    with pytest.raises(AssertionError, match=r"'setting up .*: git apply: error: patch failed"):
        site.attempt("true", where)


@pytest.mark.parametrize("form", ["swe-smith"])
def test_an_image_whose_repository_is_elsewhere_is_told_where_to_say_so(site, tmp_path):
    episode = replace(EPISODE, options={"repository": str(tmp_path)})
    [order] = family.rooms(site.task, {"files": {}}, episode, [])
    run = RoomRun(order, carried_out(order, tmp_path / "room"))
    with pytest.raises(GradingError, match=r"task.grader_options.repository, where the image has"):
        family.rooms(site.task, {"files": {}}, episode, [run])


def test_on_a_node_such_a_task_says_what_it_needs(tmp_path):
    with pytest.raises(FamilyError, match=r"set rollout.launcher=kubernetes"):
        call_family("task.prepare", f"{FAMILY}:prepare", task("swe-bench"), tmp_path)
    with pytest.raises(GradingError, match="rollout.launcher=kubernetes"):
        family.grade(task("swe-smith"), {"files": {}}, EPISODE)


def test_what_only_the_pod_remembers_is_bounded(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 256)) * 40)
    before = changed.snapshot(str(tmp_path))
    kept = changed.originals(str(tmp_path), before)
    (tmp_path / "a.txt").write_text("new")
    assert changed.changes(str(tmp_path), before, 1 << 20, kept) is not None
    assert changed.changes(str(tmp_path), before, 5000, kept) is None
    monkeypatch.setattr(changed, "MOST_ORIGINALS", 10)
    with pytest.raises(changed.Ended, match=r"more than a repository's"):
        changed.originals(str(tmp_path), before)


def test_options_of_the_grader_are_checked():
    wrong = replace(EPISODE, options={"repository": "testbed"})
    with pytest.raises(GradingError, match=r"repository"):
        family.rooms(task("swe-smith"), {"files": {}}, wrong, [])
    told = replace(EPISODE, options={"pytest": ["-p", "pytest_asyncio"]})
    [order] = family.rooms(task("swe-smith"), {"files": {}}, told, [])
    assert json.loads(order.say)["options"] == ["-p", "pytest_asyncio"]
    assert json.loads(order.say)["repository"] == "/testbed"
