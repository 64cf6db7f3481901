"""The reward of a software-engineering rollout: hidden tests on a clean copy of the repository.

`grade` lays out the task's own files, applies the collected changes that are not tests, and lets
`runner` run the hidden tests in a fresh process, in a sandbox without a network where this machine
has bubblewrap: the code under test is the policy's. The verdict comes over a private socket, and is
believed only if the nonce, the exit code, the set of test ids and the canaries (tests that must
fail) all agree. Nothing that the code under test prints is read.

Code under test shares the runner's process and can forge all of these. So a task may have twins of
a hidden file (`fields["twins"]`: for its path a list, each entry the edits of one twin): copies in
which every test asks for something else, so that correct code fails it. They run beside the
original, in a random order, under random names. Who forges results must say which of the files is
the original, which takes knowing what is right.

Invariants: only a rollout whose hidden tests all pass, and none of their twins, is solved; a fault
of the grader is a GradingError, never a reward; an original with twins is on no disk, and nothing
that a run is told sets it apart. Limit: hidden files without twins are guarded by the nonce and the
canaries alone, which code that walks the runner's frames can forge.
"""

from __future__ import annotations

import hmac
import json
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_ray.records import Json, Reward, Split, Task
from lightning_ray.rollouts import sandbox
from lightning_ray.rollouts.grading import Episode, RoomOrder, RoomReport
from lightning_ray.tasks.swe import canaries, twins
from lightning_ray.tasks.swe.cleanroom import converse, kill, wait, watched
from lightning_ray.tasks.swe.protection import takes_too_much
from lightning_ray.tasks.swe.workspace import acceptable, write_files

TIME_LIMIT_S = 20.0  # hundreds of times what the embedded tests take
MAX_REPORT_BYTES = 1 << 20  # thousands of test ids
RUNNER = Path(__file__).with_name("runner.py")
LIMITS = {  # of the test process; a runaway must hit these before the machine notices
    "RLIMIT_CPU": 30,
    "RLIMIT_FSIZE": 16 << 20,
    "RLIMIT_AS": 2 << 30,
    "RLIMIT_CORE": 0,
}
COMMAND = re.compile(r"```(?:bash|sh)[ \t]*\n(.*?)\n?```", re.DOTALL)  # as in mini.yaml


class GradingError(RuntimeError):
    """The grader itself failed: the rollout has no reward, and another try may give one."""


class Verdict(StrEnum):
    """What the hidden tests say of a repository."""

    PASSED = "passed"  # every expected test passed, and all evidence agrees
    FAILED = "failed"  # some test failed, was skipped, is missing, or the process ended early
    TIMEOUT = "timeout"  # still running at the time limit
    FORGED = "forged"  # the evidence contradicts itself, or twins pass, too: somebody tampered


@dataclass(frozen=True)
class TestRun:
    """A verdict, and how many of the expected tests passed (0 unless the report is believed)."""

    verdict: Verdict
    passed: int = 0


@dataclass(frozen=True)
class Exam:
    """One run of the hidden tests. `order` is what the runner is told; of the tests that it will
    find, `names` has those that must pass (and their ids in the task), `twins` those that must
    fail."""

    order: Json
    names: dict[str, str]
    twins: frozenset[str] = frozenset()

    def weigh(self, report: bytes, exit_code: int) -> TestRun:
        told = self.order["nonce"], self.order["canaries"]
        return weigh(report, exit_code, *told, frozenset(self.names), self.twins)


def grade(task: Task, result: dict[str, Any] | None, episode: Episode) -> Reward:
    """The reward of what `workspace.collect` found.

    `value` is shaped so that a group of beginners differs: 0.1 for a command in a code block, 0.4
    if the expected file was written, 0.6 if it contains the expected word, 1.0 only if all hidden
    tests pass. Who forged has 0, and in validation only 1.0 counts.

    Raises:
        GradingError: the grader failed (no space, no process, ...).
    """
    files = (result or {}).get("files", {})
    return _reward(task, result or {}, episode, run_hidden_tests(task, files))


def plan(task: Task, result: dict[str, Any] | None) -> RoomOrder | None:
    """The hidden tests as an order for a room of their own; None if there is nothing to test."""
    repository = _repository(task, (result or {}).get("files", {}))
    if repository is None:
        return None
    exam = _exam(task)
    argv = ["{python}", "-I", "-S", "-B", "-c", RUNNER.read_text(), "{fd}"]
    return RoomOrder(
        files=repository,
        argv=argv,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        say=json.dumps(exam.order) + "\n",
        timeout_s=TIME_LIMIT_S,
        most_bytes=MAX_REPORT_BYTES,
        note={"names": exam.names, "twins": sorted(exam.twins)},
    )


