"""A run on several nodes, which are raylets of one machine: a node that dies takes nothing with it
but attempts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from runs import PATIENCE, process_of, start, wait_for

from lightning_ray import metrics
from lightning_ray.gateway.deploy import free_port
from lightning_ray.records import Outcome

# Longest wait for the head, in seconds: with one start that came to nothing.
NODE_S = 240


class Node:
    """A raylet of our own ports and folders, and what descends from it."""

    def __init__(self, log: Path, cpus: int, *options: str) -> None:
        self.log, self._options = log, [f"--num-cpus={cpus}", *options]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(Path(sys.executable).parent / "ray", "start", "--block"),
                f"--object-store-memory={100 << 20}",
                f"--dashboard-agent-listen-port={free_port()}",
                # Any that is free: two nodes of one machine must not have the same range.
                *("--min-worker-port=0", "--max-worker-port=0"),
                *self._options,
            ],
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def is_up(self) -> bool:
        """True when it is part of its cluster. Ray gives its agents 15 s to start, which a busy
        machine exceeds: it is then started again, as Kubernetes would do."""
        if self.process.poll() is not None:
            self._kill_group()
            self.start()
        return "Ray runtime started" in self.log.read_text()

    def kill(self) -> None:
        """At once and altogether, as if its machine were gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            everyone = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGKILL)
            for process in everyone:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._kill_group()
        self.process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def head_options(address: str, folder: str) -> list[str]:
    """What makes a node the head at `address`."""
    return [
        "--head",
        "--node-ip-address=127.0.0.1",
        f"--port={address.split(':')[1]}",
        f"--temp-dir={folder}",  # short: Unix sockets lie in it
        "--include-dashboard=false",
        f"--dashboard-port={free_port()}",
        f"--ray-client-server-port={free_port()}",
    ]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[tuple[str, Node]]:
    """A head with one CPU, and its address."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="lrn", ignore_cleanup_errors=True) as folder:
        node = Node(tmp_path / "head", 1, *head_options(address, folder))
        try:
            deadline = time.monotonic() + NODE_S
            while not node.is_up():
                assert time.monotonic() < deadline, node.log.read_text()
                time.sleep(0.5)
            yield address, node
        finally:
            node.kill()


class Nodes:
    """The nodes beside the head at `address`."""

    def __init__(self, address: str, head: Node, folder: Path) -> None:
        self.head = head
        self._address, self._folder, self._all = address, folder, list[Node]()

    def join(self) -> Node:
        node = Node(self._folder / f"node-{len(self._all)}", 2, f"--address={self._address}")
        self._all.append(node)
        deadline = time.monotonic() + NODE_S
        while not node.is_up():
            assert time.monotonic() < deadline, node.log.read_text()
            time.sleep(0.5)
        return node

    def kill(self) -> None:
        for node in self._all:
            node.kill()


@pytest.fixture
def nodes(
    head: tuple[str, Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_ADDRESS", head[0])
    beside = Nodes(*head, tmp_path)
    yield beside
    beside.kill()


@contextlib.contextmanager
def running(run_dir: Path, log: Path, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    run = start(
        run_dir,
        log,
        # One group after the other: a harness that is new after a step has just begun.
        "run.groups_per_step=1",
        "run.groups_in_flight=null",
        "run.drain_s=null",
        "rollout.concurrency=2",
        *overrides,
    )
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def assert_each_group_was_trained_once(run_dir: Path, steps: list[int]) -> list[dict[str, float]]:
    """The rows of its metrics."""
    rows = [row for row in metrics.read(run_dir) if row["step"]]
    assert [row["step"] for row in rows] == steps
    assert [row["rollouts/finished"] for row in rows] == [4] * len(steps)
    for row in rows:
        fates = [v for k, v in row.items() if k.startswith("ledger/") and k != "ledger/sampled"]
        assert row["ledger/sampled"] == sum(fates)
    trained: Counter[str] = Counter()
    for file in (run_dir / "batches").glob("step-*.parquet"):
        trained.update(set(pq.read_table(file, columns=["group_id"])["group_id"].to_pylist()))
    assert set(trained.values()) <= {1}
    return rows


@pytest.mark.slow
def test_a_run_survives_the_death_of_the_node_that_has_its_harnesses(
    nodes: Nodes, tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"

    def harnesses() -> int:
        return len(list((run_dir / "rollouts").glob("*/harness.log")))

    # The head has the bundle on its only CPU: no room for a harness.
    with running(run_dir, log, "run.steps=2", "trainer.ranks=1", "rollout.cpus=1") as run:
        wait_for(run, log, lambda: "| collect" in log.read_text())
        node = nodes.join()
        wait_for(run, log, lambda: "step 1/2" in log.read_text())
        wait_for(run, log, lambda: harnesses() > 4)  # those of the first step
        node.kill()
        nodes.join()
        assert run.wait(PATIENCE) == 0, log.read_text()

    assert log.read_text().count("starting | store") == 1  # nothing of the run's own was lost
    rows = assert_each_group_was_trained_once(run_dir, [1, 2])
    lost = [row[f"outcomes/{Outcome.NODE_LOST}"] for row in rows]
    assert lost[0] == 0 and lost[1] >= 1


# Leaves room for one bundle on the head.
GUEST = """
import time, ray
ray.init(log_to_driver=False)
@ray.remote(num_cpus=0.7)
class Guest:
    def is_here(self):
        return True
guest = Guest.remote()
print("here" if ray.get(guest.is_here.remote()) else "", flush=True)
time.sleep(3600)
"""
TENANTS = ("ray::PolicyWorker", "ray::EngineActor", "ray::ServeReplica:lightning_ray:gateway")


@pytest.mark.slow
def test_ranks_engines_and_gateway_on_two_nodes_of_which_one_dies(
    nodes: Nodes, tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    guest = subprocess.Popen([sys.executable, "-c", GUEST], stdout=subprocess.PIPE)
    try:
        assert guest.stdout is not None and guest.stdout.readline() == b"here\n"
        node = nodes.join()
        with running(
            run_dir,
            log,
            "run.steps=2",
            "run.nodes=2",
            "trainer.ranks=2",
            "engine.count=2",
            "engine.verify_sync=true",
            # From each rank to the engine beside it: a pair that is not on one node would fail.
            "trainer.weight_sync=memory",
            "gateway.replicas=2",
            "rollout.cpus=0.5",
        ) as run:
            wait_for(run, log, lambda: "step 1/2" in log.read_text())
            for tenant in TENANTS:
                for place in (nodes.head, node):
                    process_of(place.process.pid, tenant)  # it is there
            node.kill()
            nodes.join()
            assert run.wait(PATIENCE) == 0, log.read_text()
    finally:
        guest.kill()
        guest.wait()
    assert "going on from the last checkpoint" in log.read_text()
    assert_each_group_was_trained_once(run_dir, [1, 2])
