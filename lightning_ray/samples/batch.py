"""One training batch: finished groups in, an Arrow table of weighted rows and a balanced ledger
out.

Rewards become one advantage per rollout, from whole groups; a rollout that infrastructure spoiled
leaves the baseline. The usable rollouts are dealt to the optimizer steps, and every trained token
gets a weight, by default 1 / (R x T): R the usable rollouts of its optimizer step, zero advantages
included, T the trained tokens of its rollout. The loss is then a plain sum over tokens, whatever
the rows, micro-batches or ranks.

Invariants: a rollout is whole within one optimizer step; with the default normalization the weights
of a rollout sum to 1 / R; every sampled token has exactly one fate (`LedgerImbalance` otherwise).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_ray.config import RunConfig
from lightning_ray.records import Call, FinishedRollout, Outcome, RolloutState
from lightning_ray.samples.ledger import Ledger
from lightning_ray.samples.rows import CallFate, Fate, Layout, Row, rows

ROW_SCHEMA = pa.schema(
    [
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("attempt_id", pa.string(), nullable=False),
        pa.field("optimizer_step", pa.int32(), nullable=False),  # within the batch, from 0
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("trainable", pa.list_(pa.bool_()), nullable=False),
        # seq of the call that sampled the token; -1 where not sampled
        pa.field("calls", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),  # 0 where not sampled
        # policy step; -1 where not sampled
        pa.field("steps", pa.list_(pa.int32()), nullable=False),
        pa.field("advantage", pa.list_(pa.float32()), nullable=False),  # 0 where not trainable
        pa.field("weight", pa.list_(pa.float32()), nullable=False),  # 0 where not trainable
    ]
)


@dataclass(frozen=True)
class Estimator:
    """`advantages` turns the rewards of R rollouts, the group and the sampled tokens of each, into
    one advantage of each; `by_group` says whether it measures a rollout against its group."""

    advantages: Callable[[Sequence[float], Sequence[str], Sequence[int]], Sequence[float]]
    by_group: bool = True


# The advantages of a rollout's calls, given the rollout, its calls in order and its own advantage.
CallAdvantages = Callable[[FinishedRollout, Sequence[Call], float], Sequence[float]]


@dataclass(frozen=True)
class Batch:
    """What one update trains on. `statistics` are numbers for the run's metrics."""

    table: pa.Table
    ledger: Ledger
    statistics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Entry:
    """A rollout that counts, its rows, and the advantage of each of its calls by `seq`."""

    rollout: FinishedRollout
    rows: list[Row]
    advantages: Mapping[int, float]

    @property
    def speaks(self) -> bool:
        return any(self.advantages.values())


def build(
    rollouts: Sequence[FinishedRollout],
    calls: Mapping[str, Sequence[Call]],
    config: RunConfig,
    estimator: Estimator,
    call_advantages: CallAdvantages | None = None,
    replaced: Collection[str] = (),
    stale: Collection[str] = (),
) -> Batch:
    """The batch made from whole groups.

    Args:
        rollouts: every rollout of the groups, usable or not.
        calls: each attempt's calls by attempt id, abandoned attempts included.
        estimator: see there.
        call_advantages: see there; by default every call has its rollout's advantage.
        replaced: ids of groups without a signal for which others were collected: they are in the
            ledger, but not in R.
        stale: ids of groups that were given up, since their tokens are too old: likewise.

    Raises:
        LedgerImbalance: the fates of the sampled tokens do not add up.
    """
    layout = Layout(
        config.max_row_tokens,
        config.samples.merge,
        config.samples.train_side_calls,
        config.samples.train_constrained,
    )
    lengths = {attempt: sum(len(call.tokens) for call in some) for attempt, some in calls.items()}
    credits = advantages([r for r in rollouts if r.spec.group_id not in stale], estimator, lengths)
    # Terms that no advantage multiplies speak of every rollout of a group that has a signal.
    every = config.algorithm.entropy > 0 or config.algorithm.kl > 0
    signal = {r.spec.group_id for r in rollouts if credits.get(r.spec.rollout_id)}
    counted, fates = [], {}
    for rollout in rollouts:
        name, group = rollout.spec.rollout_id, rollout.spec.group_id
        mine = sorted(calls.get(rollout.attempt_id, ()), key=lambda call: call.seq)
        fate: list[CallFate] = []
        if group in stale and rollout.state is not RolloutState.FAILED:
            fate = _spoiled(mine, Fate.STALE, "its group is too old for this policy")
        elif not rollout.usable:
            why = rollout.detail if rollout.outcome is Outcome.VOID else "no reward"
            fate = _spoiled(mine, Fate.INFRA, f"{rollout.outcome}, {why}")
        elif name not in credits:
            fate = _spoiled(mine, Fate.MASKED, "fewer than two usable rollouts in its group")
        else:
            per_call = _per_call(rollout, mine, credits[name], call_advantages)
            made, fate = rows(name, mine, layout)
            entry = _Entry(rollout, made, per_call)
            if group not in signal or not (entry.speaks or every):
                reason = "it got its group's mean" if group in signal else "all of its group equal"
                fate = _spoiled(mine, Fate.ZERO_ADVANTAGE, reason)
                entry = _Entry(rollout, made, {})
            if group not in replaced:
                counted.append(entry)
        fates[name] = fate + [
            lost
            for attempt in _abandoned(rollout, calls)
            for lost in _spoiled(calls[attempt], Fate.INFRA, "an attempt that was given up")
        ]
    table, trained = _table(counted, config)
    ledger = Ledger.make(calls, fates, trained)
    return Batch(table, ledger, _statistics(rollouts, credits, table, ledger))


