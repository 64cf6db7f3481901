"""The sections of a run's configuration: every key, its type, its default and its meaning.

Pure declarations; import from `config.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of every section: frozen, and strict about unknown keys. What stands below a key is its
    meaning (`docs/configuration.md`)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class RunSection(Section):
    name: str = "train"
    """Name of the run; its directory and dashboards carry it."""
    dir: str = "runs/{name}"
    """Run directory. A run resumes from what lies there."""
    nodes: int = Field(1, ge=1)
    """Nodes over which trainer ranks and engines are spread evenly. Several nodes share the run
    directory and the model's folder, on CephFS or Lustre, say, not on NFS."""
    seed: int = 0
    """Seed of data order, sampling and training."""

    steps: int = Field(10, ge=1)
    """Optimizer batches (policy versions) in all."""
    groups_per_step: int = Field(4, ge=1)
    """Task groups that one update consumes."""

    groups_in_flight: int | None = Field(None, ge=1)
    """Groups begun and not yet trained on. More than groups_per_step is collocated async RL:
    unfinished ones are carried over. Default: groups_per_step (synchronous)."""
    max_staleness: int = Field(2, ge=0)
    """Most updates between the weights that sampled a group's first token and those that train on
    it. An update waits for groups that would become older."""
    stale_wait_s: float | None = Field(None, ge=0)
    """Longest such wait; then those groups are given up and their tasks queued again. Default:
    rollout.timeout_s."""
    drain_s: float | None = Field(None, ge=0)
    """Seconds that model calls in flight have to end before an update; the rest is interrupted, and
    continued under the new weights (0: at once). null: all are waited for."""

    validate_every: int = Field(0, ge=0)
    """Validate every k steps. 0: only before the first and after the last step."""
    checkpoint_every: int = Field(1, ge=1)
    """Checkpoint every k steps, and after the last."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints kept; the best is kept too."""
    storage: str | None = None
    """Where the checkpoints are copied to, and fetched from by a machine that has none: a path, or
    a URL that pyarrow or fsspec knows (s3://..., gs://...)."""

    collect_timeout_s: float = Field(7200, gt=0)
    """Longest wait for the rollouts of one step before the run stops with a diagnosis."""
    wait_timeout_s: float = Field(3600, gt=0)
    """Longest wait for any other answer of a process (an engine, the trainer, the controller, the
    store) before it counts as lost."""

    restarts: int = Field(3, ge=0)
    """Times that a run which lost a process goes on by itself from its last checkpoint, without a
    checkpoint in between. 0: it stops."""
    max_infrastructure_faults: float = Field(0.5, gt=0, le=1)
    """Share of a step's rollouts without a reward, lost to infrastructure or void, that stops the
    run."""


class ModelSection(Section):
    path: str = "smollm2-135m"
    """A Hugging Face folder, a hub name, or a built-in name (smollm2-135m, tiny)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of weights and computation, in the engine and the trainer."""
    max_model_len: int = Field(32768, ge=16)
    """Context window in tokens: prompt and reply."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt in tokens; a longer one is answered as one that does not fit. Default:
    whatever leaves room for a reply in max_model_len."""

    chat_template: str | None = None
    """Path of a Jinja chat template that replaces the tokenizer's own."""
    tool_parser: str | None = None
    """vLLM tool parser (hermes, qwen3_xml, llama3_json, ...)."""
    reasoning_parser: str | None = None
    """vLLM reasoning parser (qwen3, deepseek_r1, ...)."""
    keep_reasoning: bool = False
    """Keep the reasoning of earlier turns in the prompt, also where the harness or the chat
    template leaves it out (which makes every turn a new branch)."""

    trust_remote_code: bool = False
    """Allow model code from the model folder."""

    lora_rank: int = Field(0, ge=0)
    """Rank of LoRA adapters; the other weights stay as they are. 0: all are trained."""
    lora_alpha: int = Field(32, ge=1)
    """LoRA's alpha: updates are scaled by alpha/rank."""
    lora_targets: str = "all-linear"
    """Modules with an adapter, as peft names them."""


