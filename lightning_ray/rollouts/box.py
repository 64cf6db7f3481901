"""How a supervisor puts its program into a sandbox.

`Box` has bubblewrap make the namespaces and mounts around `cat`, which holds them open, and lets a
program enter them with setns(2). So a program that was forked from a warm interpreter
(`forkserver.py`) gets the same box as one that is executed; bubblewrap alone could only do the
latter.

Invariants: a program that entered has no capability in any namespace and cannot get one (no new
privileges, an empty bounding set, no further user namespaces); it shares the process, user, IPC,
host name, mount and, if the box has one, network namespace with nothing but its own descendants;
the box and all in it end with the supervisor.

Standard library only, and nothing of ours: the supervisor loads this file by its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_NS_GET_USERNS = 0xB701  # ioctl: the user namespace that owns this namespace
_PR_CAPBSET_DROP, _CAPABILITY_VERSION_3 = 24, 0x20080522
_START_S = 30.0  # it takes 0.02; a mount on a file server that hangs must not hold us for ever


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
        self.root = f"/proc/{pid}/root"  # where its file system is seen from outside
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
            capability += 1
        if ctypes.get_errno() != errno.EINVAL:  # EINVAL: the kernel knows no more of them
            _check(-1, "prctl")
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


_LIBC = ctypes.CDLL(None, use_errno=True)


def _setns(fd: int, kinds: int) -> None:
    _check(_LIBC.setns(fd, kinds), "setns")


def _check(status: int, call: str) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
