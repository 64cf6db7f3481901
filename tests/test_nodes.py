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
from runs import PATIENCE, start, wait_for

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


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    """The address of a head with one CPU."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="lrn", ignore_cleanup_errors=True) as folder:
        node = Node(
            tmp_path / "head",
            1,
            "--head",
            "--node-ip-address=127.0.0.1",
            f"--port={address.split(':')[1]}",
            f"--temp-dir={folder}",  # short: Unix sockets lie in it
            "--include-dashboard=false",
            f"--dashboard-port={free_port()}",
            f"--ray-client-server-port={free_port()}",
        )
        try:
            deadline = time.monotonic() + NODE_S
            while not node.is_up():
                assert time.monotonic() < deadline, node.log.read_text()
                time.sleep(0.5)
            yield address
        finally:
            node.kill()


@pytest.mark.slow
def test_a_run_survives_the_death_of_the_node_that_has_its_harnesses(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    monkeypatch.setenv("RAY_ADDRESS", head)
    run = start(
        run_dir,
        log,
        "run.steps=2",
        # One group after the other: a harness that is new after a step has just begun.
        "run.groups_per_step=1",
        "run.groups_in_flight=null",
        "run.drain_s=null",
        "trainer.ranks=1",
        # The head has its bundle on its only CPU: no room for a harness.
        "rollout.cpus=1",
        "rollout.concurrency=2",
    )
    nodes: list[Node] = []

    def harnesses() -> int:
        return len(list((run_dir / "rollouts").glob("*/harness.log")))

    def join() -> Node:
        nodes.append(Node(tmp_path / f"node-{len(nodes)}", 2, f"--address={head}"))
        wait_for(run, log, nodes[-1].is_up)
        return nodes[-1]

    try:
        wait_for(run, log, lambda: "| collect" in log.read_text())
        node = join()
        wait_for(run, log, lambda: "step 1/2" in log.read_text())
        wait_for(run, log, lambda: harnesses() > 4)  # those of the first step
        node.kill()
        join()
        assert run.wait(PATIENCE) == 0, log.read_text()
    finally:
        run.kill()
        for node in nodes:
            node.kill()

    assert log.read_text().count("starting | store") == 1  # nothing of the run's own was lost
    rows = [row for row in metrics.read(run_dir) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["rollouts/finished"] for row in rows] == [4, 4]
    lost = [row[f"outcomes/{Outcome.NODE_LOST}"] for row in rows]
    assert lost[0] == 0 and lost[1] >= 1
    for row in rows:
        fates = [v for k, v in row.items() if k.startswith("ledger/") and k != "ledger/sampled"]
        assert row["ledger/sampled"] == sum(fates)
    trained: Counter[str] = Counter()
    for file in (run_dir / "batches").glob("step-*.parquet"):
        trained.update(set(pq.read_table(file, columns=["group_id"])["group_id"].to_pylist()))
    assert set(trained.values()) <= {1}
