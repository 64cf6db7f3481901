"""What goes into a pod and what comes out of it, as bytes: on our side, next to the task family.

`pack` lets the family fill a workspace and makes a tar of it; `outcome_of` lays the workspace out
again, with what the pod sent back, and lets the family read it. Both are plain functions that the
controller runs as Ray tasks.

Invariants: what a pod sent is data of a stranger: only regular files and links come out of it,
below the workspace, never through a link; a link is made as it is and nobody here follows it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

from lightning_ray.records import Json, Task
from lightning_ray.rollouts import harness, places
from lightning_ray.rollouts.grading import RoomOrder, RoomReport
from lightning_ray.rollouts.harness import Recipe, RecipeError, Values
from lightning_ray.rollouts.local import FamilyError, call_family
from lightning_ray.rollouts.places import IN_POD
from lightning_ray.rollouts.pods import changed, entry, guard, manifest

WORKSPACE = "workspace"  # of a room's files
# Of what a pod sends back: files as they were and as they are, and names of those that are gone.
_MOST_MEMBERS = 2 * changed.MOST_CHANGED + 1
_KEY_STANDS_FOR = "\x00LIGHTNING_RAY_KEY\x00"  # no recipe can hold a NUL
_PACKAGE_FILES = f"{places.ROOT}/recipe"


@dataclass(frozen=True)
class PodLimits:
    """What a pod's program may do: seconds, bytes of output, bytes that come back."""

    timeout_s: float
    output_bytes: int
    result_bytes: int


@dataclass(frozen=True)
class Setup:
    """A Python program that sets up the repository that an image has, and what it reads on
    stdin."""

    program: str
    say: str


@dataclass(frozen=True)
class Stage:
    """What a harness finds: a tar of its workspace and, where the image has the repository, how it
    is set up."""

    workspace: bytes
    setup: Setup | None = None


def pack(task: Task, prepare: str) -> Stage:
    """What the task family prepares, which is told that it is for a pod, in the task's field
    `launcher`. It may return `{"setup": {"program": of Python, "say": text}}`.

    Raises:
        FamilyError: the family failed, or wants what only this machine has.
    """
    task = replace(task, fields={**task.fields, "launcher": "kubernetes"})
    with tempfile.TemporaryDirectory(prefix="lr-stage-") as folder:
        wanted = call_family("task.prepare", prepare, task, Path(folder)) or {}
        try:
            setup = Setup(**wanted["setup"]) if "setup" in wanted else None
        except TypeError as error:
            raise FamilyError(
                f"task.prepare={prepare}: `setup` of task {task.task_id} must hold `program` and "
                f"`say`: {error}"
            ) from error
        if any(value for name, value in wanted.items() if name != "setup"):
            raise FamilyError(
                f"task.prepare={prepare} wants folders of this machine for task {task.task_id}; "
                "for a pod, put them into the image"
            )
        return Stage(_tar(Path(folder)), setup)


def harness_key(room_key: str) -> str:
    """The key for model calls of the attempt whose room `room_key` opens. The harness has only
    this one, and cannot find the other: so it sends back nothing in our name."""
    return hashlib.sha256(b"harness:" + room_key.encode()).hexdigest()


def outcome_of(
    task: Task, workspace: bytes | None, result: bytes, collect: str
) -> tuple[Json | None, str]:
    """What the task family reads from a workspace that a pod has changed; or, if the changes cannot
    be read, why. Of a repository that only the image has there is what changed, and, in the folder
    that the task's field `originals` names, how it was.

    Raises:
        FamilyError: the family failed.
    """
    with tempfile.TemporaryDirectory(prefix="lr-result-") as folder:
        root, originals = Path(folder) / "workspace", Path(folder) / "originals"
        root.mkdir()
        originals.mkdir()
        if workspace:
            with tarfile.open(fileobj=io.BytesIO(workspace)) as tar:
                tar.extractall(root, filter="tar")
        try:
            apply_changes(root, result, originals)
        except ValueError as error:
            return None, str(error)
        task = replace(task, fields={**task.fields, "originals": str(originals)})
        found = call_family("task.collect", collect, task, root)
        json.dumps(found)  # it goes to the grader as JSON
        return found, ""


def apply_changes(root: Path, result: bytes, originals: Path) -> None:
    """Makes the workspace at `root` what the pod's was; what was sent of files before they changed
    goes to `originals`.

    Raises:
        ValueError: these are no changes, or too many.
    """
    try:
        # Not compressed: what is inside is no larger than what was sent.
        with tarfile.open(fileobj=io.BytesIO(result), mode="r:") as tar:
            members = tar.getmembers()
            if len(members) > _MOST_MEMBERS or any(m.issparse() for m in members):
                raise ValueError("too many files, or sparse ones")
            for member in members:
                file = tar.extractfile(member) if member.isreg() else None
                content = file.read() if file else b""
                if member.name.startswith("before/"):
                    if target := _place(originals, member.name.removeprefix("before/"), make=True):
                        target.write_bytes(content)
                elif member.name == "deleted":
                    for path in json.loads(content):
                        _place(root, str(path), make=False)
                elif member.name.startswith("changed/"):
                    target = _place(root, member.name.removeprefix("changed/"), make=True)
                    if target and member.issym():
                        target.symlink_to(member.linkname)
                    elif target and file:
                        target.write_bytes(content)
                        target.chmod(stat.S_IMODE(member.mode) | 0o600)
    except (tarfile.TarError, OSError, UnicodeError, TypeError) as error:
        raise ValueError(f"what the pod sent cannot be read: {error}") from error


