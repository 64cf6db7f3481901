"""An evaluation as a record: every rollout of one model on a set of tasks, and what follows.

`Evaluation` is what `jobs/evaluate.py` writes as JSON and reads again to compare two; `pass_at`,
`outcomes` and `costs` sum it up, `comparison` puts two side by side, `predictions` are its patches
in SWE-bench's format. Pure, but for `write` and `read`.

Invariants: a rollout that infrastructure lost is counted, and is in no rate; a void one is
unsolved, else looking for what must not be seen would raise a rate; costs in all include what
attempts spent that were tried again; what `read` gives equals what `write` was given.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field

from lightning_ray.config import ConfigError
from lightning_ray.files import replace
from lightning_ray.records import Json, Outcome
from lightning_ray.report import statistics
from lightning_ray.report.statistics import Comparison, Estimate, Tally

# What of a run's rollout settings cannot change how an attempt ends.
_NEUTRAL = {"n", "concurrency", "retries", "cpus", "keep_workspaces", "keep_results"}
# Of the engine, what decides which kernels compute the numbers; the rest is room and speed.
_ENGINE = ("tensor_parallel", "enforce_eager")
# Of Kubernetes, what an attempt and its tests run in; the rest is where, how many and how long.
_PODS = ("image", "harness_venv", "python", "grade")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rollout(_Frozen):
    """One rollout. `solved` and `reward` are None if it is lost or void. Tokens, calls and seconds
    are those of the attempt that counts; `all_tokens` and `seconds` those of all its
    attempts. `patch` is the change that the agent made, where the task family gives one."""

    rollout_id: str
    task_id: str
    sample: int = Field(ge=0)
    outcome: Outcome
    solved: bool | None = None
    reward: float | None = None
    metrics: dict[str, float] = {}
    detail: str = ""
    attempts: int = Field(1, ge=0)
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    all_tokens: int = 0  # prompt and sampled ones of every attempt
    seconds: float = 0.0
    patch: str | None = None

    @property
    def verdict(self) -> bool | None:
        """What it counts as; None: not at all."""
        return False if self.outcome is Outcome.VOID else self.solved

    @property
    def graded(self) -> bool:
        return self.verdict is not None


class Evaluation(_Frozen):
    """One model on one set of tasks. `name` tells it from others of its run, `model` says which
    weights it had, `settings` with which configuration (YAML)."""

    name: str = Field(min_length=1)
    model: str
    settings: str = ""
    rollouts: tuple[Rollout, ...]

    @property
    def tallies(self) -> dict[str, Tally]:
        """The graded rollouts of each task that has any, by task id."""
        found: dict[str, list[bool]] = defaultdict(list)
        for rollout in self.rollouts:
            if rollout.verdict is not None:
                found[rollout.task_id].append(rollout.verdict)
        return {task: Tally(sum(solved), len(solved)) for task, solved in found.items()}

    @property
    def graded(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.graded]


@dataclass(frozen=True)
class Cost:
    """What graded rollouts took, and all of them together."""

    mean: float
    median: float
    highest: float  # the 95th percentile
    total: float


_COSTS: dict[str, Callable[[Rollout], float]] = {
    "calls": lambda rollout: rollout.calls,
    "sampled tokens": lambda rollout: rollout.sampled_tokens,
    "prompt tokens": lambda rollout: rollout.prompt_tokens,
    "  of them cached": lambda rollout: rollout.cached_tokens,
    "seconds": lambda rollout: rollout.seconds,
}


def pass_at(evaluation: Evaluation) -> dict[int, Estimate]:
    """pass@k by k: 1, 2, 4, ... up to the most graded rollouts that a task has."""
    tallies = list(evaluation.tallies.values())
    most = max((tally.rollouts for tally in tallies), default=0)
    return {k: statistics.mean_pass_at_k(tallies, k) for k in statistics.powers_of_two(most)}


def outcomes(evaluation: Evaluation) -> list[tuple[Outcome, int, int | None]]:
    """Each outcome with its rollouts and how many of them are solved (None: no reward), most
    frequent first."""
    counts: Counter[tuple[Outcome, bool]] = Counter(
        (rollout.outcome, rollout.graded) for rollout in evaluation.rollouts
    )
    solved = Counter(r.outcome for r in evaluation.rollouts if r.verdict)
    return [
        (outcome, count, solved[outcome] if graded else None)
        for (outcome, graded), count in counts.most_common()
    ]


def signals(evaluation: Evaluation) -> dict[str, float]:
    """The mean of each metric that the grader gave, over the rollouts that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for rollout in evaluation.graded:
        for name, value in rollout.metrics.items():
            found[name].append(value)
    return {name: math.fsum(values) / len(values) for name, values in sorted(found.items())}


def costs(evaluation: Evaluation) -> dict[str, Cost]:
    """Tokens, calls and seconds of harnesses, by name."""
    return {
        name: _cost([float(of(rollout)) for rollout in evaluation.graded])
        for name, of in _COSTS.items()
    }


