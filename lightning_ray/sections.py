"""The sections of a run's configuration: every key, its type, its default and its meaning.

Pure declarations; import from `config.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
    nodes: int = Field(
        1,
        ge=1,
        description="Nodes over which trainer ranks and engines are spread evenly. Several nodes "
        "share the run directory and the model's folder, on CephFS or Lustre, say, not on NFS.",
    )
    seed: int = Field(0, description="Seed of data order, sampling and training.")
    steps: int = Field(10, ge=1, description="Optimizer batches (policy versions) in all.")
    groups_per_step: int = Field(4, ge=1, description="Task groups that one update consumes.")
    groups_in_flight: int | None = Field(
        None,
        ge=1,
        description="Groups begun and not yet trained on. More than groups_per_step is collocated "
        "async RL: unfinished ones are carried over. Default: groups_per_step (synchronous).",
    )
    max_staleness: int = Field(
        2,
        ge=0,
        description="Most updates between the weights that sampled a group's first token and those "
        "that train on it. An update waits for groups that would become older.",
    )
    stale_wait_s: float | None = Field(
        None,
        ge=0,
        description="Longest such wait; then those groups are given up and their tasks queued "
        "again. Default: rollout.timeout_s.",
    )
    drain_s: float | None = Field(
        None,
        ge=0,
        description="Seconds that model calls in flight have to end before an update; the rest is "
        "interrupted, and continued under the new weights (0: at once). null: all are waited for.",
    )
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
    storage: str | None = Field(
        None,
        description="Where the checkpoints are copied to, and fetched from by a machine that has "
        "none: a path, or a URL that pyarrow or fsspec knows (s3://..., gs://...).",
    )
    collect_timeout_s: float = Field(
        7200,
        gt=0,
        description="Longest wait for the rollouts of one step before the "
        "run stops with a diagnosis.",
    )
    wait_timeout_s: float = Field(
        3600,
        gt=0,
        description="Longest wait for any other answer of a process (an engine, the trainer, the "
        "controller, the store) before it counts as lost.",
    )
    restarts: int = Field(
        3,
        ge=0,
        description="Times that a run which lost a process goes on by itself from its last "
        "checkpoint, without a checkpoint in between. 0: it stops.",
    )
    max_infrastructure_faults: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of a step's rollouts without a reward, lost to infrastructure or void, "
        "that stops the run.",
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
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest prompt in tokens; a longer one is answered as one that does not fit. "
        "Default: whatever leaves room for a reply in max_model_len.",
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
    lora_rank: int = Field(
        0,
        ge=0,
        description="Rank of LoRA adapters; the other weights stay as they are. 0: all are "
        "trained.",
    )
    lora_alpha: int = Field(32, ge=1, description="LoRA's alpha: updates are scaled by alpha/rank.")
    lora_targets: str = Field(
        "all-linear", description="Modules with an adapter, as peft names them."
    )


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
    restart_timeout_s: float = Field(
        240,
        ge=0,
        description="How long a model call waits, while no engine runs, for one that is started "
        "again; then it is answered 503.",
    )
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
    replicas: int = Field(
        1,
        ge=1,
        le=100,
        description="Gateway replicas, spread over the nodes that there are at the start.",
    )
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
        "before the answer is 503 with Retry-After: 20. Every known harness bears 90. A client "
        "that says when it gives up is held four fifths of that instead.",
    )
    longest_hold_s: float = Field(
        480,
        gt=0,
        description="Most seconds that a call is held, whatever its client says; as low as the "
        "idle time-out of a load balancer between harness and gateway.",
    )
    max_body_mib: int = Field(
        32, ge=1, description="Largest request body, in MiB; above it the answer is 413."
    )
    body_timeout_s: float = Field(
        60, gt=0, description="Seconds for a request body to arrive; then the answer is 408."
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
    launcher: Literal["local", "kubernetes", "task"] = Field(
        "local",
        description="What runs a harness: a process on a node of Ray, a Kubernetes Job, or what "
        "each task's `launcher` field says (local, kubernetes).",
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
    disk_mib: int = Field(
        4096, ge=1, description="Disk space of a harness's workspace, home and tmp, in MiB."
    )
    sandbox: Literal["auto", "bubblewrap", "none"] = Field(
        "auto",
        description="What keeps a harness to its own files, processes and the gateway: "
        "bubblewrap; where it cannot be had, auto says so and runs without. none: nothing.",
    )
    sandbox_require: bool = Field(
        False, description="Stop where the machine cannot give the whole sandbox."
    )
    sandbox_paths: list[str] = Field(
        default_factory=list,
        description="Further files and folders that a harness in a sandbox can read.",
    )
    keep_workspaces: bool = Field(
        False, description="Keep workspaces after grading, for debugging."
    )
    keep_results: bool = Field(
        False,
        description="Keep in the store what task.collect read, as an event of the rollout. An "
        "evaluation always does.",
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
    grader_options: dict[str, bool | int | float | str | list[str]] = Field(
        default_factory=dict,
        description="What the grader gets as `episode.options`. `tasks.swe.repository` knows "
        "turn_penalty, free_turns, prompt_penalty, free_prompt_tokens, least_solved and "
        "partial_credit, and of repositories in images repository, pytest, judge and "
        "require_twins (docs/swe.md).",
    )
