"""Advantages and the loss, against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from lightning_ray.config import AlgorithmSection, ConfigError
from lightning_ray.trainer.advantages import estimator
from lightning_ray.trainer.loss import PolicyLoss


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def random_columns(lengths: list[int], seed: int = 0) -> dict[str, list[torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float) -> list[torch.Tensor]:
        return [torch.rand(n, generator=random) * (high - low) + low for n in lengths]

    return {
        "current": draw(-3, -0.1),
        "old": draw(-3, -0.1),
        "behaviour": draw(-3, -0.1),
        "weight": [(w - 0.3).clamp(min=0) for w in draw(0, 1)],
        "advantage": [row[:1].expand(len(row)).clone() for row in draw(-2, 2)],
        "entropy": draw(0, 4),
    }


def call_loss(
    algorithm: AlgorithmSection, columns: dict[str, list[torch.Tensor]], dp_size: int = 1
) -> tuple[torch.Tensor, dict[str, float]]:
    output = {"log_probs": nested(columns["current"]), "entropy": nested(columns["entropy"])}
    given = {"weight", "behaviour", "advantage", "old", "reference"}
    names = [name for name in columns if name in given]
    data = TensorDict(
        {name: nested(columns[name]) for name in names}, batch_size=[len(columns["current"])]
    )
    data["call"] = nested([torch.zeros_like(row) for row in columns["current"]])
    tu.assign_non_tensor(data, dp_size=dp_size)
    return PolicyLoss(algorithm)(output, data)


def reference(algorithm: AlgorithmSection, columns: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    """The same objective, token by token, written from the papers."""
    flat = {name: torch.cat(rows) for name, rows in columns.items()}
    total = torch.zeros(())
    for t in range(len(flat["current"])):
        ratio = (flat["current"][t] - flat["old"][t]).exp()
        advantage = flat["advantage"][t]
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        if advantage < 0:
            gain = torch.maximum(gain, algorithm.clip_dual * advantage)
        importance = (flat["old"][t] - flat["behaviour"][t]).exp()
        importance = importance.clamp(max=algorithm.importance_cap).detach()
        entropy = algorithm.entropy * flat["entropy"][t]
        total = total - flat["weight"][t] * (importance * gain + entropy)
    return total


ALGORITHMS = [
    AlgorithmSection(),
    AlgorithmSection(clip_low=0.1, clip_high=0.3, clip_dual=1.5, importance_cap=1.2, entropy=0.1),
]


def gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_and_gradient_are_those_of_the_formula(algorithm: AlgorithmSection) -> None:
    columns = random_columns([5, 9, 3])
    leaves = [row.requires_grad_() for row in columns["current"]]
    ours, _ = call_loss(algorithm, columns)
    formula = reference(algorithm, columns)
    torch.testing.assert_close(ours, formula)
    torch.testing.assert_close(gradients(ours, leaves), gradients(formula, leaves))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_micro_batches_add_up_and_ranks_average_to_the_whole(algorithm: AlgorithmSection) -> None:
    columns = random_columns([5, 9, 3, 4])
    whole, whole_sums = call_loss(algorithm, columns)
    each = [{n: [rows[i]] for n, rows in columns.items()} for i in range(4)]
    parts = [call_loss(algorithm, part) for part in each]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for name, value in whole_sums.items():
        assert sum(sums[name] for _, sums in parts) == pytest.approx(value, rel=1e-5)
    # FSDP takes the mean of the two ranks' gradients.
    ranks = [sum(call_loss(algorithm, part, dp_size=2)[0] for part in each[r::2]) for r in (0, 1)]
    torch.testing.assert_close(sum(ranks) / 2, whole)


def test_without_an_old_policy_the_gradient_is_the_policy_gradient() -> None:
    columns = random_columns([6])
    del columns["old"]
    (leaf,) = [row.requires_grad_() for row in columns["current"]]
    loss, sums = call_loss(AlgorithmSection(), columns)
    importance = (leaf.detach() - columns["behaviour"][0]).exp().clamp(max=2.0)
    expected = -columns["weight"][0] * importance * columns["advantage"][0]
    torch.testing.assert_close(gradients(loss, [leaf]), expected)
    assert sums["clip_fraction"] == 0


def test_tokens_without_weight_change_nothing() -> None:
    columns = random_columns([4, 4])
    columns["weight"][1] = torch.zeros(4)
    leaves = [row.requires_grad_() for row in columns["current"]]
    loss, sums = call_loss(AlgorithmSection(), columns)
    alone, alone_sums = call_loss(AlgorithmSection(), {n: r[:1] for n, r in columns.items()})
    torch.testing.assert_close(loss, alone)
    assert sums == pytest.approx(alone_sums)
    assert not gradients(loss, leaves)[4:].any()


@pytest.mark.parametrize("policy_loss", ["vanilla", "gspo", "cispo"])
@pytest.mark.parametrize("reject", [None, "token_k2", "seq_mean_k3"])
def test_a_micro_batch_of_inert_rows_adds_zero(policy_loss: str, reject: str | None) -> None:
    threshold = "0.5" if reject else None
    algorithm = AlgorithmSection(
        policy_loss=policy_loss, reject=reject, reject_threshold=threshold, entropy=0.1, kl=0.1
    )
    columns = random_columns([2, 2]) | {"weight": [torch.zeros(2)] * 2}
    columns["reference"] = columns["behaviour"]
    leaves = [row.requires_grad_() for row in columns["current"]]
    loss, sums = call_loss(algorithm, columns)
    assert loss.item() == 0 and not any(sums.values())
    assert not gradients(loss, leaves).any()


def test_grpo_advantages_are_rewards_measured_against_their_group() -> None:
    reward_R, group_R = [1.0, 0.0, 0.0, 1.0, 5.0, 7.0], ["a", "a", "a", "a", "b", "b"]
    found = estimator(AlgorithmSection()).advantages(reward_R, group_R, [1] * 6)
    spread = np.std([1, 0, 0, 1], ddof=1)
    expected = [0.5 / spread, -0.5 / spread, -0.5 / spread, 0.5 / spread, -(0.5**0.5), 0.5**0.5]
    assert found == pytest.approx(expected, abs=1e-5)
    plain = estimator(AlgorithmSection(normalize_by_std=False)).advantages(
        reward_R, group_R, [1] * 6
    )
    assert plain == pytest.approx([0.5, -0.5, -0.5, 0.5, -1, 1], abs=1e-9)


@pytest.mark.parametrize("name", ["rloo", "opo", "grpo_vectorized", "reinforce_plus_plus_baseline"])
def test_verls_other_group_estimators_work_too(name: str) -> None:
    found = estimator(AlgorithmSection(estimator=name)).advantages(
        [1.0, 0.0, 0.0], ["a", "a", "a"], [1, 1, 1]
    )
    assert found[0] > 0 > found[1] == pytest.approx(found[2])


@pytest.mark.parametrize("name", ["gae", "gdpo", "remax", "no_such"])
def test_an_estimator_that_needs_more_than_rewards_is_refused_with_the_usable_ones(name) -> None:
    with pytest.raises(ConfigError, match=rf"estimator={name} is .*take one of .*grpo.*rloo"):
        estimator(AlgorithmSection(estimator=name))