def advantages(
    rollouts: Sequence[FinishedRollout],
    estimator: Estimator,
    lengths: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """One advantage per usable rollout, by rollout id; 0 in a group without two different rewards.
    A rollout whose group has no other usable one has none. `lengths` are the sampled tokens by
    attempt id."""
    groups: dict[str, list[FinishedRollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.usable:
            groups[rollout.spec.group_id if estimator.by_group else ""].append(rollout)
    silent = {name for name, group in groups.items() if len({_reward(r) for r in group}) == 1}
    compared = {name: group for name, group in groups.items() if len(group) > 1}
    every = [rollout for group in compared.values() for rollout in group]
    if compared.keys() <= silent:
        return dict.fromkeys((r.spec.rollout_id for r in every), 0.0)
    values = estimator.advantages(
        [_reward(r) for r in every],
        [r.spec.group_id for r in every],
        [(lengths or {}).get(r.attempt_id, 1) for r in every],
    )
    return {
        # Equal rewards mean 0, whatever rounding makes of it.
        r.spec.rollout_id: 0.0 if r.spec.group_id in silent else float(value)
        for r, value in zip(every, values, strict=True)
    }


def without_signal(rollouts: Sequence[FinishedRollout], estimator: Estimator) -> set[str]:
    """The ids of the groups that nothing can be learned from: too few usable rollouts, or no two
    different rewards."""
    credits = advantages(rollouts, estimator)
    return {r.spec.group_id for r in rollouts} - {
        r.spec.group_id for r in rollouts if credits.get(r.spec.rollout_id)
    }


def _per_call(
    rollout: FinishedRollout, calls: list[Call], advantage: float, hook: CallAdvantages | None
) -> dict[int, float]:
    values = hook(rollout, calls, advantage) if hook else [advantage] * len(calls)
    if len(values) != len(calls) or not np.isfinite(values).all():
        raise ValueError(
            f"algorithm.call_advantages gave {list(values)!r} for the {len(calls)} calls of "
            f"{rollout.spec.rollout_id}; it must give one finite number per call"
        )
    return {call.seq: float(value) for call, value in zip(calls, values, strict=True)}


def _spoiled(calls: Sequence[Call], fate: Fate, reason: str) -> list[CallFate]:
    return [CallFate(c.attempt_id, c.seq, len(c.tokens), fate, reason) for c in calls]


def _abandoned(rollout: FinishedRollout, calls: Mapping[str, Sequence[Call]]) -> list[str]:
    """The attempts of a rollout, of those in `calls`, that a later one replaced."""
    attempts = [f"{rollout.spec.rollout_id}-a{number}" for number in range(rollout.attempts)]
    return [a for a in attempts if a != rollout.attempt_id and a in calls]


def _table(counted: list[_Entry], config: RunConfig) -> tuple[pa.Table, list[Row]]:
    # Rollouts that say something are dealt first, so that each optimizer step gets an equal part of
    # them.
    dealt = sorted(counted, key=lambda entry: not entry.advantages)
    steps = config.trainer.optimizer_steps
    columns: dict[str, list] = {name: [] for name in ROW_SCHEMA.names}
    trained: list[Row] = []
    for step in range(steps):
        entries = dealt[step::steps]
        weigh = _weights(entries, config)
        for entry in entries:
            for row in entry.rows if entry.advantages else ():
                trained.append(row)
                advantage_T = np.zeros(len(row.tokens_T), np.float32)
                for seq, value in entry.advantages.items():
                    advantage_T[row.calls_T == seq] = value
                columns["rollout_id"].append(row.rollout_id)
                columns["group_id"].append(entry.rollout.spec.group_id)
                columns["attempt_id"].append(row.attempt_id)
                columns["optimizer_step"].append(step)
                columns["reward"].append(_reward(entry.rollout))
                columns["tokens"].append(row.tokens_T)
                columns["trainable"].append(row.trainable_T)
                columns["calls"].append(row.calls_T)
                columns["logprobs"].append(row.logprobs_T)
                columns["steps"].append(row.steps_T)
                columns["advantage"].append(advantage_T * row.trainable_T)
                columns["weight"].append(row.trainable_T * weigh(entry, row))
    return pa.Table.from_pydict(columns, schema=ROW_SCHEMA), trained


def _weights(entries: list[_Entry], config: RunConfig) -> Callable[[_Entry, Row], float]:
    """The weight of each trained token of a row, for the rollouts of one optimizer step. Rollouts
    without an advantage count in every denominator, though their tokens are not trained."""
    every = [row for entry in entries for row in entry.rows]
    match config.algorithm.normalization:
        case "rollout":
            return lambda entry, row: 1 / (len(entries) * sum(r.trained for r in entry.rows))
        case "token":
            tokens = sum(row.trained for row in every)
            return lambda entry, row: 1 / tokens
        case "row":
            return lambda entry, row: 1 / (len(every) * row.trained)
        case "constant":
            length = config.algorithm.normalization_tokens or config.max_row_tokens
            return lambda entry, row: 1 / (len(entries) * length)


def _statistics(
    rollouts: Sequence[FinishedRollout],
    credits: Mapping[str, float],
    table: pa.Table,
    ledger: Ledger,
) -> dict[str, float]:
    groups = {rollout.spec.group_id for rollout in rollouts}
    usable = [rollout for rollout in rollouts if rollout.usable]
    telling = {r.spec.group_id for r in usable if credits.get(r.spec.rollout_id)}
    sizes = Counter(rollout.spec.group_id for rollout in usable)
    small = sum(sizes[group] < 2 and group not in telling for group in groups)
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
