"""What makes a row useless or harmful as a task: named filters, each with a reason per dropped row.

A filter looks at one record at a time, in order, and gives a reason to drop it, or None. Those that
compare rows with each other remember what all of them let pass. `standard` lists them in the order
in which they are applied; what needs the repository itself to be run is in `reference.py`.

Invariants: a filter's verdict depends on the record and on the records kept before it, never on
those dropped; the first of several like rows is the one that stays.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lightning_ray.tasks.swe import patches
from lightning_ray.tasks.swe.patches import FilePatch, PatchError
from lightning_ray.tasks.swe.preparation.options import Options
from lightning_ray.tasks.swe.record import Format, RepositoryTask, addressable
from lightning_ray.tasks.swe.workspace import is_protected

_HEADING = re.compile(r"@@ [^@]* @@(.*)", re.DOTALL)
_DEFINITION = re.compile(r"(\s*)(?:async\s+)?(?:def|class)\s+(\w+)")


@dataclass(frozen=True)
class Filter:
    """A name for the counts, what it drops, the verdict on a record (None: it may stay), and what
    remembers a record that stays."""

    name: str
    meaning: str
    reason: Callable[[RepositoryTask], str | None]
    remember: Callable[[RepositoryTask], None] | None = None


class Change:
    """What the patch of a record changes, read once."""

    def __init__(self, record: RepositoryTask) -> None:
        self.record = record

    @cached_property
    def fix(self) -> list[FilePatch]:
        """Raises PatchError."""
        return patches.files(self.record.gold_patch)

    @cached_property
    def paths(self) -> frozenset[str]:
        return frozenset(path for part in self.fix for path in (part.before, part.after) if path)

    @cached_property
    def _where(self) -> list[tuple[str, str, str, str]]:
        """Each removed or added line: its file, the last definition above it, the last one at the
        margin, as far as the diff shows them, and the line with its sign and single spaces."""
        found = []
        for part in self.fix:
            name = outer = ""
            for line in part.hunks:
                if heading := _HEADING.match(line):
                    line, name, outer = " " + heading[1].removeprefix(" "), "", ""
                if definition := _DEFINITION.match(line[1:]):
                    name = definition[2]
                    outer = outer if definition[1] else name
                if line[:1] in "+-" and line[1:].strip():
                    text = line[0] + " ".join(line[1:].split())
                    found.append((part.path, name, outer, text))
        return found

    @cached_property
    def lines(self) -> frozenset[tuple[str, str, str]]:
        """Removed and added lines: the file, the function or class, and the line with its sign and
        single spaces. The function is the record's own, or else the last definition above, as far
        as the diff shows it."""
        own = self.record.function
        return frozenset((path, own or f"{path}::{name}", t) for path, name, _, t in self._where)

    @cached_property
    def functions(self) -> frozenset[str]:
        """As in `lines`, and the definitions at the margin that they are in. Of two changes in a
        method one may show its `def`, and one, deeper in, no more than git's heading: the class."""
        if self.record.function:
            return frozenset({self.record.function} if self._where else ())
        return frozenset(f"{path}::{name}" for path, *names, _ in self._where for name in names)

    def side(self, sign: str) -> set[str]:
        """The lines that the fix adds (+) or removes (-), with single spaces."""
        return {line[1:] for _, _, line in self.lines if line[0] == sign}


def standard(
    options: Options,
    held_out: frozenset[str] = frozenset(),
    other_ids: frozenset[str] = frozenset(),
) -> list[Filter]:
    """The filters that need nothing but the rows. `held_out` are `keys` of tasks that are kept for
    validation or a benchmark, `other_ids` the ids of other splits."""
    twins, seen = Duplicates(options.similar), set(other_ids)
    return [
        Filter(
            "repeated id",
            "an earlier row has the same instance_id",
            lambda record: "it is an earlier row's, too" if record.instance_id in seen else None,
            lambda record: seen.add(record.instance_id),
        ),
        Filter("no statement", "the problem statement is empty", _no_statement),
        Filter("no environment", "no image, virtual environment or base commit", _no_environment),
        Filter("no fail-to-pass", "no test tells the bug from its fix", _no_fail_to_pass),
        Filter(
            "too many tests",
            f"above {options.most_fail_to_pass} fail-to-pass or {options.most_tests} tests",
            lambda record: _too_many(record, options),
        ),
        Filter(
            "too slow",
            f"a test run may take above {options.slowest_s:g} s",
            lambda record: (
                f"timeout_s is {record.timeout_s:g}"
                if record.timeout_s > options.slowest_s
                else None
            ),
        ),
        Filter("unaddressable tests", "ids that pytest cannot be given", _unaddressable),
        Filter("unreadable patch", "no text diff as git writes it", _unreadable),
        Filter(
            "fix out of reach",
            "the fix changes nothing, or files that the grader refuses",
            _out_of_reach,
        ),
        Filter(
            "leaked statement",
            "the statement holds the fix",
            lambda record: _leak(record, options),
        ),
        Filter(
            "overlap",
            "a held-out task is of the same repository or function",
            lambda record: _overlap(record, held_out),
        ),
        Filter("duplicate", "the patch of an earlier row, but for its place", twins.same),
        Filter(
            "near-duplicate",
            f"{options.similar:.0%} of the changed lines are an earlier row's",
            twins.alike,
            twins.remember,
        ),
    ]


# -- one row at a time -------------------------------------------------------------------------


