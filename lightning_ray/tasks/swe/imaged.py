"""Repositories that only a task's container image has: what is done to them in its pods.

SWE-bench's images have the broken state, SWE-smith's the clean one, into which `patch` puts the
bug; both at `/testbed`, with the package installed from there, so the work is done in that place.
`setup` is for the agent's pod, `trial` says what a run of the tests is given. The work itself is
`layout.py`'s.

Invariants: the agent's repository has one commit and nothing older, and no FAIL_TO_PASS test: of
SWE-smith's rows the files with such tests are taken away (as SWE-smith does), SWE-bench's come with
`test_patch` when the tests run. Tests have no twins here: nobody has measured them in the image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from lightning_ray import canary
from lightning_ray.records import Json
from lightning_ray.rollouts.grading import RoomOrder
from lightning_ray.tasks.swe import layout, remote
from lightning_ray.tasks.swe.evidence import Suite
from lightning_ray.tasks.swe.examination import Kind, Trial
from lightning_ray.tasks.swe.record import Format, RecordError, RepositoryTask, addressable

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
    """What `prepare` asks of an agent's pod. Raises PatchError: the bug's patch cannot be read."""
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


def trial(
    record: RepositoryTask, which: Trial, changes: Mapping[str, str | None], judged_by: Suite
) -> RoomOrder:
    """The order for one run of the tests. Raises PatchError, as above."""
    smith = record.format is Format.SWE_SMITH
    texts = {} if which.kind is Kind.KNOWN_BAD else changes
    files = {path: None if text is None else text.encode() for path, text in texts.items()}
    diff = record.bug_patch if smith else record.test_patch
    return remote.order_in_image(which, [diff] if diff else [], files, judged_by)


def _files(test_ids: tuple[str, ...] | list[str]) -> list[str]:
    return sorted({test.partition("::")[0] for test in test_ids})
