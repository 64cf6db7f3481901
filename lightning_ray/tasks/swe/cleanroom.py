"""The clean room: tests of a repository that somebody changed, and what their results are worth.

Steps that can be used apart: `stage` (a fresh tree on disk), `run` (one fresh pytest process, in a
sandbox where there is one, that reports over a private socket) and `evidence.weigh` (what one run
amounts to). `examine` puts them together: the suite once as it is and, if that looks solved, again
in pairs of runs in which a random half of the tests are replaced by twins (`twins.py`), which
correct code must fail.

Invariants: nothing that the code under test prints is read; a contradiction between witnesses is
TAMPERED, with the evidence, and never a pass; what goes wrong before the repository's code runs is
a `RoomFault`, never a verdict. The code under test shares a process with the tests, so it can forge
every report; but it must then forge the twins' failures too, and cannot know which test is a twin
unless it knows the right answers. Standard library only: it also runs in a repository's own image.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_ray.tasks.swe import twins
from lightning_ray.tasks.swe.evidence import (
    Judgement,
    Report,
    Suite,
    Tree,
    Verdict,
    canaries,
    read,
    weigh,
)

PAIRS = 2  # of mixed runs: a forger who tosses coins passes with probability 1/29 at best
MAX_REPORT_BYTES = 16 << 20  # tens of thousands of test ids
LIMITS = {  # of the test process; a runaway must hit these before the machine notices
    "RLIMIT_FSIZE": 256 << 20,
    "RLIMIT_AS": 2 << 30,
    "RLIMIT_CORE": 0,
}


class RoomFault(RuntimeError):
    """The clean room itself failed: there is no verdict, and another try may give one."""


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
    known_bad: Mapping[str, bytes] | None = None,
) -> Judgement:
    """What the suite says of a tree. An unsolved tree costs one run, a solved one `1 + 2 * pairs`,
    and one more if a `known_bad` tree is given, which must be unsolved in this same room.

    Raises:
        RoomFault: no process could be started, it failed before it reached the tests, or the
            known-bad tree is not unsolved.
    """
    rng = rng or random.SystemRandom()
    first = run(tree, suite, protection=protection)
    counts = {
        "fail_to_pass": sum(map(first.passed, suite.fail_to_pass)),
        "pass_to_pass": sum(map(first.passed, suite.pass_to_pass)),
    }
    verdict, evidence = weigh(first, suite)
    seconds, runs = first.seconds, 1
    if known_bad is not None and verdict is Verdict.SOLVED:
        bad = run(known_bad, suite, protection=protection)
        seconds, runs = seconds + bad.seconds, runs + 1
        if (found := weigh(bad, suite)[0]) is not Verdict.UNSOLVED:
            raise RoomFault(f"the known-bad tree is {found} here: this room cannot judge")
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
            stage({**tree, canary_path: canaries()}, copy)
            witness = copy.parent / "witness.py"
            witness.write_bytes(Path(__file__).with_name("witness.py").read_bytes())
            (scratch / "pytest.ini").write_text("[pytest]\n")
            return _run(
                suite, copy, scratch, protection, nonce, canary_path,
                {"shuffle": shuffle, "test_seconds": test_seconds}, hash_seed,
            )  # fmt: skip
        except OSError as error:
            raise RoomFault(f"cannot run tests: {error}") from error


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
        "limits": {"RLIMIT_CPU": int(suite.cpu_s) + 1} | LIMITS,
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
            ready, told = converse(
                ours, json.dumps(order).encode() + b"\n", deadline, MAX_REPORT_BYTES
            )
            status = wait(process, deadline)
        finally:
            kill(process)
        if ready != b"ready":
            errors.seek(0)
            said = errors.read(1 << 16).decode(errors="replace").splitlines() or ["no message"]
            late = "" if status is not None else f" within {suite.timeout_s:g} s"
            raise RoomFault(f"the test process did not start{late}: {said[-1]}")
    seconds = time.monotonic() - started
    return read(told, status, nonce, junit, canary, seconds)


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


def converse(
    channel: socket.socket, order: bytes, deadline: float, most_bytes: int
) -> tuple[bytes, bytes]:
    """Sends the order; returns the two lines of the answer, b"" for one that did not come."""
    received = b""
    with contextlib.suppress(TimeoutError, ConnectionError):  # the caller judges what is missing
        channel.settimeout(max(deadline - time.monotonic(), 0.001))
        channel.sendall(order)
        while received.count(b"\n") < 2 and len(received) < most_bytes:
            channel.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (chunk := channel.recv(1 << 16)):
                break
            received += chunk
    first, _, rest = received.partition(b"\n")
    second, end, _ = rest.partition(b"\n")
    return first, second if end else b""


def wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(deadline - time.monotonic(), 0.001))
    except subprocess.TimeoutExpired:
        return None


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the test process and its group."""
    with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
