"""The task family of repositories: lays one out, reads what an agent changed, and judges it.

`prepare` writes the buggy tree as a repository of one commit, without the tests that show the bug,
and names the environment that the agent may read; in a pod that is the image's. `collect` reads
what differs once the harness is dead. `grade` applies it to a fresh tree that has all tests, in
another process, and asks the clean room; `rooms` does the same with a pod for each run. A task
without a package has its repository in its image alone (`imaged`), and is for pods only.

Invariants: only a repository for which the clean room says SOLVED is solved, wherever it is; a
fault of the grader, or of a machine on which the package as it came is not solved, is a
GradingError, never a reward; changes to tests or configuration are refused, whoever collected them;
validation rewards are 0 or 1. Limit: on this machine, without bubblewrap, the tests run with the
grader's rights.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lightning_ray.records import Json, Reward, Split, Task
from lightning_ray.rollouts.grading import Episode, RoomOrder, RoomRun
from lightning_ray.tasks.swe import (
    canaries,
    cleanroom,
    examination,
    imaged,
    offline,
    patches,
    protection,
    remote,
    sources,
    workspace,
)
from lightning_ray.tasks.swe.cleanroom import RoomFault
from lightning_ray.tasks.swe.evidence import Judgement, Tree, Verdict
from lightning_ray.tasks.swe.grading import GradingError
from lightning_ray.tasks.swe.record import RecordError, RepositoryTask

MAX_FILE_BYTES = 256 * 1024  # of a new file, and what one that was there may grow by
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
    # Times the share of hidden tests that pass and whose twins fail, for an unsolved rollout.
    partial_credit: float = Field(0.0, ge=0, lt=1)


class Options(Shaping):
    """`task.grader_options`, whole. `repository` is where images have it, if nothing else has;
    `pytest` are options there, such as `-p pytest_asyncio`, since no plug-in loads by itself;
    without `judge` an evaluation only makes predictions, which others judge; without
    `require_twins` a suite is believed there that guards no hidden test by a twin. `report_mib` are
    of a run's JUnit file, and half of its report; `gateway.max_body_mib` lets through all of it."""

    repository: str = Field("/testbed", pattern="^/")
    pytest: list[str] = []
    judge: bool = True
    require_twins: bool = True
    report_mib: int = Field(remote.MAX_REPORT_BYTES >> 20, ge=1)


def prepare(task: Task, folder: Path) -> Json:
    """Writes the repository into an empty folder.

    Returns: what the harness gets besides its own, a `lightning_ray.rollouts.local.Setting`; for a
    pod nothing, or how its image's repository is set up (`staging.pack`).

    Raises:
        RecordError, SourceError: the task's repository cannot be had on this machine.
        PatchError: its patch cannot be read.
    """
    record = RepositoryTask.from_task(task)
    if not record.package:
        if task.fields.get("launcher") != "kubernetes":
            raise RecordError(
                f"instance {record.instance_id} has its repository in a container image "
                f"({record.image_name or 'none named'}): set rollout.launcher=kubernetes, or podman"
            )
        return {"setup": imaged.setup(record)}
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
    env = imaged.COMMIT | {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder)}

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
    git("commit", "-q", "--no-gpg-sign", "-m", imaged.MESSAGE)
    git("hash-object", "-w", "--stdin", stdin=imaged.bait(instance_id))


def collect(task: Task, folder: Path) -> Json:
    """What differs in `folder` from what `prepare` wrote: see `workspace.changes`."""
    record = RepositoryTask.from_task(task)
    if record.package:
        before = offline.agent_tree(record)
    else:
        # Of what changed, as the pod remembered it.
        root = Path(task.fields["originals"])
        files = (path for path in root.rglob("*") if path.is_file())
        before = {str(path.relative_to(root)): path.read_bytes() for path in files}
    return workspace.changes(before, folder, max_file_bytes=MAX_FILE_BYTES, also=protected(record))


def protected(record: RepositoryTask) -> frozenset[str]:
    """The test files of a task, wherever they lie."""
    ids = [*record.fail_to_pass, *record.pass_to_pass]
    if record.package in offline.suites():
        ids += offline.suites()[record.package]["stable"]
    return patches.touched(record.test_patch) | {test.partition("::")[0] for test in ids}


def grade(task: Task, result: Mapping[str, Any] | None, episode: Episode) -> Reward:
    """The reward of what `collect` found.

    Raises:
        GradingError: there is no verdict.
    """
    record, options = _asked(task, episode)
    counted = _counted(options, episode)
    judgement = judge(record, _changes(result), counted=counted)
    return _reward(record, result, judgement, episode, options)


