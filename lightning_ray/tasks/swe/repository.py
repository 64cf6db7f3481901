"""The task family of repositories: lays one out, reads what an agent changed, and judges it.

`prepare` writes the buggy tree as a repository of one commit, without the tests that show the bug,
and names the environment that the agent may read; in a pod that is the image's. `collect` reads
what differs once the harness is dead. `grade` applies it to a fresh tree that has all tests, in
another process, and asks the clean room; `rooms` does the same with a pod for each run.

Invariants: only a repository for which the clean room says SOLVED is solved, wherever it is; a
fault of the grader is a GradingError, never a reward; changes to tests or configuration are
refused, whoever collected them; validation rewards are 0 or 1. Limit: on this machine, without
bubblewrap, the tests run with the grader's rights.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lightning_ray import canary
from lightning_ray.records import Json, Reward, Split, Task
from lightning_ray.rollouts import sandbox
from lightning_ray.rollouts.grading import Episode, RoomOrder, RoomRun
from lightning_ray.tasks.swe import cleanroom, examination, offline, remote, sources, workspace
from lightning_ray.tasks.swe.cleanroom import Protection, RoomFault
from lightning_ray.tasks.swe.evidence import Judgement, Tree, Verdict
from lightning_ray.tasks.swe.grading import GradingError
from lightning_ray.tasks.swe.record import RecordError, RepositoryTask

MAX_FILE_BYTES = 256 * 1024  # the largest module of the packages has 100 KiB
_GIT = {  # the same commit in every rollout, and nothing of the operator's configuration
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "maintainer",
    "GIT_AUTHOR_EMAIL": "maintainer@example.org",
    "GIT_COMMITTER_NAME": "maintainer",
    "GIT_COMMITTER_EMAIL": "maintainer@example.org",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
}
_IMPOSSIBLE = Judgement(Verdict.UNSOLVED, ("a file where a folder must be",))


class Shaping(BaseModel):
    """`task.grader_options`: what a training reward is besides solved or not. Penalties are taken
    from solved rollouts only, so that giving up early never pays; validation is never shaped."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    turn_penalty: float = Field(0.0, ge=0, le=0.1)  # for each model call beyond `free_turns`
    free_turns: int = Field(0, ge=0)
    prompt_penalty: float = Field(0.0, ge=0, le=1)  # per 1,000 tokens of the longest prompt ...
    free_prompt_tokens: int = Field(0, ge=0)  # ... beyond these
    least_solved: float = Field(0.1, gt=0, le=1)  # a solved rollout stays better than any other
    partial_credit: float = Field(0.0, ge=0, lt=1)  # of an unsolved one whose tests all pass


def prepare(task: Task, folder: Path) -> Json:
    """Writes the repository into an empty folder.

    Returns: what the harness gets besides its own, a `lightning_ray.rollouts.local.Setting`; empty
    for a pod, whose image has all.

    Raises:
        RecordError, SourceError: the task's repository cannot be had on this machine.
    """
    record = RepositoryTask.from_task(task)
    cleanroom.stage(offline.agent_tree(record), folder)
    commit(folder, record.instance_id)
    if task.fields.get("launcher") == "kubernetes":
        return {}
    return {
        "path": [str(sources.environment() / "bin")],
        "readable": [str(path) for path in sources.readable()],
        "hidden": [str(path) for path in sources.hidden(sources.packages()[record.package])],
    }


def commit(folder: Path, instance_id: str) -> None:
    """Makes a folder a repository of one commit, with a canary among its objects that nobody sees
    who does not look for what is not there."""
    env = _GIT | {"HOME": str(folder)}

    def git(*argv: str, stdin: str = "") -> None:
        subprocess.run(
            ["git", *argv],
            cwd=folder,
            env=env,
            input=stdin.encode(),
            check=True,
            capture_output=True,
        )

    git("-c", "init.defaultBranch=main", "init", "-q", "--template=")
    git("add", "-A", "-f")
    git("commit", "-q", "--no-gpg-sign", "-m", "The repository as it is")
    git("hash-object", "-w", "--stdin", stdin=f"fix of {instance_id}: {canary.mint('git')}\n")


def collect(task: Task, folder: Path) -> Json:
    """What differs in `folder` from what `prepare` wrote: see `workspace.changes`."""
    record = RepositoryTask.from_task(task)
    return workspace.changes(
        offline.agent_tree(record), folder, max_file_bytes=MAX_FILE_BYTES, also=protected(record)
    )


def protected(record: RepositoryTask) -> frozenset[str]:
    """The test files of a task, wherever they lie."""
    ids = [*record.fail_to_pass, *record.pass_to_pass]
    if record.package in offline.suites():
        ids += offline.suites()[record.package]["stable"]
    return frozenset(test.partition("::")[0] for test in ids)


def grade(task: Task, result: Mapping[str, Any] | None, episode: Episode) -> Reward:
    """The reward of what `collect` found.

    Raises:
        GradingError: there is no verdict, or a canary was seen.
    """
    record, shaping = _asked(task, episode)
    judgement = judge(record, _changes(result))
    return _reward(record, result, judgement, episode, shaping)


