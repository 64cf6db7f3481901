"""Starts Python harnesses from a warm interpreter: what they import is imported once per machine.

Like multiprocessing's fork server, but for whole programs. The server imports the modules of a
recipe's `preload` and then forks a supervisor (`supervisor.py`) for each attempt, which in turn
forks the program and runs its script as `__main__`, unchanged. A server without modules has its
supervisors execute programs of any kind. A process that uses a server holds a connection to it; the
server ends when the last one is gone.

Invariants: the harness's own code is run anew in every attempt, with the attempt's environment,
folder, arguments and random state, and exits as if it had been executed; only the same user can
talk to the server; the server never sees a secret (orders go to the supervisor, by pipe).

Standard library only: the server half runs in the Python of the harness.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A server without connections waits this long for the next one.
_GRACE_S = 5.0
# Longest wait for the imports, in seconds; some harnesses import for ten on a busy machine.
_IMPORT_S = 120.0
_READY = b"ready"
_NOT_CONFINED = 126  # exit status, as of a shell that may not run a program


@dataclass(frozen=True)
class Preload:
    """A warm interpreter: `python` with `modules` imported under the environment `env`."""

    python: str
    modules: tuple[str, ...]
    env: tuple[tuple[str, str], ...]

    @property
    def address(self) -> bytes:
        """Of its socket, in Linux's abstract namespace: no file, gone with the server. Containers
        may share that namespace, and do not share a server, nor do other versions of us."""
        inside = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "user")]
        identity = f"{os.getuid()} {inside} {_code()} {self!r}"
        return b"\0lightning_ray-" + hashlib.sha256(identity.encode()).hexdigest()[:32].encode()


@functools.cache
def _code() -> str:
    """A digest of the files that a server runs."""
    digest = hashlib.sha256()
    for name in ("forkserver.py", "supervisor.py", "box.py", "syscalls.py", "usage.py"):
        with open(os.path.join(os.path.dirname(__file__), name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


class PreloadError(RuntimeError):
    """The modules of a recipe's `preload` cannot be imported; the message has the reason."""


_connections: dict[Preload, socket.socket] = {}


def fork(preload: Preload, stdin: int, stdout: int) -> None:
    """Has the server fork a supervisor whose stdin and stdout are these file descriptors.

    Raises:
        PreloadError: the server cannot be started.
    """
    if preload in _connections:
        try:
            socket.send_fds(_connections[preload], [b"f"], [stdin, stdout])
            return
        except OSError:  # somebody killed it
            _connections.pop(preload).close()
    _connections[preload] = _connect(preload)
    socket.send_fds(_connections[preload], [b"f"], [stdin, stdout])


def _connect(preload: Preload) -> socket.socket:
    reason = "it did not answer"
    for _ in range(3):  # a server may end between its start and our connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_IMPORT_S)
        try:
            connection.connect(preload.address)
            if _peer_uid(connection) == os.getuid() and connection.recv(16) == _READY:
                return connection
        except OSError as error:
            reason = str(error)
        connection.close()
        started = subprocess.run(
            [preload.python, __file__, preload.address[1:].decode(), *preload.modules],
            env=dict(preload.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
            text=True,
        )
        if started.returncode:
            reason = (started.stderr.strip().splitlines() or ["no output"])[-1]
    raise PreloadError(f"cannot preload {', '.join(preload.modules)}: {reason}")


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1])


# -- the server: runs in the Python of the harness ----------------------------------------------


class _Become(BaseException):
    """Unwinds a forked process down to the top, where it becomes the program of `order`."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order


@dataclass
class _Forked:
    pid: int


def _serve(name: str, modules: list[str]) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(b"\0" + name.encode())
    except OSError:
        return  # another one has just started
    listener.listen(128)
    # From our folder, which must not shadow a module of the harness.
    supervisor = importlib.import_module("supervisor")
    del sys.modules["supervisor"]
    sys.path.pop(0)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # keeps pages shared: the collector would write to every one of them
    if os.fork():
        os._exit(0)  # the starter need not wait any longer, nor take the server with it
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the supervisors
    streams = _accept(listener)
    if streams is None:
        return
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, source in enumerate(streams):
        os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    supervisor.supervise(_launcher() if modules else supervisor.execute)


def _accept(listener: socket.socket) -> list[int] | None:
    """Serves until nobody is connected; then, and in the server, returns None. In a forked process
    returns the file descriptors of its stdin and stdout."""
    connections: list[socket.socket] = []
    deadline = time.monotonic() + _GRACE_S
    while connections or time.monotonic() < deadline:
        for ready in select.select([listener, *connections], [], [], 1.0)[0]:
            if ready is listener:
                connection, _ = listener.accept()
                if _peer_uid(connection) == os.getuid():
                    connection.send(_READY)
                    connections.append(connection)
                continue
            try:
                message, fds, _, _ = socket.recv_fds(ready, 1, 2)
            except OSError:
                message, fds = b"", []
            if not message:
                ready.close()
                connections.remove(ready)
                deadline = time.monotonic() + _GRACE_S
            elif os.fork() == 0:
                return fds
            for fd in fds:
                os.close(fd)
    return None


def _launcher() -> Callable[[dict[str, Any], tuple[int, int, int], Callable[[], None]], _Forked]:
    def launch(
        order: dict[str, Any], streams: tuple[int, int, int], confine: Callable[[], None]
    ) -> _Forked:
        script, root = order["argv"][0], order.get("root", "")
        if not any(os.path.lexists(place + script) for place in ("", root)):
            # An error of the start, not of the program.
            raise FileNotFoundError(f"there is no {script}")
        if pid := os.fork():
            return _Forked(pid)
        os.setsid()
        for target, source in enumerate(streams):
            os.dup2(source, target)
        try:
            confine()
        except BaseException:
            os._exit(_NOT_CONFINED)  # confine said why
        raise _Become(order)

    return launch


def _become(order: dict[str, Any]) -> None:
    """Runs the program as the interpreter would have."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(order["env"])
    time.tzset()
    random.seed()
    script = order["argv"][0]
    sys.argv = list(order["argv"])
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    become: dict[str, Any] | None = None
    try:
        _serve(sys.argv[1], sys.argv[2:])
    except _Become as program:
        become = program.order
    if become is not None:
        _become(become)
