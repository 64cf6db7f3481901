"""Pass@1 of the base model and of the weights that a run trained, with the harness of that run.

One stack serves both: the engines start with the base model and are then given the trained weights.
The rollouts are kept in `evaluations/` of the run directory, so an interrupted evaluation goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_ray.config import ConfigError, RunConfig, load
from lightning_ray.engine.actor import Policy
from lightning_ray.placement import reserve
from lightning_ray.records import FinishedRollout, PolicyVersion
from lightning_ray.report.console import Console, View
from lightning_ray.report.summary import Score
from lightning_ray.rollouts.lifecycle import ControllerStatus
from lightning_ray.run import data, ending
from lightning_ray.run.stack import Stack, with_counts

# In the run directory.
FOLDER = "evaluations"
# Version names of the two models; they are no steps of the run, only labels of its evaluation.
BASE, TRAINED = PolicyVersion("base", 0), PolicyVersion("trained", 1)


def config_of(run_dir: Path, overrides: list[str]) -> RunConfig:
    """The configuration that the run in `run_dir` had, with `overrides` on top.

    Raises:
        ConfigError: there is no finished run in `run_dir`, or it has no validation tasks.
    """
    if not (run_dir / "config.yaml").exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no config.yaml")
    if not (run_dir / "model" / "model.safetensors").exists():
        raise ConfigError(f"{run_dir} has no trained model yet: let the run finish first")
    # Wherever the run was made, its evaluation stays beside it.
    place = f"run.dir={run_dir / FOLDER}"
    config = load(run_dir / "config.yaml", [*overrides, place])
    if config.task.validation is None:
        raise ConfigError(f"the run in {run_dir} has no task.validation to evaluate on")
    return config


def evaluate(
    config: RunConfig, base_dir: Path, run_dir: Path, samples: int, console: Console
) -> tuple[Score, Score]:
    """The scores of the base model and of `run_dir`'s trained weights, `samples` rollouts a
    task."""
    tasks = data.load_tasks(str(config.task.validation), "task.validation")
    stack = Stack(config, base_dir, config.run_dir, console.print)
    stack.pointer.parent.mkdir(parents=True, exist_ok=True)
    bundles = None
    try:
        stack.open_store()
        bundles = reserve(config)
        stack.start(bundles, BASE)
        scores = []
        for version in (BASE, TRAINED):
            if version is TRAINED:
                weights = run_dir / "model" / "model.safetensors"
                stack.load(Policy(str(weights.absolute()), version), checksum=None)
            view = View(version.step + 1, 2, f"evaluate {version.lineage}")

            def progress(
                done: Sequence[FinishedRollout], status: ControllerStatus, view: View = view
            ) -> None:
                console.update(with_counts(view, done, status))

            specs = data.validation_specs(tasks, version, samples)
            rollouts = stack.collect(specs, progress)
            scores.append(ending.score(rollouts, stack.calls(rollouts)))
        return scores[0], scores[1]
    finally:
        stack.stop()
        if bundles is not None:
            bundles.remove()
