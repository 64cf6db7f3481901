"""A thousand harnesses at once: none fails, latency is bounded, and what is over takes no memory.

    python benchmarks/load.py [--clients 1000] [--turns 20] [--waves 2]

Each simulated harness has an attempt of its own, opens a connection and makes its turns one after
the other without a pause, each with the whole history; the engine is instant, so all the work is
the gateway's and the store's. When all are through, their attempts end and as many others come:
what stays in memory of the first wave shows in the second.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import psutil
from gateway import console, say
from generator import Job, LoadGenerator, Result
from ours import HEADERS, System
from rich.table import Table


def wave(system: System, generator: LoadGenerator, clients: int, turns: int) -> Result:
    """So many harnesses, from their first call to their last.

    Raises:
        RuntimeError: a call was not answered.
    """
    attempts = system.attempts(clients)
    targets = [system.target(attempt) for attempt in attempts]
    job = Job(
        system.port, targets, system.body, clients, HEADERS, per_target=turns, conversation=True
    )
    result = generator.run(job)
    assert len(result.latencies) == clients * turns
    system.end(attempts)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Loads the gateway with many harnesses.")
    parser.add_argument("--clients", type=int, default=1000, help="harnesses at a time")
    parser.add_argument("--turns", type=int, default=20, help="calls of each")
    parser.add_argument("--waves", type=int, default=2)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lr-load-"))
    generator = LoadGenerator()
    system = System(folder)
    try:
        wave(system, generator, min(16, options.clients), 2)  # warm
        children = psutil.Process().children(recursive=True)
        processes = {
            "gateway": system.process("gateway"),
            "store": system.process("StoreActor"),
            "HAProxy": next(process for process in children if process.name() == "haproxy"),
        }
        table = Table(title=f"{options.clients:,} harnesses, {options.turns} turns each")
        for column in ("wave", "calls", "failed", "calls/s", "p50 s", "p99 s", "longest s"):
            table.add_column(column, justify="right")
        for name in processes:
            table.add_column(f"{name}, MiB", justify="right")
        resident = []
        for number in range(1, options.waves + 1):
            result = wave(system, generator, options.clients, options.turns)
            resident.append([p.memory_info().rss / (1 << 20) for p in processes.values()])
            seconds = [result.quantile(q) / 1000 for q in (0.5, 0.99, 1.0)]
            table.add_row(
                str(number),
                f"{len(result.latencies):,}",
                "0",
                f"{result.rate:.0f}",
                *[f"{each:.1f}" for each in seconds],
                *[f"{mib:.0f}" for mib in resident[-1]],
            )
        console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        console.print(table)
        calls = options.clients * options.turns * (options.waves - 1)
        if calls:
            for name, first, last in zip(processes, resident[0], resident[-1], strict=True):
                grown = (last - first) * (1 << 20) / calls
                say(f"bytes of memory per call after the first wave, {name}", grown, 1000, True)
    finally:
        system.stop()
        generator.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
