"""What many Jobs cost: creating them, and deciding about them, on a real API server.

    python benchmarks/kubernetes.py [--jobs 2000]

The control plane is that of tests/kubernetes (its first build takes minutes); there is no node, so
that only the API server, its controllers and we are at work. Beside our launcher, in the same run:
a loop that creates such Jobs one after the other with the official client, and the time that the
client needs to turn one watch event into its objects. Medians of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# The folder of a program is first on its path, and this one would hide the client's package.
sys.path.remove(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "kubernetes"))
import control_plane
from kubernetes import client

from lightning_ray.config import RunConfig, load
from lightning_ray.records import Task
from lightning_ray.rollouts.pods import manifest
from lightning_ray.rollouts.pods.api import Api
from lightning_ray.rollouts.pods.launcher import Launcher
from lightning_ray.rollouts.pods.manifest import Room
from lightning_ray.rollouts.pods.outcomes import Patience
from lightning_ray.rollouts.pods.reconcile import Create, Reconciler
from lightning_ray.rollouts.pods.template import Names

ROUNDS = 5
LOOK_S = 1.0  # between two lists of all Jobs, which cost the API server something
NAMES = Names("a", "r", "g", "train", "http://gateway/rollout/a")
TASK = Task("t", "s")


def config(kubeconfig: Path, jobs: int) -> RunConfig:
    return load(
        None,
        [
            "rollout.launcher=kubernetes",
            "kubernetes.image=python",
            f"kubernetes.kubeconfig={kubeconfig}",
            f"kubernetes.max_pods={jobs}",
            "kubernetes.creates_per_s=100000",
            "kubernetes.start_timeout_s=100000",
        ],
    )


async def ours(settings: RunConfig, jobs: int) -> tuple[float, float]:
    """Seconds from the wish for `jobs` Jobs until all are there, and until all are gone again."""
    api, run_id = Api(settings.kubernetes), f"bench{jobs}"

    def there() -> int:
        return len(api.list("jobs", manifest.selector(run_id))[0])

    launcher = Launcher(settings, run_id)
    launcher.start()
    started = time.monotonic()
    rooms = [f"r{number}-a0" for number in range(jobs)]
    waiting = [
        asyncio.ensure_future(
            launcher.run(TASK, Room(room, "http://gateway", "key", "agent", 600.0), NAMES)
        )
        for room in rooms
    ]
    while await asyncio.to_thread(there) < jobs:
        await asyncio.sleep(LOOK_S)
    made = time.monotonic() - started
    started = time.monotonic()
    for room, one in zip(rooms, waiting, strict=True):
        one.cancel()
        launcher.release(room)
    while await asyncio.to_thread(there):
        await asyncio.sleep(LOOK_S)
    gone = time.monotonic() - started
    await launcher.stop()
    return made, gone


def theirs(batch: client.BatchV1Api, job: dict[str, Any], jobs: int) -> float:
    """Seconds for `jobs` Jobs, one after the other."""
    started = time.monotonic()
    for number in range(jobs):
        named = {**job, "metadata": {"name": f"plain-{number}"}}
        batch.create_namespaced_job("default", named)
    return time.monotonic() - started


def seconds(work: Callable[[], object], times: int = 1) -> float:
    """Median over the rounds, per time."""
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - started) / times)
    return statistics.median(found)


def full(jobs: int, job: dict[str, Any], pod: dict[str, Any]) -> Reconciler:
    """A reconciler with `jobs` Jobs that run."""
    made = Reconciler(Patience(1e6, 1e6), jobs, 1e9)
    made.listed("jobs", [], 0.0)
    made.listed("pods", [], 0.0)
    for number in range(jobs):
        made.want(f"j{number}", 1.0)
    for action in made.actions(2.0):
        assert isinstance(action, Create)
        named = {**job["metadata"], "name": action.name, "uid": action.name}
        made.created(action.name, {**job, "metadata": named}, 2.0)
        labels = {"job-name": action.name}
        about = {"name": f"{action.name}-x", "uid": f"p{action.name}", "labels": labels}
        made.event("pods", "ADDED", {**pod, "metadata": about})
    made.actions(3.0, everything=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures Jobs on a real API server.")
    parser.add_argument("--jobs", type=int, default=2000)
    jobs = parser.parse_args().jobs
    console = Console()
    with (
        tempfile.TemporaryDirectory(prefix="lr-kube-") as folder,
        control_plane.Cluster(Path(folder), control_plane.build()) as cluster,
    ):
        settings = config(cluster.kubeconfig(), jobs)
        template = Launcher(settings, "bench")._build(
            TASK, Room("x", "u", "k", "agent", 600.0), NAMES
        )
        few = min(jobs, 200)
        made, gone = asyncio.run(ours(settings, jobs))
        plain = theirs(cluster.batch, template, few)
        table = Table(title=f"{jobs} Jobs with their Secrets, on a real API server")
        for column in ("", "Jobs/s"):
            table.add_column(column, justify="right" if column else "left")
        table.add_row("created by the launcher", f"{jobs / made:.0f}")
        table.add_row("deleted by the launcher", f"{jobs / gone:.0f}")
        table.add_row(f"one after the other, without Secrets ({few})", f"{few / plain:.0f}")
        console.print(table)
        raw = cluster.batch.list_namespaced_job("default", limit=1, _preload_content=False).data
    pod = {"status": {"phase": "Running"}}
    job = {"metadata": {"labels": {}}, "status": {}}
    api = client.ApiClient()
    table = Table(title="deciding, in one process")
    for column in ("Jobs", "an event, us", "a look at all, ms", "share of a core"):
        table.add_column(column, justify="right")
    for size in (jobs // 10, jobs):
        full_one = full(size, job, pod)
        event = {**pod, "metadata": {"name": "j5-x", "uid": "pj5", "labels": {"job-name": "j5"}}}

        def one(reconciler: Reconciler = full_one, event: dict[str, Any] = event) -> None:
            reconciler.event("pods", "MODIFIED", event)
            reconciler.actions(4.0)

        each = seconds(one, 500)
        every = seconds(lambda reconciler=full_one: reconciler.actions(4.0, everything=True))
        # It looks at all once a second.
        table.add_row(f"{size}", f"{each * 1e6:.0f}", f"{every * 1e3:.1f}", f"{every:.1%}")
    console.print(table)

    parsed = seconds(lambda: api.deserialize(raw.decode(), "V1JobList", "application/json"), 20)
    console.print(f"the official client's objects for one event: {parsed * 1e6:.0f} us")


if __name__ == "__main__":
    main()
