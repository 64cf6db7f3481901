"""The small process that stands between us and one untrusted program.

It starts the program, watches its limits and reports how it ended. It is a child subreaper (prctl):
whatever the program forks, daemonises or orphans stays a descendant, so "no children left" means
that everything is dead. It ends everything as soon as its stdin, a socket, closes, so the death of
the caller ends the program too; the program in turn dies with the supervisor. If the order says so,
the program runs in a sandbox (`box.py`, `syscalls.py`), whose listening socket goes to the caller
through stdin.

What it uses is looked at from time to time (`usage.py`).

Standard library only: this file runs in any Python, also that of a harness (`forkserver.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol


def load_beside(name: str) -> ModuleType:
    """The module in the file `name` of this folder, which must not be on the path of a harness."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from lightning_ray.rollouts import box as boxes
    from lightning_ray.rollouts import syscalls
    from lightning_ray.rollouts import usage as uses
else:
    boxes, syscalls, uses = map(load_beside, ("box", "syscalls", "usage"))

_POLL_S = 0.25  # memory and process counts are looked at four times a second ...
_POLL_SHARE = (
    100  # ... but looking takes at most 1/100 of a core where there are many processes ...
)
_POLL_MOST_S = 2.0  # ... and even then so often: memory runs away in seconds
_OPEN_FILES = 8192  # file watchers of Node tools need more than the usual 1024
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 15, 36, 38


class EndedBy(StrEnum):
    """Why a program is no longer running."""

    EXIT = "exit"  # it ended with an exit status
    SIGNAL = "signal"  # a signal that was not ours killed it
    NO_MEMORY = "no_memory"  # the kernel killed a process because the machine had no memory left
    TIME = "time"  # still running at the time limit
    MEMORY = "memory"  # resident memory of all its processes passed the limit
    PROCESSES = "processes"  # more processes at a time than the limit
    OUTPUT = "output"  # wrote more than the limit to stdout and stderr
    DISK = "disk"  # its folders hold more than the limit
    NOT_STARTED = "not_started"  # no such program, no such folder, arguments too long
    LOST = "lost"  # the supervisor was killed, so nobody knows


@dataclass(frozen=True)
class Limits:
    """What a program and all its descendants may use."""

    timeout_s: float
    memory_mib: int = 2048
    max_processes: int = 256
    output_mib: int = 16
    file_mib: int = 512
    disk_mib: int = 4096


class Child(Protocol):
    """The program that was started, as `subprocess.Popen` and others give it."""

    pid: int


# Starts the program of an order with (stdin, stdout, stderr), calling the function in the child.
Launch = Callable[[dict[str, Any], tuple[int, int, int], Callable[[], None]], Child]


def supervise(launch: Launch) -> None:
    """Reads an order from stdin, carries it out, writes the facts to stdout as JSON."""
    os.umask(0o077)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    order = json.loads(sys.stdin.buffer.readline())
    limits = Limits(**order["limits"])
    started = time.monotonic()
    usage = uses.Usage(
        process_name(order["attempt"]),
        memory=limits.memory_mib << 20,
        processes=limits.max_processes,
        folder=order["disk"],
        disk=limits.disk_mib << 20,
    )
    with open(order["log"], "wb") as log:
        try:
            with _streams(order) as (streams, output):
                box = boxes.Box(order["box"], order["network"]) if order["box"] else None
                order["root"] = box.root if box else ""
                # A missing one is an error of the start, not of the program.
                if not os.path.lexists(f"{order['root']}/{order['cwd']}"):
                    raise FileNotFoundError(f"there is no folder {order['cwd']}")
                if box and order["port"]:
                    _hand_over(box.listen(order["port"]))
                child = launch(order, streams, _confinement(order, limits, box, usage))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            facts: dict[str, Any] = {"ended_by": EndedBy.NOT_STARTED, "error": str(error)}
        else:
            usage.others = boxes.Box.PROCESSES if box else 0
            facts = _watch(child, output, log, limits, started + limits.timeout_s, usage)
    usage.close()
    counted = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts["seconds"] = time.monotonic() - started
    facts["cpu_seconds"] = counted.ru_utime + counted.ru_stime
    facts["peak_rss_bytes"] = max(usage.peak, counted.ru_maxrss * 1024)
    if facts["ended_by"] is not EndedBy.LOST:  # then nobody is left to read it
        sys.stdout.write(json.dumps(facts))
        sys.stdout.flush()


def execute(
    order: dict[str, Any], streams: tuple[int, int, int], confine: Callable[[], None]
) -> subprocess.Popen[bytes]:
    """The ordinary way to start a program."""
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        order["argv"],
        env=order["env"],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=confine,
    )


def process_name(attempt_id: str) -> str:
    """What a program that was forked, not executed, is called in /proc/PID/comm (15 characters)."""
    return "lr-" + hashlib.sha256(attempt_id.encode()).hexdigest()[:12]