class EngineSection(Section):
    count: int = Field(1, ge=1)
    """vLLM engines."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs per engine."""

    max_num_seqs: int = Field(64, ge=1)
    """Sequences one engine decodes at a time."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory for the engine while it is awake (GPU only)."""
    cpu_kv_cache_gib: int = Field(1, ge=1)
    """KV cache of an engine on a CPU, in GiB (CPU only)."""
    enforce_eager: bool | None = None
    """Skip compilation and CUDA graphs. Default: true on a CPU, false on a GPU."""
    threads: int = Field(2, ge=1)
    """OpenMP threads of an engine on a CPU (CPU only)."""

    restart_timeout_s: float = Field(240, ge=0)
    """How long a model call waits, while no engine runs, for one that is started again; then it is
    answered 503."""
    verify_sync: bool = False
    """After each weight sync compare the engine's checksum with the trainer's."""


class SamplingSection(Section):
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer divides logits by it too."""
    max_tokens: int = Field(2048, ge=1)
    """Most tokens sampled in one call."""

    honour_max_tokens: bool = True
    """Let a harness ask for fewer tokens than max_tokens."""
    honour_stop: bool = True
    """Let a harness give stop strings."""

    validation_temperature: float | None = Field(None, gt=0)
    """Temperature in validation. Default: as in training."""


class GatewaySection(Section):
    host: str = "127.0.0.1"
    """Address the gateway listens on."""
    port: int = Field(8765, ge=0, le=65535)
    """Port the gateway listens on; 0 takes a free one."""
    replicas: int = Field(1, ge=1, le=100)
    """Gateway replicas, spread over the nodes that there are at the start."""
    advertise: str | None = None
    """Base URL that harnesses use. Default: http://HOST:PORT of this cluster's head."""
    haproxy: bool = True
    """Use Ray Serve's HAProxy ingress where Ray can (Linux)."""

    hold_s: float = Field(90, gt=0)
    """Seconds that a model call is held while the gate is closed (an update), before the answer is
    503 with Retry-After: 20. Every known harness bears 90. A client that says when it gives up is
    held four fifths of that instead."""
    longest_hold_s: float = Field(480, gt=0)
    """Most seconds that a call is held, whatever its client says; as low as the idle time-out of a
    load balancer between harness and gateway."""

    max_body_mib: int = Field(32, ge=1)
    """Largest request body, in MiB; above it the answer is 413."""
    body_timeout_s: float = Field(60, gt=0)
    """Seconds for a request body to arrive; then the answer is 408."""


class HarnessSection(Section):
    recipe: str = "mini-swe-agent"
    """A built-in recipe, or the path of a YAML file with your own."""
    args: list[str] = Field(default_factory=list)
    """Arguments added to the recipe's command."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment added to the recipe's."""


class RolloutSection(Section):
    n: int = Field(8, ge=1)
    """Rollouts per task: the GRPO group."""
    concurrency: int = Field(16, ge=1)
    """Harnesses running at a time in the whole cluster."""
    launcher: Literal["local", "kubernetes", "podman", "task"] = "local"
    """What runs a harness: a process on a node of Ray, a Kubernetes Job, a container of podman on
    the head, or what each task's `launcher` field says (local, kubernetes)."""
    retries: int = Field(2, ge=0)
    """New attempts after an infrastructure fault."""
    timeout_s: float = Field(1800, gt=0)
    """Time limit of one attempt, in seconds."""

    cpus: float = Field(0.25, gt=0)
    """CPUs that Ray reserves per harness (it mostly waits for the model)."""
    memory_mib: int = Field(2048, ge=64)
    """Memory limit of a harness and its tools, in MiB."""
    max_processes: int = Field(256, ge=8)
    """Processes a harness and its tools may have at a time."""
    output_mib: int = Field(16, ge=1)
    """Most stdout and stderr kept from a harness, in MiB."""
    workspace_mib: int = Field(512, ge=1)
    """Largest file a harness may write, in MiB."""
    disk_mib: int = Field(4096, ge=1)
    """Disk space of a harness's workspace, home and tmp, in MiB."""

    sandbox: Literal["auto", "bubblewrap", "none"] = "auto"
    """What keeps a harness to its own files, processes and the gateway: bubblewrap; where it cannot
    be had, auto says so and runs without. none: nothing."""
    sandbox_require: bool = False
    """Stop where the machine cannot give the whole sandbox."""
    sandbox_paths: list[str] = Field(default_factory=list)
    """Further files and folders that a harness in a sandbox can read."""

    keep_workspaces: bool = False
    """Keep workspaces after grading, for debugging."""
    keep_results: bool = False
    """Keep in the store what task.collect read, as an event of the rollout. An evaluation always
    does."""


