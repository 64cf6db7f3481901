"""The checked-in repair tasks: bugs in PyPI packages, made by `making`.

`train` and `validation` are what a run names; `records` gives the same tasks as rows for export. A
task's repository is rebuilt from the package's source distribution and the bug's patch:
`agent_tree` is what the agent gets (without the tests that the bug makes fail), `graded_tree` what
is graded (with all tests). Statements are templates, no language model wrote them.

Invariants: no function, no class that has a bug as a whole, and no change of the same lines is in
both splits (`kinship.py`); the tests that a bug makes fail are not in the
agent's tree, and each of them has twins in the suite that judges it; of at least one they fail on
the buggy tree as the test itself does (`traces.py`).
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable, Iterator

from lightning_ray.records import Json, Split, Task
from lightning_ray.tasks.swe import sources, trees, twins
from lightning_ray.tasks.swe.evidence import Suite, Tree
from lightning_ray.tasks.swe.record import Format, RecordError, RepositoryTask
from lightning_ray.tasks.swe.sources import Package

CPU_S = 60.0  # of one run of a suite: ten times what the slowest needs
TIMEOUT_S = 180.0  # on the clock; a machine with other work runs it that much slower


def train() -> list[Task]:
    """The training tasks, in a fixed order."""
    return [_task(record) for record in records() if record.split is Split.TRAIN]


def validation() -> list[Task]:
    """The validation tasks, in a fixed order."""
    return [_task(record) for record in records() if record.split is Split.VALIDATION]


@functools.cache
def records() -> tuple[RepositoryTask, ...]:
    """Every task, whole."""
    return tuple(_records(_rows()))


@functools.cache
def _rows() -> tuple[Json, ...]:
    return tuple(map(json.loads, (sources.DATA / "tasks.jsonl").read_text().splitlines()))


@functools.cache
def hidden_twins() -> dict[str, dict[str, list[twins.Edit]]]:
    """By a bug's patch: the twins of hidden tests that fail on the buggy tree as these do."""
    return {
        row["patch"]: {n: [tuple(edit) for edit in edits] for n, edits in row["twins"].items()}
        for row in _rows()
    }


@functools.cache
def suites() -> dict[str, Json]:
    """What is known of each package's tests: `stable` ids, `others`, `twins`, `seconds`, `runs`."""
    found: dict[str, Json] = json.loads((sources.DATA / "suites.json").read_text())
    return found


def _records(rows: Iterable[Json]) -> Iterator[RepositoryTask]:
    for row in rows:
        package, known = sources.packages()[row["package"]], suites()[row["package"]]
        failing = set(row["FAIL_TO_PASS"])
        yield RepositoryTask.from_row(
            row
            | {
                "repo": "swesmith/" + row["instance_id"].rpartition(".")[0],
                "image_name": sources.environment_name(),
                "PASS_TO_PASS": [test for test in known["stable"] if test not in failing],
                "sdist_sha256": package.sdist_sha256,
                "version": package.version,
                "python": "3.11",
                "problem_statement": statement(package, row["function"], row["patch"]),
                "test_cmd": test_command(package),
                "timeout_s": TIMEOUT_S,
                "n_ref_runs": known["runs"],
            },
            Format.SWE_SMITH,
        )


def test_command(package: Package) -> str:
    """How an agent runs the tests that it can see."""
    return " ".join(["python -m pytest", *package.options, *package.targets])


def statement(package: Package, function: str, seed: str) -> str:
    """What the agent reads: a template. The tests that fail are not named, since they are hidden;
    three in four name the file, half of all the function."""
    path, _, entity = function.partition("::")
    where = random.Random(seed).choice(
        [
            "Find it and mend it.",
            f"It is probably in `{path}`. Find it and mend it.",
            f"It seems to be in `{entity}` in `{path}`. Find it and mend it.",
            f"Users suspect `{entity}` in `{path}`. Find out what is wrong there and mend it.",
        ]
    )
    return (
        f"The Python package {package.name} has a bug: something that worked before gives wrong "
        f"results or errors. {where}\n\nThe repository is the current folder; "
        f"`{test_command(package)}` runs its tests. They pass although the bug is there: the tests "
        "that would show it are not in the repository. Change the package's code only; tests and "
        "configuration are not looked at."
    )


def _task(record: RepositoryTask) -> Task:
    """Without the tests that pass: they are the suite's other ones, and would be most of a row."""
    return record.model_copy(update={"pass_to_pass": ()}).to_task()


def suite(record: RepositoryTask, python: str | None = None) -> Suite:
    """The tests that judge a task of these packages. `python` is by default that of the environment
    of the tests on this machine, which is made if need be.

    Raises:
        RecordError: it is none of them.
        SourceError: there is no such environment.
    """
    _known(record)
    package, known = sources.packages()[record.package], suites()[record.package]
    failing = frozenset(record.fail_to_pass)
    return Suite(
        python=python or str(sources.environment() / "bin" / "python"),
        targets=package.targets,
        fail_to_pass=failing,
        pass_to_pass=frozenset(known["stable"]) - failing,
        twins={name: [tuple(e) for e in edits] for name, edits in known["twins"].items()}
        | hidden_twins().get(record.bug_patch, {}),
        owners=known["owners"],
        touchy=frozenset(known["touchy"]),
        paths=(package.path,),
        timeout_s=record.timeout_s,
        cpu_s=CPU_S,
    )


def graded_tree(record: RepositoryTask) -> Tree:
    """The package with the bug, and all of its tests. Raises RecordError, SourceError."""
    _known(record)
    return trees.apply(sources.tree(record.package), record.bug_patch)


def agent_tree(record: RepositoryTask) -> Tree:
    """The package with the bug, without the tests that show it. Raises RecordError, SourceError."""
    tree, owners = graded_tree(record), suites()[record.package]["owners"]
    functions = {twins.function_of(test) for test in record.fail_to_pass}
    return trees.without_tests(tree, {owners.get(name, name) for name in functions})


def _known(record: RepositoryTask) -> None:
    package = sources.packages().get(record.package)
    if package is None or package.sdist_sha256 != record.sdist_sha256:
        raise RecordError(
            f"instance {record.instance_id}: package {record.package!r} is not in the manifest of "
            f"local sources; it needs its container image "
            f"({record.image_name or 'none named'}) and rollout.launcher=kubernetes, or podman"
        )