@contextlib.contextmanager
def _streams(order: dict[str, Any]) -> Iterator[tuple[tuple[int, int, int], int]]:
    """stdin, stdout and stderr of the program, and where to read what it writes."""
    output, theirs = os.pipe()
    with contextlib.ExitStack() as files:
        files.callback(os.close, theirs)
        stdin = files.enter_context(tempfile.TemporaryFile())
        stdin.write(order["stdin"].encode())
        stdin.seek(0)
        stdout = theirs
        if order["stdout"]:
            stdout = files.enter_context(open(order["stdout"], "wb")).fileno()
        yield (stdin.fileno(), stdout, theirs), output


def _hand_over(listener: socket.socket) -> None:
    with listener, socket.socket(fileno=os.dup(sys.stdin.fileno())) as caller:
        socket.send_fds(caller, [b"l"], [listener.fileno()])


def _confinement(
    order: dict[str, Any],
    limits: Limits,
    box: boxes.Box | None,
    usage: uses.Usage,
) -> Callable[[], None]:
    """What the program's process does to itself before it becomes the program."""
    supervisor = os.getpid()

    def confine() -> None:
        try:
            _confine()
        except OSError as error:
            os.write(2, f"cannot be confined: {error}\n".encode())
            raise

    def _confine() -> None:
        with contextlib.suppress(OSError):  # /proc may be read-only in a container
            Path("/proc/self/oom_score_adj").write_text(
                "1000"
            )  # the kernel takes it before Ray's worker
        usage.join()
        if box:
            box.enter()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Did it die before the line above took effect? (Inside a box its id cannot be seen, and
        # bubblewrap sees to it.)
        if not box and os.getppid() != supervisor:
            os._exit(1)
        os.umask(0o022)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)  # a set-uid program would be one we cannot kill
        name = ctypes.create_string_buffer(process_name(order["attempt"]).encode())
        _prctl(_PR_SET_NAME, ctypes.addressof(name))
        for what, most in (
            (resource.RLIMIT_FSIZE, limits.file_mib << 20),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(what)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(what, (most, most))
        os.chdir(order["cwd"])
        if box:
            syscalls.install()

    return confine


def _watch(
    child: Child, output: int, log: Any, limits: Limits, deadline: float, usage: uses.Usage
) -> dict[str, Any]:
    """Waits until the program ends or passes a limit, then ends everything."""
    os.set_blocking(output, False)
    room = limits.output_mib << 20
    poll = select.poll()
    poll.register(os.pidfd_open(child.pid), select.POLLIN)
    poll.register(output, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    next_look, ended_by, status, kills = 0.0, None, None, uses.kills()
    while ended_by is None:
        now = time.monotonic()
        if now >= next_look:
            ended_by = _passed(usage)
            looked = time.monotonic()
            pause = max(_POLL_S, _POLL_SHARE * (looked - now))
            next_look = looked + min(pause, _POLL_MOST_S)
        wait_s = 0.0 if ended_by else max(0.0, min(next_look, deadline) - time.monotonic())
        ready = {fd for fd, _ in poll.poll(wait_s * 1000)}
        if output in ready:
            room, eof = _copy(output, log, room)
            if room < 0:
                ended_by = ended_by or EndedBy.OUTPUT
            if eof:
                poll.unregister(output)
        if (ended := _reap(child.pid)) is not None:
            status = os.waitstatus_to_exitcode(ended)
            # A program that the kernel killed for its memory has passed that limit, or the machine
            # had no more.
            ended_by = EndedBy.EXIT if status >= 0 else _passed(usage) or EndedBy.SIGNAL
            if status == -signal.SIGKILL and ended_by is EndedBy.SIGNAL and uses.kills() > kills:
                ended_by = EndedBy.NO_MEMORY
        elif sys.stdin.fileno() in ready:
            ended_by = EndedBy.LOST  # the caller went away; nobody will read this
        elif time.monotonic() >= deadline:
            ended_by = ended_by or EndedBy.TIME
    _kill_all()
    room, _ = _copy(output, log, room)
    if room < 0 and ended_by is EndedBy.EXIT:
        ended_by, status = EndedBy.OUTPUT, None
    return {"ended_by": ended_by, "status": status and abs(status)}


def _passed(usage: uses.Usage) -> EndedBy | None:
    passed = usage.passed()
    return EndedBy(passed) if passed else None


def _copy(output: int, log: Any, room: int) -> tuple[int, bool]:
    """Moves what the pipe holds into the log, `room` bytes at most; returns the room left
    (negative: there was more) and whether every writer is gone."""
    while room >= 0:
        try:
            data = os.read(output, 1 << 16)
        except BlockingIOError:
            break
        if not data:
            return room, True
        log.write(data[:room])
        room -= len(data)
    log.flush()
    return room, False


def _reap(main: int) -> int | None:
    """Collects whoever ended; returns the wait status of `main` if it was among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == main:
                status = ended[1]
    return status


def _kill_all() -> None:
    """Kills every descendant, until there is none (one that was just forked is found the next
    time)."""
    while True:
        for pid in uses.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
