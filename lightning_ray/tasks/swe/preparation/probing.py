"""Which tasks a policy can learn from, by how often the base model solves them.

A task that every rollout solves gives no signal; one that none solves gives none now, and perhaps
later. `choose` keeps the mixed ones and a share of the hard ones. The published recipe: 4 rollouts
of each of 59,136 tasks, about 5,000 mixed ones kept and 1,000 hard ones added.

Pure. Invariants: which hard tasks are kept depends on the seed and their ids only, not on the
order; every task has one fate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum

from lightning_ray.report.statistics import Tally


class Fate(StrEnum):
    """What the probe says of a task."""

    MIXED = "mixed"  # solved by some rollouts: kept
    HARD = "hard"  # solved by none, and among the share that is kept
    SOLVED = "solved by all"
    UNSOLVED = "solved by none"  # and not among that share
    BEYOND = "more than wanted"  # mixed, but above most_mixed
    LOST = "not probed"  # infrastructure lost some of its rollouts

    @property
    def kept(self) -> bool:
        return self in (Fate.MIXED, Fate.HARD)


def choose(
    tasks: Iterable[str],
    tallies: Mapping[str, Tally],
    *,
    samples: int,
    hard_share: float,
    most_mixed: int | None,
    seed: int,
) -> dict[str, Fate]:
    """The fate of each task id. `tallies` are the graded rollouts of each, of which there should be
    `samples`; `hard_share` hard tasks are kept for each mixed one that is kept."""
    fates = {task: _fate(tallies.get(task), samples) for task in tasks}
    mixed = _shuffled((task for task, fate in fates.items() if fate is Fate.MIXED), seed)
    hard = _shuffled((task for task, fate in fates.items() if fate is Fate.HARD), seed)
    kept = mixed if most_mixed is None else mixed[:most_mixed]
    fates |= dict.fromkeys(mixed[len(kept) :], Fate.BEYOND)
    fates |= dict.fromkeys(hard[round(hard_share * len(kept)) :], Fate.UNSOLVED)
    return fates


def _fate(tally: Tally | None, samples: int) -> Fate:
    if tally is not None and 0 < tally.solved < tally.rollouts:
        return Fate.MIXED  # that much is known, also where a rollout was lost
    if tally is None or tally.rollouts < samples:
        return Fate.LOST
    return Fate.SOLVED if tally.solved else Fate.HARD


def _shuffled(tasks: Iterable[str], seed: int) -> list[str]:
    return sorted(tasks, key=lambda task: hashlib.sha256(f"{seed}\0{task}".encode()).digest())
