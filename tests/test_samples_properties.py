"""Whatever a harness does, in whatever order its calls come: tokens are trained at most once, the
books balance, weights add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_samples import call, mean_baseline, rollout

from lightning_ray.config import RunConfig
from lightning_ray.records import Call, FinishedRollout, Outcome, RolloutState, SideCall
from lightning_ray.samples import batch as batches
from lightning_ray.samples import forest
from lightning_ray.samples.batch import Batch, Estimator


@st.composite
def attempts(draw: st.DrawFn, name: str) -> list[Call]:
    """Calls of a harness that continues, edits, resends, forks and asks for titles at random."""
    made: list[Call] = []
    for seq in range(draw(st.integers(0, 6))):
        fresh = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        base = draw(st.sampled_from([None, *made]))
        prompt = fresh if base is None else base.full.tolist() + fresh
        if base is not None and draw(st.booleans()):
            prompt = base.prompt.tolist()
        tokens = draw(st.lists(st.integers(0, 2), max_size=3))
        sampled = call(seq, prompt, tokens, name, constrained=draw(st.integers(0, 9)) == 0)
        made.append(replace(sampled, side=draw(st.sampled_from([None] * 9 + [SideCall.TITLE]))))
    return made


@dataclass(frozen=True)
class World:
    """What an update is made of: rollouts, the calls of all their attempts, and the groups that
    others stand in for or that were given up."""

    rollouts: list[FinishedRollout]
    calls: dict[str, list[Call]]
    replaced: set[str]
    stale: set[str]

    def build(self, calls: dict[str, list[Call]] | None = None, **trainer: int) -> Batch:
        return batches.build(
            self.rollouts, calls or self.calls, RunConfig(trainer=trainer),
            Estimator(mean_baseline), replaced=self.replaced, stale=self.stale,
        )  # fmt: skip


@st.composite
def worlds(draw: st.DrawFn) -> World:
    rollouts, calls, stale = [], {}, set()
    for group in map(str, range(draw(st.integers(1, 4)))):
        if draw(st.integers(0, 4)) == 0:
            stale.add(group)
        for number in range(draw(st.integers(1, 4))):
            name = f"{group}.{number}"
            made = rollout(name, group, draw(st.sampled_from([0.0, 0.3, 1.0, None])))
            if group in stale and draw(st.booleans()):
                made = replace(made, state=RolloutState.CANCELLED, outcome=Outcome.CANCELLED)
            tries = draw(st.integers(1, 3))
            rollouts.append(replace(made, attempt_id=f"{name}-a{tries - 1}", attempts=tries))
            calls |= {f"{name}-a{n}": draw(attempts(f"{name}-a{n}")) for n in range(tries)}
    fresh = [r for r in rollouts if r.spec.group_id not in stale]
    silent = batches.without_signal(fresh, Estimator(mean_baseline))
    replaced = {group for group in sorted(silent) if draw(st.booleans())}
    return World(rollouts, calls, replaced, stale)


@settings(max_examples=150, deadline=None)
@given(worlds(), st.integers(1, 3), st.integers(16, 24), st.randoms(use_true_random=False))
def test_tokens_are_trained_at_most_once_and_weights_add_up(world, steps, limit, random) -> None:
    made = world.build(optimizer_steps=steps, max_row_tokens=limit)
    table = made.table.to_pylist()
    assert made.ledger.sampled == sum(len(c.tokens) for some in world.calls.values() for c in some)

    trained_calls = [
        (row["attempt_id"], seq)
        for row in table
        for seq in {s for s, kept in zip(row["calls"], row["trainable"], strict=True) if kept}
    ]
    assert len(trained_calls) == len(set(trained_calls))
    by_id = {(name, c.seq): c for name, some in world.calls.items() for c in some}
    for row in table:
        assert len(row["tokens"]) <= limit
        assert row["trainable"][-1]
        for seq in {seq for seq in row["calls"] if seq >= 0}:
            sampled = by_id[row["attempt_id"], seq]
            at = len(sampled.prompt)
            assert row["tokens"][: at + len(sampled.tokens)] == sampled.full.tolist()
            assert row["calls"][at : at + len(sampled.tokens)] == [seq] * len(sampled.tokens)
        assert [w > 0 for w in row["weight"]] == row["trainable"]

    usable = [r for r in world.rollouts if r.usable and r.spec.group_id not in world.stale]
    sizes = Counter(r.spec.group_id for r in usable)
    counted = sum(size for group, size in sizes.items() if size > 1 and group not in world.replaced)
    for step in range(steps):
        mine = [row for row in table if row["optimizer_step"] == step]
        telling = len({row["rollout_id"] for row in mine})
        if telling:
            total = sum(sum(row["weight"]) for row in mine)
            assert total == pytest.approx(telling / len(range(step, counted, steps)), rel=1e-5)
    assert len({(row["rollout_id"], row["optimizer_step"]) for row in table}) == len(
        {row["rollout_id"] for row in table}
    )

    shuffled = {name: random.sample(some, len(some)) for name, some in world.calls.items()}
    again = world.build(shuffled, optimizer_steps=steps, max_row_tokens=limit)
    assert again.table == made.table


@settings(max_examples=150, deadline=None)
@given(worlds(), st.integers(8, 24), st.randoms(use_true_random=False))
def test_a_call_has_the_same_fate_and_weight_in_whatever_order_the_calls_came(
    world, limit, random
) -> None:
    def by_call(made: Batch, calls: dict[str, list[Call]]) -> dict[str, tuple]:
        """Fate, tokens, and the tokens of its row until its end with their weights, by call id."""
        names = {(a, c.seq): c.call_id for a, some in calls.items() for c in some}
        entries = made.ledger.table.to_pylist()
        found = {
            names[e["attempt_id"], e["seq"]]: (e["fate"], e["reason"], e["tokens"]) for e in entries
        }
        for row in made.table.to_pylist():
            seqs, kept = np.array(row["calls"]), np.array(row["trainable"])
            for seq in set(seqs[kept].tolist()):
                end = int(np.flatnonzero(seqs == seq)[-1]) + 1
                mine = row["weight"][end - 1], row["advantage"][end - 1], row["tokens"][:end]
                found[names[row["attempt_id"], seq]] += mine
        return found

    renumbered = {}
    for attempt, some in world.calls.items():
        order = random.sample(range(len(some)), len(some))
        renumbered[attempt] = [replace(c, seq=seq) for c, seq in zip(some, order, strict=True)]
    one = by_call(world.build(max_row_tokens=limit), world.calls)
    other = by_call(world.build(renumbered, max_row_tokens=limit), renumbered)
    assert one == other


@given(attempts("a"))
def test_shared_prompts_are_the_same_prompts_in_less_memory(calls: list[Call]) -> None:
    for before, after in zip(calls, forest.shared(calls), strict=True):
        assert np.array_equal(before.prompt, after.prompt)
        assert replace(after, prompt=before.prompt) == before
    assert forest.parents(forest.shared(calls)) == forest.parents(calls)


def test_the_prompts_of_a_chain_take_the_memory_of_the_longest() -> None:
    made = [call(0, [1] * 100, [2] * 10)]
    for seq in range(1, 200):
        made.append(call(seq, made[-1].full.tolist() + [3] * 20, [2] * 10))
    longest = made[-1].prompt
    assert all(np.shares_memory(one.prompt, longest) for one in forest.shared(made))
