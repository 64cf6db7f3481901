"""Engine and trainer agree: log-probabilities, weights, versions. Real vLLM and real verl on a
CPU."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
import ray

from lightning_ray.config import load
from lightning_ray.engine.actor import EngineActor, EngineStartError, Policy, environment
from lightning_ray.engine.partial import Partial
from lightning_ray.engine.pool import BOUND, DOWN_SECONDS, REMEMBERED, Router
from lightning_ray.placement import Device, WeightSyncWay, reserve
from lightning_ray.records import FinishReason, PolicyVersion
from lightning_ray.run import cluster
from lightning_ray.run.stack import Stack
from lightning_ray.run.sync import WeightSync
from lightning_ray.samples import dataset
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
    "trainer.weight_sync_mib=1",  # so that there are several buckets
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


def sample(engine, count=4, seed=None):
    prompts = [np.arange(5, 15 + i, dtype=np.int32) for i in range(count)]
    asked = [
        engine.generate.remote(p, temperature=TEMPERATURE, max_tokens=24, seed=seed)
        for p in prompts
    ]
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


def sync(engine, trainer, folder, step: int) -> None:
    path = folder / f"policy-{step}.safetensors"
    checksum = trainer.export(path)
    policy = Policy(str(path), PolicyVersion("l", step))
    assert ray.get(engine.load_policy.remote(policy, True)) == checksum


def sync_from_memory(engine, trainer, folder, step: int) -> None:
    policy = Policy(str(folder / f"memory-{step}.safetensors"), PolicyVersion("l", step))
    doors = trainer.open_doors()
    ray.get(engine.drain.remote())
    taking = engine.receive_policy.remote(policy.version, doors, 20.0, True)
    trainer.gather(doors, 20.0)
    ray.get(taking)
    loaded = ray.get(engine.load_policy.remote(policy, True))  # no file is there yet
    assert loaded == trainer.write(Path(policy.path))


def check_an_update_and_a_sync(engine, trainer, folder, step: int, sync=sync) -> None:
    """Engine and trainer have the same weights, those of `step`, before and one step later."""
    first = sample(engine)
    assert largest_difference(trainer, first) < 1e-4
    metrics = trainer.update(dataset.of(table(first)))
    assert metrics["optim/grad_norm"] > 0
    assert largest_difference(trainer, first) > 1e-2  # the policy moved
    sync(engine, trainer, folder, step + 1)
    second = sample(engine)
    assert largest_difference(trainer, second) < 1e-4
    assert {span.version for _, g in second for span in g.spans} == {PolicyVersion("l", step + 1)}
    assert {span.version for _, g in first for span in g.spans} == {PolicyVersion("l", step)}


def test_log_probabilities_agree_before_and_after_an_update_and_a_sync(pair):
    check_an_update_and_a_sync(*pair, step=0)


def test_weights_from_memory_are_those_of_the_file_to_the_bit(pair):
    engine, trainer, folder = pair

    def sampled():
        [(_, g)] = sample(engine, count=1, seed=3)
        return g.tokens.tolist(), g.logprobs.tolist()

    sync(engine, trainer, folder, 1)
    check_an_update_and_a_sync(*pair, step=1, sync=sync_from_memory)
    from_memory = sampled()
    sync(engine, trainer, folder, 3)
    assert sampled() == from_memory


def new_engine(folder, config, **options):
    return (
        ray.remote(EngineActor)
        .options(
            num_cpus=0,
            max_concurrency=100,
            runtime_env={"env_vars": environment(config, on_gpu=False)},
            **options,
        )
        .remote(
            config,
            str(models.resolve("tiny")),
            str(folder / "policy.json"),
            PolicyVersion("l", 0),
            False,
        )
    )


@pytest.mark.slow
@pytest.mark.usefixtures("pair")
def test_an_engine_that_is_killed_while_it_is_fed_reads_the_file_and_the_other_goes_on(tmp_path):
    """Everything real but the moment: the vLLM of one stands still before it can take weights."""
    settings = ["engine.verify_sync=true", "engine.count=2", "trainer.ranks=2"]
    config = load(None, [*SETTINGS, *settings, f"run.dir={tmp_path}"])
    bundles = reserve(config, Device.CPU)
    trainer = Trainer(config, models.resolve("tiny"), bundles, total_steps=3)
    stack = Stack(config, models.resolve("tiny"), tmp_path, (said := []).append)
    stack.open_store()
    stack.engines += [new_engine(tmp_path, config, max_restarts=-1) for _ in range(2)]
    ray.get([engine.ready.remote() for engine in stack.engines])
    ray.get([engine.drain.remote() for engine in stack.engines])  # else they refuse to be fed

    def pids() -> list[int]:
        return ray.get([e.__ray_call__.remote(lambda _: os.getpid()) for e in stack.engines])

    before = pids()
    # The one beside rank 0, which also keeps the weights for the file.
    actor = psutil.Process(before[0])
    processes = [actor, *actor.children(recursive=True)]
    for process in processes[1:]:
        process.suspend()
    sync = WeightSync(config, WeightSyncWay.MEMORY, trainer, stack, tmp_path / "policy")
    sync._silence_s = 3.0
    killing = threading.Timer(1.0, lambda: [process.kill() for process in processes])
    killing.start()
    try:
        sync.hand_over(PolicyVersion("l", 5))  # compares the checksums
        [lost] = [text for text in said if "reads the weights from disk" in text]
        assert "started again" not in lost, "it was not fed at all"
        assert [new == old for new, old in zip(pids(), before, strict=True)] == [False, True]
        for engine in stack.engines:
            [(_, generation)] = sample(engine, count=1)
            assert {span.version.step for span in generation.spans} == {5}
        assert Policy.read(stack.pointer) == sync.policy(PolicyVersion("l", 5))
    finally:
        stack.stop()
        trainer.close()
        bundles.remove()


def test_an_engine_gets_the_weights_with_the_adapters_of_a_lora_trainer_in_them(pair):
    engine, _, folder = pair
    config = load(None, [*SETTINGS, "model.lora_rank=4", f"run.dir={folder}"])
    bundles = reserve(config, Device.CPU)
    trainer = Trainer(config, models.resolve("tiny"), bundles, total_steps=3)
    try:
        sync(engine, trainer, folder, 4)
        check_an_update_and_a_sync(engine, trainer, folder, step=4, sync=sync_from_memory)
    finally:
        bundles.remove()


def test_an_interrupted_generation_goes_on_under_the_new_weights(pair):
    engine, trainer, folder = pair
    policies = {}
    for step, name in ((7, "a"), (8, "b")):
        if name == "b":
            trainer.save(folder / "checkpoint")
            trainer.update(dataset.of(table(sample(engine))))
        trainer.export(folder / f"{name}.safetensors")
        policies[name] = Policy(str(folder / f"{name}.safetensors"), PolicyVersion("l", step))
        if name == "a":
            ray.get(engine.load_policy.remote(policies["a"], False))
    prompts = [np.arange(5, 15 + i, dtype=np.int32) for i in range(8)]
    asked = [engine.generate.remote(p, temperature=TEMPERATURE, max_tokens=200) for p in prompts]
    time.sleep(0.2)
    interrupted = ray.get(engine.drain.remote(0.0)).interrupted
    assert interrupted
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(asked, timeout=0.3)  # parked until the weights are there
    ray.get(engine.load_policy.remote(policies["b"], False))
    found = ray.get(asked)
    split = [(p, g) for p, g in zip(prompts, found, strict=True) if len(g.spans) == 2]
    assert 0 < len(split) <= interrupted
    assert {tuple(s.version.step for s in g.spans) for _, g in split} == {(7, 8)}
    assert all(len(g.tokens) <= 200 for g in found)

    def differences(part: int) -> list[float]:
        rows = [(np.concatenate([prompt, g.tokens]), TEMPERATURE) for prompt, g in split]
        worst = []
        for logprobs_T, (prompt, g) in zip(trainer.logprobs(rows), split, strict=True):
            seam = g.spans[0].length
            of = slice(0, seam) if part == 0 else slice(seam, None)
            worst.append(float(np.abs(logprobs_T[len(prompt) :][of] - g.logprobs[of]).max()))
        return worst

    assert max(differences(1)) < 1e-4
    assert max(differences(0)) > 1e-3
    trainer.load(folder / "checkpoint")
    assert max(differences(0)) < 1e-4


def test_a_grammar_is_never_interrupted(pair):
    from vllm.sampling_params import StructuredOutputsParams

    engine, _, folder = pair
    letters = StructuredOutputsParams(regex="[a-z ]{400}")
    asked = engine.generate.remote(
        np.arange(5, 15, dtype=np.int32), temperature=1.0, max_tokens=120, constraint=letters
    )
    time.sleep(0.3)
    assert ray.get(engine.drain.remote(0.0)).interrupted == 0
    [before] = ray.get(asked).spans
    ray.get(
        engine.load_policy.remote(
            Policy(str(folder / "b.safetensors"), PolicyVersion("l", 9)), False
        )
    )
    assert before.version != PolicyVersion("l", 9)


@pytest.mark.parametrize(("before", "after", "kept"), [
    ("hello wor", "ld STOP more", "hello world STOP more"),
    ("hello ST", "OP more", "hello STOP"),
    ("hello S", "T and no STOP", "hello ST and no STOP"),
    ("", "STOP more", "STOP more"),
])  # fmt: skip
def test_a_stop_string_that_straddles_an_interruption_ends_the_generation(before, after, kept):
    """Within a span vLLM looks for them: only what begins before the seam and ends after it is
    ours."""
    made = Partial(("STOP",), lambda ids: "".join(map(chr, ids)))
    old, new = PolicyVersion("l", 1), PolicyVersion("l", 2)
    made.add([ord(c) for c in before], [-0.5] * len(before), old, 3)
    ended = made.add([ord(c) for c in after], [-0.5] * len(after), new, 9)
    generation = made.finished(FinishReason.STOP)
    assert "".join(map(chr, generation.tokens)) == kept
    assert ended == (kept != before + after)
    assert len(generation.logprobs) == len(kept)
    assert sum(span.length for span in generation.spans) == len(kept)
    assert generation.cached_tokens == 3


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


def test_a_small_cache_lets_fewer_calls_in_and_all_are_served(pair, tmp_path):
    from vllm.sampling_params import StructuredOutputsParams

    class SmallCache(EngineActor):
        """Its KV cache holds three of the longest sequences."""

        def _arguments(self):
            return super()._arguments() | {"num_gpu_blocks_override": 3 * 8}

        async def limit(self) -> tuple[float, int]:
            return self._door.limit.calls, self._door.limit.inside

    config = load(None, SETTINGS)
    engine = (
        ray.remote(SmallCache)
        .options(
            num_cpus=0,
            max_concurrency=100,
            runtime_env={"env_vars": environment(config, on_gpu=False)},
        )
        .remote(
            config, str(models.resolve("tiny")), str(tmp_path / "p"), PolicyVersion("l", 0), False
        )
    )
    ray.get(engine.ready.remote())
    assert ray.get(engine.limit.remote()) == (64, 0)
    letters = StructuredOutputsParams(regex="[a-z ]{400}")  # so that none is short
    prompt = np.arange(5, 35, dtype=np.int32)
    asked = [
        engine.generate.remote(prompt, temperature=1.0, max_tokens=180, constraint=letters)
        for _ in range(40)
    ]
    assert min(len(g.tokens) for g in ray.get(asked)) > 50
    calls, inside = ray.get(engine.limit.remote())
    assert 1 <= calls < 10 and inside == 0
    ray.kill(engine)


def test_a_rollout_stays_on_its_engine_and_only_those_of_a_lost_one_move():
    router = Router(4)
    before = {f"r{i}": router.choose(f"r{i}", 0.0) for i in range(200)}
    assert before == {r: router.choose(r, 1.0) for r in before}
    assert before == {r: Router(4).choose(r, 1.0) for r in before}  # in every gateway replica
    assert set(before.values()) == {0, 1, 2, 3}
    router.lost(2, now=10.0)
    after = {r: router.choose(r, 10.0) for r in before}
    assert all(after[r] == engine for r, engine in before.items() if engine != 2)
    assert 2 not in after.values()
    # Their prefixes are where they went; the lost engine comes back empty.
    assert after == {r: router.choose(r, 10.0 + DOWN_SECONDS) for r in before}
    for engine in range(4):
        router.lost(engine, now=50.0)
    assert router.choose("r0", 50.0) is not None  # all are down: ask one anyway
    assert router.choose("r0", 50.0, excluded=[0, 1, 2, 3]) is None


def test_an_engine_that_has_too_many_calls_gets_no_more_and_who_moved_stays():
    alone = Router(4)
    hashed = {f"r{i}": alone.choose(f"r{i}", 0.0) for i in range(400)}
    crowded = [r for r, engine in hashed.items() if engine in (1, 2)]
    router, served = Router(4), ExitStack()
    homes = {}
    for number, rollout in enumerate(crowded, 1):
        homes[rollout] = router.choose(rollout, 0.0)
        served.enter_context(router.serving(homes[rollout]))
        assert max(router.load.values()) <= math.ceil(BOUND * number / 4)
    moved = [r for r in crowded if homes[r] != hashed[r]]
    assert len(crowded) // 4 < len(moved) < len(crowded) // 2  # what does not fit on two of four
    served.close()
    assert not any(router.load.values())
    assert homes == {r: router.choose(r, 9.0) for r in crowded}


def test_rollouts_that_were_long_gone_are_forgotten():
    router = Router(2)
    for number in range(REMEMBERED + 5):
        router.choose(f"r{number}", 0.0)
    assert len(router._last) == REMEMBERED
    assert "r4" not in router._last and "r5" in router._last