def rooms(
    task: Task, result: Mapping[str, Any] | None, episode: Episode, runs: Sequence[RoomRun]
) -> Reward | list[RoomOrder]:
    """`grade` where each run of the tests has a pod of its own: the reward, or which runs it takes
    besides `runs`.

    Raises:
        GradingError: as above.
    """
    record, options = _asked(task, episode)
    try:
        if not record.package:
            return _rooms_of_image(record, options, result, episode, runs)
        suite = replace(offline.suite(record, "python3"), version=record.python)
        broken = graded_tree(record)
        tree = merged(broken, _changes(result), protected(record))
        if tree is None:
            return _reward(record, result, _IMPOSSIBLE, episode, options)
        done = [remote.read(run) for run in runs]
        counted = _counted(options, episode)
        answer = examination.wanted(suite, done, known_bad=True, counted=counted)
        if isinstance(answer, Judgement):
            return _reward(record, result, answer, episode, options)
        return [
            remote.order(trial, examination.tree_of(trial, tree, broken, suite), suite)
            for trial in answer
        ]
    except (RoomFault, RecordError, sources.SourceError, ValueError) as error:
        raise GradingError(f"task {record.instance_id}: cannot grade: {error}") from error


def _rooms_of_image(
    record: RepositoryTask,
    options: Options,
    result: Mapping[str, Any] | None,
    episode: Episode,
    runs: Sequence[RoomRun],
) -> Reward | list[RoomOrder]:
    """`rooms`, where only the image has the repository."""
    if not options.judge:
        if episode.split is Split.TRAIN:
            raise GradingError(
                "task.grader_options.judge=false is for evaluations: nothing to learn"
            )
        return Reward(0.0, False, {"judged": 0.0})
    also = protected(record)
    allowed = {p: text for p, text in _changes(result).items() if workspace.acceptable(p, also)}
    suite = imaged.suite(record, options.repository, options.pytest)
    answer = imaged.advance(
        record,
        suite,
        allowed,
        runs,
        require_twins=options.require_twins,
        most_bytes=options.report_mib << 20,
    )
    if isinstance(answer, Judgement):
        return _reward(record, result, answer, episode, options)
    return answer


def _counted(options: Options, episode: Episode) -> bool:
    """Whether it matters which tests of an unsolved rollout pass: that takes further runs."""
    return options.partial_credit > 0 and episode.split is Split.TRAIN


def judge(
    record: RepositoryTask, changes: Mapping[str, str | None], *, counted: bool = False
) -> Judgement:
    """The verdict on changes (None deletes a file) to a task's repository; `counted`: see
    `examination.wanted`.

    Raises:
        GradingError: there is none.
    """
    try:
        suite = offline.suite(record)
        broken = graded_tree(record)
        tree = merged(broken, changes, protected(record))
        if tree is None:
            return _IMPOSSIBLE
        room = protection.protection()
        found = cleanroom.examine(tree, suite, protection=room, known_bad=broken, counted=counted)
        if found.verdict is not Verdict.SOLVED:  # else the room has shown that it can judge
            whole = replace(suite, timeout_s=offline.TIMEOUT_S)
            protection.vouch(sources.packages()[record.package], whole)
        return found
    except (RoomFault, RecordError, sources.SourceError, ValueError) as error:
        raise GradingError(f"task {record.instance_id}: cannot grade: {error}") from error


def graded_tree(record: RepositoryTask) -> Tree:
    """The tree that is graded if nobody changed anything, with a canary at the end of each file
    with a hidden test: the same in every run, with twins and without.

    Raises:
        RecordError, SourceError: it cannot be had.
    """
    tree = offline.graded_tree(record)
    hidden = {test.partition("::")[0] for test in record.fail_to_pass} & tree.keys()
    return tree | {
        path: canaries.below(tree[path].decode(), "tests", record.instance_id).encode()
        for path in hidden
    }


def _changes(result: Mapping[str, Any] | None) -> Mapping[str, str | None]:
    return (result or {}).get("files", {})


def _asked(task: Task, episode: Episode) -> tuple[RepositoryTask, Options]:
    """What is to be judged, and how it is rewarded."""
    try:
        record = RepositoryTask.from_task(task)
        options = Options.model_validate(episode.options)
    except ValueError as error:  # pydantic's and ours
        raise GradingError(f"task {task.task_id}: {error}") from error
    unused = options.model_fields_set - Shaping.model_fields.keys()
    if record.package and unused:
        raise GradingError(
            f"task {task.task_id}: task.grader_options.{min(unused)} is for repositories that only "
            "their image has"
        )
    if not record.package and options.partial_credit:
        raise GradingError(
            f"task {task.task_id}: task.grader_options.partial_credit is for packages: in an image "
            "no twin runs before all tests pass, and without one passing is no proof"
        )
    return record, options


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
            **({} if judgement.twins is None else {"hidden_tests_with_twins": judgement.twins}),
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
        return shaping.partial_credit * judgement.right / max(len(record.fail_to_pass), 1)
    turns = max(len(episode.texts) - shaping.free_turns, 0)
    tokens = max(episode.prompt_tokens - shaping.free_prompt_tokens, 0)
    penalty = turns * shaping.turn_penalty + tokens / 1000 * shaping.prompt_penalty
    return max(1.0 - penalty, shaping.least_solved)
