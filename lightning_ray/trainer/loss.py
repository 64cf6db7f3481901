"""The loss: a plain sum over tokens of precomputed weights.

    loss = sum_t weight_t * (importance_t * policy_loss(current_t / old_t, advantage_t)
                             - entropy * H_t + kl * KL_t)

The weights come with the batch (by default 1 / (R x T), see `samples.batch`), so nothing is
averaged here. The policy losses are verl's: PPO's clip (https://arxiv.org/abs/1707.06347, eq. 7)
with the dual clip (https://arxiv.org/abs/1912.09729, eq. 5), GSPO (https://arxiv.org/abs/2507.18071)
and CISPO (https://arxiv.org/abs/2506.13585). `importance` is min(old / behaviour, cap), detached:
the truncated importance sampling that makes up for an engine that computes a little differently, or
was a little older. Left out of textbook PPO: a value function.

What speaks of a sequence speaks of a call. A call lies whole in one row, so tokens are laid out as
one line per call before verl sees them.

Invariants: the gradient does not depend on how tokens are spread over rows, micro-batches and
ranks; every metric is a sum over trained tokens, for the driver to add up and divide.
"""

# variables carry shapes
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
from verl.workers.config import ActorConfig

from lightning_ray.config import AlgorithmSection

# The names of the sums that come with each micro-batch's loss.
SUMS = ("clip_fraction", "kl", "log_ratio_abs", "importance", "entropy", "rejected", "kl_reference")
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
        algorithm, ranks = self.algorithm, data["dp_size"]
        lines = Lines(data["call"], data["weight"].values() > 0)
        current_SL = lines.spread(model_output["log_probs"].values())
        weight_SL = lines.spread(data["weight"].values())
        behaviour_SL = lines.spread(data["behaviour"].values())
        # With one optimizer step per batch the old policy is the current one.
        old_SL = lines.spread(data["old"].values()) if "old" in data else current_SL.detach()
        mask_SL = lines.mask_SL.to(current_SL.dtype)

        importance_SL, kept_SL = self._importance(old_SL - behaviour_SL, mask_SL)
        self.verl.global_batch_info["dp_size"] = ranks
        loss, policy = get_policy_loss_fn(algorithm.policy_loss)(
            old_log_prob=old_SL,
            log_prob=current_SL,
            advantages=lines.spread(data["advantage"].values()),
            response_mask=mask_SL,
            loss_agg_mode="token-sum",
            config=self.verl,
            rollout_is_weights=weight_SL * importance_SL * kept_SL,
        )

        def total(values_SL: torch.Tensor) -> float:
            return (values_SL.detach() * mask_SL).sum().item()

        detached_SL = current_SL.detach()
        sums = {
            "clip_fraction": policy["actor/pg_clipfrac"] * mask_SL.sum().item(),
            "kl": total(kl_penalty(behaviour_SL, detached_SL, "k3")),
            "log_ratio_abs": total((detached_SL - behaviour_SL).abs()),
            "importance": total(importance_SL),
            "rejected": total(1 - kept_SL),
        }
        if "entropy" in model_output:
            entropy_SL = lines.spread(model_output["entropy"].values())
            sums["entropy"] = total(entropy_SL)
            if algorithm.entropy:
                loss = loss - algorithm.entropy * (entropy_SL * weight_SL).sum() * ranks
        if algorithm.kl:
            reference_SL = lines.spread(data["reference"].values())
            kl_SL = kl_penalty(current_SL, reference_SL, algorithm.kl_estimator)
            loss = loss + algorithm.kl * (kl_SL * weight_SL).sum() * ranks
            sums["kl_reference"] = total(kl_penalty(detached_SL, reference_SL, "k3"))
        return loss, sums

    def _importance(
        self, log_ratio_SL: torch.Tensor, mask_SL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights old / behaviour, and 1 where a token stays in the loss."""
        algorithm, kept_SL = self.algorithm, mask_SL
        # verl's function refuses a micro-batch of inert rows.
        if algorithm.reject and mask_SL.any():
            kept_SL, _ = compute_rollout_rejection_mask(
                log_ratio_SL, mask_SL, algorithm.reject, algorithm.reject_threshold
            )
        if algorithm.importance == "none":
            return torch.ones_like(mask_SL), kept_SL
        if algorithm.importance == "sequence":
            log_ratio_SL = (log_ratio_SL * mask_SL).sum(-1, keepdim=True).expand_as(mask_SL)
        # verl's own function divides by zero where a micro-batch has no weight left.
        weights_SL = log_ratio_SL.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * mask_SL
        if algorithm.importance_floor is None:
            return weights_SL.clamp(max=algorithm.importance_cap), kept_SL
        inside_SL = (weights_SL >= algorithm.importance_floor) & (
            weights_SL <= algorithm.importance_cap
        )
        return weights_SL * inside_SL, kept_SL


class Lines:
    """Puts the trained tokens of a micro-batch on one line per call: S calls, L tokens in the
    longest.

    Args:
        call: jagged, N rows of T: equal for tokens of one call.
        trained_T: which tokens of all rows together are trained.
    """

    def __init__(self, call: torch.Tensor, trained_T: torch.Tensor) -> None:
        lengths_N = call.offsets().diff()
        row_T = torch.arange(len(lengths_N), device=trained_T.device).repeat_interleave(lengths_N)
        self._trained_T = trained_T
        key_M = torch.stack([row_T, call.values().long()])[:, trained_T]
        # A call's tokens stand together, so its first token's place is where its line begins.
        _, line_M, count_S = key_M.unique_consecutive(
            dim=1, return_inverse=True, return_counts=True
        )
        first_S = count_S.cumsum(0) - count_S
        self._line_M = line_M
        self._place_M = torch.arange(len(line_M), device=line_M.device) - first_S[line_M]
        # A micro-batch of inert rows still needs a line.
        shape = (max(len(count_S), 1), int(count_S.max()) if len(count_S) else 1)
        self.mask_SL = torch.zeros(shape, dtype=torch.bool, device=trained_T.device)
        self.mask_SL[self._line_M, self._place_M] = True

    def spread(self, values_T: torch.Tensor) -> torch.Tensor:
        """Values of all tokens, on lines of S x L; 0 beyond the end of a line."""
        lines_SL = values_T.new_zeros(self.mask_SL.shape)
        return lines_SL.index_put((self._line_M, self._place_M), values_T[self._trained_T])