def comparison(first: Evaluation, second: Evaluation) -> Comparison:
    """The second against the first, on the tasks that both have.

    Raises:
        ConfigError: they have none in common.
    """
    try:
        return statistics.compare(first.tallies, second.tallies)
    except ValueError as error:
        raise ConfigError(f"cannot compare {first.name} with {second.name}: {error}") from error


def moved(first: Evaluation, second: Evaluation) -> tuple[list[str], list[str]]:
    """The ids of shared tasks that the second solves more and less often than the first."""
    one, two = first.tallies, second.tallies
    shared = sorted(one.keys() & two.keys())
    better = [task for task in shared if two[task].rate > one[task].rate]
    worse = [task for task in shared if two[task].rate < one[task].rate]
    return better, worse


def decisive(config: Json) -> Json:
    """Of a whole configuration, by section, the settings that decide an evaluation's numbers."""
    found = {section: config.get(section, {}) for section in ("model", "sampling", "harness")}
    parts = {section: config.get(section, {}) for section in ("rollout", "task", "engine")}
    pods = config.get("kubernetes", {})
    return found | {
        "rollout": {k: v for k, v in parts["rollout"].items() if k not in _NEUTRAL},
        "task": {k: v for k, v in parts["task"].items() if k not in ("train", "validation")},
        "engine": {k: parts["engine"][k] for k in _ENGINE if k in parts["engine"]},
        "kubernetes": {k: pods[k] for k in _PODS if k in pods},
    }


def differences(first: Evaluation, second: Evaluation) -> list[str]:
    """The decisive settings that differ, but for the model's path: a line for each."""
    one, two = (_flat(yaml.safe_load(each.settings) or {}) for each in (first, second))
    return [
        f"{key}={one.get(key, 'unknown')} in {first.name}, {two.get(key, 'unknown')} in "
        f"{second.name}"
        for key in sorted(one.keys() | two.keys())
        if one.get(key) != two.get(key) and key != "model.path"
    ]


def _flat(config: Json) -> dict[str, str]:
    return {
        f"{section}.{key}": json.dumps(value, sort_keys=True)
        for section, values in decisive(config).items()
        for key, value in values.items()
    }


def predictions(evaluation: Evaluation) -> dict[int, list[dict[str, str]]]:
    """The patches in SWE-bench's format, by sample: its harness takes one per instance. A rollout
    that was lost or is void has none, and the harness counts the instance as not submitted."""
    found: dict[int, list[dict[str, str]]] = defaultdict(list)
    for rollout in evaluation.graded:
        if rollout.patch is not None and rollout.outcome is not Outcome.VOID:
            found[rollout.sample].append(
                {
                    "instance_id": rollout.task_id,
                    "model_name_or_path": evaluation.name,
                    "model_patch": rollout.patch,
                }
            )
    return dict(sorted(found.items()))


def write(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Writes `NAME.json` (summary first, then every rollout) and, where there are patches,
    `NAME.predictions-SAMPLE.jsonl`. Returns the paths."""
    summary = {
        "tasks": len(evaluation.tallies),
        "rollouts": len(evaluation.rollouts),
        "lost": len(evaluation.rollouts) - len(evaluation.graded),
        "pass_at": {str(k): vars(found) for k, found in pass_at(evaluation).items()},
        "outcomes": [[str(o), count, solved] for o, count, solved in outcomes(evaluation)],
        "grader": signals(evaluation),
        "costs": {name.strip(): vars(cost) for name, cost in costs(evaluation).items()},
        "all_tokens": sum(rollout.all_tokens for rollout in evaluation.rollouts),
        "all_seconds": sum(rollout.seconds for rollout in evaluation.rollouts),
    }
    made = [folder / f"{evaluation.name}.json"]
    whole = {"summary": summary} | evaluation.model_dump(mode="json")
    replace(made[0], json.dumps(whole, indent=1).encode())
    for sample, rows in predictions(evaluation).items():
        made.append(folder / f"{evaluation.name}.predictions-{sample}.jsonl")
        replace(made[-1], "".join(json.dumps(row) + "\n" for row in rows).encode())
    return made


def read(path: Path) -> Evaluation:
    """What `write` wrote.

    Raises:
        ConfigError: it is not there, or is no evaluation.
    """
    try:
        tree = json.loads(path.read_text())
        tree.pop("summary", None)
        return Evaluation.model_validate(tree)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{path} is no evaluation as jobs/evaluate.py writes it: {str(error).splitlines()[0]}"
        ) from error


def _cost(values: Sequence[float]) -> Cost:
    if not values:
        return Cost(math.nan, math.nan, math.nan, 0.0)
    return Cost(
        float(np.mean(values)),
        float(np.median(values)),
        float(np.percentile(values, 95)),
        math.fsum(values),
    )
