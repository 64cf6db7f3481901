"""Repositories that only a task's container image has: what is done to them in its pods.

SWE-bench's images have the broken state, SWE-smith's the clean one, into which `patch` puts the
bug; both at `/testbed`, with the package installed from there, so the work is done in that place.
`setup` is for the agent's pod, `advance` says what a verdict takes. The work itself is
`layout.py`'s; what is learnt of a task's tests on the way is `known.py`'s.

Invariants: the agent's repository has one commit and nothing older, and no FAIL_TO_PASS test: of
SWE-smith's rows the files with such tests are taken away (as SWE-smith does), SWE-bench's come with
`test_patch` when the tests run; every run is laid out by the same steps, whatever it is for; a
verdict of SOLVED needs an image in which the bug alone is unsolved and the reference solution
solved, and a twin of a hidden test that the change failed; nothing of a twin can be seen in what
the agent had of SWE-bench's older tests, since only lines that `test_patch` adds are changed.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_ray.records import Json
from lightning_ray.rollouts.grading import RoomOrder, RoomRun
from lightning_ray.tasks.swe import canaries, known, layout, patches, remote
from lightning_ray.tasks.swe.evidence import Judgement, Report, Suite, Verdict, failing, weigh
from lightning_ray.tasks.swe.examination import Kind, RoomFault, Trial, with_twins
from lightning_ray.tasks.swe.known import Known
from lightning_ray.tasks.swe.record import Format, RecordError, RepositoryTask, addressable

TIMEOUT_S = 1800.0  # of one run of a suite for which a row names none: SWE-bench's own limit
PAIRS = 2  # of mixed runs
# Of one test: some changed constants make endless loops. In every run, whatever it is for.
TEST_S = 120.0
COMMIT = {  # the same in every rollout, and nothing of the operator's configuration
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{f"GIT_{who}_NAME": "maintainer" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "maintainer@example.org" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_DATE": "2026-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")},
}
MESSAGE = "The repository as it is"
_OF_CHANGE = (Kind.AS_IT_IS, Kind.MIXED)  # runs with the agent's files
_OF_REFERENCE = (Kind.REFERENCE, Kind.MEASURE, Kind.CONTROL)
# What of a run without the agent's files is too large would be so of a repair, too. (Of changes to
# tests there are others.)
_TELLS_SIZE = (Kind.KNOWN_BAD, Kind.REFERENCE, Kind.CONTROL)

Changes = Mapping[str, str | None]


def bait(instance_id: str) -> str:
    """An object that nobody reads who does not look for what is not there."""
    return f"fix of {instance_id}: {canaries.mint('git')}\n"


def setup(record: RepositoryTask) -> Json:
    """What `prepare` asks of an agent's pod.

    Raises:
        RecordError, PatchError: hidden tests cannot be told, or the bug's patch cannot be read.
    """
    smith = record.format is Format.SWE_SMITH
    if smith:
        _check_ids(record.fail_to_pass)
    told = {
        "diffs": [record.bug_patch] if smith else [],
        "files": dict.fromkeys(hidden_files(record)) if smith else {},
        "fresh": {},
        "alone": sorted(patches.touched(record.patch)) if smith else [],
        "history": {"env": COMMIT, "message": MESSAGE, "object": bait(record.instance_id)},
    }
    return {"program": Path(layout.__file__).read_text(), "say": json.dumps(told)}


def check(record: RepositoryTask) -> None:
    """Raises RecordError: nobody could judge the row here."""
    ids = [*record.fail_to_pass, *record.pass_to_pass]
    if not record.fail_to_pass or not record.patch:
        raise RecordError("it has no FAIL_TO_PASS, or no patch, which the reference solution is of")
    _check_ids(ids)


def _check_ids(ids: Sequence[str]) -> None:
    if odd := [test for test in ids if not addressable(test)]:
        raise RecordError(
            f"{len(odd)} test ids are not pytest's, such as {odd[0][:80]!r}: with "
            "task.grader_options.judge=false SWE-bench's own harness can judge the predictions"
        )


def hidden_files(record: RepositoryTask) -> list[str]:
    return _files(record.fail_to_pass)


def diffs(record: RepositoryTask, *, mended: bool) -> list[str]:
    """What makes the state that an image has the reference solution, or the bug alone, both with
    the hidden tests."""
    if record.format is Format.SWE_SMITH:
        return [] if mended else [record.bug_patch]
    return [*([record.gold_patch] if mended else []), *filter(None, [record.test_patch])]


def suite(record: RepositoryTask, repository: str, options: list[str]) -> Suite:
    """The row's own tests, in the image's `repository`, with further `options` of pytest."""
    timeout_s = record.timeout_s if "timeout_s" in record.model_fields_set else TIMEOUT_S
    return Suite(
        python="python3",
        targets=tuple(_files([*record.fail_to_pass, *record.pass_to_pass])),
        fail_to_pass=frozenset(record.fail_to_pass),
        pass_to_pass=frozenset(record.pass_to_pass),
        timeout_s=timeout_s,
        cpu_s=timeout_s,
        version=record.python,
        repository=repository,
        options=tuple(options),
    )


def advance(
    record: RepositoryTask,
    judged_by: Suite,
    changes: Changes,
    runs: Sequence[RoomRun],
    *,
    require_twins: bool = True,
    most_bytes: int = remote.MAX_REPORT_BYTES,
    rng: random.Random | None = None,
) -> Judgement | list[RoomOrder]:
    """The verdict on `changes` after `runs`, or what is to be run for one, as
    `examination.wanted`. Which twins correct code fails is measured here, with the reference
    solution, by the first verdict of a task on this machine that needs it; and each mixed run has a
    control, the reference solution under the same changes to the tests. `most_bytes` of a report
    come back.

    Raises:
        RoomFault: tests did not start, or this image cannot judge: the bug alone is not unsolved,
            or the reference solution not solved, or the reports of either are too large.
        RecordError, PatchError: the row cannot be judged here.
    """
    check(record)
    rng = rng or random.SystemRandom()
    verdict = _Examination(record, judged_by, changes, require_twins, most_bytes, rng)
    return verdict.after(runs)


@dataclass(frozen=True)
class _Run:
    """A trial that was run; `files` came back from it. Its tests may not have `started`."""

    trial: Trial
    report: Report
    files: Mapping[str, str]
    started: bool = True


class _Examination:
    def __init__(
        self,
        record: RepositoryTask,
        judged_by: Suite,
        changes: Changes,
        require_twins: bool,
        most_bytes: int,
        rng: random.Random,
    ) -> None:
        self._record, self._suite, self._changes = record, judged_by, changes
        self._require_twins, self._most_bytes, self._rng = require_twins, most_bytes, rng
        self._hidden = {judged_by.function(test) for test in judged_by.fail_to_pass}
        self._memory = known.Memory(record, judged_by)
        self._known = self._memory.load()

    def after(self, runs: Sequence[RoomRun]) -> Judgement | list[RoomOrder]:
        if not runs:
            return [self._order(Trial(Kind.AS_IT_IS))]
        done = [self._read(run) for run in runs]
        if len(runs) == 1 and self._known is None and not self._merely_unsolved(done[0]):
            return [self._order(Trial(kind)) for kind in (Kind.KNOWN_BAD, Kind.REFERENCE)]
        if len(runs) == 1 and (not done[0].started or done[0].report.too_large):
            return [self._order(Trial(Kind.KNOWN_BAD))]  # is it the room, or the change?
        if self._known is None:
            self._known = self._learn(done) if len(runs) > 1 else known.nothing(self._suite)
        self._suite = replace(
            self._suite, pass_to_pass=self._suite.pass_to_pass & self._known.passing
        )
        answer = self._judge(done)
        if isinstance(answer, list):
            return answer
        verdict, evidence, twins = answer
        first = self._known.settled(done[0].report)
        return Judgement(
            verdict,
            evidence,
            fail_to_pass=sum(map(first.passed, self._suite.fail_to_pass)),
            pass_to_pass=sum(map(first.passed, self._suite.pass_to_pass)),
            runs=len(runs),
            seconds=sum(run.report.seconds for run in done),
            twins=len(self._hidden & twins),
        )

    def _merely_unsolved(self, first: _Run) -> bool:
        """Whatever else the image is, the change is no repair: all passes but hidden tests."""
        found = known.nothing(self._suite).settled(first.report)
        return (
            not found.evidence
            and all(map(found.passed, self._suite.pass_to_pass))
            and any(found.outcomes.get(test) == "failed" for test in self._suite.fail_to_pass)
        )

    def _read(self, run: RoomRun) -> _Run:
        """Where tests did not start, the change may be why: what pytest imports may be the
        repository."""
        try:
            trial, report = remote.read(run)
        except RoomFault:
            trial = remote.trial_of(run)
            if trial.kind not in _OF_CHANGE:
                raise
            return _Run(trial, Report(run.report.status), {}, started=False)
        if report.too_large and trial.kind in _TELLS_SIZE:
            now = self._most_bytes >> 20
            raise RoomFault(
                f"the {trial.kind} state cannot be judged: {report.too_large}; set "
                f"task.grader_options.report_mib above {now}, and gateway.max_body_mib to four "
                "times as much or more"
            )
        if self._known:
            report = self._known.settled(report)
        return _Run(trial, report, run.report.files)

    def _learn(self, done: Sequence[_Run]) -> Known:
        """What the bug alone and the reference solution tell of the image."""
        of = {run.trial.kind: run for run in done}
        bad, reference = of[Kind.KNOWN_BAD], of[Kind.REFERENCE]
        prefix = f"{self._suite.repository}/"
        texts = {path.removeprefix(prefix): text for path, text in reference.files.items()}
        bench = self._record.format is Format.SWE_BENCH
        lines = patches.new_lines(self._record.test_patch) if bench else None
        found = known.learnt(reference.report, self._suite, texts, lines)
        pruned = replace(self._suite, pass_to_pass=self._suite.pass_to_pass & found.passing)
        for run, wanted in ((bad, Verdict.UNSOLVED), (reference, Verdict.SOLVED)):
            is_now, why = weigh(found.settled(run.report), pruned)
            if is_now is not wanted:
                said = f" ({'; '.join(why)})" if why else ""
                raise RoomFault(
                    f"the {run.trial.kind} state is {is_now} here{said}: this image cannot judge it"
                )
        return self._memory.save(found)

    def _judge(
        self, done: Sequence[_Run]
    ) -> list[RoomOrder] | tuple[Verdict, tuple[str, ...], frozenset[str]]:
        assert self._known is not None
        nothing = frozenset[str]()
        if not done[0].started:
            return Verdict.UNSOLVED, ("the change keeps the tests from starting",), nothing
        verdict, evidence = weigh(self._known.settled(done[0].report), self._suite)
        if verdict is not Verdict.SOLVED:
            return verdict, evidence, nothing
        if self._known.sharp is None:
            measured = [run for run in done if run.trial.kind is Kind.MEASURE]
            if not measured and (orders := self._measuring()):
                return orders
            self._known = self._measured(self._known, measured)
        sharp = self._known.sharp or {}
        if not self._hidden & sharp.keys():
            if not self._require_twins:
                return verdict, evidence, nothing
            raise RoomFault(
                "it looks solved, and no hidden test has a twin, so nobody can tell: leave the "
                "task out, or believe its tests (task.grader_options.require_twins=false)"
            )
        mixed = [
            (run, after)
            for run, after in itertools.pairwise([*done, None])
            if run and run.trial.kind is Kind.MIXED
        ]
        if not mixed:
            return self._mixing(sharp)
        twins, shaky = nothing, self._shaky(done)
        for run, control in mixed:
            verdict, evidence, failed = self._compared(run, control, shaky)
            twins |= failed
            if verdict is not Verdict.SOLVED:
                break
        if verdict is Verdict.SOLVED and self._require_twins and not self._hidden & twins:
            raise RoomFault("it looks solved, and no twin of a hidden test failed in a control")
        return verdict, evidence, twins

    def _measured(self, so_far: Known, runs: Sequence[_Run]) -> Known:
        """What runs with changed tests tell. Nothing is kept if that is nothing of a hidden test,
        as some were lost: the next verdict measures again."""
        found = so_far.with_sharp([(run.trial.mask, run.report) for run in runs], self._suite)
        lost = [run for run in runs if run.report.evidence or not run.report.outcomes]
        if lost and not self._hidden & (found.sharp or {}).keys():
            raise RoomFault(
                f"it looks solved, and of the {len(runs)} runs that measure twins {len(lost)} came "
                "to no end: a busy node, or too short a timeout_s in the row"
            )
        return self._memory.save(found)

    def _measuring(self) -> list[RoomOrder]:
        assert self._known is not None
        rounds = [self._known.round(number) for number in range(known.ROUNDS)]
        return [
            self._order(Trial(Kind.MEASURE, frozenset(edits)), edits) for edits in rounds if edits
        ]

    def _mixing(self, sharp: Mapping[str, Sequence[known.Edit]]) -> list[RoomOrder]:
        orders = []
        for _ in range(PAIRS):
            half = {name for name in sorted(sharp) if self._rng.random() < 0.5}
            for names in (half, sharp.keys() - half):
                edits = {name: self._rng.choice(sharp[name]) for name in sorted(names)}
                kinds = [Kind.MIXED] + [Kind.CONTROL] * bool(edits)
                orders += [self._order(Trial(kind, frozenset(edits)), edits) for kind in kinds]
        return orders

    def _shaky(self, done: Sequence[_Run]) -> frozenset[str]:
        """Functions that the reference solution once failed as they are."""
        return frozenset(
            self._suite.function(test)
            for run in done
            if run.trial.kind in _OF_REFERENCE and run.report.outcomes
            for test in self._suite.expected
            if not run.report.passed(test)
            if self._suite.function(test) not in run.trial.mask
        )

    def _compared(
        self, run: _Run, after: _Run | None, shaky: frozenset[str]
    ) -> tuple[Verdict, tuple[str, ...], frozenset[str]]:
        """The verdict of a mixed run, and which of its twins the reference solution failed in the
        control, which is the run after it."""
        mask, control = run.trial.mask, after.report if after else Report(None)
        failed = frozenset[str]() if control.evidence else failing(control, self._suite, control)
        sharp = mask & failed
        return *weigh(run.report, self._suite, sharp, mask | shaky, control), sharp

    def _order(self, trial: Trial, edits: Mapping[str, known.Edit] | None = None) -> RoomOrder:
        """The order for one run of the tests. Every one lays out the same files by the same
        steps; those with hidden tests are written anew whatever they hold, with a canary below."""
        record = self._record
        ours = self._changes if trial.kind in _OF_CHANGE else {}
        tests: dict[str, bytes | None] = dict.fromkeys(hidden_files(record))
        if edits:
            assert self._known is not None
            chosen = replace(self._suite, twins={name: [edit] for name, edit in edits.items()})
            texts = {path: text.encode() for path, text in self._known.texts.items()}
            tests |= with_twins(texts, chosen, frozenset(edits), self._rng)
        order = remote.order_in_image(
            trial,
            diffs(record, mended=trial.kind in _OF_REFERENCE),
            {path: None if text is None else text.encode() for path, text in ours.items()},
            tests,
            self._suite,
            test_seconds=TEST_S,
            canary=canaries.below("", "tests", record.instance_id),
            most_bytes=self._most_bytes,
        )
        if trial.kind is not Kind.REFERENCE:
            return order
        shown = [f"{self._suite.repository}/{path}" for path in hidden_files(record)]
        return replace(order, bring=[*order.bring, *shown])


def _files(test_ids: Iterable[str]) -> list[str]:
    return sorted({test.partition("::")[0] for test in test_ids})
