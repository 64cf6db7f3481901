"""What code under test left can be anything: reading it raises nothing, and never says solved."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_ray.rollouts.grading import RoomReport, RoomRun
from lightning_ray.tasks.swe import evidence, examination, grading, remote
from lightning_ray.tasks.swe.evidence import Report, Suite, Verdict
from lightning_ray.tasks.swe.examination import Kind, Trial

A, B = "t.py::test_a", "t.py::test_b"
SUITE = Suite("python", ("t.py",), frozenset({A}), frozenset({B}), {A: [], B: []})
BIRDS = [f"canary.py::test_{n}" for n in range(len(evidence.CANARIES))]
# What an honest run of two passing tests leaves.
OUTCOMES = {A: "passed", B: "passed"} | dict.fromkeys(BIRDS, "failed")
TOLD = {
    "nonce": "n",
    "collected": [*OUTCOMES],
    "names": {test: test.rpartition("::")[2] for test in OUTCOMES},
    "outcomes": OUTCOMES,
    "errors": [],
    "cpu": 0.5,
}
CASES = "".join(
    f'<testcase name="{TOLD["names"][test]}">{"<failure/>" * (outcome == "failed")}</testcase>'
    for test, outcome in OUTCOMES.items()
)
JUNIT = f"<testsuites>{CASES}</testsuites>"


def read(told: bytes, junit: bytes | None = JUNIT.encode()) -> Report:
    return evidence.read(told, 1, "n", junit, "canary.py")


def test_what_an_honest_run_leaves_is_believed():
    assert evidence.weigh(read(json.dumps(TOLD).encode()), SUITE) == (Verdict.SOLVED, ())


@pytest.mark.parametrize(
    ("hidden", "others", "outcomes", "verdict"),
    [
        ({A}, {B}, {A: "failed", B: "passed"}, Verdict.SOLVED),  # as a twin does
        ({A}, {B}, {A: "passed", B: "passed"}, Verdict.TAMPERED),
        # A test that is added fails in its stead.
        ({A}, {B}, {A: "passed", f"{A}[z]": "failed", B: "passed"}, Verdict.TAMPERED),
        # A twin may be the test of another parameter.
        ({f"{A}[1]"}, {B}, {f"{A}[2]": "failed", B: "passed"}, Verdict.SOLVED),
        ({f"{A}[1]"}, {B}, {f"{A}[2]": "passed", f"{A}[z]": "failed", B: "passed"},
         Verdict.TAMPERED),
        ({A, f"{A}[1]"}, {B}, {A: "passed", f"{A}[1]": "failed", B: "passed"}, Verdict.SOLVED),
        # What passes with the bug fails as a twin by itself: that tells nothing of the hidden one.
        ({f"{A}[1]"}, {f"{A}[2]", B}, {f"{A}[1]": "passed", f"{A}[2]": "failed", B: "passed"},
         Verdict.TAMPERED),
        ({f"{A}[1]"}, {f"{A}[2]", B}, {f"{A}[1]": "failed", f"{A}[2]": "passed", B: "passed"},
         Verdict.SOLVED),
        # Missing is not failed.
        ({A}, {B}, {B: "passed"}, Verdict.TAMPERED),
        ({A}, {B}, {A: "skipped", B: "passed"}, Verdict.TAMPERED),
    ],
)  # fmt: skip
def test_a_twin_has_failed_if_a_test_failed_that_had_to(hidden, others, outcomes, verdict):
    suite = Suite("python", ("t.py",), frozenset(hidden), frozenset(others), {A: []})
    found, _ = evidence.weigh(Report(1, outcomes), suite, frozenset({A}))
    assert found is verdict


def test_how_many_tests_a_twin_has_correct_code_says():
    """In a repository's own suite, which has tests that nobody expects."""
    outcomes = {f"{A}[1]": "failed", f"{A}[2]": "failed", B: "passed"}
    suite = Suite("python", ("t.py",), frozenset({f"{A}[1]"}), frozenset({B}), {})
    more = Report(1, outcomes | {f"{A}[3]": "failed"})
    for report, verdict in ((Report(1, outcomes), Verdict.SOLVED), (more, Verdict.TAMPERED)):
        found, _ = evidence.weigh(report, suite, frozenset({A}), correct=Report(1, outcomes))
        assert found is verdict