def _place(root: Path, path: str, *, make: bool) -> Path | None:
    """Where `path` goes, with nothing in its place and, with `make`, real folders above it; None
    if it would leave `root`."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} leaves the workspace")
    folder = root
    for part in parts[:-1]:
        folder /= part
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            if not make:
                return None
            folder.unlink()
        if make:
            folder.mkdir(exist_ok=True)
        elif not folder.exists():
            return None
    target = folder / parts[-1]
    if target.is_dir() and not target.is_symlink():
        if not make:
            return None
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    return target


def harness_order(
    recipe: Recipe,
    values: Values,
    command: list[str] | None,
    workdir: str | None,
    stage: Stage | None,
    limits: PodLimits,
) -> bytes:
    """What `entry.run_harness` does. `values` are those of the pod, with a stand-in for the key;
    `command` and `workdir` are the template's, where it has them; without a `stage` the harness
    finds what the image has.

    Raises:
        RecipeError: the recipe needs a file that is only here.
    """
    files = {harness.fill(n, values): harness.fill(t, values) for n, t in recipe.files.items()}
    argv, env, stdin = harness.command_line(recipe, values)
    for number, text in enumerate(recipe.command):
        if text.startswith(harness.PACKAGE_FILE):
            source = Path(argv[number])
            if not source.is_file():
                raise RecipeError(f"{text} is a folder; a pod gets single files only")
            argv[number] = f"{_PACKAGE_FILES}/{number}-{source.name}"
            files[argv[number]] = source.read_text()
    files[values.task_file] = values.task
    return _order(
        "harness",
        argv=command or argv,
        env={"HOME": values.home, "TMPDIR": IN_POD.tmp, "LANG": "C.UTF-8"} | env,
        files=files,
        stdin=stdin,
        cwd=workdir or harness.fill(recipe.cwd, values),
        workspace=workdir or values.workspace,
        home=values.home,
        tmp=IN_POD.tmp,
        venv=values.venv,
        site_packages=manifest.VENV_LINK,
        key_stands_for=_KEY_STANDS_FOR,
        has_workspace=stage is not None,
        setup=asdict(stage.setup) if stage and stage.setup else None,
        **asdict(limits),
    )


def pod_values(
    *,
    url: str,
    model: str,
    task: Task,
    attempt_id: str,
    context_tokens: int,
    venv: str,
    recipe: Recipe,
) -> Values:
    """What placeholders of a recipe stand for in a pod: the same for every rollout of a group."""
    return Values(
        base_url=f"{url}/v1",
        root_url=url,
        model=model,
        task=task.statement,
        attempt=attempt_id,
        **IN_POD.placeholders,
        context_tokens=str(context_tokens),
        venv=venv,
        site_packages=manifest.VENV_LINK,
        recipe_dir=recipe.recipe_dir,
        api_key=_KEY_STANDS_FOR,
    )


def room_files(orders: list[RoomOrder], most_sent: int) -> list[dict[str, bytes]]:
    """The files of a room for each order; `most_sent` is what the gateway takes, in bytes.

    Raises:
        ValueError: a path leaves the tree, or what is no base64.
    """
    return [_room_files(order, most_sent) for order in orders]


def _room_files(order: RoomOrder, most_sent: int) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="lr-room-") as folder:
        contents = {path: text.encode() for path, text in order.files.items()}
        contents |= {path: base64.b64decode(text) for path, text in order.binary.items()}
        for path, content in contents.items():
            if target := _place(Path(folder), path, make=True):
                target.write_bytes(content)
        tree = _tar(Path(folder))
    told = _order(
        "room",
        argv=list(order.argv),
        env={**order.env, "HOME": IN_POD.home, "TMPDIR": IN_POD.tmp},
        cwd=IN_POD.workspace,
        workspace=IN_POD.workspace,
        home=IN_POD.home,
        tmp=IN_POD.tmp,
        say=base64.b64encode(order.say.encode()).decode(),
        bring=order.bring,
        timeout_s=order.timeout_s,
        output_bytes=order.most_bytes,
        result_bytes=min(4 * order.most_bytes + entry.MOST_ABOUT_REPORT, most_sent),
    )
    return {"order": told, WORKSPACE: tree}


def room_report(result: bytes) -> RoomReport:
    """What came of a room.

    Raises:
        ValueError: this is no report.
    """
    try:
        told = json.loads(result)
        texts = {"": told["said"], **told["files"]}
        texts = {n: base64.b64decode(t).decode(errors="replace") for n, t in texts.items()}
        ways = {"exit": told["status"], "signal": -(told["status"] or 0)}
        return RoomReport(
            ways.get(told["ended_by"]),
            texts.pop(""),
            str(told["tail"]),
            overran=told["ended_by"] in ("memory", "disk"),
            files=texts,
            seconds=float(told["seconds"]),
            too_large=[*map(str, told["too_large"])],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the pod's report cannot be read: {error}") from error


def _order(kind: str, **what: object) -> bytes:
    files = [Path(str(part.__file__)) for part in (changed, guard, entry)]
    parts = [(file.name, file.read_text()) for file in files]
    return json.dumps({"kind": kind, "entry": parts, **what}).encode()


def _tar(root: Path) -> bytes:
    """A tar of everything below `root`, owned by whoever unpacks it."""
    body = io.BytesIO()

    def ours(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=body, mode="w") as tar:
        for name in sorted(os.listdir(root)):
            tar.add(root / name, name, filter=ours)
    return body.getvalue()
