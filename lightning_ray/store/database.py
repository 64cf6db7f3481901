"""The SQLite file of a store: the lifecycle of rollouts, and the index of the calls in the log.

`Database` is a connection in autocommit mode; whatever writes does so in `write()`. The log is the
truth about calls, so `index` only notes where they lie, and the next transaction stores that too.

Invariants: a transaction is stored whole, together with all that was noted before it, or not at
all, and then what was noted waits for the next one; nobody writes after another owner has opened
the file (`epoch` counts them).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lightning_ray.store.errors import StoreLocked

_TABLES = """
begin immediate;
create table if not exists meta (name text primary key, value text not null);
create table if not exists rollouts (
    rollout_id text primary key, group_id text not null, split text not null, step integer not null,
    task text not null, state text not null, attempts integer not null default 0, finished text);
create index if not exists rollouts_by_group on rollouts (group_id);
create table if not exists attempts (
    attempt_id text primary key, rollout_id text not null, number integer not null,
    key_hash text not null, started_at real not null, ended_at real, outcome text, detail text,
    last_fault integer);
create table if not exists rewards (
    rollout_id text primary key, value real not null, solved integer not null,
    metrics text not null, source text not null);
create table if not exists calls (
    call_id text primary key, attempt_id text not null, seq integer not null,
    sampled integer not null, segment integer not null, batch integer not null,
    row integer not null);
create index if not exists calls_by_attempt on calls (attempt_id, seq);
commit;
"""


class Place(NamedTuple):
    """Where a call lies: `row` of a batch of a segment. `sampled` counts its tokens."""

    call_id: str
    attempt_id: str
    seq: int
    sampled: int
    segment: int
    batch: int
    row: int


class Database(sqlite3.Connection):
    """The database in the file `path`, of which the caller becomes the owner."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, check_same_thread=False, isolation_level=None)
        self.execute("pragma journal_mode = wal")
        self.execute("pragma synchronous = full")
        self.executescript(_TABLES)
        self._noted: list[Place] = []
        self.epoch = int(self.meta("epoch") or 0) + 1
        self.execute("insert or replace into meta values ('epoch', ?)", (str(self.epoch),))

    @contextmanager
    def write(self) -> Iterator[None]:
        """A transaction. Raises `StoreLocked` if there is another owner."""
        with self.indexed():
            yield
            self.execute("commit")
            self._noted.clear()

    @contextmanager
    def indexed(self) -> Iterator[None]:
        """Within, the index of calls is whole; nothing is stored."""
        self.execute("begin immediate")
        try:
            self.check_owner()
            self.executemany("insert or ignore into calls values (?,?,?,?,?,?,?)", self._noted)
            # What was recorded after a fault makes up for it; a fault is a transaction of its own.
            self.executemany(
                "update attempts set last_fault = null where attempt_id = ?",
                {(place.attempt_id,) for place in self._noted},
            )
            yield
        finally:
            if self.in_transaction:  # not committed
                self.execute("rollback")

    def index(self, places: Iterable[Place]) -> None:
        """Notes where calls lie, for the next transaction."""
        self._noted.extend(places)

    def flush(self) -> None:
        """Stores what was noted."""
        if self._noted:
            with self.write():
                pass

    def batches(self) -> dict[int, int]:
        """How many batches of each segment the index knows."""
        rows = self.execute("select segment, max(batch) + 1 from calls group by segment")
        return dict(rows.fetchall())

    def select(self, sql: str, values: Sequence[str]) -> list[tuple]:
        """Runs a query with an `in (%s)` list of any length (SQLite takes 32,766 variables at
        most)."""
        rows: list[tuple] = []
        for start in range(0, len(values), 10_000):
            part = list(values[start : start + 10_000])
            rows += self.execute(sql % ",".join("?" * len(part)), part).fetchall()
        return rows

    def check_owner(self) -> None:
        """Raises `StoreLocked` if somebody has opened the file after this one."""
        if self.meta("epoch") != str(self.epoch):
            raise StoreLocked(
                "another process has opened the store of this run and goes on with it"
            )

    def meta(self, name: str) -> str | None:
        """A fact about the store itself."""
        row = self.execute("select value from meta where name = ?", (name,)).fetchone()
        return row[0] if row else None

    def set_meta(self, name: str, value: str) -> None:
        with self.write():
            self.execute("insert or replace into meta values (?,?)", (name, value))
