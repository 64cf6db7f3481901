"""One attempt on this machine: workspace, harness, result.

`run_attempt` is a plain function that the controller runs as a Ray task on any node. It installs
the harness if the node lacks it, lets the task family fill a fresh workspace, runs the harness in
its limits and, when everything of it is dead, lets the task family read the result.

Invariants: it returns a typed outcome for whatever the harness or the task family does; every
attempt sees the same layout (`places.py`), and in a sandbox the same paths; nothing stays on the
node but the log and the artifacts, unless `keep_workspaces` says so. What the harness can reach is
said in `sandbox.py`; we, `prepare` and `collect` work outside, where the paths are other ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pkgutil
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from pydantic import BaseModel, ConfigDict, ValidationError

from lightning_ray.config import RunConfig
from lightning_ray.records import Json, Outcome, Task
from lightning_ray.rollouts import harness, process, sandbox
from lightning_ray.rollouts.forkserver import PreloadError
from lightning_ray.rollouts.harness import Recipe, RecipeError, Values
from lightning_ray.rollouts.installation import InstallError, install, site_packages
from lightning_ray.rollouts.places import IN_SANDBOX, Places
from lightning_ray.rollouts.process import EndedBy, ExitReport, Limits
from lightning_ray.rollouts.sandbox import Mode, SandboxError, Wanted, around

_FAMILY_S = (
    300  # a workspace that the policy booby-trapped (a named pipe, say) must not hold us for ever
)
_PREFIX = "lr-box-"
_NEW_S = 60  # between the making of a box and its being held is much less
# MiB and processes that a grader may have at least: it must see first that code under test takes
# too much, or that code could have the grader killed, and so its rollout tried again.
_GRADERS = 4096, 512
_ARTIFACT_BYTES = 64 << 20  # larger files are no trajectories

_OUTCOMES = {
    EndedBy.SIGNAL: Outcome.HARNESS_ERROR,
    EndedBy.PROCESSES: Outcome.HARNESS_ERROR,
    EndedBy.TIME: Outcome.TIMEOUT,
    EndedBy.MEMORY: Outcome.OUT_OF_MEMORY,
    EndedBy.OUTPUT: Outcome.OUTPUT_LIMIT,
    EndedBy.DISK: Outcome.OUTPUT_LIMIT,
    EndedBy.NOT_STARTED: Outcome.LAUNCH_FAULT,
    EndedBy.NO_MEMORY: Outcome.NODE_LOST,
    EndedBy.LOST: Outcome.NODE_LOST,
}


@dataclass(frozen=True)
class AttemptRequest:
    """Everything that a node needs to know to run one attempt. `prepare` and `collect` are
    `module:function` of the task family; `log_dir` is made on the node."""

    attempt_id: str
    task: Task
    recipe: Recipe
    root_url: str
    model: str
    context_tokens: int
    limits: Limits
    log_dir: Path
    prepare: str | None
    collect: str | None
    keep_workspaces: bool
    api_key: str = field(repr=False)
    sandbox: Wanted = field(default_factory=Wanted)


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended, as far as its machine can tell. `result` is what `collect` read; `lack`
    is what `node` lacks of the sandbox, and why; empty if nothing, or if none was asked for. `node`
    is empty where nobody knows what it gave."""

    outcome: Outcome
    detail: str
    result: Json | None = None
    node: str = ""
    lack: str = ""