def judge(
    task: Task,
    result: dict[str, Any] | None,
    episode: Episode,
    order: RoomOrder | None,
    report: RoomReport | None,
) -> Reward:
    """The reward, given what the room said.

    Raises:
        GradingError: the tests did not start.
    """
    if order is None or report is None or report.overran:
        return _reward(task, result or {}, episode, TestRun(Verdict.FAILED))
    lines = [*report.said.encode(errors="replace").split(b"\n"), b"", b""]
    if lines[0] != b"ready":
        said = report.tail.splitlines() or ["no message"]
        raise GradingError(f"task {task.task_id}: the test process did not start: {said[-1]}")
    exam = Exam(json.loads(order.say), order.note["names"], frozenset(order.note["twins"]))
    run = TestRun(Verdict.TIMEOUT)
    if report.status is not None:
        whole = lines[1] if len(lines) > 4 else b""  # a line that came to its end
        run = exam.weigh(whole, report.status)
    return _reward(task, result or {}, episode, run)


def _reward(task: Task, result: dict[str, Any], episode: Episode, run: TestRun) -> Reward:
    files: dict[str, str | None] = result.get("files", {})
    content = files.get(task.fields.get("expected_file", ""))
    word = task.fields.get("expected_word")
    command = any(found.strip() for text in episode.texts for found in COMMAND.findall(text))
    contains = content is not None and word is not None and word in content
    expected = len(_expected(task))
    solved = run.verdict is Verdict.PASSED
    parts = [(1.0, solved)]
    if episode.split is Split.TRAIN and run.verdict is not Verdict.FORGED:
        parts += [(0.6, contains), (0.4, content is not None), (0.1, command)]
    return Reward(
        value=next((value for value, reached in parts if reached), 0.0),
        solved=solved,
        metrics={
            "command": float(command),
            "right_file": float(content is not None),
            "contains_word": float(contains),
            "tests_passed": run.passed / expected if expected else 0.0,
            "tests_timeout": float(run.verdict is Verdict.TIMEOUT),
            "forged": float(run.verdict is Verdict.FORGED),
            "refused_files": float(len(result.get("refused", []))),
        },
    )


def run_hidden_tests(task: Task, changes: dict[str, str | None]) -> TestRun:
    """Runs the hidden tests on a clean copy with `changes` applied (None deletes a file)."""
    repository = _repository(task, changes)
    if repository is None:
        return TestRun(Verdict.FAILED)
    try:
        with tempfile.TemporaryDirectory(prefix="grading-", ignore_cleanup_errors=True) as folder:
            write_files(repository, Path(folder))
            return _run(task, folder)
    except (OSError, ValueError) as error:
        raise GradingError(f"task {task.task_id}: cannot grade: {error}") from error


def merge(
    files: dict[str, str], changes: dict[str, str | None], hidden: dict[str, str]
) -> dict[str, str] | None:
    """The repository to test: hidden tests over changes over the task's files. Changes of protected
    or impossible paths do not count. None if the changes put a file where a folder must be."""
    allowed = {path: text for path, text in changes.items() if acceptable(path)}
    merged = {**files, **allowed, **hidden}
    repository = {path: text for path, text in merged.items() if text is not None}
    parents = {str(parent) for path in repository for parent in Path(path).parents}
    return None if parents & repository.keys() else repository


def _repository(task: Task, changes: dict[str, str | None]) -> dict[str, str] | None:
    """`merge` of a task, but for hidden files with twins: on disk one could read which one is it.

    Raises:
        GradingError: the task has twins of a file that is none of its hidden tests.
    """
    secret = task.fields.get("twins", {}).keys()
    hidden = {
        path: canaries.below(text, "tests", task.task_id)
        for path, text in task.fields["hidden_tests"].items()
    }
    if secret - hidden.keys():
        raise GradingError(
            f"task {task.task_id}: {min(secret - hidden.keys())} has twins, no tests"
        )
    repository = merge(task.fields["files"], changes, hidden)
    return repository and {path: text for path, text in repository.items() if path not in secret}


def _expected(task: Task) -> frozenset[str]:
    return frozenset([*task.fields["fail_to_pass"], *task.fields["pass_to_pass"]])


