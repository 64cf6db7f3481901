"""Repositories that only a task's container image has: what is done to them in its pods.

SWE-bench's images have the broken state, SWE-smith's the clean one, into which `patch` puts the
bug; both at `/testbed`, with the package installed from there, so the work is done in that place.
`setup` is for the agent's pod, `advance` says what a verdict takes. The work itself is
`layout.py`'s.

Invariants: the agent's repository has one commit and nothing older, and no FAIL_TO_PASS test: of
SWE-smith's rows the files with such tests are taken away (as SWE-smith does), SWE-bench's come with
`test_patch` when the tests run; a verdict of SOLVED needs an image in which the bug alone is
unsolved and the reference solution solved.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_ray import canary
from lightning_ray.records import Json
from lightning_ray.rollouts.grading import RoomOrder, RoomRun
from lightning_ray.tasks.swe import layout, remote, twins
from lightning_ray.tasks.swe.evidence import Judgement, Report, Suite, Verdict, weigh
from lightning_ray.tasks.swe.examination import PAIRS, Kind, RoomFault, Trial, with_twins
from lightning_ray.tasks.swe.measure import candidates
from lightning_ray.tasks.swe.record import Format, RecordError, RepositoryTask, addressable

LIKELY = 6  # candidates for a twin, from the front: those that look least like a change
TIMEOUT_S = 1800.0  # of one run of a suite for which a row names none: SWE-bench's own limit
_GIT = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
COMMIT = {  # the same in every rollout, and nothing of the operator's configuration
    **_GIT,
    **{f"GIT_{who}_NAME": "maintainer" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "maintainer@example.org" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_DATE": "2026-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")},
}
MESSAGE = "The repository as it is"


def bait(instance_id: str) -> str:
    """An object that nobody reads who does not look for what is not there."""
    return f"fix of {instance_id}: {canary.mint('git')}\n"


def setup(record: RepositoryTask) -> Json:
    """What `prepare` asks of an agent's pod.

    Raises:
        PatchError: the bug's patch cannot be read.
    """
    check(record)
    hidden = _files(record.fail_to_pass) if record.format is Format.SWE_SMITH else []
    told = {
        "diffs": [record.bug_patch] if record.format is Format.SWE_SMITH else [],
        "files": dict.fromkeys(hidden),
        "history": {"env": COMMIT, "message": MESSAGE, "object": bait(record.instance_id)},
    }
    return {"program": Path(layout.__file__).read_text(), "say": json.dumps(told)}


def check(record: RepositoryTask) -> None:
    """Raises RecordError: a test of the row cannot be named to pytest."""
    odd = [test for test in (*record.fail_to_pass, *record.pass_to_pass) if not addressable(test)]
    if odd:
        raise RecordError(
            f"{len(odd)} test ids are not pytest's, such as {odd[0][:80]!r}: with "
            "task.grader_options.judge=false SWE-bench's own harness can judge the predictions"
        )


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
    changes: Mapping[str, str | None],
    runs: Sequence[RoomRun],
    rng: random.Random | None = None,
) -> Judgement | list[RoomOrder]:
    """The verdict on `changes` after `runs`, or what is to be run for one, as
    `examination.wanted`. Here nobody measured which twins correct code fails, so each mixed run has
    a control: the reference solution in the same image, under the same changes to the tests.

    Raises:
        RoomFault: tests did not start, or this image cannot judge: the bug alone is not unsolved,
            or the reference solution not solved.
        PatchError: a patch of the row cannot be read.
    """
    done = [_Run(*remote.read(run), run) for run in runs]
    if not done:
        return [_order(record, judged_by, Trial(Kind.AS_IT_IS), changes)]
    first = done[0].report
    verdict, evidence = weigh(first, judged_by)
    twins = frozenset[str]()
    if verdict is Verdict.SOLVED:
        if len(done) == 1:
            kinds = [Kind.KNOWN_BAD] + [Kind.REFERENCE] * bool(record.patch)
            return [_order(record, judged_by, Trial(kind), changes) for kind in kinds]
        _check_room(done[1:3], judged_by)
        if len(done) == 3 and (mixed := _mixed(done[2], judged_by, rng or random.SystemRandom())):
            return [
                _order(record, judged_by, Trial(kind, frozenset(edits)), changes, texts)
                for edits, texts in mixed
                for kind in [Kind.MIXED] + [Kind.CONTROL] * bool(edits)
            ]
        for ours, control in itertools.pairwise([*done[3:], None]):
            if ours is None or ours.trial.kind is not Kind.MIXED:
                continue
            found = _compared(ours, control, judged_by)
            if found is not None:
                verdict, evidence, sharp = found
                twins |= sharp
            if verdict is not Verdict.SOLVED:
                break
    return Judgement(
        verdict,
        evidence,
        fail_to_pass=sum(map(first.passed, judged_by.fail_to_pass)),
        pass_to_pass=sum(map(first.passed, judged_by.pass_to_pass)),
        runs=len(done),
        seconds=sum(one.report.seconds for one in done),
        twins=len({judged_by.function(test) for test in judged_by.fail_to_pass} & twins),
    )


@dataclass(frozen=True)
class _Run:
    trial: Trial
    report: Report
    of: RoomRun


def _order(
    record: RepositoryTask,
    judged_by: Suite,
    trial: Trial,
    changes: Mapping[str, str | None],
    tests: Mapping[str, str] | None = None,
) -> RoomOrder:
    """The order for one run of the tests, those of `tests` in the place of the row's own."""
    smith = record.format is Format.SWE_SMITH
    diffs = [record.bug_patch if smith else record.test_patch]
    if trial.kind in (Kind.REFERENCE, Kind.CONTROL):
        diffs = [] if smith else [record.gold_patch, record.test_patch]
    ours = changes if trial.kind in (Kind.AS_IT_IS, Kind.MIXED) else {}
    files = {
        p: None if text is None else text.encode() for p, text in {**ours, **(tests or {})}.items()
    }
    order = remote.order_in_image(trial, list(filter(None, diffs)), files, judged_by)
    if trial.kind is not Kind.REFERENCE:
        return order
    shown = [f"{judged_by.repository}/{path}" for path in _files(judged_by.fail_to_pass)]
    return replace(order, bring=[*order.bring, *shown])