class Setting(BaseModel):
    """What `prepare` may return: environment variables of the harness, folders before its PATH,
    what it can read besides its own, and folders in that which must be empty in a sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    env: dict[str, str] = {}
    path: list[str] = []
    readable: list[str] = []
    hidden: list[str] = []


class FamilyError(Exception):
    """A function of the task family failed; the message says which, and for which task."""


def run_attempt(request: AttemptRequest) -> AttemptResult:
    """Runs one attempt to its end. Only cancellation raises; then, too, everything is dead."""
    for folder in (request.log_dir.parent, request.log_dir):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep()
    box = Path(tempfile.mkdtemp(prefix="lr-kept-" if request.keep_workspaces else _PREFIX))
    held = os.open(box, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    node, lack = socket.gethostname(), ""
    try:
        if request.sandbox.mode is not Mode.NONE:
            lack = sandbox.check(request.sandbox) or ""
        return replace(_run_in(box, request), node=node, lack=lack)
    except SandboxError as error:
        fault = f"node {node}: {error}"
        return AttemptResult(Outcome.LAUNCH_FAULT, fault, node=node, lack=str(error))
    except (InstallError, RecipeError, PreloadError, FamilyError) as error:
        return AttemptResult(Outcome.LAUNCH_FAULT, str(error), node=node, lack=lack)
    finally:
        if request.keep_workspaces:
            (request.log_dir / "box").symlink_to(box)
        else:
            _remove(box)
        os.close(held)


def limits(config: RunConfig, *, grader: bool = False) -> Limits:
    """What the configuration lets a harness use, or a grader."""
    rollout = config.rollout
    least = _GRADERS if grader else (0, 0)
    return Limits(
        timeout_s=config.task.grader_timeout_s if grader else rollout.timeout_s,
        memory_mib=max(rollout.memory_mib, least[0]),
        max_processes=max(rollout.max_processes, least[1]),
        output_mib=rollout.output_mib,
        file_mib=rollout.workspace_mib,
        disk_mib=rollout.disk_mib,
    )


def classify(report: ExitReport) -> Outcome:
    """The outcome of a harness that ended like this."""
    if report.ended_by is EndedBy.EXIT:
        return Outcome.COMPLETED if report.status == 0 else Outcome.HARNESS_ERROR
    return _OUTCOMES[report.ended_by]


def _run_in(box: Path, request: AttemptRequest) -> AttemptResult:
    outside = Places.below(box)
    workspace = Path(outside.workspace)
    for folder in (outside.workspace, outside.home, outside.tmp):
        os.mkdir(folder)
    Path(outside.task_file).write_text(request.task.statement)
    recipe = request.recipe
    venv = install(recipe)
    setting = _prepare(request, workspace)
    search = process.search_path()
    readable = [*harness.readable(recipe, venv, search), *map(Path, setting.readable)]
    hidden = (*request.sandbox.hidden, *map(Path, setting.hidden))
    wanted = replace(request.sandbox, hidden=hidden)
    inside, url = around(box, request.root_url, readable, wanted)
    places = IN_SANDBOX if inside else outside
    values = Values(
        base_url=f"{url}/v1",
        root_url=url,
        model=request.model,
        task=request.task.statement,
        attempt=request.attempt_id,
        **places.placeholders,
        context_tokens=str(request.context_tokens),
        venv=str(venv or ""),
        site_packages=str(site_packages(venv)) if venv else "",
        recipe_dir=recipe.recipe_dir,
        api_key=request.api_key,
    )
    ours = replace(values, **outside.placeholders)
    argv, env, stdin = harness.command_line(recipe, values)
    for name, content in recipe.files.items():
        path = Path(harness.fill(name, ours))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(harness.fill(content, values))
    shared = tempfile.gettempdir()
    base = process.base_environment(places.home, places.tmp)
    base["PATH"] = os.pathsep.join([*setting.path, search])
    given = {name: outside.renamed(text, places) for name, text in (base | setting.env).items()}
    report = process.run(
        argv,
        env=given | env,
        cwd=Path(harness.fill(recipe.cwd, values)),
        log=request.log_dir / "harness.log",
        limits=request.limits,
        attempt_id=request.attempt_id,
        stdin=stdin,
        preload=harness.preload(recipe, venv, process.base_environment(shared, shared)),
        sandbox=inside,
        disk=box,
    )
    for artifact in recipe.artifacts:
        source = Path(harness.fill(artifact, ours))
        if not _goes_astray(source, box):
            _keep(source, request.log_dir)
    outcome, detail, result = classify(report), report.describe(), None
    if outcome.caused_by_policy and request.collect:
        try:
            result = call_family("task.collect", request.collect, request.task, workspace)
            json.dumps(result)  # it goes to the grader as JSON
        except (FamilyError, TypeError, ValueError) as error:
            outcome, detail, result = Outcome.GRADER_FAULT, f"{error} (harness: {detail})", None
    return AttemptResult(outcome, detail, result)


def _prepare(request: AttemptRequest, workspace: Path) -> Setting:
    """Lets the task family fill the workspace, which is told that it is for this machine."""
    if request.prepare is None:
        return Setting()
    task = replace(request.task, fields={**request.task.fields, "launcher": "local"})
    given = call_family("task.prepare", request.prepare, task, workspace)
    try:
        return Setting.model_validate({} if given is None else given)
    except ValidationError as error:
        [first, *_] = error.errors()
        where = ".".join(map(str, first["loc"])) or "what it returned"
        raise FamilyError(
            f"task.prepare={request.prepare} must return nothing, or an object with env, path, "
            f"readable and hidden: {where}: {first['msg']}"
        ) from error


def call_family(key: str, name: str, task: Task, workspace: Path) -> Json | None:
    """Calls a function of the task family, which is anybody's code: whatever it raises has one
    meaning.

    Raises:
        FamilyError: the function raised something.
    """
    try:
        with _time_limit(_FAMILY_S):
            result: Json | None = pkgutil.resolve_name(name)(task, workspace)
            return result
    except Exception as error:
        message = f"{key}={name} failed for task {task.task_id}: {type(error).__name__}: {error}"
        raise FamilyError(message) from error


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after `seconds`; a blocked system call is interrupted. Main
    thread only, which is where Ray runs a task."""

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _keep(source: Path, into: Path) -> None:
    """Copies a file, or a folder's files, beside the log: regular files only, since the harness may
    have left links and pipes. What is not there is not kept."""
    files = [source]
    if source.is_dir() and not source.is_symlink():
        files = [Path(at) / name for at, _, names in os.walk(source) for name in names]
    for file in files:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            status = file.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_size <= _ARTIFACT_BYTES:
                target = into / file.relative_to(source.parent)
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.copyfile(file, target)


def _goes_astray(path: Path, box: Path) -> bool:
    """True if a link leads from `box` to another folder than that of `path`."""
    if not path.is_relative_to(box):
        return False  # the recipe's own place, which no harness made
    return path.parent.resolve() != box.resolve() / path.parent.relative_to(box)


def _sweep() -> None:
    """Removes what workers have left that were killed: boxes that nobody holds, and that were not
    made just now."""
    for box in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Somebody holds it, or has removed it, or it is another user's.
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            made = box.stat().st_mtime
            folder = os.open(box, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - made > _NEW_S:
                    _remove(box)
            finally:
                os.close(folder)


def _remove(box: Path) -> None:
    # An agent may have left folders that cannot be entered, or nested deeper than Python recurses.
    subprocess.run(["chmod", "-R", "u+rwX", str(box)], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["rm", "-rf", str(box)], check=True)
