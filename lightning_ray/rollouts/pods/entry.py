"""What runs in a pod: it fetches its order from the gateway, carries it out, and sends back what
came of it.

Standard library only, for any Python from 3.8: this file travels with the order into the user's own
image, where `manifest.BOOTSTRAP` executes it. An order of the kind `harness` fills the workspace,
runs the harness and sends back what it changed there; one of the kind `room` runs a command on a
clean tree and sends back what that reported, files that it left, and how it ended.

Invariants: the room's key is in the memory of this process only, which others in the pod can
neither read (it is not dumpable) nor signal (it is the first process); a harness gets one that is
derived from it; when something is sent back, nothing else in the pod runs any more; nothing is sent
that passes its size limit.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import io
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

TYPE_CHECKING = False  # `typing` takes longer to import than most of this file
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

    Order = dict[str, Any]
    Facts = dict[str, Any]
    Request = Callable[..., bytes]
    Child = subprocess.Popen[bytes]

TERMINATION_LOG = "/dev/termination-log"
# Kubernetes keeps 4,096 bytes of the termination message.
MOST_ERROR_CHARS = 500
MOST_DYING_S = 10  # a killed process in a system call of a slow disk takes a while
MOST_ENTRIES = 200_000  # files of a workspace that are looked at
MOST_CHANGED = 20_000  # files that come back: a repair changes a few
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


class Ended(Exception):
    """The order could not be carried out: `why` is one of EndedBy's values."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(detail)
        self.why = why


def main(order: Order, request: Request, key: str) -> NoReturn:
    """Carries out an order and ends the process with the status of what it ran."""
    # As the first process of its namespace it gets no signal from the others, except those that it
    # handles: Python handles this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    started = time.monotonic()
    # Opened before anybody else could change its rights.
    log = open_log()
    facts: Facts = {"ended_by": "not_started", "status": None, "error": ""}
    try:
        make = {"harness": run_harness, "room": run_room}[order["kind"]]
        facts = make(order, request, key)
    except Ended as error:
        facts.update(ended_by=error.why, error=str(error)[:500])
    except (OSError, tarfile.TarError) as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    told = {name: facts[name] for name in ("ended_by", "status", "error")}
    told["error"] = told["error"][:MOST_ERROR_CHARS]
    told["seconds"] = time.monotonic() - started
    text = json.dumps(told, ensure_ascii=False).encode(errors="replace")
    with contextlib.suppress(OSError):
        os.ftruncate(log, 0)
        os.pwrite(log, text, 0)
    status = facts.get("status")
    os._exit(status if isinstance(status, int) and 0 <= status < 256 else 1)


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
    before = snapshot(workspace)
    env = dict(os.environ)  # the image's and the template's
    harness_key = hashlib.sha256(b"harness:" + key.encode()).hexdigest()
    for name, text in order["env"].items():
        env[name] = text.replace(order["key_stands_for"], harness_key)
    facts = run(order["argv"], env, order["cwd"], order["stdin"].encode(), order)
    try:
        body = changes(workspace, before, order["result_bytes"])
    except (OSError, ValueError, Ended) as error:
        body, facts["error"] = None, str(error)
    if body is None:
        limit = f"what it changed is larger than {order['result_bytes']} bytes, or too many files"
        facts.update(ended_by="disk", error=facts["error"] or limit)
    else:
        request("result", body)
    return facts


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


def snapshot(root: str) -> dict[str, tuple[int, ...]]:
    """What lies below `root`: path to what changes when a file does. A harness that is not root
    cannot set the time of the last change of a file's metadata."""
    seen: dict[str, tuple[int, ...]] = {}
    for path, status in walk(root):
        kept = (
            status.st_mode,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
        )
        seen[path] = kept
    return seen


def walk(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Relative path and status of everything below `root` that is no folder."""
    folders, entries = [""], 0
    while folders:
        prefix = folders.pop()
        try:
            found = list(os.scandir(os.path.join(root, prefix)))
        except OSError:
            continue
        for entry in found:
            entries += 1
            if entries > MOST_ENTRIES:
                raise Ended("not_started", f"{root} has more than {MOST_ENTRIES} files")
            path = prefix + entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path + "/")
                else:
                    yield path, entry.stat(follow_symlinks=False)
            except OSError:
                continue  # a path that is too long, a folder that may not be entered


def changes(root: str, before: dict[str, tuple[int, ...]], most: int) -> bytes | None:
    """A tar of what changed below `root`: `deleted` (JSON), and files and links below `changed/`;
    None if it is larger than `most` bytes."""
    after = snapshot(root)
    body = io.BytesIO()
    size = 0
    with tarfile.open(fileobj=body, mode="w") as tar:
        gone = json.dumps(sorted(before.keys() - after.keys())).encode("utf-8", "surrogateescape")
        add(tar, "deleted", gone)
        changed = sorted(path for path, kept in after.items() if before.get(path) != kept)
        if len(changed) > MOST_CHANGED:
            return None
        for path in changed:
            mode, length = after[path][:2]
            if stat.S_ISLNK(mode):
                link = tarfile.TarInfo("changed/" + path)
                link.type, link.linkname = tarfile.SYMTYPE, os.readlink(os.path.join(root, path))
                tar.addfile(link)
            elif stat.S_ISREG(mode):
                size += length
                if size > most:
                    return None
                try:
                    with open(os.path.join(root, path), "rb") as file:
                        add(tar, "changed/" + path, file.read(length), mode)
                except OSError:
                    continue  # unreadable: as if it had not changed
    return body.getvalue() if body.tell() <= most else None


def add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), stat.S_IMODE(mode)
    tar.addfile(member, io.BytesIO(content))


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
    argv = [
        text.replace("{fd}", str(theirs.fileno())).replace("{python}", sys.executable)
        for text in order["argv"]
    ]
    order["channel"] = ours
    # More than a socket holds waits for the program to read it.
    say = base64.b64decode(order["say"])
    threading.Thread(target=deliver, args=(ours, say), daemon=True).start()
    facts = run(argv, {**os.environ, **order["env"]}, order["cwd"], b"", order, theirs)
    report = {name: facts[name] for name in ("ended_by", "status", "tail", "seconds")}
    report["said"] = base64.b64encode(facts["said"]).decode()
    report["files"] = left(workspace, order["bring"], order["output_bytes"])
    request("result", json.dumps(report).encode())
    return facts


def left(root: str, paths: list[str], most: int) -> dict[str, str]:
    """Those of `paths` that are files, and small, in base64: whoever ran may have left anything."""
    found: dict[str, str] = {}
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
                if content is not None and len(content) <= most:
                    found[path] = base64.b64encode(content).decode()
    return found


def deliver(channel: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):
        channel.sendall(content)


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
    tail, said = b"", b""
    sources = {output} | ({channel} if channel else set())
    while True:
        ready = select.select(list(sources), [], [], 0.1)[0]
        if output in ready:
            data = os.read(output, 1 << 16)
            sources.discard(output) if not data else None
            os.write(1, data[: max(room, 0)])
            room, tail = room - len(data), (tail + data)[-4000:]
            if room < 0:
                return "output", tail, said
        if channel in ready:
            data = channel.recv(1 << 16)
            sources.discard(channel) if not data else None
            said += data
            if len(said) > order["result_bytes"] // 2:
                return "output", tail, said
        reap(child)
        if child.poll() is not None and not ready:
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


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
