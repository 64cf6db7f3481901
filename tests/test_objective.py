"""Loss and gradients, from recorded calls to the last number, against `reference.py`; and that they
do not depend on how the work was split."""

from __future__ import annotations

from collections.abc import Iterator
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
    "reinforce_plus_plus", "reinforce_plus_plus_baseline",
)  # fmt: skip
NORMALIZATIONS = ("rollout", "token", "row", "constant")
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
        Objective(importance="none", reject="token_k2", keep=(0.0, 0.4)),
    ),
    **{
        f"entropy and kl, {name}": (
            {"policy_loss": name, "entropy": 0.05, "kl": 0.1},
            Objective(name, entropy=0.05, kl=0.1),
        )
        for name in ("vanilla", "gspo", "cispo")
    },
}
# What is kept is about half of the tokens or calls.
REJECTIONS = {
    "token_k1": (0.7, 1.4), "token_k2": (0.0, 0.2), "token_k3": (0.0, 0.2),
    "seq_sum_k1": (0.4, 2.5), "seq_sum_k2": (0.0, 0.8), "seq_sum_k3": (0.0, 0.8),
    "seq_mean_k1": (0.7, 1.4), "seq_mean_k2": (0.0, 0.3), "seq_mean_k3": (0.0, 0.3),
    "seq_max_k2": (0.0, 0.5), "seq_max_k3": (0.0, 0.5),
}  # fmt: skip
seeds = st.integers(0, 10**6)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are so small that a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def forest(random: np.random.Generator, rollouts: int = 6) -> list[RefRollout]:
    """Rollouts of two groups: calls that continue an earlier one, edit its reply, or begin anew."""
    made = []
    for number in range(rollouts):
        calls: list[RefCall] = []
        parents: list[int | None] = []
        rows: list[list[int]] = []
        for turn in range(random.integers(1, 6)):
            prompt, parent = list[int](), None
            if turn and random.random() < 0.75:
                parent = int(random.integers(turn))
                prompt = calls[parent].prompt + calls[parent].tokens
                if random.random() < 0.2:
                    prompt[-1] = (prompt[-1] + 1) % 7
                    parent = parents[parent]
            # The number of the turn keeps prompts apart.
            prompt += [number % 7, turn, *random.integers(0, 7, random.integers(1, 4)).tolist()]
            tokens = random.integers(0, 7, random.integers(1, 6)).tolist()
            sampled = RefCall(prompt, tokens, [])
            with torch.no_grad():
                sampled.behaviour = BEHAVIOUR.of_call(sampled)[0].float().tolist()
            calls.append(sampled)
            if parent is None or parent in parents:
                rows.append([turn])  # a root, or a later child of its parent
            else:
                next(row for row in rows if parent in row).append(turn)
            parents.append(parent)
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


def check(
    rollouts: list[RefRollout],
    name: str,
    by_std: bool,
    normalization: str,
    settings_: dict[str, Any],
    objective: Objective,
) -> None:
    """Loss and gradient are the reference's, in double and in single precision."""
    algorithm = {
        "estimator": name, "normalization": normalization, "normalize_by_std": by_std,
        **({"normalization_tokens": 50} if normalization == "constant" else {}), **settings_,
    }  # fmt: skip
    expected = reference.loss(rollouts, name, by_std, normalization, objective, MODELS)
    made = batch_of(rollouts, algorithm=algorithm)
    if not expected.requires_grad:  # pass@k, if no group has a best rollout
        assert made.table.num_rows == 0
        return
    wanted = _gradient(expected)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-4)):
        value, found = ours(made, algorithm, dtype)
        # A loss is a difference of gains and losses, so a small one is known less exactly.
        assert value == pytest.approx(expected.item(), rel=tolerance, abs=tolerance / 10)
        assert close(found, wanted, tolerance)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_loss_and_gradient_equal_the_reference(name: str, normalization: str) -> None:
    rollouts = forest(np.random.default_rng(len(name) * 10 + len(normalization)))
    by_stds = (True, False) if name in BY_STD else (True,)
    for loss, by_std in product(LOSSES.values(), by_stds):
        check(rollouts, name, by_std, normalization, *loss)


@settings(max_examples=60, deadline=None)
@given(
    seeds,
    st.sampled_from(ESTIMATORS),
    st.booleans(),
    st.sampled_from(NORMALIZATIONS),
    st.sampled_from(sorted(LOSSES)),
)
def test_on_any_forest_too(seed, name, by_std, normalization, loss_name) -> None:
    rollouts = forest(np.random.default_rng(seed))
    check(rollouts, name, by_std, normalization, *LOSSES[loss_name])


@pytest.mark.parametrize("policy_loss", ["vanilla", "gspo", "cispo"])
@pytest.mark.parametrize("name", sorted(REJECTIONS))
def test_what_is_rejected_is_what_the_reference_rejects(name: str, policy_loss: str) -> None:
    low, high = REJECTIONS[name]
    threshold = f"{low}_{high}" if name.endswith("k1") else str(high)
    settings_ = {"policy_loss": policy_loss, "reject": name, "reject_threshold": threshold}
    objective = Objective(policy_loss, reject=name, keep=(low, high))
    check(forest(np.random.default_rng(len(name))), "grpo", True, "rollout", settings_, objective)


@pytest.mark.parametrize("policy_loss", ["vanilla", "gspo", "cispo"])
@pytest.mark.parametrize("estimator_", ["k2", "k3", "k1+", "k3+"])
def test_the_kl_term_is_the_named_estimate(estimator_: str, policy_loss: str) -> None:
    settings_ = {"policy_loss": policy_loss, "kl": 0.3, "kl_estimator": estimator_}
    objective = Objective(policy_loss, kl=0.3, kl_estimator=estimator_)
    check(forest(np.random.default_rng(3)), "rloo", True, "token", settings_, objective)


@settings(max_examples=25, deadline=None)
@given(
    seeds,
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