def rooms(
    task: Task, result: Mapping[str, Any] | None, episode: Episode, runs: Sequence[RoomRun]
) -> Reward | list[RoomOrder]:
    """`grade` where each run of the tests has a pod of its own: the reward, or which runs it takes
    besides `runs`.

    Raises:
        GradingError: as above.
    """
    record, shaping = _asked(task, episode)
    try:
        suite = replace(offline.suite(record, "python3"), version=record.python)
        broken = offline.graded_tree(record)
        tree = merged(broken, _changes(result), protected(record))
        if tree is None:
            return _reward(record, result, _IMPOSSIBLE, episode, shaping)
        done = [remote.read(run) for run in runs]
        answer = examination.wanted(suite, done, known_bad=True)
        if isinstance(answer, Judgement):
            return _reward(record, result, answer, episode, shaping)
        return [
            remote.order(trial, examination.tree_of(trial, tree, broken, suite), suite)
            for trial in answer
        ]
    except (RoomFault, RecordError, sources.SourceError, ValueError) as error:
        raise GradingError(f"task {record.instance_id}: cannot grade: {error}") from error


def judge(record: RepositoryTask, changes: Mapping[str, str | None]) -> Judgement:
    """The verdict on changes (None deletes a file) to a task's repository.

    Raises:
        GradingError: there is none.
    """
    try:
        suite = offline.suite(record)
        broken = offline.graded_tree(record)
        tree = merged(broken, changes, protected(record))
        if tree is None:
            return _IMPOSSIBLE
        return cleanroom.examine(tree, suite, protection=protection(record), known_bad=broken)
    except (RoomFault, RecordError, sources.SourceError, ValueError) as error:
        raise GradingError(f"task {record.instance_id}: cannot grade: {error}") from error


def _changes(result: Mapping[str, Any] | None) -> Mapping[str, str | None]:
    return (result or {}).get("files", {})


def _asked(task: Task, episode: Episode) -> tuple[RepositoryTask, Shaping]:
    """What is to be judged, and how it is rewarded."""
    try:
        record = RepositoryTask.from_task(task)
        shaping = Shaping.model_validate(episode.options)
    except ValueError as error:  # pydantic's and ours
        raise GradingError(f"task {task.task_id}: {error}") from error
    if seen := canary.first_seen(episode.texts):
        raise GradingError(
            f"task {task.task_id}: the reply of call {seen[0]} of attempt {episode.attempt_id} "
            f"holds a canary ({seen[1]}): the agent saw what it must not, and its rollout is void"
        )
    return record, shaping


def _reward(
    record: RepositoryTask,
    result: Mapping[str, Any] | None,
    judgement: Judgement,
    episode: Episode,
    shaping: Shaping,
) -> Reward:
    if judgement.verdict is not Verdict.SOLVED:
        print(f"{judgement.verdict}: {'; '.join(judgement.evidence)}", file=sys.stderr)
    return Reward(
        value=shaped(judgement, record, episode, shaping),
        solved=judgement.verdict is Verdict.SOLVED,
        metrics={
            "tampered": float(judgement.verdict is Verdict.TAMPERED),
            "fail_to_pass": judgement.fail_to_pass / max(len(record.fail_to_pass), 1),
            "refused_files": float(len((result or {}).get("refused", []))),
            "changed_files": float(len(_changes(result))),
            "test_runs": float(judgement.runs),
            "test_seconds": judgement.seconds,
        },
    )


def merged(
    tree: Tree, changes: Mapping[str, str | None], also: frozenset[str] = frozenset()
) -> Tree | None:
    """The tree with the changes that may count. None if they put a file where a folder must be."""
    allowed = {p: text for p, text in changes.items() if workspace.acceptable(p, also)}
    kept = {path: content for path, content in tree.items() if path not in allowed}
    after = kept | {path: text.encode() for path, text in allowed.items() if text is not None}
    parents = {str(parent) for path in after for parent in Path(path).parents}
    return None if parents & after.keys() else after


def shaped(
    judgement: Judgement, record: RepositoryTask, episode: Episode, shaping: Shaping
) -> float:
    """The value of a verdict."""
    solved = judgement.verdict is Verdict.SOLVED
    if episode.split is Split.VALIDATION or judgement.verdict is Verdict.TAMPERED:
        return float(solved)
    if not solved:
        share = judgement.fail_to_pass / max(len(record.fail_to_pass), 1)
        return shaping.partial_credit * share
    turns = max(len(episode.texts) - shaping.free_turns, 0)
    tokens = max(episode.prompt_tokens - shaping.free_prompt_tokens, 0)
    penalty = turns * shaping.turn_penalty + tokens / 1000 * shaping.prompt_penalty
    return max(1.0 - penalty, shaping.least_solved)


def protection(record: RepositoryTask) -> Protection:
    """Bubblewrap without a network, where this machine has it; else only a process of its own."""
    readable, hidden = sources.readable(), sources.hidden(sources.packages()[record.package])
    return Protection(
        prefix=lambda room, scratch: sandbox.prefix(scratch, [room, *readable], hidden)
    )
