"""How a supervisor puts its program into a sandbox and under the kernel's own limits.

`Box` has bubblewrap make the namespaces and mounts around `cat`, which holds them open, and lets a
program enter them with setns(2). So a program that was forked from a warm interpreter
(`forkserver.py`) gets the same box as one that is executed; bubblewrap alone could only do the
latter. `Cgroup` is a control group for one program, where this machine lets us make one.

Invariants: a program that entered has no capability in any namespace and cannot get one (no new
privileges, an empty bounding set, no further user namespaces); it shares the process, user, IPC,
host name, mount and, if the box has one, network namespace with nothing but its own descendants;
the box and all in it end with the supervisor.

Standard library only, and nothing of ours: the supervisor loads this file by its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_NS_GET_USERNS = 0xB701  # ioctl: the user namespace that owns this namespace
_PR_CAPBSET_DROP, _CAPABILITY_VERSION_3 = 24, 0x20080522
_START_S = 30.0  # it takes 0.02; a mount on a file server that hangs must not hold us for ever
_REMOVE_S = 2.0  # the kernel gives a control group free some milliseconds after its last process
# The poll ends a program at its limit, with an outcome of its own. These are for what a poll cannot
# see (memory that no process has mapped) or is too slow for (a fork bomb), so they lie above it.
_MEMORY_SLACK = 1.25
_TASKS_PER_PROCESS = 8  # threads count too


class Box:
    """Namespaces that the calling process has entered half: its children are born in the new
    process namespace, and `enter` takes them into the rest.

    Raises:
        OSError: they cannot be had; the message is bubblewrap's or the kernel's.
    """

    PROCESSES = 3  # bubblewrap, its init inside, and cat

    def __init__(self, bubblewrap: Sequence[str], network: bool) -> None:
        info, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*bubblewrap, "--info-fd", str(theirs), "--", "cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs],
                env={},
                start_new_session=True,
            )
            os.close(theirs)
            self._await_cat()
            pid = json.loads(os.read(info, 4096))["child-pid"]
        finally:
            os.close(info)
        self._pidfd = os.pidfd_open(pid)
        # For an ordinary user bubblewrap makes two: one that owns the others, and one below it.
        owned = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY)
        owner = fcntl.ioctl(owned, _NS_GET_USERNS)
        self._nested = os.fstat(owner).st_ino != os.stat(f"/proc/{pid}/ns/user").st_ino
        _setns(owner, _NEWUSER)
        _setns(self._pidfd, _NEWPID | _NEWIPC | _NEWUTS | (_NEWNET if network else 0))
        # Of the user namespace that we are in: nobody inside may make one where he is root again.
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        for fd in (owned, owner):
            os.close(fd)

    def listen(self, port: int) -> socket.socket:
        """A socket that listens on the box's own loopback; whoever has it can accept outside."""
        return socket.create_server(("127.0.0.1", port), backlog=128)

    def enter(self) -> None:
        """For a child, before it runs anything foreign: enters the rest and drops all powers."""
        _setns(self._pidfd, _NEWNS)
        if self._nested:
            _setns(self._pidfd, _NEWUSER)
        capability = 0
        while _LIBC.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == 0:
            capability += 1  # until the kernel knows no more
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        _check(_LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")

    def _await_cat(self) -> None:
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"\n")
            process.stdin.flush()
        ready = select.select([process.stdout], [], [], _START_S)[0]
        if not (ready and process.stdout.read(1)):
            process.kill()
            said = process.stderr.read().decode(errors="replace").strip().splitlines()
            process.wait()
            raise OSError(said[-1] if said else f"bubblewrap was not ready after {_START_S:g} s")


class Cgroup:
    """A control group with a limit of memory and one of processes and threads; version 1 or 2.
    `folders` are its directories, one per controller in version 1."""

    def __init__(self, folders: list[Path], limits: dict[str, int]) -> None:
        self._folders = folders
        for folder in folders:
            folder.mkdir(exist_ok=True)  # there from a supervisor that was killed
            for file, value in limits.items():
                # Of version 2, of version 1, or of a kernel that accounts swap: what is there.
                if (folder / file).exists():
                    (folder / file).write_text(str(value))

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


def make_cgroup(
    name: str,
    memory_bytes: int,
    processes: int,
    mounted: Path = Path("/sys/fs/cgroup"),
    ours: Path = Path("/proc/self/cgroup"),
) -> Cgroup | None:
    """A group called `name` for a program with these limits; None where it cannot be made."""
    memory, tasks = int(memory_bytes * _MEMORY_SLACK), processes * _TASKS_PER_PROCESS
    limits = {
        "memory.max": memory, "memory.swap.max": 0, "memory.limit_in_bytes": memory,
        "memory.memsw.limit_in_bytes": memory, "pids.max": tasks,
    }  # fmt: skip
    with contextlib.suppress(OSError):
        if parents := _parents(mounted, ours.read_text()):
            return Cgroup([parent / name for parent in parents], limits)
    return None


def _parents(mounted: Path, ours: str) -> list[Path]:
    """Where a group for memory and processes can be made, of the process whose /proc/PID/cgroup is
    `ours`."""
    groups = {}
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


_LIBC = ctypes.CDLL(None, use_errno=True)


def _setns(fd: int, kinds: int) -> None:
    _check(_LIBC.setns(fd, kinds), "setns")


def _check(status: int, call: str) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
