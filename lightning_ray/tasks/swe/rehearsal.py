"""A rehearsal: a run's own configuration, made small enough for two cores without a GPU.

`overrides` says what to replace in a configuration so that it runs from its first rollout to its
last checkpoint in a minute or two: the model by one of 0.85 million parameters, the tasks by the
embedded ones, which that model has half learnt, and every size by a small one. What can be wrong
without a GPU stays: schedule and staleness, loss, advantages, sampling temperatures, turn limit
and other arguments of the harness, optimizer, validation, checkpoints.

Pure. Invariants: what comes out is a valid configuration if what went in was; nothing of the run
proper is touched (its directory, its storage, its trackers, its port); no batch, context or rollout
is larger than the run's own.
"""

from __future__ import annotations

import json
from typing import Any

from lightning_ray.config import RunConfig

MODEL = "tiny"
CONTEXT_TOKENS = 512  # several times what the embedded tasks need
REPLY_TOKENS = 32  # likewise
STEPS = 2  # the second one trains with weights that came back
GROUPS = 2
ROLLOUTS = 4
# Validation tasks: enough to go through validation, few enough to wait for.
VALIDATION = "lightning_ray.tasks.swe.embedded:few"
# The tiny model writes commands in code blocks, and answers to this prompt only.
HARNESS = "mini-swe-agent"
HARNESS_ARGS = ["--model-class=litellm_textbased", "-c", "pkg:lightning_ray.tasks.swe/mini.yaml"]
# Sections that stay but for what is replaced below, and what stays of the others, which are about
# the big model, the machines and the tasks.
_KEPT_SECTIONS = ("run", "sampling", "harness", "samples", "algorithm", "trainer", "tracking")
_KEPT = {
    "model": ("keep_reasoning", "lora_rank", "lora_alpha"),
    "rollout": ("retries", "sandbox", "max_processes", "output_mib", "workspace_mib", "disk_mib"),
}


def overrides(config: RunConfig) -> list[str]:
    """The overrides, as `section.key=value`, that make a rehearsal of `config`."""
    own, replaced = config.model_dump(mode="json"), dict[str, Any]()
    for section, values in RunConfig().model_dump(mode="json").items():
        if section not in _KEPT_SECTIONS:
            kept = _KEPT.get(section, ())
            replaced |= {
                f"{section}.{k}": own[section][k] if k in kept else v for k, v in values.items()
            }
    replaced |= {
        "run.name": f"{config.run.name}-rehearsal",
        "run.dir": "runs/{name}",
        "run.storage": None,
        "run.steps": min(STEPS, config.run.steps),
        "run.groups_per_step": min(GROUPS, config.run.groups_per_step),
        "run.groups_in_flight": _in_flight(config),
        "model.path": MODEL,
        "model.dtype": "float32",
        "model.max_model_len": CONTEXT_TOKENS,
        "engine.max_num_seqs": min(16, config.engine.max_num_seqs),
        "engine.threads": 1,
        "engine.verify_sync": True,
        "sampling.max_tokens": min(REPLY_TOKENS, config.sampling.max_tokens),
        "gateway.port": 0,
        "harness.recipe": HARNESS,
        "harness.args": [*_arguments(config), *HARNESS_ARGS],
        "rollout.n": min(ROLLOUTS, config.rollout.n),
        "rollout.concurrency": min(4, config.rollout.concurrency),
        "rollout.cpus": min(0.25, config.rollout.cpus),
        "rollout.timeout_s": min(120.0, config.rollout.timeout_s),
        "rollout.memory_mib": min(1024, config.rollout.memory_mib),
        "task.validation": VALIDATION if config.task.validation else None,
        "trainer.ranks": min(2, config.trainer.ranks),
        "trainer.strategy": "fsdp2",
        "trainer.megatron": {},
        "trainer.threads": 1,
        "trainer.micro_batch_tokens": min(1024, config.trainer.micro_batch_tokens),
        "trainer.max_row_tokens": None,
        "trainer.optimizer_steps": min(2, config.trainer.optimizer_steps),
        "tracking.backends": [],
    }
    if config.harness.recipe != HARNESS:
        replaced["harness.env"] = {}
    return [f"{key}={json.dumps(value)}" for key, value in replaced.items()]


def _in_flight(config: RunConfig) -> int | None:
    """As far ahead of an update as the run is, in updates; null where it is synchronous."""
    run = config.run
    if config.groups_in_flight == run.groups_per_step:
        return None
    groups = min(GROUPS, run.groups_per_step)
    ahead = round(groups * config.groups_in_flight / run.groups_per_step)
    return max(groups + 1, min(ahead, groups * (run.max_staleness + 1)))


def _arguments(config: RunConfig) -> list[str]:
    """The file's own, if they are for this harness; of several the later wins."""
    return list(config.harness.args) if config.harness.recipe == HARNESS else []
