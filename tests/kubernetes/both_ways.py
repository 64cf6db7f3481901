"""A task family whose rollouts run in pods and on nodes of Ray, as each task says."""

from __future__ import annotations

from pathlib import Path

from lightning_ray.records import Json, Reward, Task
from lightning_ray.rollouts.grading import Episode, RoomOrder, RoomReport

HARNESS = """
import json, os, pathlib, urllib.request
call = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "m", "messages": [{"role": "user", "content": "say"}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
said = json.load(urllib.request.urlopen(call))["choices"][0]["message"]["content"]
pathlib.Path("said.txt").write_text(said + " " + pathlib.Path("for.txt").read_text())
"""


def prepare(task: Task, workspace: Path) -> None:
    (workspace / "harness.py").write_text(HARNESS)
    (workspace / "for.txt").write_text(task.fields["launcher"])


def collect(task: Task, workspace: Path) -> Json:
    return {"said": (workspace / "said.txt").read_text()}


def grade(task: Task, result: Json | None, episode: Episode) -> Reward:
    return _reward(result, in_pod=False)


def plan(task: Task, result: Json | None) -> RoomOrder | None:
    return RoomOrder(files={}, argv=["{python}", "-c", ""], env={}, say="", timeout_s=20)


def judge(
    task: Task,
    result: Json | None,
    episode: Episode,
    order: RoomOrder | None,
    report: RoomReport | None,
) -> Reward:
    assert report is not None and report.status == 0, report
    return _reward(result, in_pod=True)


def _reward(result: Json | None, *, in_pod: bool) -> Reward:
    """Solved if the attempt was where it was graded."""
    where = "kubernetes" if in_pod else "local"
    return Reward(1.0, result == {"said": f"done {where}"}, {"in_pod": float(in_pod)})
