"""Repository tasks as rows of SWE-smith's and SWE-bench's forms, and diffs turned round."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ray.records import Split
from lightning_ray.tasks.swe import patches
from lightning_ray.tasks.swe.record import Format, RecordError, RepositoryTask

BUG = """\
diff --git a/pkg/a.py b/pkg/a.py
index 1111111..2222222 100644
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -1,3 +1,3 @@ def f():
 x = 1
-y = x + 1
+y = x - 1
 z = 3
"""
SMITH = {
    "instance_id": "toolz.func_pm_op_swap__abc",
    "repo": "swesmith/pytoolz__toolz.12345678",
    "patch": BUG,
    "FAIL_TO_PASS": ["tests/test_a.py::test_y"],
    "PASS_TO_PASS": ["tests/test_a.py::test_x", "tests/test_a.py::test_z"],
    "image_name": "venv:toolz@0123",
    "problem_statement": "y is wrong",
    "package": "toolz",
    "function": "pkg/a.py::f",
    "split": "train",
    "timeout_s": 30.0,
}
BENCH = {
    "repo": "pytoolz/toolz",
    "instance_id": "pytoolz__toolz-1",
    "base_commit": "0" * 40,
    "patch": patches.reverse(BUG),
    "test_patch": BUG.replace("pkg/a.py", "tests/test_a.py"),
    "problem_statement": "y is wrong",
    "hints_text": "look at y",
    "created_at": "2026-01-01",
    "version": "1.0",
    "FAIL_TO_PASS": '["tests/test_a.py::test_y"]',
    "PASS_TO_PASS": "[]",
    "environment_setup_commit": "",
    "image": "",
    "log_parser": "parse_log_flask",
    "eval_type": "fail_only",
    "eval_script": "#!/bin/bash\nmake test\n",
}


def test_a_swe_smith_row_comes_back_as_it_was():
    assert RepositoryTask.from_row(SMITH).to_smith() == SMITH


def test_a_swe_bench_row_comes_back_as_it_was():
    assert RepositoryTask.from_row(BENCH).to_bench() == BENCH


@pytest.mark.parametrize("row", [SMITH, BENCH])
def test_a_row_for_swebench_5_says_how_its_tests_are_run_and_read(row):
    row = {key: row[key] for key in row if not key.startswith(("eval_", "log_"))}
    made = RepositoryTask.from_row(row).to_bench()
    needed = (
        "instance_id image repo version base_commit FAIL_TO_PASS PASS_TO_PASS"  # make_test_spec
    )
    assert {*needed.split(), "log_parser", "eval_type", "eval_script"} <= made.keys()
    assert (made["log_parser"], made["eval_type"]) == ("parse_log_pytest_v2", "pass_and_fail")
    lines = made["eval_script"].splitlines()
    assert lines[:2] == ["#!/bin/bash", "set -uxo pipefail"]
    begins, ends = (lines.index(f": '>>>>> {which} Test Output'") for which in ("Start", "End"))
    assert lines[begins + 1 : ends] == ["python -m pytest -rA tests/test_a.py"]


def test_the_script_of_a_row_runs_the_hidden_tests_and_puts_everything_back(tmp_path: Path):
    def git(*argv: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@x"]
        done = subprocess.run(["git", *who, *argv], cwd=tmp_path, check=True, capture_output=True)
        return done.stdout.decode()

    test = tmp_path / "test_it's.py"
    test.write_text("def test_y():\n    assert 1 == 1\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "x")
    test.write_text(test.read_text().replace("1 == 1", "2 == 2  # the hidden one"))
    (tmp_path / "new.json").write_text("{}\n")
    git("add", "-A")
    hidden = git("diff", "--cached")
    git("reset", "-q", "--hard")
    # What the model made of the same files does not count.
    test.write_text("def test_y():\n    assert 3 == 4\n")
    (tmp_path / "new.json").write_text("[]\n")
    row = BENCH | {"test_patch": hidden, "base_commit": git("rev-parse", "HEAD").strip()}
    row |= {"FAIL_TO_PASS": [f"{test.name}::test_y"], "eval_script": ""}
    script = str(RepositoryTask.from_row(row).to_bench()["eval_script"])
    script = script.replace("cd /testbed", f"cd {tmp_path}")
    script = script.replace("python -m pytest", f"{sys.executable} -m pytest -p no:cacheprovider")
    found = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=True)
    assert f"PASSED {test.name}::test_y" in found.stdout
    assert "Applied patch" in found.stderr and git("status", "--porcelain", "-uno") == ""
    assert not (tmp_path / "new.json").exists()


def test_a_row_of_swe_bench_verified_has_its_public_image():
    row = {key: value for key, value in BENCH.items() if key != "image"} | {"difficulty": "1 hour"}
    assert RepositoryTask.from_row(row).image_name == ""  # nobody has one for it
    row |= {"repo": "astropy/astropy", "instance_id": "astropy__astropy-12907"}
    record = RepositoryTask.from_row(row)
    assert record.image_name == "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"
    assert RepositoryTask.from_task(record.to_task()).image_name == record.image_name


def test_the_patch_means_the_opposite_in_the_two_forms():
    smith, bench = RepositoryTask.from_row(SMITH), RepositoryTask.from_row(BENCH)
    assert (smith.format, bench.format) == (Format.SWE_SMITH, Format.SWE_BENCH)
    assert smith.gold_patch == bench.gold_patch == BENCH["patch"]
    assert smith.bug_patch == bench.bug_patch == BUG
    assert RepositoryTask.from_row(smith.to_bench()).bug_patch == BUG


def test_a_task_carries_the_record_without_a_hint():
    """Its patch too: it makes the bug, or it judges."""
    smith, bench = RepositoryTask.from_row(SMITH), RepositoryTask.from_row(BENCH)
    assert RepositoryTask.from_task(smith.to_task()) == smith
    for row in (bench, bench.model_copy(update={"package": "toolz"})):
        assert RepositoryTask.from_task(row.to_task()).gold_patch == bench.gold_patch
    task = bench.to_task()
    assert task.statement == "y is wrong"
    assert "look at y" not in json.dumps(task.fields)
    assert RepositoryTask.from_task(task).fail_to_pass == bench.fail_to_pass
    assert smith.split is Split.TRAIN


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("patch", None, "column patch"),
        ("FAIL_TO_PASS", 3, "column FAIL_TO_PASS"),
        ("FAIL_TO_PASS", "[oops", "instance 'toolz"),
        ("PASS_TO_PASS", [1], "column PASS_TO_PASS"),
        ("timeout_s", "soon", "column timeout_s"),
        ("split", "holdout", "holdout"),
        ("instance_id", "../up", "column instance_id"),
    ],
)
def test_a_bad_row_names_the_instance_and_the_column(column, value, message):
    with pytest.raises(RecordError, match=message):
        RepositoryTask.from_row(SMITH | {column: value})


def test_a_reversed_diff_undoes_what_git_did(tmp_path: Path):
    def git(*argv: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false"]
        done = subprocess.run([*command, *argv], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode()

    before = {
        "kept.py": "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\nk\n",
        "moved.py": "one\ntwo\nthree\nfour\nfive\n",
        "gone.py": "--- a\n+++ b\n",
        "end.py": "no newline",
    }
    after = {
        "kept.py": "a\nB\nB2\nc\nd\ne\nf\ng\nh\ni\nK\nk\x0cl\n\n",
        "new/moved.py": "one\ntwo\nthree\nfour\nfive\nsix\n",
        "made.py": "@@ -1 +1 @@\n",
        "end.py": "a newline\n",
    }
    git("init", "-q")
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    git("add", "-A")
    git("commit", "-qm", "before")
    for name in before:
        (tmp_path / name).unlink()
    (tmp_path / "new").mkdir()
    for name, text in after.items():
        (tmp_path / name).write_text(text)
    git("add", "-A")
    diff = git("diff", "--cached", "-M")
    back = tmp_path / "back.diff"
    back.write_text(patches.reverse(diff))
    assert patches.reverse(patches.reverse(diff)) == diff
    assert patches.paths(diff) == {*before, *after}
    git("apply", "--index", str(back))
    assert git("diff", "--cached", "HEAD") == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("diff --git a/x b/y\nGIT binary patch\n", "line 1: a binary patch"),
        ("--- a/x\n@@ -1 @@\n", "line 1: no `--- ` and"),
        ("", "a text of 0 lines: it is no diff"),
        ("I mended it.\n", "a text of 1 lines: it is no diff"),
    ],
)
def test_what_is_no_text_diff_is_refused_with_the_reason(text, why):
    with pytest.raises(patches.PatchError, match=why):
        patches.files(text)


MOVED = "diff --git a/{0} b/{1}\nsimilarity index 100%\n{2} from {0}\n{2} to {1}\n"
QUOTED = '"{}/t\\303\\251 \\"q\\"\\\\\\t.py"'
ODD = 't\u00e9 "q"\\\t.py'


@pytest.mark.parametrize(
    ("diff", "paths"),
    [
        (MOVED.format("tests/old.py", "tests/new.py", "rename"), {"tests/old.py", "tests/new.py"}),
        (MOVED.format("a b.py", "c b/d.py", "copy"), {"a b.py", "c b/d.py"}),
        (f"diff --git {QUOTED.format('a')} {QUOTED.format('b')}\nold mode 100644\n", {ODD}),
        (f"--- {QUOTED.format('a')}\n+++ {QUOTED.format('b')}\n@@ -1 +1 @@\n-a\n+b\n", {ODD}),
        ("diff --git a/x b/y\nBinary files a/x and b/y differ\n", {"x", "y"}),
        ("diff --git a/x y.py b/x y.py\nnew file mode 100644\nindex 0..0\n", {"x y.py"}),
        ("--- a/x y.py\t2020\n+++ b/x y.py\t2020\n@@ -1 +1 @@\n-a\n+b\n", {"x y.py"}),
        ("--- /dev/null\n+++ b/new.py\r\n@@ -0,0 +1 @@\n+b\n", {"new.py"}),
        ("--- old.py\n+++ old.py\n@@ -1 +1 @@\n-a\n+b\n", {"old.py"}),
    ],
)
def test_every_path_that_a_diff_touches_is_found(diff, paths):
    assert paths <= patches.touched(diff)
    assert not {path for path in patches.touched(diff) if path.startswith(('"', "a/"))}


def test_git_says_of_any_change_what_it_touches(tmp_path: Path):
    def git(*argv: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@x"]
        done = subprocess.run(["git", *who, *argv], cwd=tmp_path, check=True, capture_output=True)
        return done.stdout.decode()

    git("init", "-q")
    before = {
        "moved.py": "m\n" * 9,
        "copied b/x.py": "c\n" * 9,
        ODD: "o\n",
        "gone": "",
        "kept": "k",
    }
    after = {"t/m\u00e9.py": before["moved.py"], "two b/y.py": before["copied b/x.py"]}
    after |= {
        "copied b/x.py": "other\n" + before["copied b/x.py"],
        ODD: "p\n",
        "kept": "k",
        "n": "",
    }
    for files in (before, after):
        git("rm", "-rfq", "--ignore-unmatch", ".")
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(text)
        git("add", "-A")
        git("commit", "-qm", "x")
    diff = git("diff", "-M", "-C", "--find-copies-harder", "HEAD~1", "HEAD")
    assert "rename from" in diff and "copy from" in diff
    assert {"moved.py", "gone", "n", ODD, *after} - {"kept"} <= patches.touched(diff)


def test_a_line_of_a_hunk_that_looks_like_a_header_is_none():
    hunk = "@@ -1,2 +1,2 @@\n x\n--- a/src/core.py\n+++ b/src/core.py\n"
    diff = f"--- a/query.sql\n+++ b/query.sql\n{hunk}--- a/t.py\n+++ b/t.py\n"
    assert patches.touched(diff) == {"query.sql", "t.py"}
