"""From rows to clean tasks: what is read, what is dropped and why, and that nothing is lost."""

from __future__ import annotations

import contextlib
import difflib
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from runs import PATIENCE, ROOT

from lightning_ray.config import ConfigError
from lightning_ray.records import Split
from lightning_ray.report.statistics import Tally
from lightning_ray.run.data import load_tasks
from lightning_ray.tasks.swe import offline, patches, sources
from lightning_ray.tasks.swe.preparation import (
    card,
    command,
    filters,
    pipeline,
    probing,
    reference,
    rows,
)
from lightning_ray.tasks.swe.preparation.local import Local
from lightning_ray.tasks.swe.preparation.options import Options
from lightning_ray.tasks.swe.preparation.probing import Fate
from lightning_ray.tasks.swe.preparation.reference import SuiteRun
from lightning_ray.tasks.swe.record import RepositoryTask

RIGHT, WRONG = "    return sum(values) / len(values)", "    return sum(values) / (len(values) + 1)"


def diff(
    before: str = RIGHT, after: str = WRONG, function: str = "mean", path: str = "pkg/stats.py"
) -> str:
    """A patch that changes one line of one function: by default one that makes a bug."""
    return (
        f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1,3 +1,3 @@\n"
        f" def {function}(values):\n-{before}\n+{after}\n \n"
    )


def row(instance: str = "acme__stats.combine__1", **changed: object) -> dict[str, object]:
    """A row of SWE-smith's form that no filter has anything against."""
    return {
        "instance_id": instance,
        "repo": "swesmith/acme__stats.0123abcd",
        "patch": diff(),
        "FAIL_TO_PASS": ["tests/test_stats.py::test_mean[a b]"],
        "PASS_TO_PASS": ["tests/test_stats.py::test_other"],
        "image_name": "swebench/swesmith.x86_64.acme_1776_stats.0123abcd",
        "problem_statement": "The mean of [2, 4] should be 3, and is 2.",
    } | changed


def record(instance: str = "acme__stats.combine__1", **changed: object) -> RepositoryTask:
    return RepositoryTask.from_row(row(instance, **changed))


def write(path: Path, some: Iterable[object]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in some))
    return str(path)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Reading


def test_the_same_rows_come_from_every_kind_of_source(tmp_path: Path) -> None:
    import datasets

    some = [row(f"i{number}") for number in range(3)]
    lines = write(tmp_path / "rows.jsonl", some)
    (tmp_path / "rows.json").write_text(json.dumps(some, indent=1))
    pq.write_table(pa.Table.from_pylist(some), tmp_path / "rows.parquet")
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(some)})
    saved.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(
            pa.Table.from_pylist(some if split == "train" else some[:1]),
            tmp_path / "folder" / "data" / f"{split}-00000-of-00001.parquet",
        )
    expected = [RepositoryTask.from_row(one) for one in some]
    for source in (
        lines,
        str(tmp_path / "rows.json"),
        str(tmp_path / "rows.parquet"),
        str(tmp_path / "saved"),
        f"{tmp_path / 'saved'}:train",
        f"{tmp_path / 'folder'}:train",
    ):
        assert [found.record for found in rows.records(source)] == expected, source
        assert rows.fingerprint(source) == rows.fingerprint(source)
    assert len({rows.fingerprint(str(tmp_path / f"rows.{s}")) for s in ("json", "jsonl")}) == 2


def test_a_row_of_swe_bench_mends_and_a_row_of_swe_smith_breaks() -> None:
    bench = row(test_patch="", base_commit="abc", patch=diff(WRONG, RIGHT), repo="acme/stats")
    for one in (record(), RepositoryTask.from_row(bench)):
        assert filters.Change(one).side("+") == {RIGHT.strip()}
        assert filters.functions(one) == {"acme/stats:pkg/stats.py::mean"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"instance_id": "x", "repo": "r"}', "'x'.*column patch"),
        (json.dumps(row() | {"FAIL_TO_PASS": "not JSON"}), "acme__stats.combine__1.*FAIL_TO_PASS"),
    ],
)
def test_a_row_that_is_no_task_is_named_with_its_file_and_line(
    tmp_path: Path, line: str, said: str
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row("good")) + "\n\n" + line + "\n")
    with pytest.raises(ConfigError, match=rf"rows.jsonl, line 3: .*{said}.*skip_unreadable=true"):
        pipeline.clean([str(source)], [], tmp_path / "out", Options(), None)
    outcome = pipeline.clean(
        [str(source)], [], tmp_path / "out", Options(skip_unreadable=True), None
    )
    assert (outcome.unreadable, sum(a.read for a in outcome.splits.values())) == (1, 1)