class TaskSection(Section):
    train: str = "lightning_ray.tasks.swe.embedded:train"
    """`module:function` or JSONL of tasks."""
    validation: str | None = "lightning_ray.tasks.swe.embedded:validation"
    """`module:function` or JSONL of validation tasks; null for none."""

    prepare: str | None = "lightning_ray.tasks.swe.workspace:prepare"
    """`module:function(task, workspace)` that fills a fresh workspace. null: it stays empty."""
    collect: str | None = "lightning_ray.tasks.swe.workspace:collect"
    """`module:function(task, workspace) -> dict` that reads the result once the harness is dead."""

    grader: str | None = "lightning_ray.tasks.swe.grading:grade"
    """`module:function(task, result, episode) -> Reward`. null: command, or a POST from outside."""
    grader_command: list[str] | None = None
    """Command that reads a JSON object on stdin and prints a reward as JSON."""
    grader_timeout_s: float = Field(300, gt=0)
    """Longest wait for a reward, in seconds."""
    grader_options: dict[str, bool | int | float | str | list[str]] = Field(default_factory=dict)
    """What the grader gets as `episode.options`. `tasks.swe.repository` knows turn_penalty,
    free_turns, prompt_penalty, free_prompt_tokens, least_solved and partial_credit, and of
    repositories in images repository, pytest, judge and require_twins (docs/swe.md)."""


class KubernetesSection(Section):
    # Containers of podman are made of the same template and image.
    namespace: str | None = None
    """Namespace of the Jobs. Default: this pod's, or that of the context."""
    template: str | None = None
    """Path of a Job in YAML, with {{ placeholders }} for what a task says: image, resources, node
    selector. Default: a pod with the image alone."""
    image: str | None = None
    """Image of the pods, and the placeholder {{ image }} of the template."""

    kubeconfig: str | None = None
    """Path of a kubeconfig. Default: this pod's service account, or kubectl's."""
    context: str | None = None
    """Context of the kubeconfig. Default: current."""

    max_pods: int = Field(100, ge=1)
    """Most Jobs at a time, those that grade included; more are queued."""
    creates_per_s: float = Field(20, gt=0)
    """Most Jobs that are created in a second."""
    start_timeout_s: float = Field(900, gt=0)
    """Longest wait for a pod to be scheduled and started; then the attempt is tried again. What it
    waits for is shown meanwhile."""
    fault_timeout_s: float = Field(120, gt=0)
    """Longest that a pod may show a fault that can pass: an image that cannot be pulled, a node
    that does not answer."""

    harness_venv: str = "/opt/harness"
    """Where the image has the harness: {venv} of its recipe, a virtual environment with the
    recipe's packages."""
    python: str = "python3"
    """Our own program's interpreter in a pod, 3.8 or newer: `python3` of its PATH, or a path. Tests
    always run with the first `python3` of the PATH."""

    grade: Literal["job", "cluster"] = "job"
    """Where hidden tests run: in a second Job of the same template, or on the nodes of Ray."""
    # Kubernetes deletes them then, and what we have not seen with them: how a pod ended, a log.
    keep_s: int | None = Field(None, ge=60)
    """Keep ended Jobs for so many seconds, 60 at least. Default: they are deleted."""


class SamplesSection(Section):
    merge: Literal["forest", "call"] = "forest"
    """Training rows: calls that continue each other share one (forest), or every call is one
    (call)."""
    train_side_calls: bool = False
    """Train side calls too: titles, compaction summaries."""
    train_constrained: bool = False
    """Train tokens sampled under a grammar, whose recorded probabilities the trainer cannot
    reproduce."""


