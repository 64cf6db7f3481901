"""The driver of tests/test_autoscaling.py, a process of its own: queues rollouts on the cluster at
RAY_ADDRESS and prints, as JSON lines, which nodes there are whenever that changes, and what came
out of each phase.

    RAY_ADDRESS=127.0.0.1:6379 python tests/queueing.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import state
from test_rollouts_controller import Run

from lightning_ray.config import RunConfig
from lightning_ray.placement import Device, detect, reserve

# Longest wait, in seconds, for nodes to come or go on two busy cores.
NODES_S = 240


def nodes() -> Counter[str]:
    """How many nodes of each group are alive, by what they offer; the head offers nothing."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Counter("gpu" if "GPU" in each else "rollout" for each in alive if "CPU" in each)


def node_of(actor: Any) -> str:
    node: str = state.actors(actor._actor_id.hex())["Address"]["NodeID"]
    return node


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


@contextmanager
def watched() -> Iterator[None]:
    """Says which nodes there are whenever that changes."""
    over = threading.Event()

    def watch() -> None:
        seen, last = None, False
        while not last:
            last = over.wait(0.2)  # and once more after the end, which nobody would see otherwise
            if (now := nodes()) != seen:
                say(at=round(time.monotonic() - started, 1), nodes=dict(now))
                seen = now

    started = time.monotonic()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def wait_for_nodes(**wanted: int) -> None:
    deadline = time.monotonic() + NODES_S
    while nodes() != wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{wanted} wanted, {dict(nodes())} there after {NODES_S} s")
        time.sleep(0.2)


def collect(run: Run, phase: str, count: int) -> None:
    run.submit(**{f"{phase}-{number}": "sleep" for number in range(count)})
    done = run.wait(count, NODES_S).values()
    say(phase=phase, ended=Counter(f"{each.outcome} in {each.attempts}" for each in done))


def main(folder: Path) -> None:
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    ray.init(
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path)}},
    )
    with watched():
        # Nobody has a GPU yet, and the autoscaler says that there may be one.
        deadline = time.monotonic() + NODES_S
        while detect() is not Device.GPU:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        reserve(RunConfig(), wait_s=NODES_S)
        # Two harnesses fit a node, and four are allowed: a collecting phase of two waves.
        run = Run(folder, rollout={"cpus": 2, "concurrency": 4, "timeout_s": 8})
        collect(run, "first", 6)
        # It asks for no CPU: on any other node it would go with that node.
        here = ray.get_runtime_context().get_node_id()
        say(controller_is_here=node_of(run.controller) == here)
        wait_for_nodes(gpu=1)  # the update: the trainer has its bundles, nobody needs the others
        collect(run, "second", 1)
        wait_for_nodes(gpu=1)
    say(phase="end")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