# JSON's values, and what Python's reader takes for such: surrogates, NaN, numbers of any size.
texts = st.text(st.characters(exclude_categories=()), max_size=20)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.just(10**400) | st.just(A)
)
values = st.recursive(
    leaves, lambda of: st.lists(of, max_size=4) | st.dictionaries(texts, of, max_size=4)
)
bent = st.dictionaries(st.sampled_from([*TOLD]), values, max_size=3).map(TOLD.__or__)
reports = st.one_of(
    (bent | values).map(lambda tree: json.dumps(tree).encode()),
    st.binary(max_size=200),
    st.sampled_from([b"[" * 100_000, b"9" * 100_000, b'{"a":' * 100_000]),
)
encodings = st.sampled_from(
    ["utf-8", "utf-16", "utf-32", "utf-7", "idna", "foo", "hex", "\N{BOMB}"]
)
headers = encodings.map(lambda name: f'<?xml version="1.0" encoding="{name}"?>')
documents = st.builds(str.__add__, headers | st.just(""), texts | st.just(JUNIT))
junits = st.one_of(
    st.none(),
    st.binary(max_size=200),
    st.builds(
        lambda text, as_: text.encode(as_, errors="replace"),
        documents,
        st.sampled_from(["utf-8", "utf-16", "utf-32", "utf-7"]),
    ),
)
many = settings(max_examples=100, derandomize=True, database=None, deadline=None)


@many
@given(reports, st.sampled_from([None, 0, 1, 2, -9]), junits)
@example(json.dumps(TOLD | {"cpu": 10**400}).encode(), 1, JUNIT.encode())
@example(json.dumps(TOLD).encode(), 1, b'<?xml version="1.0" encoding="foo"?><a/>')
@example(json.dumps(TOLD).encode(), 1, b'<?xml version="1.0" encoding="utf-32"?><a/>')
def test_reading_never_raises(told, status, junit):
    for report in (
        evidence.read(told, status, "n", junit, "canary.py"),
        evidence.read(json.dumps(TOLD).encode(), status, "n", junit, "canary.py"),
    ):
        for trial in (Trial(Kind.AS_IT_IS), Trial(Kind.MIXED, frozenset({A}), "plan", 0)):
            _, why = evidence.weigh(report, SUITE, trial.mask)
            shown = "; ".join(why)
            assert shown.isprintable() and len(shown) < 1500
            examination.wanted(SUITE, [(trial, report)], known_bad=False)


@many
@given(texts | reports.map(lambda told: told.decode(errors="surrogateescape")), st.none() | texts)
def test_reading_what_a_pod_sent_raises_nothing_once_the_tests_have_begun(said, junit):
    order = remote.order(Trial(Kind.AS_IT_IS), {}, SUITE)
    files = {} if junit is None else {examination.JUNIT: junit}
    _, report = remote.read(RoomRun(order, RoomReport(1, f"ready\n{said}\n", "", files=files)))
    assert evidence.weigh(report, SUITE)[0] is not Verdict.SOLVED


@many
@given(reports)
def test_reading_never_raises_for_embedded_tasks(told):
    run = grading.weigh(told, 1, "n", ["c1"], frozenset({"t.T.test_a"}))
    assert run.verdict is not grading.Verdict.PASSED


READS = """
def most_mib():  # of this process: getrusage counts also what its parent had when it forked
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) >> 10
from lightning_ray.tasks.swe.cleanroom import MAX_JUNIT_BYTES as most
from lightning_ray.tasks.swe.evidence import read
before = most_mib()
fine = b'{"nonce":"n","collected":[],"names":{},"outcomes":{},"errors":[]}'
ids = b",".join(b'"%x":0' % number for number in range(most // 10))
for told, junit in [
    (b"[" + b"[]," * (most // 3 - 1) + b"0]", b""),
    (b'{"names":{},"outcomes":{' + ids[: most // 2].rpartition(b",")[0] + b"}}", b""),
    (fine, b"<a>" + b"<a/>" * (most // 4 - 2) + b"</a>"),
    (fine, b"<a>" * (most // 3)),
]:
    assert max(len(told), len(junit)) <= most
    assert read(told, 1, "n", junit, "canary.py").evidence
print(most_mib() - before)
"""


@pytest.mark.slow
def test_reading_the_largest_that_may_come_takes_a_fraction_of_a_graders_memory():
    done = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, check=True)
    assert 4 < int(done.stdout) < 600


def test_what_people_are_shown_is_one_line():
    assert evidence.shown("a\nb\x1b[2J\ud800") == "a?b?[2J?"
    assert len(evidence.shown("x" * 10_000)) < 250