def _run(task: Task, folder: str) -> TestRun:
    """Runs `runner` in `folder` and weighs what it reports."""
    exam = _exam(task)
    ours, theirs = socket.socketpair()
    python = [Path(sys.base_prefix), Path(sys.prefix)]
    box = sandbox.prefix(Path(folder), [*python, RUNNER])
    deadline = time.monotonic() + TIME_LIMIT_S
    with ours, tempfile.TemporaryFile() as errors:
        with theirs:
            process = subprocess.Popen(
                [*box, sys.executable, "-I", "-S", "-B", str(RUNNER), str(theirs.fileno())],
                cwd=folder,
                env=_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            said = json.dumps(exam.order).encode() + b"\n"
            with watched(process, takes_too_much):
                lines = converse(ours, said, deadline, MAX_REPORT_BYTES)
                exit_code = wait(process, deadline)
        finally:
            kill(process)
        if lines[0] != b"ready":
            errors.seek(0)
            told = errors.read(4096).decode(errors="replace").splitlines() or ["no message"]
            raise GradingError(f"task {task.task_id}: the test process did not start: {told[-1]}")
    if exit_code is None:
        return TestRun(Verdict.TIMEOUT)
    return exam.weigh(lines[1], exit_code)


def _exam(task: Task) -> Exam:
    """A run with names and a nonce that nobody can guess, and the twins among the tests."""
    sources: dict[str, str] = {}
    names: dict[str, str] = {}
    wrong: set[str] = set()
    expected = _expected(task)
    for path, source in task.fields["hidden_tests"].items():
        mine = {test for test in expected if test.startswith(f"{_module(path)}.")}
        edits = task.fields.get("twins", {}).get(path, [])
        others = [twins.edited(source, map(tuple, edit)) for edit in edits]
        for text in (source, *others):
            stem = f"test_{secrets.token_hex(4)}" if others else PurePosixPath(path).stem
            place = str(PurePosixPath(path).with_name(f"{stem}.py"))
            sources[place] = canaries.below(text, "tests", task.task_id)
            here = {_module(place) + test.removeprefix(_module(path)): test for test in mine}
            if text is source:
                names |= here
            else:
                wrong |= here.keys()
    names |= {test: test for test in expected - set(names.values())}  # of no file: never found
    order = {
        "nonce": secrets.token_hex(16),
        "limits": LIMITS,
        "tests": dict(random.SystemRandom().sample(sorted(sources.items()), len(sources))),
        "canaries": [f"test_{secrets.token_hex(4)}" for _ in range(3)],
    }
    return Exam(order, names, frozenset(wrong))


def _module(path: str) -> str:
    """What `runner.load` calls a file of tests."""
    return ".".join(PurePosixPath(path).with_suffix("").parts)


def weigh(
    report: bytes,
    exit_code: int,
    nonce: str,
    canaries: Iterable[str],
    expected: frozenset[str],
    wrong: frozenset[str] = frozenset(),
) -> TestRun:
    """What a report and an exit code amount to; `expected` must pass, twins (`wrong`) must fail.
    Anything that does not fit together is FORGED."""
    if not report:  # the process ended before its tests did
        return TestRun(Verdict.FORGED if exit_code == 0 else Verdict.FAILED)
    try:
        told = json.loads(report)
        verdicts: dict[str, str] = dict(told["verdicts"])
        authentic = hmac.compare_digest(str(told["nonce"]), nonce)
    except Exception:  # of whatever kind: code under test can have written it
        return TestRun(Verdict.FORGED)
    classes = {test.rpartition(".")[0] for test in expected | wrong}
    birds = {f"{case}.{name}" for case in classes for name in canaries}
    real = {test: verdict for test, verdict in verdicts.items() if test not in birds}
    whole = real.keys() == expected | wrong
    singing = any(verdicts.get(bird, "failed") != "failed" for bird in birds)
    claim = whole and all(verdict == "passed" for verdict in real.values())
    if not authentic or singing or (exit_code == 0) != claim:
        return TestRun(Verdict.FORGED)
    passed = sum(real.get(test) == "passed" for test in expected)
    if not whole or passed < len(expected):
        return TestRun(Verdict.FAILED, passed)
    # Wrong code may pass a twin, for it may have the twin's word; right code cannot.
    deceived = any(real[test] != "failed" for test in wrong)
    honest = birds <= verdicts.keys() and not deceived
    return TestRun(Verdict.PASSED if honest else Verdict.FORGED, passed)


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours, except where the interpreter finds its libraries."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return kept | {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
