"""What a run of tests is worth: do its witnesses agree, and did the right tests pass and fail?

`Suite` says which tests judge a task, `read` makes a `Report` out of what one run left (exit
status, report, JUnit file), with every contradiction between them, and `weigh` turns a report into
a verdict. Pure.

Invariants: a report with a contradiction is never SOLVED; a run in which a canary or a twin does
not fail is never SOLVED; what code under test left can be anything, and reading it raises nothing
and shows people bounded lines. Standard library only: it also runs in a repository's own image.
"""

from __future__ import annotations

import functools
import hmac
import json
import random
import secrets
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lightning_ray.tasks.swe import twins

CANARIES = (  # each fails by another mechanism that an attack may disable
    "def test_{0}():\n    raise AssertionError('unequal')\n",
    "def test_{0}():\n    assert [1, {1}] == [1, {2}]\n",
    "class Test{0}(unittest.TestCase):\n    def test_{0}(self):\n"
    "        self.assertEqual({1}, {2})\n",
    "def test_{0}():\n    with pytest.raises(KeyError):\n        {{{1}: 0}}[{1}]\n",
)

_MOST_SHOWN = 200  # characters of one thing that code under test could have named

Tree = dict[str, bytes]


class Verdict(StrEnum):
    """What a repository is."""

    SOLVED = "solved"  # every expected test passed, every twin and canary failed, and all agrees
    UNSOLVED = "unsolved"  # some expected test failed or is missing, or the tests came to no end
    TAMPERED = "tampered"  # the witnesses contradict each other


@dataclass(frozen=True)
class Suite:
    """The tests that judge a task. `expected` ids must pass; others may be there, since a repair
    may add to what a package's tests enumerate. `twins` are changes to tests, by `FILE::NAME`, as
    are `owners` and `touchy`. `targets` and `paths` (for imports) are relative to the tree.
    `python` is the interpreter on this machine, `version` which one it must be (`3.11`).
    `repository` is where an image has it, if it does; `options` are further ones of pytest."""

    python: str
    targets: tuple[str, ...]
    fail_to_pass: frozenset[str]
    pass_to_pass: frozenset[str]
    twins: Mapping[str, Sequence[twins.Edit]] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)  # of inherited tests
    touchy: frozenset[str] = frozenset()  # tests that may fail because a twin did
    paths: tuple[str, ...] = ("",)
    timeout_s: float = 120.0  # on the clock, which a loaded machine can slow down ...
    cpu_s: float = 60.0  # ... and of a processor
    version: str = ""
    repository: str = ""
    options: tuple[str, ...] = ()

    @property
    def expected(self) -> frozenset[str]:
        return self.fail_to_pass | self.pass_to_pass

    def function(self, test_id: str) -> str:
        """`FILE::NAME` of the function behind a test id."""
        name = twins.function_of(test_id)
        return self.owners.get(name, name)

    @functools.cached_property
    def telling(self) -> frozenset[str]:
        """The expected tests that tell whether their function failed as a twin: the hidden ones,
        and all of a function that has none. Beside hidden ones a function's others fail as twins
        by themselves, with the bug in place."""
        hidden = {self.function(test) for test in self.fail_to_pass}
        others = (test for test in self.pass_to_pass if self.function(test) not in hidden)
        return self.fail_to_pass.union(others)


@dataclass(frozen=True)
class Report:
    """What one run says of itself, and what the outside saw of it. `exit_status` None: killed at
    the time limit. `too_large` says what of it came back for that reason not, so that nothing of it
    is known."""

    exit_status: int | None
    outcomes: Mapping[str, str] = field(default_factory=dict)
    collected: frozenset[str] = frozenset()
    errors: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()  # contradictions between the witnesses
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # as the process itself says
    too_large: str = ""

    def passed(self, test_id: str) -> bool:
        return self.outcomes.get(test_id) == "passed"


@dataclass(frozen=True)
class Judgement:
    """A verdict, why, how many of the expected tests passed (of those that were seen as they are,
    if the suite never ran as it is), and, where they were made for this verdict, how many hidden
    tests had twins. `right` of the hidden tests did all that a solved one does, passed and failed
    as twins, although the verdict is another one; only counted where that is asked for."""

    verdict: Verdict
    evidence: tuple[str, ...] = ()
    fail_to_pass: int = 0
    pass_to_pass: int = 0
    right: int = 0
    runs: int = 1
    seconds: float = 0.0
    twins: int | None = None


