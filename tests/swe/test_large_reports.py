"""Suites of tens of thousands of tests in pods: what is too large to come back, and whose fault it
is. Sizes are counted as the pod's program does; `test_rooms` has that one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from images import ROWS
from verdicts import Case, Pod, pod

from lightning_ray.records import Outcome
from lightning_ray.rollouts.grading import Episode, RoomOrder, RoomReport
from lightning_ray.tasks.swe import remote, sources
from lightning_ray.tasks.swe import repository as family
from lightning_ray.tasks.swe.evidence import Verdict
from lightning_ray.tasks.swe.examination import Kind, RoomFault
from lightning_ray.tasks.swe.record import RepositoryTask

MANY = [f"tests/test_zero.py::TestOfEveryCase::test_that_it_is_zero[{n}]" for n in range(60_000)]
LONG = [f"tests/test_zero.py::test_zero[{n:0300}]" for n in range(2000)]  # some MiB as well
RECORD = RepositoryTask.from_row({**ROWS["swe-smith"], "PASS_TO_PASS": MANY})
EPISODE = Episode("r", "r-a0", Outcome.COMPLETED, "", ("I mended it.",))
FEW = RepositoryTask.from_row(ROWS["swe-smith"])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "cache", lambda: tmp_path / "cache")


def bounded(run: Pod, junit: int = 0, of: tuple[Kind, ...] = tuple(Kind)) -> Pod:
    """A pod from which comes back what an order lets through; JUnit files have `junit` bytes more
    in runs of some kinds."""

    def limited(order: RoomOrder) -> RoomReport:
        report = run(order)
        if len(report.said) > 2 * order.most_bytes:
            return replace(report, status=None, files={}, said="ready\n", too_large=["output"])
        more = junit * (Kind(order.note["kind"]) in of)
        large = [p for p, text in report.files.items() if len(text) + more > order.most_bytes]
        files = {path: text for path, text in report.files.items() if path not in large}
        return replace(report, files=files, too_large=large)

    return limited


def test_an_honest_repair_whose_suite_is_too_large_is_a_fault_that_says_what_to_set():
    said = "what the tests reported or printed is larger than the 4 MiB of a report; set task.grad"
    said += "er_options.report_mib above 4, and gateway.max_body_mib to four times as much"
    with pytest.raises(RoomFault, match=rf"the known bad state cannot be judged: {said}"):
        Case(RECORD, bounded(pod(RECORD))).judged()
    with pytest.raises(RoomFault, match=r"state cannot be judged: pytest's JUnit file is larger"):
        Case(FEW, bounded(pod(FEW), junit=remote.MAX_REPORT_BYTES)).judged()


def test_with_a_larger_limit_it_is_solved():
    record = RepositoryTask.from_row({**ROWS["swe-smith"], "PASS_TO_PASS": LONG})
    with pytest.raises(RoomFault, match="report_mib above 1,"):
        Case(record, bounded(pod(record)), most_bytes=1 << 20).judged()
    case = Case(record, bounded(pod(record)), most_bytes=2 << 20)
    assert {order.most_bytes for order in case.answer} == {2 << 20}
    assert case.judged().verdict is Verdict.SOLVED


def test_the_option_reaches_the_orders():
    told = replace(EPISODE, options={"report_mib": 16})
    [order] = family.rooms(FEW.to_task(), {"files": {}}, told, [])
    assert order.most_bytes == 16 << 20


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("kind", [Kind.AS_IT_IS, Kind.MIXED])
def test_a_change_that_makes_its_reports_too_large_is_unsolved_and_no_fault(kind, known):
    """Else code under test could have a rollout that it would lose masked."""
    if known:
        assert Case(FEW).judged().verdict is Verdict.SOLVED
    judgement = Case(FEW, bounded(pod(FEW), remote.MAX_REPORT_BYTES, (kind,))).judged()
    assert judgement.verdict is Verdict.UNSOLVED
    assert judgement.evidence == ("pytest's JUnit file is larger than the 4 MiB of a report",)
    assert judgement.fail_to_pass == (kind is Kind.MIXED)  # nothing is known of the first run


def test_a_limit_that_became_too_small_for_a_known_task_is_a_fault():
    assert Case(FEW).judged().verdict is Verdict.SOLVED
    with pytest.raises(RoomFault, match=r"report_mib above 4"):
        Case(FEW, bounded(pod(FEW), junit=remote.MAX_REPORT_BYTES)).judged()
