"""The sections of a run's configuration: every key, its type, its default and its meaning.

Pure declarations; reading, overriding and explaining are in `config.py`: import from there.
Invariant: a setting that contradicts another, or that would have no effect, does not validate.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of every section: frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class RunSection(Section):
    name: str = Field(
        "train", description="Name of the run; its directory and dashboards carry it."
    )
    dir: str = Field(
        "runs/{name}", description="Run directory. A run resumes from what lies there."
    )
    seed: int = Field(0, description="Seed of data order, sampling and training.")
    steps: int = Field(10, ge=1, description="Optimizer batches (policy versions) in all.")
    groups_per_step: int = Field(4, ge=1, description="Task groups that one update consumes.")
    validate_every: int = Field(
        0,
        ge=0,
        description="Validate every k steps. 0: only before the first and after the last step.",
    )
    checkpoint_every: int = Field(
        1, ge=1, description="Checkpoint every k steps, and after the last."
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="Newest checkpoints kept; the best is kept too."
    )
    collect_timeout_s: float = Field(
        7200,
        gt=0,
        description="Longest wait for the rollouts of one step before the "
        "run stops with a diagnosis.",
    )
    max_infrastructure_faults: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of a step's rollouts lost to infrastructure that stops the run.",
    )


class ModelSection(Section):
    path: str = Field(
        "smollm2-135m",
        description="A Hugging Face folder, a hub name, or a built-in name (smollm2-135m, tiny).",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16",
        description="Precision of weights and computation, in the engine and the trainer.",
    )
    max_model_len: int = Field(
        32768, ge=16, description="Context window in tokens: prompt and reply."
    )
    chat_template: str | None = Field(
        None, description="Path of a Jinja chat template that replaces the tokenizer's own."
    )
    tool_parser: str | None = Field(
        None, description="vLLM tool parser (hermes, qwen3_xml, llama3_json, ...)."
    )
    reasoning_parser: str | None = Field(
        None, description="vLLM reasoning parser (qwen3, deepseek_r1, ...)."
    )
    keep_reasoning: bool = Field(
        False,
        description="Keep the reasoning of earlier turns in the prompt, also where the harness or "
        "the chat template leaves it out (which makes every turn a new branch).",
    )
    trust_remote_code: bool = Field(False, description="Allow model code from the model folder.")


class EngineSection(Section):
    count: int = Field(1, ge=1, description="vLLM engines.")
    tensor_parallel: int = Field(1, ge=1, description="GPUs per engine.")
    max_num_seqs: int = Field(64, ge=1, description="Sequences one engine decodes at a time.")
    gpu_memory_utilization: float = Field(
        0.85,
        gt=0,
        le=1,
        description="Share of a GPU's memory for the engine while it is awake (GPU only).",
    )
    cpu_kv_cache_gib: int = Field(
        1, ge=1, description="KV cache of an engine on a CPU, in GiB (CPU only)."
    )
    enforce_eager: bool | None = Field(
        None,
        description="Skip compilation and CUDA graphs. Default: true on a CPU, false on a GPU.",
    )
    threads: int = Field(2, ge=1, description="OpenMP threads of an engine on a CPU (CPU only).")
    verify_sync: bool = Field(
        False,
        description="After each weight sync compare the engine's checksum with the trainer's.",
    )


class SamplingSection(Section):
    temperature: float = Field(
        1.0, gt=0, description="Sampling temperature; the trainer divides logits by it too."
    )
    max_tokens: int = Field(2048, ge=1, description="Most tokens sampled in one call.")
    honour_max_tokens: bool = Field(
        True, description="Let a harness ask for fewer tokens than max_tokens."
    )
    honour_stop: bool = Field(True, description="Let a harness give stop strings.")
    validation_temperature: float | None = Field(
        None, gt=0, description="Temperature in validation. Default: as in training."
    )


class GatewaySection(Section):
    host: str = Field("127.0.0.1", description="Address the gateway listens on.")
    port: int = Field(
        8765, ge=0, le=65535, description="Port the gateway listens on; 0 takes a free one."
    )
    replicas: int = Field(1, ge=1, description="Gateway replicas.")
    advertise: str | None = Field(
        None,
        description="Base URL that harnesses use. Default: "
        "http://HOST:PORT of this cluster's head.",
    )
    haproxy: bool = Field(
        True, description="Use Ray Serve's HAProxy ingress where Ray can (Linux)."
    )
    hold_s: float = Field(
        90,
        gt=0,
        description="Seconds that a model call is held while the gate is closed (an update), "
        "before the answer is 503 with Retry-After: 20. Every known harness bears 90.",
    )
    max_body_mib: int = Field(
        32, ge=1, description="Largest request body, in MiB; above it the answer is 413."
    )


class HarnessSection(Section):
    recipe: str = Field(
        "mini-swe-agent", description="A built-in recipe, or the path of a YAML file with your own."
    )
    args: list[str] = Field(
        default_factory=list, description="Arguments added to the recipe's command."
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment added to the recipe's."
    )


class RolloutSection(Section):
    n: int = Field(8, ge=1, description="Rollouts per task: the GRPO group.")
    concurrency: int = Field(
        16, ge=1, description="Harnesses running at a time in the whole cluster."
    )
    retries: int = Field(2, ge=0, description="New attempts after an infrastructure fault.")
    timeout_s: float = Field(1800, gt=0, description="Time limit of one attempt, in seconds.")
    cpus: float = Field(
        0.25,
        gt=0,
        description="CPUs that Ray reserves per harness (it mostly waits for the model).",
    )
    memory_mib: int = Field(
        2048, ge=64, description="Memory limit of a harness and its tools, in MiB."
    )
    max_processes: int = Field(
        256, ge=8, description="Processes a harness and its tools may have at a time."
    )
    output_mib: int = Field(
        16, ge=1, description="Most stdout and stderr kept from a harness, in MiB."
    )
    workspace_mib: int = Field(512, ge=1, description="Largest file a harness may write, in MiB.")
    keep_workspaces: bool = Field(
        False, description="Keep workspaces after grading, for debugging."
    )


class TaskSection(Section):
    train: str = Field(
        "lightning_ray.tasks.swe.embedded:train", description="`module:function` or JSONL of tasks."
    )
    validation: str | None = Field(
        "lightning_ray.tasks.swe.embedded:validation",
        description="`module:function` or JSONL of validation tasks; null for none.",
    )
    prepare: str | None = Field(
        "lightning_ray.tasks.swe.workspace:prepare",
        description="`module:function(task, workspace)` that fills a fresh "
        "workspace. null: it stays empty.",
    )
    collect: str | None = Field(
        "lightning_ray.tasks.swe.workspace:collect",
        description="`module:function(task, workspace) -> dict` that reads the "
        "result once the harness is dead.",
    )
    grader: str | None = Field(
        "lightning_ray.tasks.swe.grading:grade",
        description="`module:function(task, result, episode) -> Reward`. null: "
        "command, or a POST from outside.",
    )
    grader_command: list[str] | None = Field(
        None, description="Command that reads a JSON object on stdin and prints a reward as JSON."
    )
    grader_timeout_s: float = Field(300, gt=0, description="Longest wait for a reward, in seconds.")


class AlgorithmSection(Section):
    estimator: str = Field("grpo", description="Advantage estimator, by verl's name.")
    normalize_by_std: bool = Field(
        True, description="Divide the advantage by the group's standard deviation."
    )
    clip_low: float = Field(0.2, ge=0, description="PPO clip below the ratio 1.")
    clip_high: float = Field(0.2, ge=0, description="PPO clip above the ratio 1.")
    clip_dual: float = Field(
        3.0, gt=1, description="Dual clip: largest loss factor for negative advantages."
    )
    importance_cap: float = Field(
        2.0,
        gt=0,
        description="Cap of the detached importance weight old/behaviour "
        "(truncated importance sampling).",
    )
    entropy: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")


class TrainerSection(Section):
    ranks: int = Field(1, ge=1, description="Data-parallel trainer ranks, one per bundle.")
    strategy: Literal["fsdp2"] = Field("fsdp2", description="verl training engine.")
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
    threads: int = Field(2, ge=1, description="torch threads per rank on a CPU (CPU only).")


class TrackingSection(Section):
    backends: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab"], ...] = Field(
        ("tensorboard",), description="verl Tracking back ends."
    )
    project: str = Field("lightning_ray", description="Project name for the tracking back ends.")


class RunConfig(Section):
    """Everything that a run can be told."""

    run: RunSection = Field(default_factory=RunSection, description="The run itself.")
    model: ModelSection = Field(default_factory=ModelSection, description="The policy.")
    engine: EngineSection = Field(default_factory=EngineSection, description="vLLM actors.")
    sampling: SamplingSection = Field(
        default_factory=SamplingSection, description="How the policy is sampled."
    )
    gateway: GatewaySection = Field(
        default_factory=GatewaySection, description="What harnesses talk to."
    )
    harness: HarnessSection = Field(
        default_factory=HarnessSection, description="The agent program."
    )
    rollout: RolloutSection = Field(
        default_factory=RolloutSection, description="How harnesses are run."
    )
    task: TaskSection = Field(
        default_factory=TaskSection, description="Data, workspaces and grading."
    )
    algorithm: AlgorithmSection = Field(
        default_factory=AlgorithmSection, description="Advantages and loss."
    )
    trainer: TrainerSection = Field(
        default_factory=TrainerSection, description="verl policy workers."
    )
    tracking: TrackingSection = Field(
        default_factory=TrackingSection, description="Where metrics go."
    )

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        problems = list(_contradictions(self))
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir.replace("{name}", self.run.name)).expanduser().absolute()

    @property
    def max_row_tokens(self) -> int:
        return self.trainer.max_row_tokens or self.model.max_model_len


def _contradictions(config: RunConfig) -> Iterable[str]:
    """Sentences on settings that contradict each other or would have no effect."""
    if config.sampling.max_tokens >= config.model.max_model_len:
        yield (
            f"sampling.max_tokens={config.sampling.max_tokens} leaves no room for a prompt in "
            f"model.max_model_len={config.model.max_model_len}"
        )
    if config.algorithm.estimator == "grpo" and config.rollout.n < 2:
        yield (
            "rollout.n=1 gives every rollout the advantage 0 with "
            "algorithm.estimator=grpo; use at least 2"
        )
    if config.trainer.optimizer_steps > config.run.groups_per_step * config.rollout.n:
        yield (
            f"trainer.optimizer_steps={config.trainer.optimizer_steps} is more than the "
            f"{config.run.groups_per_step * config.rollout.n} rollouts of a step"
        )
    if config.task.grader and config.task.grader_command:
        yield "task.grader and task.grader_command are both set; keep one"
    if config.run.validate_every and config.task.validation is None:
        yield "run.validate_every has no effect without task.validation"
    if config.sampling.validation_temperature is not None and config.task.validation is None:
        yield "sampling.validation_temperature has no effect without task.validation"
    if (config.trainer.max_row_tokens or 0) > config.model.max_model_len:
        yield "trainer.max_row_tokens above model.max_model_len has no effect"
