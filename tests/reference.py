"""The objective, written from the papers in plain float64 torch: call by call, without rows,
packing, padding or verl. What the tests compare the trainer's arithmetic with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor


@dataclass
class RefCall:
    prompt: list[int]
    tokens: list[int]
    behaviour: list[float]


@dataclass
class RefRollout:
    group: str
    reward: float
    calls: list[RefCall]
    # Rows that the default layout makes of the calls: which calls share one.
    rows: list[list[int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(len(call.tokens) for call in self.calls)


class ToyModel:
    """A causal model: the logits of a position are a linear map of the mean embedding so far."""

    def __init__(self, seed: int, vocabulary: int = 7, width: int = 5) -> None:
        random = torch.Generator().manual_seed(seed)
        shape = {"embedding": (vocabulary, width), "head": (width, vocabulary)}
        self.weights = {
            name: (torch.randn(s, generator=random, dtype=torch.float64) * 0.6).requires_grad_()
            for name, s in shape.items()
        }

    def __call__(self, tokens: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
        """Log-probabilities over the vocabulary after each token."""
        embedded = self.weights["embedding"].to(dtype)[torch.tensor(tokens)]
        count = torch.arange(1, len(tokens) + 1, dtype=dtype).unsqueeze(-1)
        return (embedded.cumsum(0) / count @ self.weights["head"].to(dtype)).log_softmax(-1)

    def of_call(self, call: RefCall) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each sampled token of a call."""
        whole = call.prompt + call.tokens
        rows = self(whole)[len(call.prompt) - 1 : -1]
        chosen = rows[torch.arange(len(call.tokens)), torch.tensor(call.tokens)]
        return chosen, -(rows.exp() * rows).sum(-1)


def advantages(name: str, rollouts: list[RefRollout], by_std: bool = True) -> list[float]:
    groups: dict[str, list[RefRollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)

    if name == "reinforce_plus_plus":  # one baseline for all, whatever their task
        groups = dict.fromkeys(groups, rollouts)

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    def std(values: list[float]) -> float:
        middle = mean(values)
        return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))

    centred = []
    for rollout in rollouts:
        rewards = [r.reward for r in groups[rollout.group]]
        n, scale = len(rewards), (std(rewards) + 1e-6 if by_std else 1.0)
        match name:
            case "grpo" | "grpo_vectorized":
                value = (rollout.reward - mean(rewards)) / scale
            case "rloo" | "rloo_vectorized":
                value = rollout.reward - (math.fsum(rewards) - rollout.reward) / (n - 1)
            case "opo":
                mine = groups[rollout.group]
                weighted = math.fsum(r.length * r.reward for r in mine)
                value = rollout.reward - weighted / sum(r.length for r in mine)
            case "gpg":
                nonzero = sum(r.reward != 0 for r in rollouts)
                value = len(rollouts) / nonzero * (rollout.reward - mean(rewards))
            case "grpo_passk":
                best, second = sorted(rewards, reverse=True)[:2]
                first = next(r for r in groups[rollout.group] if r.reward == best)
                value = (best - second) / scale if rollout is first else 0.0
            case "reinforce_plus_plus" | "reinforce_plus_plus_baseline":
                value = rollout.reward - mean(rewards)
            case _:
                raise NotImplementedError(name)
        centred.append(value if len(set(rewards)) > 1 else 0.0)
    if name.startswith("reinforce_plus_plus"):
        variance = std(centred) ** 2 + 1e-8
        middle = mean(centred)
        centred = [
            (v - middle) / math.sqrt(variance)
            if len({r.reward for r in groups[x.group]}) > 1
            else 0
            for v, x in zip(centred, rollouts, strict=True)
        ]
    return centred


def token_weight(name: str, rollouts: list[RefRollout], rollout: RefRollout, call: int) -> float:
    match name:
        case "rollout":
            return 1 / (len(rollouts) * rollout.length)
        case "token":
            return 1 / sum(r.length for r in rollouts)
        case "row":
            row = next(row for row in rollout.rows if call in row)
            tokens = sum(len(rollout.calls[c].tokens) for c in row)
            return 1 / (sum(len(r.rows) for r in rollouts) * tokens)
        case "constant":
            return 1 / (len(rollouts) * 50)
    raise NotImplementedError(name)


