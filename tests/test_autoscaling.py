"""Rollout nodes come with the queue and go with it: Ray's own autoscaler (v2) with its provider of
nodes that are processes of this machine, told what to start by cluster.yaml."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
)
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from test_rollouts_controller import Run

from lightning_ray.config import RunConfig
from lightning_ray.gateway.deploy import free_port
from lightning_ray.placement import Device, reserve
from lightning_ray.records import Outcome

ROOT = Path(__file__).resolve().parents[1]
MOST_ROLLOUT_NODES = 3  # of cluster.yaml's 64: each is a raylet and its agents on two cores
IDLE_S = 5
# Longest waits, in seconds, on two busy cores: for the head, and for nodes to come or go.
HEAD_S, NODES_S = 120, 240


def autoscaling(gcs: str) -> dict:
    """The autoscaler's configuration from cluster.yaml, for nodes on this machine."""
    resource = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    resource["spec"]["autoscalerOptions"]["idleTimeoutSeconds"] = IDLE_S
    (rollout,) = [g for g in resource["spec"]["workerGroupSpecs"] if g["groupName"] == "rollout"]
    assert rollout["minReplicas"] == 0
    rollout["maxReplicas"] = MOST_ROLLOUT_NODES
    config = _derive_autoscaling_config_from_ray_cr(resource)
    config["provider"] = {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "gcs_address": gcs,
        "head_node_id": FAKE_HEAD_NODE_ID,
    }
    nodes = config["available_node_types"]
    nodes[FAKE_HEAD_NODE_TYPE] = nodes.pop(config["head_node_type"])
    config["head_node_type"] = FAKE_HEAD_NODE_TYPE
    for node in nodes.values():
        node["resources"] |= {"object_store_memory": 100_000_000}
        del node["resources"]["memory"]  # more than this machine has
    return config


@pytest.fixture
def cluster() -> Iterator[None]:
    """A head without CPUs and its autoscaler; this process is connected to it."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="lra") as folder:  # short: Unix sockets lie in it
        config = Path(folder) / "autoscaling.yaml"
        config.write_text(yaml.safe_dump(autoscaling(address)))
        ray_start = [Path(sys.executable).parent / "ray", "start", "--head", "--block"]
        options = {
            "num-cpus": 0,
            "node-ip-address": "127.0.0.1",
            "port": address.split(":")[1],
            "temp-dir": folder,
            "include-dashboard": "false",
            "object-store-memory": 100_000_000,
            "ray-client-server-port": free_port(),
            "dashboard-agent-listen-port": free_port(),
            "autoscaling-config": config,
        }
        head = subprocess.Popen(
            [*ray_start, *(f"--{name}={value}" for name, value in options.items())],
            env=os.environ
            | {
                "RAY_FAKE_CLUSTER": "1",
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        try:
            wait(lambda: connected(address, path), HEAD_S, "the head did not start")
            yield
        finally:
            ray.shutdown()
            os.killpg(head.pid, signal.SIGTERM)
            head.wait(60)
            for process in psutil.process_iter(["cmdline"]):
                # The nodes of the provider are sessions of their own.
                if any(folder in argument for argument in process.info["cmdline"] or []):
                    process.kill()


def connected(address: str, path: str) -> bool:
    try:
        ray.init(
            address=address,
            logging_level="ERROR",
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
        )
    except ConnectionError:
        return False
    return True


def wait(condition: Callable[[], bool], seconds: float, failure: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{failure} within {seconds:g} s"
        time.sleep(0.5)


def nodes() -> Counter[str]:
    """How many nodes of each group are alive, by what they offer; the head offers nothing."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Counter("gpu" if "GPU" in each else "rollout" for each in alive if "CPU" in each)


@pytest.mark.slow
def test_rollout_nodes_come_and_go_with_the_queue_and_the_gpu_node_stays(
    cluster: None, tmp_path: Path
) -> None:
    reserve(RunConfig(), Device.GPU, wait_s=NODES_S)
    assert nodes() == {"gpu": 1}

    # Two at a time on a node, six in all, a quarter of a minute each: a collecting phase.
    run = Run(tmp_path, rollout={"cpus": 2, "concurrency": 6, "timeout_s": 15})
    run.submit(**{f"rollout-{number}": "sleep" for number in range(8)})
    wait(lambda: nodes() == {"gpu": 1, "rollout": 3}, NODES_S, "three rollout nodes did not come")
    done = run.wait(8, NODES_S)
    assert {finished.outcome for finished in done.values()} == {Outcome.TIMEOUT}
    assert {finished.attempts for finished in done.values()} == {1}

    # The update: the trainer has its bundles, nobody needs a rollout node.
    wait(lambda: nodes() == {"gpu": 1}, NODES_S, "the rollout nodes did not go")

    # The next phase is a small one.
    run.submit(last="sleep")
    wait(lambda: nodes() == {"gpu": 1, "rollout": 1}, NODES_S, "a rollout node did not come back")
    run.wait(1, NODES_S)
    wait(lambda: nodes() == {"gpu": 1}, NODES_S, "the last rollout node did not go")
