"""How long it takes to make training rows of long rollouts.

    python benchmarks/assembly.py [--tokens 60000]

Rollouts of 25 to 400 turns, that end at the same length, and with turns of the same length (300
tokens, half of them sampled), so that prompts together grow with the square of the turns. "every
pair" compares each call with every earlier one, as an assembly without order does. Prints
milliseconds of CPU, the tokens of all prompts together, and peak memory of ours beyond the calls.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_ray.records import Call, FinishReason, PolicyVersion, Span
from lightning_ray.samples.rows import Layout, rows

TURN = 300  # sampled tokens and tool result


def rollout(turns: int, each: int) -> list[Call]:
    """Calls of `each` sampled tokens, of one context that grows by tool results as long."""
    random, context, calls = np.random.default_rng(0), np.zeros(64, np.int32), []
    for seq in range(turns):
        sampled = random.integers(0, 50_000, each).astype(np.int32)
        calls.append(
            Call(
                f"c{seq}", "a", seq, context, sampled, np.zeros(each, np.float32),
                (Span(PolicyVersion("x", 0), each),), FinishReason.STOP,
            )
        )  # fmt: skip
        result = random.integers(0, 50_000, each).astype(np.int32)
        context = np.concatenate([context, sampled, result])
    return calls


def every_pair(calls: list[Call]) -> None:
    """The baseline: the longest earlier call that is a prefix, by looking at all."""
    full = [call.full for call in calls]
    for number, call in enumerate(calls):
        for earlier in full[:number]:
            len(earlier) <= len(call.prompt) and np.array_equal(
                earlier, call.prompt[: len(earlier)]
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=60_000)
    options = parser.parse_args()
    end = options.tokens
    show(f"rollouts that end at {end} tokens", lambda turns: (end - 64) // (2 * turns))
    show(f"turns of {TURN} tokens", lambda turns: TURN // 2)


def show(title: str, sampled: Callable[[int], int]) -> None:
    """Measures rollouts by their turns; `sampled` is the tokens of a call, given the turns."""
    table = Table(title=title)
    for column in (
        "turns", "ends at", "prompts, tokens", "ours, ms", "every pair, ms", "ratio", "ours, MiB",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for turns in (25, 50, 100, 200, 400):
        calls = rollout(turns, sampled(turns))
        layout = Layout(len(calls[-1].full))
        times = []
        for _ in range(5):
            started = time.process_time()
            rows("r", calls, layout)
            times.append(time.process_time() - started)
        ours = min(times)
        started = time.process_time()
        every_pair(calls)
        pairs = time.process_time() - started
        tracemalloc.start()
        rows("r", calls, layout)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        table.add_row(
            str(turns), str(len(calls[-1].full)), str(sum(len(call.prompt) for call in calls)),
            f"{ours * 1e3:.1f}", f"{pairs * 1e3:.1f}", f"{pairs / ours:.1f}", f"{peak / 2**20:.1f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
