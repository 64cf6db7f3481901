"""The sections of a run's configuration that say how it learns: rows, credit, loss, optimizer.

Pure declarations; import from `config.py`. The others are in `sections.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lightning_ray.sections import Section


class SamplesSection(Section):
    merge: Literal["forest", "call"] = Field(
        "forest",
        description="Training rows: calls that continue each other share one (forest), or every "
        "call is one (call).",
    )
    train_side_calls: bool = Field(
        False, description="Train side calls too: titles, compaction summaries."
    )
    train_constrained: bool = Field(
        False,
        description="Train tokens sampled under a grammar, whose recorded probabilities the "
        "trainer cannot reproduce.",
    )


class AlgorithmSection(Section):
    estimator: str = Field(
        "grpo",
        description="Advantage estimator, by verl's name: grpo, rloo, opo, gpg, grpo_passk, "
        "reinforce_plus_plus_baseline, ...",
    )
    normalize_by_std: bool = Field(
        True,
        description="Divide the advantage by the group's standard deviation (Dr. GRPO does not).",
    )
    call_advantages: str | None = Field(
        None,
        description="`module:function(rollout, calls, advantage)` that gives each call of a "
        "rollout its own advantage (process rewards). null: all have the rollout's.",
    )
    refill: int = Field(
        0,
        ge=0,
        description="Most rounds in which groups without a signal, or with fewer than two usable "
        "rollouts, are replaced by groups of other tasks (dynamic sampling). 0: they are skipped.",
    )
    normalization: Literal["rollout", "token", "row", "constant"] = Field(
        "rollout",
        description="What counts equally in the loss: every rollout, every token of the batch, "
        "every row, or every rollout divided by a constant length (Dr. GRPO).",
    )
    normalization_tokens: int | None = Field(
        None,
        ge=1,
        description="The length of normalization=constant. Default: trainer.max_row_tokens.",
    )
    policy_loss: Literal["vanilla", "gspo", "cispo"] = Field(
        "vanilla",
        description="Policy loss, by verl's name: vanilla (PPO's clip), gspo (one ratio per call), "
        "cispo.",
    )
    clip_low: float = Field(0.2, ge=0, description="Clip below the ratio 1.")
    clip_high: float = Field(0.2, ge=0, description="Clip above the ratio 1.")
    clip_dual: float = Field(
        3.0, gt=1, description="Dual clip: largest loss factor for negative advantages (vanilla)."
    )
    importance: Literal["token", "sequence", "none"] = Field(
        "token",
        description="Detached importance weight old/behaviour: per token, per call (the product "
        "of its tokens'), or none.",
    )
    importance_cap: float = Field(
        2.0,
        gt=0,
        description="Largest importance weight (truncated importance sampling).",
    )
    importance_floor: float | None = Field(
        None,
        gt=0,
        description="With it, tokens whose importance weight is outside floor and cap leave the "
        "loss (IcePop).",
    )
    reject: str | None = Field(
        None,
        pattern=r"^(token_k[123]|seq_(sum|mean)_k[123]|seq_max_k[23])$",
        description="Rejection of tokens or calls that the trainer finds too unlikely, by verl's "
        "name: token_k1, token_k2, token_k3, seq_sum_k1, seq_mean_k1, seq_max_k2, ...",
    )
    reject_threshold: str | None = Field(
        None,
        pattern=r"^[0-9.]+(_[0-9.]+)?$",
        description="Threshold of `reject`, as verl writes it: 2.0, or 0.5_2.0 for k1.",
    )
    entropy: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    kl: float = Field(
        0.0,
        ge=0,
        description="Weight of the KL divergence from the model that the run started with.",
    )
    kl_estimator: Literal["k2", "k3", "k1+", "k3+"] = Field(
        "k3+",
        description="Estimator of the KL divergence (http://joschu.net/blog/kl-approx.html). With "
        "+ its gradient is that of k2, the unbiased one.",
    )


class TrainerSection(Section):
    ranks: int = Field(1, ge=1, description="Data-parallel trainer ranks, one per bundle.")
    strategy: Literal["fsdp2", "megatron"] = Field(
        "fsdp2", description="verl training engine. megatron needs its own packages."
    )
    megatron: dict[str, int | float | bool | str | None] = Field(
        default_factory=dict,
        description="Settings of verl's Megatron engine (McoreEngineConfig), such as "
        "tensor_model_parallel_size or expert_model_parallel_size.",
    )
    lr: float = Field(1e-6, gt=0, description="Learning rate of AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of AdamW.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Betas of AdamW.")
    clip_grad: float = Field(1.0, gt=0, description="Largest gradient norm.")
    optimizer_steps: int = Field(
        1, ge=1, description="Optimizer steps per batch, each over whole rollouts."
    )
    micro_batch_tokens: int = Field(16384, ge=16, description="Tokens per micro-batch and rank.")
    max_row_tokens: int | None = Field(
        None, description="Longest training row in tokens. Default: model.max_model_len."
    )
    gradient_checkpointing: bool = Field(
        True, description="Recompute activations in the backward pass."
    )
    weight_sync: Literal["auto", "file", "memory"] = Field(
        "auto",
        description="How new weights reach the engines: in one file, or from each rank's memory "
        "into the engine worker in its bundle (CUDA IPC; shared memory on a CPU). auto: memory on "
        "GPUs where every engine worker has a rank beside it, else file.",
    )
    weight_sync_mib: int = Field(
        256, ge=1, description="Size of the buffer between a rank and an engine worker, in MiB."
    )
    threads: int = Field(2, ge=1, description="torch threads per rank on a CPU (CPU only).")


class TrackingSection(Section):
    backends: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab"], ...] = Field(
        ("tensorboard",), description="verl Tracking back ends."
    )
    project: str = Field("lightning_ray", description="Project name for the tracking back ends.")
