"""The clean room: tests of a repository that somebody changed, and what their results are worth.

Steps that can be used apart: `stage` (a fresh tree on disk), `run` (one fresh pytest process, in a
sandbox where there is one, that reports over a private socket), `read` (do exit status, report,
collected ids, JUnit file and canaries agree?) and `weigh` (what one run amounts to). `examine` puts
them together: the suite once as it is and, if that looks solved, again in pairs of runs in which a
random half of the tests are replaced by twins (`twins.py`), which correct code must fail.

Invariants: nothing that the code under test prints is read; a contradiction between witnesses is
TAMPERED, with the evidence, and never a pass; what goes wrong before the repository's code runs is
a `RoomFault`, never a verdict. The code under test shares a process with the tests, so it can forge
every report; but it must then forge the twins' failures too, and cannot know which test is a twin
unless it knows the right answers. Standard library only: it also runs in a repository's own image.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from lightning_ray.tasks.swe import twins

PAIRS = 2  # of mixed runs: a forger who tosses coins passes with probability 1/29 at best
MAX_REPORT_BYTES = 16 << 20  # tens of thousands of test ids
MAX_JUNIT_BYTES = 64 << 20
CANARIES = (  # each fails by another mechanism that an attack may disable
    "def test_{0}():\n    raise AssertionError('unequal')\n",
    "def test_{0}():\n    assert [1, {1}] == [1, {2}]\n",
    "class Test{0}(unittest.TestCase):\n    def test_{0}(self):\n"
    "        self.assertEqual({1}, {2})\n",
    "def test_{0}():\n    with pytest.raises(KeyError):\n        {{{1}: 0}}[{1}]\n",
)
LIMITS = {  # of the test process; a runaway must hit these before the machine notices
    "RLIMIT_CPU": 600,
    "RLIMIT_FSIZE": 256 << 20,
    "RLIMIT_AS": 4 << 30,
    "RLIMIT_CORE": 0,
}
Tree = dict[str, bytes]


class RoomFault(RuntimeError):
    """The clean room itself failed: there is no verdict, and another try may give one."""


class Verdict(StrEnum):
    """What a repository is."""

    SOLVED = "solved"  # every expected test passed, every twin and canary failed, and all agrees
    UNSOLVED = "unsolved"  # some expected test failed or is missing, or the tests came to no end
    TAMPERED = "tampered"  # the witnesses contradict each other


@dataclass(frozen=True)
class Suite:
    """The tests that judge a task. `expected` ids must pass, and exactly `expected` and `others` be
    collected (`others` None: whatever else there is). `twins` are changes to tests, by
    `FILE::NAME`. `targets` and `paths` (for imports) are relative to the tree."""

    python: str
    targets: tuple[str, ...]
    fail_to_pass: frozenset[str]
    pass_to_pass: frozenset[str]
    others: frozenset[str] | None = None
    twins: Mapping[str, Sequence[twins.Edit]] = field(default_factory=dict)
    paths: tuple[str, ...] = ("",)
    timeout_s: float = 60.0

    @property
    def expected(self) -> frozenset[str]:
        return self.fail_to_pass | self.pass_to_pass


@dataclass(frozen=True)
class Report:
    """What one run says of itself, and what the outside saw of it. `exit_status` None: killed at
    the time limit."""

    exit_status: int | None
    outcomes: Mapping[str, str] = field(default_factory=dict)
    collected: frozenset[str] = frozenset()
    errors: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()  # contradictions between the witnesses
    seconds: float = 0.0

    def passed(self, test_id: str) -> bool:
        return self.outcomes.get(test_id) == "passed"


@dataclass(frozen=True)
class Judgement:
    """A verdict, why, and how many of the expected tests passed in the first run."""

    verdict: Verdict
    evidence: tuple[str, ...] = ()
    fail_to_pass: int = 0
    pass_to_pass: int = 0
    runs: int = 1
    seconds: float = 0.0


def _no_sandbox(_room: Path, _scratch: Path) -> list[str]:
    return []


@dataclass(frozen=True)
class Protection:
    """What keeps the code under test from the grader. `prefix(ROOM, SCRATCH)` is what stands before
    a command line, so that it can read ROOM and write SCRATCH only; `user` is whom the tests run as
    (if we are root, and everybody can reach the interpreter)."""

    prefix: Callable[[Path, Path], list[str]] = _no_sandbox
    user: int | None = None


UNPROTECTED = Protection()


def stage(tree: Mapping[str, bytes], folder: Path) -> None:
    """Writes a tree into an empty folder. Raises OSError."""
    made: set[Path] = set()
    for path, content in tree.items():
        target = folder / path
        if target.parent not in made:
            target.parent.mkdir(parents=True, exist_ok=True)
            made.add(target.parent)
        target.write_bytes(content)


def examine(
    tree: Mapping[str, bytes],
    suite: Suite,
    *,
    protection: Protection = UNPROTECTED,
    pairs: int = PAIRS,
    rng: random.Random | None = None,
) -> Judgement:
    """What the suite says of a tree. An unsolved tree costs one run, a solved one `1 + 2 * pairs`.

    Raises:
        RoomFault: no process could be started, or it failed before it reached the tests.
    """
    rng = rng or random.SystemRandom()
    first = run(tree, suite, protection=protection)
    counts = {
        "fail_to_pass": sum(map(first.passed, suite.fail_to_pass)),
        "pass_to_pass": sum(map(first.passed, suite.pass_to_pass)),
    }
    verdict, evidence = weigh(first, suite)
    seconds, runs = first.seconds, 1
    functions = sorted(suite.twins)
    for _ in range(pairs if functions else 0):
        if verdict is not Verdict.SOLVED:
            break
        half = frozenset(name for name in functions if rng.random() < 0.5)
        masks = [half, frozenset(functions) - half]
        rng.shuffle(masks)
        for mask in masks:
            mixed = run(with_twins(tree, suite, mask, rng), suite, protection=protection)
            seconds, runs = seconds + mixed.seconds, runs + 1
            verdict, evidence = weigh(mixed, suite, mask)
            if verdict is not Verdict.SOLVED:
                break
    return Judgement(verdict, evidence, **counts, runs=runs, seconds=seconds)


def with_twins(
    tree: Mapping[str, bytes], suite: Suite, mask: frozenset[str], rng: random.Random
) -> Tree:
    """The tree in which the tests of `mask` are replaced by a twin of each."""
    edits: dict[str, list[twins.Edit]] = {}
    for name in sorted(mask):
        path = name.partition("::")[0]
        edits.setdefault(path, []).append(rng.choice(suite.twins[name]))
    changed = {p: twins.edited(tree[p].decode(), found).encode() for p, found in edits.items()}
    return {**tree, **changed}


def weigh(
    report: Report, suite: Suite, mask: frozenset[str] = frozenset()
) -> tuple[Verdict, tuple[str, ...]]:
    """What one run amounts to, when the tests of `mask` were twins."""
    if report.evidence:
        return Verdict.TAMPERED, report.evidence
    if report.exit_status is None:
        return Verdict.UNSOLVED, (f"still running after {suite.timeout_s:g} s",)
    if not report.outcomes:
        return Verdict.UNSOLVED, (f"the tests ended early, with status {report.exit_status}",)
    alive = {
        name
        for name in mask
        if not any(
            outcome == "failed" and twins.function_of(test_id) == name
            for test_id, outcome in report.outcomes.items()
        )
    }
    wanted = [test for test in suite.expected if twins.function_of(test) not in mask]
    missed = sorted(test for test in wanted if not report.passed(test))
    if alive and not missed and not report.errors:
        listed = ", ".join(sorted(alive)[:3])
        return Verdict.TAMPERED, (f"{len(alive)} tests that must fail did not: {listed}",)
    if missed:
        how = "not repeatable: " if mask else ""
        return Verdict.UNSOLVED, (f"{how}{len(missed)} tests did not pass: {missed[0]}",)
    if suite.others is not None and not mask:
        extra = report.collected - suite.expected - suite.others
        if extra or suite.others - report.collected:
            strange = sorted(extra or suite.others - report.collected)
            return Verdict.TAMPERED, (f"the set of tests is another one: {strange[0]}",)
    return Verdict.SOLVED, ()


def run(
    tree: Mapping[str, bytes],
    suite: Suite,
    *,
    protection: Protection = UNPROTECTED,
    shuffle: int | None = None,
    hash_seed: int = 0,
    test_seconds: float = 0.0,
) -> Report:
    """Runs the suite once, in a fresh process on a fresh copy of the tree, with canaries in it.

    Raises:
        RoomFault: see `examine`.
    """
    nonce = secrets.token_hex(16)
    canary = f"test_{secrets.token_hex(4)}.py"
    birds = f"{Path(suite.targets[0]) if suite.targets[0] else Path()}"
    home = birds if not birds.endswith(".py") else str(Path(birds).parent)
    canary_path = str(Path(home) / canary)
    with tempfile.TemporaryDirectory(prefix="lr-room-", ignore_cleanup_errors=True) as name:
        room = Path(name).resolve()
        copy, scratch = room / "tree", room / "scratch"
        try:
            for folder in (copy, scratch, scratch / "tmp"):
                folder.mkdir()
            stage({**tree, canary_path: _canaries()}, copy)
            witness = copy.parent / "witness.py"
            witness.write_bytes(Path(__file__).with_name("witness.py").read_bytes())
            (scratch / "pytest.ini").write_text("[pytest]\n")
            return _run(
                suite, copy, scratch, protection, nonce, canary_path,
                {"shuffle": shuffle, "test_seconds": test_seconds}, hash_seed,
            )  # fmt: skip
        except OSError as error:
            raise RoomFault(f"cannot run tests: {error}") from error


def _canaries() -> bytes:
    parts = ["import unittest\nimport pytest\n"]
    for form in CANARIES:
        one, other = random.sample(range(1000), 2)
        parts.append(form.format(secrets.token_hex(4), one, other))
    return "\n\n".join(parts).encode()


def _run(
    suite: Suite,
    tree: Path,
    scratch: Path,
    protection: Protection,
    nonce: str,
    canary: str,
    options: Mapping[str, object],
    hash_seed: int,
) -> Report:
    junit = scratch / "junit.xml"
    order = {
        "nonce": nonce,
        "limits": LIMITS,
        "tree": str(tree),
        "paths": [str(tree / path) for path in suite.paths],
        "argv": [
            "-q", "-c", str(scratch / "pytest.ini"), f"--rootdir={tree}", f"--junit-xml={junit}",
            "-p", "no:cacheprovider", "--disable-warnings", "--tb=no", "--color=no",
            "--continue-on-collection-errors", f"--basetemp={scratch / 'tmp' / 'pytest'}",
            *dict.fromkeys([*suite.targets, str(Path(canary))]),
        ],
        **options,
    }  # fmt: skip
    started = time.monotonic()
    deadline = started + suite.timeout_s
    ours, theirs = socket.socketpair()
    user = protection.user
    if user is not None:
        for folder in (scratch, scratch / "tmp"):
            os.chown(folder, user, user)
        os.chmod(tree.parent, 0o755)
    with ours, tempfile.TemporaryFile() as errors:
        with theirs:
            process = subprocess.Popen(
                [
                    *protection.prefix(tree.parent, scratch), suite.python, "-s", "-P", "-B",
                    str(tree.parent / "witness.py"), str(theirs.fileno()),
                ],
                cwd=scratch,
                env=_environment(suite.python, scratch, hash_seed),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )  # fmt: skip
        try:
            ready, told = _converse(ours, json.dumps(order).encode() + b"\n", deadline)
            status = _wait(process, deadline)
        finally:
            _kill(process)
        if ready != b"ready":
            errors.seek(0)
            said = errors.read(1 << 16).decode(errors="replace").splitlines() or ["no message"]
            late = "" if status is not None else f" within {suite.timeout_s:g} s"
            raise RoomFault(f"the test process did not start{late}: {said[-1]}")
    seconds = time.monotonic() - started
    return read(told, status, nonce, junit, canary, seconds)


def read(
    told: bytes, status: int | None, nonce: str, junit: Path, canary: str, seconds: float = 0.0
) -> Report:
    """A report out of what the witnesses left, with every contradiction between them."""
    if status is None:
        return Report(None, seconds=seconds)
    if status not in (0, 1) or not told:
        # The tests came to no end: a signal, a conftest.py that cannot be imported, ... But the
        # canaries fail, so no honest end has status 0.
        early = ("exit status 0, but no report",) if status == 0 else ()
        return Report(status, evidence=early, seconds=seconds)
    try:
        tree = json.loads(told)
        authentic = hmac.compare_digest(str(tree["nonce"]), nonce)
        outcomes = {str(k): str(v) for k, v in tree["outcomes"].items()}
        names = {str(k): str(v) for k, v in tree["names"].items()}
        collected = frozenset(map(str, tree["collected"]))
        errors = tuple(map(str, tree["errors"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Report(status, evidence=("the report cannot be read",), seconds=seconds)
    evidence = [] if authentic else ["the report has another nonce"]
    birds = {test for test in outcomes if test.startswith(f"{canary}::")}
    if len(birds) != len(CANARIES) or not birds <= collected:
        evidence.append(f"{len(birds)} of {len(CANARIES)} canaries ran")
    if singing := sorted(test for test in birds if outcomes[test] != "failed"):
        evidence.append(f"a canary did not fail: {outcomes[singing[0]]}")
    if status != 1:
        evidence.append(f"exit status {status}, although canaries fail")
    if outcomes.keys() != collected:
        evidence.append("the collected tests are not the tests that ran")
    evidence += _junit_against(junit, outcomes, names)
    return Report(
        status,
        {test: outcome for test, outcome in outcomes.items() if test not in birds},
        collected - birds,
        errors,
        tuple(evidence),
        seconds,
    )


def _junit_against(junit: Path, outcomes: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """How pytest's own JUnit file differs from the report."""
    try:
        descriptor = os.open(junit, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            content = file.read(MAX_JUNIT_BYTES + 1)
        if len(content) > MAX_JUNIT_BYTES or b"<!DOCTYPE" in content:
            return ["the JUnit file is no JUnit file"]
        cases = list(ElementTree.fromstring(content).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return ["there is no JUnit file"]
    bad: dict[str, int] = {}
    for case in cases:
        failed = any(child.tag in ("failure", "error") for child in case)
        if failed and case.get("name"):
            bad[case.get("name", "")] = bad.get(case.get("name", ""), 0) + 1
    told = {names.get(test, test) for test, outcome in outcomes.items() if outcome == "failed"}
    written = {name for name in bad if name in set(names.values())}
    return [] if {*map(_plain, told)} == {*map(_plain, written)} else ["JUnit disagrees"]


def _plain(name: str) -> str:
    """What both sides keep of a name: JUnit escapes what XML cannot carry."""
    return "".join(character for character in name if character.isascii() and character.isalnum())


def _environment(python: str, scratch: Path, hash_seed: int) -> dict[str, str]:
    """Nothing of ours: no keys, no home, no path to anything but the environment."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {
        "PATH": os.pathsep.join([str(Path(python).parent), os.defpath]),
        "HOME": str(scratch),
        "TMPDIR": str(scratch / "tmp"),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **kept,
    }


def _converse(channel: socket.socket, order: bytes, deadline: float) -> tuple[bytes, bytes]:
    """Sends the order; returns the two lines of the answer, b"" for one that did not come."""
    received = b""
    with contextlib.suppress(TimeoutError, ConnectionError):  # the caller judges what is missing
        channel.settimeout(max(deadline - time.monotonic(), 0.001))
        channel.sendall(order)
        while received.count(b"\n") < 2 and len(received) <= MAX_REPORT_BYTES:
            channel.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (chunk := channel.recv(1 << 16)):
                break
            received += chunk
    first, _, rest = received.partition(b"\n")
    second, end, _ = rest.partition(b"\n")
    return first, second if end else b""


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(deadline - time.monotonic(), 0.001))
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the test process and its group."""
    with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
