"""Rollout nodes come with the queue and go with it: Ray's own autoscaler (v2) with its provider of
nodes that are processes of this machine, told what to start by cluster.yaml."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)

from lightning_ray.gateway.deploy import free_port

ROOT = Path(__file__).resolve().parents[1]
MOST_ROLLOUT_NODES = 2  # of cluster.yaml's 64: each is a raylet and its agents on two cores
PROVIDER = f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__qualname__}"
IDLE_S = 5
OBJECT_STORE_BYTES = 100_000_000
# Longest waits, in seconds, for the head and for the driver: four times what two busy cores need.
HEAD_S, PATIENCE = 240, 480


def autoscaling(gcs: str) -> dict[str, Any]:
    """The autoscaler's configuration from cluster.yaml, for nodes on this machine."""
    resource = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    resource["spec"]["autoscalerOptions"]["idleTimeoutSeconds"] = IDLE_S
    (rollout,) = [g for g in resource["spec"]["workerGroupSpecs"] if g["groupName"] == "rollout"]
    assert rollout["minReplicas"] == 0
    rollout["maxReplicas"] = MOST_ROLLOUT_NODES
    config = _derive_autoscaling_config_from_ray_cr(resource)
    config["provider"] = {
        # By its module: the wheel lacks the file of defaults that Ray wants for its short name.
        "type": "external",
        "module": PROVIDER,
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
        node["resources"] |= {"object_store_memory": OBJECT_STORE_BYTES}
        del node["resources"]["memory"]  # more than this machine has
    return config


@pytest.fixture
def head(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """A head without CPUs and its autoscaler, its address, and its log."""
    log, address = tmp_path / "head.log", f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="lra", ignore_cleanup_errors=True) as folder:
        config = Path(folder) / "autoscaling.yaml"
        config.write_text(yaml.safe_dump(autoscaling(address)))
        options = {
            "num-cpus": 0,
            "node-ip-address": "127.0.0.1",
            "port": address.split(":")[1],
            "temp-dir": folder,  # short: Unix sockets lie in it
            "include-dashboard": "false",
            "dashboard-port": free_port(),
            "object-store-memory": OBJECT_STORE_BYTES,
            "ray-client-server-port": free_port(),
            "dashboard-agent-listen-port": free_port(),
            "autoscaling-config": config,
        }
        start = [Path(sys.executable).parent / "ray", "start", "--head", "--block"]
        process = subprocess.Popen(
            [*start, *(f"--{name}={value}" for name, value in options.items())],
            env=os.environ
            | {
                "RAY_FAKE_CLUSTER": "1",
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            },
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + HEAD_S
            while not _listens(address):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.5)
            yield process, address, log
        finally:
            # At once: told to end, the autoscaler would ask the GCS for half a minute what to do
            # about its nodes, which are of its group.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for other in psutil.process_iter(["cmdline"]):  # the nodes' workers are not
                if any(folder in argument for argument in other.info["cmdline"] or []):
                    other.kill()


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
        return True
    return False


@pytest.mark.slow
def test_rollout_nodes_come_and_go_with_the_queue_and_the_gpu_node_stays(
    head: tuple[subprocess.Popen[bytes], str, Path], tmp_path: Path
) -> None:
    process, address, log = head
    # In a process of its own: without a cluster to join, Ray ends the process that asks.
    driver = subprocess.Popen(
        [sys.executable, ROOT / "tests" / "queueing.py", tmp_path],
        env=os.environ | {"RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "driver.log").open("wb"),
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while driver.poll() is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        assert driver.returncode == 0, (tmp_path / "driver.log").read_text()
    finally:
        driver.kill()
    assert driver.stdout is not None
    # Ray, too, says something there.
    said = [json.loads(line) for line in driver.stdout if line.startswith(b"{")]

    # No rollout was ended with its node, and none waited for a node that did not come.
    assert [line["ended"] for line in said if "ended" in line] == [
        {"timeout in 1": 6},
        {"timeout in 1": 1},
    ]
    assert [line["controller_is_here"] for line in said if "controller_is_here" in line] == [True]
    nodes = [Counter(line["nodes"]) for line in said if "nodes" in line]
    first = next(at for at, now in enumerate(nodes) if now["gpu"])
    assert {now["gpu"] for now in nodes[first:]} == {1}
    rollout = [now["rollout"] for now in nodes[first:]]
    peaks = [max(group) for some, group in itertools.groupby(rollout, bool) if some]
    assert peaks == [MOST_ROLLOUT_NODES, 1]
    assert rollout[0] == rollout[-1] == 0
