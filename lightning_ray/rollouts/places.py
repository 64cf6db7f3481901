"""Where an attempt runs, and where its folders are: on this machine, and as its harness knows them.

On a machine they lie in a folder of the attempt's own, whose name is another one each time. A
sandbox (`sandbox.py`) and a pod (`pods/`) show them at `ROOT`, so every rollout of a group works
under the same paths, and what a harness tells the model of them is the same text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lightning_ray.config import RunConfig
from lightning_ray.records import Task

ROOT = "/lightning"
PODS = ("kubernetes", "podman")  # launchers whose rollouts are pods


@dataclass(frozen=True)
class Places:
    """Absolute paths of an attempt's folders and of the file that holds the task."""

    workspace: str
    home: str
    tmp: str
    task_file: str

    @classmethod
    def below(cls, root: str | Path) -> Places:
        return cls(*(f"{root}/{name}" for name in ("workspace", "home", "tmp", "task.txt")))

    @property
    def placeholders(self) -> dict[str, str]:
        """What a recipe may name."""
        return {"workspace": self.workspace, "home": self.home, "task_file": self.task_file}

    def renamed(self, text: str, to: Places) -> str:
        """`text` with what it names of this workspace named as it is in `to`."""
        return text.replace(self.workspace, to.workspace)


IN_POD = Places.below(ROOT)
IN_SANDBOX = replace(IN_POD, tmp="/tmp")


def in_pod(config: RunConfig, task: Task) -> bool:
    """Whether the rollouts of `task` are Jobs, or containers; else they run on nodes of Ray."""
    launcher = config.rollout.launcher
    if launcher == "task":
        launcher = task.fields.get("launcher", "local")
    return launcher in PODS
