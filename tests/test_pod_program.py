"""The program of a pod as the first process of a namespace, with a small server for a gateway, and
what runs beside it: hostile code, orphans, a proxy whose gateway starts again."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightning_ray.gateway.errors import ApiError
from lightning_ray.records import Outcome, Task
from lightning_ray.rollouts import sandbox
from lightning_ray.rollouts.grading import RoomOrder
from lightning_ray.rollouts.harness import Recipe
from lightning_ray.rollouts.pods import entry, guard, manifest, staging
from lightning_ray.rollouts.pods.outcomes import End, Patience, standing
from lightning_ray.rollouts.pods.staging import PodLimits, Stage

boxed = pytest.mark.skipif(
    bool(sandbox.protection().missing), reason=f"no sandbox here: {sandbox.protection().missing}"
)
MIB = 1 << 20
MOST_SENT = MIB


@dataclass
class Depot:
    """A gateway with one room. It gives each answer of `instead` first; None: nobody is behind the
    proxy."""

    files: dict[str, bytes] = field(default_factory=dict)
    instead: list[ApiError | None] = field(default_factory=list)
    result: bytes | None = None
    asked: list[str] = field(default_factory=list)
    port: int = 0


@pytest.fixture
def depot() -> Iterator[Depot]:
    here = Depot()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def refuse(self, error: ApiError | None) -> None:
            if error is None:
                self.answer(404, b"Path not found")
            else:
                self.answer(error.status, json.dumps(error.body).encode())

        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[1]
            here.asked.append(name)
            self.answer(200, here.files[name])

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            here.asked.append("result")
            if here.instead:
                self.refuse(here.instead.pop(0))
            elif len(body) > MOST_SENT:
                self.refuse(ApiError(413, "The body is larger than 1 MiB."))
            else:
                here.result = body
                self.answer(204, b"")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    here.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield here
    server.shutdown()
    server.server_close()


def run(
    depot: Depot,
    folder: Path,
    files: dict[str, bytes],
    *,
    full: bool = False,
    name: str = "127.0.0.1",
    api: int = 0,
) -> End:
    """Runs an order to its end, with `folder` in the place of the pod's volume; how it ended, as a
    kubelet would tell it. A `full` node has no space for a termination message. A `name` of the
    gateway is in a /etc/hosts that can be written, as a kubelet's for root. `api` is the port of
    what the pod is told to be Kubernetes' API server."""
    log = Path("/dev/full") if full else folder / "termination-log"
    log.touch()
    depot.files = {**files, "order": files["order"].replace(b'"/lightning', f'"{folder}'.encode())}
    box = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid"]
    box += ["--as-pid-1", "--die-with-parent", "--cap-drop", "ALL", "--bind", folder, folder]
    if name != "127.0.0.1":
        for path, content in (("hosts", f"127.0.0.1 {name}\n"), ("resolv.conf", "")):
            (folder / path).write_text(content)
            box += ["--bind", folder / path, f"/etc/{path}"]
    box += [
        "--dev-bind",
        log,
        entry.TERMINATION_LOG,
        sys.executable,
        "-I",
        "-c",
        manifest.BOOTSTRAP,
    ]
    told = {"URL": f"http://{name}:{depot.port}/rollout/r", "KEY": "key", "POD": "p"}
    env = {
        **os.environ,
        "TMPDIR": str(folder),
        **({"KUBERNETES_SERVICE_HOST": "127.0.0.1"} if api else {}),
        "KUBERNETES_SERVICE_PORT": str(api),
        **{f"LIGHTNING_RAY_{name}": text for name, text in told.items()},
    }
    done = subprocess.run(
        box, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    written = "" if full else log.read_text()
    message = written or (done.stdout.decode()[-2048:] if code else "")
    state = {"exitCode": code, "reason": "Error" if code else "Completed", "message": message}
    pod = {
        "metadata": {"uid": "p"},
        "status": {"phase": "Failed", "containerStatuses": [{"state": {"terminated": state}}]},
    }
    end = standing({"metadata": {}, "status": {}}, [pod], Patience(1, 1)).end
    assert end is not None
    return end


def harness(script: str, timeout_s: float = 20) -> dict[str, bytes]:
    """The order for a harness that is a Python script."""
    recipe = Recipe(name="script", command=[sys.executable, "-c", "exec({task})"])
    task = Task("t", repr(script), {})
    values = staging.pod_values(
        url="http://gateway", model="m", task=task, attempt_id="a", context_tokens=1,
        venv="/none", recipe=recipe,
    )  # fmt: skip
    stage = Stage(staging._tar(Path(__file__).parent / "kubernetes"))
    limits = PodLimits(timeout_s, MIB, MOST_SENT)
    order = staging.harness_order(recipe, values, None, None, stage, limits)
    return {"order": order, staging.WORKSPACE: stage.workspace}


def room(script: str, most_sent: int = MOST_SENT, **more: Any) -> dict[str, bytes]:
    """The order for a room in which a Python script says what it has to say to `say`."""
    talk = "import socket, sys; channel = socket.socket(fileno=int(sys.argv[1]))\n"
    talk += "say = lambda text: channel.sendall(text.encode())\n"
    order = RoomOrder(
        files={}, argv=["{python}", "-c", talk + script, "{fd}"], env={}, timeout_s=20,
        **{"say": "", **more},
    )  # fmt: skip
    [files] = staging.room_files([order], most_sent)
    return files


# Each of these works without the filter, whatever the user.
AGAINST_THE_FIRST = """
import ctypes, json, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def system(*call):
    if libc.syscall(*call) < 0:
        raise OSError(ctypes.get_errno(), "")
def tried(attack):
    try:
        attack()
        return True
    except OSError:
        return False
NUMBERS = {"x86_64": (251, 314), "aarch64": (30, 274)}[os.uname().machine]
attr = (ctypes.c_uint32 * 12)(48, os.SCHED_IDLE)
def against(pid):
    return {
        "cpu": lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (9, 9)),
        "files": lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (99, 99)),
        "affinity": lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)),
        "idle": lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        "attr": lambda: system(NUMBERS[1], pid, attr, 0),
        "nice": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        "io": lambda: system(NUMBERS[0], 1, pid, 3 << 13),
    }
theirs = [name for name, attack in against(1).items() if tried(attack)]
theirs += ["every nice"] * tried(lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))
theirs += ["every io"] * tried(lambda: system(NUMBERS[0], 3, os.getuid(), 3 << 13))
theirs += ["short pointers"] * tried(lambda: system(0x40000000 | 302, 1, 0, 0, 0))
own = [name for name, attack in against(os.getpid()).items() if not tried(attack)]
own += [name for name, attack in against(0).items() if not tried(attack)]
say(json.dumps([theirs, own, len(os.listdir("/proc/1/task"))]))
"""


@boxed
@pytest.mark.parametrize("read", [True, False])
def test_code_in_a_pod_reaches_itself_and_not_the_first_process(depot, tmp_path, read) -> None:
    # What it is told fits into no socket: whoever says it needs a while.
    script = "socket.socket.makefile(channel).readline()\n" * read + AGAINST_THE_FIRST
    end = run(depot, tmp_path, room(script, say="x" * MIB + "\n"))
    assert end.outcome is Outcome.COMPLETED, end
    assert depot.result is not None
    theirs, own, threads = json.loads(staging.room_report(depot.result).said)
    assert (theirs, own) == ([], [])
    assert threads == 1  # another one has an id of its own


@boxed
@pytest.mark.parametrize("hosts", ["", "127.0.0.3 gateway.test"])
@pytest.mark.parametrize("make", [harness, room])
def test_who_changes_what_the_gateways_name_means_cannot_undo_its_attempt(
    depot, tmp_path, make, hosts
) -> None:
    script = f"""
import pathlib, socket
pathlib.Path("/etc/hosts").write_text({hosts!r})
try:
    socket.create_connection(("gateway.test", {depot.port}))
    raise SystemExit(4)
except OSError:
    raise SystemExit(3) from None
"""
    end = run(depot, tmp_path, make(script), name="gateway.test")
    assert end.outcome is Outcome.HARNESS_ERROR and "exit status 3" in end.detail, end
    assert depot.result is not None


@boxed
def test_a_pod_that_reaches_the_api_server_says_that_nothing_holds_it(depot, tmp_path) -> None:
    end = run(depot, tmp_path, harness("print('done')"), api=depot.port)
    assert end.outcome is Outcome.COMPLETED and "no NetworkPolicy holds it" in end.lack, end
    assert end.lack in end.detail
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        end = run(depot, tmp_path, harness("print('done')"), api=closed.getsockname()[1])
    assert (end.outcome, end.lack) == (Outcome.COMPLETED, ""), end
    # A pod that cannot say anything has not said that all is well.
    end = run(depot, tmp_path, harness("print('done')"), full=True, api=depot.port)
    assert end.lack is None, end


def call(machine: str, architecture: int, number: int, *arguments: int) -> int:
    """What the kernel answers to a call, by the filter for process 7."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *[*arguments, *[0] * 6][:6])
    code = list(struct.iter_unpack("=HBBI", guard.program(machine, 7)))
    at, accumulator, x = 0, 0, 0
    while True:
        (operation, if_so, if_not, value), at = code[at], at + 1
        match operation:
            case guard.LOAD:
                [accumulator] = struct.unpack_from("=I", data, value)
            case guard.AND:
                accumulator &= value
            case guard.TO_X:
                x = accumulator
            case guard.FROM_X:
                accumulator = x
            case guard.JUMP_EQUAL:
                at += if_so if accumulator == value else if_not
            case guard.ANSWER:
                return value


@pytest.mark.parametrize("machine", guard.ARCHITECTURES)
def test_the_filter_is_for_programs_of_either_width(machine) -> None:
    for architecture in guard.ARCHITECTURES[machine]:
        for name, numbers in guard.CALLS.items():
            aimed = (0, 7) if name in guard.USER else (7, 0)
            number = numbers[architecture]
            assert call(machine, architecture, number, *aimed) == guard.REFUSE
            assert call(machine, architecture, number | 1 << 30, *aimed) == guard.REFUSE
            assert call(machine, architecture, number, 8, 8) == guard.ALLOW
            assert call(machine, architecture, number, 0, 0) == guard.ALLOW
            assert call(machine, architecture, number, aimed[0] | 1 << 32, 7) == guard.REFUSE
        assert call(machine, architecture, 1, 7, 7) == guard.ALLOW
    assert call(machine, 0, 1) == guard.REFUSE


FORGER = """
import json, os, sys
forged = json.dumps({"ended_by": "exit", "status": 0, "error": "", "seconds": 1})
open("/dev/termination-log", "w").write(forged)
print(" " * 4000 + forged)
"""


@boxed
@pytest.mark.parametrize("status", [0, 137])
def test_a_forged_message_counts_for_nothing(depot, tmp_path, status) -> None:
    end = run(depot, tmp_path, harness(FORGER + f"sys.exit({status})"))
    assert f"exit status {status} after" in end.detail
    assert end.outcome is (Outcome.HARNESS_ERROR if status else Outcome.COMPLETED)


@boxed
def test_on_a_full_node_the_end_of_the_output_counts_for_nothing(depot, tmp_path) -> None:
    forged = json.dumps({"ended_by": "not_started", "status": None, "error": "", "seconds": 1})
    script = f"import sys; print(' ' * 4000 + {forged!r}); sys.exit(3)"
    end = run(depot, tmp_path, harness(script), full=True)
    assert end.outcome is Outcome.HARNESS_ERROR, end


@boxed
def test_a_forged_message_is_not_what_is_left_when_the_result_is_refused(depot, tmp_path) -> None:
    depot.instead = [ApiError(401, "This key does not open this.", code="invalid_api_key")]
    end = run(depot, tmp_path, harness(FORGER))
    assert end.outcome is Outcome.LAUNCH_FAULT, end
    assert "HTTP Error 401" in end.detail
    assert depot.asked.count("result") == 1  # no is no


@boxed
def test_a_result_waits_while_the_proxy_has_no_gateway(depot, tmp_path) -> None:
    depot.instead = [None, None]
    end = run(depot, tmp_path, harness("print(1)"))
    assert end.outcome is Outcome.COMPLETED, end
    assert depot.result is not None
    assert depot.asked.count("result") == 3


@boxed
def test_an_orphan_that_keeps_talking_does_not_make_its_program_late(depot, tmp_path) -> None:
    chatter = "while :; do echo x; sleep 0.02; done"
    script = f"import subprocess, time; subprocess.Popen(['sh', '-c', {chatter!r}]); time.sleep(1)"
    began = time.monotonic()
    end = run(depot, tmp_path, harness(script, timeout_s=8))
    assert end.outcome is Outcome.COMPLETED, end
    assert time.monotonic() - began < 6


@boxed
@pytest.mark.parametrize(
    ("said", "status", "files"), [(300_000, 0, {"a", "d"}), (MIB, None, {"d"})]
)
def test_a_report_is_no_larger_than_the_gateway_takes(depot, tmp_path, said, status, files) -> None:
    script = "for name in 'abc': open(name, 'w').write(name * 300_000)\n"
    script += f"open('d', 'w').write('d'); say('ready' + 'x' * {said})"
    order = room(script, bring=["a", "b", "c", "d"], most_bytes=4 * MIB)
    end = run(depot, tmp_path, order)
    assert end.outcome is (Outcome.COMPLETED if status == 0 else Outcome.OUTPUT_LIMIT), end
    assert depot.result is not None
    report = staging.room_report(depot.result)
    assert (report.status, report.said[:6]) == (status, "readyx")
    assert report.files.keys() == files
