"""The whole configuration of a run, and which settings do not go together.

Reading, overriding and explaining are in `config.py`: import from there. Invariant: a setting that
contradicts another, or that would have no effect, does not validate.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, model_validator

from lightning_ray.sections import (
    AlgorithmSection,
    EngineSection,
    GatewaySection,
    HarnessSection,
    KubernetesSection,
    ModelSection,
    RolloutSection,
    RunSection,
    SamplesSection,
    SamplingSection,
    Section,
    TaskSection,
    TrackingSection,
    TrainerSection,
)


class RunConfig(Section):
    """Everything that a run can be told."""

    run: RunSection = Field(RunSection(), description="The run itself.")
    model: ModelSection = Field(ModelSection(), description="The policy.")
    engine: EngineSection = Field(EngineSection(), description="vLLM actors.")
    sampling: SamplingSection = Field(SamplingSection(), description="How the policy is sampled.")
    gateway: GatewaySection = Field(GatewaySection(), description="What harnesses talk to.")
    harness: HarnessSection = Field(HarnessSection(), description="The agent program.")
    rollout: RolloutSection = Field(RolloutSection(), description="How harnesses are run.")
    kubernetes: KubernetesSection = Field(
        KubernetesSection(), description="Rollouts as Kubernetes Jobs."
    )
    task: TaskSection = Field(TaskSection(), description="Data, workspaces and grading.")
    samples: SamplesSection = Field(SamplesSection(), description="From calls to training rows.")
    algorithm: AlgorithmSection = Field(AlgorithmSection(), description="Advantages and loss.")
    trainer: TrainerSection = Field(TrainerSection(), description="verl policy workers.")
    tracking: TrackingSection = Field(TrackingSection(), description="Where metrics go.")

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
    def groups_in_flight(self) -> int:
        return self.run.groups_in_flight or self.run.groups_per_step

    @property
    def stale_wait_s(self) -> float:
        return self.rollout.timeout_s if self.run.stale_wait_s is None else self.run.stale_wait_s

    @property
    def engine_workers(self) -> int:
        """vLLM workers of all engines, each in a bundle of its own."""
        return self.engine.count * self.engine.tensor_parallel

    @property
    def bundles(self) -> int:
        """Shares of devices; each has room for a trainer rank and an engine worker."""
        return max(self.trainer.ranks, self.engine_workers)

    @property
    def context_tokens(self) -> int:
        """What harnesses are told that the model reads."""
        return self.model.max_prompt_tokens or self.model.max_model_len

    @property
    def max_row_tokens(self) -> int:
        return self.trainer.max_row_tokens or self.model.max_model_len


def _contradictions(config: RunConfig) -> Iterable[str]:
    """Sentences on settings that contradict each other or would have no effect."""
    if "://" in config.run.dir:
        yield (
            f"run.dir={config.run.dir} is a URL; a run directory is a folder of a local disk, "
            "since SQLite and the log of calls need its locks and its fsync"
        )
    if config.sampling.max_tokens >= config.model.max_model_len:
        yield (
            f"sampling.max_tokens={config.sampling.max_tokens} leaves no room for a prompt in "
            f"model.max_model_len={config.model.max_model_len}"
        )
    if (config.model.max_prompt_tokens or 0) >= config.model.max_model_len:
        yield "model.max_prompt_tokens must be below model.max_model_len"
    if config.algorithm.estimator == "grpo" and config.rollout.n < 2:
        yield (
            "rollout.n=1 gives every rollout the advantage 0 with "
            "algorithm.estimator=grpo; use at least 2"
        )
    algorithm = config.algorithm
    if algorithm.normalization_tokens and algorithm.normalization != "constant":
        yield "algorithm.normalization_tokens has no effect without normalization=constant"
    if algorithm.policy_loss != "vanilla" and algorithm.clip_dual != 3.0:
        yield f"algorithm.clip_dual has no effect with policy_loss={algorithm.policy_loss}"
    if algorithm.importance == "none" and algorithm.importance_floor is not None:
        yield "algorithm.importance_floor has no effect with importance=none"
    if (algorithm.importance_floor or 0) >= algorithm.importance_cap:
        yield "algorithm.importance_floor must be below importance_cap"
    if bool(algorithm.reject) != bool(algorithm.reject_threshold):
        yield "algorithm.reject and reject_threshold need each other"
    if config.model.lora_rank == 0 and config.model.lora_targets != "all-linear":
        yield "model.lora_targets has no effect with lora_rank=0"
    if config.trainer.optimizer_steps > config.run.groups_per_step * config.rollout.n:
        yield (
            f"trainer.optimizer_steps={config.trainer.optimizer_steps} is more than the "
            f"{config.run.groups_per_step * config.rollout.n} rollouts of a step"
        )
    if config.trainer.megatron and config.trainer.strategy != "megatron":
        yield "trainer.megatron has no effect without trainer.strategy=megatron"
    if config.trainer.strategy == "megatron" and config.model.lora_rank:
        yield "model.lora_rank is for trainer.strategy=fsdp2 only"
    if config.trainer.strategy == "megatron" and config.model.dtype == "float32":
        yield "trainer.strategy=megatron computes in bfloat16; set model.dtype=bfloat16"
    if config.trainer.weight_sync == "memory" and config.trainer.ranks < config.engine_workers:
        yield (
            f"trainer.weight_sync=memory needs a trainer rank beside each of the "
            f"{config.engine_workers} engine workers (engine.count x engine.tensor_parallel), and "
            f"trainer.ranks={config.trainer.ranks}; raise trainer.ranks, or use file"
        )
    each, left = divmod(config.bundles, config.run.nodes)
    if left:
        yield (
            f"run.nodes={config.run.nodes} does not divide the {config.bundles} bundles that "
            "trainer.ranks and engine.count x engine.tensor_parallel need"
        )
    elif config.run.nodes > 1 and config.trainer.ranks < config.engine_workers:
        yield (
            f"run.nodes={config.run.nodes} needs a trainer rank in each of the "
            f"{config.engine_workers} bundles of the engines; raise trainer.ranks"
        )
    elif each % config.engine.tensor_parallel and config.run.nodes > 1:
        yield (
            f"an engine of engine.tensor_parallel={config.engine.tensor_parallel} needs one node, "
            f"and run.nodes={config.run.nodes} leaves {each} bundles to each"
        )
    sized = "weight_sync_mib" in config.trainer.model_fields_set
    if config.trainer.weight_sync == "file" and sized:
        yield "trainer.weight_sync_mib has no effect with weight_sync=file"
    if config.gateway.hold_s > config.gateway.longest_hold_s:
        yield f"gateway.hold_s={config.gateway.hold_s:g} is above gateway.longest_hold_s"
    yield from _schedule_contradictions(config)
    if config.rollout.sandbox == "none":
        for key in ("sandbox_require", "sandbox_paths"):
            if getattr(config.rollout, key):
                yield f"rollout.{key} has no effect with rollout.sandbox=none"
    yield from _pod_contradictions(config)
    if config.task.grader and config.task.grader_command:
        yield "task.grader and task.grader_command are both set; keep one"
    if config.run.validate_every and config.task.validation is None:
        yield "run.validate_every has no effect without task.validation"
    if config.sampling.validation_temperature is not None and config.task.validation is None:
        yield "sampling.validation_temperature has no effect without task.validation"
    if (config.trainer.max_row_tokens or 0) > config.model.max_model_len:
        yield "trainer.max_row_tokens above model.max_model_len has no effect"


def _pod_contradictions(config: RunConfig) -> Iterable[str]:
    pods = config.kubernetes
    if config.rollout.launcher == "local":
        if pods != type(pods)():
            yield "the section kubernetes has no effect with rollout.launcher=local"
    elif not (pods.image or pods.template):
        yield (
            f"rollout.launcher={config.rollout.launcher} needs kubernetes.image or "
            "kubernetes.template"
        )


def _schedule_contradictions(config: RunConfig) -> Iterable[str]:
    run, in_flight = config.run, config.groups_in_flight
    if in_flight < run.groups_per_step:
        yield (
            f"run.groups_in_flight={in_flight} is less than the {run.groups_per_step} groups of an "
            "update (run.groups_per_step): it would wait for ever"
        )
    if in_flight > run.groups_per_step * (run.max_staleness + 1):
        yield (
            f"run.groups_in_flight={in_flight} cannot all be trained on within "
            f"run.max_staleness={run.max_staleness} updates of {run.groups_per_step} groups; "
            f"at most {run.groups_per_step * (run.max_staleness + 1)}"
        )
    if in_flight == run.groups_per_step:
        for name in ("max_staleness", "stale_wait_s", "drain_s"):
            if getattr(run, name) != type(run).model_fields[name].default:
                yield f"run.{name} has no effect without run.groups_in_flight > groups_per_step"
