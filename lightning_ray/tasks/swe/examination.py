"""What one verdict takes: which runs of the suite, what each is given, and what its lines mean.

`wanted` says which trials are to be run after those that were, or what the verdict is: the suite as
it is and, if that looks solved, a tree that must be unsolved and pairs of runs in which a random
half of the tests are replaced by twins (`twins.py`), which correct code must fail. `given` makes
what goes into the room of one run, wherever that is: `cleanroom` has rooms on this machine,
`remote` in pods. Pure, but for secrets that are drawn.

Invariants: nothing that a run is given says which tests are twins, or which run it is; trials of
one answer of `wanted` may run at the same time, or one at a time with `wanted` asked again after
each; a room in which the known-bad tree is not unsolved judges nothing. Standard library only.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from lightning_ray.tasks.swe import twins
from lightning_ray.tasks.swe.evidence import (
    Judgement,
    Report,
    Suite,
    Tree,
    Verdict,
    canaries,
    weigh,
)

PAIRS = 2  # of mixed runs: a forger who tosses coins passes with probability 1/29 at best
LIMITS = {  # of the test process; a runaway must hit these before the machine notices
    "RLIMIT_FSIZE": 256 << 20,
    "RLIMIT_AS": 2 << 30,
    "RLIMIT_CORE": 0,
}
# The layout of a room, which `witness.py` knows too: it lies beside these.
WITNESS, TREE, SCRATCH = "witness.py", "tree", "scratch"
JUNIT = f"{SCRATCH}/junit.xml"
ARGUMENTS = ("-s", "-B")  # of the interpreter, before the witness: no user's packages, no caches


class RoomFault(RuntimeError):
    """The clean room itself failed: there is no verdict, and another try may give one."""


class Kind(StrEnum):
    """Which tree a run of the suite is for."""

    AS_IT_IS = "as it is"
    KNOWN_BAD = "known bad"  # must be unsolved, or the room is at fault
    MIXED = "mixed"  # with twins in the place of some tests
    # Where nobody measured twins before (`imaged`):
    REFERENCE = "reference"  # must be solved
    MEASURE = "measure"  # the reference, with a change to every hidden file's tests
    CONTROL = "control"  # the reference, with a mixed run's twins


@dataclass(frozen=True)
class Trial:
    """One run that a verdict takes; the tests of `mask` are twins in it."""

    kind: Kind
    mask: frozenset[str] = frozenset()


Done = Sequence[tuple[Trial, Report]]


@dataclass(frozen=True)
class Given:
    """What a run is given: `files` of its room, and the line `say` for its witness. The `nonce` and
    the path of the `canary` are ours to know, until the report is there."""

    files: Tree
    say: bytes
    nonce: str
    canary: str


def wanted(
    suite: Suite,
    done: Done,
    *,
    known_bad: bool,
    pairs: int = PAIRS,
    rng: random.Random | None = None,
) -> list[Trial] | Judgement:
    """The verdict after `done`, or what is to be run for one.

    Raises:
        RoomFault: the known-bad tree is not unsolved.
    """
    if not done:
        return [Trial(Kind.AS_IT_IS)]
    first = done[0][1]
    verdict, evidence = weigh(first, suite)
    for trial, report in done[1:] if verdict is Verdict.SOLVED else ():
        found, why = weigh(report, suite, trial.mask)
        if trial.kind is Kind.MIXED:
            verdict, evidence = found, why
        elif found is not Verdict.UNSOLVED:
            raise RoomFault(f"the known-bad tree is {found} here: this room cannot judge")
        if verdict is not Verdict.SOLVED:
            break
    if verdict is Verdict.SOLVED and (missing := _missing(suite, done, known_bad, pairs, rng)):
        return missing
    return Judgement(
        verdict,
        evidence,
        fail_to_pass=sum(map(first.passed, suite.fail_to_pass)),
        pass_to_pass=sum(map(first.passed, suite.pass_to_pass)),
        runs=len(done),
        seconds=sum(report.seconds for _, report in done),
    )


def _missing(
    suite: Suite, done: Done, known_bad: bool, pairs: int, rng: random.Random | None
) -> list[Trial]:
    """What a tree that looks solved has not gone through."""
    rng = rng or random.SystemRandom()
    begun = [trial for trial, _ in done if trial.kind is Kind.MIXED]
    judged = any(trial.kind is Kind.KNOWN_BAD for trial, _ in done)
    trials = [] if judged or not known_bad else [Trial(Kind.KNOWN_BAD)]
    functions = frozenset(suite.twins)
    if len(begun) % 2:
        trials.append(Trial(Kind.MIXED, functions - begun[-1].mask))
    for _ in range(pairs - (len(begun) + 1) // 2 if functions else 0):
        half = frozenset(name for name in sorted(functions) if rng.random() < 0.5)
        trials += [Trial(Kind.MIXED, mask) for mask in (half, functions - half)]
    return trials


def tree_of(
    trial: Trial,
    tree: Mapping[str, bytes],
    known_bad: Mapping[str, bytes] | None,
    suite: Suite,
    rng: random.Random | None = None,
) -> Mapping[str, bytes]:
    """The tree that a trial runs on. `known_bad` is None where none of `wanted`'s trials is."""
    if trial.kind is Kind.KNOWN_BAD:
        assert known_bad is not None
        return known_bad
    return with_twins(tree, suite, trial.mask, rng or random.SystemRandom())


