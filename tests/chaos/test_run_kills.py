"""A monkey kills every process of a real run, at random moments: nothing that was answered is lost,
nothing is trained twice, and the weights are those of the batches on disk.

    LIGHTNING_RAY_CHAOS_ROUNDS=10 LIGHTNING_RAY_CHAOS_SEED=1 pytest tests/chaos/test_run_kills.py

A round kills each of `VICTIMS` once, up to four of them within seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import ray
from runs import PATIENCE, process_of, start

from lightning_ray import metrics
from lightning_ray.config import load
from lightning_ray.placement import Device, reserve
from lightning_ray.rollouts.supervisor import process_name
from lightning_ray.run.checkpoint import Checkpoints
from lightning_ray.samples import dataset
from lightning_ray.store.rollouts import RolloutStore
from lightning_ray.tasks import models
from lightning_ray.trainer.trainer import Trainer

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("LIGHTNING_RAY_CHAOS_ROUNDS", "2"))
SEED = int(os.environ.get("LIGHTNING_RAY_CHAOS_SEED", "0"))
VICTIMS = [
    "the driver", "ray::PolicyWorker", "ray::RolloutController", "ray::EngineActor", "VLLM::Engine",
    "ray::StoreActor", "ray::ServeReplica", "gcs_server", "a harness",
]  # fmt: skip
MANY = 1000  # steps and restarts: the run goes on until the monkey is done


class Monkey:
    """A run, what kills its processes, and how often it had to be started again by hand."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.log = run_dir, run_dir.parent / "log"
        self.dice = random.Random(SEED)
        self.killed: Counter[str] = Counter()
        self.starts = 0
        self.start(MANY)

    def kill(self, victim: str) -> bool:
        """Kills one process of that kind, if there is one now."""
        with contextlib.suppress(LookupError, psutil.NoSuchProcess):
            self._find(victim).kill()
            self.killed[victim] += 1
            with self.log.open("a") as log:
                print("the monkey killed", victim, file=log)
            return True
        return False

    def works(self) -> bool:
        """True if the run collects or trains; starts it if it has ended."""
        if self.run.poll() is not None:
            self.start(MANY)
        return "| collect" in self.log.read_text().rpartition("starting | store")[2]

    def steps(self) -> int:
        """How many are in a checkpoint."""
        latest = Checkpoints(self.run_dir, keep=2).latest()
        return latest[1].version.step if latest else 0

    def wait(self, what: Callable[[], object]) -> None:
        """Until `what` is true; starts the run if it has ended."""
        deadline = time.monotonic() + PATIENCE
        while not what():
            self.works()
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(self.dice.random())

    def _find(self, victim: str) -> psutil.Process:
        if self.run.poll() is not None:
            raise LookupError
        if victim == "the driver":
            return psutil.Process(self.run.pid)
        everyone = psutil.Process(self.run.pid).children(recursive=True)
        if victim == "a harness":
            # They descend from a fork server, which belongs to nobody.
            names = {process_name(p.name) for p in (self.run_dir / "rollouts").glob("*")}
            return _first(p for p in psutil.process_iter() if p.name() in names)
        if victim == "gcs_server":
            return _first(p for p in everyone if p.name() == victim)
        return process_of(self.run.pid, victim)

    def start(self, steps: int) -> None:
        settings = [f"run.steps={steps}", f"run.restarts={MANY}", "trainer.weight_sync=memory"]
        self.run = start(self.run_dir, self.log, *settings)
        self.starts += 1

    def finish(self) -> None:
        """Has the run, whose driver is dead, end after one more step, undisturbed."""
        self.run.wait(PATIENCE)
        self.start(self.steps() + 1)
        assert self.run.wait(PATIENCE) == 0, self.log.read_text()[-4000:]


def _first(processes: Iterable[psutil.Process]) -> psutil.Process:
    for process in processes:
        return process
    raise LookupError


def blows(dice: random.Random) -> Iterator[list[str]]:
    """All victims, in groups. The last is what goes with a machine; then the run need not be
    stopped."""
    last = ["gcs_server", "the driver"]
    victims = [victim for _ in range(ROUNDS) for victim in dice.sample(VICTIMS, len(VICTIMS))]
    for victim in last:
        victims.remove(victim)
    while victims:
        size = dice.randint(1, 4)
        yield victims[:size]
        victims = victims[size:]
    yield last


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    monkey = Monkey(tmp_path_factory.mktemp("chaos") / "run")
    try:
        for number, blow in enumerate(list(blows(monkey.dice))):
            # In turn: after a step, and mostly while it works, now and then while it starts.
            if number % 2:
                before = monkey.steps()
                monkey.wait(lambda before=before: monkey.steps() > before)
            elif monkey.dice.random() < 0.7:
                monkey.wait(monkey.works)
            time.sleep(monkey.dice.uniform(0, 10))
            for victim in blow:
                monkey.wait(lambda victim=victim: monkey.kill(victim))
                time.sleep(monkey.dice.uniform(0, 2))
        monkey.finish()
    finally:
        monkey.run.kill()
    print(f"{monkey.killed.total()} kills, started {monkey.starts} times")
    return monkey


def test_every_kind_was_killed_and_the_run_came_to_its_end(survived):
    assert survived.killed == dict.fromkeys(VICTIMS, ROUNDS)
    # Only what takes the driver along needs somebody who starts it again: the driver itself, Ray's
    # head, and an engine that never started (it could be the configuration).
    assert survived.starts <= 3 * ROUNDS + 1, survived.log.read_text()[-4000:]


def test_each_step_was_trained_once_and_accounts_for_every_token(survived):
    rows = metrics.read(survived.run_dir)
    steps = [row["step"] for row in rows if row["step"]]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > ROUNDS
    for row in rows:
        fates = [v for k, v in row.items() if k.startswith("ledger/") and k != "ledger/sampled"]
        assert row["ledger/sampled"] == sum(fates)


def test_no_group_was_trained_twice(survived):
    trained: Counter[str] = Counter()
    for file in (survived.run_dir / "batches").glob("step-*.parquet"):
        trained.update(set(pq.read_table(file, columns=["group_id"])["group_id"].to_pylist()))
    assert trained and set(trained.values()) == {1}


def test_what_a_harness_was_told_is_in_the_store(survived):
    store = RolloutStore(survived.run_dir / "store")
    told = 0
    for file in (survived.run_dir / "rollouts").glob("*/trajectory.json"):
        with contextlib.suppress(json.JSONDecodeError):  # the harness was killed as it wrote
            said = [
                message["content"]
                for message in json.loads(file.read_text())["messages"]
                if message["role"] == "assistant" and message.get("extra", {}).get("response")
            ]
            kept = Counter(call.text for call in store.calls(file.parent.name))
            assert not Counter(said) - kept, file
            told += len(said)
    store.close()
    assert told > 8


def test_the_weights_are_those_of_the_batches_on_disk(survived):
    """All updates once more, from the base model, without a crash."""
    config = load(survived.run_dir / "config.yaml", [])
    _, state = Checkpoints(survived.run_dir, keep=2).latest()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        bundles = reserve(config, Device.CPU, wait_s=30)
        trainer = Trainer(config, models.resolve(config.model.path), bundles, config.run.steps)
        for step in itertools.count(1):
            file = dataset.path(survived.run_dir, step)
            if not file.exists():
                break
            trainer.update(dataset.of(pq.read_table(file)))
        assert step - 1 == state.version.step
        assert trainer.export(survived.run_dir / "replayed.safetensors") == state.checksum
    finally:
        ray.shutdown()