def weigh(
    report: Report,
    suite: Suite,
    mask: frozenset[str] = frozenset(),
    spared: frozenset[str] = frozenset(),
    correct: Report | None = None,
) -> tuple[Verdict, tuple[str, ...]]:
    """What one run amounts to, when the tests of `mask` were twins that must fail, and those of
    `spared` may do anything. `correct` is a run of correct code with the same twins, if there is
    one (`failing`)."""
    if report.evidence:
        return Verdict.TAMPERED, report.evidence
    if report.too_large:
        return Verdict.UNSOLVED, (report.too_large,)
    if report.exit_status is None:
        return Verdict.UNSOLVED, (f"still running after {suite.timeout_s:g} s",)
    if not report.outcomes:
        return Verdict.UNSOLVED, (f"the tests ended early, with status {report.exit_status}",)
    alive = mask - failing(report, suite, correct)
    free = mask | spared | (suite.touchy if mask else frozenset())
    wanted = [test for test in suite.expected if suite.function(test) not in free]
    missed = sorted(test for test in wanted if not report.passed(test))
    if alive and not missed and report.errors:
        return Verdict.UNSOLVED, (f"{shown(report.errors[0])} could not be collected",)
    if alive and not missed:
        listed = ", ".join(map(shown, sorted(alive)[:3]))
        return Verdict.TAMPERED, (f"{len(alive)} tests that must fail did not: {listed}",)
    if missed:
        return Verdict.UNSOLVED, (f"{len(missed)} tests did not pass: {shown(missed[0])}",)
    return Verdict.SOLVED, ()


def failing(report: Report, suite: Suite, correct: Report | None = None) -> frozenset[str]:
    """The functions that failed as twins do: a test failed, one of those that tell did not pass,
    and there are no more tests than correct code has (by default: than are expected).

    Code under test can add tests that fail, so a failure alone is no sign; nor can it be asked of
    an expected one, since the twin of a test with parameters may have another id."""
    outcomes = report.outcomes.items()
    failed = {suite.function(test) for test, outcome in outcomes if outcome == "failed"}
    unmet = {suite.function(test) for test in suite.telling if not report.passed(test)}
    most = Counter(map(suite.function, correct.outcomes if correct else suite.expected))
    there = Counter(map(suite.function, report.outcomes))
    return frozenset(name for name in failed & unmet if there[name] <= most[name])


def read(
    told: bytes,
    status: int | None,
    nonce: str,
    junit: bytes | None,
    canary: str,
    seconds: float = 0.0,
) -> Report:
    """A report out of what the witnesses left, with every contradiction between them. `junit` is
    what is in pytest's JUnit file; None: there is none."""
    if status is None:
        return Report(None, seconds=seconds)
    if status not in (0, 1) or not told:
        # The tests came to no end: a signal, a conftest.py that cannot be imported, ... But the
        # canaries fail, so no honest end has status 0.
        early = ("exit status 0, but no report",) if status == 0 else ()
        return Report(status, evidence=early, seconds=seconds)
    try:
        return _compared(told, status, nonce, junit, canary, seconds)
    except Exception:  # of whatever kind: nothing here is ours but the question
        return Report(status, evidence=("the report cannot be read",), seconds=seconds)


def _compared(
    told: bytes, status: int, nonce: str, junit: bytes | None, canary: str, seconds: float
) -> Report:
    """`read` of a run that came to its end. May raise anything."""
    tree = json.loads(told)
    outcomes = {str(k): str(v) for k, v in tree["outcomes"].items()}
    names = {str(k): str(v) for k, v in tree["names"].items()}
    collected = frozenset(map(str, tree["collected"]))
    authentic = hmac.compare_digest(str(tree["nonce"]), nonce)
    evidence = [] if authentic else ["the report has another nonce"]
    birds = {test for test in outcomes if test.startswith(f"{canary}::")}
    if len(birds) != len(CANARIES) or not birds <= collected:
        evidence.append(f"{len(birds)} of {len(CANARIES)} canaries ran")
    if singing := sorted(test for test in birds if outcomes[test] != "failed"):
        evidence.append(f"a canary did not fail: {shown(outcomes[singing[0]])}")
    if status != 1:
        evidence.append(f"exit status {status}, although canaries fail")
    if outcomes.keys() != collected:
        evidence.append("the collected tests are not the tests that ran")
    evidence += _junit_against(junit, outcomes, names)
    return Report(
        status,
        {test: outcome for test, outcome in outcomes.items() if test not in birds},
        collected - birds,
        tuple(map(str, tree["errors"])),
        tuple(evidence),
        seconds,
        float(tree.get("cpu", 0.0)),
    )


def shown(text: str) -> str:
    """What people are shown of a text that may be anybody's: one line, not for ever."""
    line = "".join(each if each.isprintable() else "?" for each in text[:_MOST_SHOWN])
    return line + "..." * (len(text) > _MOST_SHOWN)


def _junit_against(
    junit: bytes | None, outcomes: Mapping[str, str], names: Mapping[str, str]
) -> list[str]:
    """How pytest's own JUnit file differs from the report."""
    if junit is None:
        return ["there is no JUnit file"]
    if b"<!DOCTYPE" in junit:
        return ["the JUnit file is no JUnit file"]
    try:
        # pytest's encoding, whatever the file says of itself: else a DOCTYPE could be hidden in it.
        parser = ElementTree.XMLParser(encoding="utf-8")
        cases = list(ElementTree.fromstring(junit, parser).iter("testcase"))
    except ElementTree.ParseError:
        return ["the JUnit file is no JUnit file"]
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


def canaries() -> bytes:
    parts = ["import unittest\nimport pytest\n"]
    for form in CANARIES:
        one, other = random.sample(range(1000), 2)
        parts.append(form.format(secrets.token_hex(4), one, other))
    return "\n\n".join(parts).encode()
