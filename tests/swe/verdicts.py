"""Verdicts on a repository of an image, with pods that say what honest ones would, and no pod."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from xml.sax.saxutils import quoteattr

from images import CLEAN, TESTS

from lightning_ray.rollouts.grading import RoomOrder, RoomReport, RoomRun
from lightning_ray.tasks.swe import evidence, imaged, remote
from lightning_ray.tasks.swe.evidence import Judgement
from lightning_ray.tasks.swe.examination import JUNIT, Kind
from lightning_ray.tasks.swe.record import RepositoryTask

REPAIR = {"calc/core.py": CLEAN}
Pod = Callable[[RoomOrder], RoomReport]


def witnessed(order: RoomOrder, outcomes: Mapping[str, str]) -> tuple[str, str]:
    """What the witness says of these outcomes, and pytest's JUnit file, as real ones do."""
    birds = [f"{order.note['canary']}::test_{n}" for n in range(len(evidence.CANARIES))]
    outcomes = {**outcomes, **dict.fromkeys(birds, "failed")}
    names = {test: test.rpartition("::")[2] for test in outcomes}
    cases = "".join(
        f'<testcase classname="{test.partition("::")[0]}" name={quoteattr(names[test])} '
        f'time="0.001">{"<failure/>" * (outcome == "failed")}</testcase>'
        for test, outcome in outcomes.items()
    )
    told = {"nonce": order.note["nonce"], "collected": [*outcomes], "names": names}
    said = json.dumps(told | {"outcomes": outcomes, "errors": [], "cpu": 1.0})
    return f"ready\n{said}\n", f"<testsuites>{cases}</testsuites>"


def outcomes(order: RoomOrder, record: RepositoryTask) -> dict[str, str]:
    """Of an honest repair, of the bug and of the reference solution: a twin fails."""
    trial = remote.trial_of(RoomRun(order, RoomReport(None, "", "")))
    failing = set(record.fail_to_pass) if trial.kind is Kind.KNOWN_BAD else trial.mask
    ids = [*record.fail_to_pass, *record.pass_to_pass]
    return {test: "failed" if test in failing else "passed" for test in ids}


def pod(record: RepositoryTask, root: str = "/testbed") -> Pod:
    """One that runs what it is given."""

    def run(order: RoomOrder) -> RoomReport:
        said, junit = witnessed(order, outcomes(order, record))
        files = {f"{root}/{path}": text for path, text in TESTS.items()}
        brought = {path: text for path, text in files.items() if path in order.bring}
        return RoomReport(1, said, "", files={JUNIT: junit, **brought}, seconds=1.0)

    return run


class Case:
    """A verdict in its making."""

    def __init__(
        self,
        record: RepositoryTask,
        run: Pod | None = None,
        most_bytes: int = remote.MAX_REPORT_BYTES,
    ) -> None:
        self.record, self.run, self.most_bytes = record, run or pod(record), most_bytes
        self.suite = imaged.suite(record, "/testbed", [])
        self.runs: list[RoomRun] = []
        self.answer: Judgement | list[RoomOrder] = []
        self.ask()

    def ask(self) -> None:
        self.answer = imaged.advance(
            self.record, self.suite, REPAIR, self.runs, most_bytes=self.most_bytes
        )

    def carry_out(self) -> None:
        assert isinstance(self.answer, list)
        self.runs += [RoomRun(order, self.run(order)) for order in self.answer]

    def judged(self) -> Judgement:
        while not isinstance(self.answer, Judgement):
            self.carry_out()
            self.ask()
        return self.answer
