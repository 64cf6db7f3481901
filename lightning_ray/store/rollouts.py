"""The rollout store: lifecycle in SQLite, calls in the call log.

`RolloutStore` is plain and synchronous, and has one owner at a time (a lock on the store's folder).
A call is appended to the log and fsynced before it is indexed in SQLite; index rows are committed
together with the next lifecycle change, and after a crash they are made again from the open
segment.

Invariants: `append` is idempotent by call id, and returns only when the calls are on disk; a call's
prompt is stored as its difference from an earlier call of the same attempt, so a long attempt costs
its length, not its square; a rollout has at most one reward; an attempt that has ended takes no
more calls.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from lightning_ray.records import (
    CALL_SCHEMA,
    Call,
    FinishedRollout,
    Outcome,
    Reward,
    RolloutSpec,
    Split,
)
from lightning_ray.store.attempts import AttemptInfo, AttemptSummary, Known
from lightning_ray.store.encoding import (
    call_from_row,
    call_to_row,
    finished_from_row,
    finished_to_json,
    longest_shared_prefix,
)
from lightning_ray.store.errors import (
    AttemptOver,
    DuplicateReward,
    StoreError,
    StoreLocked,
    UnknownAttempt,
)
from lightning_ray.store.keys import Keys
from lightning_ray.store.log import SEGMENT_BYTES, CallLog
from lightning_ray.store.queries import Queries

_TABLES = """
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
"""


class RolloutStore:
    """The store in `directory` (a local POSIX path: SQLite does not work on NFS).

    Raises:
        StoreLocked: another live process owns it.
    """

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLocked(
                f"{directory} is in use by another run; stop it or choose another run.dir"
            ) from error
        self.directory = directory
        self._db = sqlite3.connect(directory / "rollouts.sqlite", check_same_thread=False)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = full")
        self._db.executescript(_TABLES)
        self._log = CallLog(directory / "calls", CALL_SCHEMA, segment_bytes)
        # The calls of live attempts with their full token sequences, to find a new call's parent.
        self._live: dict[str, list[tuple[Call, np.ndarray]]] = {}
        self._reindex()
        self._keys = Keys(directory)
        self.queries = Queries(self._db, self.calls)

    # -- rollouts and attempts ------------------------------------------------------------------

    def create_rollouts(self, specs: Iterable[RolloutSpec]) -> dict[str, Known]:
        """Adds rollouts that are not known yet; returns how each of them stands, by id."""
        asked = {
            s.rollout_id: (s.group_id, s.split, json.dumps(vars(s.task), sort_keys=True), s.step)
            for s in specs
        }
        with self._db:
            self._db.executemany(
                "insert or ignore into rollouts (rollout_id, group_id, split, "
                "task, step, state) values (?,?,?,?,?,?)",
                [(rollout_id, *spec, "queued") for rollout_id, spec in asked.items()],
            )
        rows = self._select(
            "select rollout_id, attempts, finished is not null, group_id, split, task "
            "from rollouts where rollout_id in (%s)",
            list(asked),
        )
        return {
            # The step may differ: a run that was killed may queue it again in an earlier one.
            rollout_id: Known(attempts, bool(over), tuple(stored) == asked[rollout_id][:-1])
            for rollout_id, attempts, over, *stored in rows
        }

    def start_attempt(
        self, attempt_id: str, rollout_id: str, number: int, key_hash: str, started_at: float
    ) -> None:
        """Makes the attempt's key valid. `key_hash` is the SHA-256 of the key, in hex."""
        with self._db:
            self._db.execute(
                "insert into attempts (attempt_id, rollout_id, number, "
                "key_hash, started_at) values (?,?,?,?,?)",
                (attempt_id, rollout_id, number, key_hash, started_at),
            )
            self._db.execute(
                "update rollouts set state = 'running', attempts = "
                "max(attempts, ?) where rollout_id = ?",
                (number + 1, rollout_id),
            )

    def end_attempt(
        self, attempt_id: str, outcome: Outcome, detail: str, ended_at: float
    ) -> AttemptSummary:
        """Ends the attempt: its key is dead from here on."""
        with self._db:
            self._db.execute(
                "update attempts set outcome = ?, detail = ?, ended_at = ? where "
                "attempt_id = ? and ended_at is null",
                (outcome, detail, ended_at, attempt_id),
            )
        self._live.pop(attempt_id, None)
        calls, sampled = self._db.execute(
            "select count(*), coalesce(sum(sampled), 0) from calls where attempt_id = ?",
            (attempt_id,),
        ).fetchone()
        fault = self._db.execute(
            "select last_fault from attempts where attempt_id = ?", (attempt_id,)
        ).fetchone()
        return AttemptSummary(calls, sampled, fault[0] if fault else None)

    def end_orphans(self, ended_at: float) -> int:
        """Ends the attempts that a crashed run left open; returns how many."""
        with self._db:
            ended = self._db.execute(
                "update attempts set outcome = ?, detail = 'the run was stopped', "
                "ended_at = ? where ended_at is null",
                (Outcome.NODE_LOST, ended_at),
            )
            self._db.execute(
                "update rollouts set state = 'queued' where state in ('running', 'grading')"
            )
        self._live.clear()
        return ended.rowcount

    def attempt(self, attempt_id: str) -> AttemptInfo | None:
        row = self._db.execute(
            "select attempt_id, rollout_id, key_hash, split, ended_at is null from attempts "
            "join rollouts using (rollout_id) where attempt_id = ?",
            (attempt_id,),
        ).fetchone()
        return AttemptInfo(row[0], row[1], row[2], Split(row[3]), bool(row[4])) if row else None

    def record_fault(self, attempt_id: str, status: int) -> None:
        """Remembers that the gateway's last answer to the attempt was an error of ours (5xx)."""
        with self._db:
            self._db.execute(
                "update attempts set last_fault = ? where attempt_id = ?", (status, attempt_id)
            )

    def finish_rollout(self, finished: FinishedRollout) -> None:
        """Puts a rollout into its final state; a second time changes nothing."""
        with self._db:
            self._db.execute(
                "update rollouts set state = ?, finished = ? where "
                "rollout_id = ? and finished is null",
                (finished.state, finished_to_json(finished), finished.spec.rollout_id),
            )

    def finished(self, rollout_ids: Sequence[str]) -> list[FinishedRollout]:
        """Those of `rollout_ids` that are in a final state."""
        rows = self._select(
            "select rollout_id, group_id, split, step, task, finished from rollouts "
            "where finished is not null and rollout_id in (%s)",
            rollout_ids,
        )
        return [finished_from_row(row) for row in rows]

    # -- rewards --------------------------------------------------------------------------------

    def post_reward(self, rollout_id: str, reward: Reward, source: str) -> None:
        """Stores the reward of a rollout.

        Raises:
            DuplicateReward: it already has one; the first one stays.
            StoreError: there is no such rollout.
        """
        known = self._db.execute(
            "select state from rollouts where rollout_id = ?", (rollout_id,)
        ).fetchone()
        if known is None:
            raise StoreError(f"there is no rollout {rollout_id}")
        try:
            with self._db:
                self._db.execute(
                    "insert into rewards values (?,?,?,?,?)",
                    (rollout_id, reward.value, reward.solved, json.dumps(reward.metrics), source),
                )
        except sqlite3.IntegrityError as error:
            raise DuplicateReward(
                f"rollout {rollout_id} already has a reward; the first one stays"
            ) from error

    def reward(self, rollout_id: str) -> Reward | None:
        row = self._db.execute(
            "select value, solved, metrics from rewards where rollout_id = ?", (rollout_id,)
        ).fetchone()
        return Reward(row[0], bool(row[1]), json.loads(row[2])) if row else None

    def grader_key(self, rollout_id: str) -> str:
        """The key with which a grader may post this rollout's reward, and nothing else."""
        return self._keys.grader(rollout_id)

    def operator_key(self) -> str:
        """The key of the operator API."""
        return self._keys.operator()

    # -- calls ----------------------------------------------------------------------------------

    def append(self, calls: Sequence[Call]) -> list[int | StoreError]:
        """Writes calls in one commit; on return they are on disk. The result has for each call the
        `seq` that it was given (also when it had been stored before), or why it was refused.

        Raises:
            OSError: the disk refused; none of them is stored.
        """
        results: list[int | StoreError] = []
        rows: list[dict[str, object]] = []
        fresh: list[tuple[Call, np.ndarray]] = []
        for call in calls:
            if refusal := self._refusal(call.attempt_id):
                results.append(refusal)
                continue
            live = self._live_calls(call.attempt_id)
            live = live + [pair for pair in fresh if pair[0].attempt_id == call.attempt_id]
            known = [earlier.seq for earlier, _ in live if earlier.call_id == call.call_id]
            results.append(known[0] if known else len(live))
            if known:
                continue
            parent, shared = longest_shared_prefix(call.prompt, live)
            stored = dataclasses.replace(call, seq=len(live))
            rows.append(call_to_row(stored, parent, shared))
            fresh.append((stored, stored.full))
        if rows:
            segment, batch = self._log.append(pa.RecordBatch.from_pylist(rows, CALL_SCHEMA))
            for call, full in fresh:
                self._live[call.attempt_id].append((call, full))
            self._index(
                (call.call_id, call.attempt_id, call.seq, len(call.tokens), segment, batch, row)
                for row, (call, _) in enumerate(fresh)
            )
            self._db.executemany(
                "update attempts set last_fault = null where attempt_id = ?",
                {(call.attempt_id,) for call, _ in fresh},
            )
            if self._log.roll_if_full():
                self._db.commit()
        return results

    def calls(self, attempt_id: str) -> list[Call]:
        """The calls of an attempt in the order they were recorded, prompts whole."""
        if attempt_id in self._live:
            return [call for call, _ in self._live[attempt_id]]
        rows = self._db.execute(
            "select segment, batch, row from calls where attempt_id = ? order by seq", (attempt_id,)
        ).fetchall()
        earlier: dict[str, Call] = {}
        for segment, batch, row in rows:
            call = call_from_row(self._log.read(segment, batch).slice(row, 1), earlier)
            earlier[call.call_id] = call
        return list(earlier.values())

    def live_calls(self, attempt_id: str) -> list[Call]:
        """The calls so far of an attempt that takes more.

        Raises:
            UnknownAttempt, AttemptOver: see there.
        """
        if refusal := self._refusal(attempt_id):
            raise refusal
        return [call for call, _ in self._live_calls(attempt_id)]

    def texts(self, attempt_id: str) -> list[str]:
        """What the model sampled in each call of an attempt, decoded."""
        return [call.text for call in self.calls(attempt_id)]

    def close(self) -> None:
        self._db.commit()
        self._db.close()
        self._log.close()
        os.close(self._lock)

    # -- inside ---------------------------------------------------------------------------------

    @property
    def torn_bytes(self) -> int:
        """Bytes of an unfinished write that were cut off when the store was opened."""
        return self._log.torn_bytes

    def _refusal(self, attempt_id: str) -> StoreError | None:
        row = self._db.execute(
            "select ended_at from attempts where attempt_id = ?", (attempt_id,)
        ).fetchone()
        if row is None:
            return UnknownAttempt(f"there is no attempt {attempt_id}")
        return AttemptOver(f"attempt {attempt_id} has ended") if row[0] is not None else None

    def _live_calls(self, attempt_id: str) -> list[tuple[Call, np.ndarray]]:
        if attempt_id not in self._live:
            self._live[attempt_id] = [(call, call.full) for call in self.calls(attempt_id)]
        return self._live[attempt_id]

    def _index(self, entries: Iterable[tuple[str, str, int, int, int, int, int]]) -> None:
        self._db.executemany(
            "insert or ignore into calls (call_id, attempt_id, seq, sampled, segment, batch, row) "
            "values (?,?,?,?,?,?,?)",
            entries,
        )

    def _reindex(self) -> None:
        """Makes the index of the open segment agree with the log, which is the truth."""
        segment, batches = self._log.open_segment
        self._db.execute("delete from calls where segment = ? and batch >= ?", (segment, batches))
        for segment, ordinal, batch in self._log.open_batches():
            rows = batch.select(["call_id", "attempt_id", "seq", "tokens"]).to_pylist()
            self._index(
                (r["call_id"], r["attempt_id"], r["seq"], len(r["tokens"]), segment, ordinal, row)
                for row, r in enumerate(rows)
            )
        self._db.commit()

    def _select(self, sql: str, values: Sequence[str]) -> list[tuple]:
        """Runs a query with an `in (%s)` list of any length (SQLite takes 32,766 variables at
        most)."""
        rows: list[tuple] = []
        for start in range(0, len(values), 10_000):
            part = list(values[start : start + 10_000])
            rows += self._db.execute(sql % ",".join("?" * len(part)), part).fetchall()
        return rows
