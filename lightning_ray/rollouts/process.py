"""Runs one untrusted program on this machine, within limits, and leaves nothing of it behind.

`run` starts this file as a small supervisor process, which alone starts the program, watches it and
reports. The supervisor is a child subreaper (prctl): whatever the program forks, daemonises or
orphans stays a descendant, so "the supervisor has no children left" means that everything is dead.
It ends everything as soon as its stdin closes, so the death of the caller ends the program too; the
program in turn dies with the supervisor.

Invariants: when `run` returns or raises, no process of the program is alive (should something have
killed the supervisor itself, those that still carry the attempt's marker in their environment are
found and killed); the program gets the given environment, the marker, and nothing else of ours;
secrets travel by pipe, never on a command line; the log never grows past its limit.

The supervisor half uses the standard library only, because it is started once per attempt and its
start must be cheap; one pass over /proc reads parent and memory of every process at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

MARKER = "LIGHTNING_RAY_ATTEMPT"
_TAIL_CHARS = 2000  # what a person wants to see of a log in an error message
_POLL_S = 0.25  # memory and process counts are looked at four times a second ...
_POLL_SHARE = 20  # ... but looking may take at most 1/20 of a core on a machine with many processes
_CALLER_POLL_S = 0.2  # Ray cancels a task by an exception that does not interrupt a system call
_OPEN_FILES = 8192  # file watchers of Node tools need more than the usual 1024
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38


class EndedBy(StrEnum):
    """Why a program is no longer running."""

    EXIT = "exit"  # it ended with an exit status
    SIGNAL = "signal"  # a signal that was not ours killed it
    TIME = "time"  # still running at the time limit
    MEMORY = "memory"  # resident memory of all its processes passed the limit
    PROCESSES = "processes"  # more processes at a time than the limit
    OUTPUT = "output"  # wrote more than the limit to stdout and stderr
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
) -> ExitReport:
    """Runs `argv` to its end and returns how it ended. stdout and stderr go to `log`, or only
    stderr where `stdout` names another file. Blocks; an exception raised in this thread ends the
    program."""
    order = {
        "argv": list(argv),
        "env": {**env, MARKER: attempt_id},
        "cwd": str(cwd),
        "log": str(log),
        "stdin": stdin,
        "stdout": str(stdout) if stdout else None,
        "limits": asdict(limits),
    }
    started = time.monotonic()
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,
    )
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    facts: dict[str, Any] | None = None
    try:
        with contextlib.suppress(BrokenPipeError):  # a dead supervisor is reported below
            supervisor.stdin.write(json.dumps(order).encode() + b"\n")
            supervisor.stdin.flush()
        while not select.select([supervisor.stdout], [], [], _CALLER_POLL_S)[0]:
            pass
        reply = supervisor.stdout.read()
        facts = json.loads(reply) if reply else None
    finally:
        with contextlib.suppress(BrokenPipeError):
            supervisor.stdin.close()
        supervisor.wait()
        supervisor.stdout.close()
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


def base_environment(home: Path, tmp: Path) -> dict[str, str]:
    """What every program gets: the machine's tools (our own virtual environment is not among them,
    or an agent would install packages into it), and a home of its own."""
    ours = os.path.join(sys.prefix, "bin")
    path = [part for part in os.environ.get("PATH", "").split(os.pathsep) if part and part != ours]
    return {
        "PATH": os.pathsep.join(path) or os.defpath,
        "HOME": str(home),
        "TMPDIR": str(tmp),
        "LANG": "C.UTF-8",
    }


def marked(attempt_id: str) -> list[int]:
    """Process ids whose environment carries the attempt's marker."""
    wanted = f"{MARKER}={attempt_id}".encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
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


# -- the supervisor: runs in a process of its own -----------------------------------------------


