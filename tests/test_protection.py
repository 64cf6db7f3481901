"""Who says what a sandbox lacks: the node that runs harnesses, not the one with the driver."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from test_nodes import NODE_S, Node, head_options
from test_rollouts_controller import Run

from lightning_ray.config import RunConfig
from lightning_ray.gateway.deploy import free_port
from lightning_ray.records import Outcome
from lightning_ray.run import cluster

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


@pytest.fixture
def bare_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A head without CPUs, as in cluster.yaml, and a node that has all programs but bubblewrap."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name != "bwrap":
            (programs / program.name).symlink_to(program)
    address, started = f"127.0.0.1:{free_port()}", list[Node]()

    def start(name: str, cpus: int, *options: str) -> None:
        node = Node(tmp_path / name, cpus, *options)
        started.append(node)
        deadline = time.monotonic() + NODE_S
        while not node.is_up():
            assert time.monotonic() < deadline, node.log.read_text()
            time.sleep(0.2)

    with tempfile.TemporaryDirectory(prefix="lrp", ignore_cleanup_errors=True) as folder:
        try:
            start("head", 0, *head_options(address, folder))
            with monkeypatch.context() as bare:
                bare.setenv("PATH", str(programs))
                bare.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
                start("node", 2, f"--address={address}")
            path = os.pathsep.join([str(HERE.parent), str(HERE)])
            variables = {"env_vars": {"PYTHONPATH": path}}
            ray.init(address, logging_level="ERROR", runtime_env=variables)
            yield
            ray.shutdown()
        finally:
            for node in started:
                node.kill()


def test_the_node_that_runs_harnesses_says_what_it_lacks_and_refuses_if_it_must(
    bare_node: None, tmp_path: Path
) -> None:
    assert not cluster.runs_harnesses_here(RunConfig())
    for require, folder in ((False, tmp_path / "auto"), (True, tmp_path / "require")):
        folder.mkdir()
        run = Run(folder, rollout={"retries": 0, "sandbox_require": require})
        run.submit(good="do it")
        [ended] = run.wait(1).values()
        [(node, lack)] = ray.get(run.controller.status.remote()).lacks.items()
        assert node == socket.gethostname()
        assert "bubblewrap is not installed" in lack
        assert "seccompProfile" in lack  # it is a pod
        assert ended.outcome is (Outcome.LAUNCH_FAULT if require else Outcome.COMPLETED), ended
        assert (f"node {node}: rollout.sandbox_require=true" in ended.detail) == require
        ray.kill(run.controller)
