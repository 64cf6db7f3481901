"""Repositories that only their image has: what an agent finds, what comes back, how it is judged.
The image is a folder here, and the program of a pod a process; tests/kubernetes has real Jobs."""

from __future__ import annotations

import ast
import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from images import BROKEN, CLEAN, ROWS, TESTS, git, image, task
from rooms import carried_out, run_pod

from lightning_ray import canary
from lightning_ray.config import load
from lightning_ray.records import Json, Outcome, Reward, Split
from lightning_ray.rollouts.grading import Episode, RoomRun
from lightning_ray.rollouts.harness import Recipe
from lightning_ray.rollouts.local import FamilyError, call_family
from lightning_ray.rollouts.pods import changed, staging
from lightning_ray.rollouts.pods.staging import PodLimits
from lightning_ray.tasks.swe import benchmarks, canaries, cleanroom, layout, offline, sources
from lightning_ray.tasks.swe import repository as family
from lightning_ray.tasks.swe.grading import GradingError
from lightning_ray.tasks.swe.imaged import PAIRS

FAMILY = "lightning_ray.tasks.swe.repository"
# The suite, the bug, the reference; six changes to the one hidden test are measured; a pair is one
# run with its twin, which has a control, and one with the test itself.
RUNS = 3 + 6 + 3 * PAIRS
EPISODE = Episode("r", "r-a0", Outcome.COMPLETED, "", ("I mended it.",))
FORMS = pytest.mark.parametrize("form", list(ROWS))


