"""Advantages of rollouts, by verl's estimators.

verl's estimators take a reward and a mask per token; a rollout has one reward, so each is given as
a response of one token, and what comes back is the rollout's advantage. Estimators that need more
than rewards and groups (a critic's values, a baseline rollout, several rewards) are refused by
name.

Invariants: computed in float64, whatever the model's precision.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn

from lightning_ray.config import AlgorithmSection, ConfigError
from lightning_ray.samples.batch import CallAdvantages, Estimator

# Estimators in which long rollouts count more.
_BY_LENGTH = {"opo"}
# gdpo normalizes several rewards of a rollout apart; of one it would make another grpo.
_NEEDS_REWARDS = {"gdpo"}
# What a rollout can offer an estimator.
_OFFERED = {"token_level_rewards", "response_mask", "index", "config", "norm_adv_by_std_in_grpo"}


def estimator(algorithm: AlgorithmSection) -> Estimator:
    """The function from the rewards and groups of R rollouts to their R advantages.

    Raises:
        ConfigError: `algorithm.estimator` is unknown to verl or needs more than groups and one
            reward per rollout.
    """
    name = algorithm.estimator
    usable = sorted(
        known
        for known, fn in ADV_ESTIMATOR_REGISTRY.items()
        if not _wants(fn) - _OFFERED and known not in _NEEDS_REWARDS
    )
    if name not in usable:
        raise ConfigError(
            f"algorithm.estimator={name} is not an estimator that needs groups and one reward per "
            f"rollout only; take one of {', '.join(usable)}"
        )
    function = get_adv_estimator_fn(name)
    takes = inspect.signature(function).parameters

    def advantages(
        reward_R: Sequence[float], group_R: Sequence[str], length_R: Sequence[int]
    ) -> list[float]:
        mask_R_1 = torch.ones(len(reward_R), 1, dtype=torch.float64)
        if name in _BY_LENGTH:
            # What it takes for a count of tokens is the sum of the mask, by which it multiplies.
            mask_R_1 = torch.tensor(length_R, dtype=torch.float64).clamp(min=1).unsqueeze(-1)
        offered = {
            "token_level_rewards": torch.tensor(reward_R, dtype=torch.float64).unsqueeze(-1),
            "response_mask": mask_R_1,
            "index": np.array(group_R, dtype=object),
            "config": AlgoConfig(norm_adv_by_std_in_grpo=algorithm.normalize_by_std),
            "norm_adv_by_std_in_grpo": algorithm.normalize_by_std,
        }
        found_R_1, _ = function(**{key: value for key, value in offered.items() if key in takes})
        return (found_R_1 / mask_R_1).squeeze(-1).tolist()

    return Estimator(advantages, by_group="index" in takes)


def call_advantages(algorithm: AlgorithmSection) -> CallAdvantages | None:
    """The user's function for advantages per call, if there is one.

    Raises:
        ConfigError: `algorithm.call_advantages` names no function.
    """
    if not algorithm.call_advantages:
        return None
    module, _, name = algorithm.call_advantages.partition(":")
    try:
        found: CallAdvantages = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"algorithm.call_advantages={algorithm.call_advantages}: {error}; give "
            "`module:function(rollout, calls, advantage) -> one number per call`"
        ) from error
    return found


def _wants(function: Callable) -> set[str]:
    """The parameters that have no default."""
    plain = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in plain
    }
