"""The clean room on this machine: runs tests of a repository that somebody changed.

Steps that can be used apart: `stage` (a fresh tree on disk), `run` (one fresh pytest process, in a
sandbox where there is one, that reports over a private socket) and `evidence.weigh` (what one run
amounts to). `examine` puts them together: it runs the trials that `examination.wanted` asks for,
one after the other.

Invariants: nothing that the code under test prints is read; a contradiction between witnesses is
TAMPERED, with the evidence, and never a pass; what goes wrong before the repository's code runs is
a `RoomFault`, never a verdict. The code under test shares a process with the tests, so it can forge
every report; but it must then forge the twins' failures too, and cannot know which test is a twin
unless it knows the right answers. Standard library only: it also runs in a repository's own image.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_ray.tasks.swe import examination
from lightning_ray.tasks.swe.evidence import Judgement, Report, Suite, read
from lightning_ray.tasks.swe.examination import (
    ARGUMENTS,
    JUNIT,
    SCRATCH,
    WITNESS,
    Given,
    RoomFault,
    with_twins,
)

__all__ = ["Protection", "RoomFault", "examine", "run", "stage", "with_twins"]

# Of a report and of a JUnit file: tens of thousands of test ids. Read, they take up to a hundred
# times that, and who makes a grader take more than it may has a fault instead of a verdict.
MAX_REPORT_BYTES = MAX_JUNIT_BYTES = 4 << 20
_WATCH_S = 0.1


def _no_sandbox(_room: Path, _scratch: Path) -> list[str]:
    return []


def _never(_pid: int) -> bool:
    return False


@dataclass(frozen=True)
class Protection:
    """What keeps the code under test from the grader. `prefix(ROOM, SCRATCH)` is what stands before
    a command line, so that it can read ROOM and write SCRATCH only; `passed(PID)` is asked ten
    times a second whether a run is to end, since the process PID and its descendants take too much;
    `user` is whom the tests run as (if we are root, and everybody can reach the interpreter)."""

    prefix: Callable[[Path, Path], list[str]] = _no_sandbox
    passed: Callable[[int], bool] = _never
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
    rng: random.Random | None = None,
    known_bad: Mapping[str, bytes] | None = None,
    counted: bool = False,
) -> Judgement:
    """What the suite says of a tree. Where it has twins an unsolved tree costs up to `ROUNDS` runs
    (two on average, if one hidden test fails), a solved one `ROUNDS + 1`, and one more if a
    `known_bad` tree is given, which must be unsolved in this same room. `counted`: see
    `examination.wanted`.

    Raises:
        RoomFault: no process could be started, it failed before it reached the tests, or the
            known-bad tree is not unsolved.
    """
    done: list[tuple[examination.Trial, Report]] = []
    while True:
        answer = examination.wanted(
            suite, done, known_bad=known_bad is not None, counted=counted, rng=rng
        )
        if isinstance(answer, Judgement):
            return answer
        trial = answer[0]
        subject = examination.tree_of(trial, tree, known_bad, suite)
        done.append((trial, run(subject, suite, protection=protection)))


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
    what = examination.given(tree, suite, shuffle=shuffle, test_seconds=test_seconds)
    with tempfile.TemporaryDirectory(prefix="lr-room-", ignore_cleanup_errors=True) as name:
        room = Path(name).resolve()
        try:
            stage(what.files, room)
            (room / SCRATCH / "tmp").mkdir()
            (room / JUNIT).touch()  # so that a box can have this file of the machine, and no other
            return _run(suite, what, room, protection, hash_seed)
        except OSError as error:
            raise RoomFault(f"cannot run tests: {error}") from error


def _run(suite: Suite, what: Given, room: Path, protection: Protection, hash_seed: int) -> Report:
    scratch = room / SCRATCH
    started = time.monotonic()
    deadline = started + suite.timeout_s
    ours, theirs = socket.socketpair()
    user = protection.user
    if user is not None:
        for path in (scratch, scratch / "tmp", room / JUNIT):
            os.chown(path, user, user)
        os.chmod(room, 0o755)
    with ours, tempfile.TemporaryFile() as errors:
        with theirs:
            process = subprocess.Popen(
                [
                    *protection.prefix(room, scratch), suite.python, *ARGUMENTS,
                    str(room / WITNESS), str(theirs.fileno()),
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
            with watched(process, protection.passed):
                ready, told = converse(ours, what.say, deadline, MAX_REPORT_BYTES)
                status = wait(process, deadline)
        finally:
            kill(process)
        if ready != b"ready":
            errors.seek(0)
            said = errors.read(1 << 16).decode(errors="replace").splitlines() or ["no message"]
            late = "" if status is not None else f" within {suite.timeout_s:g} s"
            raise RoomFault(f"the test process did not start{late}: {said[-1]}")
    seconds = time.monotonic() - started
    return read(told, status, what.nonce, _left(room / JUNIT), what.canary, seconds)


@contextlib.contextmanager
def watched(process: subprocess.Popen[bytes], passed: Callable[[int], bool]) -> Iterator[None]:
    """Kills a process that takes too much: its tests come to no end, like any that are killed."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_WATCH_S):
            if passed(process.pid):
                process.kill()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _left(path: Path) -> bytes | None:
    """A file that a dead process left, unless it is a link, a pipe, or huge."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            content = file.read(MAX_JUNIT_BYTES + 1)
        return content if len(content) <= MAX_JUNIT_BYTES else None
    return None


def _environment(python: str, scratch: Path, hash_seed: int) -> dict[str, str]:
    """Nothing of ours: no keys, no home, no path to anything but the environment."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {
        "PATH": os.pathsep.join([str(Path(python).parent), os.defpath]),
        "HOME": str(scratch),
        "TMPDIR": str(scratch / "tmp"),
        **examination.environment(hash_seed),
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
    return examination.lines(received)


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
