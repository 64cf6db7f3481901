"""From the result of an attempt to its reward, in a process of its own.

A grader is a function of the task family or any command; both are run by `process.run`, after the
harness is dead: a JSON object comes in on stdin, the reward goes out on stdout as one JSON object.
A function is such a command too: this module, started with the function's name. Rewards may also be
posted from outside; the controller waits for those.

A grader whose code under test shall run elsewhere (in a pod of the task's image, say) comes in two
more pieces beside it in its module: `plan(task, result)` says what to run on which files, and
`judge(task, result, episode, order, report)` makes a reward of what came of it. One that needs
several rooms for a verdict has `rooms(task, result, episode, runs)` instead, which answers with
further orders until it has a reward. All of them run here; `advance` asks either kind.

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

from pydantic import TypeAdapter

from lightning_ray.files import PRIVATE, replace
from lightning_ray.records import Json, Outcome, Reward, Split, Task
from lightning_ray.rollouts import process
from lightning_ray.rollouts.process import EndedBy, Limits
from lightning_ray.rollouts.sandbox import Wanted, for_graders


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
    """There is no reward; `reason` says why, and `outcome` whether another attempt may have one."""

    reason: str
    outcome: Outcome = Outcome.GRADER_FAULT


@dataclass(frozen=True)
class GradeRequest:
    """One reward that is wanted. `grader` is a function (`module:function`) or a command, which
    learns what `sandbox` the run wants (`sandbox.for_graders`)."""

    task: Task
    result: Json | None
    episode: Episode
    grader: str | list[str]
    limits: Limits
    log: Path
    sandbox: Wanted = field(default_factory=Wanted)


@dataclass(frozen=True)
class RoomOrder:
    """A command on a clean tree (`files`: path to text, `binary`: path to base64), somewhere safe,
    in the tree's folder. In `argv`, {python} is an interpreter and {fd} one end of a socket, from
    which the command reads `say` and to which it answers. Output above `most_bytes` (answers:
    twice that) ends the run; a larger file of the tree in `bring` stays there, and so does what the
    gateway would not take. `note` stays here, for when the report is in."""

    files: dict[str, str]
    argv: list[str]
    env: dict[str, str]
    say: str
    timeout_s: float
    most_bytes: int = 1 << 20
    binary: dict[str, str] = field(default_factory=dict)
    bring: list[str] = field(default_factory=list)
    note: Json = field(default_factory=dict)


@dataclass(frozen=True)
class RoomReport:
    """What came of an order: the exit status (negative: that signal; None: it was still running at
    its time limit, or had to be killed), what it said on the socket, the end of its output, the
    text of those files of `bring` that it left; `overran` if it took more memory or disk than the
    room has, or ended its keeper, and is dead with all that it said. `too_large` are files of
    `bring` that stayed there for their size, and `output`, if its output or answers ended it."""

    status: int | None
    said: str
    tail: str
    overran: bool = False
    files: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    too_large: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RoomRun:
    """An order that was carried out; its tree (`files`, `binary`) is not sent along."""

    order: RoomOrder
    report: RoomReport


def grade(request: GradeRequest) -> Reward | GraderFault:
    """Runs the grader and reads its reward."""
    return _reward(_ask(request, "grade"))


def advance(
    request: GradeRequest, runs: Sequence[RoomRun]
) -> Reward | list[RoomOrder] | GraderFault:
    """The reward, or what the grader wants to have run besides `runs`, each in a room of its own,
    all at the same time."""
    answer = _ask(request, "rooms", {"runs": [asdict(run) for run in runs]})
    if isinstance(answer, str) and answer.startswith("["):
        return [RoomOrder(**order) for order in json.loads(answer)]
    return _reward(answer)


def ask_outside(path: Path, wanted: Json) -> None:
    """Leaves what a grader outside needs, readable by the operator only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace(path, json.dumps(wanted).encode(), durable=True, mode=PRIVATE)