@dataclass
class Objective:
    policy_loss: str = "vanilla"
    low: float = 0.2
    high: float = 0.2
    dual: float = 3.0
    importance: str = "token"
    cap: float = 2.0
    floor: float | None = None
    reject: str | None = None
    keep: tuple[float, float] = (0.0, math.inf)
    entropy: float = 0.0
    kl: float = 0.0
    kl_estimator: str = "k3+"

    def of_call(
        self, current: Tensor, old: Tensor, behaviour: Tensor, base: Tensor, entropy: Tensor,
        advantage: float,
    ) -> Tensor:  # fmt: skip
        """The loss of each token of a call, before its weight."""
        log_ratio = current - old
        if self.policy_loss == "gspo":
            # One ratio for the call, its gradient spread over the tokens (GSPO-token, eq. 14).
            log_ratio = log_ratio.mean().detach() + current - current.detach()
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.low, 1 + self.high)
        if self.policy_loss == "cispo":
            gain = clipped.detach() * advantage * current
        else:
            gain = torch.minimum(ratio * advantage, clipped * advantage)
            if self.policy_loss == "vanilla" and advantage < 0:
                gain = gain.clamp(min=self.dual * advantage)
        off = old - behaviour
        weight = torch.ones_like(off)
        if self.importance != "none":
            weight = (off.sum() if self.importance == "sequence" else off).exp() * weight
            inside = (weight <= self.cap) & (weight >= (self.floor or 0))
            capped = weight.clamp(max=self.cap)
            weight = weight * inside if self.floor is not None else capped
        if self.reject is not None:
            weight = weight * self._kept(off)
        kl = _kl(current - base, self.kl_estimator)
        return -weight.detach() * gain - self.entropy * entropy + self.kl * kl

    def _kept(self, off: Tensor) -> Tensor:
        """Whether the divergence of a token, or of its call, is within bounds; for k1 these are of
        the ratio behaviour / old."""
        assert self.reject is not None
        level, estimator = self.reject.rsplit("_", 1)
        value = {"k1": -off, "k2": off**2 / 2, "k3": off.exp() - 1 - off}[estimator]
        match level:
            case "seq_sum":
                value = value.sum()
            case "seq_mean":
                value = value.mean()
            case "seq_max":
                value = value.max()
        value = value.exp() if estimator == "k1" else value
        return (value >= self.keep[0]) & (value <= self.keep[1])


def _kl(difference: Tensor, estimator: str) -> Tensor:
    """Schulman's estimators of KL(current || base), by current - base of sampled tokens; with + the
    value is the named one's, the gradient that of k2."""
    k2 = 0.5 * difference**2
    k3 = ((-difference).exp() - 1 + difference).clamp(max=10)  # as verl bounds it
    value = {"k1": difference, "k2": k2, "k3": k3}[estimator.removesuffix("+")]
    return value.detach() + k2 - k2.detach() if estimator.endswith("+") else value


def loss(
    rollouts: list[RefRollout],
    estimator: str,
    by_std: bool,
    normalization: str,
    objective: Objective,
    models: dict[str, ToyModel],
) -> Tensor:
    """The whole objective of one optimizer step."""
    total = torch.zeros((), dtype=torch.float64)
    found = advantages(estimator, rollouts, by_std)
    signal = {r.group for r, a in zip(rollouts, found, strict=True) if a}
    for rollout, advantage in zip(rollouts, found, strict=True):
        if rollout.group not in signal:
            continue
        for number, call in enumerate(rollout.calls):
            current, entropy = models["current"].of_call(call)
            with torch.no_grad():
                # The trainer hands these over in single precision.
                old = models["old"].of_call(call)[0].float().double()
                base = models["base"].of_call(call)[0].float().double()
            behaviour = torch.tensor(call.behaviour, dtype=torch.float64)
            tokens = objective.of_call(current, old, behaviour, base, entropy, advantage)
            total = total + token_weight(normalization, rollouts, rollout, number) * tokens.sum()
    return total
