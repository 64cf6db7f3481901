"""Runs one untrusted program on this machine, within limits, and leaves nothing of it behind.

`run` has a small supervisor process start the program, watch it and report (`supervisor.py`). It is
forked from a warm interpreter (`forkserver.py`): ours, or one that has imported what the program
needs.

Invariants: when `run` returns or raises, no process of the program is alive (should something have
killed the supervisor itself, those that still carry the attempt's marker in their environment or
name are found and killed); the program gets the given environment, the marker, and nothing else of
ours; secrets travel by socket, never on a command line; the log never grows past its limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lightning_ray.rollouts import forkserver, supervisor
from lightning_ray.rollouts.forkserver import Preload
from lightning_ray.rollouts.relay import Relay
from lightning_ray.rollouts.supervisor import EndedBy, Limits

MARKER = "LIGHTNING_RAY_ATTEMPT"
# Has nothing but the supervisor, which takes a tenth of a second to start otherwise.
PLAIN = Preload(sys.executable, (), ())
_TAIL_CHARS = 2000  # what a person wants to see of a log in an error message
_CALLER_POLL_S = 0.2  # Ray cancels a task by an exception that does not interrupt a system call


@dataclass(frozen=True)
class Sandbox:
    """A box to run in: bubblewrap and its arguments, which make a network namespace or not. In one,
    `gateway` (host and port) is what the same port on loopback leads to."""

    bubblewrap: tuple[str, ...]
    own_network: bool
    gateway: tuple[str, int] | None = None


@dataclass(frozen=True)
class ExitReport:
    """How a program ended. `status` is the exit status (EXIT) or the signal's number (SIGNAL);
    `seconds` is wall-clock time; memory is the sum of resident sizes, shared pages counted once per
    process."""

    ended_by: EndedBy
    status: int | None
    seconds: float
    peak_rss_bytes: int
    cpu_seconds: float
    error: str
    output_tail: str

    def describe(self) -> str:
        """One sentence for people, with the last line of output where the program itself gave
        up."""
        lines = self.output_tail.strip().splitlines()
        said = f": {lines[-1].strip()}" if lines and self.status != 0 else ""
        match self.ended_by:
            case EndedBy.EXIT:
                return f"exit status {self.status} after {self.seconds:.1f} s{said}"
            case EndedBy.SIGNAL:
                name = signal.strsignal(self.status or 0)
                return f"killed by signal {self.status} ({name}) after {self.seconds:.1f} s{said}"
            case EndedBy.NOT_STARTED:
                return f"could not be started: {self.error}"
            case EndedBy.NO_MEMORY:
                return f"killed after {self.seconds:.1f} s: the machine had no memory left"
            case EndedBy.LOST:
                return f"its supervisor was killed after {self.seconds:.1f} s"
        return f"killed after {self.seconds:.1f} s: passed its {self.ended_by} limit"


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    log: Path,
    limits: Limits,
    attempt_id: str,
    stdin: str = "",
    stdout: Path | None = None,
    preload: Preload | None = None,
    sandbox: Sandbox | None = None,
    disk: Path | None = None,
) -> ExitReport:
    """Runs `argv` to its end and returns how it ended. `cwd` is a folder of the sandbox, if there
    is one. stdout and stderr go to `log`, or only stderr where `stdout` names another file. With
    `preload`, `argv[0]` is a Python script. `disk` is the folder that the limit of disk space is
    for. Blocks; an exception raised in this thread ends the program.

    Raises:
        PreloadError: see there.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs with SIGINT ignored, and Ray's workers inherit that: then
        # Ray's way to cancel a task would do nothing.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    order = {
        "argv": list(argv),
        "env": {**env, MARKER: attempt_id},
        "cwd": str(cwd),
        "log": str(log),
        "stdin": stdin,
        "stdout": str(stdout) if stdout else None,
        "limits": asdict(limits),
        "attempt": attempt_id,
        "disk": str(disk) if disk else None,
        "box": sandbox and sandbox.bubblewrap,
        "network": bool(sandbox and sandbox.own_network),
        "port": sandbox and sandbox.gateway and sandbox.gateway[1],
    }
    started = time.monotonic()
    orders, reports = _start_supervisor(preload or PLAIN)
    facts: dict[str, Any] | None = None
    relay: Relay | None = None
    try:
        with contextlib.suppress(ConnectionError):  # a dead supervisor is reported below
            orders.sendall(json.dumps(order).encode() + b"\n")
            if sandbox and sandbox.gateway and (listener := _listener(orders)):
                relay = Relay(listener, sandbox.gateway)
        while not select.select([reports], [], [], _CALLER_POLL_S)[0]:
            pass
        reply = reports.read()
        facts = json.loads(reply) if reply else None
    finally:
        orders.close()
        if relay:
            relay.close()
        reports.read()  # to its end: the supervisor is gone, and with it all that it watched
        reports.close()
        if facts is None:
            _sweep(attempt_id)
    facts = facts or {"ended_by": EndedBy.LOST, "seconds": time.monotonic() - started}
    return ExitReport(
        ended_by=EndedBy(facts["ended_by"]),
        status=facts.get("status"),
        seconds=facts["seconds"],
        peak_rss_bytes=facts.get("peak_rss_bytes", 0),
        cpu_seconds=facts.get("cpu_seconds", 0.0),
        error=facts.get("error", ""),
        output_tail=_tail(log),
    )


def _listener(orders: socket.socket) -> socket.socket | None:
    """The socket that listens in the box; None if the supervisor could not make it."""
    while not select.select([orders], [], [], _CALLER_POLL_S)[0]:
        pass
    _, fds, _, _ = socket.recv_fds(orders, 1, 1)
    return socket.socket(fileno=fds[0]) if fds else None


def _start_supervisor(preload: Preload) -> tuple[socket.socket, BinaryIO]:
    """Its stdin and its stdout."""
    orders, order_end = socket.socketpair()
    reports, report_end = os.pipe()
    try:
        forkserver.fork(preload, order_end.fileno(), report_end)
    except BaseException:
        orders.close()
        os.close(reports)
        raise
    finally:
        order_end.close()
        os.close(report_end)
    return orders, os.fdopen(reports, "rb")


def search_path() -> str:
    """The PATH of every program: the machine's tools, and not our own virtual environment, or an
    agent would install packages into it."""
    ours = os.path.join(sys.prefix, "bin")
    path = [part for part in os.environ.get("PATH", "").split(os.pathsep) if part and part != ours]
    return os.pathsep.join(path) or os.defpath


def base_environment(home: str | Path, tmp: str | Path) -> dict[str, str]:
    """What every program gets: the machine's tools, and a home of its own."""
    return {
        "PATH": search_path(),
        "HOME": str(home),
        "TMPDIR": str(tmp),
        "LANG": "C.UTF-8",
    }


def marked(attempt_id: str) -> list[int]:
    """Process ids whose environment or name carries the attempt's marker."""
    wanted = f"{MARKER}={attempt_id}".encode()
    name = supervisor.process_name(attempt_id)
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            process = Path(f"/proc/{pid}")
            # A program that was forked, not executed, still shows the fork server's environment.
            if (
                wanted in (process / "environ").read_bytes().split(b"\0")
                or (process / "comm").read_text().strip() == name
            ):
                found.append(int(pid))
    return found


def _sweep(attempt_id: str) -> None:
    while pids := marked(attempt_id):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(-min(log.stat().st_size, 4 * _TAIL_CHARS), os.SEEK_END)
            return file.read().decode(errors="replace")[-_TAIL_CHARS:]
    except FileNotFoundError:
        return ""
