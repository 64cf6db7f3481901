"""A grader that wants two rooms at a time, whose program never gets done."""

from __future__ import annotations

from lightning_ray.records import Json, Reward, Task
from lightning_ray.rollouts.grading import Episode, RoomOrder, RoomRun


def grade(task: Task, result: Json | None, episode: Episode) -> Reward:
    raise AssertionError("it is graded in pods")


def rooms(
    task: Task, result: Json | None, episode: Episode, runs: list[RoomRun]
) -> Reward | list[RoomOrder]:
    if runs:
        return Reward(0.0, False, {"overran": float(sum(run.report.overran for run in runs))})
    argv = ["{python}", "-c", "import time; time.sleep(600)"]
    return [RoomOrder(files={}, argv=argv, env={}, say="", timeout_s=600)] * 2
