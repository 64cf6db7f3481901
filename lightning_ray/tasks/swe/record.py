"""One repository task, whatever data set it comes from.

`RepositoryTask.from_row` reads a row of SWE-smith's or SWE-bench's form, `to_smith` and `to_bench`
write one; `to_task` is what a run consumes. The two forms look alike but mean opposite things by
`patch`: SWE-smith's *makes* the bug in a clean repository, SWE-bench's *mends* a broken one;
`format` says which one `patch` is, and `gold_patch` always mends.

Invariants: a record is checked when it is made, and a bad row is a RecordError that names the
instance and the column; `from_row(to_smith())` and `from_row(to_bench())` keep what the form has
columns for; the statement is all that an agent reads of a task; its fields, patches among them,
are for those who lay it out and grade it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lightning_ray import canary
from lightning_ray.records import Json, Split, Task
from lightning_ray.tasks.swe import canaries, patches


class Format(StrEnum):
    """Whose form a row has, and so what its patch does."""

    SWE_SMITH = "swe-smith"  # `patch` applied to the clean repository makes the bug
    SWE_BENCH = "swe-bench"  # `patch` applied to `base_commit` mends it; `test_patch` adds tests


class RecordError(ValueError):
    """A row that is no repository task; the message names the instance and the column."""


def _ids(value: object) -> object:
    """Test ids as a tuple: SWE-bench keeps a JSON list in a string, Parquet gives arrays."""
    if isinstance(value, str):
        value = json.loads(value or "[]")
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(value) if isinstance(value, list) else value


def _split(value: object) -> object:
    return Split(value) if isinstance(value, str) and value else value or None


def _text(value: object) -> object:
    return "" if value is None else value


def _diff(value: object) -> object:
    """A patch without the canary that stands before a stored one (`to_task`)."""
    first, _, rest = value.partition("\n") if isinstance(value, str) else ("", "", "")
    return rest if first.startswith("# ") and canary.seen(first) else value


TestIds = Annotated[tuple[str, ...], BeforeValidator(_ids)]
Text = Annotated[str, BeforeValidator(_text)]


class RepositoryTask(BaseModel):
    """A bug to mend in a repository, and the tests that tell."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    instance_id: str = Field(min_length=1, max_length=200, pattern=r"^[\w.+-]+$")
    format: Format
    repo: str = Field(min_length=1)
    patch: Annotated[str, BeforeValidator(_diff)]
    fail_to_pass: TestIds
    pass_to_pass: TestIds = ()
    problem_statement: Text = ""
    image_name: Text = ""  # a container image, or `venv:PACKAGE@LOCKHASH` for a local environment
    # SWE-bench's own columns.
    base_commit: Text = ""
    test_patch: Text = ""
    version: Text = ""
    hints_text: Text = ""
    created_at: Text = ""
    environment_setup_commit: Text = ""
    # How swebench 5 runs and reads the tests; made from the record where a row does not say.
    log_parser: Text = ""
    eval_type: Text = ""
    eval_script: Text = ""
    # Ours, for tasks made from a package's source distribution.
    strategy: Text = ""  # what made the bug
    package: Text = ""  # its name in the manifest of sources
    sdist_sha256: Text = ""
    python: Text = ""  # as in `3.11`
    test_cmd: Text = ""
    timeout_s: float = Field(60.0, gt=0)  # of one run of the suite
    n_ref_runs: int = Field(0, ge=0)  # runs of the clean suite that agreed
    function: Text = ""  # `path::name` of what the bug is in; what data are split by
    split: Annotated[Split | None, BeforeValidator(_split)] = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any], format: Format | None = None) -> RepositoryTask:
        """A record from a row. `format` is guessed where it is not given: SWE-bench has a
        `test_patch`. Columns that we do not know are left out.

        Raises:
            RecordError: a column is missing or has another type.
        """
        columns = {_COLUMNS.get(name, name): value for name, value in row.items()}
        kind = format or row.get("format")
        if kind is None:
            kind = Format.SWE_BENCH if columns.get("test_patch") is not None else Format.SWE_SMITH
        if not columns.get("image_name"):
            columns["image_name"] = columns.get("image", "")
        named = (row.get(column) for column in ("image", "image_name", "package"))
        original = kind == Format.SWE_BENCH and row.get("repo") in _BENCH_REPOSITORIES
        if original and all(name is None for name in named):
            columns["image_name"] = bench_image(str(row.get("instance_id", "")))
        known = {name: columns[name] for name in cls.model_fields if name in columns}
        where = f"instance {row.get('instance_id', '?')!r}"
        try:
            return cls.model_validate(known | {"format": Format(kind)})
        except ValidationError as error:
            first = error.errors()[0]
            column = str(first["loc"][0]) if first["loc"] else "?"
            written = next((name for name, ours in _COLUMNS.items() if ours == column), column)
            raise RecordError(f"{where}, column {written}: {first['msg']}") from error
        except (ValueError, TypeError) as error:
            raise RecordError(f"{where}: {error}") from error

    @property
    def gold_patch(self) -> str:
        """The diff that mends the bug.

        Raises:
            PatchError: SWE-smith's patch cannot be turned round.
        """
        return self.patch if self.format is Format.SWE_BENCH else patches.reverse(self.patch)

    @property
    def bug_patch(self) -> str:
        """The diff that makes the bug. Raises PatchError, as above."""
        return self.patch if self.format is Format.SWE_SMITH else patches.reverse(self.patch)

    def to_smith(self) -> Json:
        """SWE-smith's seven columns, and ours where they are filled."""
        theirs = {
            "instance_id": self.instance_id,
            "repo": self.repo,
            "patch": self.bug_patch,
            "FAIL_TO_PASS": list(self.fail_to_pass),
            "PASS_TO_PASS": list(self.pass_to_pass),
            "image_name": self.image_name,
            "problem_statement": self.problem_statement,
        }
        ours = self.model_dump(mode="json", exclude_defaults=True, exclude={"format"})
        shown = {"patch", "fail_to_pass", "pass_to_pass"}
        return theirs | {k: v for k, v in ours.items() if k not in shown}

    def to_bench(self) -> Json:
        """SWE-bench's columns (test ids as JSON in a string), with its newer `image` and those by
        which swebench 5 runs and reads the tests."""
        return {
            "repo": self.repo,
            "instance_id": self.instance_id,
            "base_commit": self.base_commit,
            "patch": self.gold_patch,
            "test_patch": self.test_patch,
            "problem_statement": self.problem_statement,
            "hints_text": self.hints_text,
            "created_at": self.created_at,
            "version": self.version,
            "FAIL_TO_PASS": json.dumps(list(self.fail_to_pass)),
            "PASS_TO_PASS": json.dumps(list(self.pass_to_pass)),
            "environment_setup_commit": self.environment_setup_commit,
            "image": self.image_name,
            "log_parser": self.log_parser or LOG_PARSER,
            "eval_type": self.eval_type or EVAL_TYPE,
            "eval_script": self.eval_script or evaluation_script(self),
        }

    def to_task(self) -> Task:
        """What a run consumes. The agent reads the statement; the fields stay with the operator's
        processes (`prepare` lays the broken tree out, the grader runs the tests). Hints are left
        out, since nobody needs them there. Before a patch stands a canary, in a line that
        `from_row` takes off and `git apply` ignores: who reads a stored task gives itself away."""
        hidden = {"instance_id", "problem_statement", "hints_text", "log_parser", "eval_type"}
        hidden |= {"eval_script"}
        fields = self.model_dump(mode="json", exclude=hidden, exclude_defaults=True)
        if fields.get("patch"):
            fields["patch"] = f"# {canaries.mint('gold', self.instance_id)}\n{fields['patch']}"
        return Task(self.instance_id, self.problem_statement, fields)

    @classmethod
    def from_task(cls, task: Task) -> RepositoryTask:
        """The record behind a task of `to_task`, for `prepare` and the grader.

        Raises:
            RecordError: the task's fields are not a record's.
        """
        names = {"instance_id": task.task_id, "problem_statement": task.statement}
        return cls.from_row({"patch": ""} | task.fields | names)