def _check_room(done: Sequence[_Run], suite: Suite) -> None:
    for run in done:
        found, why = weigh(run.report, suite)
        wanted = Verdict.SOLVED if run.trial.kind is Kind.REFERENCE else Verdict.UNSOLVED
        if found is not wanted:
            said = f" ({'; '.join(why)})" if why else ""
            raise RoomFault(
                f"the {run.trial.kind} state is {found} here{said}: this image cannot judge it"
            )


def _mixed(
    reference: _Run, suite: Suite, rng: random.Random
) -> list[tuple[dict[str, twins.Edit], dict[str, str]]]:
    """For each mixed run which functions get which edit, and the files of tests with them in."""
    prefix = f"{suite.repository}/"
    sources = {
        path.removeprefix(prefix): text.encode()
        for path, text in reference.of.report.files.items()
        if path.startswith(prefix)
    }
    functions = sorted({suite.function(test) for test in suite.expected})
    offered = {name: found for name in functions if (found := candidates(sources, name))}
    runs = []
    for _ in range(PAIRS if offered else 0):
        half = {name for name in offered if rng.random() < 0.5}
        for names in (half, offered.keys() - half):
            edits = {name: rng.choice(offered[name][:LIKELY]) for name in sorted(names)}
            chosen = replace(suite, twins={name: [edit] for name, edit in edits.items()})
            after = with_twins(sources, chosen, frozenset(edits), rng)
            texts = {path: text.decode() for path, text in after.items() if text != sources[path]}
            runs.append((edits, texts))
    return runs


def _compared(
    ours: _Run, run: _Run | None, suite: Suite
) -> tuple[Verdict, tuple[str, ...], frozenset[str]] | None:
    """The verdict of a mixed run, and which of its twins correct code failed in the control, the
    `run` after it (a run without twins has none); None where the control says nothing."""
    mask = ours.trial.mask
    if not mask:
        return *weigh(ours.report, suite), mask
    assert run is not None
    control = run.report
    if control.evidence or not control.outcomes:
        return None
    failed = {suite.function(test) for test, found in control.outcomes.items() if found == "failed"}
    disturbed = {suite.function(test) for test in suite.expected if not control.passed(test)}
    if not (sharp := mask & failed):
        return None
    judged = replace(suite, touchy=frozenset(disturbed | mask) - sharp)
    return *weigh(ours.report, judged, sharp), sharp


def _files(test_ids: Iterable[str]) -> list[str]:
    return sorted({test.partition("::")[0] for test in test_ids})