def has_room(grader: str | None) -> bool:
    """True if the grader has the pieces for rooms."""
    if grader is None:
        return False
    module = pkgutil.resolve_name(grader.partition(":")[0])
    return hasattr(module, "rooms") or (hasattr(module, "plan") and hasattr(module, "judge"))


def _reward(answer: str | GraderFault) -> Reward | GraderFault:
    if isinstance(answer, GraderFault):
        return answer
    try:
        return parse_reward(answer)
    except ValueError as error:
        return GraderFault(f"the grader gave no valid reward: {error}")


def _ask(request: GradeRequest, step: str, more: Json | None = None) -> str | GraderFault:
    """What the grader's process printed."""
    argv = request.grader
    if isinstance(argv, str):
        argv = [sys.executable, "-m", __name__, argv, step]
    episode = asdict(request.episode)
    question = {"task": asdict(request.task), "result": request.result, "episode": episode}
    question |= more or {}
    with tempfile.TemporaryDirectory(prefix="lr-grade-") as folder:
        answer = Path(folder) / "reward.json"
        lasting = _make_folder(request.log.parent)
        log = request.log if lasting else Path(folder) / request.log.name
        report = process.run(
            argv,
            # Graders are the operator's own code: they import what we can import, and have our
            # environment.
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            | for_graders(request.sandbox),
            cwd=Path.cwd(),
            log=log,
            limits=request.limits,
            attempt_id=f"{request.episode.attempt_id}.grader",
            stdin=json.dumps(question),
            stdout=answer,
        )
        if report.ended_by is not EndedBy.EXIT or report.status != 0:
            where = f"see {log}" if lasting else "its node does not have the run directory"
            return GraderFault(f"the grader failed, {report.describe()} ({where})")
        return answer.read_text()


def _make_folder(attempt: Path) -> bool:
    """Makes the folder of an attempt in the run directory; False on a node that does not have it,
    as it need not where all rollouts are Jobs."""
    try:
        attempt.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    return os.access(attempt, os.W_OK)


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


def _main(name: str, step: str) -> None:
    """Answers one question with the function `name`, or with a piece of its module. What the
    function prints goes to the log."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    episode = TypeAdapter(Episode).validate_python(question["episode"])
    asked = Task(**question["task"]), question["result"], episode
    if step == "grade":
        answer = pkgutil.resolve_name(name)(*asked)
        if not isinstance(answer, Reward):
            raise TypeError(f"{name} must return a lightning_ray.records.Reward, got {answer!r}")
    else:
        runs = TypeAdapter(list[RoomRun]).validate_python(question["runs"])
        answer = _in_rooms(name.partition(":")[0], *asked, runs)
    orders = isinstance(answer, list)
    json.dump([asdict(order) for order in answer] if orders else asdict(answer), reply)
    reply.close()


def _in_rooms(
    module: str, task: Task, result: Json | None, episode: Episode, runs: list[RoomRun]
) -> Reward | list[RoomOrder]:
    """What a grader's module says to `runs`: its `rooms`, or `plan` and `judge` for its one."""
    grader = pkgutil.resolve_name(module)
    if hasattr(grader, "rooms"):
        answer = grader.rooms(task, result, episode, runs)
    elif not runs and (order := grader.plan(task, result)) is not None:
        answer = [order]
    else:
        order, report = (runs[0].order, runs[0].report) if runs else (None, None)
        answer = grader.judge(task, result, episode, order, report)
    if isinstance(answer, Reward):
        return answer
    if isinstance(answer, list) and answer and all(isinstance(x, RoomOrder) for x in answer):
        return answer
    raise TypeError(
        f"{module}: in place of a reward or orders (`rooms`), a RoomOrder or None (`plan`), or a "
        f"Reward (`judge`) it gave {answer!r}"
    )


if __name__ == "__main__":
    # As the graders' modules know it: classes of `__main__` would be others than theirs.
    from lightning_ray.rollouts import grading

    grading._main(*sys.argv[1:])
