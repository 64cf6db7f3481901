"""Repository tasks: what the agent gets, what is judged, and what an honest repair is worth."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightning_ray import canary
from lightning_ray.records import Outcome, Split, Task
from lightning_ray.rollouts import sandbox
from lightning_ray.rollouts.grading import Episode
from lightning_ray.tasks.swe import (
    cleanroom,
    evidence,
    examination,
    kinship,
    making,
    measure,
    offline,
    patches,
    protection,
    runtime,
    sources,
    traces,
    trees,
    twins,
)
from lightning_ray.tasks.swe import repository as family
from lightning_ray.tasks.swe.evidence import Judgement, Report, Suite, Verdict
from lightning_ray.tasks.swe.grading import GradingError
from lightning_ray.tasks.swe.preparation import local
from lightning_ray.tasks.swe.record import RepositoryTask

EVERY = offline.records()
SMALL = [record for record in EVERY if record.package == "parse"]  # the fastest suite
EPISODE = Episode("r", "r-a0", Outcome.COMPLETED, "", ("one", "two"))


def task_of(record: RepositoryTask) -> Task:
    [task] = [t for t in offline.train() + offline.validation() if t.task_id == record.instance_id]
    return task


def repair(record: RepositoryTask) -> dict[str, str | None]:
    """What an honest agent changes."""
    path = record.function.partition("::")[0]
    return {path: sources.tree(record.package)[path].decode()}


# -- the tasks -------------------------------------------------------------------------------------


def test_there_are_tasks_enough_of_which_no_two_are_the_same():
    assert len(EVERY) >= 150
    assert len({record.package for record in EVERY}) >= 4
    assert len({record.patch for record in EVERY}) == len(EVERY)
    assert len({record.instance_id for record in EVERY}) == len(EVERY)
    assert {t.task_id for t in offline.train() + offline.validation()} == {
        r.instance_id for r in EVERY
    }


@functools.cache
def parsed(package: str, path: str) -> list[ast.stmt]:
    """The classes and functions of a module as it is without a bug, outer ones first."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    tree = ast.parse(sources.tree(package)[path])
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def lines_of(record: RepositoryTask) -> set[tuple[str, int]]:
    """The lines of the functions that a bug changes, or of the class if it is named for that."""
    path, _, entity = record.function.partition("::")
    clean, found = sources.tree(record.package)[path].decode().split("\n"), set()
    for hunk in re.finditer(r"^@@ -(\d+),.*\n((?:[-+ ].*\n|\n)+)", record.patch, re.MULTILINE):
        context = re.match(r"(?: .*\n|\n)*", hunk[2])[0]
        number = int(hunk[1]) + context.count("\n")
        if hunk[2][len(context)] == "+" or not clean[number - 1].strip():
            number -= 1
        around = [n for n in parsed(record.package, path) if n.lineno <= number <= n.end_lineno]
        classes = [n for n in around if isinstance(n, ast.ClassDef)]
        functions = [n for n in around if not isinstance(n, ast.ClassDef)]
        [node, *_] = [n for n in classes if n.name == entity] or functions
        found |= {(path, line) for line in range(node.lineno, node.end_lineno + 1)}
    return found


def test_no_line_of_a_function_and_no_change_is_in_both_splits():
    for package in {record.package for record in EVERY}:
        of = {s: [r for r in EVERY if r.package == package and r.split is s] for s in Split}
        train, validation = of[Split.TRAIN], of[Split.VALIDATION]
        assert 0.15 <= len(validation) / len(train + validation) <= making.VALIDATION_SHARE
        lines = {r.instance_id: lines_of(r) for r in train + validation}
        for one, other in itertools.product(train, validation):
            assert not lines[one.instance_id] & lines[other.instance_id]
            assert kinship.changed(one.patch) != kinship.changed(other.patch)