_BENCH_REPOSITORIES = {
    "astropy/astropy", "django/django", "matplotlib/matplotlib", "mwaskom/seaborn",
    "pallets/flask", "psf/requests", "pydata/xarray", "pylint-dev/pylint", "pytest-dev/pytest",
    "scikit-learn/scikit-learn", "sphinx-doc/sphinx", "sympy/sympy",
}  # fmt: skip


def bench_image(instance_id: str) -> str:
    """The public image of an instance of SWE-bench, whose first data sets (Lite, Verified) do not
    name it. A registry's names are in lower case and have no `__` (swebench, `TestSpec`)."""
    name = instance_id.lower().replace("__", "_1776_")
    return f"swebench/sweb.eval.x86_64.{name}:latest"


# Of swebench 5: reads the lines of `pytest -rA`; every test is to have its outcome.
LOG_PARSER, EVAL_TYPE = "parse_log_pytest_v2", "pass_and_fail"
_HEREDOC = "END_OF_THE_TEST_PATCH"  # no line of a diff begins like this


def evaluation_script(record: RepositoryTask) -> str:
    """What swebench 5 runs in an instance's container once the model's patch is applied: the hidden
    tests as they were, the tests' output between its markers, everything put back."""
    ids = [*record.fail_to_pass, *record.pass_to_pass]
    files = shlex.join(sorted({test.partition("::")[0] for test in ids}))
    changed = patches.files(record.test_patch) if record.test_patch else []
    old = {part.before for part in changed if part.before}
    new = {part.after for part in changed if part.after} - old
    back = [f"rm -f -- {shlex.join(sorted(new))}"] if new else []
    # Of what was there alone: git restores nothing if it knows one of them not.
    if old:
        back += [f"git checkout {record.base_commit or 'HEAD'} -- {shlex.join(sorted(old))}"]
    applied = [f"git apply -v - <<'{_HEREDOC}'", record.test_patch.rstrip("\n"), _HEREDOC]
    return "\n".join(
        [
            "#!/bin/bash",
            "set -uxo pipefail",
            "cd /testbed",
            *back,
            *(applied if record.test_patch else []),
            ": '>>>>> Start Test Output'",
            f"{record.test_cmd} -rA" if record.test_cmd else f"python -m pytest -rA {files}",
            ": '>>>>> End Test Output'",
            *back,
            "",
        ]
    )


def addressable(test: str) -> bool:
    """True for an id that pytest can be given and gives back: `tests/test_x.py::Class::test[case]`.
    Ids that a parser of printed results has cut at a space lack their closing bracket.

    >>> addressable("t/test_a.py::test_b[1 2]"), addressable("t/test_a.py::test_b[1")
    (True, False)
    """
    path, _, name = test.partition("::")
    parts = path.split("/")
    plain = path.endswith(".py") and not any(part in ("", ".", "..") for part in parts)
    whole = bool(name) and test.isprintable() and ("[" in name) == name.endswith("]")
    return plain and whole and not path.startswith("-")  # which would be an option


_COLUMNS = {"FAIL_TO_PASS": "fail_to_pass", "PASS_TO_PASS": "pass_to_pass"}
