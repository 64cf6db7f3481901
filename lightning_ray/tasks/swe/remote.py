"""The clean room in pods: trials of an examination as orders for rooms, and reports out of them.

Each run has a room, that is a pod, of its own: what code under test saves of the originals is gone
when it meets the twins. The pod gets the tree that it runs, `witness.py` and a nonce; which trial
that was, and what would be right, stays in the order's note on our side. Where only the image has
the repository, the pod gets what is to be changed there, and `layout.py`, which does it.

Invariants: nothing in a pod decides; what goes wrong before the repository's code runs (no pytest
in the image, another Python) is a RoomFault, never a verdict.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_ray.rollouts.grading import RoomOrder, RoomRun
from lightning_ray.tasks.swe import evidence, examination, layout
from lightning_ray.tasks.swe.evidence import Report, Suite
from lightning_ray.tasks.swe.examination import (
    JUNIT,
    TREE,
    WITNESS,
    Given,
    Kind,
    RoomFault,
    Trial,
)

# Of a JUnit file, and half of a report: some 20,000 test ids. What comes back is up to four times
# that, which `gateway.max_body_mib` must let through.
MAX_REPORT_BYTES = 4 << 20
_KILLED = -9  # the status of a run that took more memory or disk than its pod has


def order(trial: Trial, tree: Mapping[str, bytes], suite: Suite) -> RoomOrder:
    """The order for a trial, whose own tree is `tree`."""
    run = examination.given(tree, suite)
    return _order(trial, run, suite, WITNESS, run.files)


def order_in_image(
    trial: Trial,
    diffs: Sequence[str],
    changes: Mapping[str, bytes | None],
    tests: Mapping[str, bytes | None],
    suite: Suite,
    test_seconds: float,
    *,
    seed: int | None = None,
    alone: Sequence[str] = (),
    canary: str = "",
    most_bytes: int = MAX_REPORT_BYTES,
) -> RoomOrder:
    """The order for a trial on the repository that the image has in `suite.repository`, with
    `diffs` applied, then `changes` (None removes a file), then `tests` (None: as they are), each
    with the line `canary` at its end. With a `seed` for hashes and the order of tests; and only if
    the image has no copy of the files `alone` elsewhere."""
    run = examination.given({}, suite, shuffle=seed, test_seconds=test_seconds)
    birds = {run.canary: run.files.pop(f"{TREE}/{run.canary}")}

    def coded(files: Mapping[str, bytes | None]) -> dict[str, str | None]:
        return {
            path: None if content is None else base64.b64encode(content).decode()
            for path, content in files.items()
        }

    told = {
        "repository": suite.repository,
        "diffs": list(diffs),
        "files": coded({**changes, **birds}),
        "fresh": coded(tests),
        "canary": canary,
        "alone": list(alone),
        "history": None,
        "then": WITNESS,
    }
    program = Path(layout.__file__)
    files = {layout.ORDER: json.dumps(told).encode(), program.name: program.read_bytes()}
    order = _order(trial, run, suite, program.name, run.files | files)
    return replace(order, env=examination.environment(seed or 0), most_bytes=most_bytes)


def _order(
    trial: Trial, run: Given, suite: Suite, program: str, files: Mapping[str, bytes]
) -> RoomOrder:
    return RoomOrder(
        files={},
        binary={path: base64.b64encode(content).decode() for path, content in files.items()},
        argv=["{python}", *examination.ARGUMENTS, program, "{fd}"],
        env=examination.environment(),
        say=run.say.decode(),
        timeout_s=suite.timeout_s,
        most_bytes=MAX_REPORT_BYTES,
        bring=[JUNIT],
        note={
            "kind": trial.kind.value,
            "mask": sorted(trial.mask),
            "plan": trial.plan,
            "turn": trial.turn,
            "nonce": run.nonce,
            "canary": run.canary,
        },
    )


def trial_of(run: RoomRun) -> Trial:
    """Which trial was run."""
    note = run.order.note
    return Trial(Kind(note["kind"]), frozenset(note["mask"]), note["plan"], note["turn"])


def read(run: RoomRun) -> tuple[Trial, Report]:
    """Which trial was run, and what came of it.

    Raises:
        RoomFault: the tests did not start.
    """
    note, report, trial = run.order.note, run.report, trial_of(run)
    if report.overran:
        return trial, Report(_KILLED, seconds=report.seconds)
    ready, told = examination.lines(report.said.encode(errors="replace"))
    if ready == layout.IMPOSSIBLE.strip():
        return trial, Report(report.status, seconds=report.seconds)
    if ready != b"ready":
        said = (report.tail.strip().splitlines() or ["no message"])[-1]
        if "No module named 'pytest'" in said:
            said += " (`python3` of the task's image must have it: docs/swe.md, Bring a repository)"
        raise RoomFault(f"the tests did not start in their pod: {said}")
    if large := report.too_large:
        what = "pytest's JUnit file" if JUNIT in large else "what the tests reported or printed"
        why = f"{what} is larger than the {run.order.most_bytes >> 20} MiB of a report"
        return trial, Report(report.status, seconds=report.seconds, too_large=why)
    junit = report.files.get(JUNIT)
    return trial, evidence.read(
        told,
        report.status,
        note["nonce"],
        None if junit is None else junit.encode(errors="replace"),
        note["canary"],
        report.seconds,
    )