def _supervise() -> None:
    """Reads an order from stdin, carries it out, writes the facts to stdout as JSON."""
    os.umask(0o077)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    order = json.loads(sys.stdin.buffer.readline())
    limits = Limits(**order["limits"])
    started = time.monotonic()
    with open(order["log"], "wb") as log:
        try:
            child = _start(order, limits)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            facts: dict[str, Any] = {"ended_by": EndedBy.NOT_STARTED, "error": str(error)}
        else:
            facts = _watch(child, log, limits, started + limits.timeout_s)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts["seconds"] = time.monotonic() - started
    facts["cpu_seconds"] = usage.ru_utime + usage.ru_stime
    facts["peak_rss_bytes"] = max(facts.get("peak_rss_bytes", 0), usage.ru_maxrss * 1024)
    if facts["ended_by"] is not EndedBy.LOST:  # then nobody is left to read it
        sys.stdout.write(json.dumps(facts))
        sys.stdout.flush()


def _start(order: dict[str, Any], limits: Limits) -> subprocess.Popen[bytes]:
    supervisor = os.getpid()

    def confine() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before the line above took effect
            os._exit(1)
        os.umask(0o022)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)  # a set-uid program would be one we cannot kill
        for what, most in (
            (resource.RLIMIT_FSIZE, limits.file_mib << 20),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(what)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(what, (most, most))
        with contextlib.suppress(OSError):  # /proc may be read-only in a container
            Path("/proc/self/oom_score_adj").write_text(
                "1000"
            )  # the kernel takes it before Ray's worker

    with tempfile.TemporaryFile() as stdin, contextlib.ExitStack() as files:
        stdin.write(order["stdin"].encode())
        stdin.seek(0)
        own = files.enter_context(open(order["stdout"], "wb")) if order["stdout"] else None
        return subprocess.Popen(
            order["argv"],
            env=order["env"],
            cwd=order["cwd"],
            stdin=stdin if order["stdin"] else subprocess.DEVNULL,
            stdout=own or subprocess.PIPE,
            stderr=subprocess.PIPE if own else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=confine,
        )


def _watch(
    child: subprocess.Popen[bytes], log: Any, limits: Limits, deadline: float
) -> dict[str, Any]:
    """Waits until the program ends or passes a limit, then ends everything."""
    output = (child.stdout or child.stderr).fileno()  # type: ignore[union-attr]
    os.set_blocking(output, False)
    room = limits.output_mib << 20
    poll = select.poll()
    poll.register(os.pidfd_open(child.pid), select.POLLIN)
    poll.register(output, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    peak, next_look, ended_by, status = 0, 0.0, None, None
    while ended_by is None:
        now = time.monotonic()
        if now >= next_look:
            tree = _descendants()
            looked = time.monotonic()
            next_look = looked + max(_POLL_S, _POLL_SHARE * (looked - now))
            peak = max(peak, sum(tree.values()))
            if peak > limits.memory_mib << 20:
                ended_by = EndedBy.MEMORY
            elif len(tree) > limits.max_processes:
                ended_by = EndedBy.PROCESSES
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
            ended_by = EndedBy.EXIT if status >= 0 else EndedBy.SIGNAL
        elif sys.stdin.fileno() in ready:
            ended_by = EndedBy.LOST  # the caller went away; nobody will read this
        elif time.monotonic() >= deadline:
            ended_by = ended_by or EndedBy.TIME
    _kill_all()
    room, _ = _copy(output, log, room)
    if room < 0 and ended_by is EndedBy.EXIT:
        ended_by, status = EndedBy.OUTPUT, None
    return {"ended_by": ended_by, "status": status and abs(status), "peak_rss_bytes": peak}


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
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _descendants() -> dict[int, int]:
    """Resident bytes of each descendant of this process. Zombies count: one whose main thread has
    ended looks like a zombie while its other threads run."""
    page = resource.getpagesize()
    children: dict[int, list[tuple[int, int]]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
            # The second field, the program's name in brackets, may hold anything; count from its
            # end.
            _, parent, *rest = stat[stat.rindex(b")") + 2 :].split()
            children.setdefault(int(parent), []).append((int(name), int(rest[19]) * page))
    found: dict[int, int] = {}
    queue = [os.getpid()]
    while queue:
        for pid, rss in children.get(queue.pop(), ()):
            found[pid] = rss
            queue.append(pid)
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    _supervise()
