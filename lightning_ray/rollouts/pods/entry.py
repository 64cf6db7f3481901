"""What runs in a pod: it fetches its order from the gateway, carries it out, and sends back what
came of it.

Standard library only, for any Python from 3.8: this file travels with the order into the user's own
image, where `manifest.BOOTSTRAP` executes it behind `changed.py`. An order of the kind `harness`
fills the workspace, or sets up the repository that the image has there, runs the harness and sends
back what it changed; one of the kind `room` runs a command on a clean tree and sends back what that
reported, files that it left, and how it ended.

Invariants: the room's key is in the memory of this process only, which others in the pod can
neither read nor end (`guard.py`); a harness gets one that is derived from it; when something is
sent back, nothing else in the pod runs any more; nothing is sent that passes its size limit; the
termination message is ours, whatever ends this program but a signal.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import io
import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import time

if __name__ != "entry":  # in a pod all files are one
    from lightning_ray.rollouts.pods.changed import Ended, changes, originals, snapshot
    from lightning_ray.rollouts.pods.guard import guard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    Order = dict[str, Any]
    Facts = dict[str, Any]
    Request = Callable[..., bytes]
    Child = subprocess.Popen[bytes]

TERMINATION_LOG = "/dev/termination-log"
# Kubernetes keeps 4,096 bytes of the termination message.
MOST_ERROR_CHARS = 500
MOST_DYING_S = 10  # a killed process in a system call of a slow disk takes a while
MOST_SETUP_S = 600  # of a repository: git reads it twice
# What a program wrote is in its pipe when it ends; what it leaves behind may write for ever.
MOST_DRAINING_S = 1.0
# Of a room's report, besides what was said and files: the last output, numbers, names.
MOST_ABOUT_REPORT = 64 << 10


def main(order: Order, request: Request, key: str) -> NoReturn:
    """Carries out an order and ends the process with the status of what it ran."""
    # As the first process of its namespace it gets no signal from the others, except those that it
    # handles: Python handles this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    unguarded, forbidden = guard(), reach()
    started = time.monotonic()
    # Opened before anybody else could change its rights.
    log = open_log()
    facts: Facts = {"ended_by": "not_started", "status": None, "error": ""}
    try:
        make = {"harness": run_harness, "room": run_room}[order["kind"]]
        facts = make(order, request, key)
    except Ended as error:
        facts.update(ended_by=error.why, error=str(error)[:500])
    except (Exception, SystemExit) as error:
        # Whatever it was: without a message of ours that of the program would count, for which
        # Kubernetes takes even the end of its output.
        facts["error"] = f"{type(error).__name__}: {error}"
    told = {name: facts[name] for name in ("ended_by", "status", "error")}
    told["error"] = told["error"][:MOST_ERROR_CHARS]
    told["seconds"] = time.monotonic() - started
    told["unguarded"], told["network"] = unguarded, reached(forbidden)
    text = json.dumps(told, ensure_ascii=False).encode(errors="replace")
    status = facts.get("status")
    # Above that is what a signal makes of us.
    code = status if isinstance(status, int) and 0 <= status < 128 else 1
    try:
        os.ftruncate(log, 0)
        os.pwrite(log, text, 0)
    except OSError:  # no space: what stands in its place is the program's
        code = code and 255
    os._exit(code)


def reach() -> socket.socket | None:
    """Begins to connect to what no rollout needs, the API of Kubernetes, of which every pod is
    told. Nobody waits for it: a wall answers nothing."""
    host, port = (
        os.environ.get("KUBERNETES_SERVICE_HOST"),
        os.environ.get("KUBERNETES_SERVICE_PORT"),
    )
    with contextlib.suppress(OSError, ValueError):
        if host and port:
            probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            probe.setblocking(False)
            probe.connect_ex((host, int(port)))
            return probe
    return None


def reached(probe: socket.socket | None) -> str:
    """Who answered, if somebody did, also with a goodbye."""
    if probe is None:
        return ""
    if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != errno.ECONNRESET:
        try:
            probe.getpeername()
        except OSError:
            return ""
    return "no NetworkPolicy holds it: it reaches the API server"


# -- a harness ------------------------------------------------------------------------------------


def run_harness(order: Order, request: Request, key: str) -> Facts:
    workspace = order["workspace"]
    for folder in (order["home"], order["tmp"], workspace):
        os.makedirs(folder, exist_ok=True)
    if order["has_workspace"]:
        with tarfile.open(fileobj=io.BytesIO(request("workspace"))) as tar:
            tar.extractall(workspace)  # made by us
    for path, content in order["files"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(content)
    link_site_packages(order)
    if not os.access(workspace, os.W_OK):
        raise Ended(
            "not_started",
            workspace
            + " cannot be written: set runAsUser and readOnlyRootFilesystem: false in the "
            "template's securityContext",
        )
    kept = None
    if order["setup"]:
        set_up(order["setup"], workspace)
    before = snapshot(workspace)
    if order["setup"]:
        kept = originals(workspace, before)
    env = dict(os.environ)  # the image's and the template's
    harness_key = hashlib.sha256(b"harness:" + key.encode()).hexdigest()
    for name, text in order["env"].items():
        env[name] = text.replace(order["key_stands_for"], harness_key)
    facts = run(order["argv"], env, order["cwd"], order["stdin"].encode(), order)
    try:
        body = changes(workspace, before, order["result_bytes"], kept)
    except Exception as error:  # it left a workspace that cannot be read
        body, facts["error"] = None, str(error) or type(error).__name__
    if body is None:
        limit = f"what it changed is larger than {order['result_bytes']} bytes, or too many files"
        facts.update(ended_by="disk", error=facts["error"] or limit)
    else:
        request("result", body)
    return facts


def set_up(setup: dict[str, str], workspace: str) -> None:
    """Runs the task family's program on the repository that the image has in `workspace`."""
    argv = [sys.executable, "-I", "-c", setup["program"]]
    try:
        done = subprocess.run(
            argv,
            input=setup["say"].encode(),
            cwd=workspace,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=MOST_SETUP_S,
        )
    except subprocess.TimeoutExpired:
        raise Ended("not_started", f"setting up {workspace} took too long") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise Ended("not_started", f"setting up {workspace}: {last[-1]}")


