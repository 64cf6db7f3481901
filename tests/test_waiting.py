"""Nothing waits in silence or for ever, and a process that Ray starts again is asked again."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_ray.config import load
from lightning_ray.engine.actor import EngineStartError
from lightning_ray.report.console import Console
from lightning_ray.run import command, driver, waiting
from lightning_ray.run.stack import Stack
from lightning_ray.run.waiting import ProcessLost, Waiting


class Worker:
    def pid(self) -> int:
        return os.getpid()

    def work(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"


@pytest.fixture(scope="module")
def cluster():
    # Ray's workers do not have this folder on their path.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def worker(restarts: int) -> tuple[object, int]:
    actor = ray.remote(Worker).options(num_cpus=0, max_restarts=restarts).remote()
    return actor, ray.get(actor.pid.remote())


def test_a_process_that_hangs_is_named_while_it_is_waited_for_and_then_lost(cluster, monkeypatch):
    monkeypatch.setattr(waiting, "SAY_S", 0.5)
    said: list[str] = []
    actor, pid = worker(0)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ProcessLost, match=r"loading: no answer within run.wait_timeout_s=2 s"):
            Waiting(2, said.append).each([actor], "work", 0.0, what="loading")
    finally:
        os.kill(pid, signal.SIGKILL)
    assert said and all(line.startswith("loading: still waiting, ") for line in said)


def test_a_process_that_is_gone_for_good_is_lost_at_once(cluster):
    actor, pid = worker(0)
    asked = actor.work.remote(60.0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessLost, match=r"asking: the process is gone"):
        Waiting(60, print).get(asked, "asking")


def test_a_process_whose_node_is_gone_for_good_is_lost_at_once(cluster):
    """As an engine of several GPUs, which belongs to its node."""
    nowhere = NodeAffinitySchedulingStrategy(ray.NodeID.from_random().hex(), soft=False)
    actor = ray.remote(Worker).options(num_cpus=0, scheduling_strategy=nowhere).remote()
    wait = Waiting(60, lambda text: None)
    for ask in (
        lambda: wait.each([actor], "pid", what="loading"),
        lambda: wait.get(actor.pid.remote(), "loading"),
    ):
        with pytest.raises(ProcessLost, match="loading: the process is gone"):
            ask()


def test_a_run_whose_engine_lost_its_node_is_not_waited_for(cluster, tmp_path):
    """Else rollouts would call it until they are given up, one after the other."""
    here = ray.get_runtime_context().get_node_id()
    waiting.check_nodes({here}, "an engine")
    stack = Stack(load(None, []), tmp_path, tmp_path, lambda text: None)
    stack._bound = {here, ray.NodeID.from_random().hex()}
    with pytest.raises(ProcessLost, match="an engine of several GPUs: the node is gone"):
        stack.poll()


def test_a_process_that_is_started_again_is_asked_again(cluster):
    actor, pid = worker(-1)
    other, _ = worker(0)
    os.kill(pid, signal.SIGKILL)
    answers = Waiting(60, print).each([actor, other], "work", 0.1, what="working")
    assert answers == ["done", "done"]


def test_an_engine_that_does_not_start_is_a_loss_only_after_another_loss(tmp_path, monkeypatch):
    """Else it is the configuration, and trying again would be no help."""
    ends = [ProcessLost("the controller"), EngineStartError("killed as it started"), None]

    class Run:
        lacks, device = None, None

        def __init__(self, *_: object) -> None:
            pass

        def execute(self, *, goes_on: bool) -> None:
            if end := ends.pop(0):
                raise end

    monkeypatch.setattr(driver, "Run", Run)
    config = load(None, [f"run.dir={tmp_path}", "run.restarts=2"])
    command._until_done(config, tmp_path, Console("test"))
    ends = [EngineStartError("no such model"), None]
    with pytest.raises(EngineStartError, match="no such model"):
        command._until_done(config, tmp_path, Console("test"))
