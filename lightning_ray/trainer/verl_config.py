"""The settings of a run in verl's words.

Weights, gradients and optimizer are float32; `model.dtype` is what forward and backward compute in.
Two of verl's engines are used: FSDP2, and Megatron for models that one node's GPUs cannot shard
well (large mixtures of experts), which is passed through and has not been run.
"""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)

from lightning_ray.config import ConfigError, RunConfig

# Fields of McoreEngineConfig by which ranks share one copy of the model.
_MODEL_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
# Fields of verl's engines that other settings of ours decide.
_OURS = ("max_token_len_per_gpu", "infer_max_token_len_per_gpu", "seed")
_CONTENTS = ["model", "optimizer", "extra"]


def settings(
    config: RunConfig, model_dir: Path, total_steps: int, gpu: bool
) -> TrainingWorkerConfig:
    """verl's settings for a rank.

    Raises:
        ConfigError: `trainer.strategy=megatron` without a GPU, without the packages that it needs,
            or with a field that verl does not have.
    """
    trainer = config.trainer
    # verl's packed rows need an attention that knows where one ends. flash-attn is an extra to
    # install.
    flash = gpu and importlib.util.find_spec("flash_attn") is not None
    tokens = trainer.micro_batch_tokens
    common = dict(zip(_OURS, (tokens, tokens, config.run.seed), strict=True))
    optimizer = {
        "lr": trainer.lr,
        "lr_warmup_steps": trainer.warmup_steps,
        "total_training_steps": total_steps * trainer.optimizer_steps,
        "weight_decay": trainer.weight_decay,
        "betas": trainer.betas,
        "clip_grad": trainer.clip_grad,
    }
    megatron = trainer.strategy == "megatron"
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=str(model_dir),
            load_tokenizer=False,
            trust_remote_code=config.model.trust_remote_code,
            use_remove_padding=True,
            lora_rank=config.model.lora_rank,
            lora_alpha=config.model.lora_alpha,
            target_modules=config.model.lora_targets,
            enable_gradient_checkpointing=trainer.gradient_checkpointing,
            override_config={"attn_implementation": "flash_attention_2" if flash else "sdpa"},
        ),
        engine_config=_megatron(config, common, gpu) if megatron else _fsdp(config, common, gpu),
        optimizer_config=(
            McoreOptimizerConfig(**optimizer, lr_decay_style="constant")
            if megatron
            else FSDPOptimizerConfig(**optimizer, lr_scheduler_type="constant")
        ),
        checkpoint_config=CheckpointConfig(save_contents=_CONTENTS, load_contents=_CONTENTS),
    )


def data_parallel(config: RunConfig) -> int:
    """Among how many copies of the model the rows of a batch are dealt.

    Raises:
        ConfigError: the ranks cannot be divided like that.
    """
    trainer = config.trainer
    one_copy = 1
    for name in _MODEL_PARALLEL:
        one_copy *= int(trainer.megatron.get(name) or 1)
    if trainer.ranks % one_copy:
        raise ConfigError(
            f"trainer.ranks={trainer.ranks} is no multiple of the {one_copy} ranks that "
            "trainer.megatron has for one copy of the model"
        )
    return trainer.ranks // one_copy


def _fsdp(config: RunConfig, common: dict[str, Any], gpu: bool) -> FSDPEngineConfig:
    return FSDPEngineConfig(
        **common,
        strategy=config.trainer.strategy,
        model_dtype="float32",
        mixed_precision={
            "param_dtype": config.model.dtype,
            "reduce_dtype": "float32",
            "buffer_dtype": "float32",
        },
        use_torch_compile=gpu,
        # Holding unsharded gradients back saves collectives on GPUs and costs memory everywhere.
        use_no_sync_for_gradient_accumulation=gpu,
    )


def check(config: RunConfig) -> None:
    """What can be said of Megatron's settings on any machine.

    Raises:
        ConfigError: verl has no such setting, or the ranks cannot be divided like that.
    """
    known = sorted(field.name for field in fields(McoreEngineConfig) if field.name not in _OURS)
    for name in config.trainer.megatron:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"trainer.megatron.{name} is no setting of verl's Megatron engine; did you mean "
                f"trainer.megatron.{near}?"
            )
    data_parallel(config)


def _megatron(config: RunConfig, common: dict[str, Any], gpu: bool) -> McoreEngineConfig:
    check(config)
    missing = [name for name in ("megatron.core", "megatron.bridge") if not _installed(name)]
    if missing or not gpu:
        raise ConfigError(
            "trainer.strategy=megatron needs GPUs and the packages megatron-core and "
            f"megatron-bridge (missing: {', '.join(missing) or 'a GPU'}); take fsdp2"
        )
    return McoreEngineConfig(**common, dtype=config.model.dtype, **config.trainer.megatron)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent is
        return False