def test_sources_that_are_not_there_or_damaged_are_named(tmp_path: Path) -> None:
    damaged = tmp_path / "rows.parquet"
    damaged.write_bytes(b"PAR1 and no more")
    (tmp_path / "empty").mkdir()
    for source, said in (
        (str(tmp_path / "none.jsonl"), "no such file or folder"),
        (str(damaged), "no readable Parquet file"),
        (str(tmp_path / "empty"), "no .jsonl, .json, .parquet file"),
    ):
        with pytest.raises(ConfigError, match=said):
            list(rows.records(source))


# Filters

OTHER = {"instance_id": "acme__stats.combine__2", "repo": "acme/stats"}
TWO_LINES = diff(f"{RIGHT}\n-    # done", f"{WRONG}\n+    # done, or not")
BAD = {
    "repeated id": [{}, {"patch": diff("a = 1", "a = 2")}],
    "no statement": [{"problem_statement": " \n"}],
    "no environment": [{"image_name": ""}],
    "no fail-to-pass": [{"FAIL_TO_PASS": []}],
    "too many tests": [{"FAIL_TO_PASS": [f"t.py::t{n}" for n in range(21)]}],
    "too slow": [{"timeout_s": 301.0}],
    "unaddressable tests": [{"PASS_TO_PASS": ["tests/test_stats.py::test_mean[a"]}],
    "unreadable patch": [{"patch": "--- a/x\n"}],
    "fix out of reach": [{"patch": diff(path="tests/test_stats.py")}],
    "leaked statement": [{"problem_statement": f"Write `{RIGHT.strip()}` instead."}],
    "duplicate": [{}, OTHER | {"patch": diff().replace("@@ -1,3 +1,3 @@", "@@ -9,3 +9,3 @@")}],
    "near-duplicate": [
        {"patch": diff("\n-".join(f"a{n}" for n in range(20)), WRONG)},
        OTHER | {"patch": diff("\n-".join(f"a{n}" for n in range(21)), WRONG)},
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_each_filter_drops_the_row_that_it_is_for_and_says_why(name: str) -> None:
    found = [record(**changed) for changed in BAD[name]]
    *before, (last, rule, reason) = filters.apply(filters.standard(Options()), found)
    assert (rule, last) == (name, found[-1])
    assert reason
    assert not any(rule for _, rule, _ in before)


def test_every_filter_is_tried_here() -> None:
    names = {one.name for one in filters.standard(Options())}
    assert names == BAD.keys() | {"overlap"}


@pytest.mark.parametrize("key", ["acme/stats", "acme/stats:pkg/stats.py::mean"])
def test_a_task_of_a_held_out_repository_or_function_is_dropped(key: str) -> None:
    rules = filters.standard(Options(), frozenset({key}))
    other = record("other", patch=diff(function="median"))
    found = [rule for _, rule, _ in filters.apply(rules, [record(), other])]
    assert found == ["overlap", "" if "::" in key else "overlap"]


def test_two_bugs_in_one_line_are_two_tasks() -> None:
    other = RIGHT.replace("/", "*")
    found = [record("a"), record("b", patch=diff(RIGHT, other))]
    assert [rule for _, rule, _ in filters.apply(filters.standard(Options()), found)] == [
        "",
        "",
    ]


def test_one_bug_in_two_functions_is_two_tasks_if_the_diff_or_the_record_names_them() -> None:
    bare = diff().replace(" def mean(values):\n", "")
    in_the_diff = [record("a"), record("b", patch=diff(function="median"))]
    by_the_record = [record(n, patch=bare, function=f"pkg/stats.py::{n}") for n in "ab"]
    for found in (in_the_diff, by_the_record):
        verdicts = filters.apply(filters.standard(Options()), found)
        assert [rule for _, rule, _ in verdicts] == ["", ""]


def test_a_short_line_or_one_that_was_there_before_tells_nothing() -> None:
    short = record(patch=diff("    return x", "    return y"), problem_statement="Use return x.")
    quoted = record(problem_statement=f"It says {WRONG.strip()}, which is wrong.")
    for one in (short, quoted):
        [(_, rule, _)] = filters.apply(filters.standard(Options()), [one])
        assert rule == ""


def test_the_function_of_a_change_is_the_last_definition_above_it() -> None:
    patch = (
        "--- a/p.py\n+++ b/p.py\n@@ -1,2 +1,2 @@ class Outer:\n-    x = 1\n+    x = 2\n"
        "@@ -9,4 +9,4 @@ def first():\n-    a = 1\n+    a = 2\n     async def second():\n"
        "-        b = 1\n+        b = 2\n"
    )
    names = {key.rpartition("::")[2] for key in filters.functions(record(patch=patch))}
    assert names == {"Outer", "first", "second"}


def test_a_record_that_names_its_function_is_believed_and_a_bare_diff_counts_for_its_file() -> None:
    bare = diff().replace(" def mean(values):\n", "")
    assert filters.functions(record(patch=bare)) == {"acme/stats:pkg/stats.py::"}
    named = record(patch=bare, function="pkg/stats.py::mean")
    assert filters.functions(named) == {"acme/stats:pkg/stats.py::mean"}


CLASS = """
class Table:
    def sort(self, rows):
        rows = list(rows)
        first = rows[0]
        second = rows[1]
        third = rows[2]
        fourth = rows[3]
        return fourth

    def total(self, rows):
        found = sum(rows)
        return found


def outside(rows):
    return rows
"""


def git_diff(folder: Path, before: str, after: str) -> str:
    """The patch that turns one text of a class into the other, as git writes it."""
    (folder / "a" / "pkg").mkdir(parents=True)
    (folder / "b" / "pkg").mkdir(parents=True)
    (folder / "a" / "pkg" / "table.py").write_text(CLASS)
    (folder / "b" / "pkg" / "table.py").write_text(CLASS.replace(before, after))
    argv = ["git", "diff", "--no-index", "--no-prefix", "a", "b"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1  # they differ
    return done.stdout


def test_two_bugs_in_a_method_overlap_wherever_in_it_they_are(tmp_path: Path) -> None:
    patch = {
        name: git_diff(tmp_path / name, before, after)
        for name, before, after in (
            ("near", "list(rows)", "tuple(rows)"),
            ("deep", "return fourth", "return second"),
            ("total", "sum(rows)", "max(rows)"),
            ("outside", "return rows", "return []"),
        )
    }
    where = {name: filters.functions(record(patch=text)) for name, text in patch.items()}
    start = "acme/stats:pkg/table.py::"
    assert where["near"] == {start + "Table", start + "sort"}
    assert where["deep"] == {start + "Table"}  # all that its heading tells
    assert where["total"] == {start + "Table", start + "total"}
    assert where["outside"] == {start + "outside"}
    for held in ("near", "deep"):  # none of its class is trained on then
        some = [row(name, patch=text, split="train") for name, text in patch.items()]
        some += [row("held", patch=patch[held], split="validation")]
        folder = tmp_path / f"{held}-out"
        pipeline.clean([write(tmp_path / "r.jsonl", some)], [], folder, Options(), None)
        trained = [task["task_id"] for task in read_lines(folder / pipeline.CLEANED)]
        assert trained == ["outside"]


def test_bugs_of_a_method_are_of_one_split_by_themselves(tmp_path: Path) -> None:
    near = record("near", patch=git_diff(tmp_path / "n", "list(rows)", "tuple(rows)"))
    deep = record("deep", patch=git_diff(tmp_path / "d", "return fourth", "return second"))
    found = set()
    for seed in range(50):
        options = Options(validation_share=0.5, seed=seed)
        found.add((pipeline.split_of(near, options), pipeline.split_of(deep, options)))
    assert found == {(split, split) for split in (Split.TRAIN, Split.VALIDATION)}


bugs = st.builds(
    lambda number, function, line, empty, tests: row(
        f"i{number}",
        repo=f"acme/{'ab'[number % 2]}",
        patch=diff(RIGHT, f"    return {line}", f"f{function}"),
        problem_statement="" if empty else "It is broken.",
        FAIL_TO_PASS=["t.py::t"] * tests,
    ),
    st.integers(0, 99),
    st.integers(0, 5),
    st.integers(0, 3),
    st.sampled_from([False, False, True]),
    st.integers(0, 1),
)


@settings(deadline=None)
@given(st.lists(bugs, max_size=25))
def test_what_stays_keeps_its_order_and_would_stay_again(some: list[dict]) -> None:
    found = [RepositoryTask.from_row(one) for one in some]
    verdicts = list(filters.apply(filters.standard(Options()), found))
    assert [one for one, _, _ in verdicts] == found
    kept = [one for one, rule, _ in verdicts if not rule]
    again = filters.apply(filters.standard(Options()), kept)
    assert not any(rule for _, rule, _ in again)
    assert len({one.instance_id for one in kept}) == len(kept)


# Reference runs


class Bench:
    """A runner with known tests: `flaky` instances have one that fails under an odd seed. It breaks
    down at call number `breaks_at`."""

    def __init__(self, flaky: Iterable[str] = (), breaks_at: int | None = None) -> None:
        self.flaky, self.breaks_at = set(flaky), breaks_at
        self.calls: Counter[str] = Counter()

    def run(self, one: RepositoryTask, *, fixed: bool, seed: int) -> SuiteRun:
        self.calls[one.instance_id] += 1
        if self.breaks_at is not None and self.calls.total() >= self.breaks_at:
            raise OSError("no space left on device")
        passed = dict.fromkeys(one.pass_to_pass, True) | dict.fromkeys(one.fail_to_pass, fixed)
        if one.instance_id in self.flaky and seed % 2:
            passed[one.pass_to_pass[0]] = False
        return SuiteRun(passed, 1.0)

    def exposed(self, one: RepositoryTask) -> str | None:
        return None


def told(one: RepositoryTask, change, runs: int = 3) -> str:
    class Changed(Bench):
        def run(self, one: RepositoryTask, *, fixed: bool, seed: int) -> SuiteRun:
            return change(super().run(one, fixed=fixed, seed=seed), fixed, seed)

    verdict = reference.check(one, Changed(), runs, 300.0)
    return verdict.name if verdict else ""


def without(test: str, run: SuiteRun) -> SuiteRun:
    return SuiteRun({**run.passed, test: False}, run.seconds)


def test_reference_runs_find_what_is_wrong_with_the_tests() -> None:
    one = record()
    [fails], [passes] = one.fail_to_pass, one.pass_to_pass
    assert told(one, lambda run, fixed, seed: run) == ""
    assert told(one, lambda run, fixed, seed: without(passes, run) if seed == 2 else run) == "flaky"
    assert told(one, lambda run, fixed, seed: without(fails, run)) == "fix does not pass"
    assert told(one, lambda run, fixed, seed: without(passes, run)) == "fix does not pass"
    assert (
        told(one, lambda run, fixed, seed: run if fixed else without(passes, run))
        == "bug breaks more"
    )
    everything = SuiteRun({fails: True, passes: True}, 1.0)
    assert told(one, lambda run, fixed, seed: everything) == "bug without effect"
    slow = SuiteRun(everything.passed, 301.0)
    assert told(one, lambda run, fixed, seed: slow if fixed else run) == "too slow in fact"
    missing = SuiteRun({}, 0, "no such image")
    assert told(one, lambda run, fixed, seed: run if fixed else missing) == "does not run"


def test_what_an_environment_gives_away_is_asked_before_anything_runs() -> None:
    class Open(Bench):
        def exposed(self, one: RepositoryTask) -> str | None:
            return "site-packages/stats is a copy of the package"

    runner = Open()
    verdict = reference.check(record(), runner, 3, 300.0)
    assert verdict.name == "leaked environment" and not runner.calls


class Room(Local):
    """Whether this machine has a copy of the package, and no sandbox, is not asked here."""

    def exposed(self, one: RepositoryTask) -> str | None:
        return None


@pytest.mark.slow
def test_the_clean_room_finds_that_a_bug_does_what_its_row_says() -> None:
    package = sources.packages()["xmltodict"]
    clean = sources.tree(package.name)["xmltodict.py"].decode()
    right = "self.namespace_separator.join((short_namespace, name))"
    lines = clean.splitlines(keepends=True), clean.replace(right, "name").splitlines(keepends=True)
    some = {"package": package.name, "sdist_sha256": package.sdist_sha256}
    one = record(
        **some,
        patch="".join(difflib.unified_diff(*lines, "a/xmltodict.py", "b/xmltodict.py")),
        FAIL_TO_PASS=["tests/test_xmltodict.py::test_namespace_collapse"],
        PASS_TO_PASS=["tests/test_xmltodict.py::test_minimal"],
    )
    assert reference.check(one, Room(), 2, 60.0) is None
    turned = one.model_copy(
        update={"fail_to_pass": one.pass_to_pass, "pass_to_pass": one.fail_to_pass}
    )
    assert reference.check(turned, Room(), 1, 60.0).name == "bug without effect"
    old = one.model_copy(update={"sdist_sha256": "0" * 64})
    assert reference.check(old, Room(), 1, 60.0).name == "does not run"


def test_a_row_that_needs_a_container_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "r.jsonl", [row("a")])
    assert command.main(Path, [source, "--out", str(tmp_path), "validation_share=0"]) == 2
    assert "a needs swebench/swesmith.x86_64" in (said := capsys.readouterr().err)
    assert "reference_runs=0" in said


# The pipeline

FLAKY = {f"i{number}" for number in range(0, 100, 3)}
RUNS = 5  # of a record: three with the fix, two with the bug


def files(out: Path) -> dict[str, str]:
    names = (pipeline.VALIDATION, pipeline.CLEANED, pipeline.DROPPED)
    return {name: (out / name).read_text() for name in names}


@settings(deadline=None, max_examples=12)
@given(st.lists(bugs, min_size=1, max_size=25), st.integers(1, 30), st.integers(1, 3))
def test_every_row_has_one_end_and_an_interrupted_run_ends_as_one_that_was_not(
    some: list[dict], breaks_at: int, workers: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder, "rows.jsonl"), some)
        options = Options(validation_share=0.3, workers=workers)
        whole, resumed = Path(folder, "whole"), Path(folder, "resumed")
        runner = Bench(flaky=FLAKY)
        outcome = pipeline.clean([source], [], whole, options, runner)
        assert sum(a.read for a in outcome.splits.values()) == len(some)
        dropped = Counter((d["split"], d["filter"]) for d in read_lines(whole / pipeline.DROPPED))
        for split, account in outcome.splits.items():
            assert account.balanced
            assert account.dropped == {f: n for (s, f), n in dropped.items() if s == split}
        kept = [t["task_id"] for t in read_lines(whole / pipeline.CLEANED)]
        assert len(kept) == outcome.splits[Split.TRAIN].kept
        assert not FLAKY & set(kept)

        broken = Bench(flaky=FLAKY, breaks_at=breaks_at)
        with contextlib.suppress(OSError):
            pipeline.clean([source], [], resumed, options, broken)
        file = resumed / pipeline.CHECKS
        checks = file.read_text() if file.exists() else ""
        if checks:  # as if it had been killed while it wrote
            file.write_text(checks + checks[: len(checks) // 3].strip())
        again = Bench(flaky=FLAKY)
        assert pipeline.clean([source], [], resumed, options, again) == outcome
        assert files(resumed) == files(whole)
        # What had been checked is not run again; what was being checked is.
        finished = len(checks.splitlines())
        assert again.calls.total() == runner.calls.total() - RUNS * finished


@pytest.mark.parametrize("cut", [10, -10], ids=["the only line", "the last line"])
def test_checks_of_a_run_that_was_killed_while_it_wrote_can_be_read_ever_after(
    tmp_path: Path, cut: int
) -> None:
    source = write(tmp_path / "r.jsonl", [row("a"), row("b", patch=diff(function="g"))])
    options, out = Options(validation_share=0), tmp_path / "out"

    def calls() -> int:
        runner = Bench()
        pipeline.clean([source], [], out, options, runner)
        return runner.calls.total()

    assert calls() == 2 * RUNS
    checks = out / pipeline.CHECKS
    checks.write_bytes(checks.read_bytes()[:cut])
    assert calls() == (RUNS if cut < 0 else 2 * RUNS)
    assert calls() == 0
    assert len(read_lines(checks)) == 2


def test_training_and_validation_share_no_function(tmp_path: Path) -> None:
    some = [
        row(f"i{n}-{k}", patch=diff(RIGHT, f"    return {k}", f"f{n}"))
        for n in range(200)
        for k in range(2)
    ]
    outcome = pipeline.clean(
        [write(tmp_path / "r.jsonl", some)], [], tmp_path, Options(validation_share=0.25), None
    )
    split = {
        name: {task["task_id"].partition("-")[0] for task in read_lines(tmp_path / name)}
        for name in (pipeline.CLEANED, pipeline.VALIDATION)
    }
    assert not split[pipeline.CLEANED] & split[pipeline.VALIDATION]
    assert 25 <= len(split[pipeline.VALIDATION]) <= 75  # of 200, a quarter expected
    assert sum(account.kept for account in outcome.splits.values()) == 400
    # Rows that are added later change nobody's split.
    more = [row(f"new{n}", patch=diff(function=f"g{n}")) for n in range(20)]
    source = write(tmp_path / "more.jsonl", [*more, *some])
    pipeline.clean([source], [], tmp_path / "more", Options(validation_share=0.25), None)
    later = {task["task_id"] for task in read_lines(tmp_path / "more" / pipeline.VALIDATION)}
    assert {t["task_id"] for t in read_lines(tmp_path / pipeline.VALIDATION)} <= later


def test_nothing_is_trained_on_of_a_held_out_repository(tmp_path: Path) -> None:
    source = write(tmp_path / "r.jsonl", [row("a"), row("b", repo="swesmith/acme__plots.89abcdef")])
    benchmark = row(
        "v", repo="acme/stats", base_commit="c", test_patch="", patch=diff(WRONG, RIGHT)
    )
    held_out = write(tmp_path / "bench.jsonl", [benchmark])
    options = Options(validation_share=0)
    outcome = pipeline.clean([source], [held_out], tmp_path / "out", options, None)
    assert [task["task_id"] for task in read_lines(tmp_path / "out" / pipeline.CLEANED)] == ["b"]
    assert outcome.splits[Split.TRAIN].dropped == {"overlap": 1}


@pytest.mark.parametrize(
    "patch", ["GIT binary patch", "diff --git a/x.py b/y.py\nrename from x.py\nrename to y.py\n"]
)
def test_a_held_out_patch_that_shows_no_function_holds_its_repository_out(
    tmp_path: Path, patch: str
) -> None:
    source = write(tmp_path / "r.jsonl", [row("a"), row("b", repo="swesmith/acme__plots.89abcdef")])
    benchmark = row("v", repo="acme/stats", base_commit="c", test_patch="", patch=patch)
    held_out = write(tmp_path / "bench.jsonl", [benchmark])
    options = Options(validation_share=0, separate_held_out="function")
    outcome = pipeline.clean([source], [held_out], tmp_path / "out", options, None)
    assert [task["task_id"] for task in read_lines(tmp_path / "out" / pipeline.CLEANED)] == ["b"]
    assert outcome.splits[Split.TRAIN].dropped == {"overlap": 1}


def test_the_result_is_what_a_run_reads_with_the_reference_solution_of_an_image(
    tmp_path: Path,
) -> None:
    bench = row("v", repo="acme/x", base_commit="c", test_patch="", patch=diff(WRONG, RIGHT))
    source = write(tmp_path / "r.jsonl", [row("a"), bench])
    pipeline.clean([source], [], tmp_path / "out", Options(validation_share=0), None)
    pipeline.unprobed(tmp_path / "out")
    tasks = load_tasks(str(tmp_path / "out" / pipeline.TRAIN), "task.train")
    assert [task.task_id for task in tasks] == ["a", "v"]
    assert RepositoryTask.from_task(tasks[0]) == record("a")
    assert RepositoryTask.from_task(tasks[1]).gold_patch == bench["patch"]  # judges with it
    # What was made can be read again, to be cleaned anew or held out.
    again = rows.records(str(tmp_path / "out" / pipeline.TRAIN))
    assert [found.record.instance_id for found in again] == ["a", "v"]


def test_what_is_kept_is_written_in_both_forms_for_other_tools(tmp_path: Path) -> None:
    bench = row("v", repo="acme/x", base_commit="c", test_patch="", patch=diff(WRONG, RIGHT))
    bench |= {"hints_text": "look", "log_parser": "parse_log_flask", "split": "validation"}
    some = [row("a", problem_statement=""), row("a"), row("b", problem_statement=""), bench]
    source, out = write(tmp_path / "r.jsonl", some), tmp_path / "out"
    asked = [source, "--out", str(out), "reference_runs=0", "validation_share=0", "export=true"]
    assert command.main(Path, asked) == 0
    found = {
        (split, form): read_lines(out / f"{split}.{form}.jsonl")
        for split in Split
        for form in rows.FORMS
    }
    ids = [[one["instance_id"] for one in some] for some in found.values()]
    assert ids == [["a"], ["a"], ["v"], ["v"]]
    [smith], [turned] = found[Split.TRAIN, "swe-smith"], found[Split.TRAIN, "swe-bench"]
    assert smith == row("a") | {"split": "train"}
    assert turned["patch"] == patches.reverse(diff())
    [mended] = found[Split.VALIDATION, "swe-bench"]
    assert (mended["patch"], mended["hints_text"]) == (bench["patch"], "look")
    assert (
        mended["log_parser"] == "parse_log_flask" and "Start Test Output" in mended["eval_script"]
    )
    for path in sorted(out.glob("*.swe-*.jsonl")):
        assert all(found.record for found in rows.records(str(path)))


def test_the_checked_in_tasks_are_written_in_both_forms(tmp_path: Path, repository: Path) -> None:
    job = [sys.executable, "jobs/make_swe_tasks.py", "--export", str(tmp_path)]
    subprocess.run(job, cwd=repository, check=True)
    for split in Split:
        mine = [one for one in offline.records() if one.split is split]
        again = [found.record for found in rows.records(str(tmp_path / f"{split}.swe-smith.jsonl"))]
        assert again == mine
        turned = [
            found.record for found in rows.records(str(tmp_path / f"{split}.swe-bench.jsonl"))
        ]
        assert [one.gold_patch for one in turned if one] == [one.gold_patch for one in mine]


# The probe


@given(
    st.dictionaries(
        st.integers(0, 200).map("t{}".format),
        st.none() | st.builds(Tally, st.integers(0, 4), st.just(4)) | st.just(Tally(0, 3)),
    ),
    st.sampled_from([0, 0.2, 1.0]),
    st.none() | st.integers(1, 5),
    st.randoms(),
)
def test_mixed_tasks_and_a_share_of_the_hard_ones_are_kept_whatever_the_order(
    found: dict[str, Tally | None], hard_share: float, most: int | None, rng: random.Random
) -> None:
    tallies = {task: tally for task, tally in found.items() if tally}
    how = {"samples": 4, "hard_share": hard_share, "most_mixed": most, "seed": 1}
    fates = probing.choose(found, tallies, **how)
    shuffled = list(found)
    rng.shuffle(shuffled)
    assert probing.choose(shuffled, tallies, **how) == fates
    counts = Counter(fates.values())
    mixed = sum(0 < tally.solved < tally.rollouts for tally in tallies.values())
    hard = sum(tally == Tally(0, 4) for tally in tallies.values())
    assert counts[Fate.MIXED] == min(mixed, most or mixed)
    assert counts[Fate.HARD] == min(hard, round(hard_share * counts[Fate.MIXED]))
    assert counts[Fate.SOLVED] == sum(tally == Tally(4, 4) for tally in tallies.values())
    assert counts[Fate.LOST] == len(found) - mixed - hard - counts[Fate.SOLVED]


def test_the_probe_drops_and_counts_and_can_be_repeated(tmp_path: Path) -> None:
    some = [row(f"i{n}", patch=diff(RIGHT, f"    return {n}")) for n in range(6)]
    source, options = write(tmp_path / "r.jsonl", some), Options(validation_share=0, hard_share=0.5)
    tallies = {f"i{n}": Tally(solved, 4) for n, solved in enumerate((0, 0, 1, 3, 4))}
    for _ in range(2):
        outcome = pipeline.clean([source], [], tmp_path, options, None)
        assert not (tmp_path / pipeline.TRAIN).exists()  # what is there is complete
        pipeline.probed(tmp_path, outcome, options, tallies)
        assert outcome.splits[Split.TRAIN].dropped == {
            "solved by all": 1,
            "solved by none": 1,
            "not probed": 1,
        }
        assert outcome.probe == {0: 2, 1: 1, 3: 1, 4: 1}
        kept = [task["task_id"] for task in read_lines(tmp_path / pipeline.TRAIN)]
        assert len(kept) == outcome.splits[Split.TRAIN].kept == 3 and {"i2", "i3"} < set(kept)
        assert len(read_lines(tmp_path / pipeline.DROPPED)) == 3
    with pytest.raises(ConfigError, match="none of the 6 tasks"):
        pipeline.probed(tmp_path, outcome, options, {"other": Tally(1, 4)})


GRADER = """
import json, sys
question = json.load(sys.stdin)
sample = int(question["episode"]["rollout_id"].rpartition("-r")[2])
solved = sample < int(question["task"]["fields"]["strategy"])
print(json.dumps({"value": float(solved), "solved": solved}))
"""
PROBE = f"""
run: {{name: probe}}
model: {{path: tiny, dtype: float32, max_model_len: 512}}
engine: {{threads: 1}}
sampling: {{max_tokens: 8, validation_temperature: 0.5}}
gateway: {{port: 0}}
harness:
  args: [--model-class, litellm_textbased, -c, "pkg:lightning_ray.tasks.swe/mini.yaml"]
rollout: {{concurrency: 4, timeout_s: 300}}
task: {{prepare: null, collect: null, grader: null, grader_command: [{sys.executable}, GRADER]}}
"""


@pytest.mark.slow
def test_a_probe_with_the_real_harness_counts_exactly_what_was_solved(tmp_path: Path) -> None:
    """Five tasks, of which the grader says that 0, 0, 1, 2 and all of 2 rollouts solve them."""
    shares = [0, 0, 1, 2, 1]
    some = [
        row(f"i{n}", patch=diff(RIGHT, f"    return {n}"), strategy=str(share))
        for n, share in enumerate(shares)
    ]
    source, out = write(tmp_path / "rows.jsonl", some), tmp_path / "out"
    (tmp_path / "grader.py").write_text(GRADER)
    (tmp_path / "probe.yaml").write_text(PROBE.replace("GRADER", str(tmp_path / "grader.py")))
    done = subprocess.run(
        [
            sys.executable,
            "jobs/prepare_swe.py",
            source,
            f"--out={out}",
            f"--probe={tmp_path / 'probe.yaml'}",
            "samples=2",
            "hard_share=0.5",
            "reference_runs=0",
            "validation_share=0",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "card.json").read_text())
    assert found["probe"] == {"0": 2, "1": 2, "2": 1}
    assert found["splits"]["train"]["dropped"] == {"solved by none": 1, "solved by all": 1}
    kept = [task["task_id"] for task in read_lines(out / pipeline.TRAIN)]
    assert {"i2", "i4"} < set(kept) and len(kept) == 3


# The card and the command line


def test_the_card_accounts_for_every_row(tmp_path: Path) -> None:
    some = [row("a"), row("b"), row("c", problem_statement=""), row("d | e".replace(" | ", "-"))]
    source, options = write(tmp_path / "r.jsonl", some), Options(validation_share=0)
    outcome = pipeline.clean([source], [], tmp_path, options, None)
    found = card.tree(outcome, options)
    assert json.loads(json.dumps(found)) == found
    train = found["splits"]["train"]
    assert train["read"] == train["kept"] + sum(train["dropped"].values()) == 4
    page = card.markdown(found)
    for part in ("1 training and 0 validation", "| dropped: no statement | 0 | 1 |", "acme/stats"):
        assert part in page, page
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    assert sum(token.type == "table_open" for token in tokens) == 4


def test_the_command_cleans_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "r.jsonl", [row("a"), row("b", problem_statement="")])
    out = str(tmp_path / "out")
    given_ = [source, "--out", out, "reference_runs=0", "validation_share=0"]
    assert command.main(Path, given_) == 0
    assert "no statement" in capsys.readouterr().out
    assert (tmp_path / "out" / "card.md").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x.jsonl"], "x.jsonl: there is no such file"),
        ([], "name at least one source"),
        (["x.jsonl", "most_test=3"], "most_test: unknown; did you mean most_tests?"),
        (["x.jsonl", "similar=2"], "similar: Input should be less than or equal to 1"),
        (["x.jsonl", "rollout.n=2"], "rollout.n=2 has no effect without --probe"),
        (["x.jsonl", "runner=no.such:thing"], "runner=no.such:thing: No module named 'no'"),
    ],
)
def test_what_a_user_can_put_right_is_said_in_one_line(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [] if any("runner" in one for one in arguments) else ["reference_runs=0"]
    assert command.main(Path, [*arguments, *runs, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_every_option_and_every_filter_is_on_the_page(repository: Path) -> None:
    page = (repository / "docs" / "data.md").read_text()
    named = set(re.findall(r"^\| `?([a-z][a-z_ -]+[a-z])`? \|", page, re.MULTILINE))
    names = {one.name for one in filters.standard(Options())}
    assert not {*Options.model_fields, *names, *reference.VERDICTS, *pipeline.PROBED} - named
    for field in Options.model_fields.values():
        assert field.description in page
