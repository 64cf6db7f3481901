"""The trainer on real verl workers: a tiny random model, Ray, FSDP over gloo."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_ray.config import RunConfig
from lightning_ray.engine.weights import checksum
from lightning_ray.placement import Device, reserve
from lightning_ray.samples import dataset
from lightning_ray.samples.batch import ROW_SCHEMA
from lightning_ray.trainer.trainer import Trainer, TrainerDied

pytestmark = pytest.mark.slow

VOCABULARY = 64
TEMPERATURE = 0.7


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local", num_cpus=6, include_dashboard=False, log_to_driver=False,
        _temp_dir="/tmp/ray_trainer_test", object_store_memory=200 << 20, logging_level="ERROR",
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            tie_word_embeddings=True, initializer_range=0.3,
        )
    ).save_pretrained(folder)  # fmt: skip
    (folder / "tokenizer.json").write_text('{"stands for": "any file beside the weights"}')
    return folder


def settings(kl: float = 0.0, lora_rank: int = 0, **trainer: object) -> RunConfig:
    defaults = {"lr": 1e-2, "micro_batch_tokens": 64, "threads": 1, "clip_grad": 1e6}
    return RunConfig(
        model={"dtype": "float32", "max_model_len": 128, "lora_rank": lora_rank},
        sampling={"temperature": TEMPERATURE, "max_tokens": 64},
        algorithm={"entropy": 0.01, "kl": kl},
        trainer=defaults | trainer,
    )


@pytest.fixture
def start(model_dir: Path) -> Iterator[Callable[..., Trainer]]:
    started = []

    def make(**trainer: object) -> Trainer:
        config = settings(**trainer)
        bundles = reserve(config, Device.CPU, wait_s=30)
        started.append((bundles, Trainer(config, model_dir, bundles, total_steps=4)))
        return started[-1][1]

    yield make
    for bundles, trainer in started:
        trainer.close()
        bundles.remove()


def batch(seed: int = 0, optimizer_steps: int = 1, rollouts: int = 5) -> pa.Table:
    """Rollouts of one to three rows, sampled from nothing in particular."""
    random = np.random.default_rng(seed)
    table = []
    for rollout in range(rollouts):
        mine = []
        for _ in range(int(random.integers(1, 4))):
            length = int(random.integers(4, 30))
            trainable = random.random(length) < 0.5
            trainable[0], trainable[-1] = False, True
            mine.append(
                {
                    "rollout_id": f"r{rollout}", "group_id": "g", "attempt_id": f"a{rollout}",
                    "calls": np.where(trainable, 0, -1),
                    "optimizer_step": rollout % optimizer_steps, "reward": 0.0,
                    "tokens": random.integers(0, VOCABULARY, length), "trainable": trainable,
                    "logprobs": np.where(trainable, -random.random(length) * 6, 0),
                    "steps": np.zeros(length),
                }
            )  # fmt: skip
        trained = sum(int(row["trainable"].sum()) for row in mine)
        advantage = float(random.normal())
        for row in mine:
            row["advantage"] = row["trainable"] * advantage
            row["weight"] = row["trainable"] / (rollouts * trained)
        table += mine
    return pa.Table.from_pylist(table, schema=ROW_SCHEMA)


def plain_logprobs(model: torch.nn.Module, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    """Transformers' log-probabilities and entropies of all tokens but the first."""
    ids = torch.tensor(np.array(tokens, np.int64))[None]
    distribution = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return torch.stack([distribution.gather(1, ids[0, 1:, None]).squeeze(1), entropy])


