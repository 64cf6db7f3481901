"""Whether a task's tests tell what they say they tell: reference runs of the bug and of its fix.

`check` has a task's tests run several times with the fix in place and with the bug, under another
hash seed and in another order each time, and says what is wrong with the task. Who runs them is a
`Runner`: the grader's own clean room, so that what is measured here is what decides later.

Invariants: a task that passes had every pass-to-pass test pass in every run, and every
fail-to-pass test pass in all runs with the fix and fail in all runs with the bug; a fault of the
runner itself is raised, never a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightning_ray.tasks.swe.record import RepositoryTask

# Names of the verdicts, in the order in which they are looked for, and what each means.
VERDICTS = {
    "leaked environment": "the fix can be read in the agent's environment",
    "does not run": "its environment cannot be made, or its tests cannot be run in it",
    "too slow in fact": "a run of its tests took longer than slowest_s",
    "flaky": "a test passed in some runs and failed in others",
    "fix does not pass": "a test fails in every run with the fix in place",
    "bug without effect": "a fail-to-pass test passes in every run with the bug",
    "bug breaks more": "a pass-to-pass test fails in every run with the bug",
}
# Runs with the bug; more tell little, since a flaky test nearly always shows with the fix, too.
MOST_BUG_RUNS = 2


@dataclass(frozen=True)
class SuiteRun:
    """One run of a task's tests: whether each one passed, by id, and the seconds it took. With a
    `problem` there was no run; it says why."""

    passed: Mapping[str, bool]
    seconds: float
    problem: str = ""
    leak: str = ""  # what gives the fix away in the environment, where only a run can see it


class Runner(Protocol):
    """Runs the tests of a task outside of any agent's reach."""

    def run(self, record: RepositoryTask, *, fixed: bool, seed: int) -> SuiteRun:
        """The fail-to-pass and pass-to-pass tests, with the fix or with the bug in place, under the
        hash seed `seed` and in an order that `seed` decides."""

    def exposed(self, record: RepositoryTask) -> str | None:
        """What in the environment that an agent gets would give the fix away; None: nothing."""


@runtime_checkable
class Elsewhere(Runner, Protocol):
    """A runner with something to end: `stop` ends all runs, whose threads get an error. `settings`
    is what their results depend on besides the row."""

    settings: str

    def stop(self) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """Why a task is dropped. `name` is one of `VERDICTS`."""

    name: str
    reason: str


def check(record: RepositoryTask, runner: Runner, runs: int, slowest_s: float) -> Verdict | None:
    """None if the task's tests do what they should, in `runs` runs with the fix and up to two with
    the bug."""
    if exposed := runner.exposed(record):
        return Verdict("leaked environment", exposed)
    results: dict[bool, list[SuiteRun]] = {True: [], False: []}
    for fixed, seed in _plan(runs):
        run = runner.run(record, fixed=fixed, seed=seed)
        where = "with the fix" if fixed else "with the bug"
        if run.leak:
            return Verdict("leaked environment", run.leak)
        if run.problem:
            return Verdict("does not run", f"{where}: {run.problem}")
        if run.seconds > slowest_s:
            return Verdict("too slow in fact", f"{run.seconds:.1f} s {where}")
        results[fixed].append(run)
    verdicts = list(_verdicts(record, results))
    order = list(VERDICTS)
    return min(verdicts, key=lambda one: order.index(one.name), default=None)


def _plan(runs: int) -> Iterator[tuple[bool, int]]:
    """Fix and bug in turns, so that what does not work is found soon."""
    for seed in range(runs):
        yield True, seed
        if seed < MOST_BUG_RUNS:
            yield False, seed


def _verdicts(record: RepositoryTask, results: Mapping[bool, list[SuiteRun]]) -> Iterator[Verdict]:
    # What a test must do: whether it is of the fix or of the bug, and which verdict if it does not.
    wrong = {
        (True, True): "fix does not pass",
        (False, True): "bug breaks more",
        (False, False): "bug without effect",
    }
    to_pass = [(test, True) for test in record.pass_to_pass]
    for test, passes_with_bug in [*to_pass, *((test, False) for test in record.fail_to_pass)]:
        for fixed, expected in ((True, True), (False, passes_with_bug)):
            passed = [run.passed.get(test, False) for run in results[fixed]]
            where = f"{test} {'with the fix' if fixed else 'with the bug'}"
            if len(set(passed)) > 1:
                yield Verdict("flaky", f"{where}: passed {sum(passed)} of {len(passed)} times")
            elif passed and passed[0] is not expected:
                yield Verdict(wrong[fixed, expected], where)