class AlgorithmSection(Section):
    estimator: str = "grpo"
    """Advantage estimator, by verl's name: grpo, rloo, opo, gpg, grpo_passk,
    reinforce_plus_plus_baseline, ..."""
    normalize_by_std: bool = True
    """Divide the advantage by the group's standard deviation (Dr. GRPO does not)."""
    call_advantages: str | None = None
    """`module:function(rollout, calls, advantage)` that gives each call of a rollout its own
    advantage (process rewards). null: all have the rollout's."""

    refill: int = Field(0, ge=0)
    """Most rounds in which groups without a signal, or with fewer than two usable rollouts, are
    replaced by groups of other tasks (dynamic sampling). 0: they are skipped."""

    normalization: Literal["rollout", "token", "row", "constant"] = "rollout"
    """What counts equally in the loss: every rollout, every token of the batch, every row, or every
    rollout divided by a constant length (Dr. GRPO)."""
    normalization_tokens: int | None = Field(None, ge=1)
    """The length of normalization=constant. Default: trainer.max_row_tokens."""

    policy_loss: Literal["vanilla", "gspo", "cispo"] = "vanilla"
    """Policy loss, by verl's name: vanilla (PPO's clip), gspo (one ratio per call), cispo."""
    clip_low: float = Field(0.2, ge=0)
    """Clip below the ratio 1."""
    clip_high: float = Field(0.2, ge=0)
    """Clip above the ratio 1."""
    clip_dual: float = Field(3.0, gt=1)
    """Dual clip: largest loss factor for negative advantages (vanilla)."""

    importance: Literal["token", "sequence", "none"] = "token"
    """Detached importance weight old/behaviour: per token, per call (the product of its tokens'),
    or none."""
    importance_cap: float = Field(2.0, gt=0)
    """Largest importance weight (truncated importance sampling)."""
    importance_floor: float | None = Field(None, gt=0)
    """With it, tokens whose importance weight is outside floor and cap leave the loss (IcePop)."""

    reject: str | None = Field(
        None, pattern=r"^(token_k[123]|seq_(sum|mean)_k[123]|seq_max_k[23])$"
    )
    """Rejection of tokens or calls that the trainer finds too unlikely, by verl's name: token_k1,
    token_k2, token_k3, seq_sum_k1, seq_mean_k1, seq_max_k2, ..."""
    reject_threshold: str | None = Field(None, pattern=r"^[0-9.]+(_[0-9.]+)?$")
    """Threshold of `reject`, as verl writes it: 2.0, or 0.5_2.0 for k1."""

    entropy: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the model that the run started with."""
    kl_estimator: Literal["k2", "k3", "k1+", "k3+"] = "k3+"
    """Estimator of the KL divergence (http://joschu.net/blog/kl-approx.html). With + its gradient
    is that of k2, the unbiased one."""


class TrainerSection(Section):
    ranks: int = Field(1, ge=1)
    """Data-parallel trainer ranks, one per bundle."""
    strategy: Literal["fsdp2", "megatron"] = "fsdp2"
    """verl training engine. megatron needs its own packages."""
    megatron: dict[str, int | float | bool | str | None] = Field(default_factory=dict)
    """Settings of verl's Megatron engine (McoreEngineConfig), such as tensor_model_parallel_size or
    expert_model_parallel_size."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest gradient norm."""
    optimizer_steps: int = Field(1, ge=1)
    """Optimizer steps per batch, each over whole rollouts."""

    micro_batch_tokens: int = Field(16384, ge=16)
    """Tokens per micro-batch and rank."""
    max_row_tokens: int | None = None
    """Longest training row in tokens. Default: model.max_model_len."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass."""

    weight_sync: Literal["auto", "file", "memory"] = "auto"
    """How new weights reach the engines: in one file, or from each rank's memory into the engine
    worker in its bundle (CUDA IPC; shared memory on a CPU). auto: memory on GPUs where every engine
    worker has a rank beside it, else file."""
    weight_sync_mib: int = Field(256, ge=1)
    """Size of the buffer between a rank and an engine worker, in MiB."""

    threads: int = Field(2, ge=1)
    """torch threads per rank on a CPU (CPU only)."""


class TrackingSection(Section):
    backends: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab"], ...] = ("tensorboard",)
    """verl Tracking back ends."""
    project: str = "lightning_ray"
    """Project name for the tracking back ends."""
