"""The run's numbers, written to every place where somebody looks for them.

`MetricsLog.log(step, values)` appends one JSON line to `metrics.jsonl` in the run directory, sets
Ray gauges (`ray_lightning_ray_<group>_<name>` in Prometheus, tagged with the run) and hands the
values to verl's `Tracking` back ends. Names are `group/name`; `METRICS` lists those that a run
writes. `read(run_dir)` gives the lines back, one dictionary per step.

Invariants: a logged line is on disk when `log` returns; a line torn by a crash is dropped, never
read; after `truncate(k)` no step above k remains, so a resumed run logs each step once; numbers
that are not finite are `null` in the file and NaN when read.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ray.config import ConfigError, RunConfig
from lightning_ray.files import replace
from lightning_ray.records import Outcome

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

FILE_NAME = "metrics.jsonl"

METRICS = {
    "reward/mean": "mean reward of the step's rollouts",
    "reward/solve_rate": "share of the step's rollouts that solved their task",
    "validation/reward": "mean reward on the validation tasks",
    "validation/solve_rate": "share of validation rollouts that solved their task",
    "policy/entropy": "entropy of the policy per trained token, in nats",
    "policy/kl": "KL divergence from the policy that sampled to the trained one, in nats per token",
    "policy/clip_fraction": "share of trained tokens whose PPO ratio was clipped",
    "optim/grad_norm": "gradient norm before clipping",
    "optim/lr": "learning rate",
    "length/sampled_tokens": "sampled tokens per rollout",
    "length/prompt_tokens": "prompt tokens per rollout",
    "rate/tokens_per_s": "sampled tokens per second, of what an update takes",
    "rate/rollouts_per_s": "finished rollouts per second, of what an update takes",
    "rate/groups_per_hour": "groups per hour, of what an update takes",
    "async/age_mean": "mean age of the trained tokens, in updates",
    "async/age_max": "largest age of a trained token, in updates",
    "async/calls_of_several_versions": "share of model calls that went through an update",
    "async/calls_interrupted": "model calls that the update interrupted",
    "async/groups_carried_over": "groups in flight during the update",
    "async/groups_given_up": "groups that became too old and were begun again",
    "seconds/collect": "seconds until enough groups were complete",
    "seconds/drain": "seconds in which model calls in flight ended or were interrupted",
    "seconds/gate_closed": "seconds in which model calls were held",
    "seconds/engines_busy": "seconds in which an engine had something to generate (mean)",
    "seconds/devices_idle": "seconds in which neither engines nor trainer worked",
    "seconds/update": "seconds spent on the update",
    "seconds/sync": "seconds spent on handing the new weights to the engines",
    "seconds/validate": "seconds spent on validation",
    "seconds/checkpoint": "seconds spent on the checkpoint",
    "rollouts/finished": "rollouts of the step that have a reward",
    "rollouts/failed": "rollouts of the step without a reward: lost to infrastructure, or void",
    "rollouts/unprotected_nodes": "nodes that ran harnesses with less than the whole sandbox",
    **{f"outcomes/{outcome}": f"attempts that ended as {outcome}" for outcome in Outcome},
}

# Where each back end keeps its files, by the variable that it reads. Theirs would be the working
# directory or a shared /tmp; a value that the user has set wins.
_PLACES = {
    "tensorboard": ("TENSORBOARD_DIR", "{}/tensorboard"),
    "wandb": ("WANDB_DIR", "{}"),
    "mlflow": ("MLFLOW_TRACKING_URI", "sqlite:///{}/mlflow.db"),
    "swanlab": ("SWANLAB_LOG_DIR", "{}/swanlab"),
}


class MetricsLog:
    """Writes metrics for one run directory. Use from one process at a time.

    Raises:
        ConfigError: a tracking back end is configured whose package is not installed.
    """

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self._path = Path(run_dir) / FILE_NAME
        self._run = config.run.name
        self._gauges: dict[str, Gauge] = {}
        self._tracking = _tracking(Path(run_dir), config)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._rewrite(_lines(self._path))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records `values` of `step`; several calls for one step add up to one row in `read`."""
        numbers = {name: float(value) for name, value in values.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._set_gauges({"step": step, **numbers})
        if self._tracking is not None:
            self._tracking.log(numbers, step=step)

    def truncate(self, after_step: int) -> None:
        """Forgets every step above `after_step`: a run that resumes there will log them again."""
        self._rewrite([line for line in _lines(self._path) if line["step"] <= after_step])

    def close(self) -> None:
        if self._tracking is not None:
            self._tracking.finish()

    def _rewrite(self, lines: list[dict[str, Any]]) -> None:
        replace(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def _set_gauges(self, numbers: Mapping[str, float]) -> None:
        import ray  # metrics.jsonl can be read and written without it
        from ray.util.metrics import Gauge

        if not ray.is_initialized():
            return
        for name, value in numbers.items():
            if name not in self._gauges:
                metric = "lightning_ray_" + re.sub(r"\W", "_", name)
                self._gauges[name] = Gauge(metric, METRICS.get(name, name), tag_keys=("run",))
            self._gauges[name].set(value, tags={"run": self._run})


def read(run_dir: Path | str) -> list[dict[str, float]]:
    """The metrics of a run, one dictionary per step in the order of steps, each with `step` and
    `time` (seconds since the epoch, of the last call). Empty if nothing was logged yet."""
    rows: dict[int, dict[str, float]] = {}
    for line in _lines(Path(run_dir) / FILE_NAME):
        values = {name: math.nan if value is None else value for name, value in line.items()}
        rows.setdefault(line["step"], {}).update(values)
    return [rows[step] for step in sorted(rows)]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole, _, _torn = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _tracking(run_dir: Path, config: RunConfig) -> Any:
    """verl's `Tracking`, or None without back ends (its import takes seconds)."""
    backends = list(config.tracking.backends)
    for backend in backends:
        if importlib.util.find_spec(backend) is None:
            raise ConfigError(
                f"tracking.backends: {backend} needs the package {backend}, which is not "
                f"installed; run `pip install {backend}` or take {backend} out of the list"
            )
    if not backends:
        return None
    from verl.utils.tracking import Tracking

    places = dict(_PLACES[backend] for backend in backends)
    places = {name: place.format(run_dir.absolute()) for name, place in places.items()}
    # The TensorBoard back end prints where it writes.
    with _default_environment(places), contextlib.redirect_stdout(io.StringIO()):
        settings = config.model_dump(mode="json")
        return Tracking(config.tracking.project, config.run.name, backends, settings)


@contextlib.contextmanager
def _default_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets the variables that are not set yet, for as long as the block runs."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
