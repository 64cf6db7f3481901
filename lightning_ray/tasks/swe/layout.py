"""Lays out a repository that lies in a task's image. Runs in the pod: before a harness, or before
the tests.

Reads one JSON object: `diffs` to apply, `files` to write then (base64; null removes one), `fresh`
files to write last (null: with what they have), `canary`, a comment below the end of each of these
that is Python, and `history`: null, or what the one commit of a new history says. `alone` are files
of which no copy may lie elsewhere. In a room it goes on as the program `then` beside it, which runs
the tests.

Invariants: afterwards nothing of what it read is on disk but the result, and no older state of the
repository is there, neither in a history nor compiled; in a room no file is newer than another;
nothing is written through a link; what somebody's files make impossible (a file where a folder must
be) is said on the socket of the tests, and is no fault of ours. Standard library and git only, for
any Python from 3.8.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

ORDER = "layout.json"  # beside this file, in a room
IMPOSSIBLE = b"impossible\n"  # in the place of the witness's `ready`
CACHES = {"__pycache__", ".pytest_cache", ".hypothesis"}
MOMENT = 1767225600  # 2026-01-01: when every file of a room was changed
COPY = "is a copy of what the task breaks"
LEAST_COPY = 64  # bytes: many files are as short, and alike


def git(*argv: str, said: str = "", env: Mapping[str, str] | None = None) -> str:
    # Whoever built the image may be another user than we are.
    ours = {
        "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        "GIT_CEILING_DIRECTORIES": os.path.dirname(os.getcwd()),
    }  # fmt: skip
    try:
        done = subprocess.run(
            ["git", *argv],
            input=said.encode(),
            capture_output=True,
            env={**os.environ, **(env or {}), **ours},
        )
    except FileNotFoundError:
        sys.exit("the image has no git")
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        sys.exit(f"git {argv[0]}: {last[0]}")
    return done.stdout.decode(errors="surrogateescape")


def tracked_but_ignored() -> list[str]:
    try:
        return git("ls-files", "-z", "-c", "-i", "--exclude-standard").split("\0")[:-1]
    except SystemExit:  # an old git that does not trust the folder: then it is left to .gitignore
        return []


def forget() -> None:
    """Takes every history away, those of repositories in the repository too, and what Python and
    its tools keep of older states."""
    for folder, folders, files in os.walk("."):
        for name in [name for name in folders if name == ".git" or name in CACHES]:
            path = os.path.join(folder, name)
            folders.remove(name)
            os.unlink(path) if os.path.islink(path) else shutil.rmtree(path)
        compiled = os.path.relpath(folder).startswith("build" + os.sep + "lib")
        for name in files:
            if name == ".git" or name.endswith(".pyc") or (compiled and name.endswith(".py")):
                os.unlink(os.path.join(folder, name))


def begin(history: Mapping[str, Any], ignored: list[str]) -> None:
    """One commit of what is there, the same in every rollout, and an object that only those see
    who look for what is not there."""
    env = history["env"]
    git("-c", "init.defaultBranch=main", "init", "-q", "--template=", env=env)
    git("config", "gc.auto", "0", env=env)  # it would go on beside the harness
    git("config", "maintenance.auto", "false", env=env)
    git("add", "-A", env=env)
    there = [path for path in ignored if os.path.lexists(path)]
    for first in range(0, len(there), 500):
        git("add", "-f", "--", *there[first : first + 500], env=env)
    git("commit", "-q", "--no-gpg-sign", "-m", history["message"], env=env)
    git("hash-object", "-w", "--stdin", said=history["object"], env=env)


def write(path: str, content: bytes | None) -> None:
    """Writes a file anew, or removes it. Raises OSError: a link or a file is where a folder must
    be, or a folder where a file must be."""
    above = ""
    for part in path.split("/")[:-1]:
        above = os.path.join(above, part)
        if os.path.islink(above):
            raise NotADirectoryError(above)
        if content is not None and not os.path.isdir(above):
            os.mkdir(above)
    mode = 0o644
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        mode = stat.S_IMODE(status.st_mode) if stat.S_ISREG(status.st_mode) else mode
        os.unlink(path)
    if content is not None:
        with open(path, "wb") as file:
            file.write(content)
        os.chmod(path, mode)


def marked(path: str, text: bytes, canary: bytes) -> bytes:
    """A file with a canary as its last line, if it is one of Python: no other line has another
    number. One that has it already, since it was read in a room, gets no second."""
    if not path.endswith(".py") or text.endswith(canary):
        return text
    return text + b"\n" * (text[-1:] not in (b"", b"\n")) + canary


def level() -> None:
    """Makes no file newer than another: else tests could be told from their twins."""
    for folder, _, files in os.walk("."):
        for name in [*files, "."]:
            path = os.path.join(folder, name)
            os.utime(path, (MOMENT, MOMENT), follow_symlinks=False)


def copy_of(paths: list[str]) -> str:
    """Where a file like one of `paths` lies among the packages of `python3`; "" if nowhere."""
    wanted: dict[str, list[bytes]] = {}
    for path in filter(os.path.isfile, paths):
        with open(path, "rb") as file:
            wanted.setdefault(os.path.basename(path), []).append(file.read())
    ask = ["python3", "-I", "-c", "import sys; print('\\n'.join(sys.path))"]
    roots = subprocess.run(ask, stdout=subprocess.PIPE).stdout.decode().splitlines()
    here = os.path.join(os.path.realpath("."), "")
    for root in filter(os.path.isdir, roots):
        for folder, _, files in os.walk(root):
            if os.path.join(os.path.realpath(folder), "").startswith(here):
                continue
            for name in wanted.keys() & set(files):
                with contextlib.suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                    found = file.read()
                    if len(found) >= LEAST_COPY and found in wanted[name]:
                        return os.path.join(folder, name)
    return ""


def main(order: Mapping[str, Any]) -> None:
    if not os.path.lexists(".git"):
        sys.exit(
            f"{os.getcwd()} is no repository: the template's container needs workingDir, and "
            "task.grader_options.repository, where the image has it"
        )
    if found := copy_of(order["alone"]):
        sys.exit(f"{found} {COPY}: the agent would find it")
    ignored = tracked_but_ignored()
    forget()
    for diff in order["diffs"]:
        git("apply", "--whitespace=nowarn", "-", said=diff)
    try:
        # What goes makes room first: a folder can come where a file was, and the other way round.
        for path in [path for path, content in order["files"].items() if content is None]:
            write(path, None)
            with contextlib.suppress(OSError):  # other files are there
                os.removedirs(os.path.dirname(path))
        for path, content in order["files"].items():
            if content is not None:
                write(path, base64.b64decode(content))
        for path, content in order["fresh"].items():
            with contextlib.suppress(FileNotFoundError):
                if content is None:
                    with open(path, "rb") as file:
                        text = file.read()
                else:
                    text = base64.b64decode(content)
                write(path, marked(path, text, order.get("canary", "").encode()))
    except OSError:
        if len(sys.argv) == 1:
            raise
        os.write(int(sys.argv[1]), IMPOSSIBLE)
        sys.exit(0)
    if order["history"]:
        begin(order["history"], ignored)
    else:
        level()


def in_room(channel: str) -> None:
    room = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(room, ORDER)) as file:
        order = json.load(file)
    os.unlink(file.name)
    os.chdir(order["repository"])
    main(order)
    argv = [sys.executable, "-s", "-B", os.path.join(room, order["then"]), channel]
    os.execv(argv[0], argv)


if __name__ == "__main__":
    in_room(sys.argv[1]) if len(sys.argv) > 1 else main(json.load(sys.stdin))
