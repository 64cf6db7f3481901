"""The clean room as this machine gives it: what graders judge in, and in which tests are measured.

`protection` is a room of bubblewrap's where the machine can make one, and `missing` what is to be
said where it cannot. `vouch` has a machine show that it can judge a package at all: the package as
it came must be solved there. Graders ask for that behind a verdict that is not solved, since a
solved one shows it by itself; what was shown is remembered, so that it costs one run of a suite
for a package, until the machine is started anew.

Invariants: who measures the tests of a package (`making`, `preparation.local`) runs them in the
room that graders judge in; a room is vouched for by runs without any file of an agent only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from lightning_ray.rollouts import sandbox, usage
from lightning_ray.tasks.swe import cleanroom, examination, runtime, sources, witness
from lightning_ray.tasks.swe.cleanroom import Protection, RoomFault
from lightning_ray.tasks.swe.evidence import Suite, Verdict, weigh
from lightning_ray.tasks.swe.sources import Package

# Of a run of the tests, besides the limits of each process: less than what a grader may take, or
# code under test could end the grader, and have its rollout masked instead of unsolved.
MAX_PROCESSES = 100
MAX_MEMORY_BYTES = 1536 << 20
_DECIDE = (cleanroom, examination, runtime, sandbox, witness)  # what a room is, besides the machine


def protection() -> Protection:
    """A room of bubblewrap's, where this machine has it; else only a process of its own."""
    hidden = [*runtime.hidden(), *sources.ours()]

    def before(room: Path, scratch: Path) -> list[str]:
        try:
            argv = sandbox.room(scratch, [room, *runtime.shown()], hidden)
        except sandbox.SandboxError as error:
            raise RoomFault(str(error)) from error
        if argv:
            runtime.warm()
        return argv

    return Protection(before, takes_too_much)


def missing() -> str:
    """What whoever measures tests here must know; "" if they run as where they judge."""
    able = sandbox.protection()
    if able.bubblewrap:
        return ""
    return (
        f"tests are measured without a sandbox ({'; '.join(able.missing)}): one that behaves "
        "otherwise in a sandbox is measured wrongly for machines that have one"
    )


def vouch(package: Package, suite: Suite) -> None:
    """Raises RoomFault: here, a package as it came does not pass the tests of its suite."""
    shown = sources.cache() / "rooms" / _digest(package, suite)
    if shown.exists():
        return
    report = cleanroom.run(sources.tree(package.name), suite, protection=protection())
    verdict, why = weigh(report, suite)
    if verdict is not Verdict.SOLVED:
        raise RoomFault(
            f"{package.name} as it came is {verdict} on this machine ({'; '.join(why)}), so no "
            "repair of it can be solved here (docs/swe.md says what a room has: How it is judged)"
        )
    with contextlib.suppress(OSError):  # then the next verdict has it shown again
        shown.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shown.touch()


def _digest(package: Package, suite: Suite) -> str:
    decides = [
        sandbox.machine(),
        str(sandbox.protection()),
        [Path(str(part.__file__)).read_text() for part in _DECIDE],
        package.sdist_sha256,
        [suite.python, *suite.targets, *suite.paths],
        sorted(suite.expected),
    ]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]


def takes_too_much(pid: int) -> bool:
    """Whether a process and what it started take more than a run of tests may."""
    tree = usage.descendants(pid)
    return len(tree) > MAX_PROCESSES or sum(tree.values()) > MAX_MEMORY_BYTES
