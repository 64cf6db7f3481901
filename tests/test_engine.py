"""Engine and trainer agree: log-probabilities, weights, versions. Real vLLM and real verl on a
CPU."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import ray

from lightning_ray.config import load
from lightning_ray.engine.actor import EngineActor, EngineStartError, Policy, environment
from lightning_ray.engine.pool import DOWN_SECONDS, Router
from lightning_ray.placement import Device, reserve
from lightning_ray.records import PolicyVersion
from lightning_ray.run import cluster
from lightning_ray.samples.batch import ROW_SCHEMA
from lightning_ray.tasks import models
from lightning_ray.trainer.trainer import Trainer

TEMPERATURE = 0.7
SETTINGS = [
    "model.path=tiny",
    "model.dtype=float32",
    "model.max_model_len=256",
    "sampling.max_tokens=32",
    f"sampling.temperature={TEMPERATURE}",
    "trainer.lr=1e-2",
    "trainer.micro_batch_tokens=512",
    "gateway.port=0",
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """An engine and a trainer of the tiny model on the same bundles, and a folder."""
    folder = tmp_path_factory.mktemp("engine")
    config = load(None, [*SETTINGS, f"run.dir={folder}"])
    model = models.resolve("tiny")
    cluster.connect(config)
    bundles = reserve(config, Device.CPU)
    trainer = Trainer(config, model, bundles, total_steps=3)
    engine = (
        ray.remote(EngineActor)
        .options(
            **bundles.engine_options(0),
            max_concurrency=100,
            runtime_env={"env_vars": environment(config, on_gpu=False)},
        )
        .remote(config, str(model), str(folder / "policy.json"), PolicyVersion("l", 0), False)
    )
    ray.get(engine.ready.remote())
    yield engine, trainer, folder
    bundles.remove()
    ray.shutdown()


def sample(engine, count=4):
    prompts = [np.arange(5, 15 + i, dtype=np.int32) for i in range(count)]
    asked = [engine.generate.remote(p, temperature=TEMPERATURE, max_tokens=24) for p in prompts]
    return list(zip(prompts, ray.get(asked), strict=True))


def largest_difference(trainer, sampled) -> float:
    rows = [(np.concatenate([prompt, g.tokens]), TEMPERATURE) for prompt, g in sampled]
    found = trainer.logprobs(rows)
    return max(
        float(np.abs(logprobs[len(prompt) :] - g.logprobs).max())
        for logprobs, (prompt, g) in zip(found, sampled, strict=True)
    )


def table(sampled) -> pa.Table:
    """One update that makes what was sampled first likelier and the rest less likely."""
    rows = []
    for number, (prompt, g) in enumerate(sampled):
        before, count = len(prompt), len(g.tokens)
        rows.append(
            {
                "rollout_id": f"r{number}",
                "group_id": "g",
                "attempt_id": f"r{number}-a0",
                "calls": [-1] * before + [0] * count,
                "optimizer_step": 0,
                "reward": float(number == 0),
                "advantage": [0.0] * before + [1.0 if number == 0 else -0.5] * count,
                "tokens": [*prompt.tolist(), *g.tokens.tolist()],
                "trainable": [False] * before + [True] * count,
                "logprobs": [0.0] * before + g.logprobs.tolist(),
                "steps": [-1] * before + [0] * count,
                "weight": [0.0] * before + [1 / (len(sampled) * count)] * count,
            }
        )
    return pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


def test_log_probabilities_agree_before_and_after_an_update_and_a_sync(pair):
    engine, trainer, folder = pair
    first = sample(engine)
    assert largest_difference(trainer, first) < 1e-4
    metrics = trainer.update(table(first))
    assert metrics["optim/grad_norm"] > 0
    path = folder / "policy.safetensors"
    checksum = trainer.export(path)
    assert largest_difference(trainer, first) > 1e-2  # the policy moved
    policy = Policy(str(path), PolicyVersion("l", 1))
    assert ray.get(engine.load_policy.remote(policy, True)) == checksum
    second = sample(engine)
    assert largest_difference(trainer, second) < 1e-4
    assert {span.version for _, g in second for span in g.spans} == {PolicyVersion("l", 1)}
    assert {span.version for _, g in first for span in g.spans} == {PolicyVersion("l", 0)}


def test_a_model_that_does_not_fit_says_which_setting_to_change(pair, tmp_path):
    config = load(None, [*SETTINGS, "model.max_model_len=4000000", "sampling.max_tokens=32"])
    engine = (
        ray.remote(EngineActor)
        .options(num_cpus=0, runtime_env={"env_vars": environment(config, on_gpu=False)})
        .remote(
            config, str(models.resolve("tiny")), str(tmp_path / "p"), PolicyVersion("l", 0), False
        )
    )
    with pytest.raises(EngineStartError, match=r"model\.max_model_len"):
        ray.get(engine.ready.remote())


def test_a_rollout_stays_on_its_engine_and_only_those_of_a_lost_one_move():
    router = Router(4)
    before = {f"r{i}": router.choose(f"r{i}", 0.0) for i in range(200)}
    assert before == {r: router.choose(r, 1.0) for r in before}
    assert set(before.values()) == {0, 1, 2, 3}
    router.lost(2, now=10.0)
    after = {r: router.choose(r, 10.0) for r in before}
    assert all(after[r] == engine for r, engine in before.items() if engine != 2)
    assert 2 not in after.values()
    assert before == {r: router.choose(r, 10.0 + DOWN_SECONDS) for r in before}
    for engine in range(4):
        router.lost(engine, now=20.0)
    assert router.choose("r0", 20.0) is not None  # all are down: ask one anyway
    assert router.choose("r0", 20.0, excluded=[0, 1, 2, 3]) is None