def with_twins(
    tree: Mapping[str, bytes], suite: Suite, mask: frozenset[str], rng: random.Random
) -> Tree:
    """The tree in which the tests of `mask` are replaced by a twin of each."""
    edits: dict[str, list[twins.Edit]] = {}
    for name in sorted(mask):
        path = name.partition("::")[0]
        edits.setdefault(path, []).append(rng.choice(suite.twins[name]))
    changed = {p: twins.edited(tree[p].decode(), found).encode() for p, found in edits.items()}
    return {**tree, **changed}


def given(
    tree: Mapping[str, bytes],
    suite: Suite,
    *,
    shuffle: int | None = None,
    test_seconds: float = 0.0,
) -> Given:
    """What a run of the suite on this tree is given, with canaries among the tests."""
    nonce = secrets.token_hex(16)
    first = PurePosixPath(suite.targets[0])
    birds = first.parent if first.suffix == ".py" else first
    canary = str(birds / f"test_{secrets.token_hex(4)}.py")
    limits = {"RLIMIT_CPU": int(suite.cpu_s) + 1} | LIMITS
    if suite.repository:  # libraries of numbers reserve more, and a pod's memory has its own limit
        del limits["RLIMIT_AS"]
    order = {
        "nonce": nonce,
        "version": suite.version,
        "limits": limits,
        "repository": suite.repository,
        "options": list(suite.options),
        "paths": list(suite.paths),
        "targets": list(dict.fromkeys([*suite.targets, canary])),
        "shuffle": shuffle,
        "test_seconds": test_seconds,
    }
    files = {f"{TREE}/{path}": content for path, content in tree.items()}
    files |= {
        f"{TREE}/{canary}": canaries(),
        WITNESS: Path(__file__).with_name(WITNESS).read_bytes(),
        f"{SCRATCH}/pytest.ini": b"[pytest]\n",
    }
    return Given(files, json.dumps(order).encode() + b"\n", nonce, canary)


def environment(hash_seed: int = 0) -> dict[str, str]:
    """What every test process has in its environment, besides its folders."""
    return {
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def lines(received: bytes) -> tuple[bytes, bytes]:
    """The two lines of a witness, b"" for one that did not come, or not to its end."""
    first, _, rest = received.partition(b"\n")
    second, end, _ = rest.partition(b"\n")
    return first, second if end else b""
