"""What one verdict takes: which runs of the suite, what each is given, and what its lines mean.

`wanted` says which trials are to be run after those that were, or what the verdict is: `ROUNDS`
mixed runs, in which each test goes through its original and twins of it (`twins.py`), which correct
code must fail, in a random order of its own; then the suite as it is, and a tree that must be
unsolved. `given` makes what goes into the room of one run, wherever that is: `cleanroom` has rooms
on this machine, `remote` in pods. Pure, but for secrets that are drawn.

Why in this order: code under test that could tell a later run what an earlier one has seen would
know every original if the suite ran as it is first. Like this it meets texts that it does not know,
and must find out which of them is the original before it has seen that the others are not. With a
perfect channel between runs that is a guess of one in `ROUNDS` for each hidden test that has two
twins; without one, guesses by the text alone, `ROUNDS` of them: 4 in 27 at best for three.

Invariants: nothing that a run is given says which tests are twins, or which run it is; trials of
one answer of `wanted` may run at the same time, or one at a time with `wanted` asked again after
each, since before them no guess is left; a room in which the known-bad tree is not unsolved judges
nothing. Standard library only.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    failing,
    weigh,
)

# Of mixed runs: for an original and two twins, since not every test has more.
ROUNDS = 3
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
    """One run that a verdict takes; the tests of `mask` are twins in it. Of `wanted`'s mixed runs:
    the secret `plan` of the verdict's, which says with `turn` which twins."""

    kind: Kind
    mask: frozenset[str] = frozenset()
    plan: str = ""
    turn: int = 0


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
    counted: bool = False,
    rng: random.Random | None = None,
) -> list[Trial] | Judgement:
    """The verdict after `done`, or what is to be run for one. With `counted` an unsolved tree goes
    on as a solved one does while some hidden test does what a repair's would, so that those are
    known (`Judgement.right`) of which no twin passed.

    Raises:
        RoomFault: the known-bad tree is not unsolved.
    """
    verdict, contradicted = Verdict.SOLVED, False
    evidence: tuple[str, ...] = ()
    for trial, report in done:
        found, why = weigh(report, suite, trial.mask)
        if trial.kind is not Kind.KNOWN_BAD:
            verdict, evidence, contradicted = found, why, bool(report.evidence)
        elif found is not Verdict.UNSOLVED:
            raise RoomFault(f"the known-bad tree is {found} here: this room cannot judge")
        if verdict is not Verdict.SOLVED:
            break
    if verdict is Verdict.SOLVED and (missing := _missing(suite, done, known_bad, rng)):
        return missing
    right = _right(suite, done) if counted and verdict is Verdict.UNSOLVED else frozenset[str]()
    if right and (missing := _missing(suite, done, False, rng)):
        return missing
    whole = next((report for trial, report in done if trial.kind is Kind.AS_IT_IS), None)
    doubtful = verdict is Verdict.TAMPERED and not contradicted  # a bug may do what a twin wants
    if whole is None and doubtful:
        return [Trial(Kind.AS_IT_IS)]
    if doubtful and whole and weigh(whole, suite)[0] is Verdict.UNSOLVED:
        verdict, evidence = weigh(whole, suite)
    passed = _passed(suite, done)
    return Judgement(
        verdict,
        evidence,
        fail_to_pass=len(suite.fail_to_pass & passed),
        pass_to_pass=len(suite.pass_to_pass & passed),
        right=len(right),
        runs=len(done),
        seconds=sum(report.seconds for _, report in done),
    )


def _missing(suite: Suite, done: Done, known_bad: bool, rng: random.Random | None) -> list[Trial]:
    """What a tree that looks solved has not gone through, as far as it may be run at once."""
    begun = [trial for trial, _ in done if trial.kind is Kind.MIXED]
    if suite.twins and len(begun) < ROUNDS:
        drawn = f"{(rng or random.SystemRandom()).getrandbits(128):032x}"
        plan, turn = begun[0].plan if begun else drawn, len(begun)
        names = frozenset(name for name in suite.twins if _version(suite, name, plan, turn))
        trials = [Trial(Kind.MIXED, names, plan, turn)]
        if turn + 1 < ROUNDS:  # alone: what it shows must not be known to what is still a guess
            return trials
    else:
        trials = []
    judged = {trial.kind for trial, _ in done}
    last = [Kind.AS_IT_IS, Kind.KNOWN_BAD] if known_bad else [Kind.AS_IT_IS]
    return trials + [Trial(kind) for kind in last if kind not in judged]


def _version(suite: Suite, name: str, plan: str, turn: int) -> twins.Edit | None:
    """Which twin of a test a mixed run has; None: the test itself."""
    rng = random.Random(f"{plan} {name}")
    some = rng.sample(suite.twins[name], min(len(suite.twins[name]), ROUNDS - 1))
    versions = [None, *some]
    rng.shuffle(versions)
    versions += [rng.choice(versions) for _ in range(ROUNDS - len(versions))]
    return versions[turn]


def _passed(suite: Suite, done: Done) -> set[str]:
    """The expected tests that passed: in the run as it is or, before that, wherever they were no
    twins."""
    ours = [(t, report) for t, report in done if t.kind in (Kind.AS_IT_IS, Kind.MIXED)]
    ours = [(t, report) for t, report in ours if t.kind is Kind.AS_IT_IS] or ours
    return {
        test
        for trial, report in ours
        for test in suite.expected
        if report.passed(test) and suite.function(test) not in trial.mask
    }


def _right(suite: Suite, done: Done) -> frozenset[str]:
    """The hidden tests that did in every run so far what a repair's do: passed as they are, and
    failed as twins."""
    ours = [(t.mask, report) for t, report in done if t.kind in (Kind.AS_IT_IS, Kind.MIXED)]
    if any(report.evidence for _, report in ours):
        return frozenset()
    found = suite.fail_to_pass
    for mask, report in ours:
        spared = suite.touchy if mask else frozenset[str]()
        passed = {test for test in found if report.passed(test) or suite.function(test) in spared}
        names = failing(report, suite)
        found = frozenset(
            test
            for test in found
            if (name := suite.function(test)) in suite.twins and suite.twins[name]
            if (name in names if name in mask else test in passed)
        )
    return found


def tree_of(
    trial: Trial,
    tree: Mapping[str, bytes],
    known_bad: Mapping[str, bytes] | None,
    suite: Suite,
) -> Mapping[str, bytes]:
    """The tree that a trial runs on. `known_bad` is None where none of `wanted`'s trials is."""
    if trial.kind is Kind.KNOWN_BAD:
        assert known_bad is not None
        return known_bad
    chosen = {name: _version(suite, name, trial.plan, trial.turn) for name in trial.mask}
    single = replace(suite, twins={name: [edit] for name, edit in chosen.items() if edit})
    return with_twins(tree, single, trial.mask, random.Random(0))


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
