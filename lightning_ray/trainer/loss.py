"""The loss: a plain sum over tokens of precomputed weights.

    loss = sum_t weight_t * (importance_t * ppo_clip(current_t / old_t, advantage_t) - entropy *
    H_t)

The weights come with the batch (1 / (R x T), see `samples.batch`), so nothing is averaged here.
PPO's clip (https://arxiv.org/abs/1707.06347, eq. 7) and the dual clip
(https://arxiv.org/abs/1912.09729, eq. 5) are verl's "vanilla" policy loss. `importance` is min(old
/ behaviour, cap), detached: the truncated importance sampling that makes up for an engine that
computes a little differently, or was a little older. Left out of textbook PPO: a value function,
and a KL term against a reference model.

Invariants: the gradient does not depend on how tokens are spread over rows, micro-batches and
ranks; every metric is a sum over trained tokens, for the driver to add up and divide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
from verl.workers.config import ActorConfig

from lightning_ray.config import AlgorithmSection

# The names of the sums that come with each micro-batch's loss.
SUMS = ("clip_fraction", "kl", "log_ratio_abs", "importance", "entropy")
# exp(20) is far beyond every cap; it only keeps infinity away from products with zero.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """The loss function for `TrainingWorker`, called once per micro-batch of N rows.

    All columns are jagged, N rows of T, and aligned with the token *before* the one they speak of,
    as the model's log-probabilities are.
    """

    algorithm: AlgorithmSection
    verl: ActorConfig = field(init=False)

    def __post_init__(self) -> None:
        config = ActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio_low=self.algorithm.clip_low,
            clip_ratio_high=self.algorithm.clip_high,
            clip_ratio_c=self.algorithm.clip_dual,
            loss_agg_mode="token-sum",
        )
        object.__setattr__(self, "verl", config)

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss to call backward on, and sums over the trained tokens of this micro-batch."""
        current = model_output["log_probs"].values()
        weight = data["weight"].values()
        behaviour = data["behaviour"].values()
        # With one optimizer step per batch the old policy is the current one.
        old = data["old"].values() if "old" in data else current.detach()
        mask = (weight > 0).to(current.dtype)
        ranks = data["dp_size"]

        log_importance = (old - behaviour).clamp(max=MAX_LOG_RATIO)
        importance = log_importance.exp().clamp(max=self.algorithm.importance_cap)
        self.verl.global_batch_info["dp_size"] = ranks
        loss, policy = get_policy_loss_fn("vanilla")(
            old_log_prob=old,
            log_prob=current,
            advantages=data["advantage"].values(),
            response_mask=mask,
            loss_agg_mode="token-sum",
            config=self.verl,
            rollout_is_weights=weight * importance,
        )

        def total(values: torch.Tensor) -> float:
            return (values.detach() * mask).sum().item()

        sums = {
            "clip_fraction": policy["actor/pg_clipfrac"] * mask.sum().item(),
            "kl": total(kl_penalty(behaviour, current.detach(), "k3")),
            "log_ratio_abs": total((current.detach() - behaviour).abs()),
            "importance": total(importance),
            "entropy": total(model_output["entropy"].values()),
        }
        if self.algorithm.entropy:
            entropy = model_output["entropy"].values()
            loss = loss - self.algorithm.entropy * (entropy * weight).sum() * ranks
        return loss, sums
