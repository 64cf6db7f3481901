"""Lays a task's repository out for a harness, and reads back what the harness left.

`prepare` writes `task.fields["files"]` into an empty folder. `collect` runs once the harness is
dead: it walks the folder without following a link and returns what differs. Both sides of the
comparison are plain text, so that the result travels as JSON to a grader that never sees the
folder.

Invariants: nothing outside the workspace is read or written, whatever links the harness left;
files that decide how tests run are never part of the result; the result's size is bounded.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Set
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_ray.records import Task

MAX_FILE_BYTES = 64 * 1024  # a repair by hand is smaller; a dump of data is not a repair
MAX_FILES = 64  # likewise
MAX_REFUSED = 64  # entries listed, not looked at; a harness can make a million files
MAX_ENTRIES = 10_000  # new files and folders looked at, for the same reason

MAX_PATH = 1024  # characters; the same path must fit below the grader's own folder

_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # str.splitlines also ends lines at a form feed
IGNORED_FOLDERS = frozenset({"__pycache__", ".git", ".hypothesis", ".pytest_cache"})
PROTECTED_FOLDERS = frozenset({"tests", "test"})
# By their stem: each can be a module, a package, or compiled.
PROTECTED_MODULES = frozenset({"conftest", "sitecustomize", "usercustomize"})
PROTECTED_NAMES = (
    "test_*.py",
    "*_test.py",
    "*.pth",
    "pyproject.toml",
    "setup.cfg",
    "tox.ini",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "*.pyc",
)


def prepare(task: Task, workspace: Path) -> None:
    """Writes the task's files into `workspace`, an existing empty folder.

    Raises:
        ValueError: a path leaves the folder, or the folder is not empty.
    """
    if any(workspace.iterdir()):
        raise ValueError(f"task {task.task_id}: the workspace {workspace} is not empty")
    write_files(task.fields.get("files", {}), workspace)


def write_files(files: dict[str, str], folder: Path) -> None:
    """Writes `{path: text}` below `folder`, byte for byte in UTF-8.

    Raises:
        ValueError: a path is absolute, leaves the folder or cannot be a file name.
    """
    for path in files:
        check_path(path)
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())


def check_path(path: str) -> None:
    """Raises ValueError unless `path` is a plain relative POSIX path, such as `pkg/a.py`."""
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"{path!r} is not a plain relative path: no leading or double /, no . or .."
        )


def is_protected(path: str) -> bool:
    """True for files that decide what is tested or how: a harness may not change them."""
    *folders, name = PurePosixPath(path).parts
    modules = {*folders, name.partition(".")[0]}
    return (
        not PROTECTED_FOLDERS.isdisjoint(folders)
        or not PROTECTED_MODULES.isdisjoint(modules)
        or any(fnmatchcase(name, pattern) for pattern in PROTECTED_NAMES)
    )


def acceptable(path: str, also: Set[str] = frozenset()) -> bool:
    """True for a plain relative path of a file that a harness may change; `also` names further
    protected ones."""
    try:
        check_path(path)
    except ValueError:
        return False
    return not (_ignored(path) or is_protected(path) or path in also)


def _ignored(path: str) -> bool:
    return not IGNORED_FOLDERS.isdisjoint(path.split("/"))


def collect(task: Task, workspace: Path) -> dict[str, Any]:
    """What changed in `workspace` against the task's files: see `changes`."""
    files: dict[str, str] = task.fields.get("files", {})
    return changes({path: text.encode() for path, text in files.items()}, workspace)


def changes(
    before: Mapping[str, bytes],
    workspace: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    also: Set[str] = frozenset(),
) -> dict[str, Any]:
    """What changed in `workspace` against the files `before`. `also` are further protected paths.

    Returns: `{"files": {path: text, or None if deleted}, "refused": [{"path", "reason"}], "patch":
    the files as a unified diff that git applies, but for those that were not text before}`. A new
    file has at most `max_file_bytes`, one that was there may grow by as many.
    """
    files: dict[str, str | None] = {}
    refused: dict[str, str] = {}
    modes: dict[str, str] = {}  # of what is read all the same
    seen: set[str] = set()
    # What was there comes first: a repair must not be crowded out by what tools leave.
    known = [(path, None) for path in _left(before, workspace)]
    new = (each for each in _walk(workspace) if each[0] not in before)
    for entries, (path, problem) in enumerate(itertools.chain(known, new), -len(known)):
        if entries >= MAX_ENTRIES:
            refused["."] = f"not read after {entries} new entries, {len(refused)} files refused"
            break
        seen.add(path)
        try:
            most = max_file_bytes + len(before.get(path, b""))
            content, odd = _read(workspace, path, problem, most)
            if odd:
                modes[path] = "its mode does not count"
            if content == before.get(path):
                continue
            text = content.decode()
        except UnicodeDecodeError:
            refused[_printable(path)] = "not UTF-8 text"
            continue
        except ValueError as problem:
            refused[_printable(path)] = str(problem)
            continue
        if not acceptable(path, also):
            refused[path] = "decides how tests run"
        elif len(files) >= MAX_FILES:
            refused[path] = f"more than {MAX_FILES} changed files"
        else:
            files[path] = text
    for path in sorted(before.keys() - seen):
        if _ignored(path):  # not looked at, so nobody knows
            continue
        if not acceptable(path, also):
            refused[path] = "deleted, but decides how tests run"
        else:
            files[path] = None
    return {
        "files": files,
        "refused": [{"path": path, "reason": why} for path, why in _listed(modes, refused)],
        "patch": "".join(_diff(path, before.get(path), files[path]) for path in sorted(files)),
    }


