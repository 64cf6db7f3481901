"""Sample-level against rollout-level credit, on a harness that splits some rollouts into many rows.

    python benchmarks/ablation.py [--steps 80] [--seeds 3] [--plot docs/images/ablation.png]

The task: say each of six digits plus one. The harness has half of the rollouts done in one call, a
row of six sampled tokens, and half by a sub-agent for each digit, six rows of one token. The reward
is the share of right digits. Three arms, as in the technical report of Agent Lightning v1.0:

- sample / sample: every row is a sample of its own, in the group's mean and in the loss
- rollout / sample: one advantage per rollout, but every row counts as much as another in the loss
- rollout / rollout: what lightning_ray does

Forest, rows, weights, estimator and loss are the trainer's own code; a two-layer Llama is sampled
and updated in this process. Prints validation reward and policy entropy, and draws their curves.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils import tensordict_utils as tu

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
from lightning_ray.samples import batch, forest
from lightning_ray.trainer import advantages, packing
from lightning_ray.trainer.loss import PolicyLoss

DIGITS = 6
DO, SUB = 10, 11
GROUPS, N = 8, 8
ARMS = ("sample / sample", "rollout / sample", "rollout / rollout")
VALIDATION = 256


@dataclass
class Rollout:
    """One execution of the harness: its calls as (prompt, sampled, log-probabilities)."""

    digits: list[int]
    split: bool
    calls: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)
    right: int = 0

    @property
    def reward(self) -> float:
        return self.right / DIGITS


def new_model(seed: int) -> LlamaForCausalLM:
    """A model that can do a little of everything: trained for a moment on noisy examples."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=12, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        )
    )  # fmt: skip
    random = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(24):
        rows, starts = [], []
        for _ in range(64):
            digits = random.integers(0, 10, DIGITS).tolist()
            said = [
                (d + 1) % 10 if random.random() < 0.4 else int(random.integers(10)) for d in digits
            ]
            for prompt, answer in (([DO, *digits], said), ([SUB, 0, digits[0]], said[:1])):
                rows.append(prompt + answer)
                starts.append(len(prompt))
        logits, ids, mask = forward(model, rows)
        for number, start in enumerate(starts):
            mask[number, :start] = False  # only answers are learned
        losses = -logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        optimizer.zero_grad()
        losses[mask[:, 1:]].mean().backward()
        optimizer.step()
    return model


def forward(
    model: LlamaForCausalLM, rows: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, ids and which are no padding, of rows padded at their ends."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = True
    return model(ids, attention_mask=mask.long()).logits, ids, mask


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, prompts: list[list[int]], length: int
) -> list[tuple[list[int], list[float]]]:
    """`length` tokens after each prompt (all equally long)."""
    if not prompts:
        return []
    ids = torch.tensor(prompts)
    logprobs = []
    for _ in range(length):
        distribution = model(ids).logits[:, -1].log_softmax(-1)
        drawn = torch.multinomial(distribution.exp(), 1)
        logprobs.append(distribution.gather(1, drawn))
        ids = torch.cat([ids, drawn], 1)
    said = ids[:, -length:].tolist()
    return list(zip(said, torch.cat(logprobs, 1).tolist(), strict=True))


def play(model: LlamaForCausalLM, tasks: list[list[int]], split: np.ndarray) -> list[Rollout]:
    """The harness, for many tasks at a time; `split` says which it gives to sub-agents."""
    made = [Rollout(digits, bool(apart)) for digits, apart in zip(tasks, split, strict=True)]
    whole = [([DO, *rollout.digits], rollout) for rollout in made if not rollout.split]
    # Each sub-agent is told its place, so that no two of a rollout have the same prompt.
    parts = [
        ([SUB, place, digit], rollout)
        for rollout in made
        if rollout.split
        for place, digit in enumerate(rollout.digits)
    ]
    for asked, length in ((whole, DIGITS), (parts, 1)):
        answers = sample(model, [prompt for prompt, _ in asked], length)
        for (prompt, rollout), (said, logprobs) in zip(asked, answers, strict=True):
            wanted = [(digit + 1) % 10 for digit in prompt[-length:]]
            rollout.calls.append((prompt, said, logprobs))
            rollout.right += sum(a == b for a, b in zip(said, wanted, strict=True))
    return made


def build(rollouts: list[Rollout], arm: str, config: RunConfig) -> batch.Batch:
    """The rollouts as a training batch."""
    finished, calls = [], {}
    for number, rollout in enumerate(rollouts):
        name = f"r{number:03d}"
        task = Task(f"g{number // N}", "")
        finished.append(
            FinishedRollout(
                RolloutSpec(name, task.task_id, task, Split.TRAIN, 0),
                RolloutState.FINISHED, Outcome.COMPLETED, name, 1, Reward(rollout.reward, False),
            )
        )  # fmt: skip
        calls[name] = [
            Call(
                f"{name}-{seq}", name, seq, np.array(prompt, np.int32), np.array(said, np.int32),
                np.array(logprobs, np.float32), (Span(PolicyVersion("x", 0), len(said)),),
                FinishReason.STOP,
            )
            for seq, (prompt, said, logprobs) in enumerate(rollout.calls)
        ]  # fmt: skip
    estimator = advantages.estimator(config.algorithm)
    if arm.startswith("sample"):
        rows = {f"r{n:03d}": len(forest.branches(calls[f"r{n:03d}"])) for n in range(len(rollouts))}
        estimator = by_row(estimator, [rows[r.spec.rollout_id] for r in finished])
    return batch.build(finished, calls, config, estimator)


