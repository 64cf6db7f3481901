"""Makes repair tasks out of packages with good tests, without a network but for pip's.

For each package of the manifest: `reference` says which tests always pass and finds twins for them
(`measure.py`); `generate` lets SWE-smith's procedural generator, unmodified and in an environment
of its own, write bugs; `judge` runs the suite on each bug twice and keeps it if a few tests fail
for it, the same ones both times. All is written to a work folder as soon as it is known, so that an
interrupted run goes on where it was.

Invariants: a task's bug undone is the package's own source, byte for byte; a task is kept only if
every test that it makes fail has at least two twins, and one of them twins that the bug does not
tell from it (`traces.py`); no two tasks have the same patch; the same seed, packages and locks give
the same tasks.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ray.records import Json, Split
from lightning_ray.tasks.swe import (
    cleanroom,
    journal,
    kinship,
    measure,
    patches,
    protection,
    smith_environment,
    sources,
    traces,
)
from lightning_ray.tasks.swe.evidence import Suite, Tree
from lightning_ray.tasks.swe.measure import SEED, WORKERS
from lightning_ray.tasks.swe.sources import Package
from lightning_ray.tasks.swe.trees import apply

MAX_FAIL_TO_PASS = 20
MIN_PASS_TO_PASS = 10
MAX_SUITE_S = 30.0  # of a processor: the clock depends on what else the machine does
MAX_PATCH_BYTES = 2000  # a few changed lines; more would be a copy of somebody's function
VALIDATION_SHARE = 0.2  # of the tasks of a package, at most
TASKS_PER_PACKAGE = 80  # about half of the set at most
SUITE_TWINS = 3  # of a test, where it is not hidden
COLUMNS = (
    "instance_id", "package", "strategy", "function", "split", "patch", "FAIL_TO_PASS", "twins",
)  # fmt: skip

Say = Callable[[str], None]


@dataclass(frozen=True)
class Bug:
    """A bug of the generator. `entity` is the function or class that was changed."""

    strategy: str
    digest: str
    entity: str
    patch: str

    @property
    def function(self) -> str:
        return f"{patches.files(self.patch)[0].path}::{self.entity}"


class Dropped(Exception):
    """A bug that makes no task; the message is the reason it is counted under."""


def make(names: Iterable[str], work: Path, say: Say) -> tuple[Json, list[Json]]:
    """The suites of the packages, and the rows of the tasks; both also land in `work`."""
    suites: Json = {}
    rows: list[Json] = []
    if lack := protection.missing():
        say(lack)
    for name in names:
        package = sources.packages()[name]
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        found = _once(folder / "suite.json", functools.partial(reference, package, say))
        suites[name] = found
        suite = suite_of(package, found)
        bugs = [
            Bug(**bug) for bug in _once(folder / "bugs.json", functools.partial(generate, package))
        ]
        judged = _judge_all(package, suite, bugs, folder, say)
        kept = [row for row in judged if "reason" not in row]
        reasons = collections.Counter(row["reason"] for row in judged if "reason" in row)
        say(f"{name}: {len(judged)} bugs judged, {len(kept)} tasks; dropped: {dict(reasons)}")
        rows += kept
    return suites, rows


def _once(path: Path, make: Callable[[], object]) -> Any:
    if not path.exists():
        sources.keep(path, json.dumps(make(), ensure_ascii=False))
    return json.loads(path.read_text())


# -- the suite as it is ----------------------------------------------------------------------------


def suite_of(package: Package, found: Json) -> Suite:
    """The suite of a package as `reference` found it, with no task in particular."""
    return Suite(
        python=str(sources.environment() / "bin" / "python"),
        targets=package.targets,
        fail_to_pass=frozenset(),
        pass_to_pass=frozenset(found.get("stable", ())),
        twins={name: [tuple(e) for e in edits] for name, edits in found.get("twins", {}).items()},
        owners=found.get("owners", {}),
        touchy=frozenset(found.get("touchy", ())),
        paths=(package.path,),
        timeout_s=300,
        cpu_s=max(20.0, 4 * found.get("seconds", 15.0)),  # a bug may well be an endless loop
    )


def reference(package: Package, say: Say) -> Json:
    """What `measure.reference` finds of a package's suite."""
    return measure.reference(
        sources.tree(package.name),
        suite_of(package, {}),
        lambda line: say(f"{package.name}: {line}"),
        protection.protection(),
    )


