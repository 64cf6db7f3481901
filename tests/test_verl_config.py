"""A run's settings in verl's words: what Megatron gets, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from verl.workers.config import FSDPEngineConfig, McoreEngineConfig, McoreOptimizerConfig

from lightning_ray.config import ConfigError, RunConfig, load
from lightning_ray.tasks import models
from lightning_ray.trainer import verl_config

MEGATRON = (
    "trainer.strategy=megatron", "trainer.ranks=8", "trainer.lr=3e-6", "trainer.warmup_steps=5",
    "trainer.megatron.tensor_model_parallel_size=2",
    "trainer.megatron.expert_model_parallel_size=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Path:
    return models.resolve("tiny")


def megatron(*overrides: str) -> RunConfig:
    return load(None, [*MEGATRON, *overrides])


def test_megatron_gets_its_own_settings_and_the_common_ones(model, monkeypatch):
    monkeypatch.setattr(verl_config, "_installed", lambda module: True)
    made = verl_config.settings(megatron(), model, total_steps=10, gpu=True)
    assert isinstance(made.engine_config, McoreEngineConfig)
    assert made.engine_config.tensor_model_parallel_size == 2
    assert made.engine_config.expert_model_parallel_size == 4
    assert made.engine_config.max_token_len_per_gpu == 16384
    assert made.engine_config.dtype == "bfloat16"
    assert isinstance(made.optimizer_config, McoreOptimizerConfig)
    assert (made.optimizer_config.lr, made.optimizer_config.lr_warmup_steps) == (3e-6, 5)


def test_fsdp_stays_what_it_was(model):
    made = verl_config.settings(load(None, []), model, total_steps=10, gpu=False)
    assert isinstance(made.engine_config, FSDPEngineConfig)
    assert made.engine_config.strategy == "fsdp2"


def test_rows_are_dealt_among_copies_of_the_model_not_among_ranks():
    assert verl_config.data_parallel(megatron()) == 4  # experts are spread over the same ranks
    assert verl_config.data_parallel(load(None, ["trainer.ranks=3"])) == 3
    with pytest.raises(ConfigError, match=r"trainer\.ranks=8 is no multiple of the 6 ranks"):
        verl_config.data_parallel(megatron("trainer.megatron.pipeline_model_parallel_size=3"))


@pytest.mark.parametrize(
    ("overrides", "gpu", "message"),
    [
        ((), False, r"needs GPUs and the packages megatron-core and megatron-bridge"),
        (
            ("trainer.megatron.tensor_parallel=2",),
            True,
            r"did you mean trainer\.megatron\.tensor_mo",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(model, overrides, gpu, message):
    with pytest.raises(ConfigError, match=message):
        verl_config.settings(megatron(*overrides), model, total_steps=10, gpu=gpu)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.megatron.context_parallel_size=2"], "has no effect without"),
        ([*MEGATRON, "model.lora_rank=8"], r"model\.lora_rank is for"),
        ([*MEGATRON, "model.dtype=float32"], "computes in bfloat16"),
    ],
)
def test_contradictions(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(None, overrides)