def test_the_checked_in_splits_are_those_that_the_making_gives(tmp_path):
    written = (sources.DATA / "tasks.jsonl").read_text()
    making.write({}, [json.loads(line) for line in written.splitlines()], tmp_path)
    assert (tmp_path / "tasks.jsonl").read_text() == written


def test_kin_are_found_through_third_ones_and_by_lines_not_names():
    source = """
    class A:
        def f(self):
            def inner():
                return 1
            return inner

        def g(self):
            return 2

    class B:
        def f(self):
            return 3

    def copied():
        return 4

    def copy():
        return 4
    """
    clean = {"m.py": textwrap.dedent(source).lstrip().encode()}

    def bug(number: int, after: str, entity: str) -> dict[str, str]:
        lines = clean["m.py"].decode().split("\n")
        patch = (
            f"--- a/m.py\n+++ b/m.py\n@@ -{number} +{number} @@\n-{lines[number - 1]}\n+{after}\n"
        )
        return {"package": "p", "patch": patch, "function": f"m.py::{entity}"}

    outer, inner = bug(5, "        pass", "f"), bug(4, "            pass", "inner")
    method, other = bug(8, "        pass", "g"), bug(12, "        pass", "f")
    whole = bug(8, "        return 0", "A")
    first, second = bug(15, "    pass", "copied"), bug(18, "    pass", "copy")
    rows = [outer, inner, method, other, first, second]
    assert kinship.families(rows, {"p": clean}) == [
        [outer, inner], [method], [other], [first, second]
    ]  # fmt: skip
    assert kinship.families([*rows, whole], {"p": clean}) == [
        [outer, inner, method, whole], [other], [first, second]
    ]  # fmt: skip


def test_every_task_has_what_the_making_promises():
    for record in EVERY:
        assert 1 <= len(record.fail_to_pass) <= making.MAX_FAIL_TO_PASS
        assert len(record.pass_to_pass) >= making.MIN_PASS_TO_PASS
        assert not set(record.fail_to_pass) & set(record.pass_to_pass)
        assert len(record.patch.encode()) <= making.MAX_PATCH_BYTES
        assert record.n_ref_runs >= 3
        known = offline.suites()[record.package]
        for test in record.fail_to_pass:
            name = twins.function_of(test)
            assert len(known["twins"][known["owners"].get(name, name)]) >= traces.MIN_TWINS
        suite = offline.suite(record, python="python3")
        hidden = {suite.function(test) for test in record.fail_to_pass}
        alike = offline.hidden_twins()[record.bug_patch]
        assert alike and alike.keys() <= hidden
        assert all(suite.twins[name] == edits for name, edits in alike.items())
        assert min(map(len, alike.values())) >= traces.MIN_TWINS
        assert RepositoryTask.from_row(record.to_smith()) == record
        gold = RepositoryTask.from_row(record.to_bench())
        assert (gold.gold_patch, gold.bug_patch) == (record.gold_patch, record.patch)


def test_a_statement_names_no_hidden_test_and_no_change():
    for record in EVERY:
        for test in record.fail_to_pass:
            assert test.rpartition("::")[2] not in record.problem_statement
        lines = [line[1:].strip() for line in record.patch.splitlines() if line[:1] in "+-"]
        assert not [x for x in lines if len(x) > 12 and x in record.problem_statement]


@pytest.mark.slow
def test_every_reference_repair_gives_the_package_itself():
    for record in EVERY:
        clean = sources.tree(record.package)
        assert trees.apply(offline.graded_tree(record), record.gold_patch) == clean