# -- bugs ------------------------------------------------------------------------------------------


def generate(package: Package) -> list[Json]:
    """What SWE-smith's generator makes of a package's modules."""
    with tempfile.TemporaryDirectory(prefix="lr-smith-") as name:
        folder = Path(name)
        modules = tuple(f"{Path(package.path) / module}" for module in package.modules)
        chosen = {
            path: content
            for path, content in sources.tree(package.name).items()
            if path.startswith(tuple(f"{m}/" for m in modules))
            or path.removesuffix(".py") in modules
        }
        cleanroom.stage(chosen, folder / "repository")
        order = {
            "owner": package.owner,
            "name": package.name,
            "commit": package.sdist_sha256[:8],
            "folder": str(folder / "repository"),
            "max_bugs": package.bugs,
            "seed": SEED,
        }
        bugs = smith_environment.run(order)
    seen: dict[str, Json] = {}
    for bug in bugs:
        bug["entity"] = re.sub(r"_[0-9a-f]{8}$", "", bug["entity"])  # a hash of its signature
        seen.setdefault(bug["patch"], bug)  # two modifiers can make the same bug
    unique = sorted(seen.values(), key=lambda bug: bug["digest"] + bug["strategy"])
    random.Random(SEED).shuffle(unique)
    return unique


def _judge_all(
    package: Package, suite: Suite, bugs: list[Bug], folder: Path, say: Say
) -> list[Json]:
    """The rows of the bugs that make tasks, and the reasons of the others, in their order."""
    judged = folder / "judged.jsonl"
    known = {row["key"]: row for row in map(json.loads, journal.whole(judged))}
    rows: list[Json] = []
    started = time.monotonic()
    with ThreadPoolExecutor(WORKERS) as pool, judged.open("a") as log:
        for start in range(0, len(bugs), WORKERS):
            if sum("reason" not in row for row in rows) >= TASKS_PER_PACKAGE:
                break
            some = bugs[start : start + WORKERS]
            fresh = [bug for bug in some if _key(bug) not in known]
            for row in pool.map(lambda bug: _judged(package, suite, bug), fresh):
                known[row["key"]] = row
                log.write(json.dumps(row) + "\n")
                log.flush()
            rows += [known[_key(bug)] for bug in some]
            if fresh and len(rows) % 20 < WORKERS:
                kept = sum("reason" not in row for row in rows)
                spent = time.monotonic() - started
                say(f"{package.name}: {len(rows)} of {len(bugs)} bugs, {kept} tasks, {spent:.0f} s")
    return [{k: v for k, v in row.items() if k != "key"} for row in rows]


def _key(bug: Bug) -> str:
    return hashlib.sha256(bug.patch.encode()).hexdigest()[:16]


def _judged(package: Package, suite: Suite, bug: Bug) -> Json:
    try:
        return {"key": _key(bug)} | judge(package, suite, bug)
    except Dropped as reason:
        return {"key": _key(bug), "reason": str(reason)}