def plain_gradient(
    model_dir: Path, table: pa.Table, config: RunConfig
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of the first optimizer step, from the formula."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    loss = torch.zeros(())
    for row in table.to_pylist():
        current, entropy = plain_logprobs(model, row["tokens"], TEMPERATURE)
        weight, behaviour = (torch.tensor(row[name][1:]) for name in ("weight", "logprobs"))
        old = current.detach()
        importance = (old - behaviour).exp().clamp(max=config.algorithm.importance_cap)
        advantage = torch.tensor(row["advantage"][1:])
        gain = importance * advantage * (current - old).exp()
        loss = loss - (weight * (gain + config.algorithm.entropy * entropy)).sum()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def last_gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The whole gradient of the last optimizer step: with a first beta of 0 it is AdamW's first
    moment."""

    def of_rank(worker):
        state, parameters = worker.engine.optimizer.state, worker.engine.module.named_parameters()
        # Gathering is collective, so in one order.
        return {name: state[parameter]["exp_avg"].full_tensor() for name, parameter in parameters}

    workers = trainer._group.workers
    return ray.get([worker.__ray_call__.remote(of_rank) for worker in workers])[0]


@pytest.mark.parametrize(
    ("trainer", "shuffled"),
    [
        ({"micro_batch_tokens": 10_000, "gradient_checkpointing": False}, False),
        ({"micro_batch_tokens": 16}, True),
        ({"ranks": 2}, False),
    ],
    ids=["one micro-batch", "many micro-batches, another order", "two ranks"],
)
def test_the_gradient_is_that_of_the_formula_in_each_component(
    start: Callable[..., Trainer], model_dir: Path, trainer: dict[str, object], shuffled: bool
) -> None:
    table = batch()
    if shuffled:
        table = table.take(np.random.default_rng(1).permutation(table.num_rows))
    # A learning rate at which float32 weights stay what they are.
    worker = start(betas=(0.0, 0.999), lr=1e-12, **trainer)
    # The second update is of one row: of two ranks one has only an inert row.
    for rows in (table, batch(seed=2, rollouts=1).slice(0, 1)):
        loss, expected = plain_gradient(model_dir, rows, settings())
        metrics = worker.update(dataset.of(rows))
        norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
        assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
        found = last_gradient(worker)
        assert found.keys() == expected.keys()
        largest = max(gradient.abs().max() for gradient in expected.values())
        for name, gradient in expected.items():
            assert (found[name] - gradient).abs().max() < 1e-5 * largest, name


@pytest.mark.parametrize("ranks", [1, 2])
def test_logprobs_are_those_of_transformers(
    start: Callable[..., Trainer], model_dir: Path, ranks: int
) -> None:
    random = np.random.default_rng(0)
    rows = [
        (random.integers(0, VOCABULARY, length), temperature)
        for length, temperature in [(30, 1.0), (5, 0.5), (90, 1.3)]
    ]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for found, (tokens, temperature) in zip(start(ranks=ranks).logprobs(rows), rows, strict=True):
        with torch.no_grad():
            expected = plain_logprobs(model, tokens, temperature)[0].numpy()
        assert found.dtype == np.float32
        assert found[0] == 0
        np.testing.assert_allclose(found[1:], expected, atol=1e-5)


def test_a_resumed_trainer_goes_on_bit_for_bit(
    start: Callable[..., Trainer], tmp_path: Path
) -> None:
    first = start(warmup_steps=3)
    assert first.update(dataset.of(batch(1)))["optim/lr"] == pytest.approx(1e-2 / 3)
    first.save(tmp_path / "checkpoint")
    metrics = first.update(dataset.of(batch(2)))
    expected = first.export(tmp_path / "a.safetensors")
    first.close()

    resumed = start(warmup_steps=3)
    resumed.load(tmp_path / "checkpoint")
    again = resumed.update(dataset.of(batch(2)))
    assert again["optim/lr"] == metrics["optim/lr"] == pytest.approx(2e-2 / 3)
    assert again["optim/grad_norm"] == metrics["optim/grad_norm"]
    assert resumed.export(tmp_path / "b.safetensors") == expected
    assert checksum(load_file(tmp_path / "b.safetensors")) == expected


@pytest.mark.parametrize(("lora_rank", "ranks"), [(0, 1), (4, 2)])
def test_the_kl_term_compares_with_the_weights_at_the_start(
    start: Callable[..., Trainer], model_dir: Path, tmp_path: Path, lora_rank: int, ranks: int
) -> None:
    """With LoRA by leaving the adapter out; the exported weights are merged ones, with the model's
    own names."""
    trainer = start(kl=0.5, lora_rank=lora_rank, ranks=ranks)
    before = trainer.export(tmp_path / "before.safetensors")
    assert trainer.update(dataset.of(batch(1)))["policy/kl_reference"] == pytest.approx(0, abs=1e-9)
    assert trainer.update(dataset.of(batch(1)))["policy/kl_reference"] > 1e-6
    trainer.save(tmp_path / "checkpoint")
    trainer.save_hf(tmp_path / "hf")
    after = trainer.export(tmp_path / "after.safetensors")
    assert after != before
    found, original = (
        load_file(tmp_path / "after.safetensors"),
        load_file(model_dir / "model.safetensors"),
    )
    assert found.keys() == original.keys()
    embedding = "model.embed_tokens.weight"
    assert torch.equal(found[embedding], original[embedding]) == bool(lora_rank)
    model, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), np.arange(20)
    with torch.no_grad():
        expected = plain_logprobs(model, tokens, 1.0)[0].numpy()
    np.testing.assert_allclose(trainer.logprobs([(tokens, 1.0)])[0][1:], expected, atol=1e-5)

    metrics = trainer.update(dataset.of(batch(2)))
    trainer.close()
    resumed = start(kl=0.5, lora_rank=lora_rank, ranks=ranks)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.export(tmp_path / "again.safetensors") == after
    assert (
        resumed.update(dataset.of(batch(2)))["policy/kl_reference"]
        == metrics["policy/kl_reference"]
    )


def test_updates_exports_and_failures(
    start: Callable[..., Trainer], model_dir: Path, tmp_path: Path
) -> None:
    trainer = start()
    before = trainer.export(tmp_path / "before.safetensors")
    metrics = trainer.update(dataset.of(batch().slice(0, 0)))
    assert metrics["optim/steps"] == 0
    assert trainer.export(tmp_path / "same.safetensors") == before

    # Two optimizer steps: the second sees a ratio that the first has moved.
    metrics = trainer.update(dataset.of(batch(optimizer_steps=2)))
    assert metrics["optim/steps"] == 2
    assert metrics["policy/clip_fraction"] > 0
    assert trainer.export(tmp_path / "after.safetensors") != before

    folder = tmp_path / "hf"
    trainer.save_hf(folder)
    trainer.save_hf(folder)
    assert (folder / "tokenizer.json").exists()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = np.arange(20)
    with torch.no_grad():
        expected = plain_logprobs(model, tokens, 1.0)[0].numpy()
    np.testing.assert_allclose(trainer.logprobs([(tokens, 1.0)])[0][1:], expected, atol=1e-5)

    with pytest.raises(
        TrainerDied, match=r"raised while computing log-probabilities: .*out of range"
    ):
        trainer.logprobs([(np.array([1, VOCABULARY]), 1.0)])
    os.kill(ray.get(trainer._group.workers[0].__ray_call__.remote(lambda _: os.getpid())), 9)
    with pytest.raises(TrainerDied, match="killed while training"):
        trainer.update(dataset.of(batch()))
