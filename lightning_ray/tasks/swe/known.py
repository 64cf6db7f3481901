"""What a verdict learns of a task whose repository only its image has, for the verdicts after it.

`learnt` reads it from a run of the reference solution: which tests pass there, and the texts of the
hidden ones. `round` offers changes to these, of which runs of the reference solution then tell the
sharp ones, which it fails (`with_sharp`). `Memory` keeps it in the operator's cache, by everything
that decides it: a task is measured once per machine, or by each of several verdicts that begin at
the same time.

Invariants: only runs without any file of an agent are learnt from; what cannot be read again is
measured again; what several verdicts learnt is put together (`and_of`), with nothing lost and the
same result in whichever order they come.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import filelock

from lightning_ray.tasks.swe import layout, sources, twins, witness
from lightning_ray.tasks.swe.evidence import Report, Suite, failing
from lightning_ray.tasks.swe.measure import candidates
from lightning_ray.tasks.swe.record import RepositoryTask

Edit = twins.Edit
ROUNDS = 6  # changes to each test that are tried, those first that look least like one
_XFAILED = "xfailed"


@dataclass(frozen=True)
class Known:
    """`passing` and `xfailed` tests of the reference solution (the latter are among the former),
    `texts` of the files with hidden tests, and `sharp` changes to their functions; None: not
    measured yet. Only those `lines` of each file are changed that an agent has not seen in an older
    one: of others code under test could say that they were changed. None: all."""

    passing: frozenset[str]
    xfailed: frozenset[str]
    texts: Mapping[str, str]
    sharp: Mapping[str, Sequence[Edit]] | None = None
    lines: Mapping[str, Sequence[int]] | None = None

    def settled(self, report: Report) -> Report:
        """A report in which a test that fails as expected has passed, as SWE-bench counts it, if
        the reference solution says so: else code under test could call `pytest.xfail`."""
        agreed = {
            test: "passed" if test in self.xfailed and outcome == _XFAILED else outcome
            for test, outcome in report.outcomes.items()
        }
        return replace(report, outcomes=agreed)

    def and_of(self, other: Known) -> Known:
        """What both say: tests that passed in the same way both times, and each change that the
        reference solution was seen to fail (whether it still does, a verdict's controls tell)."""
        unsteady = self.xfailed ^ other.xfailed
        texts = {p: text for p, text in sorted(self.texts.items()) if other.texts.get(p) == text}
        found = [sharp for sharp in (self.sharp, other.sharp) if sharp is not None]
        names = sorted({name for sharp in found for name in sharp if _file(name) in texts})
        return Known(
            (self.passing & other.passing) - unsteady,
            self.xfailed & other.xfailed,
            texts,
            {n: sorted({e for sharp in found for e in sharp.get(n, ())}) for n in names}
            if found
            else None,
            self.lines,
        )

    @functools.cached_property
    def _offered(self) -> dict[str, list[Edit]]:
        tree = {path: text.encode() for path, text in self.texts.items()}
        names = {
            f"{path}::{name}" for path, text in self.texts.items() for name in _functions(text)
        }
        offered = {}
        for name in sorted(names):
            new = None if self.lines is None else {*self.lines.get(_file(name), ())}
            edits = [e for e in candidates(tree, name) if new is None or e[0] in new]
            if edits:
                offered[name] = edits
        return offered

    def round(self, number: int) -> dict[str, Edit]:
        """The change of that number to each function that has so many."""
        return {n: edits[number] for n, edits in self._offered.items() if number < len(edits)}

    def with_sharp(self, measured: Sequence[tuple[frozenset[str], Report]], suite: Suite) -> Known:
        """Knows which of the changes of `round` 0, 1, ... the reference solution failed."""
        sharp: dict[str, list[Edit]] = {}
        for number, (mask, report) in enumerate(measured):
            if report.evidence:
                continue
            offered = self.round(number)  # of fewer files, once another verdict found one unsteady
            for name in sorted(mask & failing(report, suite, report) & offered.keys()):
                sharp.setdefault(name, []).append(offered[name])
        return replace(self, sharp=sharp)


def nothing(suite: Suite) -> Known:
    """What is known of a task before anything was run."""
    return Known(suite.pass_to_pass, suite.pass_to_pass, {})


def learnt(
    reference: Report,
    suite: Suite,
    files: Mapping[str, str],
    lines: Mapping[str, Sequence[int]] | None = None,
) -> Known:
    """What a run of the reference solution tells; `files` came back from it."""
    xfailed = frozenset(
        test for test in suite.pass_to_pass if reference.outcomes.get(test) == _XFAILED
    )
    passing = frozenset(test for test in suite.pass_to_pass if reference.passed(test)) | xfailed
    hidden = set(map(_file, suite.fail_to_pass))
    # What is not UTF-8 came back with other characters, which would be changes too.
    texts = {path: files[path] for path in sorted(hidden & files.keys()) if "�" not in files[path]}
    return Known(passing, xfailed, texts, lines=lines)


def _file(name: str) -> str:
    return name.partition("::")[0]


def _functions(text: str) -> list[str]:
    try:
        return list(twins.functions(text))
    except (SyntaxError, ValueError):
        return []


class Memory:
    """Where what is known of a task lies."""

    def __init__(self, record: RepositoryTask, suite: Suite) -> None:
        decides = [
            record.model_dump(mode="json", exclude={"problem_statement", "hints_text"}),
            suite.repository,
            suite.options,
            *(Path(str(part.__file__)).read_text() for part in (layout, twins, witness)),
        ]
        digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
        self._path = sources.cache() / "imaged" / f"{digest}.json"

    def load(self) -> Known | None:
        try:
            tree = json.loads(self._path.read_text())
            sharp = tree.pop("sharp")
            return Known(
                frozenset(tree["passing"]),
                frozenset(tree["xfailed"]),
                tree["texts"],
                None if sharp is None else {n: [tuple(e) for e in es] for n, es in sharp.items()},
                tree["lines"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, known: Known) -> Known:
        """Adds to what other verdicts have found; returns what is known then. Where it cannot be
        kept, the next verdict measures again."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with filelock.FileLock(f"{self._path}.lock"):
                there = self.load()
                known = known.and_of(there) if there else known
                tree = asdict(known)
                tree |= {name: sorted(getattr(known, name)) for name in ("passing", "xfailed")}
                sources.keep(self._path, json.dumps(tree))
        return known
