"""What operators look up in the store, and the events that they add.

`Queries` reads the tables of `RolloutStore` on the same connection and owns one more, `events`.

Invariants: every list comes in pages with a bounded number of rows and tokens; a page's `next` is
given as soon as there is one more row, so following it ends; an event stored twice is one event.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning_ray.records import Call, Json, RolloutSpec
from lightning_ray.store.database import Database
from lightning_ray.store.encoding import spec_from_row
from lightning_ray.views import (
    AttemptView,
    CallPage,
    CallQuery,
    CallView,
    Event,
    EventPage,
    PageQuery,
    RolloutDetail,
    RolloutPage,
    RolloutQuery,
    RolloutSummary,
    TokenIds,
)

_TABLES = """
create table if not exists events (
    seq integer primary key autoincrement, event_id text not null unique, rollout_id text not null,
    kind text not null, data text not null, time real not null);
create index if not exists events_by_rollout on events (rollout_id, seq);
"""
# Token ids in one page of calls: some megabytes of JSON.
MOST_TOKENS = 500_000
_ROLLOUT = """
select rollouts.rowid as place, rollout_id, group_id, split, step, state, attempts, finished,
    json_extract(task, '$.task_id') as task_id, value, solved, metrics, source
from rollouts left join rewards using (rollout_id)"""


class Queries:
    """Reads through `db`; `calls` gives the calls of an attempt."""

    def __init__(self, db: Database, calls: Callable[[str], list[Call]]) -> None:
        self._db, self._calls = db, calls
        db.executescript(_TABLES)

    def rollouts(self, query: RolloutQuery) -> RolloutPage:
        """A page of rollouts in the order in which they were created."""
        wanted = {
            "rollouts.rowid > ?": query.after,
            "state = ?": query.state,
            "split = ?": query.split,
            "step = ?": query.step,
        }
        wanted = {test: value for test, value in wanted.items() if value is not None}
        where = f" where {' and '.join(wanted)}" if wanted else ""
        rows = self._rows(
            f"{_ROLLOUT}{where} order by rollouts.rowid limit ?", *wanted.values(), query.limit + 1
        )
        shown = rows[: query.limit]
        return RolloutPage(
            rollouts=[RolloutSummary(**_summary(row)) for row in shown],
            next=shown[-1]["place"] if len(rows) > len(shown) else None,
        )

    def rollout(self, rollout_id: str, with_fields: bool = False) -> RolloutDetail | None:
        """All about a rollout but its calls; None if there is none."""
        rows = self._rows(f"{_ROLLOUT} where rollout_id = ?", rollout_id)
        if not rows:
            return None
        task = json.loads(
            self._rows("select task from rollouts where rollout_id = ?", rollout_id)[0]["task"]
        )
        finished = json.loads(rows[0]["finished"] or "{}")
        ending = ("detail", "queued_s", "running_s", "grading_s")
        with self._db.indexed():
            tries = self._rows(
                "select attempt_id, number, started_at, ended_at, outcome, detail, last_fault, "
                "count(call_id) as calls, coalesce(sum(sampled), 0) as sampled_tokens "
                "from attempts left join calls using (attempt_id) where rollout_id = ? "
                "group by attempt_id order by number",
                rollout_id,
            )
        return RolloutDetail(
            **_summary(rows[0]),
            statement=task["statement"],
            fields=task["fields"] if with_fields else None,
            tries=[AttemptView(**attempt) for attempt in tries],
            reward_source=rows[0]["source"],
            **{name: finished[name] for name in ending if name in finished},
        )

    def open_attempts(self) -> dict[str, int]:
        """The attempts that have not ended, with the number of their calls."""
        with self._db.indexed():
            rows = self._rows(
                "select attempt_id, count(call_id) as calls from attempts "
                "left join calls using (attempt_id) where ended_at is null group by attempt_id"
            )
        return {row["attempt_id"]: row["calls"] for row in rows}

    def unfinished(self) -> list[RolloutSpec]:
        """What operators asked for (rollouts that are a group of their own) and is not over, oldest
        first."""
        rows = self._db.execute(
            "select rollout_id, group_id, split, step, task from rollouts "
            "where finished is null and group_id = rollout_id order by rowid"
        )
        return [spec_from_row(row) for row in rows]

    def calls(self, rollout_id: str, query: CallQuery) -> CallPage | None:
        """A page of the calls of one attempt; None if there is no such rollout or attempt. A
        rollout without attempts has no calls."""
        known = self._rows("select attempts from rollouts where rollout_id = ?", rollout_id)
        found = self._rows(
            "select attempt_id from attempts where rollout_id = ? and number = coalesce(?, number) "
            "order by number desc limit 1",
            rollout_id,
            query.attempt,
        )
        if not found:
            first = known and query.attempt is None
            return CallPage(calls=[], next=None) if first else None
        after = -1 if query.after is None else query.after
        calls = [call for call in self._calls(found[0]["attempt_id"]) if call.seq > after]
        shown = calls[: query.limit]
        if query.tokens:
            shown = shown[: _fitting([len(c.prompt) + len(c.tokens) for c in shown])]
        return CallPage(
            calls=[_call_view(call, query.tokens) for call in shown],
            next=shown[-1].seq if len(calls) > len(shown) else None,
        )

    def add_event(
        self, event_id: str, rollout_id: str, kind: str, data: Json, time: float
    ) -> Event | None:
        """Stores an event; None if there is no such rollout. `event_id` makes it the same event
        when it is stored again."""
        with self._db.write():
            self._db.execute(
                "insert or ignore into events (event_id, rollout_id, kind, data, time) "
                "select ?, rollout_id, ?, ?, ? from rollouts where rollout_id = ?",
                (event_id, kind, json.dumps(data), time, rollout_id),
            )
        rows = self._rows("select * from events where event_id = ?", event_id)
        return _event(rows[0]) if rows else None

    def note_canary(self, attempt_id: str, call: int, canary: str) -> None:
        """Keeps, as an event, that an attempt's call (from 0) had a canary in it."""
        with self._db.write():
            self._db.execute(
                "insert or ignore into events (event_id, rollout_id, kind, data, time) "
                "select ?, rollout_id, 'canary', ?, ? from attempts where attempt_id = ?",
                (
                    f"canary-{attempt_id}",  # the first one of an attempt is enough
                    json.dumps({"attempt": attempt_id, "call": call, "canary": canary}),
                    time.time(),
                    attempt_id,
                ),
            )

    def canary(self, attempt_id: str) -> str | None:
        """Which call of an attempt had a canary, for people; None if none is noted."""
        rows = self._rows("select data from events where event_id = ?", f"canary-{attempt_id}")
        if not rows:
            return None
        data = json.loads(rows[0]["data"])
        return (
            f"call {data['call']} of attempt {attempt_id} read or said a canary ({data['canary']})"
        )

    def events(self, rollout_id: str, query: PageQuery) -> EventPage | None:
        """A page of a rollout's events in the order in which they came; None if there is no such
        rollout."""
        if not self._rows("select 1 from rollouts where rollout_id = ?", rollout_id):
            return None
        rows = self._rows(
            "select * from events where rollout_id = ? and seq > ? order by seq limit ?",
            rollout_id,
            query.after or 0,
            query.limit + 1,
        )
        shown = rows[: query.limit]
        return EventPage(
            events=[_event(row) for row in shown],
            next=shown[-1]["seq"] if len(rows) > len(shown) else None,
        )

    def _rows(self, sql: str, *values: object) -> list[dict[str, Any]]:
        cursor = self._db.execute(sql, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    ended = json.loads(row["finished"] or "{}")
    reward = ended.get("reward")  # of the run's grader; `rewards` has what was posted
    if row["value"] is not None:
        metrics = json.loads(row["metrics"])
        reward = {"value": row["value"], "solved": bool(row["solved"]), "metrics": metrics}
    columns = ("rollout_id", "group_id", "task_id", "split", "step", "state", "attempts")
    return {name: row[name] for name in columns} | {
        "reward": reward,
        "outcome": ended.get("outcome"),
    }


def _event(row: dict[str, Any]) -> Event:
    return Event(**row | {"data": json.loads(row["data"])})


def _fitting(sizes: Sequence[int]) -> int:
    """How many of `sizes`, at least one, are no more than `MOST_TOKENS` together."""
    total = 0
    for number, size in enumerate(sizes):
        total += size
        if number and total > MOST_TOKENS:
            return number
    return len(sizes)


def _call_view(call: Call, with_tokens: bool) -> CallView:
    tokens = None
    if with_tokens:
        tokens = TokenIds(
            prompt=call.prompt.tolist(),
            sampled=call.tokens.tolist(),
            logprobs=call.logprobs.tolist(),
        )
    names = "call_id attempt_id seq turn finish_reason branch side dialect model constrained"
    same = {name: getattr(call, name) for name in names.split()}
    return CallView(
        **same,
        prompt_tokens=len(call.prompt),
        sampled_tokens=len(call.tokens),
        cached_tokens=call.cached_tokens,
        spans=list(call.spans),
        started_at=call.started_at,
        seconds=call.seconds,
        tokens=tokens,
    )
