"""The rollout store: lifecycle in SQLite, calls in the call log.

`RolloutStore` is plain and synchronous, and has one owner at a time (a lock on the store's folder).
A call is appended to the log and fsynced, nothing else; where it lies is stored in SQLite together
with the next lifecycle change, or before the next segment is opened, and after a crash it is found
again in the log.

Invariants: `append` returns only when the calls are on disk; what is asked for a second time with
the same content is done once and answered in the same way (`append` goes by call id); what fails
has changed nothing; a call's prompt is stored as its difference from an earlier call of the same
attempt, so a long attempt costs its length, not its square; a rollout has at most one reward; an
attempt that has ended takes no more calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
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
from lightning_ray.store.database import Database, Place
from lightning_ray.store.encoding import (
    call_from_row,
    call_to_row,
    finished_from_row,
    finished_to_json,
    longest_shared_prefix,
)
from lightning_ray.store.errors import (
    AttemptOver,
    CorruptSegment,
    DuplicateReward,
    StoreError,
    StoreLocked,
    UnknownAttempt,
)
from lightning_ray.store.keys import Keys
from lightning_ray.store.log import SEGMENT_BYTES, CallLog
from lightning_ray.store.queries import Queries


class RolloutStore:
    """The store in `directory` (a local POSIX path: SQLite does not work on NFS).

    Raises:
        StoreLocked: another live process owns it.
        CorruptSegment: see there.
        OSError, sqlite3.OperationalError: the disk refused.
    """

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        with contextlib.ExitStack() as opened:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            opened.callback(os.close, _lock(directory))
            self._db = Database(directory / "rollouts.sqlite")
            opened.callback(self._db.close)
            known = self._db.batches()
            self._log = CallLog(directory / "calls", CALL_SCHEMA, segment_bytes, known)
            opened.callback(self._log.close)
            # The calls of live attempts with their full token sequences, to find a new call's
            # parent.
            self._live: dict[str, list[tuple[Call, np.ndarray]]] = {}
            self._reindex(known)
            self._keys = Keys(directory)
            self.queries = Queries(self._db, self.calls)
            self._opened = opened.pop_all()

    @property
    def epoch(self) -> int:
        """How often the store has been opened."""
        return self._db.epoch

    @property
    def torn(self) -> list[Path]:
        """What was cut off of a segment when the store was opened: the unfinished write of a crash,
        which nobody has seen. It is kept in these files."""
        return self._log.torn

    @property
    def gate_is_open(self) -> bool:
        """Whether model calls may begin; True in a new store."""
        return self._db.meta("gate") != "closed"

    def set_gate(self, is_open: bool) -> None:
        self._db.set_meta("gate", "open" if is_open else "closed")

    # -- rollouts and attempts ------------------------------------------------------------------

    def create_rollouts(self, specs: Iterable[RolloutSpec]) -> dict[str, Known]:
        """Adds rollouts that are not known yet; returns how each of them stands, by id."""
        asked = {
            s.rollout_id: (s.group_id, s.split, json.dumps(vars(s.task), sort_keys=True), s.step)
            for s in specs
        }
        with self._db.write():
            self._db.executemany(
                "insert or ignore into rollouts (rollout_id, group_id, split, "
                "task, step, state) values (?,?,?,?,?,?)",
                [(rollout_id, *spec, "queued") for rollout_id, spec in asked.items()],
            )
        rows = self._db.select(
            "select rollout_id, attempts, finished is not null, (select max(number) from attempts "
            "where attempts.rollout_id = rollouts.rollout_id and ended_at is null), group_id, "
            "split, task from rollouts where rollout_id in (%s)",
            list(asked),
        )
        return {
            # The step may differ: a run that was killed may queue it again in an earlier one.
            rollout_id: Known(attempts, bool(over), tuple(stored) == asked[rollout_id][:-1], opened)
            for rollout_id, attempts, over, opened, *stored in rows
        }

    def start_attempt(
        self, attempt_id: str, rollout_id: str, number: int, key_hash: str, started_at: float
    ) -> None:
        """Makes the attempt's key valid. `key_hash` is the SHA-256 of the key, in hex.

        Raises:
            StoreError: the attempt is there with another key.
        """
        with self._db.write():
            started = self._db.execute(
                "insert or ignore into attempts (attempt_id, rollout_id, number, "
                "key_hash, started_at) values (?,?,?,?,?)",
                (attempt_id, rollout_id, number, key_hash, started_at),
            )
            if started.rowcount:
                self._db.execute(
                    "update rollouts set state = 'running', attempts = "
                    "max(attempts, ?) where rollout_id = ?",
                    (number + 1, rollout_id),
                )
                return
        known = self.attempt(attempt_id)
        if known is None or known.key_hash != key_hash:
            raise StoreError(f"attempt {attempt_id} was started before, with another key")

    def end_attempt(
        self, attempt_id: str, outcome: Outcome, detail: str, ended_at: float
    ) -> AttemptSummary:
        """Ends the attempt: its key is dead from here on."""
        with self._db.write():
            ended = self._db.execute(
                "update attempts set outcome = ?, detail = ?, ended_at = ? where "
                "attempt_id = ? and ended_at is null",
                (outcome, detail, ended_at, attempt_id),
            )
            if ended.rowcount and not outcome.caused_by_policy:  # until another one begins
                sql = "update rollouts set state = 'queued' where finished is null and rollout_id "
                sql += "= (select rollout_id from attempts where attempt_id = ?)"
                self._db.execute(sql, (attempt_id,))
        self._live.pop(attempt_id, None)
        counted = self._db.execute(
            "select count(*), (select last_fault from attempts where attempt_id = ?) from calls "
            "where attempt_id = ?",
            (attempt_id, attempt_id),
        ).fetchone()
        return AttemptSummary(*counted)

    def end_orphans(self, ended_at: float, keep: Iterable[str] = ()) -> int:
        """Ends the attempts that a crashed run left open, except `keep`, which run on; returns how
        many."""
        kept = json.dumps(list(keep))
        with self._db.write():
            ended = self._db.execute(
                "update attempts set outcome = ?, detail = 'the run was stopped', ended_at = ? "
                "where ended_at is null and attempt_id not in (select value from json_each(?))",
                (Outcome.NODE_LOST, ended_at, kept),
            )
            self._db.execute(
                "update rollouts set state = 'queued' where state in ('running', 'grading') "
                "and rollout_id not in (select rollout_id from attempts where ended_at is null)"
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
        with self._db.write():
            self._db.execute(
                "update attempts set last_fault = ? where attempt_id = ?", (status, attempt_id)
            )

    def finish_rollout(self, finished: FinishedRollout) -> None:
        """Puts a rollout into its final state; a second time changes nothing."""
        with self._db.write():
            self._db.execute(
                "update rollouts set state = ?, finished = ? where "
                "rollout_id = ? and finished is null",
                (finished.state, finished_to_json(finished), finished.spec.rollout_id),
            )

    def finished(self, rollout_ids: Sequence[str]) -> list[FinishedRollout]:
        """Those of `rollout_ids` that are in a final state."""
        rows = self._db.select(
            "select rollout_id, group_id, split, step, task, finished from rollouts "
            "where finished is not null and rollout_id in (%s)",
            rollout_ids,
        )
        return [finished_from_row(row) for row in rows]

    # -- rewards --------------------------------------------------------------------------------

    def post_reward(self, rollout_id: str, reward: Reward, source: str) -> None:
        """Stores the reward of a rollout.

        Raises:
            DuplicateReward: it has another one, which stays.
            StoreError: there is no such rollout.
        """
        with self._db.write():
            self._db.execute(
                "insert or ignore into rewards select rollout_id, ?, ?, ?, ? from rollouts "
                "where rollout_id = ?",
                (reward.value, reward.solved, json.dumps(reward.metrics), source, rollout_id),
            )
        row = self._db.execute(
            "select source from rewards where rollout_id = ?", (rollout_id,)
        ).fetchone()
        if row is None:
            raise StoreError(f"there is no rollout {rollout_id}")
        if row[0] != source or self.reward(rollout_id) != reward:
            raise DuplicateReward(f"rollout {rollout_id} already has a reward; the first one stays")

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
            OSError, sqlite3.OperationalError: the disk refused; none of them is stored.
        """
        self._db.check_owner()
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
            if self._log.is_full:
                # The index is behind in the newest segment only.
                self._db.flush()
                self._log.roll()
            segment, batch = self._log.append(pa.RecordBatch.from_pylist(rows, CALL_SCHEMA))
            for call, full in fresh:
                self._live[call.attempt_id].append((call, full))
            self._db.index(
                Place(
                    call.call_id, call.attempt_id, call.seq, len(call.tokens), segment, batch, row
                )
                for row, (call, _) in enumerate(fresh)
            )
        return results

    def calls(self, attempt_id: str) -> list[Call]:
        """The calls of an attempt in the order they were recorded, prompts whole.

        Raises:
            CorruptSegment: see there.
        """
        if attempt_id in self._live:
            return [call for call, _ in self._live[attempt_id]]
        rows = self._db.execute(
            "select call_id, segment, batch, row from calls where attempt_id = ? order by seq",
            (attempt_id,),
        ).fetchall()
        earlier: dict[str, Call] = {}
        for call_id, segment, batch, row in rows:
            found = self._log.read(segment, batch).slice(row, 1)
            if found["call_id"].to_pylist() != [call_id]:
                path = str(self._log.path(segment))
                raise CorruptSegment(path, 0, f"call {call_id} is not where it was written")
            earlier[call_id] = call_from_row(found, earlier)
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
        return self.said(attempt_id)[0]

    def said(self, attempt_id: str) -> tuple[list[str], int]:
        """`texts`, and the number of tokens of the longest prompt."""
        calls = self.calls(attempt_id)
        return [call.text for call in calls], max((len(call.prompt) for call in calls), default=0)

    def close(self) -> None:
        # The next owner, if there is none yet, finds the calls in the log.
        with contextlib.suppress(sqlite3.OperationalError, StoreLocked):
            self._db.flush()
        self._opened.close()

    # -- inside ---------------------------------------------------------------------------------

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

    def _reindex(self, known: Mapping[int, int]) -> None:
        """Indexes the calls that only the log knows; the index has `known` batches of segments."""
        for segment in self._log.segments:
            if segment < max(known, default=0):
                continue
            for batch in range(known.get(segment, 0), self._log.batches(segment)):
                columns = self._log.read(segment, batch).select(
                    ["call_id", "attempt_id", "seq", "tokens"]
                )
                self._db.index(
                    Place(call_id, attempt_id, seq, len(tokens), segment, batch, row)
                    for row, (call_id, attempt_id, seq, tokens) in enumerate(
                        zip(*(column.to_pylist() for column in columns), strict=True)
                    )
                )
        self._db.flush()
        self._log.seal()


def _lock(directory: Path) -> int:
    """Locks the folder of a store as long as the descriptor is open. Raises `StoreLocked`."""
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise StoreLocked(
            f"{directory} is in use by another run; stop it or choose another run.dir"
        ) from error
    return lock
