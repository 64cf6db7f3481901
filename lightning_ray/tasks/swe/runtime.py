"""What the code under test can see of this machine: its interpreter, and nothing else.

Runs of one verdict must not learn of each other, and the kernel remembers which files somebody has
read. So a grading box shows as little as tests can run with (`shown`, without `hidden`), and `warm`
reads all of it before each run: every run finds the same files in memory, whatever an earlier one
has read.

Invariant: what is shown is what is read.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lightning_ray.tasks.swe import sources
from lightning_ray.tasks.swe.sources import SourceError

# Of /etc, for names of hosts, users and time zones.
_ETC = ("group", "hosts", "ld.so.cache", "localtime", "nsswitch.conf", "passwd")
_SHELL = "/bin/sh"  # tests start commands through it
_LOCALE = "/usr/lib/locale/C.utf8"  # of older C libraries
_LATE = ("libgcc_s.so.1",)  # what the C library loads when a thread ends, so that ldd does not say
# Of the standard library: large, and no test of a package needs them.
_LARGE = ("config-*", "ensurepip", "idlelib", "lib2to3", "test", "tkinter", "turtledemo")
_CHUNK = 1 << 22
_LDD_S = 60.0  # half a second


def shown() -> list[Path]:
    """Files and folders that a box must have for the environment of the tests to work.

    Raises:
        SourceError: the environment, or what its programs need, cannot be found.
    """
    python = sources.environment() / "bin" / "python"
    return [sources.environment(), *_links(python), *_standard(), *map(Path, _libraries())]


def hidden() -> list[Path]:
    """Folders in what is shown that must be empty."""
    patterns = (*_LARGE, "*-packages")
    return [Path(path) for top in _standard() for name in patterns for path in top.glob(name)]


def warm() -> None:
    """Has the kernel hold everything that is shown."""
    away, buffer = {str(path) for path in hidden()}, [bytearray(_CHUNK)]
    for path in shown():
        for file in _files(str(path), away):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                while os.readv(descriptor, buffer) == _CHUNK:
                    pass
            finally:
                os.close(descriptor)


def _files(path: str, away: set[str]) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            if entry.path not in away:
                yield from _files(entry.path, away)
        elif entry.is_file():
            yield entry.path


def _links(python: Path) -> Iterator[Path]:
    """The interpreter, by all names that lead to it."""
    while python.is_symlink():
        python = python.parent / python.readlink()
        yield Path(os.path.normpath(python))


def _standard() -> list[Path]:
    base = {"installed_base": sys.base_prefix, "base": sys.base_prefix}
    base |= {"installed_platbase": sys.base_exec_prefix, "platbase": sys.base_exec_prefix}
    found = {sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")}
    return [Path(path) for path in sorted(found)]


@functools.cache
def _libraries() -> list[str]:
    """Shared libraries of the environment and its interpreter, the shell and a few files of /etc:
    found once for an environment, and kept beside it."""
    kept = Path(f"{sources.environment()}.libraries.json")
    try:
        found: list[str] = json.loads(kept.read_text())
        if all(map(os.path.exists, found)):
            return found
    except (OSError, ValueError):
        pass
    found = sorted(_found())
    sources.keep(kept, json.dumps(found))
    return found


def _found() -> set[str]:
    tops = [*_standard(), sources.environment()]
    patterns = ("lib-dynload/*.so", "lib/python3*/site-packages/**/*.so*")
    modules = [
        path for top in tops for p in patterns for path in glob.glob(f"{top}/{p}", recursive=True)
    ]
    programs = [os.path.realpath(sources.environment() / "bin" / "python"), _SHELL]
    try:
        said = subprocess.run(
            ["ldd", *programs, *modules], capture_output=True, text=True, timeout=_LDD_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceError(f"cannot tell which libraries the tests need: ldd: {error}") from error
    libraries = set(re.findall(r"(/\S+) \(0x", said))
    beside = {os.path.dirname(path) for path in libraries}
    more = [f"{folder}/{name}" for folder in beside for name in _LATE]
    more += [_SHELL, _LOCALE, *(f"/etc/{name}" for name in _ETC)]
    return libraries | set(filter(os.path.exists, more))
