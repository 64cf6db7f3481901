"""Tells the engine's `Door` what vLLM says of its load after each step.

Imported where vLLM is started: everything else of an engine does without vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from lightning_ray.engine.admission import Door, Load


class Meter(StatLoggerBase):
    """One of vLLM's stat loggers; it is called on the event loop of the calls."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        *_: Any,
        **__: Any,
    ) -> None:
        if scheduler_stats is not None:
            preempted = iteration_stats.num_preempted_reqs if iteration_stats else 0
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._door.observe(Load(scheduler_stats.kv_cache_usage, waiting, preempted))

    def log_engine_initialized(self) -> None:
        pass
