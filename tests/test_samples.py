"""From calls to weighted rows: the forest, the rows, the weights and the ledger."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

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
    SideCall,
    Span,
    Split,
    Task,
)
from lightning_ray.samples import batch as batches
from lightning_ray.samples import dataset, forest
from lightning_ray.samples.batch import Batch, Estimator
from lightning_ray.samples.ledger import Ledger, LedgerImbalance
from lightning_ray.samples.rows import CallFate, Fate, Layout, rows


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


def mean_baseline(reward_R: list[float], group_R: list[str], length_R: list[int]) -> list[float]:
    groups = defaultdict(list)
    for reward, group in zip(reward_R, group_R, strict=True):
        groups[group].append(reward)
    return [r - float(np.mean(groups[g])) for r, g in zip(reward_R, group_R, strict=True)]


def build(rollouts: list[FinishedRollout], calls: dict[str, list[Call]], **trainer: int) -> Batch:
    return batches.build(rollouts, calls, RunConfig(trainer=trainer), Estimator(mean_baseline))


def count(fates: list[CallFate]) -> dict[Fate, int]:
    counted = Counter[Fate]()
    for fate in fates:
        counted[fate.fate] += fate.tokens
    return dict(counted)


def advantages_of(made: Batch) -> dict[str, set[float]]:
    """The different advantages of the trained tokens of each rollout."""
    found = defaultdict(set)
    for row in made.table.to_pylist():
        trained = zip(row["advantage"], row["trainable"], strict=True)
        found[row["rollout_id"]] |= {advantage for advantage, kept in trained if kept}
    return dict(found)


def one_turn(name: str, length: int = 3) -> list[Call]:
    return [call(0, [1, 2], list(range(length)), name)]


def test_a_harness_that_keeps_its_context_makes_one_row() -> None:
    first, second = call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 9], [5])
    (row,), fates = rows("r", [second, first], Layout(100))
    assert row.tokens_T.tolist() == [1, 2, 3, 4, 9, 5]
    assert row.trainable_T.tolist() == [False, False, True, True, False, True]
    assert row.logprobs_T.tolist() == [0, 0, -1, -2, 0, -1]
    assert row.steps_T.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.calls_T.tolist() == [-1, -1, 0, 0, -1, 1]
    assert count(fates) == {Fate.TRAINED: 3}


def test_the_older_of_two_continuations_goes_on_with_the_row_also_if_it_is_shorter() -> None:
    calls = [call(0, [1], [2]), call(1, [1, 2, 7, 7], [3]), call(2, [1, 2, 8], [4])]
    assert [[c.seq for c in b.calls] for b in forest.branches(calls)] == [[0, 1], [0, 2]]


def test_a_shared_call_is_trained_in_the_first_branch_and_is_context_in_the_other() -> None:
    calls = [call(0, [1], [2]), call(1, [1, 2, 7], [3]), call(2, [1, 2, 8], [4])]
    left, right = rows("r", calls, Layout(100))[0]
    assert left.calls_T[left.trainable_T].tolist() == [0, 1]
    assert right.calls_T[right.trainable_T].tolist() == [2]
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
    (row,), fates = rows("r", calls, Layout(7))
    assert row.tokens_T.tolist() == [1, 2, 3, 4]
    assert count(fates) == {Fate.TRAINED: 2, Fate.TRUNCATED: 3}


def test_samples_of_one_prompt_that_nobody_continued_are_orphans() -> None:
    twins = [call(0, [1], [2]), call(1, [1], [3, 3])]
    assert count(rows("r", twins, Layout(100))[1]) == {Fate.ORPHANED: 3}
    continued = [*twins, call(2, [1, 2, 5], [6])]
    assert count(rows("r", continued, Layout(100))[1]) == {Fate.TRAINED: 4}
    later = [call(0, [1, 4], [5])]  # what the later prompts begin with; they add the same to it
    later += [call(1, [1, 4, 5, 9], [2]), call(2, [1, 4, 5, 9], [3])]
    assert count(rows("r", later, Layout(100))[1]) == {Fate.TRAINED: 1, Fate.ORPHANED: 2}


def test_a_constrained_call_is_context_but_not_trained() -> None:
    calls = [call(0, [1], [2], constrained=True), call(1, [1, 2, 5], [6])]
    (row,), fates = rows("r", calls, Layout(100))
    assert row.trainable_T.tolist() == [False, False, False, True]
    assert count(fates) == {Fate.CONSTRAINED: 1, Fate.TRAINED: 1}


def test_every_rollout_weighs_the_same_however_long_it_is() -> None:
    made = build(
        [rollout("x", "g", 1.0), rollout("y", "g", 0.0)],
        {"x": one_turn("x", 2), "y": one_turn("y", 8)},
    )
    weights = dict(zip(*(made.table[n].to_pylist() for n in ("rollout_id", "weight")), strict=True))
    assert weights["x"] == [0, 0, 0.25, 0.25]
    assert weights["y"] == [0, 0, *[0.0625] * 8]
    assert advantages_of(made) == {"x": {0.5}, "y": {-0.5}}


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
        {name: one_turn(name) for name in "xyz"} | {"y-a0": one_turn("y-a0")},
    )
    assert advantages_of(made) == {"x": {0.5}, "y": {-0.5}}
    assert made.ledger.fates[Fate.INFRA] == 6
    assert sum(made.table["weight"].combine_chunks().values.to_pylist()) == pytest.approx(1)


def test_a_group_with_one_usable_rollout_is_masked_counted_and_may_be_refilled() -> None:
    finished = [rollout("x", "g", 1.0), rollout("y", "g", None)]
    made = build(finished, {"x": one_turn("x"), "y": one_turn("y", 2)})
    assert made.table.num_rows == 0
    assert made.table.schema == batches.ROW_SCHEMA
    assert made.statistics["batch/groups_too_small"] == 1
    assert made.ledger.fates == {Fate.MASKED: 3, Fate.INFRA: 2}
    assert made.statistics["ledger/masked"] == 3
    assert batches.without_signal(finished, Estimator(mean_baseline)) == {"g"}


def test_of_a_void_rollout_no_token_trains_and_the_reason_names_the_call() -> None:
    seen = {"outcome": Outcome.VOID, "detail": "call 3 of attempt z said a canary"}
    void = replace(rollout("z", "g", None), **seen)
    finished = [rollout("x", "g", 1.0), rollout("y", "g", 0.0), void]
    made = build(finished, {r.attempt_id: one_turn(r.attempt_id) for r in finished})
    [told] = [entry for entry in made.ledger.table.to_pylist() if entry["rollout_id"] == "z"]
    assert (told["fate"], told["reason"]) == ("infra", "void, call 3 of attempt z said a canary")
    assert advantages_of(made) == {"x": {0.5}, "y": {-0.5}}


def test_a_group_that_was_given_up_is_stale_but_for_what_infrastructure_spoiled() -> None:
    cancelled = replace(
        rollout("s1", "old", None), state=RolloutState.CANCELLED, outcome=Outcome.CANCELLED
    )
    finished = [rollout("x", "g", 1.0), rollout("y", "g", 0.0)]
    finished += [rollout("s0", "old", 1.0), cancelled, rollout("s2", "old", None)]
    calls = {r.attempt_id: one_turn(r.attempt_id, n) for n, r in enumerate(finished, 1)}
    made = batches.build(finished, calls, RunConfig(), Estimator(mean_baseline), stale={"old"})
    assert made.ledger.fates == {Fate.TRAINED: 1 + 2, Fate.STALE: 3 + 4, Fate.INFRA: 5}
    assert made.statistics["ledger/stale"] == 7
    assert advantages_of(made) == {"x": {0.5}, "y": {-0.5}}
    assert sum(made.table["weight"].combine_chunks().values.to_pylist()) == pytest.approx(1)
    # Cancelled by anybody else it has no reward, like after a fault.
    made = build(finished, calls)
    assert made.ledger.fates[Fate.INFRA] == 4 + 5 and made.ledger.fates[Fate.MASKED] == 3


def test_a_ledger_that_does_not_add_up_is_refused() -> None:
    calls = {"x": [call(0, [1], [2, 3], "x"), call(1, [9], [4], "x")]}
    made, fates = rows("x", calls["x"], Layout(100))
    assert Ledger.make(calls, {"x": fates}, made).fates == {Fate.TRAINED: 3}
    for wrong in (fates[:1], [*fates, fates[0]], [replace(fates[0], tokens=1), fates[1]]):
        with pytest.raises(LedgerImbalance, match="Nothing was trained"):
            Ledger.make(calls, {"x": wrong}, made)
    with pytest.raises(LedgerImbalance, match="0 of them are in training rows"):
        Ledger.make(calls, {"x": fates}, made[:1])
    with pytest.raises(LedgerImbalance, match="2 of them"):
        Ledger.make(calls, {"x": [replace(fates[0], fate=Fate.MASKED), fates[1]]}, made)


def test_every_call_can_be_a_row_of_its_own() -> None:
    calls = [call(0, [1], [2]), call(1, [1, 2, 7], [3]), call(2, [1, 2, 8], [4])]
    made, fates = rows("r", calls, Layout(100, merge="call"))
    assert sorted(row.tokens_T.tolist() for row in made) == [[1, 2], [1, 2, 7, 3], [1, 2, 8, 4]]
    assert [row.trained for row in made] == [1, 1, 1]
    assert count(fates) == {Fate.TRAINED: 3}


def test_side_calls_and_constrained_calls_are_trained_if_the_run_says_so() -> None:
    calls = [
        replace(call(0, [1], [2]), side=SideCall.TITLE),
        call(1, [5], [6], constrained=True),
    ]
    assert count(rows("r", calls, Layout(9))[1]) == {Fate.SIDE: 1, Fate.CONSTRAINED: 1}
    layout = Layout(9, train_side_calls=True, train_constrained=True)
    assert count(rows("r", calls, layout)[1]) == {Fate.TRAINED: 2}


@pytest.mark.parametrize(
    ("normalization", "x", "y", "short"),
    [
        ("rollout", 1 / (2 * 4), 1 / (2 * 10), 1 / (2 * 10)),
        ("token", 1 / 14, 1 / 14, 1 / 14),
        ("row", 1 / (3 * 4), 1 / (3 * 8), 1 / (3 * 2)),
        ("constant", 1 / (2 * 50), 1 / (2 * 50), 1 / (2 * 50)),
    ],
)
def test_what_counts_equally_is_a_setting(normalization, x, y, short) -> None:
    """x has one row of 4 trained tokens, y rows of 8 and of 2."""
    algorithm = {"normalization": normalization}
    if normalization == "constant":
        algorithm["normalization_tokens"] = 50
    calls = {"x": one_turn("x", 4), "y": [*one_turn("y", 8), call(1, [7], [1, 2], "y")]}
    made = batches.build(
        [rollout("x", "g", 1.0), rollout("y", "g", 0.0)],
        calls,
        RunConfig(algorithm=algorithm),
        Estimator(mean_baseline),
    )
    weights = [max(row["weight"]) for row in made.table.to_pylist()]
    assert weights == pytest.approx([x, y, short])


def test_a_hook_gives_each_call_its_own_advantage() -> None:
    calls = {"x": [call(0, [1], [2], "x"), call(1, [1, 2, 9], [3], "x")], "y": one_turn("y")}
    finished = [rollout("x", "g", 1.0), rollout("y", "g", 0.0)]

    def build_with(hook) -> Batch:
        return batches.build(finished, calls, RunConfig(), Estimator(mean_baseline), hook)

    made = build_with(lambda rollout, calls, advantage: [advantage + c.seq for c in calls])
    assert advantages_of(made) == {"x": {0.5, 1.5}, "y": {-0.5}}
    with pytest.raises(ValueError, match="one finite number per call"):
        build_with(lambda rollout, calls, advantage: [advantage])
    # It refines outcomes: where these are equal it is not heard.
    finished[1] = rollout("y", "g", 1.0)
    made = build_with(lambda rollout, calls, advantage: [1.0] * len(calls))
    assert made.ledger.fates == {Fate.ZERO_ADVANTAGE: 5}


def test_groups_that_others_stand_in_for_leave_the_average_but_not_the_ledger() -> None:
    finished = [rollout(f"{g}{i}", g, r) for g, r in [("g", 0.1), ("h", 0.0)] for i in range(2)]
    finished.append(rollout("h2", "h", 1.0))
    calls = {r.attempt_id: one_turn(r.attempt_id) for r in finished}
    assert batches.without_signal(finished, Estimator(mean_baseline)) == {"g"}
    made = batches.build(finished, calls, RunConfig(), Estimator(mean_baseline), replaced={"g"})
    assert sum(made.table["weight"].combine_chunks().values.to_pylist()) == pytest.approx(1)
    assert made.ledger.fates[Fate.ZERO_ADVANTAGE] == 6


def test_a_long_rollout_is_laid_out_in_well_under_a_second() -> None:
    """200 turns that end at 60,000 tokens."""
    calls, context = [], np.arange(100, dtype=np.int32)
    for seq in range(200):
        tokens = np.full(100, seq, np.int32)
        made = call(seq, [], [])
        calls.append(
            replace(
                made,
                prompt=context,
                tokens=tokens,
                logprobs=np.zeros(100, np.float32),
                spans=(Span(PolicyVersion("x", 0), 100),),
            )
        )
        context = np.concatenate([context, tokens, np.full(200, 7, np.int32)])
    started = time.monotonic()
    (row,), _ = rows("r", calls, Layout(100_000))
    assert time.monotonic() - started < 1.0
    assert row.trained == 20_000


def test_a_batch_file_reads_back_as_the_batch(tmp_path) -> None:
    import pyarrow.parquet as pq

    made = build([rollout("x", "g", 1.0), rollout("y", "g", 0.0)], {n: one_turn(n) for n in "xy"})
    dataset.write(made, tmp_path, 3)
    again = dataset.write(made, tmp_path, 3)
    assert [again] == list((tmp_path / "batches").iterdir())
    assert pq.read_table(again).cast(batches.ROW_SCHEMA) == made.table


def test_what_was_written_after_a_checkpoint_is_forgotten_when_a_run_goes_back_to_it(
    tmp_path,
) -> None:
    made = build([rollout("x", "g", 1.0), rollout("y", "g", 0.0)], {n: one_turn(n) for n in "xy"})
    for step in (9, 10, 11):
        dataset.write(made, tmp_path, step)
    dataset.path(tmp_path, 12).with_suffix(".parquet.0f.tmp").write_text("torn")
    dataset.truncate(tmp_path, 9)
    kept = [f"{kind}/step-000009.parquet" for kind in ("batches", "ledger")]
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*")) == kept
    dataset.truncate(tmp_path / "new", 0)  # a run that has written nothing yet


def test_reading_a_run_without_batches_says_so(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no update yet"):
        dataset.read(tmp_path)
