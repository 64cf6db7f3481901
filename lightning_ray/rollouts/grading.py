"""From the result of an attempt to its reward, in a process of its own.

A grader is a function of the task family or any command; both are run by `process.run`, after the
harness is dead: a JSON object comes in on stdin, the reward goes out on stdout as one JSON object.
A function is such a command too: this module, started with the function's name. Rewards may also be
posted from outside; the controller waits for those.

Invariants: no valid reward, for whatever reason (missing, not a number, NaN, two of them, too
late), is a `GraderFault` with the reason, never a reward of 0; a grader that passes its time limit
is dead afterwards, with everything it started.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_ray.records import Json, Outcome, Reward, Split, Task
from lightning_ray.rollouts import process
from lightning_ray.rollouts.process import EndedBy, Limits


@dataclass(frozen=True)
class Episode:
    """What a grader may know of the attempt besides its result. `texts` are the model's replies, as
    sampled, in order."""

    rollout_id: str
    attempt_id: str
    outcome: Outcome
    detail: str
    texts: tuple[str, ...]
    split: Split = Split.TRAIN
    prompt_tokens: int = 0  # of the longest prompt
    options: Json = field(default_factory=dict)  # `task.grader_options`


@dataclass(frozen=True)
class GraderFault:
    """There is no reward; `reason` says why."""

    reason: str


@dataclass(frozen=True)
class GradeRequest:
    """One reward that is wanted. `grader` is a function (`module:function`) or a command."""

    task: Task
    result: Json | None
    episode: Episode
    grader: str | list[str]
    limits: Limits
    log: Path


def grade(request: GradeRequest) -> Reward | GraderFault:
    """Runs the grader and reads its reward."""
    argv = request.grader
    if isinstance(argv, str):
        argv = [sys.executable, "-m", __name__, argv]
    episode = asdict(request.episode)
    question = {"task": asdict(request.task), "result": request.result, "episode": episode}
    with tempfile.TemporaryDirectory(prefix="lr-grade-") as folder:
        answer = Path(folder) / "reward.json"
        report = process.run(
            argv,
            # Graders are the operator's own code: they import what we can import, and have our
            # environment.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd=Path.cwd(),
            log=request.log,
            limits=request.limits,
            attempt_id=f"{request.episode.attempt_id}.grader",
            stdin=json.dumps(question),
            stdout=answer,
        )
        if report.ended_by is not EndedBy.EXIT or report.status != 0:
            return GraderFault(f"the grader failed, {report.describe()} (see {request.log})")
        try:
            return parse_reward(answer.read_text())
        except ValueError as error:
            return GraderFault(f"the grader gave no valid reward: {error}")


def parse_reward(text: str) -> Reward:
    """The reward in `text`: exactly one JSON object with `value`, `solved` and perhaps `metrics`.

    Raises:
        ValueError: anything else.
    """
    try:
        tree = json.loads(text, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        shown = text.strip()[:80]
        raise ValueError(f"expected one JSON object on stdout, got {shown!r} ({error})") from error
    if not isinstance(tree, dict) or not {"value", "solved"} <= tree.keys() <= {
        "value",
        "solved",
        "metrics",
    }:
        raise ValueError(
            'expected {"value": number, "solved": bool, "metrics": {}}, got ' + text.strip()[:80]
        )
    metrics = tree.get("metrics", {})
    if not isinstance(metrics, dict):
        raise ValueError(f"reward metrics must be an object, got {metrics!r}")
    return Reward(tree["value"], tree["solved"], metrics)


def _no_key_twice(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a key stands twice in the reward")
    return tree


def _main(name: str) -> None:
    """Answers one question with the function `name`. What the function prints goes to the log."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    episode = question["episode"]
    reward = pkgutil.resolve_name(name)(
        Task(**question["task"]),
        question["result"],
        Episode(
            **episode
            | {
                "outcome": Outcome(episode["outcome"]),
                "texts": tuple(episode["texts"]),
                "split": Split(episode["split"]),
            }
        ),
    )
    if not isinstance(reward, Reward):
        raise TypeError(f"{name} must return a lightning_ray.records.Reward, got {reward!r}")
    json.dump(asdict(reward), reply)
    reply.close()


if __name__ == "__main__":
    _main(sys.argv[1])
