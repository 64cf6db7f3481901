"""What the rollouts of a simulated run do: those of a recorded run, or of a stated distribution.

A record is undone to what does not depend on the schedule that made it. Calls: the seconds that
they would have taken alone, from how much the calls of the run slowed each other down. Tools: the
time between calls; one that ended while the gate was closed is taken to have ended in the middle.
Left out are earlier attempts of a rollout, and groups of which a rollout was lost; calls that a
rollout made side by side come one after the other.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import NormalDist, mean

import numpy as np
import pyarrow.parquet as pq

from lightning_ray import metrics
from lightning_ray.config import ConfigError, RunConfig, load
from lightning_ray.records import Call, RolloutState
from lightning_ray.run.cycle import Phase
from lightning_ray.simulate.schedules import Setting, Work, option
from lightning_ray.simulate.world import Script
from lightning_ray.store.rollouts import RolloutStore
from lightning_ray.views import RolloutDetail

# A call that starts so soon after the gate has opened was held by it.
HELD_S = 1.0


@dataclass(frozen=True)
class Stated:
    """Log-normal times: half of them are below the median, one in a hundred above the p99."""

    n: int = option(4, "rollouts of a group")
    turns: int = option(4, "calls of a rollout, each followed by tools")
    tool: float = option(1.0, "seconds of the tools after a call, median")
    tool_p99: float = option(12.0, "the same, 99th percentile")
    generation: float = option(0.5, "seconds that a call takes alone, median")
    generation_p99: float = option(0.5, "the same, 99th percentile")

    def work(self, seed: int) -> Work:
        def group(place: int) -> list[Script]:
            random = Random(f"{seed}-{place}")
            return [
                Script(tuple(self._turn(random) for _ in range(self.turns))) for _ in range(self.n)
            ]

        return group

    def _turn(self, random: Random) -> tuple[float, float]:
        call_s = _log_normal(random, self.generation, self.generation_p99)
        return call_s, _log_normal(random, self.tool, self.tool_p99)


def _log_normal(random: Random, median: float, p99: float) -> float:
    sigma = math.log(p99 / median) / NormalDist().inv_cdf(0.99) if median else 0.0
    return median * math.exp(random.gauss(0.0, sigma))


@dataclass(frozen=True)
class Recorded:
    """A run: its groups in the order in which they were begun, its setting, and the groups per hour
    that it made (validation does not count)."""

    groups: list[list[Script]]
    setting: Setting
    groups_per_hour: float

    def work(self, place: int) -> Sequence[Script]:
        """The group at a place; after the last one the first comes again."""
        return self.groups[place % len(self.groups)]


@dataclass(frozen=True)
class Pause:
    """The gate was closed from `closed_at` to `opened_at`, and the engines did nothing from
    `stopped_at`; seconds since the epoch."""

    closed_at: float
    stopped_at: float
    opened_at: float

    @staticmethod
    def of(row: dict[str, float]) -> Pause:
        """The pause of a step. Its metrics are written after the validation that follows."""
        opened_at = row["time"] - row.get("seconds/validate", 0.0)
        closed_at = opened_at - row["seconds/gate_closed"]
        return Pause(closed_at, closed_at + row["seconds/drain"], opened_at)


def recorded(run_dir: Path) -> Recorded:
    """Reads the run in `run_dir`.

    Raises:
        ConfigError: it has made no update, or no group is whole.
        StoreLocked: it is going on.
    """
    rows = [row for row in metrics.read(run_dir) if "seconds/gate_closed" in row]
    if not rows:
        raise ConfigError(f"{run_dir} has no metrics of an update; name the directory of a run")
    config, pauses = load(run_dir / "config.yaml"), [Pause.of(row) for row in rows]
    found = _rollouts(run_dir, config.rollout.n)
    calls = [call for _, some in found for call in some]
    slowdown, alone = alone_s(calls, pauses, config)
    took = {call.call_id: seconds for call, seconds in zip(calls, alone.tolist(), strict=True)}
    groups = defaultdict[str, list[Script]](list)
    for rollout, some in found:
        groups[rollout.group_id].append(_script(rollout, some, took, pauses))
    seconds = [
        sum(row.get(f"seconds/{phase}", 0.0) for phase in Phase if phase is not Phase.VALIDATE)
        for row in rows
    ]
    made = len(rows) * config.run.groups_per_step
    return Recorded(
        list(groups.values()), _setting(config, rows, slowdown), 3600 * made / sum(seconds)
    )


def _rollouts(run_dir: Path, n: int) -> list[tuple[RolloutDetail, list[Call]]]:
    """The rollouts of whole groups that were trained on, in the order in which they started, with
    the calls of their last attempts in the order of time."""
    files = sorted((run_dir / "ledger").glob("step-*.parquet"))
    columns = [pq.read_table(file, columns=["rollout_id"])["rollout_id"] for file in files]
    ids = dict.fromkeys(name for column in columns for name in column.to_pylist())
    store = RolloutStore(run_dir / "store")
    try:
        known = filter(None, map(store.queries.rollout, ids))
        found = [
            (rollout, sorted(store.calls(rollout.tries[-1].attempt_id), key=lambda c: c.started_at))
            for rollout in known
            if rollout.state is RolloutState.FINISHED
        ]
    finally:
        store.close()
    sizes = Counter(rollout.group_id for rollout, _ in found)
    whole = [pair for pair in found if sizes[pair[0].group_id] == n]
    if not whole:
        raise ConfigError(f"{run_dir}: no group has {n} finished rollouts")
    return sorted(whole, key=lambda pair: pair[0].tries[-1].started_at)


def alone_s(
    calls: Sequence[Call], pauses: Sequence[Pause], config: RunConfig
) -> tuple[float, np.ndarray]:
    """By which share a call is slowed down by each that runs beside it on its engine, and the
    seconds that each call would have taken alone.

    The share is that of the linear model `seconds = a + tokens * (b + b * share * beside)` with the
    least relative squared error."""
    starts = np.array([call.started_at for call in calls])
    ends = starts + np.array([call.seconds for call in calls])
    stops, opens = (np.sort([getattr(p, n) for p in pauses]) for n in ("stopped_at", "opened_at"))
    times = np.unique(np.concatenate([starts, ends, stops, opens]))
    middles = (times[1:] + times[:-1]) / 2

    def open_at_middles(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        return np.searchsorted(np.sort(begins), middles) - np.searchsorted(np.sort(ends), middles)

    def from_start_to_end(weights: np.ndarray) -> np.ndarray:
        """The integral of `weights` over the time of each call."""
        total = np.concatenate([[0.0], np.cumsum(weights)])
        return np.interp(ends, times, total) - np.interp(starts, times, total)

    there = np.maximum(1, open_at_middles(starts, ends) / config.engine.count)
    running = np.minimum(there, config.engine.max_num_seqs)
    lengths = np.diff(times) * (open_at_middles(stops, opens) == 0) * running / there
    took = np.maximum(from_start_to_end(lengths), 1e-6)
    beside = from_start_to_end(lengths * (running - 1)) / took
    tokens = np.array([len(call.tokens) for call in calls])
    model = np.stack([np.ones_like(took), tokens, tokens * beside], 1) / took[:, None]
    _, speed, slowed = np.linalg.lstsq(model, np.ones_like(took), rcond=None)[0]
    slowdown = float(np.clip(slowed / speed, 0.0, 1.0)) if speed > 0 else 0.0
    return slowdown, from_start_to_end(lengths / (1 + slowdown * (running - 1)))


def _script(
    rollout: RolloutDetail, calls: Sequence[Call], took: dict[str, float], pauses: Sequence[Pause]
) -> Script:
    attempt = rollout.tries[-1]
    ends = [call.started_at + call.seconds for call in calls]
    nexts = [*(call.started_at for call in calls), attempt.ended_at or ends[-1]]
    start_s, *tools_s = (
        between(end, begin, pauses)
        for end, begin in zip([attempt.started_at, *ends], nexts, strict=True)
    )
    calls_s = [took[call.call_id] for call in calls]
    return Script(tuple(zip(calls_s, tools_s, strict=True)), start_s, rollout.grading_s)


def between(end: float, begin: float, pauses: Sequence[Pause]) -> float:
    """Seconds that a harness was busy between the end of a call and the beginning of the next."""
    for pause in pauses:
        if end < pause.opened_at <= begin < pause.opened_at + HELD_S:
            return (max(end, pause.closed_at) + pause.opened_at) / 2 - end
    return max(0.0, begin - end)


def _setting(config: RunConfig, rows: Sequence[dict[str, float]], slowdown: float) -> Setting:
    per_step, staleness = config.run.groups_per_step, config.run.max_staleness
    in_flight = config.groups_in_flight
    if in_flight == per_step:  # what such a run might do instead
        in_flight = per_step * min(2, 1 + staleness)

    def seconds(phase: Phase) -> float:
        return mean(row.get(f"seconds/{phase}", 0.0) for row in rows)

    return Setting(
        steps=len(rows),
        groups_per_step=per_step,
        in_flight=in_flight,
        max_staleness=staleness,
        drain=config.run.drain_s or 0.0,
        devices=max(config.engine.count, config.trainer.ranks),
        max_num_seqs=config.engine.max_num_seqs,
        concurrency=config.rollout.concurrency,
        slowdown=slowdown,
        update=seconds(Phase.UPDATE),
        sync=seconds(Phase.SYNC),
        checkpoint=seconds(Phase.CHECKPOINT),
    )
