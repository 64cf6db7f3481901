"""From rows to clean training and validation tasks, with an account of every row that was dropped.

`clean` reads sources, splits them, applies the filters of `filters.py` and the reference runs of
`reference.py`, and writes the tasks; `probed` then keeps those that a base model solves sometimes,
or `unprobed` all. Validation comes first, so that what is kept there is held out of training.

Invariants: rows read = unreadable + kept + the sum of what each filter dropped, for every split;
files appear whole or not at all, `train.jsonl` last; a run that was interrupted and started again
writes the same bytes as one that was not, and repeats no reference run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Literal, TypeVar

from lightning_ray.config import ConfigError
from lightning_ray.records import Split, Task
from lightning_ray.report.statistics import Tally
from lightning_ray.tasks.swe import journal, patches
from lightning_ray.tasks.swe.preparation import filters, probing, reference, rows
from lightning_ray.tasks.swe.preparation.filters import Filter
from lightning_ray.tasks.swe.preparation.options import Options
from lightning_ray.tasks.swe.preparation.reference import Elsewhere, Runner, Verdict
from lightning_ray.tasks.swe.record import RepositoryTask

TRAIN, VALIDATION = "train.jsonl", "validation.jsonl"
# Training tasks before the probe; what was dropped, and why; verdicts of reference runs.
CLEANED, DROPPED, CHECKS = "cleaned.jsonl", "dropped.jsonl", "checks.jsonl"
# Records that wait for a reference run, for each worker: enough that none of them idles.
_AHEAD = 4

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[str, int, int], None]  # stage, rows seen, rows kept


@dataclass
class Account:
    """Where the rows of one split went: the balance is checked by `balanced`."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def balanced(self) -> bool:
        return self.read == self.kept + sum(self.dropped.values())


@dataclass
class Outcome:
    """What `clean` and `probed` did, for the data card. `meanings` are those of the filters."""

    sources: dict[str, str]  # with the fingerprint of each
    held_out: dict[str, str]
    unreadable: int = 0
    splits: dict[Split, Account] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)
    repositories: dict[Split, Counter[str]] = field(default_factory=dict)
    probe: dict[int, int] = field(default_factory=dict)  # rollouts that solved it: tasks