def link_site_packages(order: Order) -> None:
    """`{site_packages}` of a recipe is one path, whatever the Python of the image."""
    folder = os.path.join(order["venv"], "lib")
    found = (
        [name for name in sorted(os.listdir(folder)) if name.startswith("python3")]
        if os.path.isdir(folder)
        else []
    )
    if found:
        os.symlink(os.path.join(folder, found[0], "site-packages"), order["site_packages"])


# -- a room ---------------------------------------------------------------------------------------


def run_room(order: Order, request: Request, key: str) -> Facts:
    """Runs a command on a clean tree. It gets one end of a socket (`{fd}`), reads our line from it
    and answers with lines."""
    workspace = order["workspace"]
    for folder in (order["home"], order["tmp"], workspace):
        os.makedirs(folder, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(request("workspace"))) as tar:
        tar.extractall(workspace)
    ours, theirs = socket.socketpair()
    python = shutil.which("python3") or sys.executable  # ours may be the harness's
    argv = [
        text.replace("{fd}", str(theirs.fileno())).replace("{python}", python)
        for text in order["argv"]
    ]
    order["channel"] = ours
    facts = run(argv, {**os.environ, **order["env"]}, order["cwd"], b"", order, theirs)
    report = {name: facts[name] for name in ("ended_by", "status", "tail", "seconds")}
    report["said"] = base64.b64encode(facts["said"]).decode()
    room = order["result_bytes"] - len(report["said"]) - MOST_ABOUT_REPORT
    report["files"], large = left(workspace, order["bring"], order["output_bytes"], room)
    report["too_large"] = large + ["output"] * (facts["ended_by"] == "output")
    request("result", json.dumps(report).encode())
    return facts


def left(root: str, paths: list[str], most: int, room: int) -> tuple[dict[str, str], list[str]]:
    """Those of `paths` that are files, of at most `most` bytes, in base64, as far as there is
    `room` for it, and which ones are larger: whoever ran may have left anything."""
    found: dict[str, str] = {}
    large: list[str] = []
    for path in paths:
        folder, name = os.path.split(os.path.join(os.path.realpath(root), path))
        if os.path.realpath(folder) != folder:
            continue  # a link, to /proc/self say
        with contextlib.suppress(OSError):
            opened = os.open(
                os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            )
            with open(opened, "rb") as file:
                content = file.read(most + 1) if stat.S_ISREG(os.fstat(opened).st_mode) else None
                text = base64.b64encode(content or b"").decode()
                if content is None:
                    continue
                if len(content) > most or len(text) > room:
                    large.append(path)
                    continue
                found[path] = text
                room -= len(text)
    return found, large


