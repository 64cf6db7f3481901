"""Why a token was trained, and how: the ledger of a rollout, and one token's way into the loss.

Reads the store, the batches and the ledgers of a run directory; the run must not be going on.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.table import Table

from lightning_ray.records import Call
from lightning_ray.samples import dataset
from lightning_ray.store.rollouts import RolloutStore


class NothingToExplain(LookupError):
    """There is no such run, rollout or token, or a file of it is gone; the message says which."""


def ledger(run_dir: Path, rollout_id: str) -> tuple[Table, str]:
    """A table of what became of each call of a rollout, and a sentence with the totals.

    Raises:
        NothingToExplain: no batch of the run has the rollout, or its file is gone.
    """
    step, entries, rows = _find(run_dir, rollout_id)
    shown = Table(title=f"{rollout_id}, in the batch of step {step}")
    for column in ("attempt", "call", "tokens", "fate", "reason"):
        shown.add_column(column, justify="right" if column in ("call", "tokens") else "left")
    totals: Counter[str] = Counter()
    for entry in entries.to_pylist():
        totals[entry["fate"]] += entry["tokens"]
        shown.add_row(*(str(entry[k]) for k in ("attempt_id", "seq", "tokens", "fate", "reason")))
    parts = " + ".join(f"{count} {fate}" for fate, count in totals.items())
    reward = f"reward {rows['reward'][0].as_py():g}, " if rows.num_rows else ""
    return shown, f"{reward}{rows.num_rows} training rows; {totals.total()} sampled = {parts}"


def token(run_dir: Path, rollout_id: str, number: int) -> dict[str, str]:
    """All about the sampled token `number` of a rollout: its sampled tokens are counted from 0,
    call after call, over all attempts.

    Raises:
        NothingToExplain: there is no such rollout or token, or the store or batch is gone.
        StoreLocked: the run is going on.
    """
    step, entries, rows = _find(run_dir, rollout_id)
    sampled = sum(entries["tokens"].to_pylist())
    if not 0 <= number < sampled:
        raise NothingToExplain(f"{rollout_id} has the sampled tokens 0 to {sampled - 1}")
    place = number
    for entry in sorted(entries.to_pylist(), key=lambda e: (e["attempt_id"], e["seq"])):
        if place < entry["tokens"]:
            break
        place -= entry["tokens"]
    call = _call(run_dir, entry["attempt_id"], entry["seq"])
    span_of = np.repeat(range(len(call.spans)), [span.length for span in call.spans])
    version = call.spans[span_of[place]].version
    facts = {
        "token": f"{call.tokens[place]} (number {place} of call {call.seq} of {call.attempt_id})",
        "call": f"{call.call_id}, branch {call.branch}, finished by {call.finish_reason}",
        "request": f"{call.dialect} {call.request}, model asked for: {call.model or '-'}",
        "policy": f"step {version.step} of lineage {version.lineage}",
        "log-probability": f"{call.logprobs[place]:.6g} when it was sampled",
        "batch": f"step {step}",
        "fate": f"{entry['fate']}: {entry['reason']}",
    }
    return facts | _in_loss(rows, call, place)


def _in_loss(rows: pa.Table, call: Call, place: int) -> dict[str, str]:
    for number, row in enumerate(rows.to_pylist()):
        mine = np.flatnonzero(np.array(row["trainable"]) & (np.array(row["calls"]) == call.seq))
        if row["attempt_id"] == call.attempt_id and len(mine):
            at = int(mine[place])
            return {
                "row": f"{number + 1} of {rows.num_rows}, position {at} of {len(row['tokens'])}, "
                f"optimizer step {row['optimizer_step'] + 1}",
                "advantage": f"{row['advantage'][at]:.6g} (reward {row['reward']:g})",
                "weight": f"{row['weight'][at]:.6g}",
            }
    return {}


def _find(run_dir: Path, rollout_id: str) -> tuple[int, pa.Table, pa.Table]:
    if not (run_dir / "ledger").is_dir():
        raise NothingToExplain(f"{run_dir} has no ledger: no run has made an update there yet")
    try:
        found = dataset.find(run_dir, rollout_id)
    except FileNotFoundError as error:
        raise NothingToExplain(
            f"a ledger of {run_dir} has {rollout_id}, but its rows are not there: {error}"
        ) from error
    if found is None:
        raise NothingToExplain(
            f"no batch of {run_dir} has a rollout {rollout_id!r}. Ids are the names of the folders "
            f"in {run_dir / 'rollouts'}; validation (v...) is never trained on"
        )
    return found


def _call(run_dir: Path, attempt_id: str, seq: int) -> Call:
    folder = run_dir / "store"
    if not folder.is_dir():
        raise NothingToExplain(f"{run_dir} has no store, where its calls would be")
    store = RolloutStore(folder)
    try:
        calls = {call.seq: call for call in store.calls(attempt_id)}
    finally:
        store.close()
    if seq not in calls:
        raise NothingToExplain(f"{folder} has no call {seq} of attempt {attempt_id}")
    return calls[seq]