class Site:
    """A task, and fresh copies of its image."""

    def __init__(self, folder: Path, form: str, testbed: Path) -> None:
        self.folder, self.task, self.testbed = folder, task(form), testbed
        self.python = ""
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
        files = {"order": order, staging.WORKSPACE: stage.workspace}
        said = json.loads(run_pod(files, pod, self.python))
        assert (said["ended_by"], said["status"]) == ("exit", 0), said
        sent = (pod / "result").read_bytes()
        found, problem = staging.outcome_of(self.task, stage.workspace, sent, f"{FAMILY}:collect")
        assert not problem and found is not None
        return found, where

    def graded(self, result: Json, change: Callable[[Path], None] = lambda copy: None) -> Reward:
        """The reward, each run of the tests in a fresh copy at one place, as in a pod; `change` may
        spoil it."""
        where = self.testbed
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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(autouse=True)
def cache(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What one test learns of a task the next one knows, as on a machine; and no other machine."""
    monkeypatch.setattr(sources, "cache", lambda: shared / "cache")
    return shared / "cache"


@pytest.fixture
def site(tmp_path: Path, form: str, shared: Path) -> Site:
    return Site(tmp_path, form, shared / "testbed")


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


REPLACED = {
    "a file by a folder": {"calc": None, "calc/x.py": "1", "calc/a/b.py": "2"},
    "a folder by a file": {"pkg/a/x.py": None, "pkg/y.py": None, "pkg": "3"},
    "half a folder by a file": {"pkg/y.py": None, "pkg/a": "4"},
    "a folder that goes": {"pkg/a/x.py": None, "pkg/y.py": None, "pkg/a/z.py": None},
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_a_change_puts_in_the_place_of_another_thing_is_the_same_in_an_image(tmp_path, what):
    before = {"calc": b"0", "pkg/a/x.py": b"0", "pkg/y.py": b"0", "t.py": b"0"}
    here = tmp_path / "repository"
    cleanroom.stage(before, here)
    git(here, "init", "-q")
    files = {
        path: None if text is None else base64.b64encode(text.encode()).decode()
        for path, text in sorted(REPLACED[what].items(), reverse=True)
    }
    order = {"diffs": [], "files": files, "fresh": {}, "alone": [], "history": None}
    argv = [sys.executable, layout.__file__]
    done = subprocess.run(argv, input=json.dumps(order), cwd=here, capture_output=True, text=True)
    assert done.returncode == 0 or what == "half a folder by a file", done.stderr
    after = family.merged(before, REPLACED[what])
    assert (after is None) == bool(done.returncode)
    if after:
        found = [path for path in here.rglob("*") if path.is_file()]
        assert {str(p.relative_to(here)): p.read_bytes() for p in found} == after


@pytest.mark.parametrize("form", ["swe-smith", pytest.param("swe-bench", marks=pytest.mark.slow)])
def test_a_repair_comes_back_as_a_patch_and_is_solved(site, form, tmp_path):
    site.testbed = tmp_path / "testbed"  # of which nothing is known
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
    again = site.graded({"files": {}, "refused": []})  # what is known is not measured again
    assert (again.solved, again.metrics["test_runs"]) == (False, 1)


@pytest.mark.parametrize("form", ["swe-bench"])
@pytest.mark.parametrize(
    "script",
    [
        "true",
        "printf 'import os; os._exit(0)' > calc/core.py",
        "rm calc/core.py; mkdir calc/core.py; echo x > calc/core.py/deep.py",
        "rm -r calc; echo x > calc",
        "mkdir tests/test_add.py; echo x > tests/test_add.py/x.txt",
    ],
)
def test_what_is_no_repair_is_not_solved(site, script):
    found, _ = site.attempt(script)
    reward = site.graded(found)
    assert (reward.value, reward.solved) == (0.0, False)


# Believes nothing to have failed, but for tests in files with odd names: the canaries.
FORGER = """
import _pytest.reports, re
make = _pytest.reports.TestReport.from_item_and_call.__func__
def forged(cls, item, call):
    if not re.search("test_[0-9a-f]{8}", item.nodeid) and HERE:
        call.excinfo = None
    return make(cls, item, call)
_pytest.reports.TestReport.from_item_and_call = classmethod(forged)
"""
# And claims that a file could not be collected, which is no excuse for a twin that passed.
CLAIMS_ERRORS = """
import gc
for thing in gc.get_objects():
    if type(thing).__name__ == "Recorder":
        thing.errors.append("tests/test_zero.py")
"""
# And adds a failing test beside each, as if that were what its twin did.
ADDS = """
from _pytest.python import Function, PyCollector
functions = PyCollector._genfunctions
def fails():
    raise AssertionError
def more(self, name, function):
    yield from functions(self, name, function)
    if not re.search("test_[0-9a-f]{8}", self.nodeid):
        yield Function.from_parent(self, name=name + "[z]", callobj=fails)
PyCollector._genfunctions = more
"""
# A twin's file might have been written later than others, or be another one for the file system.
OLD_FILES = """
import os
def newer(path):
    test, other = os.stat(path), os.stat("tests/test_zero.py")
    return test.st_mtime_ns != other.st_mtime_ns
"""


@pytest.mark.parametrize("form", ["swe-smith"])
@pytest.mark.parametrize(
    ("script", "tampered"),
    [
        (FORGER.replace("HERE", "True"), 1.0),
        pytest.param(FORGER.replace("HERE", "True") + CLAIMS_ERRORS, 0.0, marks=pytest.mark.slow),
        pytest.param(
            FORGER.replace("HERE", "'[z]' not in item.name") + ADDS, 1.0, marks=pytest.mark.slow
        ),
        pytest.param(
            OLD_FILES + FORGER.replace("HERE", "not newer('tests/test_add.py')"),
            1.0,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_who_forges_reports_but_does_not_know_the_twins_is_not_solved(site, script, tampered):
    reward = site.graded({"files": {"calc/core.py": script + BROKEN}, "refused": []})
    assert (reward.solved, reward.metrics["tampered"]) == (False, tampered)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["swe-smith"])
def test_every_run_is_laid_out_by_the_same_steps(site, monkeypatch):
    """What a run could see of the others' orders, but for what tests hold."""
    seen, left, honest = [], [], carried_out

    def spy(order, folder):
        told = json.loads(base64.b64decode(order.binary["layout.json"]))
        canary = order.note["canary"]
        files = [path for path in told["files"] if path != canary]
        seen.append((order.note["kind"], files, list(told["fresh"]), len(order.binary)))
        report = honest(order, folder)
        left.append((site.testbed / "tests/test_add.py").read_text())
        return report

    monkeypatch.setattr("test_imaged.carried_out", spy)
    assert site.graded({"files": {"calc/core.py": CLEAN}, "refused": []}).solved
    ours = {(tuple(f), tuple(t), n) for kind, f, t, n in seen if kind in ("as it is", "mixed")}
    assert len(ours) == 1
    assert all(fresh == ["tests/test_add.py"] for _, _, fresh, _ in seen)
    original = TESTS["tests/test_add.py"]
    mark = canaries.below("", "tests", "calc.1")
    assert left[0] == original + mark and len({*left}) > 1
    # A twin differs in a token of the same length.
    assert {(len(text), text.count(mark), text.endswith(mark)) for text in left} == {
        (len(left[0]), 1, True)
    }


CANARY = canaries.below("", "tests", "calc.1").encode()
FILES = {
    "ends.py": b"x = 1\n",
    "does_not_end.py": b"x = 1",
    "empty.py": b"",
    "windows.py": b"x = 1\r\n",
    "has_it.py": b"x = 1\n" + CANARY,
    "other.txt": b">>> 1\n1\n",
}


@pytest.mark.parametrize("given", [True, False], ids=["texts of ours", "texts of the image"])
def test_hidden_files_get_one_canary_below_their_end_that_changes_nothing(tmp_path, given):
    for path, text in FILES.items():
        (tmp_path / path).write_bytes(b"another one" if given else text)
    fresh = {p: base64.b64encode(text).decode() if given else None for p, text in FILES.items()}
    told = {"diffs": [], "files": {}, "fresh": {**fresh, "missing.py": None}, "alone": []}
    told |= {"history": None, "canary": CANARY.decode()}
    for _ in range(2):  # what comes back from a room is laid out in another one
        git(tmp_path, "init", "-q")
        program = [sys.executable, "-c", Path(layout.__file__).read_text()]
        subprocess.run(program, cwd=tmp_path, input=json.dumps(told), text=True, check=True)
        after = {path: (tmp_path / path).read_bytes() for path in FILES}
        assert after.pop("other.txt") == FILES["other.txt"]
        assert not (tmp_path / "missing.py").exists()
        for path, text in after.items():
            assert canary.seen(text.decode()) == canary.seen(CANARY.decode())
            assert text.startswith(FILES[path]) and text.endswith(b"\n" * (text != CANARY) + CANARY)
            trees = [ast.dump(ast.parse(t), include_attributes=True) for t in (text, FILES[path])]
            assert trees[0] == trees[1]
            told["fresh"][path] = base64.b64encode(text).decode()


@pytest.mark.parametrize("form", ["swe-smith"])
@pytest.mark.parametrize("place", ["tests", "git", "gold"])
def test_who_reads_what_is_hidden_of_an_images_task_reads_a_canary(site, place):
    """In a pod that grades, among the agent's objects, in the stored task: and so is void."""
    found, here = site.attempt("true")
    if place == "tests":
        assert not site.graded(found).solved
        text = (site.testbed / "tests/test_add.py").read_text()
    elif place == "git":
        text = git(here, "cat-file", "--batch-all-objects", "--batch")
    else:
        text = site.task.fields["patch"]
    [told] = canary.seen(text)
    assert f"lrcanary-{place}-" in told
    assert canary.first_seen(["fine", f"There it is: {text}"]) == (1, told)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["swe-smith"])