# -- any program ----------------------------------------------------------------------------------


def run(
    argv: list[str],
    env: dict[str, str],
    cwd: str,
    stdin: bytes,
    order: Order,
    passed: socket.socket | None = None,
) -> Facts:
    """Runs a program to its end, or to its limits, and then kills all that it left."""
    kills, started = oom_kills(), time.monotonic()
    read, write = os.pipe()
    source = tempfile.TemporaryFile()  # noqa: SIM115, the program has it
    source.write(stdin)
    source.seek(0)
    try:
        child = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=source,
            stdout=write,
            stderr=write,
            pass_fds=[passed.fileno()] if passed else [],
            start_new_session=True,
        )
    except OSError as error:
        raise Ended("not_started", str(error)) from error
    os.close(write)
    source.close()
    if passed:
        passed.close()
    ended_by, tail, said = watch(child, read, order)
    kill_all(child)
    status = child.poll()
    if ended_by == "exit" and status is not None and status < 0:
        ended_by, status = "signal", -status
        if status == signal.SIGKILL and oom_kills() > kills:
            ended_by = "memory"
    elif ended_by != "exit":
        status = None
    last = tail.decode(errors="replace").strip().splitlines()[-1:]
    return {
        "ended_by": ended_by,
        "status": status,
        "error": last[0][:500] if last and status else "",
        "tail": tail.decode(errors="replace")[-2000:],
        "said": said,
        "seconds": time.monotonic() - started,
    }


def watch(child: Child, output: int, order: Order) -> tuple[str, bytes, bytes]:
    """Copies what the program writes to the pod's log until it ends; why it ended, the last of its
    output, and what came over the channel."""
    channel = order.get("channel")
    deadline, room = time.monotonic() + order["timeout_s"], order["output_bytes"]
    ended = float("inf")
    tail, said = b"", b""
    # In base64, and beside as much of files.
    most_said = (order["result_bytes"] - MOST_ABOUT_REPORT) // 2
    # By us and in turns: a thread would have an id, and the guard guards one.
    say = base64.b64decode(order["say"]) if channel else b""
    sources = {output} | ({channel} if channel else set())
    while True:
        ready, free, _ = select.select(list(sources), [channel] if channel and say else [], [], 0.1)
        if channel and free:
            try:
                say = say[channel.send(say[: 1 << 16], socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except OSError:  # it does not want to hear it
                say = b""
        if output in ready:
            data = os.read(output, 1 << 16)
            sources.discard(output) if not data else None
            os.write(1, data[: max(room, 0)])
            room, tail = room - len(data), (tail + data)[-4000:]
            if room < 0:
                return "output", tail, said
        if channel in ready:
            try:
                data = channel.recv(1 << 16)
            except ConnectionError:  # it ended without reading what we said
                data = b""
            sources.discard(channel) if not data else None
            said += data
            if len(said) > most_said:
                return "output", tail, said[:most_said]
        reap(child)
        if child.poll() is not None:
            ended = min(ended, time.monotonic())
        if ended < float("inf") and (not ready or time.monotonic() > ended + MOST_DRAINING_S):
            return "exit", tail, said
        if time.monotonic() > deadline:
            return "time", tail, said


def reap(child: Child) -> None:
    """Buries orphans that have ended: as the first process, all of them are ours."""
    with contextlib.suppress(ChildProcessError):
        while True:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = os.waitid(os.P_ALL, 0, options)
            if ended is None or ended.si_pid == child.pid:
                return
            os.waitpid(ended.si_pid, 0)


def open_log() -> int:
    try:
        return os.open(TERMINATION_LOG, os.O_WRONLY)
    except OSError:
        return -1


def kill_all(child: Child) -> None:
    """Ends everything in the pod but this process."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    else:  # the template shares the process namespace, or has an init: the program's session, then
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + MOST_DYING_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def oom_kills() -> int:
    """How often this container met its own memory limit; where the kernel does not say (v1), how
    often a process of it was killed, which a full node does too."""
    v2, v1 = "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"
    for path, name in ((v2, "oom "), (v1, "oom_kill ")):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(name))
    return 0
