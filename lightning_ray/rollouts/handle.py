"""How others reach the run's controller: by its name in Ray, since they start before it."""

from __future__ import annotations

from typing import Any

import ray

from lightning_ray.config import RunConfig

NAMESPACE = "lightning_ray"  # of Ray's actor names


class ControllerStopped(Exception):
    """The run is ending; it takes no more rollouts."""


def name(config: RunConfig) -> str:
    # As configured: what a relative path means depends on the process.
    return f"controller of {config.run.name} in {config.run.dir}"


def find(config: RunConfig) -> Any:
    """The handle of the run's controller.

    Raises:
        ValueError: there is none.
    """
    return ray.get_actor(name(config), namespace=NAMESPACE)