def test_what_python_kept_of_the_clean_state_is_gone_for_agents_and_tests(site, form):
    python = sys.executable
    for path in ("calc/core.py", "tests/test_add.py"):
        subprocess.run([python, "-m", "py_compile", path], cwd=site.image, check=True)
    (site.image / "build/lib/calc").mkdir(parents=True)
    shutil.copy(site.image / "calc/core.py", site.image / "build/lib/calc/core.py")
    _, here = site.attempt("true")
    assert not [*here.rglob("*.pyc"), *here.rglob("build/lib/calc/*.py")]
    look = "import pathlib\nassert not [*pathlib.Path('.').rglob('core.*.pyc')]\n"
    found = {"files": {"calc/peek.py": look, "calc/core.py": f"from calc import peek\n{CLEAN}"}}
    assert site.graded(found).solved


@pytest.mark.parametrize("form", ["swe-smith"])
def test_a_copy_of_the_package_elsewhere_makes_the_image_unfit(site, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    [purelib] = (tmp_path / "v").glob("lib/python*/site-packages")
    shutil.copytree(site.image / "calc", purelib / "calc")
    site.python = str(tmp_path / "v/bin/python")
    with pytest.raises(AssertionError, match=r"core.py is a copy of what the task breaks"):
        site.attempt("true")


@pytest.mark.parametrize("form", ["swe-smith"])
def test_modes_and_files_that_git_ignores_survive(site, form):
    (site.image / "run.sh").write_text("#!/bin/sh\n")
    (site.image / "run.sh").chmod(0o755)
    (site.image / "kept.txt").write_text("tracked")
    (site.image / ".gitignore").write_text("*.pyc\nkept.txt\nnew.txt\n")
    git(site.image, "add", "-A", "-f")
    git(site.image, "commit", "-qm", "more")
    found, _ = site.attempt("git clean -fdXq; test -f kept.txt; echo 'exit 0' >> run.sh")
    assert found["files"] == {"run.sh": "#!/bin/sh\nexit 0\n"}
    order = family.rooms(site.task, found, EPISODE, [])[0]
    told = json.loads(base64.b64decode(order.binary["layout.json"]))
    copy = site.fresh()
    subprocess.run(
        [sys.executable, "-c", Path(layout.__file__).read_text()],
        cwd=copy, input=json.dumps(told), text=True, check=True,
    )  # fmt: skip
    assert (copy / "run.sh").read_text() == "#!/bin/sh\nexit 0\n"
    assert os.access(copy / "run.sh", os.X_OK)


@pytest.mark.parametrize("form", ["swe-bench"])
def test_nothing_is_written_through_a_link_of_the_image(site):
    (site.image / "helpers").symlink_to("tests")
    git(site.image, "add", "-A")
    git(site.image, "commit", "-qm", "a link")
    found = {"files": {"calc/core.py": CLEAN, "helpers/conf.py": "x = 1\n"}, "refused": []}
    assert not site.graded(found).solved


@pytest.mark.parametrize("form", ["swe-smith"])
def test_what_tools_leave_does_not_crowd_out_a_repair(site):
    commit = "git -c user.name=x -c user.email=x@x commit -qam mine"
    script = "mkdir .aaa; for i in $(seq 80); do printf '\\0' > .aaa/$i; done"
    found, _ = site.attempt(f"{script}; sed -i 's/a - b/a + b/' calc/core.py; {commit}")
    assert found["files"]["calc/core.py"] == CLEAN
    assert "calc/core.py" in found["patch"] and ".git" not in str(found)


@pytest.mark.parametrize("form", ["swe-smith"])
def test_an_image_in_which_the_reference_solution_fails_judges_nothing(site, tmp_path):
    site.testbed = tmp_path / "testbed"

    def spoil(copy: Path) -> None:
        (copy / "calc/core.py").write_text(CLEAN.replace("def double", "BROKEN\n\n\ndef double"))

    found = {"files": {"calc/core.py": CLEAN}, "refused": []}
    with pytest.raises(GradingError, match=r"reference state is unsolved here .* cannot judge it"):
        site.graded(found, spoil)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["swe-bench"])