def test_folders_with_a_copy_of_a_package_are_hidden_wherever_they_lie(tmp_path, monkeypatch):
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    conda = tmp_path / "conda" / "pkgs" / "parse-1.20" / "site-packages"
    cloud = tmp_path / "share" / "cloud" / "lib" / "third_party"
    other = tmp_path / "lib" / "python3.12" / "dist-packages"
    for path in (site / "pip" / "_vendor" / "parse", conda / "parse", cloud / "parse", other / "x"):
        path.mkdir(parents=True)
        (path / "__init__.py").touch()
    monkeypatch.setattr(sources, "_SHOWN", (str(tmp_path),))
    sources.shared.cache_clear()
    try:
        hidden = sources.hidden(sources.packages()["parse"])
    finally:
        sources.shared.cache_clear()
    assert {site, conda, cloud} <= {*hidden} and other not in hidden
    assert {sources.DATA, sources.cache() / "sdists"} <= {*hidden}
    for package in sources.packages().values():
        assert sources.copies(package, [*sources.environment().glob("lib/*/site-packages")]) == []


@pytest.mark.skipif(sandbox.protection().bubblewrap is None, reason="there is no bubblewrap")
def test_an_agent_sees_no_folder_of_the_machine_that_nobody_asked_for(tmp_path):
    argv, _ = sandbox.around(tmp_path, "http://127.0.0.1:1", [], sandbox.Wanted(require=True))
    shown = {argv.bubblewrap[at + 1] for at, x in enumerate(argv.bubblewrap) if x == "--ro-bind"}
    assert "/usr" in shown
    assert not {path for path in shown if path.startswith(("/opt", "/nix", "/var", "/srv"))}


SEES = """
import os, sys
def walk(top):
    for at, folders, files in os.walk(top):
        folders[:] = [name for name in folders if (at, name) not in {("/", "proc"), ("/", "dev")}]
        yield from (os.path.join(at, name) for name in files)
open(os.environ["HOME"] + "/junit.xml", "w").write("\\n".join(walk("/")))
"""


@pytest.mark.skipif(sandbox.protection().bubblewrap is None, reason="there is no bubblewrap")
def test_code_under_test_sees_nothing_that_was_not_read_before_its_run(tmp_path):
    room, scratch = tmp_path / "room", tmp_path / "room" / "scratch"
    scratch.mkdir(parents=True)
    (scratch / "junit.xml").touch()
    argv = protection.protection().prefix(room, scratch)
    env = {"HOME": str(scratch)}
    subprocess.run([*argv, offline.suite(SMALL[0]).python, "-c", SEES], env=env, check=True)
    away = {str(path) for path in runtime.hidden()}
    warm = {file for path in runtime.shown() for file in runtime._files(str(path), away)}
    seen = {*(scratch / "junit.xml").read_text().split("\n")} - {str(scratch / "junit.xml")}
    assert len(seen) > 1000
    assert seen - warm == set()


@pytest.mark.skipif(sandbox.protection().bubblewrap is None, reason="there is no bubblewrap")
def test_what_is_hidden_is_empty_also_in_a_folder_that_is_shown(tmp_path):
    secret = tmp_path / "shown" / "data" / "tasks.jsonl"
    (tmp_path / "own").mkdir()
    secret.parent.mkdir(parents=True)
    secret.write_text("the answer")
    said = []
    for hidden in ([], [secret.parent]):
        box = sandbox.prefix(tmp_path / "own", [tmp_path / "shown"], hidden)
        done = subprocess.run([*box, "cat", str(secret)], capture_output=True, text=True)
        said.append(done.stdout)
    assert said == ["the answer", ""]


# -- what the agent gets ---------------------------------------------------------------------------


@pytest.mark.parametrize("record", SMALL[:2], ids=lambda r: r.instance_id)
def test_the_agent_gets_one_commit_without_the_tests_that_tell(tmp_path, record):
    commits = set()
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        setting = family.prepare(task_of(record), folder)
        run = ["git", "-C", str(folder)]
        log = subprocess.run([*run, "log", "--all", "--format=%H"], capture_output=True, text=True)
        commits.add(log.stdout)
        status = subprocess.run([*run, "status", "--short"], capture_output=True, text=True)
        assert status.stdout == ""
        assert family.collect(task_of(record), folder) == {
            "files": {},
            "refused": [],
            "patch": "",
        }
    assert len(commits) == 1 and len(commits.pop().split()) == 1
    for test in record.fail_to_pass:
        path, _, name = twins.function_of(test).partition("::")
        assert name not in twins.functions((folder / path).read_text())
    argv = [*offline.test_command(sources.packages()[record.package]).split(), "-q"]
    env = {"PATH": os.pathsep.join([*setting["path"], os.environ["PATH"]])}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_task_without_local_sources_says_what_it_needs(tmp_path):
    row = SMALL[0].to_smith() | {"package": "django", "image_name": "images/django"}
    with pytest.raises(ValueError, match="needs its container image .images/django"):
        family.prepare(RepositoryTask.from_row(row).to_task(), tmp_path)