def by_row(estimator: batch.Estimator, count_R: list[int]) -> batch.Estimator:
    """The estimator over rows: a rollout enters the statistics once per row."""

    def found(
        reward_R: Sequence[float], group_R: Sequence[str], length_R: Sequence[int]
    ) -> list[float]:
        repeated = [i for i, count in enumerate(count_R) for _ in range(count)]
        values = estimator.advantages(
            [reward_R[i] for i in repeated], [group_R[i] for i in repeated], [1] * len(repeated)
        )
        return [values[repeated.index(i)] for i in range(len(reward_R))]

    return batch.Estimator(found)


def update(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, made: batch.Batch, config: RunConfig
) -> float:
    """One optimizer step; returns the mean entropy of the trained tokens."""
    steps = packing.optimizer_steps([made.table])
    if not steps:
        return float("nan")
    [rows] = steps
    data: TensorDict
    data, order = packing.deal(rows, [1.0] * len(rows), 1)
    tu.assign_non_tensor(data, dp_size=1)
    placed = [rows[number].tokens_T.tolist() for number in order]
    logits, ids, _ = forward(model, placed)
    distribution = logits.log_softmax(-1)
    ahead = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    logprobs = distribution.gather(2, ahead[:, :, None]).squeeze(2)
    entropy = -(distribution.exp() * distribution).sum(-1)
    output = {
        name: torch.nested.as_nested_tensor(
            [values[n, : len(row)] for n, row in enumerate(placed)], layout=torch.jagged
        )
        for name, values in (("log_probs", logprobs), ("entropy", entropy.detach()))
    }
    loss, sums = PolicyLoss(config.algorithm)(output, data)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return sums["entropy"] / sum(row.trained for row in rows)


def train(arm: str, seed: int, steps: int, every: int) -> list[tuple[int, float, float, float]]:
    """(step, validation reward, entropy, reward of the rollouts in one call) along a run."""
    config = RunConfig.model_validate(
        {"algorithm": {"normalization": "rollout" if arm.endswith("/ rollout") else "row"}}
    )
    model = new_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    random, torch_seed = np.random.default_rng(1000 + seed), 2000 + seed
    torch.manual_seed(torch_seed)
    held_out = np.random.default_rng(7).integers(0, 10, (VALIDATION, DIGITS)).tolist()
    curve, entropies = [], []
    for step in range(steps + 1):
        if step % every == 0:
            played = play(model, held_out, np.arange(VALIDATION) % 2)
            reward = statistics.mean(r.reward for r in played)
            whole = statistics.mean(r.reward for r in played if not r.split)
            entropy = statistics.mean(entropies[-every:]) if entropies else float("nan")
            curve.append((step, reward, entropy, whole))
        tasks = np.repeat(random.integers(0, 10, (GROUPS, DIGITS)), N, axis=0).tolist()
        split = random.random(len(tasks)) < 0.5
        made = build(play(model, tasks, split), arm, config)
        entropy = update(model, optimizer, made, config)
        entropies += [entropy] if entropy == entropy else []
    return curve


def draw(curves: dict[str, list[list[tuple[int, float, float, float]]]], path: Path) -> None:
    """Reward and entropy over steps: the mean of the seeds, and each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for column, (axis, title) in enumerate(
        zip(axes, ("validation reward", "policy entropy"), strict=True), 1
    ):
        for color, arm in enumerate(ARMS):
            runs = np.array([[point[column] for point in curve] for curve in curves[arm]])
            steps = [point[0] for point in curves[arm][0]]
            for run in runs:
                axis.plot(steps, run, color=f"C{color}", alpha=0.25, linewidth=0.8)
            axis.plot(steps, runs.mean(0), color=f"C{color}", label=arm)
        axis.set_xlabel("update")
        axis.set_title(title)
    axes[0].legend(title="advantage / loss", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Credit by row and by rollout.")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=Path("ablation.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for more
    every = max(options.steps // 16, 1)
    console, curves = Console(), {}
    table = Table(
        title=f"{options.seeds} seeds, {options.steps} updates of {GROUPS} x {N} rollouts"
    )
    for name in (
        "advantage / loss", "best reward", "last reward", "in one call", "entropy, first third",
        "entropy, last third", "entropy, std over updates",
    ):  # fmt: skip
        table.add_column(name, justify="left" if "/" in name else "right")
    for arm in ARMS:
        curves[arm] = []
        for seed in range(options.seeds):
            curves[arm].append(train(arm, seed, options.steps, every))
            console.print(f"{arm}, seed {seed}: last reward {curves[arm][-1][-1][1]:.3f}")

        def spread(values: list[float]) -> str:
            return f"{statistics.mean(values):.3f} ± {statistics.pstdev(values):.3f}"

        third = len(curves[arm][0]) // 3
        entropies = [[point[2] for point in curve[1:]] for curve in curves[arm]]
        table.add_row(
            arm,
            spread([max(point[1] for point in curve) for curve in curves[arm]]),
            spread([curve[-1][1] for curve in curves[arm]]),
            spread([curve[-1][3] for curve in curves[arm]]),
            spread([statistics.mean(e[:third]) for e in entropies]),
            spread([statistics.mean(e[-third:]) for e in entropies]),
            spread([statistics.pstdev(e) for e in entropies]),
        )
    console.print(table)
    draw(curves, options.plot)
    console.print(f"curves: {options.plot}")


if __name__ == "__main__":
    main()
