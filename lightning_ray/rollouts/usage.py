"""What a program uses of its machine, against what it may use.

`Usage` is asked from time to time by the supervisor and names the limit that was passed. Memory is
the sum of resident sizes of the processes that descend from the supervisor. A folder is measured
only when its disk has lost so much that it may be over its limit. Where this machine lets us make a
control group (`Cgroup`), the kernel holds looser limits besides.

Invariants: looking stays cheap, whatever the program makes; a folder that cannot be measured is
over its limit.

Standard library only, and nothing of ours: the supervisor loads this file by its path.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

_INODE_BYTES = 4096  # what an empty file counts as: a disk runs out of inodes too
_MEASURE_S = 10.0  # honest workspaces take less than a second
_REMOVE_S = 2.0  # the kernel gives a control group free some milliseconds after its last process
# The poll ends a program at its limit, with an outcome of its own. These are for what a poll cannot
# see (memory that no process has mapped) or is too slow for (a fork bomb), so they lie above it.
_MEMORY_SLACK = 1.25
_TASKS_PER_PROCESS = 8  # threads count too


class Usage:
    """Limits in bytes and processes of the program called `name`; `folder`, if there is one, is
    what `disk` is for. `others` is the number of descendants that are not the program's; `peak` the
    most memory that was seen."""

    def __init__(
        self, name: str, *, memory: int, processes: int, folder: str | None, disk: int
    ) -> None:
        self._memory, self._processes, self._folder, self._disk = memory, processes, folder, disk
        self._cgroup = make_cgroup(name, memory, processes)
        self._free = _free(folder) if folder else 0
        self._used = 0
        self.others = self.peak = 0

    def join(self) -> None:
        """For the program's process, before it starts."""
        if self._cgroup:
            self._cgroup.join()

    def passed(self) -> str | None:
        """The limit that was passed: memory, processes or disk."""
        tree = descendants()
        self.peak = max(self.peak, sum(tree.values()))
        if len(tree) - self.others > self._processes:
            return "processes"  # first: a fork bomb soon has too much memory as well
        if self._cgroup and (passed := self._cgroup.passed()):
            return passed
        if self.peak > self._memory:
            return "memory"
        return "disk" if self._folder and self._full(self._folder, tree) else None

    def close(self) -> None:
        """For when the program is dead."""
        if self._cgroup:
            self._cgroup.remove()

    def _full(self, folder: str, pids: Iterable[int]) -> bool:
        free = _free(folder)
        if self._used + self._free - free <= self._disk:
            return False
        self._used, self._free = _measure(folder, self._disk) + _deleted(pids), free
        return self._used > self._disk


def descendants(of: int = 0) -> dict[int, int]:
    """Resident bytes of each descendant of this process, or of another one. Zombies count: one
    whose main thread has ended looks like a zombie while its other threads run. One that is just
    being forked may be missed, and is there the next time."""
    children = _children if os.path.exists(_CHILDREN.format(os.getpid(), os.getpid())) else _all()
    found: dict[int, int] = {}
    queue = [of or os.getpid()]
    while queue:
        for pid in children(queue.pop()):
            with contextlib.suppress(OSError):  # it ended meanwhile
                with open(f"/proc/{pid}/statm") as file:
                    found[pid] = int(file.read().split()[1]) * resource.getpagesize()
                queue.append(pid)
    return found


_CHILDREN = "/proc/{}/task/{}/children"


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(_CHILDREN.format(pid, thread)) as file:
                found += map(int, file.read().split())
    return found


