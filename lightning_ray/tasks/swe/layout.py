"""Lays out a repository that lies in a task's image. Runs in the pod: before a harness, or before
the tests.

Reads one JSON object: `diffs` to apply, then `files` to write (base64; null removes one), and
`history`: null, which takes the repository's history away, or what its one commit says. In a room
it goes on as the program `then` beside it, which runs the tests.

Invariants: afterwards nothing of what it read is on disk but the result, and no older state of the
repository is in its history; what somebody's files make impossible (a file where a folder must be)
is said on the socket of the tests, and is no fault of ours. Standard library and git only, for any
Python from 3.8.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ORDER = "layout.json"  # beside this file, in a room
IMPOSSIBLE = b"impossible\n"  # in the place of the witness's `ready`


def git(*argv: str, said: str = "", env: dict[str, str] | None = None) -> None:
    # Whoever built the image may be another user than we are.
    ours = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
    done = subprocess.run(
        ["git", *argv],
        input=said.encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **(env or {}), **ours},
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        sys.exit(f"git {argv[0]}: {last[0]}")


def forget() -> None:
    """Takes every history away, those of repositories in the repository too."""
    for folder, folders, files in os.walk("."):
        if ".git" in folders:
            folders.remove(".git")
            shutil.rmtree(os.path.join(folder, ".git"))
        if ".git" in files:
            os.unlink(os.path.join(folder, ".git"))


def begin(history: dict[str, Any]) -> None:
    """One commit of what is there, the same in every rollout, and an object that only those see
    who look for what is not there."""
    env = history["env"]
    git("-c", "init.defaultBranch=main", "init", "-q", "--template=", env=env)
    git("add", "-A", env=env)
    git("commit", "-q", "--no-gpg-sign", "-m", history["message"], env=env)
    git("hash-object", "-w", "--stdin", said=history["object"], env=env)


def write(files: dict[str, str | None]) -> None:
    """Raises OSError: a file is where a folder must be, or a folder where a file must be."""
    for path, content in files.items():
        if content is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            continue
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # which may be a link of the image's
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))


def main(order: dict[str, Any]) -> None:
    if not os.path.isdir(".git"):
        sys.exit(
            f"{os.getcwd()} is no repository: the template's container needs workingDir, and "
            "task.grader_options.repository, where the image has it"
        )
    for diff in order["diffs"]:
        git("apply", "--whitespace=nowarn", "-", said=diff)
    try:
        write(order["files"])
    except OSError:
        if len(sys.argv) == 1:
            raise
        os.write(int(sys.argv[1]), IMPOSSIBLE)
        sys.exit(0)
    forget()
    if order["history"]:
        begin(order["history"])


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