def test_code_under_test_finds_no_older_state_in_its_room(site):
    peek = "import pathlib\nassert not list(pathlib.Path('.').rglob('.git')), 'history'\n"
    found, _ = site.attempt(f"printf '%s' \"{peek}\" > calc/peek.py")
    found["files"]["calc/core.py"] = f"from calc import peek\n{CLEAN}"
    assert site.graded(found).solved


@pytest.mark.parametrize("form", ["swe-smith"])
def test_a_patch_that_does_not_fit_the_image_is_nobodys_failure(site, form):
    site.testbed = site.folder / "testbed"

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
    site.testbed = tmp_path / "testbed"
    with pytest.raises(GradingError, match=r"task.grader_options.repository, where the image has"):
        site.graded({"files": {}}, lambda copy: shutil.rmtree(copy / ".git"))


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


def test_a_row_that_cannot_be_judged_here_can_make_predictions(tmp_path):
    row = {**ROWS["swe-bench"], "FAIL_TO_PASS": ["test_x (module.Class)"]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    [django] = benchmarks.read(str(path))
    assert "setup" in family.prepare(
        replace(django, fields={**django.fields, "launcher": "kubernetes"}), tmp_path
    )
    with pytest.raises(GradingError, match=r"judge=false SWE-bench's own harness can judge"):
        family.rooms(django, {"files": {}}, EPISODE, [])
    told = replace(EPISODE, split=Split.VALIDATION, options={"judge": False})
    assert family.rooms(django, {"files": {}}, told, []) == Reward(0.0, False, {"judged": 0.0})
    with pytest.raises(GradingError, match=r"for evaluations"):
        family.rooms(django, {"files": {}}, replace(told, split=Split.TRAIN), [])


def test_options_reach_the_grader_as_they_are_written():
    words = ["repository=/src", "pytest=[-p, pytest_asyncio]", "judge=false", "free_turns=10"]
    options = load(None, [f"task.grader_options.{word}" for word in words]).task.grader_options
    assert family.Options.model_validate(options).pytest == ["-p", "pytest_asyncio"]
    with pytest.raises(GradingError, match=r"grader_options.judge is for repositories that only"):
        family.grade(offline.train()[0], {"files": {}}, replace(EPISODE, options={"judge": True}))


def test_options_of_the_grader_are_checked():
    wrong = replace(EPISODE, options={"repository": "testbed"})
    with pytest.raises(GradingError, match=r"repository"):
        family.rooms(task("swe-smith"), {"files": {}}, wrong, [])
    told = replace(EPISODE, options={"pytest": ["-p", "pytest_asyncio"]})
    order, *_ = family.rooms(task("swe-smith"), {"files": {}}, told, [])
    assert json.loads(order.say)["options"] == ["-p", "pytest_asyncio"]
    assert json.loads(order.say)["repository"] == "/testbed"
