"""Tasks: where they come from and in which order they are trained on.

Invariants: task ids are unique within a data set; the text of a task is UTF-8, and can be handed to
a program; the order depends only on the seed and the
position, so a resumed run skips no task and repeats none.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_ray.config import ConfigError
from lightning_ray.records import PolicyVersion, RolloutSpec, Split, Task
from lightning_ray.run.groups import Group


def load_tasks(source: str, key: str) -> list[Task]:
    """The tasks of `source`, a `module:function` or a JSONL file with `task_id`, `statement` and
    any other fields. `key` is the configuration key it came from, for messages.

    Raises:
        ConfigError: there is no such source, or a row is not a task.
    """
    if Path(source).suffix in (".jsonl", ".json"):
        tasks = _read_jsonl(Path(source), key)
    else:
        module, _, name = source.partition(":")
        try:
            tasks = list(getattr(importlib.import_module(module), name)())
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{key}={source}: {error}; give `module:function` or the path of a .jsonl file"
            ) from error
        for number, task in enumerate(tasks):
            try:
                _check(task)
            except ValueError as error:
                raise ConfigError(f"{key}={source}, task {number}: {error}") from error
    if not tasks:
        raise ConfigError(f"{key}={source} has no tasks")
    seen: set[str] = set()
    for task in tasks:
        if task.task_id in seen:
            raise ConfigError(f"{key}={source}: the task id {task.task_id!r} occurs twice")
        seen.add(task.task_id)
    return tasks


def _read_jsonl(path: Path, key: str) -> list[Task]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
            task = Task(str(row.pop("task_id")), str(row.pop("statement")), row)
            _check(task)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number}: not a task ({type(error).__name__}: {error}); a row is a "
                "JSON object in UTF-8 with `task_id`, `statement` and any fields of your own"
            ) from error
        tasks.append(task)
    return tasks


def _check(task: Task) -> None:
    """Raises ValueError for what no file, command line or request can carry, and for a launcher
    that there is not."""
    if (launcher := task.fields.get("launcher", "local")) not in ("local", "kubernetes"):
        raise ValueError(f"`launcher` is {launcher!r}; it can be `local` or `kubernetes`")
    if "\0" in task.task_id + task.statement:
        raise ValueError("a NUL in `task_id` or `statement`")
    json.dumps(
        [task.task_id, task.statement, task.fields], ensure_ascii=False, default=str
    ).encode()


def order(count: int, seed: int, start: int, length: int) -> list[int]:
    """Indices of the tasks at positions `start` to `start + length` of an endless pass over `count`
    tasks, shuffled anew in every epoch.

    >>> sorted(order(5, seed=0, start=5, length=5))
    [0, 1, 2, 3, 4]
    """
    return [
        int(np.random.default_rng((seed, position // count)).permutation(count)[position % count])
        for position in range(start, start + length)
    ]


def group_name(place: int, version: PolicyVersion) -> str:
    """The id of the group for a place of the task order, begun with the weights `version`. It names
    their lineage: a run that was killed finds what was finished since its last checkpoint, and a
    place that is used again after a rollback has another id."""
    return f"p{place:06d}-{version.lineage}"


def training_specs(
    tasks: Sequence[Task], group: Group, rollout_ids: Sequence[str], seed: int, step: int
) -> list[RolloutSpec]:
    """The rollouts of a group that is queued in training step `step` (from 1)."""
    [index] = order(len(tasks), seed, group.place, 1)
    return [
        RolloutSpec(rollout_id, group.group_id, tasks[index], Split.TRAIN, step)
        for rollout_id in rollout_ids
    ]


def validation_specs(tasks: Sequence[Task], version: PolicyVersion) -> list[RolloutSpec]:
    """A rollout of every validation task for the weights `version`."""
    groups = [f"v{version.step:05d}-{version.lineage}-t{i:04d}" for i in range(len(tasks))]
    return [
        RolloutSpec(f"{group}-r00", group, task, Split.VALIDATION, version.step)
        for group, task in zip(groups, tasks, strict=True)
    ]
