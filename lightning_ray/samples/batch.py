"""One training batch: finished groups in, an Arrow table of weighted rows and a balanced ledger
out.

Rewards become one advantage per rollout, from whole groups; a rollout that infrastructure spoiled
leaves the baseline. The usable rollouts are dealt to the optimizer steps, and every trained token
gets the weight 1 / (R x T): R the usable rollouts of its optimizer step, zero advantages included,
T the trained tokens of its rollout. The loss is then a plain sum over tokens, whatever the rows,
micro-batches or ranks.

Invariants: a rollout is whole within one optimizer step; the weights of a rollout sum to 1 / R;
every sampled token has exactly one fate and the fates add up (`LedgerImbalance` otherwise).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_ray.config import RunConfig
from lightning_ray.records import Call, FinishedRollout
from lightning_ray.samples.rows import Fate, Row, rows

# Rewards of R rollouts and the group of each, to one advantage of each:
# `trainer.advantages.estimator`.
Estimator = Callable[[Sequence[float], Sequence[str]], Sequence[float]]

ROW_SCHEMA = pa.schema(
    [
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("attempt_id", pa.string(), nullable=False),
        pa.field(
            "calls", pa.list_(pa.int32()), nullable=False
        ),  # seq of each call trained in this row
        pa.field("optimizer_step", pa.int32(), nullable=False),  # within the batch, from 0
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("advantage", pa.float32(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("trainable", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),  # 0 where not sampled
        pa.field(
            "steps", pa.list_(pa.int32()), nullable=False
        ),  # policy step; -1 where not sampled
        pa.field("weight", pa.list_(pa.float32()), nullable=False),  # 0 where not trainable
    ]
)


class LedgerImbalance(RuntimeError):
    """Sampled tokens were lost or counted twice: a bug, and training on would hide it."""


@dataclass(frozen=True)
class Ledger:
    """How many tokens were sampled for the batch, and what became of them."""

    sampled: int
    fates: Mapping[Fate, int]

    def __post_init__(self) -> None:
        accounted = sum(self.fates.values())
        if self.sampled != accounted:
            fates = ", ".join(f"{count} {fate}" for fate, count in self.fates.items())
            raise LedgerImbalance(
                f"{self.sampled} tokens were sampled for this batch but {accounted} are accounted "
                f"for: {fates}. Nothing was trained; please report this with the run's store"
            )


@dataclass(frozen=True)
class Batch:
    """What one update trains on. `statistics` are numbers for the run's metrics."""

    table: pa.Table
    ledger: Ledger
    statistics: Mapping[str, float] = field(default_factory=dict)


def build(
    rollouts: Sequence[FinishedRollout],
    calls: Mapping[str, Sequence[Call]],
    config: RunConfig,
    estimator: Estimator,
) -> Batch:
    """The batch made from whole groups.

    Args:
        rollouts: every rollout of the groups, usable or not.
        calls: each attempt's calls by attempt id, abandoned attempts included.
        estimator: see `Estimator`.

    Raises:
        LedgerImbalance: the fates of the sampled tokens do not add up.
    """
    usable = [rollout for rollout in rollouts if rollout.usable]
    advantages = _advantages(usable, estimator)
    fates: Counter[Fate] = Counter()
    laid_out: dict[str, list[Row]] = {}
    for rollout in usable:
        mine = calls.get(rollout.attempt_id, ())
        if advantages[rollout.spec.rollout_id]:
            laid_out[rollout.spec.rollout_id], counted = rows(
                rollout.spec.rollout_id, mine, config.max_row_tokens
            )
            fates += counted
        else:
            fates[Fate.ZERO_ADVANTAGE] += _sampled(mine)
    kept = {rollout.attempt_id for rollout in usable}
    fates[Fate.INFRA] += sum(
        _sampled(some) for attempt, some in calls.items() if attempt not in kept
    )

    table = _table(usable, advantages, laid_out, config.trainer.optimizer_steps)
    # The table is what will be trained: count there, not in what was meant to go into it.
    fates[Fate.TRAINED] = pc.sum(pc.list_flatten(table["trainable"])).as_py() or 0
    ledger = Ledger(sum(map(_sampled, calls.values())), fates)
    return Batch(table, ledger, _statistics(rollouts, usable, advantages, table, ledger))


