"""What must be known of a repository's tests before they can judge: which always pass, and twins.

`reference` runs a suite on the clean tree under other hash seeds and orders and keeps the tests
that always pass; `find_twins` tries changes to each test until some were seen to fail, and then
mixes twins with originals to find tests that fail because another one did. Once per repository; the
result is data that graders load.

Invariants: an edit is kept as a twin only if the clean tree failed it under two hash seeds and
beside other twins; the same seed and tree give the same twins.
"""

from __future__ import annotations

import functools
import random
import tokenize
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from lightning_ray.records import Json
from lightning_ray.tasks.swe import cleanroom, twins
from lightning_ray.tasks.swe.cleanroom import Protection
from lightning_ray.tasks.swe.evidence import Suite, Tree, failing
from lightning_ray.tasks.swe.traces import MIN_TWINS, TEST_SECONDS

SEED = 24
REFERENCE_RUNS = 3
TWIN_RUNS = 24  # tries to find twins of every test
LINE_TWINS = 3  # kept per line of a test: a bug breaks one line, and `traces` wants twins there
MIXED_RUNS = 4
WORKERS = 2

Say = Callable[[str], None]


def reference(
    tree: Tree, bare: Suite, say: Say, protection: Protection = cleanroom.UNPROTECTED
) -> Json:
    """`stable` (ids that always pass), `others` (the rest), `seconds` of a processor, `runs`, and
    what `find_twins` finds. `bare` is a suite that expects nothing. `protection` is to be that
    under which the tests will judge.

    Raises:
        RoomFault: the suite does not run.
    """
    orders = [None, *range(1, REFERENCE_RUNS)]
    runs = [
        cleanroom.run(tree, bare, shuffle=order, hash_seed=seed, protection=protection)
        for seed, order in enumerate(orders)
    ]
    for report in runs:
        if report.evidence or not report.outcomes:
            raise cleanroom.RoomFault(
                f"the suite does not run on the clean tree: status {report.exit_status}, "
                f"{'; '.join(report.evidence) or 'no test was collected'}"
            )
    collected = frozenset.union(*(report.collected for report in runs))
    stable = {test for test in collected if all(r.passed(test) for r in runs) and addressable(test)}
    seconds = max(report.cpu_seconds for report in runs)
    say(f"{len(stable)} of {len(collected)} tests always pass, {seconds:.1f} s")
    owners = _owners(tree, stable)
    suite = replace(bare, pass_to_pass=frozenset(stable), owners=owners)
    return {
        "stable": sorted(stable),
        "others": sorted(collected - stable),
        "owners": owners,
        **find_twins(tree, suite, say, protection),
        "runs": REFERENCE_RUNS,
        "seconds": round(seconds, 1),
    }


def addressable(test_id: str) -> bool:
    """True for ids that every witness and every log writes in the same way."""
    return test_id.isascii() and test_id.isprintable()


def find_twins(tree: Tree, suite: Suite, say: Say, protection: Protection) -> Json:
    """`twins` (changes to the tests that must pass) and `touchy` (tests that do not always pass
    beside failing ones)."""
    functions = sorted({suite.function(test) for test in suite.pass_to_pass})
    every = {name: edits for name in functions if (edits := candidates(tree, name))}
    kept: dict[str, list[twins.Edit]] = {}
    for _ in range(TWIN_RUNS):
        tried = {n: e for n, edits in every.items() if (e := _next(edits, kept.get(n, [])))}
        if not tried:
            break
        single = replace(suite, twins={name: [edit] for name, edit in tried.items()})
        changed = cleanroom.with_twins(tree, single, frozenset(tried), random.Random(0))
        how = functools.partial(
            cleanroom.run, changed, suite, test_seconds=TEST_SECONDS, protection=protection
        )
        with ThreadPoolExecutor(WORKERS) as pool:
            runs = [pool.submit(how, hash_seed=seed) for seed in (0, 7)]
        both = set(tried).intersection(*(failing(run.result(), suite) for run in runs))
        for name in sorted(both):
            kept.setdefault(name, []).append(tried[name])
    kept = {name: edits for name, edits in sorted(kept.items()) if len(edits) >= MIN_TWINS}
    touchy, blunt = _mixed(tree, replace(suite, twins=kept), protection)
    kept = {name: edits for name, edits in kept.items() if name not in touchy | blunt}
    say(f"{len(kept)} of {len(functions)} tests have twins; {len(touchy)} are touchy")
    return {"twins": kept, "touchy": sorted(touchy)}


def _next(edits: list[twins.Edit], kept: list[twins.Edit]) -> twins.Edit | None:
    """Takes the next edit of a line that has not enough."""
    while edits:
        edit = edits.pop(0)
        if sum(other[0] == edit[0] for other in kept) < LINE_TWINS:
            return edit
    return None


def _mixed(tree: Tree, suite: Suite, protection: Protection) -> tuple[set[str], set[str]]:
    """Tests that fail beside twins of others, and those whose twins pass beside others."""
    rng = random.Random(SEED)
    touchy: set[str] = set()
    blunt: set[str] = set()
    for _ in range(MIXED_RUNS):
        half = frozenset(name for name in suite.twins if rng.random() < 0.5)
        for mask in (half, frozenset(suite.twins) - half):
            changed = cleanroom.with_twins(tree, suite, mask, rng)
            report = cleanroom.run(changed, suite, protection=protection)
            missed = {test for test in suite.pass_to_pass if not report.passed(test)}
            touchy |= set(map(suite.function, missed)) - mask
            blunt |= mask - failing(report, suite)
    return touchy, blunt


def _owners(tree: Tree, tests: Iterable[str]) -> dict[str, str]:
    """For the tests that are inherited: whose they are."""
    found = {}
    for path in {test.partition("::")[0] for test in tests}:
        for test, owner in twins.owners(tree[path].decode()).items():
            found[f"{path}::{test}"] = f"{path}::{owner}"
    names = set(map(twins.function_of, tests))
    return {test: owner for test, owner in sorted(found.items()) if test in names}


def candidates(tree: Tree, name: str) -> list[twins.Edit]:
    """Changes to the test `FILE::NAME` (`twins.candidates`); none if the tree has not got it."""
    path, _, inside = name.partition("::")
    try:
        source = tree[path].decode()
        return twins.candidates(source, inside, random.Random(f"{SEED} {name}"))
    except (
        KeyError,
        SyntaxError,
        tokenize.TokenError,
        UnicodeDecodeError,
    ):  # inherited, generated, not in that file
        return []
