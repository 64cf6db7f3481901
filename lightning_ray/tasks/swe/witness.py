"""Runs a repository's tests with pytest and reports what each did. Run by `cleanroom` or in a pod.

Started as `python -s -B witness.py FD` in the environment of the repository, beside the folders
`scratch` and, if the image has not the repository elsewhere, `tree` of its room: reads one JSON
line from the socket FD, answers `ready`, runs the tests, answers one JSON line that repeats the
nonce, and exits with pytest's status, without running anybody's exit handlers.

Invariants: nothing of the repository is imported before `ready` is sent, so that what goes wrong
before is the grader's fault; configuration and plug-ins of the repository are not read, except
`conftest.py` (which nobody's changes may touch); the standard library comes before the repository
on the import path. Standard library and pytest only: the environment, which may be an image with
Python 3.8, has nothing else of ours.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any

ROOM = os.path.dirname(os.path.abspath(__file__))
TREE, SCRATCH = os.path.join(ROOM, "tree"), os.path.join(ROOM, "scratch")
RANK = ("passed", "xfailed", "xpassed", "skipped", "failed")  # a test's worst phase is its outcome


class Recorder:
    """Keeps the ids that were collected and the worst outcome of each."""

    def __init__(self, shuffle: int | None, test_seconds: float) -> None:
        self.collected: list[str] = []
        self.names: dict[str, str] = {}
        self.outcomes: dict[str, str] = {}
        self.errors: list[str] = []
        self.shuffle = shuffle
        self.test_seconds = test_seconds

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors.append(report.nodeid)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.shuffle is not None:
            random.Random(self.shuffle).shuffle(items)
        self.collected = [item.nodeid for item in items]
        self.names = {item.nodeid: item.name for item in items}

    def pytest_runtest_logstart(self) -> None:
        if self.test_seconds:
            signal.setitimer(signal.ITIMER_REAL, self.test_seconds)

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if outcome == "skipped" else "xpassed"
        elif report.when != "call" and outcome == "passed":
            return
        before = self.outcomes.get(report.nodeid, RANK[0])
        self.outcomes[report.nodeid] = max(before, outcome, key=RANK.index)


class TestTooSlow(BaseException):
    """A single test passed its time."""


def expire(*_: object) -> None:
    raise TestTooSlow


def command(tree: str, targets: list[str], options: list[str]) -> list[str]:
    """Of pytest, with our configuration and no other."""
    return [
        "-q", "-c", f"{SCRATCH}/pytest.ini", f"--rootdir={tree}",
        f"--junit-xml={SCRATCH}/junit.xml", f"--basetemp={SCRATCH}/pytest",
        "-p", "no:cacheprovider", "--disable-warnings", "--tb=no", "--color=no",
        "--continue-on-collection-errors", *options, *targets,
    ]  # fmt: skip


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    order = json.loads(channel.makefile("r").readline())
    sys.path[:] = [path for path in sys.path if path != ROOM]
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if order["version"] not in ("", ours):
        sys.exit(f"this Python is {ours}, and the task wants {order['version']}")
    import pytest

    for limit, value in order["limits"].items():
        most = resource.getrlimit(getattr(resource, limit))[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(getattr(resource, limit), (value, value))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, expire)
    recorder = Recorder(order["shuffle"], order["test_seconds"])
    write, dumps, nonce, leave = channel.sendall, json.dumps, order["nonce"], os._exit
    tree = order["repository"] or TREE
    os.chdir(tree)
    write(b"ready\n")
    sys.path += [os.path.normpath(os.path.join(tree, path)) for path in order["paths"]]
    argv = command(tree, order["targets"], order["options"])
    status = pytest.main(argv, plugins=[recorder])
    signal.setitimer(signal.ITIMER_REAL, 0)
    report = {
        "nonce": nonce,
        "collected": recorder.collected,
        "names": recorder.names,
        "outcomes": recorder.outcomes,
        "errors": recorder.errors,
        "cpu": time.process_time(),
    }
    write(dumps(report).encode() + b"\n")
    sys.stdout.flush()
    leave(int(status))


if __name__ == "__main__":
    main()