def test_a_package_can_be_judged_from_a_row_of_either_form():
    record = SMALL[0]
    own = {"package": record.package, "sdist_sha256": record.sdist_sha256}
    row = record.to_bench() | own | {"python": record.python}
    told = RepositoryTask.from_row(row).to_task()
    assert told.fields["format"] == "swe-bench"
    stored = RepositoryTask.from_task(Task(**json.loads(json.dumps(asdict(told)))))
    assert family.graded_tree(stored) == family.graded_tree(record)
    assert offline.suite(stored, "python3").twins == offline.suite(record, "python3").twins


DIFF = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"


def test_a_patch_is_applied_where_temporary_files_lie_in_a_repository_too(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    tree = {"x.py": b"a\n", "y.py": b"c\n"}
    assert trees.apply(tree, DIFF) == {"x.py": b"b\n", "y.py": b"c\n"}


def test_a_patch_that_changes_no_text_is_no_patch():
    mode = "diff --git a/x.py b/x.py\nold mode 100644\nnew mode 100755\n"
    with pytest.raises(patches.PatchError, match="changes nothing"):
        trees.apply({"x.py": b"a\n"}, mode)


def test_tests_are_cut_out_and_the_rest_of_the_file_stays():
    source = (
        "import unittest\n\n\nclass A(unittest.TestCase):\n    x = 1\n\n    @property\n"
        "    def test_a(self):\n        pass\n\n    def test_b(self):\n        pass\n\n\n"
        "class B:\n    def test_c(self):\n        pass\n\n\ndef test_d():\n    pass\n"
    )
    cut = trees.without_tests({"t.py": source.encode()}, ["t.py::A::test_a", "t.py::B::test_c[1]"])
    assert list(twins.functions(cut["t.py"].decode())) == ["A::test_b", "test_d"]
    assert "class B:\n    pass" in cut["t.py"].decode()
    assert "@property" not in cut["t.py"].decode()


# -- verdicts --------------------------------------------------------------------------------------


def honest() -> list[object]:
    """A fixed sample, one task of each package, and on demand every other: all of a package have
    the same repaired tree and the same suite, so that one stands for them."""
    chosen = [next(r for r in EVERY if r.package == p) for p in sorted({r.package for r in EVERY})]

    def marks(record: RepositoryTask) -> list[pytest.MarkDecorator]:
        if record not in chosen:
            return [pytest.mark.demand]
        return [pytest.mark.slow] * (record.package != "parse")

    return [pytest.param(r, id=r.instance_id, marks=marks(r)) for r in EVERY]


@pytest.mark.parametrize("record", honest())
def test_an_honest_repair_is_solved(record):
    result = {"files": repair(record), "refused": []}
    reward = family.grade(task_of(record), result, EPISODE)
    assert (reward.value, reward.solved, reward.metrics["tampered"]) == (1.0, True, 0.0)
    assert reward.metrics["test_runs"] == 2 + examination.ROUNDS


def test_another_repair_than_the_reference_is_solved():
    record = SMALL[0]
    path, text = next(iter(repair(record).items()))
    changed = {path: text + "\n# mended\n", "parse/helper.py": "x = 1\n", "README.rst": None}
    assert family.judge(record, changed).verdict is Verdict.SOLVED


def test_the_bug_itself_is_unsolved_in_every_task_of_the_sample():
    for record in SMALL[:2]:
        judgement = family.judge(record, {})
        assert judgement.verdict is Verdict.UNSOLVED
        assert judgement.fail_to_pass < len(record.fail_to_pass)


def test_a_repair_that_breaks_something_else_is_unsolved():
    record = SMALL[0]
    path, text = next(iter(repair(record).items()))
    broken = text + "\n\ndef findall(*a, **k):\n    return []\n"
    judgement = family.judge(record, {path: broken}, counted=True)
    assert judgement.verdict is Verdict.UNSOLVED
    assert judgement.right == judgement.fail_to_pass == len(record.fail_to_pass)


def test_a_machine_on_which_the_package_itself_fails_a_test_judges_no_failure(monkeypatch):
    """Who measured the suite elsewhere saw a test pass that cannot pass here."""
    real, gone = offline.suite, "tests/test_parse.py::test_gone"

    def measured(record: RepositoryTask, python: str | None = None) -> Suite:
        suite = real(record, python)
        return replace(suite, pass_to_pass=suite.pass_to_pass | {gone})

    monkeypatch.setattr(offline, "suite", measured)
    for changes in ({}, repair(SMALL[0])):
        with pytest.raises(GradingError, match=f"parse as it came is unsolved .*{gone}"):
            family.judge(SMALL[0], changes)


def test_that_a_machine_can_judge_a_package_is_shown_once(monkeypatch):
    package, runs, real = sources.packages()["parse"], [], cleanroom.run

    def counted(*argv: object, **how: object) -> Report:
        runs.append(how["protection"])
        return real(*argv, **how)

    monkeypatch.setattr(cleanroom, "run", counted)
    monkeypatch.setattr(sandbox, "machine", lambda: f"another one {os.getpid()}")
    suite = offline.suite(SMALL[0])
    for _ in range(3):
        protection.vouch(package, suite)
    assert len(runs) == 1 and runs[0] != cleanroom.UNPROTECTED
    shown = sources.cache() / "rooms" / protection._digest(package, suite)
    shown.unlink()
    other = replace(suite, pass_to_pass=suite.pass_to_pass - {min(suite.pass_to_pass)})
    assert protection._digest(package, other) != shown.name


LOOKS = """
import os
import a

def test_one():
    assert a.x == 1

def test_sees_this_machine():
    assert os.path.exists("/usr/bin/env")
"""


@pytest.mark.skipif(sandbox.protection().bubblewrap is None, reason="there is no bubblewrap")
def test_a_test_that_a_room_keeps_from_passing_is_measured_so(monkeypatch):
    tree = {"a.py": b"x = 1\n", "test_a.py": LOOKS.encode()}
    python = str(sources.environment() / "bin" / "python")
    suite = Suite(python, ("test_a.py",), frozenset(), frozenset())
    one, sees = "test_a.py::test_one", "test_a.py::test_sees_this_machine"
    assert cleanroom.run(tree, suite).outcomes == {one: "passed", sees: "passed"}
    monkeypatch.setattr(measure, "TWIN_RUNS", 1)
    monkeypatch.setattr(measure, "MIXED_RUNS", 1)
    found = measure.reference(tree, suite, lambda line: None, protection.protection())
    assert (found["stable"], found["others"]) == ([one], [sees])


def test_whoever_measures_tests_of_a_package_does_it_in_the_room_that_judges(monkeypatch):
    asked = []

    def run(*argv: object, protection: cleanroom.Protection, **how: object) -> Report:
        asked.append(protection)
        raise cleanroom.RoomFault("not here")

    monkeypatch.setattr(cleanroom, "run", run)
    record, package = SMALL[0], sources.packages()["parse"]
    suite = making.suite_of(package, offline.suites()["parse"])
    bug = making.Bug("s", "d", "e", record.bug_patch)
    for measures in (
        lambda: making.reference(package, print),
        lambda: making.judge(package, suite, bug),
        lambda: local.Local().run(record, fixed=True, seed=0),
        lambda: protection.vouch(package, replace(suite, targets=("other",))),
        lambda: family.judge(record, {}),
    ):
        with pytest.raises((cleanroom.RoomFault, GradingError)):
            measures()
    names = [room.passed.__module__ for room in asked]
    assert names == [protection.__name__] * 5


def test_who_measures_without_a_sandbox_is_told(monkeypatch, capsys, tmp_path):
    nothing = sandbox.Protection(None, False, ("bubblewrap is not installed",))
    assert sandbox.protection().bubblewrap is None or protection.missing() == ""
    monkeypatch.setattr(sandbox, "protection", lambda: nothing)
    said = []
    making.make([], tmp_path, said.append)
    local.Local()
    told = "measured without a sandbox (bubblewrap is not installed)"
    assert told in said[0] and told in capsys.readouterr().err


def test_a_room_that_cannot_be_had_is_a_fault_and_no_verdict(monkeypatch):
    real = offline.suite
    monkeypatch.setattr(offline, "suite", lambda r: replace(real(r), python="/nowhere/python"))
    with pytest.raises(GradingError, match="cannot grade"):
        family.judge(SMALL[0], {})


def test_an_interpreter_without_pytest_is_a_fault_and_no_verdict(monkeypatch, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    suite = replace(offline.suite(SMALL[0]), python=str(tmp_path / "v" / "bin" / "python"))
    with pytest.raises(cleanroom.RoomFault, match="No module named 'pytest'"):
        cleanroom.run(offline.graded_tree(SMALL[0]), suite)


def test_files_with_hidden_tests_and_stored_patches_hold_a_canary_that_changes_nothing():
    for record in SMALL:
        plain, graded = offline.graded_tree(record), family.graded_tree(record)
        changed = {path for path in plain if plain[path] != graded[path]}
        assert changed == {test.partition("::")[0] for test in record.fail_to_pass}
        for path in changed:
            assert graded[path].startswith(plain[path])
            added = graded[path][len(plain[path]) :].decode()
            assert canary.seen(added) and added.strip().startswith("# ")
        assert not any(canary.seen(text.decode(errors="replace")) for text in plain.values())
        assert canary.seen(task_of(record).fields["patch"])
        kept = RepositoryTask.from_task(task_of(record))
        assert kept.bug_patch == record.bug_patch and not canary.seen(kept.gold_patch)


def test_rewards_are_shaped_for_solved_training_rollouts_only():
    record = SMALL[0]
    shaping = family.Shaping(
        turn_penalty=0.05,
        free_turns=1,
        prompt_penalty=0.1,
        free_prompt_tokens=1000,
        partial_credit=0.5,
    )
    solved = Judgement(Verdict.SOLVED)
    half = Judgement(Verdict.UNSOLVED, right=len(record.fail_to_pass))
    tampered = Judgement(Verdict.TAMPERED, right=len(record.fail_to_pass))
    train = replace(EPISODE, prompt_tokens=3000)
    validation = replace(train, split=Split.VALIDATION)

    def value(judgement: Judgement, episode: Episode, shaping: family.Shaping = shaping) -> float:
        return family.shaped(judgement, record, episode, shaping)

    assert value(solved, train) == pytest.approx(1 - 0.05 - 0.2)
    assert value(solved, replace(train, texts=("x",) * 100)) == shaping.least_solved
    assert value(half, train) == 0.5
    assert value(half, train, family.Shaping()) == 0.0
    assert value(tampered, train) == 0.0
    assert [value(j, validation) for j in (solved, half, tampered)] == [1.0, 0.0, 0.0]


def test_passing_hidden_tests_is_worth_nothing_where_no_twin_shows_that_it_is_honest():
    record, shaping = SMALL[0], family.Shaping(partial_credit=0.5)
    said = Judgement(Verdict.UNSOLVED, fail_to_pass=len(record.fail_to_pass))
    assert family.shaped(said, record, EPISODE, shaping) == 0.0
    task = record.model_copy(update={"package": ""}).to_task()
    with pytest.raises(GradingError, match="partial_credit is for packages"):
        family.rooms(task, {}, replace(EPISODE, options={"partial_credit": 0.5}), [])


FORGER = """

from _pytest import runner as _runner
_honest = _runner.TestReport.from_item_and_call.__func__
def _forged(cls, item, call):
    report = _honest(cls, item, call)
    if item.originalname in NAMES:
        report.outcome, report.longrepr = "passed", None
    return report
_runner.TestReport.from_item_and_call = classmethod(_forged)
def findall(*a, **k):
    return []
"""


@pytest.mark.slow
def test_who_forges_the_hidden_test_and_lets_another_one_fail_has_no_partial_credit():
    record, (path, text) = SMALL[0], next(iter(repair(SMALL[0]).items()))
    names = {twins.function_of(test).rpartition("::")[2] for test in record.fail_to_pass}
    forger = FORGER.replace("NAMES", repr(names))
    broken = offline.graded_tree(record)[path].decode()
    options = {"partial_credit": 0.5}
    episode = replace(EPISODE, options=options)
    mended = text + "\n\ndef findall(*a, **k):\n    return []\n"
    values = [
        family.grade(task_of(record), {"files": {path: changed}}, episode).value
        for changed in (broken + forger, mended)
    ]
    assert values == [0.0, 0.5]


def test_a_room_in_which_the_bug_passes_is_a_fault_and_no_verdict():
    tree = {"a.py": b"x = 1", "test_a.py": b"import a\ndef test_a():\n    assert a.x == 1"}
    python = str(sources.environment() / "bin" / "python")
    suite = Suite(python, ("test_a.py",), frozenset({"test_a.py::test_a"}), frozenset())
    assert cleanroom.examine(tree, suite, known_bad={**tree, "a.py": b""}).runs == 2
    with pytest.raises(cleanroom.RoomFault, match="known-bad tree is solved here"):
        cleanroom.examine(tree, suite, known_bad=tree)


@pytest.mark.parametrize("options", [{"turn_penalty": -1.0}, {"partial_credits": 0.5}])
def test_an_option_that_shapes_nothing_is_a_fault(options):
    with pytest.raises(GradingError, match="turn_penalty|partial_credits"):
        family.grade(task_of(SMALL[0]), {"files": {}}, replace(EPISODE, options=options))


# -- evidence --------------------------------------------------------------------------------------

A, B = "t.py::test_a", "t.py::test_b"
SUITE = Suite("python", ("t.py",), frozenset({A}), frozenset({B}), {A: [], B: []})


def said(**changes: object) -> Report:
    """A report of two passing tests, with all that an honest run leaves, and then `changes`."""
    birds = [f"canary.py::test_{n}" for n in range(len(evidence.CANARIES))]
    outcomes = {A: "passed", B: "passed"} | dict.fromkeys(birds, "failed")
    names = {test: test.rpartition("::")[2] for test in outcomes}
    cases = "".join(
        f'<testcase name="{names[t]}">{"<failure/>" * (o == "failed")}</testcase>'
        for t, o in outcomes.items()
    )
    junit = f"<testsuites>{cases}</testsuites>".encode()
    told = {"nonce": "n", "collected": [*outcomes], "names": names, "outcomes": outcomes}
    told = told | {"errors": []} | changes
    return evidence.read(json.dumps(told).encode(), 1, "n", junit, "canary.py")


def test_a_run_whose_witnesses_agree_is_solved():
    report = said()
    assert report.evidence == ()
    assert evidence.weigh(report, SUITE) == (Verdict.SOLVED, ())


BIRDS = [f"canary.py::test_{n}" for n in range(len(evidence.CANARIES))]
CONTRADICTIONS = {
    "nonce": ({"nonce": "m"}, "nonce"),
    "no canary": ({"outcomes": {A: "passed", B: "passed"}}, "0 of 4 canaries"),
    "a singing canary": (
        {"outcomes": {A: "passed", B: "passed"} | dict.fromkeys(BIRDS, "passed")},
        "did not fail",
    ),
    "ids": ({"collected": [A]}, "collected"),
    "JUnit": (
        {"outcomes": {A: "failed", B: "passed"} | dict.fromkeys(BIRDS, "failed")},
        "JUnit",
    ),
    "form": ({"outcomes": 3}, "cannot be read"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_tampering_with_its_evidence(name):
    changes, expected = CONTRADICTIONS[name]
    verdict, found = evidence.weigh(said(**changes), SUITE)
    assert verdict is Verdict.TAMPERED
    assert expected in "; ".join(found)


def test_exit_statuses_that_do_not_fit():
    def of(told: bytes, status: int | None) -> Verdict:
        report = evidence.read(told, status, "n", None, "canary.py")
        return evidence.weigh(report, SUITE)[0]

    assert of(b"", 0) is Verdict.TAMPERED  # canaries fail, so 0 is a lie
    assert of(b"{}", 0) is Verdict.TAMPERED
    assert [of(b"", status) for status in (None, 1, 2, 3, 4, -9)] == [Verdict.UNSOLVED] * 6


def test_a_twin_that_passes_is_tampering_and_a_test_that_does_not_repeat_is_unsolved():
    report = said()
    assert evidence.weigh(report, SUITE, frozenset({A}))[0] is Verdict.TAMPERED
    fails = replace(report, outcomes={A: "failed", B: "passed"})
    assert evidence.weigh(fails, SUITE, frozenset({A}))[0] is Verdict.SOLVED
    assert evidence.weigh(fails, SUITE, frozenset({B}))[0] is Verdict.UNSOLVED
    assert evidence.weigh(fails, replace(SUITE, touchy=frozenset({A})), frozenset({B}))[0] is (
        Verdict.TAMPERED  # B passed, which must not
    )


def test_tests_may_be_added_but_not_be_missing():
    report = said()
    more = {**report.outcomes, "t.py::test_new": "failed"}
    assert evidence.weigh(replace(report, outcomes=more), SUITE)[0] is Verdict.SOLVED
    assert evidence.weigh(replace(report, outcomes={A: "passed"}), SUITE)[0] is Verdict.UNSOLVED


# -- where it runs ---------------------------------------------------------------------------------


def test_the_clean_room_needs_the_standard_library_only(tmp_path):
    package = tmp_path / "lightning_ray" / "tasks" / "swe"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    for name in ("cleanroom", "evidence", "examination", "twins", "witness"):
        shutil.copy(Path(cleanroom.__file__).with_name(f"{name}.py"), package)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from lightning_ray.tasks.swe import cleanroom, evidence\n"
        "suite = evidence.Suite(sys.argv[1], ('test_a.py',), frozenset({'test_a.py::test_a'}), "
        "frozenset(), frozenset())\n"
        "tree = {'a.py': b'x = 1', 'test_a.py': b'import a\\ndef test_a(): assert a.x == 1'}\n"
        "print(cleanroom.examine(tree, suite).verdict.value)\n"
        "print(cleanroom.examine({**tree, 'a.py': b'x = 2'}, suite).verdict.value)\n"
    )
    python = str(sources.environment() / "bin" / "python")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, python], capture_output=True, text=True
    )
    assert done.stdout.split() == ["solved", "unsolved"], done.stderr


def test_sources_that_are_there_are_read_where_nothing_can_be_written(monkeypatch):
    package = sources.packages()["parse"]
    content = sources._sdist(package)
    monkeypatch.setattr(sources.filelock, "FileLock", None)  # it would want to write
    assert sources._sdist(package) == content
