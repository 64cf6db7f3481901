"""What verdicts learn of a task of an image, when several learn it at the same time."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from images import ROWS, TESTS
from verdicts import Case, pod

from lightning_ray.rollouts.grading import RoomOrder, RoomReport
from lightning_ray.tasks.swe import imaged, known, patches, sources
from lightning_ray.tasks.swe.evidence import Verdict
from lightning_ray.tasks.swe.examination import Kind, RoomFault
from lightning_ray.tasks.swe.known import Known
from lightning_ray.tasks.swe.record import RepositoryTask

RECORD = RepositoryTask.from_row(ROWS["swe-smith"])
ADD, ZERO, ODD = "tests/test_add.py::test_add", "tests/test_zero.py::test_zero", "t.py::test_odd"
FILE, TEXT = "tests/test_add.py", TESTS["tests/test_add.py"]
EDITS = [(5, 29, 30, str(number)) for number in range(8)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sources, "cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def memory() -> known.Memory:
    return known.Memory(RECORD, imaged.suite(RECORD, "/testbed", []))


def learnt(*passing: str, **more: object) -> Known:
    return replace(Known(frozenset(passing), frozenset(), {FILE: TEXT}), **more)


FOUND = [
    learnt(ADD, ZERO),
    learnt(ADD, ZERO, sharp={ADD: EDITS[:2]}),
    learnt(ADD, ODD, sharp={ADD: EDITS[1:3], "tests/test_zero.py::test_zero": EDITS[:1]}),
    learnt(ADD, ZERO, xfailed=frozenset({ZERO})),
    learnt(ADD, ZERO, texts={FILE: TEXT, "tests/test_zero.py": "x = 1"}),
]


def test_what_several_learnt_is_the_same_in_whichever_order_it_comes():
    for some in itertools.combinations(FOUND, 3):
        results = []
        for order in itertools.permutations(some):
            memory()._path.unlink(missing_ok=True)
            for one in (*order, order[0]):
                kept = memory().save(one)
            assert memory().load() == kept
            results.append(kept)
        assert all(result == results[0] for result in results)


def test_a_test_counts_that_the_reference_passed_in_the_same_way_each_time():
    assert FOUND[0].and_of(FOUND[2]).passing == {ADD}
    assert FOUND[0].and_of(FOUND[3]) == learnt(ADD)
    both = FOUND[3].and_of(FOUND[3])
    assert (both.passing, both.xfailed) == ({ADD, ZERO}, {ZERO})


def test_who_learns_late_does_not_undo_what_another_one_has_measured():
    memory().save(FOUND[1])
    assert memory().save(FOUND[0]).sharp == FOUND[1].sharp
    assert memory().load().sharp == FOUND[1].sharp
    assert FOUND[1].and_of(FOUND[2]).sharp == {ADD: EDITS[:3]}
    other = learnt(ADD, texts={FILE: "another text"}, sharp={ADD: EDITS[4:5]})
    assert FOUND[1].and_of(other).sharp == {}  # columns of which text would that be?


SAVES = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import test_known
from lightning_ray.tasks.swe import sources
sources.cache = lambda: Path(sys.argv[1])
for one in test_known.many():
    test_known.memory().save(one)
"""


def many() -> list[Known]:
    """What verdicts would learn of a suite with a flaky test, each another twin."""
    large = {FILE: TEXT, "large.py": "x" * 50_000}
    return [
        learnt(ADD, *[ZERO] * (number % 5 > 0), texts=large, sharp={ADD: [edit]})
        for number, edit in enumerate(EDITS)
    ]


def test_verdicts_of_many_threads_and_processes_lose_nothing_and_read_nothing_half(cache):
    argv = [sys.executable, "-c", SAVES, str(cache), *filter(None, sys.path)]
    others = [subprocess.Popen(argv) for _ in range(2)]
    memory().save(many()[0])
    read = []
    with ThreadPoolExecutor(8) as pool:
        saves = [pool.submit(memory().save, one) for one in many() * 2]
        while not all(save.done() for save in saves) or any(o.poll() is None for o in others):
            read.append(memory().load())
    assert [other.wait() for other in others] == [0, 0]
    assert None not in read
    assert memory().load() == functools.reduce(Known.and_of, many())
    assert memory().load().sharp == {ADD: EDITS} and memory().load().passing == {ADD}
    names = {path.name for path in (cache / "imaged").iterdir()}
    assert names == {memory()._path.name, f"{memory()._path.name}.lock"}


def test_rollouts_of_a_group_that_measure_at_the_same_time_agree_and_the_next_one_need_not():
    first, second = Case(RECORD), Case(RECORD)
    for step in ({Kind.AS_IT_IS}, {Kind.KNOWN_BAD, Kind.REFERENCE}, {Kind.MEASURE}):
        for case in (first, second):  # both ask before either is told anything
            assert {Kind(order.note["kind"]) for order in case.answer} == step
            case.carry_out()
        first.ask()
        second.ask()
        kept = memory().load()
    assert kept == memory().load() and kept.sharp[ADD]
    assert [case.judged().verdict for case in (first, second)] == [Verdict.SOLVED] * 2
    assert memory().load() == kept
    third = Case(RECORD)
    assert third.judged().verdict is Verdict.SOLVED
    kinds = {Kind(run.order.note["kind"]) for run in third.runs}
    assert kinds == {Kind.AS_IT_IS, Kind.MIXED, Kind.CONTROL}


def test_measurements_that_are_lost_are_made_again():
    def busy(order: RoomOrder) -> RoomReport:
        if order.note["kind"] == Kind.MEASURE:
            return RoomReport(None, "", "killed", overran=True)
        return pod(RECORD)(order)

    with pytest.raises(RoomFault, match="of the 6 runs that measure twins 6 came to no end"):
        Case(RECORD, busy).judged()
    assert memory().load().sharp is None
    assert Case(RECORD).judged().verdict is Verdict.SOLVED
    assert memory().load().sharp[ADD]


OLD = """
def test_add():
    assert core.add(2, 1) == 3
    assert core.add(2, 2) == 4
"""
DIFF = f"""diff --git a/{FILE} b/{FILE}
--- a/{FILE}
+++ b/{FILE}
@@ -2,3 +2,4 @@
 def test_add():
-    assert core.add(2, 1) == 3
     assert core.add(2, 2) == 4
+    assert core.add(5, 6) == 11
+    assert core.add(2, 1) == 3
diff --git a/logo.png b/logo.png
GIT binary patch
literal 0
"""


def test_only_lines_that_no_agent_has_seen_become_twins():
    lines = patches.new_lines(DIFF)
    assert lines == {FILE: [4]}
    text = OLD.replace("    assert core.add(2, 1) == 3\n", "").rstrip("\n")
    text += "\n    assert core.add(5, 6) == 11\n    assert core.add(2, 1) == 3\n"
    found = learnt(ADD, texts={FILE: text}, lines=lines)
    rounds = [found.round(number) for number in range(known.ROUNDS)]
    assert rounds[0] and {edit[0] for edits in rounds for edit in edits.values()} == {4}
    assert {e[0] for n in range(9) for e in learnt(ADD, texts={FILE: text}).round(n).values()} == {
        3, 4, 5,
    }  # fmt: skip
    assert memory().save(found) == memory().load() == found
    assert patches.new_lines("") == {}
