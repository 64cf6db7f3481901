"""Loss and gradients, from recorded calls to the last number, against `reference.py`; and that they
do not depend on how the work was split."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Objective, RefCall, RefRollout, ToyModel
from test_samples import call, rollout
from verl.utils import tensordict_utils as tu

from lightning_ray.config import RunConfig
from lightning_ray.samples import batch as batches
from lightning_ray.trainer import packing
from lightning_ray.trainer.advantages import estimator
from lightning_ray.trainer.loss import PolicyLoss

MODELS = {"current": ToyModel(0), "old": ToyModel(1), "base": ToyModel(2)}
BEHAVIOUR = ToyModel(3)
ESTIMATORS = (
    "grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "grpo_passk",
    "reinforce_plus_plus_baseline",
)  # fmt: skip
BY_STD = ("grpo", "grpo_vectorized", "grpo_passk")
LOSSES: dict[str, tuple[dict[str, Any], Objective]] = {
    "ppo": ({}, Objective()),
    "clip higher, dual": (
        {"clip_low": 0.1, "clip_high": 0.4, "clip_dual": 1.2},
        Objective(low=0.1, high=0.4, dual=1.2),
    ),
    "gspo, sequence importance": (
        {"policy_loss": "gspo", "importance": "sequence"},
        Objective("gspo", importance="sequence"),
    ),
    "cispo, icepop": (
        {"policy_loss": "cispo", "importance_floor": 0.5},
        Objective("cispo", floor=0.5),
    ),
    "rejection": (
        {"importance": "none", "reject": "token_k2", "reject_threshold": "0.4"},
        Objective(importance="none", reject_above=0.4),
    ),
    "entropy and kl": ({"entropy": 0.05, "kl": 0.1}, Objective(entropy=0.05, kl=0.1)),
}


def forest(random: np.random.Generator, rollouts: int = 6) -> list[RefRollout]:
    """Rollouts of two groups: chains of calls, with forks, sub-agents and edits."""
    made = []
    for number in range(rollouts):
        calls: list[RefCall] = []
        rows: list[list[int]] = []
        for turn in range(random.integers(1, 5)):
            fresh = [number % 7, turn, *random.integers(0, 7, random.integers(1, 4)).tolist()]
            continues = turn > 0 and random.random() < 0.6
            prompt = calls[-1].prompt + calls[-1].tokens + fresh if continues else fresh
            tokens = random.integers(0, 7, random.integers(1, 6)).tolist()
            sampled = RefCall(prompt, tokens, [])
            with torch.no_grad():
                sampled.behaviour = BEHAVIOUR.of_call(sampled)[0].float().tolist()
            calls.append(sampled)
            rows = [*rows[:-1], [*rows[-1], turn]] if continues else [*rows, [turn]]
        reward = float(random.choice([0.0, 0.25, 1.0]))
        made.append(RefRollout(f"g{number % 2}", reward, calls, rows))
    made[0].reward, made[2].reward = 0.0, 1.0  # one group has a signal for certain
    return made


def batch_of(rollouts: list[RefRollout], **sections: dict[str, Any]) -> batches.Batch:
    config = RunConfig.model_validate(sections)
    finished, calls = [], {}
    for number, mine in enumerate(rollouts):
        name = f"r{number}"
        finished.append(rollout(name, mine.group, mine.reward))
        calls[name] = [
            replace(call(seq, c.prompt, c.tokens, name), logprobs=np.array(c.behaviour, np.float32))
            for seq, c in enumerate(mine.calls)
        ]
    return batches.build(finished, calls, config, estimator(config.algorithm))


def ours(
    made: batches.Batch,
    algorithm: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    micro: int | None = None,
    ranks: int = 1,
    order: list[int] | None = None,
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the first optimizer step, in micro-batches of so many rows; ranks are
    averaged, as FSDP does."""
    config = RunConfig.model_validate({"algorithm": algorithm}).algorithm
    [rows] = packing.optimizer_steps([made.table])
    rows = [rows[number] for number in order] if order else rows
    with torch.no_grad():
        rows = [
            replace(
                row, old_T=_of_row(MODELS["old"], row), reference_T=_of_row(MODELS["base"], row)
            )
            for row in rows
        ]
    function, total = PolicyLoss(config), torch.zeros((), dtype=dtype)
    for rank in range(ranks):
        mine = rows[rank::ranks]
        for start in range(0, len(mine), micro or len(mine)):
            some = mine[start : start + (micro or len(mine))]
            data, order_N = packing.deal(some, [1.0] * len(some), 1)
            for name in ("weight", "behaviour", "advantage", "old", "reference"):
                data[name] = data[name].to(dtype)
            tu.assign_non_tensor(data, dp_size=ranks)
            found = [MODELS["current"](some[n].tokens_T.tolist(), dtype) for n in order_N]
            ahead = [torch.tensor([*some[n].tokens_T[1:], 0]) for n in order_N]
            output = {
                "log_probs": [
                    rows_TV[torch.arange(len(next_T)), next_T]
                    for rows_TV, next_T in zip(found, ahead, strict=True)
                ],
                "entropy": [-(rows_TV.exp() * rows_TV).sum(-1) for rows_TV in found],
            }
            jagged = {
                name: torch.nested.as_nested_tensor(each, layout=torch.jagged)
                for name, each in output.items()
            }
            total = total + function(jagged, data)[0] / ranks
    return total.item(), _gradient(total)