def _no_statement(record: RepositoryTask) -> str | None:
    return None if record.problem_statement.strip() else "the problem statement is empty"


def _no_environment(record: RepositoryTask) -> str | None:
    if not (record.image_name or (record.package and record.sdist_sha256)):
        return "neither an image nor a package names its environment"
    if record.format is Format.SWE_BENCH and not record.base_commit:
        return "no base commit"
    return None


def _no_fail_to_pass(record: RepositoryTask) -> str | None:
    return None if record.fail_to_pass else "FAIL_TO_PASS is empty"


def _too_many(record: RepositoryTask, options: Options) -> str | None:
    count = len(record.fail_to_pass), len(record.fail_to_pass) + len(record.pass_to_pass)
    if count[0] > options.most_fail_to_pass:
        return f"{count[0]} fail-to-pass tests"
    return f"{count[1]} tests" if count[1] > options.most_tests else None


def _unaddressable(record: RepositoryTask) -> str | None:
    bad = [test for test in (*record.fail_to_pass, *record.pass_to_pass) if not addressable(test)]
    if bad:
        return f"{len(bad)} ids, such as {bad[0][:80]!r}"
    both = set(record.fail_to_pass) & set(record.pass_to_pass)
    return f"{min(both)[:80]!r} is to fail and to pass" if both else None


def _unreadable(record: RepositoryTask) -> str | None:
    try:
        # Turned round for SWE-smith's form, so that both directions are known to be readable.
        return None if record.gold_patch and record.bug_patch and Change(record).fix else "empty"
    except PatchError as error:
        return str(error)


def _out_of_reach(record: RepositoryTask) -> str | None:
    change = Change(record)
    refused = sorted(path for path in change.paths if is_protected(path))
    if refused:
        return f"{refused[0]} decides how tests run"
    return None if change.lines else "no line is changed"


def _leak(record: RepositoryTask, options: Options) -> str | None:
    statement = " ".join(record.problem_statement.split())
    if "@@ -" in statement or "diff --git " in statement:
        return "there is a diff in it"
    change = Change(record)
    telling = {
        line
        for line in change.side("+") - change.side("-")
        if len(line.replace(" ", "")) >= options.leak_characters
    }
    told = [line for line in telling if line in statement]
    if telling and len(told) >= options.leak_share * len(telling):
        return f"{len(told)} of {len(telling)} lines of the fix, such as {min(told)[:80]!r}"
    return None


# -- rows against other rows -------------------------------------------------------------------


def repository(name: str) -> str:
    """One name for a repository, however the data set writes it.

    >>> repository("swesmith/Pytools__Toolz.a1b2c3d4"), repository("pytools/toolz")
    ('pytools/toolz', 'pytools/toolz')
    """
    mirror = re.fullmatch(r"(?:[\w.-]+/)?([\w.-]+?)__([\w.-]+?)(?:\.[0-9a-f]{8})?", name)
    return ("/".join(mirror.groups()) if mirror else name).lower()


def functions(record: RepositoryTask) -> frozenset[str]:
    """The functions and classes that a record's patch changes, as `repository:path::name`: the one
    that it names itself, or those that the diff shows, of a method its class too. Changes whose
    function a diff does not show (it has no headings) count as one function of their file, so that
    nothing leaks.

    Raises:
        PatchError: the patch cannot be read.
    """
    where = repository(record.repo)
    return frozenset(f"{where}:{function}" for function in Change(record).functions)


def keys(record: RepositoryTask, separate: Literal["function", "repository"]) -> frozenset[str]:
    """What a task that is trained on and one that is held out must not share. Raises PatchError."""
    return functions(record) if separate == "function" else frozenset({repository(record.repo)})


def _overlap(record: RepositoryTask, held_out: frozenset[str]) -> str | None:
    if not held_out:
        return None
    shared = (keys(record, "function") | keys(record, "repository")) & held_out
    return f"{min(shared)} is held out" if shared else None


_Lines = frozenset[tuple[str, str, str]]


class Duplicates:
    """Patches seen so far, by repository and files; `share` of the lines makes two alike."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seen: dict[tuple[str, frozenset[str]], dict[_Lines, str]] = defaultdict(dict)

    def same(self, record: RepositoryTask) -> str | None:
        """Equal but for line numbers and spaces."""
        first = self._of(record).get(Change(record).lines)
        return f"as {first}" if first else None

    def alike(self, record: RepositoryTask) -> str | None:
        """Nearly equal."""
        mine = Change(record).lines
        for lines, first in self._of(record).items():
            if len(mine & lines) >= self._share * len(mine | lines):
                return f"{len(mine & lines)} of {len(mine | lines)} lines as {first}"
        return None

    def remember(self, record: RepositoryTask) -> None:
        self._of(record)[Change(record).lines] = record.instance_id

    def _of(self, record: RepositoryTask) -> dict[_Lines, str]:
        return self._seen[repository(record.repo), Change(record).paths]


def apply(
    filters: list[Filter], found: Iterable[RepositoryTask]
) -> Iterator[tuple[RepositoryTask, str, str]]:
    """Each record, in order, with the name of the filter that drops it and the reason; both are
    empty for what stays."""
    for record in found:
        for one in filters:
            if reason := one.reason(record):
                yield record, one.name, reason
                break
        else:
            for one in filters:
                if one.remember:
                    one.remember(record)
            yield record, "", ""
