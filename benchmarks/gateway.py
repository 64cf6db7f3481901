"""How fast the gateway is, and what it costs: one command, one table per section.

    python benchmarks/gateway.py [--section throughput ...] [--agentlightning PYTHON]

The gateway renders, samples from an instant engine (200 prompt tokens, 100 sampled ones) and
records durably. Beside it, in the same run: a bare Ray Serve replica that only calls that engine, a
plain FastAPI + httpx proxy in front of an instant HTTP server, and Agent Lightning's gateway in
front of the same server if `--agentlightning` names a Python 3.12 that has agentlightning==1.0.2.

Every number is a median over rounds. The systems take turns within a round and in another order in
each, so that what else the machine does hits all alike.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from generator import Job, LoadGenerator, Result
from ours import BARE, HEADERS, PROMPT_TOKENS, SAMPLED_TOKENS, System, make_words
from peers import AgentLightning, Server, start
from rich.console import Console
from rich.table import Table

from lightning_ray.gateway.deploy import free_port

CONCURRENCIES = (1, 16, 64, 256)
# Calls of one attempt: as many as an agent makes for a task.
CALLS_PER_ATTEMPT = 20
# Attempts of a round: more than any gateway can use up.
MOST_CALLS_PER_SECOND = 2000
GATEWAY, PROXY, AGENT_LIGHTNING = "lightning_ray", "FastAPI + httpx", "Agent Lightning"
BARE_SERVE, GENERATOR = "bare Serve replica", "(the generator alone)"

console = Console(width=None if sys.stdout.isatty() else 130)


@dataclass
class Bench:
    """Everything that the sections share."""

    options: argparse.Namespace
    folder: Path
    system: System
    generator: LoadGenerator
    upstream: Server
    peers: dict[str, Server]

    @property
    def names(self) -> list[str]:
        return [GATEWAY, BARE_SERVE, *(name for name in self.peers if name != GENERATOR)]

    def measure(self, name: str, clients: int, seconds: float = 0.0, calls: int = 0) -> Result:
        """Loads one system."""
        peer = self.peers.get(name)
        port = peer.port if peer else self.system.port
        headers, attempts = dict(HEADERS), []
        if name == GATEWAY:
            most = calls or seconds * MOST_CALLS_PER_SECOND
            attempts = self.system.attempts(clients + int(most / CALLS_PER_ATTEMPT) + 1)
            targets = [self.system.target(attempt) for attempt in attempts]
        else:
            targets = [f"/{BARE}" if name == BARE_SERVE else "/v1/chat/completions"] * 100_000
            if isinstance(peer, AgentLightning):
                targets, headers = [peer.PATH] * len(targets), peer.headers
        job = Job(
            port, targets, self.system.body, clients, headers, CALLS_PER_ATTEMPT, seconds, calls
        )
        result = self.generator.run(job)
        self.system.end(attempts)
        return result


def throughput(bench: Bench) -> None:
    """Calls per second and latencies."""
    rates: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    names = [*bench.names, GENERATOR]
    for name in names:
        bench.measure(name, 16, 0.5)  # warm
    for number in range(bench.options.rounds):
        for clients in CONCURRENCIES:
            for i in range(len(names)):
                name = names[(i + number) % len(names)]
                result = bench.measure(name, clients, bench.options.seconds)
                measured = (result.rate, result.quantile(0.5), result.quantile(0.99))
                rates.setdefault((name, clients), []).append(measured)
    medians = {
        key: [statistics.median(column) for column in zip(*rows, strict=True)]
        for key, rows in rates.items()
    }
    table = Table(title="calls/s | p50 ms | p99 ms, by clients", title_justify="left")
    table.add_column("", no_wrap=True)
    for clients in CONCURRENCIES:
        table.add_column(str(clients), justify="right", no_wrap=True)
    for name in names:
        rows = [medians[name, clients] for clients in CONCURRENCIES]
        table.add_row(name, *[f"{rate:.0f} | {p50:.1f} | {p99:.1f}" for rate, p50, p99 in rows])
    console.print(table)
    ours = medians[GATEWAY, 64]
    say("share of a bare Serve replica, 64 clients", ours[0] / medians[BARE_SERVE, 64][0], 0.7)
    if AGENT_LIGHTNING in bench.peers:
        theirs = medians[AGENT_LIGHTNING, 64]
        say("times Agent Lightning's calls/s, 64 clients", ours[0] / theirs[0], 1.3)
        say("times its p99, 64 clients", ours[2] / theirs[2], 0.5, at_most=True)


def latency(bench: Bench) -> None:
    """What a single call costs beside the engine, and what of it is the disk."""
    calls = 300
    bench.measure(GATEWAY, 1, calls=50)
    whole = bench.measure(GATEWAY, 1, calls=calls).quantile(0.5)
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    engine = median_ms(
        lambda: ray.get(bench.system.engine.generate.remote(prompt, max_tokens=SAMPLED_TOKENS)),
        calls,
    )
    file = os.open(bench.folder / "probe", os.O_CREAT | os.O_RDWR)
    record = b"x" * 4096

    def sync() -> None:
        os.write(file, record)
        os.fdatasync(file)

    disk = median_ms(sync, calls)
    os.close(file)
    table = Table(title=f"one client, p50 of {calls} calls", title_justify="left")
    for column in ("a call, ms", "engine", "over the engine", "fsync of 4 KiB", "without it"):
        table.add_column(column, justify="right")
    parts = (whole, engine, whole - engine, disk, whole - engine - disk)
    table.add_row(*[f"{part:.2f}" for part in parts])
    console.print(table)
    say("ms over the engine, without the fsync", whole - engine - disk, 3.0, at_most=True)


def memory(bench: Bench) -> None:
    """Resident memory over many calls; attempts end when they are used up."""
    calls, parts = bench.options.calls, 10
    processes = {
        "gateway": bench.system.process("gateway"),
        "store": bench.system.process("StoreActor"),
    }
    table = Table(title=f"resident memory over {calls:,} calls, MiB", title_justify="left")
    for column in ("calls", *processes):
        table.add_column(column, justify="right")
    curve = []
    for part in range(parts + 1):
        if part:
            bench.measure(GATEWAY, 64, calls=calls // parts)
        curve.append([p.memory_info().rss / (1 << 20) for p in processes.values()])
        table.add_row(f"{part * calls // parts:,}", *[f"{mib:.1f}" for mib in curve[-1]])
    console.print(table)
    later = curve[parts // 2 :]
    slopes = np.polyfit(np.linspace(0, calls / 2, len(later)), later, 1)[0] * (1 << 20)
    for name, slope in zip(processes, slopes, strict=True):
        say(f"bytes per call in the second half, {name}", slope, 1000.0, at_most=True)


def inflight(bench: Bench) -> None:
    """How many calls of a model that takes a second are under way."""
    clients, seconds = 256, 1.0
    table = Table(title=f"{clients} clients, a model of {seconds:g} s", title_justify="left")
    for column in ("", "most in flight", "calls/s", "p99 s"):
        table.add_column(column, justify="right" if column else "left")
    for name in bench.names:
        bench.measure(name, clients, 0.2)
        here = name in (GATEWAY, BARE_SERVE)
        if here:
            ray.get(bench.system.engine.delay.remote(seconds))
        else:
            httpx.get(f"{bench.upstream.url}/delay/{seconds}")
        result = bench.measure(name, clients, 4.0)
        if here:
            most = ray.get(bench.system.engine.delay.remote(0.0))
        else:
            most = int(httpx.get(f"{bench.upstream.url}/most").text)
            httpx.get(f"{bench.upstream.url}/delay/0")
        rate, p99 = f"{result.rate:.0f}", f"{result.quantile(0.99) / 1000:.2f}"
        table.add_row(name, str(most), rate, p99)
        if name == GATEWAY:
            ours = most
    console.print(table)
    say("calls in flight", ours, clients)


def turns(bench: Bench) -> None:
    """One long rollout: every call sends the whole history and 200 tokens more."""
    number, end = 100, 30_000
    words = make_words()
    [attempt] = bench.system.attempts(1)
    url = f"http://127.0.0.1:{bench.system.port}{bench.system.target(attempt)}"
    before = stored(bench)
    history: list[dict[str, Any]] = []
    times, lengths = [], []
    with httpx.Client(headers=HEADERS, timeout=60) as client:
        for turn in range(number):
            told = " ".join(["", *words[turn * 30 : turn * 30 + 190]])
            history.append({"role": "user", "content": told})
            begun = time.perf_counter()
            answer = client.post(url, json={"model": "policy", "messages": history})
            times.append(1000 * (time.perf_counter() - begun))
            reply = answer.raise_for_status().json()
            history.append(reply["choices"][0]["message"])
            lengths.append(reply["usage"]["total_tokens"])
    calls = ray.get(bench.system.store.calls.remote(attempt))
    assert [call.branch for call in calls[1:]] == ["continued"] * (number - 1)
    bench.system.end([attempt])
    table = Table(title=f"a rollout of {number} turns", title_justify="left")
    for column in ("turn", "tokens", "ms a call", "ms / 1000 tokens"):
        table.add_column(column, justify="right")
    step = number // 10
    curve = [statistics.median(times[i : i + step]) for i in range(0, number, step)]
    middle = [statistics.median(lengths[i : i + step]) for i in range(0, number, step)]
    for i, (ms, tokens) in enumerate(zip(curve, middle, strict=True)):
        turn = f"{i * step + 1} to {(i + 1) * step}"
        table.add_row(turn, f"{tokens:,.0f}", f"{ms:.1f}", f"{1000 * ms / tokens:.2f}")
    console.print(table)
    assert abs(lengths[-1] - end) < end / 20, lengths[-1]
    half, tenth = number // step // 2, number // step
    growth = (curve[tenth - 1] - curve[half - 1]) / max(curve[half - 1] - curve[0], 0.1)
    say("growth in the second half over the first (square: 3)", growth, 2.0, at_most=True)
    sizes = stored(bench)
    say("bytes on disk per token", (sizes - before) / lengths[-1], 20.0, at_most=True)


def stored(bench: Bench) -> int:
    """Bytes of calls on disk."""
    return sum(f.stat().st_size for f in (bench.system.folder / "store").rglob("*") if f.is_file())


def median_ms(action: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begun)
    return 1000 * statistics.median(taken)


def say(what: str, value: float, limit: float, at_most: bool = False) -> None:
    """A measured number and what is asked of it."""
    met = value <= limit if at_most else value >= limit
    wanted = f"at {'most' if at_most else 'least'} {limit:g}"
    verdict = "[green]yes[/]" if met else "[red]no[/]"
    console.print(f"  {what}: [bold]{value:.2f}[/] ({wanted}: {verdict})")


SECTIONS: dict[str, Callable[[Bench], None]] = {
    f.__name__: f for f in (throughput, latency, memory, inflight, turns)
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the gateway.")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="default: all")
    parser.add_argument("--agentlightning", metavar="PYTHON", help="a Python 3.12 that has it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one measurement in a round")
    parser.add_argument("--calls", type=int, default=20_000, help="of the section `memory`")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lr-bench-"))
    servers = []
    generator = LoadGenerator()
    system = System(folder)
    try:
        upstream = start("upstream", free_port(), folder)
        servers.append(upstream)
        peers = {PROXY: start("proxy", free_port(), folder, upstream.url)}
        if options.agentlightning:
            peers[AGENT_LIGHTNING] = AgentLightning(
                options.agentlightning, free_port(), upstream.url, folder
            )
        peers[GENERATOR] = start("trivial", free_port(), folder)
        servers += peers.values()
        bench = Bench(options, folder, system, generator, upstream, peers)
        console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        for name in options.section or SECTIONS:
            SECTIONS[name](bench)
    finally:
        system.stop()
        for server in servers:
            server.close()
        generator.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
