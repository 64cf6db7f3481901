"""What the store says of rollouts and attempts to those who run and serve them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ray.records import Split


@dataclass(frozen=True)
class AttemptInfo:
    """What the gateway needs to know of an attempt."""

    attempt_id: str
    rollout_id: str
    key_hash: str
    split: Split
    live: bool


@dataclass(frozen=True)
class Known:
    """How a rollout stands; `same` is False if the store has another one under its id; `open` is
    the number of the attempt that has not ended, if there is one."""

    attempts: int
    over: bool
    same: bool
    open: int | None = None


@dataclass(frozen=True)
class Open:
    """How an attempt stands that has not ended: the number of its calls, and whether its pod, if it
    has one, has sent back its result."""

    calls: int
    delivered: bool


@dataclass(frozen=True)
class AttemptSummary:
    """How an attempt's calls went. `last_fault` is the HTTP status (500 or above) that the gateway
    gave last, None if its last answer was fine."""

    calls: int
    last_fault: int | None