def _all() -> Callable[[int], list[int]]:
    """For kernels that do not list children (gVisor, say): every process is looked at."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            text = file.read()
            # The second field, the program's name in brackets, may hold anything; count from its
            # end.
            parent = text[text.rindex(b")") + 2 :].split()[1]
            children.setdefault(int(parent), []).append(int(name))
    return lambda pid: children.get(pid, [])


def kills() -> int:
    """How many processes the kernel has killed since it started, for want of memory."""
    with open("/proc/vmstat") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)


def _free(folder: str) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize + disk.f_favail * _INODE_BYTES


def _measure(folder: str, most: int) -> int:
    """Bytes that a folder takes of its disk; more than `most` if that cannot be found out. du can
    read what is nested too deep for us."""
    used = 0
    for what, unit in (("--block-size=1", 1), ("--inodes", _INODE_BYTES)):
        argv = ["du", "--summarize", "--one-file-system", what, folder]
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_MEASURE_S,
            )
        except subprocess.TimeoutExpired:
            return most + 1
        if not done.stdout:  # the program killed it: inside a box it can see it
            return most + 1
        used += int(done.stdout.split()[0]) * unit
    return used


def _deleted(pids: Iterable[int]) -> int:
    """Bytes of deleted files that processes hold open, which no folder shows."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile
            for entry in os.scandir(f"/proc/{pid}/fd"):
                status = os.stat(entry.path)
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


class Cgroup:
    """A control group with a limit of memory and one of processes and threads; version 1 or 2.
    `folders` are its directories, one per controller in version 1."""

    def __init__(self, folders: list[Path], limits: dict[str, int]) -> None:
        self._folders = folders
        try:
            for folder in folders:
                folder.mkdir(exist_ok=True)  # there from a supervisor that was killed
                for file, value in limits.items():
                    # Of version 2, of version 1, or of a kernel that accounts swap: what is there.
                    if (folder / file).exists():
                        (folder / file).write_text(str(value))
        except OSError:
            self.remove()
            raise

    def join(self) -> None:
        """For a child: it and its descendants belong to the group."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text("0")

    def passed(self) -> str | None:
        """`memory` or `processes` if the kernel had to enforce that limit."""
        if self._counted(("memory.events", "memory.oom_control"), "oom_kill"):
            return "memory"
        return "processes" if self._counted(("pids.events",), "max") else None

    def remove(self) -> None:
        deadline = time.monotonic() + _REMOVE_S
        for folder in self._folders:
            while True:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    pass
                except OSError:
                    if time.monotonic() < deadline:
                        time.sleep(0.005)
                        continue
                break

    def _counted(self, files: Sequence[str], key: str) -> int:
        for path in (folder / file for folder in self._folders for file in files):
            with contextlib.suppress(OSError):
                for line in path.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == key:
                        return int(value)
        return 0


def make_cgroup(name: str, memory_bytes: int, processes: int) -> Cgroup | None:
    """A group called `name` for a program with these limits; None where it cannot be made."""
    memory, tasks = int(memory_bytes * _MEMORY_SLACK), processes * _TASKS_PER_PROCESS
    limits = {
        "memory.max": memory, "memory.swap.max": 0, "memory.limit_in_bytes": memory,
        "memory.memsw.limit_in_bytes": memory, "pids.max": tasks,
    }  # fmt: skip
    with contextlib.suppress(OSError):
        ours = Path("/proc/self/cgroup").read_text()
        if parents := _parents(Path("/sys/fs/cgroup"), ours):
            return Cgroup([parent / name for parent in parents], limits)
    return None


def _parents(mounted: Path, ours: str) -> list[Path]:
    """Where a group for memory and processes can be made, of the process whose /proc/PID/cgroup is
    `ours`."""
    groups: dict[str, str] = {}
    for line in ours.splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    if {"memory", "pids"} <= groups.keys():
        return [mounted / name / groups[name] for name in ("memory", "pids")]
    # Version 2 lets only groups without processes of their own hand controllers on, so it is
    # usually one above ours.
    own = mounted / groups.get("", "")
    for folder in (own, *own.parents):
        if not folder.is_relative_to(mounted):
            break
        control = folder / "cgroup.subtree_control"
        if control.exists() and {"memory", "pids"} <= set(control.read_text().split()):
            return [folder]
    return []
