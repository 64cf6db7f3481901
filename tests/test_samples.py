"""From calls to weighted rows: the forest, the rows, the weights and the ledger."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ray.config import RunConfig
from lightning_ray.records import (
    Call,
    FinishedRollout,
    FinishReason,
    Outcome,
    PolicyVersion,
    Reward,
    RolloutSpec,
    RolloutState,
    Span,
    Split,
    Task,
)
from lightning_ray.samples import batch as batches
from lightning_ray.samples import dataset, forest
from lightning_ray.samples.batch import Batch, Ledger, LedgerImbalance
from lightning_ray.samples.rows import Fate, rows


def call(
    seq: int, prompt: list[int], tokens: list[int], attempt: str = "a", *, constrained: bool = False
) -> Call:
    return Call(
        call_id=f"{attempt}-{seq}",
        attempt_id=attempt,
        seq=seq,
        prompt=np.array(prompt, np.int32),
        tokens=np.array(tokens, np.int32),
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        spans=(Span(PolicyVersion("x", seq), len(tokens)),),
        finish_reason=FinishReason.STOP,
        constrained=constrained,
    )


def rollout(name: str, group: str, reward: float | None) -> FinishedRollout:
    lost = reward is None
    return FinishedRollout(
        spec=RolloutSpec(name, group, Task(group, "do it"), Split.TRAIN, 0),
        state=RolloutState.FAILED if lost else RolloutState.FINISHED,
        outcome=Outcome.NODE_LOST if lost else Outcome.COMPLETED,
        attempt_id=name,
        attempts=1,
        reward=None if reward is None else Reward(reward, solved=reward == 1),
    )


def mean_baseline(reward_R: list[float], group_R: list[str]) -> list[float]:
    groups = defaultdict(list)
    for reward, group in zip(reward_R, group_R, strict=True):
        groups[group].append(reward)
    return [r - float(np.mean(groups[g])) for r, g in zip(reward_R, group_R, strict=True)]


def build(rollouts: list[FinishedRollout], calls: dict[str, list[Call]], **trainer: int) -> Batch:
    return batches.build(rollouts, calls, RunConfig(trainer=trainer), mean_baseline)


def one_turn(name: str, length: int = 3) -> list[Call]:
    return [call(0, [1, 2], list(range(length)), name)]


def test_a_harness_that_keeps_its_context_makes_one_row() -> None:
    first, second = call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9], [5])
    (row,), fates = rows("r", [second, first], max_tokens=100)
    assert row.tokens_T.tolist() == [1, 2, 3, 4, 9, 5]
    assert row.trainable_T.tolist() == [False, False, True, True, False, True]
    assert row.logprobs_T.tolist() == [0, 0, -1, -2, 0, -1]
    assert row.steps_T.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.calls == (0, 1)
    assert fates == {Fate.TRAINED: 3}


def test_a_shared_call_is_trained_in_the_first_branch_and_is_context_in_the_other() -> None:
    calls = [call(0, [1], [2]), call(1, [1, 2, 7], [3]), call(2, [1, 2, 8], [4])]
    left, right = rows("r", calls, max_tokens=100)[0]
    assert left.calls == (0, 1)
    assert right.calls == (2,)
    assert right.tokens_T.tolist() == [1, 2, 8, 4]
    assert right.trainable_T.tolist() == [False, False, False, True]
    assert right.logprobs_T.tolist() == [0, -1, 0, -1]  # recorded, though not trained here


def test_a_context_that_was_edited_starts_a_tree_of_its_own() -> None:
    calls = [call(0, [1], [2]), call(1, [1, 2, 5], [3]), call(2, [9, 9], [4])]
    assert [[c.seq for c in b.calls] for b in forest.branches(calls)] == [[0, 1], [2]]


def test_the_longest_matching_prefix_is_the_parent() -> None:
    calls = [call(0, [1], [2]), call(1, [1, 2], [3]), call(2, [1, 2, 3], [4])]
    assert forest.parents(calls) == {0: None, 1: 0, 2: 1}


def test_calls_that_sampled_nothing_are_not_each_others_parents() -> None:
    assert forest.parents([call(0, [1], []), call(1, [1], [])]) == {0: None, 1: 0}


def test_a_row_is_cut_between_calls_and_what_is_cut_is_counted() -> None:
    calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9], [5, 6, 7])]
    (row,), fates = rows("r", calls, max_tokens=7)
    assert row.tokens_T.tolist() == [1, 2, 3, 4]
    assert fates == {Fate.TRAINED: 2, Fate.TRUNCATED: 3}


def test_samples_of_one_prompt_that_nobody_continued_are_orphans() -> None:
    twins = [call(0, [1], [2]), call(1, [1], [3, 3])]
    assert rows("r", twins, 100)[1] == {Fate.ORPHANED: 3}
    continued = [*twins, call(2, [1, 2, 5], [6])]
    assert rows("r", continued, 100)[1] == {Fate.TRAINED: 4}


def test_a_constrained_call_is_context_but_not_trained() -> None:
    calls = [call(0, [1], [2], constrained=True), call(1, [1, 2, 5], [6])]
    (row,), fates = rows("r", calls, 100)
    assert row.trainable_T.tolist() == [False, False, False, True]
    assert fates == {Fate.CONSTRAINED: 1, Fate.TRAINED: 1}


def test_every_rollout_weighs_the_same_however_long_it_is() -> None:
    made = build(
        [rollout("x", "g", 1.0), rollout("y", "g", 0.0)],
        {"x": one_turn("x", 2), "y": one_turn("y", 8)},
    )
    weights = dict(zip(*(made.table[n].to_pylist() for n in ("rollout_id", "weight")), strict=True))
    assert weights["x"] == [0, 0, 0.25, 0.25]
    assert weights["y"] == [0, 0, *[0.0625] * 8]
    assert made.table["advantage"].to_pylist() == [0.5, -0.5]


def test_a_group_of_equal_rewards_trains_nothing_but_keeps_its_place_in_the_average() -> None:
    made = build(
        [rollout(f"{g}{i}", g, r) for g, r in [("g", 0.1), ("h", 0.0)] for i in range(3)]
        + [rollout("h3", "h", 1.0)],
        {f"{g}{i}": one_turn(f"{g}{i}") for g, n in [("g", 3), ("h", 4)] for i in range(n)},
    )
    assert set(made.table["group_id"].to_pylist()) == {"h"}
    assert made.ledger.fates[Fate.ZERO_ADVANTAGE] == 9
    assert sum(made.table["weight"].combine_chunks().values.to_pylist()) == pytest.approx(4 / 7)
    assert made.statistics["batch/groups_without_signal"] == 1


def test_a_rollout_lost_to_infrastructure_leaves_the_baseline_and_the_average() -> None:
    made = build(
        [rollout("x", "g", 1.0), rollout("y", "g", 0.0), rollout("z", "g", None)],
        {name: one_turn(name) for name in "xyz"} | {"abandoned": one_turn("abandoned")},
    )
    assert made.table["advantage"].to_pylist() == [0.5, -0.5]
    assert made.ledger.fates[Fate.INFRA] == 6
    assert sum(made.table["weight"].combine_chunks().values.to_pylist()) == pytest.approx(1)


def test_a_group_with_one_usable_rollout_says_nothing_and_is_counted() -> None:
    made = build([rollout("x", "g", 1.0), rollout("y", "g", None)], {"x": one_turn("x")})
    assert made.table.num_rows == 0
    assert made.table.schema == batches.ROW_SCHEMA
    assert made.statistics["batch/groups_too_small"] == 1


def test_a_ledger_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(LedgerImbalance, match="5 tokens were sampled"):
        Ledger(5, {Fate.TRAINED: 3, Fate.INFRA: 1})


@st.composite
def attempts(draw: st.DrawFn, name: str) -> list[Call]:
    """Calls of a harness that continues, edits, resends and forks at random."""
    made: list[Call] = []
    for seq in range(draw(st.integers(0, 6))):
        fresh = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        base = draw(st.sampled_from([None, *made]))
        prompt = fresh if base is None else base.full.tolist() + fresh
        if base is not None and draw(st.booleans()):
            prompt = base.prompt.tolist()
        tokens = draw(st.lists(st.integers(0, 2), max_size=3))
        made.append(call(seq, prompt, tokens, name, constrained=draw(st.integers(0, 9)) == 0))
    return made


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[FinishedRollout], dict[str, list[Call]]]:
    rollouts, calls = [], {}
    for group in range(draw(st.integers(1, 3))):
        for number in range(draw(st.integers(1, 4))):
            name = f"{group}.{number}"
            rollouts.append(rollout(name, str(group), draw(st.sampled_from([0.0, 0.3, 1.0, None]))))
            calls[name] = draw(attempts(name))
    return rollouts, calls


@settings(max_examples=80, deadline=None)
@given(worlds(), st.integers(1, 3), st.integers(16, 24), st.randoms(use_true_random=False))
def test_tokens_are_trained_at_most_once_and_weights_add_up(world, steps, limit, random) -> None:
    rollouts, calls = world
    made = build(rollouts, calls, optimizer_steps=steps, max_row_tokens=limit)
    table = made.table.to_pylist()
    assert made.ledger.sampled == sum(len(c.tokens) for some in calls.values() for c in some)

    trained_calls = [(row["attempt_id"], seq) for row in table for seq in row["calls"]]
    assert len(trained_calls) == len(set(trained_calls))
    by_id = {(name, c.seq): c for name, some in calls.items() for c in some}
    for row in table:
        assert len(row["tokens"]) <= limit
        assert row["trainable"][-1]
        assert sum(row["trainable"]) == sum(
            len(by_id[row["attempt_id"], seq].tokens) for seq in row["calls"]
        )
        assert [w > 0 for w in row["weight"]] == row["trainable"]

    usable = [r for r in rollouts if r.usable]
    rollouts_of_step = [len(range(step, len(usable), steps)) for step in range(steps)]
    for step in range(steps):
        mine = [row for row in table if row["optimizer_step"] == step]
        telling = len({row["rollout_id"] for row in mine})
        if telling:
            total = sum(sum(row["weight"]) for row in mine)
            assert total == pytest.approx(telling / rollouts_of_step[step], rel=1e-5)
    assert len({(row["rollout_id"], row["optimizer_step"]) for row in table}) == len(
        {row["rollout_id"] for row in table}
    )

    shuffled = {name: random.sample(some, len(some)) for name, some in calls.items()}
    assert (
        build(rollouts, shuffled, optimizer_steps=steps, max_row_tokens=limit).table == made.table
    )


def test_a_batch_file_reads_back_as_the_batch(tmp_path) -> None:
    import pyarrow.parquet as pq

    made = build([rollout("x", "g", 1.0), rollout("y", "g", 0.0)], {n: one_turn(n) for n in "xy"})
    dataset.write(made, tmp_path, 3)
    again = dataset.write(made, tmp_path, 3)
    assert [again] == list((tmp_path / "batches").iterdir())
    assert pq.read_table(again).cast(batches.ROW_SCHEMA) == made.table


def test_reading_a_run_without_batches_says_so(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no update yet"):
        dataset.read(tmp_path)
