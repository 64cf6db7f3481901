"""Weights from trainer to engines: which way, in which order, and what if the other end is gone.
That the weights are right is tested with real engines in `test_engine.py`."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from lightning_ray.config import ConfigError, load
from lightning_ray.engine.actor import EngineActor, asleep
from lightning_ray.engine.transfer import receive, send
from lightning_ray.placement import Device, WeightSyncWay, weight_sync_way
from lightning_ray.records import PolicyVersion
from lightning_ray.run.sync import WeightSync

CPU = torch.device("cpu")
FILE, MEMORY = WeightSyncWay


@pytest.mark.parametrize(("settings", "device", "way"), [
    ([], Device.CPU, FILE),
    ([], Device.GPU, MEMORY),
    (["trainer.weight_sync=memory"], Device.CPU, MEMORY),
    (["trainer.weight_sync=file"], Device.GPU, FILE),
    (["engine.count=2", "trainer.ranks=2"], Device.GPU, MEMORY),
    (["engine.count=2", "engine.tensor_parallel=2", "trainer.ranks=3"], Device.GPU, FILE),
    (["engine.count=2", "engine.tensor_parallel=2", "trainer.ranks=4"], Device.GPU, MEMORY),
])  # fmt: skip
def test_by_itself_memory_is_for_gpus_with_a_rank_beside_every_engine_worker(settings, device, way):
    assert weight_sync_way(load(None, settings), device) is way


def test_memory_without_a_rank_beside_every_engine_worker_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.ranks=1; raise trainer\.ranks, or use file"):
        load(None, ["trainer.weight_sync=memory", "engine.count=2"])
    with pytest.raises(ConfigError, match="weight_sync_mib has no effect"):
        load(None, ["trainer.weight_sync=file", "trainer.weight_sync_mib=64"])


class Diary:
    """Stands in for trainer and stack, on a machine without a GPU: writes down who is asked for
    what."""

    def __init__(self, may_write_late: bool) -> None:
        self.said: list[str] = []
        self.may_write_late, self.loaded = may_write_late, threading.Event()

    def make_room(self):
        self.said.append("optimizer leaves")

    def open_doors(self):
        return ["first", "second", "third"]

    def gather(self, doors=(), limit_s=0.0):
        # One engine that is gone costs the others this much silence.
        assert not doors or self.engine_waits_s > 2 * limit_s
        self.said.append(f"gather {' '.join(doors)}".strip())

    def feed(self, version, doors, limit_s, verify, send):
        self.engine_waits_s = limit_s
        self.said.append("engines wake for weights")
        send()

    def sleep(self):
        self.said.append("trainer sleeps")

    def write(self, path):
        if self.may_write_late:
            assert self.loaded.wait(10)
        self.said.append("file")
        return "checksum"

    def load(self, policy, checksum):
        self.said.append("engines go on" + (" if they have the checksum" if checksum else ""))
        self.loaded.set()

    def remember(self, policy):
        self.said.append("policy file")


@pytest.mark.parametrize(("way", "verify", "order"), [
    (FILE, "false",
     ["gather", "trainer sleeps", "file", "policy file", "engines go on"]),
    (MEMORY, "false",
     ["optimizer leaves", "engines wake for weights", "gather first second", "trainer sleeps",
      "engines go on", "file", "policy file"]),
    (MEMORY, "true",
     ["optimizer leaves", "engines wake for weights", "gather first second", "trainer sleeps",
      "file", "policy file", "engines go on if they have the checksum"]),
])  # fmt: skip
def test_the_trainer_leaves_the_gpu_before_the_engines_go_on(way, verify, order, tmp_path):
    settings = ["engine.count=2", "trainer.ranks=3", f"engine.verify_sync={verify}"]
    diary = Diary(may_write_late=(way, verify) == (MEMORY, "false"))
    (tmp_path / "step-00001.safetensors").touch()
    sync = WeightSync(load(None, settings), way, diary, diary, tmp_path)
    sync.hand_over(PolicyVersion("l", 2))
    assert diary.said == order
    assert not list(tmp_path.iterdir())  # the weights before are of no use any more


async def test_an_engine_that_is_started_again_during_an_update_leaves_the_gpu_to_the_trainer(
    tmp_path,
):
    class Started(Exception):
        """vLLM would start here."""

    class Engine(EngineActor):
        async def ready(self):
            raise Started

    pointer = tmp_path / "policy.json"
    asleep(pointer).touch()
    engine = Engine(load(None, []), "", str(pointer), PolicyVersion("l", 0), on_gpu=True)
    call = asyncio.create_task(engine.generate(np.arange(3), temperature=1.0, max_tokens=1))
    done, _ = await asyncio.wait([call], timeout=0.3)
    assert not done
    asleep(pointer).unlink()
    with pytest.raises(Started):
        await asyncio.wait_for(call, 10)


def weights(count=16, until=None):
    """Two in a bucket of 1 MiB. The process that asks for number `until` is killed."""
    for number in range(count):
        if number == until:
            os.kill(os.getpid(), signal.SIGKILL)
        yield f"w{number}", torch.full((2**15,), number, dtype=torch.complex128)


def elsewhere(function, *args):
    """In another process, which has torch already."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args, daemon=True)
    process.start()
    return process


def test_what_is_kept_of_a_bucket_outlives_it(tmp_path):
    address, kept = f"ipc://{tmp_path}/door", dict[str, torch.Tensor]()
    elsewhere(send, address, weights(), 1, 30.0, True)
    receive(address, CPU, kept.update, 30.0)
    assert {name: int(tensor[-1].real) for name, tensor in kept.items()} == {
        f"w{number}": number for number in range(16)
    }


def test_an_engine_does_not_wait_long_for_a_trainer_that_was_killed(tmp_path):
    address, kept = f"ipc://{tmp_path}/door", dict[str, torch.Tensor]()
    elsewhere(send, address, weights(until=9), 1, 30.0, True)
    with pytest.raises(zmq.Again):
        receive(address, CPU, kept.update, 4.0)
    assert set(kept) == {f"w{number}" for number in range(8)}


def test_a_trainer_does_not_wait_long_for_an_engine_that_was_killed_and_can_go_on(tmp_path):
    address, left = f"ipc://{tmp_path}/door", weights()

    def die(_bucket):
        os.kill(os.getpid(), signal.SIGKILL)

    elsewhere(receive, address, CPU, die, 30.0)
    send(address, left, 1, 2.0, True)
    assert [name for name, _ in left] == [f"w{number}" for number in range(3, 16)]
    send(address, left := weights(), 1, 0.2, True)  # it never came
    assert len(list(left)) == 16


def test_the_socket_is_for_its_owner_alone(tmp_path):
    """What comes through it is unpickled."""
    from lightning_ray.trainer.policy_worker import PolicyWorker

    worker = object.__new__(PolicyWorker)
    worker._world_size, worker._bucket = 2, lambda: 1
    address = worker.open_door()
    folder = Path(address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    worker._bucket = lambda: 10**9
    with pytest.raises(OSError, match=r"--shm-size.*trainer\.weight_sync=file"):
        worker.open_door()