def judge(package: Package, suite: Suite, bug: Bug) -> Json:
    """The row of a bug. Raises Dropped, with the reason, if it makes no task."""
    if len(bug.patch.encode()) > MAX_PATCH_BYTES:
        raise Dropped("patch too large")
    clean = sources.tree(package.name)
    try:
        broken = apply(clean, bug.patch)
        if apply(broken, patches.reverse(bug.patch)) != clean:
            raise Dropped("patch cannot be undone")
    except ValueError as error:
        raise Dropped("patch cannot be applied") from error
    failed = _failing(broken, suite, hash_seed=0, shuffle=None)
    if not failed:
        raise Dropped("no test fails")
    if len(failed) > MAX_FAIL_TO_PASS:
        raise Dropped("too many tests fail")
    if len(suite.pass_to_pass) - len(failed) < MIN_PASS_TO_PASS:
        raise Dropped("too few tests pass")
    if any(suite.function(test) not in suite.twins for test in failed):
        raise Dropped("a failing test has no twins")
    if failed != _failing(broken, suite, hash_seed=5, shuffle=5):
        raise Dropped("flaky")
    functions = {suite.function(test) for test in failed}
    alike = traces.alike(broken, suite, functions, protection.protection())
    if not alike:
        raise Dropped("twins fail otherwise than tests")
    return {
        "instance_id": f"{repository(package)}.{bug.strategy}__{bug.digest}",
        "package": package.name,
        "strategy": bug.strategy,
        "function": bug.function,
        "patch": bug.patch,
        "FAIL_TO_PASS": failed,
        "twins": alike,
    }


def _failing(tree: Tree, suite: Suite, hash_seed: int, shuffle: int | None) -> list[str]:
    room = protection.protection()
    report = cleanroom.run(tree, suite, hash_seed=hash_seed, shuffle=shuffle, protection=room)
    if report.exit_status in (None, -signal.SIGXCPU, -signal.SIGKILL):
        raise Dropped("too slow")
    if not report.outcomes:
        raise Dropped("cannot be imported")
    if report.cpu_seconds > MAX_SUITE_S:
        raise Dropped("too slow")
    return sorted(test for test in suite.pass_to_pass if not report.passed(test))


def repository(package: Package) -> str:
    """The package's name in SWE-smith's way."""
    return f"{package.owner}__{package.name}.{package.sdist_sha256[:8]}"


def with_splits(rows: list[Json]) -> list[Json]:
    """The rows with their `split`. Kin (`kinship.py`) are in the same one; of each package, at most
    a fifth of the tasks are for validation."""
    total = collections.Counter(row["package"] for row in rows)
    trees = {name: sources.tree(name) for name in total}
    taken: collections.Counter[str] = collections.Counter()
    held_out: set[str] = set()
    for family in sorted(kinship.families(rows, trees), key=_digest):
        package = family[0]["package"]
        if taken[package] + len(family) <= VALIDATION_SHARE * total[package]:
            held_out |= {row["patch"] for row in family}
            taken[package] += len(family)
    return [
        row | {"split": Split.VALIDATION if row["patch"] in held_out else Split.TRAIN}
        for row in rows
    ]


def _digest(family: list[Json]) -> bytes:
    """What families are drawn by: the first of their functions' hashes."""
    texts = (f"{SEED} {row['package']} {row['function']}" for row in family)
    return min(hashlib.sha256(text.encode()).digest() for text in texts)


def write(suites: Json, rows: list[Json], data: Path) -> None:
    """Writes `suites.json` and `tasks.jsonl`, the checked-in form."""
    unique = {row["patch"]: row for row in reversed(rows)}
    lines = [
        json.dumps({name: row[name] for name in COLUMNS}) + "\n"
        for row in with_splits([*reversed(unique.values())])
    ]
    (data / "tasks.jsonl").write_text("".join(lines))
    lines = [
        f" {json.dumps(name)}: {json.dumps(found | {'twins': _first(found['twins'])})}"
        for name, found in sorted(suites.items())
    ]
    (data / "suites.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _first(twins: Mapping[str, list[Json]]) -> Json:
    """A few twins of each test, of several lines; those of hidden tests are in the rows."""
    return {name: edits[:SUITE_TWINS] for name, edits in twins.items()}


def report(rows: list[Json], say: Say) -> None:
    """Counts, for people."""
    counts = collections.Counter((row["package"], row["split"].value) for row in with_splits(rows))
    for (package, part), count in sorted(counts.items()):
        say(f"{package:12s} {part:10s} {count}")
    print(f"{len(rows)} tasks", file=sys.stderr)
