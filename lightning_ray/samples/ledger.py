"""The ledger of a batch: every sampled token and what became of it.

One row per call, so `sampled = trained + masked + truncated + orphaned + side + constrained + stale
+ zero_advantage + infra` holds for a call, a rollout and the batch alike, and each part has its
reason.

Invariants: `Ledger.make` refuses a batch in which a call has no fate or two, or in which what the
ledger calls trained is not what the rows train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa

from lightning_ray.records import Call
from lightning_ray.samples.rows import CallFate, Fate, Row

LEDGER_SCHEMA = pa.schema(
    [
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("attempt_id", pa.string(), nullable=False),
        pa.field("seq", pa.int32(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),  # sampled by this call
        pa.field("fate", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
    ]
)


class LedgerImbalance(RuntimeError):
    """Sampled tokens were lost or counted twice: a bug, and training on would hide it."""


@dataclass(frozen=True)
class Ledger:
    """`fates` counts tokens by fate; `table` has the columns of `LEDGER_SCHEMA`."""

    table: pa.Table
    fates: Mapping[Fate, int]

    @property
    def sampled(self) -> int:
        """All tokens sampled for the batch."""
        return sum(self.fates.values())

    @staticmethod
    def make(
        calls: Mapping[str, Sequence[Call]],
        fates: Mapping[str, Iterable[CallFate]],
        trained: Iterable[Row],
    ) -> Ledger:
        """Balances the books.

        Args:
            calls: each attempt's calls by attempt id.
            fates: of every call, by rollout id.
            trained: the rows that will be trained.

        Raises:
            LedgerImbalance: they do not add up.
        """
        sampled = {(a, call.seq): len(call.tokens) for a, some in calls.items() for call in some}
        in_rows: Counter[tuple[str, int]] = Counter()
        for row in trained:
            seqs, counts = np.unique(row.calls_T[row.trainable_T], return_counts=True)
            for seq, count in zip(seqs.tolist(), counts.tolist(), strict=True):
                in_rows[row.attempt_id, seq] += count
        totals: Counter[Fate] = Counter()
        entries, booked = [], Counter[tuple[str, int]]()
        for rollout_id, some in fates.items():
            for fate in some:
                key = (fate.attempt_id, fate.seq)
                booked[key] += 1
                in_loss = in_rows.pop(key, 0)
                expected = fate.tokens if fate.fate is Fate.TRAINED else 0
                if fate.tokens != sampled.get(key) or in_loss != expected:
                    raise _imbalance(
                        f"call {fate.seq} of {fate.attempt_id} sampled {sampled.get(key)} tokens, "
                        f"is booked with {fate.tokens} as {fate.fate}, and {in_loss} of them are "
                        "in training rows"
                    )
                totals[fate.fate] += fate.tokens
                entries.append({"rollout_id": rollout_id, **asdict(fate)})
        wrong = [key for key in sampled if booked[key] != 1] + list(in_rows)
        if wrong:
            attempt, seq = wrong[0]
            raise _imbalance(f"call {seq} of {attempt} is booked {booked[wrong[0]]} times")
        return Ledger(pa.Table.from_pylist(entries, schema=LEDGER_SCHEMA), totals)


def _imbalance(what: str) -> LedgerImbalance:
    return LedgerImbalance(
        f"{what}. Nothing was trained; please report this with the run's store directory"
    )