def _advantages(usable: Sequence[FinishedRollout], estimator: Estimator) -> dict[str, float]:
    """One advantage per rollout id; 0 in a group without two different rewards."""
    groups: dict[str, list[FinishedRollout]] = defaultdict(list)
    for rollout in usable:
        groups[rollout.spec.group_id].append(rollout)
    telling = [
        rollout
        for group in groups.values()
        if len({_reward(r) for r in group}) > 1
        for rollout in group
    ]
    found = {rollout.spec.rollout_id: 0.0 for rollout in usable}
    if telling:
        values = estimator([_reward(r) for r in telling], [r.spec.group_id for r in telling])
        found |= {r.spec.rollout_id: float(v) for r, v in zip(telling, values, strict=True)}
    return found


def _table(
    usable: Sequence[FinishedRollout],
    advantages: Mapping[str, float],
    laid_out: Mapping[str, list[Row]],
    optimizer_steps: int,
) -> pa.Table:
    # Rollouts that say something are dealt first, so that each optimizer step gets an equal part of
    # them.
    dealt = sorted(usable, key=lambda rollout: not laid_out.get(rollout.spec.rollout_id))
    columns: dict[str, list] = {name: [] for name in ROW_SCHEMA.names}
    for number, rollout in enumerate(dealt):
        step = number % optimizer_steps
        rollouts_of_step = len(range(step, len(dealt), optimizer_steps))
        mine = laid_out.get(rollout.spec.rollout_id, [])
        trained = sum(int(row.trainable_T.sum()) for row in mine)
        for row in mine:
            columns["rollout_id"].append(row.rollout_id)
            columns["group_id"].append(rollout.spec.group_id)
            columns["attempt_id"].append(row.attempt_id)
            columns["calls"].append(row.calls)
            columns["optimizer_step"].append(step)
            columns["reward"].append(_reward(rollout))
            columns["advantage"].append(advantages[row.rollout_id])
            columns["tokens"].append(row.tokens_T)
            columns["trainable"].append(row.trainable_T)
            columns["logprobs"].append(row.logprobs_T)
            columns["steps"].append(row.steps_T)
            columns["weight"].append(row.trainable_T / (rollouts_of_step * trained))
    return pa.Table.from_pydict(columns, schema=ROW_SCHEMA)


def _statistics(
    rollouts: Sequence[FinishedRollout],
    usable: Sequence[FinishedRollout],
    advantages: Mapping[str, float],
    table: pa.Table,
    ledger: Ledger,
) -> dict[str, float]:
    groups = {rollout.spec.group_id for rollout in rollouts}
    telling = {r.spec.group_id for r in usable if advantages[r.spec.rollout_id]}
    sizes = Counter(rollout.spec.group_id for rollout in usable)
    small = sum(sizes[group] < 2 for group in groups)
    lengths = pc.list_value_length(table["tokens"]).to_pylist()
    rewards = [_reward(rollout) for rollout in usable]
    return {
        "batch/rollouts": len(rollouts),
        "batch/rollouts_usable": len(usable),
        "batch/groups": len(groups),
        "batch/groups_too_small": small,
        "batch/groups_without_signal": len(groups) - len(telling) - small,
        "batch/rows": table.num_rows,
        "batch/row_tokens_mean": float(np.mean(lengths)) if lengths else 0.0,
        "batch/row_tokens_max": max(lengths, default=0),
        "reward/mean": float(np.mean(rewards)) if rewards else 0.0,
        "reward/std": float(np.std(rewards)) if rewards else 0.0,
        "reward/solve_rate": float(np.mean([r.reward.solved for r in usable if r.reward]))
        if usable
        else 0.0,
        "ledger/sampled": ledger.sampled,
        **{f"ledger/{fate}": ledger.fates.get(fate, 0) for fate in Fate},
    }


def _reward(rollout: FinishedRollout) -> float:
    assert rollout.reward is not None  # usable means that it has one
    return float(rollout.reward.value)


def _sampled(calls: Sequence[Call]) -> int:
    return sum(len(call.tokens) for call in calls)