def clean(
    found: list[str],
    held_out: list[str],
    out: Path,
    options: Options,
    runner: Runner | None,
    progress: Progress = lambda *_: None,
) -> Outcome:
    """Writes `validation.jsonl`, `cleaned.jsonl`, `dropped.jsonl` into `out`. `runner` is None if
    there are no reference runs.

    Raises:
        RowsError, ConfigError: a source cannot be read, or a row of one is no task.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / TRAIN).unlink(missing_ok=True)
    outcome = Outcome(
        {name: rows.fingerprint(name) for name in found},
        {name: rows.fingerprint(name) for name in held_out},
    )
    checks = _Checks(out / CHECKS, runner, options)
    dropped, ids = list[str](), set[str]()
    benchmark = _read(held_out, options, None)
    taken = {key for one in benchmark for key in _keys(one, options.separate_held_out)}
    for split in (Split.VALIDATION, Split.TRAIN):
        account = outcome.splits[split] = Account()
        counts = outcome.repositories[split] = Counter()
        # The first pass counts what cannot be read.
        counted = outcome if split is Split.VALIDATION else None
        mine = _of_split(_read(found, options, counted), split, options, account)
        # What validation holds nobody trains on, and a benchmark may hold what validation does.
        rules = filters.standard(
            options, frozenset(taken if split is Split.TRAIN else ()), frozenset(ids)
        )
        outcome.meanings |= {rule.name: rule.meaning for rule in rules}
        outcome.meanings |= reference.VERDICTS if checks.wanted else {}
        name = VALIDATION if split is Split.VALIDATION else CLEANED
        with _Whole(out / name) as file:
            for record, rule, reason in checks.apply(_cheap(rules, mine, dropped, split, account)):
                if rule:
                    _drop(dropped, split, record.instance_id, rule, reason, account)
                else:
                    account.kept += 1
                    counts[filters.repository(record.repo)] += 1
                    file.write(_line(record.to_task()))
                    ids.add(record.instance_id)
                    if split is Split.VALIDATION:
                        taken |= filters.keys(record, options.separate)
                progress(split, account.read, account.kept)
        assert account.balanced, account
    _replace(out / DROPPED, "".join(dropped))
    return outcome


def unprobed(out: Path) -> None:
    """Writes `train.jsonl` with all that was cleaned."""
    _copy(out / CLEANED, out / TRAIN, lambda _: True)


def probed(out: Path, outcome: Outcome, options: Options, tallies: Mapping[str, Tally]) -> Outcome:
    """Writes `train.jsonl` with the tasks of `cleaned.jsonl` that the probe keeps, and adds the
    others to `dropped.jsonl`. `tallies` are the probe's graded rollouts by task id.

    Raises:
        ConfigError: the probe was of other tasks.
    """
    tasks = [_task_id(line) for line in _lines(out / CLEANED)]
    mine = {task: tallies[task] for task in tasks if task in tallies}
    if tasks and not mine:
        raise ConfigError(f"the probe has none of the {len(tasks)} tasks in {out / CLEANED}")
    fates = probing.choose(
        tasks,
        mine,
        samples=options.samples,
        hard_share=options.hard_share,
        most_mixed=options.most_mixed,
        seed=options.seed,
    )
    account, dropped = outcome.splits[Split.TRAIN], list(_lines(out / DROPPED))
    for task in tasks:
        if not fates[task].kept:
            account.kept -= 1
            tally = mine.get(task)
            told = f"{tally.solved} of {tally.rollouts} rollouts" if tally else "no rollout"
            _drop(dropped, Split.TRAIN, task, fates[task], told, account)
    assert account.balanced, account
    outcome.meanings |= PROBED
    outcome.probe = dict(sorted(Counter(tally.solved for tally in mine.values()).items()))
    outcome.repositories[Split.TRAIN] = Counter()

    def keep(line: str) -> bool:
        row = json.loads(line)
        kept = fates[row["task_id"]].kept
        outcome.repositories[Split.TRAIN][filters.repository(row["repo"])] += kept
        return kept

    _copy(out / CLEANED, out / TRAIN, keep)
    _replace(out / DROPPED, "".join(dropped))
    return outcome


def export(found: list[str], out: Path, options: Options) -> list[Path]:
    """Writes the tasks of `train.jsonl` and `validation.jsonl`, in their order, as rows of both
    forms, whole: with the columns and the gold patches that a task does not carry.

    Raises:
        RowsError, ConfigError: as `clean`, or the sources are others than what was cleaned.
    """
    tasks = {
        split: [_task_id(line) for line in _lines(out / name)]
        for split, name in ((Split.TRAIN, TRAIN), (Split.VALIDATION, VALIDATION))
    }
    kept = {task for some in tasks.values() for task in some}
    # Of several rows with an id that which became a task.
    lines = {line for name in (TRAIN, VALIDATION) for line in _lines(out / name)}
    records = {
        record.instance_id: record
        for record in _read(found, options.model_copy(update={"skip_unreadable": True}), None)
        if record.instance_id in kept and _line(record.to_task()) in lines
    }
    if missing := sorted(kept - records.keys()):
        raise ConfigError(f"{missing[0]} is in {out}, but no more in {', '.join(found)}")
    return rows.write({split: [records[task] for task in ids] for split, ids in tasks.items()}, out)


PROBED: dict[str, str] = {
    probing.Fate.SOLVED: "the base model solves it every time",
    probing.Fate.UNSOLVED: "the base model never solves it, and enough such tasks are kept",
    probing.Fate.BEYOND: "mixed, but above most_mixed",
    probing.Fate.LOST: "infrastructure lost rollouts of it",
}


# -- rows --------------------------------------------------------------------------------------


def _read(
    found: Iterable[str], options: Options, outcome: Outcome | None
) -> Iterator[RepositoryTask]:
    """The readable records of all sources; the others are counted in `outcome`, or stop it."""
    for source in found:
        for row in rows.records(source):
            if row.record is not None:
                yield row.record
            elif not options.skip_unreadable:
                raise ConfigError(
                    f"{row.where}: no task: {row.problem}; skip_unreadable=true drops such rows"
                )
            elif outcome is not None:
                outcome.unreadable += 1


def _of_split(
    found: Iterable[RepositoryTask], split: Split, options: Options, account: Account
) -> Iterator[RepositoryTask]:
    for record in found:
        if split_of(record, options) is split:
            account.read += 1
            yield record


def split_of(record: RepositoryTask, options: Options) -> Split:
    """A record's own split, or the one that the hash of its function (or repository) gives: rows
    that come later change nobody's split. Of rows that share a function beside others, and so may
    be parted, the filter of overlaps drops those for training."""
    if record.split is not None:
        return record.split
    key = min(_keys(record, options.separate))
    digest = hashlib.sha256(f"{options.seed}\0{key}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return Split.VALIDATION if share < options.validation_share else Split.TRAIN


def _keys(record: RepositoryTask, separate: Literal["function", "repository"]) -> frozenset[str]:
    """As `filters.keys`; a patch of which nobody can say what it changes stands for its whole
    repository: no filter sees the rows of a benchmark, and nothing may leak."""
    try:
        found = filters.keys(record, separate)
    except patches.PatchError:
        found = frozenset()
    return found or filters.keys(record, "repository")


def _cheap(
    rules: list[Filter],
    found: Iterable[RepositoryTask],
    dropped: list[str],
    split: Split,
    account: Account,
) -> Iterator[RepositoryTask]:
    """What no filter drops."""
    for record, rule, reason in filters.apply(rules, found):
        if rule:
            _drop(dropped, split, record.instance_id, rule, reason, account)
        else:
            yield record


def _drop(
    dropped: list[str], split: Split, instance: str, rule: str, reason: str, account: Account
) -> None:
    account.dropped[rule] += 1
    row = {"instance_id": instance, "split": split, "filter": rule, "reason": reason}
    dropped.append(json.dumps(row) + "\n")


def _line(task: Task) -> str:
    row = {"task_id": task.task_id, "statement": task.statement, **task.fields}
    return json.dumps(row, ensure_ascii=False) + "\n"


# -- reference runs ----------------------------------------------------------------------------


class _Checks:
    """Reference runs, some at a time, whose verdicts are kept in a file from run to run."""

    def __init__(self, path: Path, runner: Runner | None, options: Options) -> None:
        self._path, self._runner, self._options = path, runner, options
        self._elsewhere = runner if isinstance(runner, Elsewhere) else None
        self.wanted = runner is not None and options.reference_runs > 0
        self._known: dict[str, Verdict | None] = {}
        self._lock = Lock()
        for line in journal.whole(path):
            row = json.loads(line)
            verdict = Verdict(row["filter"], row["reason"]) if row["filter"] else None
            self._known[row["key"]] = verdict

    def apply(self, found: Iterable[RepositoryTask]) -> Iterator[tuple[RepositoryTask, str, str]]:
        """As `filters.apply`; the order stays."""
        if not self.wanted:
            yield from ((record, "", "") for record in found)
            return
        stop = self._elsewhere.stop if self._elsewhere else lambda: None
        for record, verdict in _ordered(self._check, found, self._options.workers, stop):
            yield record, verdict.name if verdict else "", verdict.reason if verdict else ""

    def _check(self, record: RepositoryTask) -> Verdict | None:
        asked = [record.model_dump_json(), self._options.reference_runs, self._options.slowest_s]
        asked += [self._options.runner, *([self._elsewhere.settings] if self._elsewhere else [])]
        key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        if key not in self._known:
            assert self._runner is not None
            verdict = reference.check(
                record, self._runner, self._options.reference_runs, self._options.slowest_s
            )
            told = asdict(verdict) if verdict else {"name": "", "reason": ""}
            row = {"key": key, "instance_id": record.instance_id, "filter": told["name"]}
            with self._lock, self._path.open("a") as file:
                file.write(json.dumps(row | {"reason": told["reason"]}) + "\n")
            self._known[key] = verdict
        return self._known[key]


def _ordered(
    work: Callable[[T], R], items: Iterable[T], workers: int, stop: Callable[[], None]
) -> Iterator[tuple[T, R]]:
    """Each item with the result of `work`, in order, computed by threads a little ahead: the items
    are many and large, so they are not all taken at once. After an error nothing is begun any
    more, and what runs gets a `stop` and is waited for."""
    pool = ThreadPoolExecutor(workers)
    try:
        waiting: deque[tuple[T, Future[R]]] = deque()
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) >= workers * _AHEAD:
                first, result = waiting.popleft()
                yield first, result.result()
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        stop()
        raise
    finally:
        pool.shutdown()


# -- files -------------------------------------------------------------------------------------


class _Whole:
    """A file that is there only when all of it is written."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(path.name + ".partial")

    def __enter__(self) -> _Whole:
        self._file = self._partial.open("w")
        return self

    def write(self, text: str) -> None:
        self._file.write(text)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()
        if kind is None:
            os.replace(self._partial, self._path)
        else:
            self._partial.unlink()


def _replace(path: Path, text: str) -> None:
    with _Whole(path) as file:
        file.write(text)


def _copy(source: Path, target: Path, keep: Callable[[str], bool]) -> None:
    with _Whole(target) as file:
        for line in _lines(source):
            if keep(line):
                file.write(line)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file, none if it is not there."""
    if path.exists():
        with path.open(newline="\n") as file:
            yield from file


def _task_id(line: str) -> str:
    return str(json.loads(line)["task_id"])
