"""Runs hidden tests on a repository and reports what each did. Run by `grading`, never imported.

Started as `python -I -S -B runner.py FD`: reads one JSON line from the socket FD (limits, nonce,
hidden tests), answers `ready`, runs the tests, answers one JSON line that repeats the nonce, and
exits with 0 if and only if every test passed. Each test class also gets canaries, tests that must
fail, under names that only this run knows; which files are twins, whose tests must fail, is not
known here.

Invariants: nothing of the repository is imported before `ready` is sent; the hidden tests come
from the socket, not from files that the code under test can rewrite; the standard library comes
before the repository on the import path, so a planted `tempfile.py` is not found.
"""

import json
import os
import resource
import socket
import sys
import types
import unittest
from pathlib import PurePosixPath
from typing import Any


class Recorder(unittest.TestResult):
    """Keeps one verdict per test id; the worst one wins."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.verdicts.setdefault(test.id(), "passed")

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        self.verdicts[test.id()] = "failed"

    def addError(self, test: unittest.TestCase, error: Any) -> None:
        self.verdicts[test.id()] = "failed"

    def addSubTest(self, test: unittest.TestCase, subtest: Any, error: Any) -> None:
        if error is not None:
            self.verdicts[test.id()] = "failed"

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.verdicts[test.id()] = "skipped"

    def addExpectedFailure(self, test: unittest.TestCase, error: Any) -> None:
        self.verdicts[test.id()] = "failed"


def load(path: str, source: str) -> types.ModuleType:
    """A module made from the text of a hidden test."""
    name = ".".join(PurePosixPath(path).with_suffix("").parts)
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def add_canaries(case: type[unittest.TestCase], names: list[str]) -> list[str]:
    """Three tests that must fail: by a bare exception, and by each of the assertions used most."""

    def bare(self: unittest.TestCase) -> None:
        raise AssertionError("canary")

    def equal(self: unittest.TestCase) -> None:
        self.assertEqual("canary", "bird")  # noqa: PT009

    def true(self: unittest.TestCase) -> None:
        self.assertTrue(False)  # noqa: PT009

    for name, method in zip(names, (bare, equal, true), strict=True):
        setattr(case, name, method)
    return [f"{case.__module__}.{case.__qualname__}.{name}" for name in names]


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    order = json.loads(channel.makefile("r").readline())
    for limit, value in order["limits"].items():
        resource.setrlimit(getattr(resource, limit), (value, value))
    write, dumps, nonce = channel.sendall, json.dumps, order["nonce"]
    write(b"ready\n")
    sys.path += [os.getcwd()]
    cases: list[type[unittest.TestCase]] = []
    verdicts: dict[str, str] = {}
    canaries: list[str] = []
    for path, source in order["tests"].items():
        try:
            module = load(path, source)
        except BaseException as error:  # whatever the code under test raises, SystemExit included
            verdicts[path] = f"import: {type(error).__name__}"
            continue
        cases += [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, unittest.TestCase)
            and value.__module__ == module.__name__
        ]
    suite = unittest.TestSuite()
    for case in cases:
        canaries += add_canaries(case, order["canaries"])
        suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(case))
    recorder = Recorder()
    suite.run(recorder)
    verdicts |= recorder.verdicts
    write(dumps({"nonce": nonce, "verdicts": verdicts, "canaries": canaries}).encode() + b"\n")
    real = [verdict for test, verdict in verdicts.items() if test not in canaries]
    sys.exit(0 if real and all(verdict == "passed" for verdict in real) else 1)


if __name__ == "__main__":
    main()