def _listed(modes: Mapping[str, str], refused: Mapping[str, str]) -> list[tuple[str, str]]:
    """What is said of paths, refusals first where it is too much."""
    said = [*refused.items(), *((p, why) for p, why in modes.items() if p not in refused)]
    said.sort(key=lambda each: (each[0] != ".", each[0] not in refused, each[0]))
    more = len(said) - MAX_REFUSED
    last = [("...", f"{more} more that are refused or whose mode does not count")]
    return sorted(said[:MAX_REFUSED]) + (last if more > 0 else [])


def _diff(path: str, content: bytes | None, after: str | None) -> str:
    """A unified diff of one file, as `git apply` reads it; None: there is no such file."""
    try:
        before = None if content is None else content.decode()
    except UnicodeDecodeError:  # a text diff cannot say what it was
        return ""
    old, new = (_quoted(prefix + path) for prefix in ("a/", "b/"))
    head = f"diff --git {old} {new}\n"
    if before is None:
        head, old = f"{head}new file mode 100644\n", "/dev/null"
    if after is None:
        head, new = f"{head}deleted file mode 100644\n", "/dev/null"
    lines = difflib.unified_diff(_LINE.findall(before or ""), _LINE.findall(after or ""), old, new)
    # Only the last line of a file can be without an end, which git wants to be told.
    ended = (
        line if line[-1] == "\n" else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
    return head + "".join(ended)


def _quoted(path: str) -> str:
    """A path as git writes it in a diff."""
    if path.isascii() and path.isprintable() and not set(path) & {'"', "\\"}:
        return path
    plain = set(range(32, 127)) - set(b'"\\')
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in path.encode()) + '"'


def _left(before: Iterable[str], root: Path) -> Iterator[str]:
    """Those of `before` that are still there, as whatever but a folder, and not behind a link."""
    real = {""}

    def there(path: str) -> int:
        """The mode of what is there; 0: nothing."""
        folder = path.rpartition("/")[0]
        if folder not in real and not stat.S_ISDIR(there(folder)):
            return 0
        real.add(folder)
        try:
            return os.lstat(root / path).st_mode
        except OSError:
            return 0

    for path in sorted(before):
        if not _ignored(path) and (mode := there(path)) and not stat.S_ISDIR(mode):
            yield path


def _walk(root: Path) -> Iterator[tuple[str, OSError | None]]:
    """Everything below `root` that is not a real folder, with its relative path; for a folder that
    cannot be read, the reason. Not recursive, since a harness can nest folders very deep."""
    folders, looked_at = [""], 0
    while folders:
        prefix, looked_at = folders.pop(), looked_at + 1
        if looked_at > MAX_ENTRIES:  # of empty ones a disk has room for millions
            yield prefix[:MAX_PATH], OSError(errno.EMFILE, f"more than {MAX_ENTRIES} folders")
            return
        try:
            if len(prefix) > MAX_PATH:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            with os.scandir(root / prefix) as found:
                entries = sorted(itertools.islice(found, MAX_ENTRIES + 1), key=lambda e: e.name)
        except OSError as error:
            yield prefix[:MAX_PATH], error
            continue
        below = []
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield prefix + entry.name, None
            elif entry.name == ".git" and prefix:
                yield prefix + entry.name, OSError(errno.EISDIR, "a repository of its own")
            elif entry.name not in IGNORED_FOLDERS:
                below.append(f"{prefix}{entry.name}/")
        folders += reversed(below)


def _read(root: Path, path: str, problem: OSError | None, most: int) -> tuple[bytes, bool]:
    """What is in a small regular file, and whether its mode is more than a text's. Raises
    ValueError, with the reason, for anything else."""
    if problem:
        raise ValueError(f"cannot be read: {problem.strerror}")
    try:
        if not stat.S_ISREG(os.lstat(root / path).st_mode):
            raise ValueError("not a regular file")
        path.encode()
        descriptor = os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except UnicodeEncodeError:
        raise ValueError("its name is not UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        mode, content = os.fstat(descriptor).st_mode, file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"larger than {most} bytes")
    return content, bool(mode & 0o7111)


def _printable(path: str) -> str:
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")