def _of_row(model: ToyModel, row: packing.PackedRow) -> np.ndarray:
    rows_TV = model(row.tokens_T.tolist())[:-1]
    chosen = rows_TV[torch.arange(len(rows_TV)), torch.tensor(row.tokens_T[1:])]
    return np.append(0.0, chosen.numpy()).astype(np.float32)


def _gradient(loss: torch.Tensor) -> torch.Tensor:
    leaves = list(MODELS["current"].weights.values())
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)])


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Relative to the largest component, since a small one is a difference of large ones."""
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


@pytest.mark.parametrize("normalization", ["rollout", "token", "row", "constant"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_loss_and_gradient_equal_the_reference(name: str, normalization: str) -> None:
    rollouts = forest(np.random.default_rng(len(name) * 10 + len(normalization)))
    by_stds = (True, False) if name in BY_STD else (True,)
    for (settings_, objective), by_std in product(LOSSES.values(), by_stds):
        algorithm = {
            "estimator": name, "normalization": normalization, "normalize_by_std": by_std,
            **({"normalization_tokens": 50} if normalization == "constant" else {}), **settings_,
        }  # fmt: skip
        expected = reference.loss(rollouts, name, by_std, normalization, objective, MODELS)
        wanted = _gradient(expected)
        made = batch_of(rollouts, algorithm=algorithm)
        value, found = ours(made, algorithm)
        assert value == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)
        assert close(found, wanted, 1e-6)
        if by_std:
            assert close(ours(made, algorithm, torch.float32)[1], wanted, 1e-4)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from([1, 3, None]),
    st.sampled_from([1, 2]),
    st.randoms(use_true_random=False),
)
def test_the_gradient_does_not_depend_on_how_the_work_was_split(
    seed, loss_name, micro, ranks, random
) -> None:
    algorithm = LOSSES[loss_name][0]
    rollouts = forest(np.random.default_rng(seed))
    merged = batch_of(rollouts, algorithm=algorithm)
    _, whole = ours(merged, algorithm)
    # Every call a row of its own, rows in another order, in other micro-batches, on two ranks.
    split = batch_of(rollouts, algorithm=algorithm, samples={"merge": "call"})
    order = list(range(split.table.num_rows))
    random.shuffle(order)
    assert split.table.num_rows >= merged.table.num_rows
    assert close(ours(split, algorithm, micro=micro, ranks=ranks, order=order)[1], whole, 1e-5)


def test_optimizer_steps_end_between_rollouts() -> None:
    made = batch_of(forest(np.random.default_rng(5), 8), trainer={"optimizer_steps": 3})
    steps: dict[str, set[int]] = {}
    for row in made.table.to_pylist():
        steps.setdefault(row["rollout_id"], set()).add(row["optimizer_step"])
    assert all(len(found) == 1 for found in steps.values())
    assert set.union(*steps.values()) == {0, 1, 2}
