"""What a harness can do to its machine: attacks by real processes, with and without the sandbox.

Every attack is tried three times: without a sandbox, where it works (else the test would show
nothing), by a program executed in the sandbox, and by one forked into it from a warm interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightning_ray.config import ConfigError, load
from lightning_ray.records import Outcome, Task
from lightning_ray.rollouts import forkserver, harness, process, sandbox, syscalls, usage
from lightning_ray.rollouts.forkserver import Preload
from lightning_ray.rollouts.harness import Recipe
from lightning_ray.rollouts.local import AttemptRequest, AttemptResult, run_attempt
from lightning_ray.rollouts.places import IN_SANDBOX, Places
from lightning_ray.rollouts.process import EndedBy, ExitReport, Limits
from lightning_ray.rollouts.sandbox import Mode, Protection, SandboxError, Wanted

MIB = 1 << 20
HOW = ("none", "executed", "forked")

boxed = pytest.mark.skipif(
    bool(sandbox.protection().missing), reason=f"no sandbox here: {sandbox.protection().missing}"
)

# Prints which attacks worked. `A` is what the test tells it of the world outside.
ATTACKS = """
import ctypes, json, os, signal, socket, subprocess, sys
A = json.load(sys.stdin)
libc = ctypes.CDLL(None, use_errno=True)
PARENT = os.getppid()

def read(path):
    return "secret" in open(path).read()

def connects(*address):
    kind = socket.AF_INET if len(address) == 2 else socket.AF_UNIX
    with socket.socket(kind) as s:
        s.settimeout(3)
        s.connect(address if len(address) == 2 else address[0])
        return True

def opens(path, flags):
    os.close(os.open(path, flags))
    return True

def calls(number):
    return number == 0

def link_out():
    os.link(A["other"], "hard")
    return True

def swap_workspace():
    os.rename(A["workspace"], A["workspace"] + ".old")
    os.rename(A["workspace"] + ".old", A["workspace"])
    return True

def status(name):
    return dict(l.split(":", 1) for l in open("/proc/self/status"))[name].strip()

attacks = {
    "read another rollout's workspace": lambda: read(A["other"]),
    "read the run directory": lambda: read(A["run_file"]),
    "read the operator's home": lambda: read(A["home_file"]),
    "read the operator's part of /etc": lambda: os.path.exists("/etc/fstab"),
    "read the environment of another process": lambda: read(f"/proc/{A['pid']}/environ"),
    "signal another process": lambda: os.kill(A["pid"], 0) is None,
    "trace another process": lambda: calls(libc.ptrace(16, A["pid"], 0, 0)),
    "kill its parent": lambda: PARENT > 1 and os.kill(PARENT, 0) is None,
    "connect to another port of the machine": lambda: connects("127.0.0.1", A["port"]),
    "connect to an address of the machine": lambda: connects(A["address"], A["port"]),
    "connect to a socket in the abstract namespace": lambda: connects(A["abstract"]),
    "see shared memory of others": lambda: os.path.exists(A["shm"]),
    "write to the system": lambda: opens("/usr/bin/env", os.O_WRONLY),
    "write to a setting of the kernel": lambda: opens("/proc/sys/kernel/core_pattern", os.O_WRONLY),
    "write to its own environment": lambda: opens(A["venv_file"], os.O_WRONLY),
    "make a user namespace": lambda: calls(libc.unshare(0x10000000)),
    "have a capability": lambda: int(status("CapEff"), 16) != 0,
    "get a capability": lambda: int(status("CapBnd"), 16) != 0,
    "swap its workspace for a link": swap_workspace,
    "link a file of others into its workspace": link_out,
    "take memory that no process has mapped": lambda: fill(A["memory"]),
    "leave a message in the kernel's keyring": lambda: adds_key(),
    "ask what the page cache holds": lambda: asks_cache(),
    "take a file out of the page cache": lambda: drops(),
}

def adds_key():
    number = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
    return libc.syscall(number, b"user", b"lr-test", b"message", 7, -3) > 0

def asks_cache():
    file = open(sys.executable, "rb", buffering=0)
    file.read(1)
    return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1

def drops():
    file = open(sys.executable, "rb")
    return os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED) is None

def fill(path):
    with open(path, "wb") as f:
        for _ in range(80):
            f.write(bytes(1 << 20))
        f.flush()
    os.unlink(path)
    return True

def tried(attack):
    # In a process of its own: what one attack does must not help the next.
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.write(write, b"1" if attack() else b"0")
        finally:
            os._exit(0)
    os.close(write)
    return os.read(read, 1) == b"1"

print(json.dumps({name: tried(attack) for name, attack in attacks.items()}))
"""
NAMES = [
    line.split('"')[1] for line in ATTACKS.splitlines() if line.startswith('    "') and ":" in line
]
# These do not work for an ordinary user anyway.
ROOT_ONLY = {
    "trace another process",
    "have a capability",
    "write to the system",
    "write to a setting of the kernel",
}


# A container around us may refuse these already.
REFUSED_BY_CONTAINERS = {"leave a message in the kernel's keyring"}


@dataclass(frozen=True)
class Place:
    """An attempt's folder, as `local.py` makes it, in a run directory beside others."""

    folder: Path

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @classmethod
    def make(cls, folder: Path) -> Place:
        for name in ("workspace", "home", "tmp"):
            (folder / name).mkdir(parents=True)
        (folder / "task.txt").write_text("the task")
        return cls(folder)

    def seen(self, how: str) -> Places:
        """Where the program finds it."""
        return Places.below(self.folder) if how == "none" else IN_SANDBOX

    def run(
        self,
        source: str,
        how: str = "executed",
        *,
        url: str = "http://127.0.0.1:1",
        stdin: str = "",
        cwd: str = "",
        in_workspace: bool = False,
        **limits: Any,
    ) -> ExitReport:
        script = (self.workspace if in_workspace else self.folder) / "script"
        script.write_text(source)
        wanted = Wanted(Mode.NONE) if how == "none" else Wanted(require=True)
        readable = [Path(sys.base_prefix), Path(sys.prefix), script]
        box, inside = sandbox.around(self.folder, url, readable, wanted)
        assert (box is None) == (how == "none")
        places = self.seen(how)
        script = Path(places.workspace, "script") if in_workspace else script
        argv = [str(script)] if how == "forked" else [sys.executable, "-S", str(script)]
        preload = Preload(sys.executable, ("decimal",), (("T", uuid.uuid4().hex),))
        try:
            return process.run(
                argv,
                env=process.base_environment(places.home, places.tmp) | {"URL": inside},
                cwd=Path(cwd or places.workspace),
                log=self.folder / "log",
                limits=Limits(**{"timeout_s": 60, **limits}),
                attempt_id=f"sandbox-{self.folder.name}",
                stdin=stdin,
                preload=preload if how == "forked" else None,
                sandbox=box,
                disk=self.folder,
            )
        finally:
            if connection := forkserver._connections.pop(preload, None):
                connection.close()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.make(tmp_path / "attempt")


@boxed
@pytest.mark.parametrize("how", ["executed", "forked"])
def test_a_program_may_lie_in_its_workspace(place: Place, how: str) -> None:
    report = place.run("print(__file__)", how, in_workspace=True)
    assert (report.status, report.output_tail) == (0, f"{IN_SANDBOX.workspace}/script\n")


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, bool]]]:
    """Which attack worked, for each way to run a program."""
    root = tmp_path_factory.mktemp("world")
    other, run_file, home_file = root / "lr-1/workspace/x", root / "run/store/x", root / "me/.netrc"
    for path in (other, run_file, home_file):
        path.parent.mkdir(parents=True)
        path.write_text("secret")
    shm = Path(f"/dev/shm/lr-{uuid.uuid4().hex}")
    shm.write_text("x")
    venv_file = Path(sys.prefix) / "pyvenv.cfg"
    with contextlib.ExitStack() as world:
        world.enter_context(pytest.MonkeyPatch.context()).setenv("HOME", str(root / "me"))
        world.callback(shm.unlink)
        ports = world.enter_context(socket.create_server(("0.0.0.0", 0)))
        abstract = world.enter_context(socket.socket(socket.AF_UNIX))
        name = f"\0lr-{uuid.uuid4().hex}"
        abstract.bind(name)
        abstract.listen()
        victim = subprocess.Popen(["sleep", "600"], env={"KEY": "secret"})
        world.callback(victim.wait)
        world.callback(victim.kill)
        told = {
            "other": str(other), "run_file": str(run_file), "home_file": str(home_file),
            "pid": victim.pid, "port": ports.getsockname()[1], "abstract": name,
            "address": _own_address(), "shm": str(shm), "venv_file": str(venv_file),
            "memory": f"/dev/shm/lr-{uuid.uuid4().hex}",
        }  # fmt: skip
        results = {}
        for how in HOW if not sandbox.protection().missing else HOW[:1]:
            place = Place.make(root / how)
            told["workspace"] = place.seen(how).workspace
            report = place.run(ATTACKS, how, stdin=json.dumps(told))
            assert report.status == 0, report
            results[how] = json.loads(report.output_tail.splitlines()[-1])
        yield results


def _own_address() -> str:
    """An address of this machine other than 127.0.0.1, which is still the machine's own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.2"


@boxed
@pytest.mark.parametrize("name", NAMES)
def test_an_attack_works_only_without_the_sandbox(worked: dict, name: str) -> None:
    assert not worked["executed"][name]
    assert not worked["forked"][name]
    if (os.getuid() == 0 or name not in ROOT_ONLY) and name not in REFUSED_BY_CONTAINERS:
        assert worked["none"][name], "an attack that never works shows nothing"


# -- the network ----------------------------------------------------------------------------------


class Gateway(BaseHTTPRequestHandler):
    """Streams half of its answer, and the rest when it is told to."""

    protocol_version = "HTTP/1.1"
    go_on = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for chunk in (b"first", body):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.flush()
            self.go_on.wait(20)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Gateway.go_on.clear()
    yield f"http://localhost:{server.server_port}/rollout/r-a0"
    server.shutdown()
    server.server_close()


CLIENT = """
import os, http.client, urllib.parse
url = urllib.parse.urlsplit(os.environ["URL"])
c = http.client.HTTPConnection(url.hostname, url.port)
for body in (b"x" * 3_000_000, b"again"):
    c.request("POST", url.path, body)
    r = c.getresponse()
    print(r.read(5).decode(), flush=True)
    open("seen", "w").close()
    assert r.read() == body
print("all")
"""


@boxed
@pytest.mark.parametrize("how", ["executed", "forked"])
def test_the_gateway_is_reached_and_streams(place: Place, gateway: str, how: str) -> None:
    def when_seen() -> None:
        deadline = time.monotonic() + 20
        while not (place.workspace / "seen").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        Gateway.go_on.set()

    threading.Thread(target=when_seen).start()
    report = place.run(CLIENT, how, url=gateway)
    assert report.output_tail.split() == ["first", "first", "all"], report
    assert (place.workspace / "seen").exists()


@boxed
def test_a_gateway_that_is_away_is_a_lost_connection_not_the_end(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    source = f"""
import socket
for _ in range(100):
    with socket.create_connection(("127.0.0.1", {port})) as s:
        print(s.recv(1))
"""
    report = place.run(source, url=f"http://127.0.0.1:{port}")
    assert report.output_tail.split() == ["b''"] * 100


@boxed
def test_connections_beyond_the_limit_wait_instead_of_using_up_the_worker(
    place: Place, gateway: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    most = [0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            most[0] = max(most[0], len(os.listdir("/proc/self/fd")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    source = """
import os, socket, time, urllib.parse
url = urllib.parse.urlsplit(os.environ["URL"])
held = [socket.create_connection((url.hostname, url.port)) for _ in range(180)]
time.sleep(1)
print(len(held))
"""
    report = place.run(source, url=gateway)
    stop.set()
    watcher.join()
    assert report.output_tail == "180\n", report
    # Two for each connection that is carried, and the gateway of this test has as many again.
    assert before + 2 * 64 < most[0] < before + 3 * 64 + 30
    assert len(os.listdir("/proc/self/fd")) < before + 10


def test_inside_the_gateway_is_on_loopback_and_a_name_stays_its_name() -> None:
    plain = sandbox._inside("http://10.0.0.7:8765/rollout/a")
    assert plain == ("10.0.0.7", 8765, "http://127.0.0.1:8765/rollout/a")
    assert sandbox._inside("http://gateway:1/a") == ("gateway", 1, "http://gateway:1/a")
    secure = sandbox._inside("https://gateway.example.org/rollout/a")
    assert secure == ("gateway.example.org", 443, "https://gateway.example.org/rollout/a")


# -- limits ---------------------------------------------------------------------------------------


@boxed
@pytest.mark.parametrize("how", ["executed", "forked"])
def test_a_fork_bomb_ends_and_leaves_nothing(place: Place, how: str) -> None:
    # It goes on when the kernel's own limit refuses it, else it might end before anybody looks.
    bomb = (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    report = place.run(bomb, how, max_processes=30)
    assert report.ended_by is EndedBy.PROCESSES
    assert process.marked(f"sandbox-{place.folder.name}") == []


@boxed
@pytest.mark.parametrize("how", ["executed", "forked"])
def test_a_memory_bomb_ends(place: Place, how: str) -> None:
    source = "held = []\nwhile True:\n    held.append(bytearray(b'x') * (8 << 20))\n"
    report = place.run(source, how, memory_mib=200)
    assert report.ended_by is EndedBy.MEMORY


@boxed
def test_memory_that_no_process_has_mapped_is_limited_where_there_are_control_groups(
    place: Place,
) -> None:
    group = usage.make_cgroup("lr-test", 1 << 30, 100)
    if group is None:
        pytest.skip("no control group can be made here")
    group.remove()
    source = """
import os
for i in range(40):
    fd = os.memfd_create(str(i))
    for _ in range(16):
        os.write(fd, bytes(1 << 20))
print("took 640 MiB")
"""
    report = place.run(source, memory_mib=200)
    assert "took" not in report.output_tail
    assert report.ended_by is EndedBy.MEMORY


FILL = """
import os, time
for i in range(1000):
    with open(f"{%r}/{i}", "wb") as f:
        f.write(bytes(1 << 20))
        %s
    time.sleep(0.005)
"""


@boxed
@pytest.mark.parametrize("where", [".", "/tmp", "deleted"])
def test_many_files_that_fill_the_disk_end(place: Place, where: str) -> None:
    source = FILL % (where, "pass")
    if where == "deleted":
        source = FILL % (".", "os.unlink(f.name); os.dup(f.fileno())")
    report = place.run(source, disk_mib=64)
    assert report.ended_by is EndedBy.DISK, report


def test_empty_files_fill_a_disk_too(place: Place) -> None:
    source = "i = 0\nwhile True:\n    open(str(i), 'w').close()\n    i += 1\n"
    report = place.run(source, "none", disk_mib=8)
    assert report.ended_by is EndedBy.DISK, report


def test_a_disk_that_others_fill_ends_nobody(place: Place) -> None:
    def others() -> None:
        while not (place.workspace / "started").exists():
            time.sleep(0.01)
        (place.folder.parent / "others").write_bytes(bytes(40 * MIB))
        (place.workspace / "go").touch()

    thread = threading.Thread(target=others)
    thread.start()
    source = """
import os, time
open("started", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
time.sleep(0.7)
print("done")
"""
    report = place.run(source, "none", disk_mib=16)
    thread.join()
    assert (report.ended_by, report.output_tail) == (EndedBy.EXIT, "done\n")


@boxed
@pytest.mark.parametrize("how", ["executed", "forked"])
def test_what_is_left_in_the_background_dies_with_the_program(place: Place, how: str) -> None:
    name = uuid.uuid4().hex
    source = f"""
import os, subprocess, time
subprocess.Popen(["bash", "-c", "exec -a {name} sleep 60"], start_new_session=True, env={{}})
while not any("{name}" in open(f"/proc/{{p}}/cmdline").read()
              for p in os.listdir("/proc") if p.isdigit()):
    time.sleep(0.01)
"""
    report = place.run(source, how)
    assert (report.ended_by, report.status) == (EndedBy.EXIT, 0), report
    assert name not in subprocess.check_output(["ps", "axww"], text=True)


@boxed
@pytest.mark.parametrize("how", ["executed", "forked"])
def test_killing_all_that_it_sees_ends_only_itself(place: Place, how: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as outside:
        report = place.run("import os\nos.kill(-1, 9)\nimport time\ntime.sleep(9)", how)
        assert (report.ended_by, report.status) == (EndedBy.SIGNAL, signal.SIGKILL)
        assert outside.poll() is None
        outside.kill()


# -- places ---------------------------------------------------------------------------------------


@boxed
@pytest.mark.parametrize("how", HOW)
def test_a_folder_that_is_not_there_is_an_error_of_the_start(place: Place, how: str) -> None:
    gone = f"{place.seen(how).workspace}/gone"
    report = place.run("print('ran')", how, cwd=gone)
    assert (report.ended_by, report.error) == (
        EndedBy.NOT_STARTED,
        f"there is no folder {gone}",
    )


@boxed
@pytest.mark.parametrize("how", ["executed", "forked"])
def test_a_program_starts_in_a_folder_of_the_sandbox(place: Place, how: str) -> None:
    (place.workspace / "below").mkdir()
    source = "import os; print(os.getcwd())"
    for cwd in (IN_SANDBOX.workspace, f"{IN_SANDBOX.workspace}/below", IN_SANDBOX.home, "/tmp"):
        report = place.run(source, how, cwd=cwd)
        assert report.output_tail.split() == [cwd], report


# Everything that a harness could tell a model of the places that it finds itself in.
SAYS = """
import json, os, sys
told = dict(os.environ)
print(json.dumps({
    "argv": sys.argv[1:], "cwd": os.getcwd(), "env": {k: told[k] for k in sorted(told)},
    "file": open(os.path.expanduser("~/told/file")).read(), "task": open(sys.argv[1]).read(),
    "mounts": sorted(line.split()[1] for line in open("/proc/mounts")),
    **{at: sorted(os.listdir(at)) for at in ("/", "/lightning", "/tmp", os.path.expanduser("~"))},
}))
open(os.path.expanduser("~/kept"), "w").write("kept")
open("a.py", "w").write("a = 2\\n")
"""


def prepare(task: Task, workspace: Path) -> dict[str, Any]:
    """Names the workspace as a task family knows it."""
    (workspace / "a.py").write_text("a = 1\n")
    (workspace / "bin").mkdir()
    return {"env": {"PYTHONPATH": f"{workspace}:{workspace}/src"}, "path": [f"{workspace}/bin"]}


def collect(task: Task, workspace: Path) -> dict[str, str]:
    return {"a.py": (workspace / "a.py").read_text()}


def says(folder: Path, **changes: Any) -> str:
    """What the harness of an attempt says of its places."""
    recipe = Recipe(
        name="script",
        command=[sys.executable, "-S", "-c", SAYS, "{task_file}", "{workspace}", "{home}"],
        files={"{home}/told/file": "{workspace} {home} {task_file}"},
        env={"OWN": "{home}/own"},
        artifacts=["{home}/kept", "{workspace}/a.py"],
    )
    family = {"prepare": "test_sandbox:prepare", "collect": "test_sandbox:collect"}
    ended = attempt(folder, "", recipe=recipe, **family, **changes)
    assert (ended.outcome, ended.result) == (Outcome.COMPLETED, {"a.py": "a = 2\n"}), ended
    log_dir = folder / "run" / "rollouts" / "a"
    assert {path.name for path in log_dir.iterdir()} == {"harness.log", "kept", "a.py"}
    return (log_dir / "harness.log").read_text()


@boxed
def test_every_rollout_sees_the_same_paths(tmp_path: Path) -> None:
    said = says(tmp_path / "one")
    assert said == says(tmp_path / "two")
    assert "lr-box-" not in said
    told = json.loads(said)
    workspace, home, task = "/lightning/workspace", "/lightning/home", "/lightning/task.txt"
    assert told["argv"] == [task, workspace, home]
    assert told["cwd"] == workspace
    assert told["file"] == f"{workspace} {home} {task}"
    assert told["task"] == "do it"
    env = told["env"]
    assert (env["HOME"], env["TMPDIR"], env["OWN"]) == (home, "/tmp", f"{home}/own")
    assert env["PYTHONPATH"] == f"{workspace}:{workspace}/src"
    assert env["PATH"].split(":")[0] == f"{workspace}/bin"
    assert told["/lightning"] == ["home", "task.txt", "workspace"]
    assert {workspace, home, task, "/tmp"} <= {*told["mounts"]}


def test_without_a_sandbox_a_rollout_has_folders_of_its_own(tmp_path: Path) -> None:
    none = Wanted(Mode.NONE)
    script = "import os; print(os.getcwd(), os.environ['HOME'], os.environ['TMPDIR'])"
    folders = []
    for name in ("one", "two"):
        assert attempt(tmp_path / name, script, sandbox=none).outcome is Outcome.COMPLETED
        log = tmp_path / name / "run" / "rollouts" / "a" / "harness.log"
        cwd, home, tmp = log.read_text().split()
        [root] = {Path(folder).parent for folder in (cwd, home, tmp)}
        assert [cwd, home, tmp] == [f"{root}/workspace", f"{root}/home", f"{root}/tmp"]
        folders.append(root)
    assert folders[0] != folders[1]


# -- whole attempts -------------------------------------------------------------------------------


def attempt(folder: Path, script: str, **changes: Any) -> AttemptResult:
    recipe = Recipe(
        name="script",
        command=[sys.executable, "-S", "-c", script],
        artifacts=["{home}/link", "{home}/way/secret", "{home}/kept"],
        env={"URL": "{base_url}", "WORKSPACE": "{workspace}"},
    )
    request = AttemptRequest(
        attempt_id=f"attempt-{os.getpid()}",
        task=Task("t", "do it", {"files": {"a.py": "a = 1\n"}}),
        recipe=recipe,
        root_url="http://127.0.0.1:1",
        model="policy",
        context_tokens=4096,
        limits=Limits(timeout_s=20),
        log_dir=folder / "run" / "rollouts" / "a",
        prepare="lightning_ray.tasks.swe.workspace:prepare",
        collect="lightning_ray.tasks.swe.workspace:collect",
        keep_workspaces=False,
        api_key="the-key",
    )
    return run_attempt(dataclasses.replace(request, **changes))


@boxed
def test_links_out_of_the_workspace_bring_nothing_into_the_result(tmp_path: Path) -> None:
    secret = tmp_path / "run" / "secret"
    secret.parent.mkdir()
    secret.write_text("the secret")
    script = f"""
import os
os.symlink({str(secret)!r}, "leak.txt")
os.symlink({str(secret.parent)!r}, "folder")
os.symlink({str(secret)!r}, os.path.expanduser("~/link"))
os.symlink({str(secret.parent)!r}, os.path.expanduser("~/way"))
open(os.path.expanduser("~/kept"), "w").write("kept")
open("a.py", "w").write("a = 2\\n")
try:
    os.rename(os.getcwd(), os.getcwd() + "-")
    os.symlink({str(secret.parent)!r}, os.environ["WORKSPACE"])
except OSError as error:
    print(error)
"""
    ended = attempt(tmp_path, script)
    assert ended.outcome is Outcome.COMPLETED, ended
    assert ended.result is not None
    assert ended.result == {
        "files": {"a.py": "a = 2\n"},
        "refused": [
            {"path": "folder", "reason": "not a regular file"},
            {"path": "leak.txt", "reason": "not a regular file"},
        ],
        "patch": ended.result["patch"],
    }
    assert "secret" not in ended.result["patch"]
    log_dir = tmp_path / "run" / "rollouts" / "a"
    assert {path.name for path in log_dir.iterdir()} == {"harness.log", "kept"}
    # Without a sandbox the workspace itself can become a link, and `collect` then reads its target.
    unsafe = attempt(tmp_path, script, sandbox=Wanted(Mode.NONE))
    assert unsafe.result is not None
    assert "the secret" in unsafe.result["files"].values()


@boxed
def test_the_run_directory_stays_hidden_in_a_folder_that_is_shown(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "store").mkdir(parents=True)
    (tmp_path / "data").write_text("shown")
    script = (
        f"import os; print(os.listdir({str(run_dir)!r}), open({str(tmp_path)!r} + '/data').read())"
    )
    wanted = Wanted(require=True, paths=(str(tmp_path),), hidden=(run_dir,))
    assert attempt(tmp_path, script, sandbox=wanted).outcome is Outcome.COMPLETED
    assert (run_dir / "rollouts" / "a" / "harness.log").read_text() == "[] shown\n"


def test_a_recipe_shows_what_its_command_names(tmp_path: Path) -> None:
    tool, venv = tmp_path / "tool", tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (tmp_path / "agent").symlink_to(shutil.which("true") or "/bin/true")
    recipe = Recipe(
        name="own",
        command=[
            "agent",
            str(venv / "bin" / "python"),
            str(tool),
            "pkg:lightning_ray.tasks.swe/mini.yaml",
        ],
        env={"HERE": "{recipe_dir}"},
        recipe_dir=str(tmp_path / "recipes"),
    )
    shown = harness.readable(recipe, None, f"{tmp_path}:/usr/bin:/bin")
    expected = {tmp_path / "agent", venv, tool, tmp_path / "recipes", Path(sys.base_prefix)}
    assert expected <= set(shown)
    assert any(path.name == "mini.yaml" for path in shown)


# -- machines that cannot -------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    sandbox.protection.cache_clear()
    yield monkeypatch
    sandbox.protection.cache_clear()


def test_without_bubblewrap_a_run_says_so_or_stops(
    elsewhere: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere.setenv("PATH", str(tmp_path))
    note = sandbox.check(Wanted())
    assert note is not None
    assert note.startswith("harnesses run without a sandbox: bubblewrap is not installed (")
    for wanted in (Wanted(require=True), Wanted(Mode.BUBBLEWRAP)):
        with pytest.raises(SandboxError, match="Install bubblewrap"):
            sandbox.check(wanted)
    elsewhere.setenv("PATH", os.defpath)  # the harness wants one
    ended = attempt(tmp_path, "print('ran')")
    assert ended.outcome is Outcome.COMPLETED
    assert (ended.node, ended.lack) == (socket.gethostname(), note)
    ended = attempt(tmp_path, "print('ran')", sandbox=Wanted(require=True))
    assert ended.outcome is Outcome.LAUNCH_FAULT
    assert f"node {ended.node}: " in ended.detail
    assert "bubblewrap is not installed" in ended.detail
    assert attempt(tmp_path, "print('ran')", sandbox=Wanted(Mode.NONE)).lack == ""


def test_a_pod_without_a_sandbox_says_what_its_specification_lacks(
    elsewhere: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere.setenv("PATH", str(tmp_path))
    elsewhere.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    note = sandbox.check(Wanted())
    assert note is not None
    for field in ("seccompProfile", "procMount: Unmasked", "hostUsers: false", "appArmorProfile"):
        assert field in note


def test_no_sandbox_is_asked_for_by_name_and_said() -> None:
    note = sandbox.check(Wanted(Mode.NONE))
    assert note is not None
    assert "rollout.sandbox=none" in note
    with pytest.raises(ConfigError, match=r"rollout\.sandbox_require has no effect"):
        load(None, ["rollout.sandbox=none", "rollout.sandbox_require=true"])


LACK = "from lightning_ray.rollouts import sandbox; print(sandbox.check(sandbox.Wanted()))"


@boxed
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("user", "harnesses run without a sandbox: bubblewrap cannot be used ("),
        ("net", "harnesses reach the network: no network namespace ("),
    ],
)
def test_a_kernel_that_refuses_a_namespace_is_named(kind: str, said: str) -> None:
    # In a user namespace of its own, so that the setting is nobody else's.
    forbid = f"echo 0 > /proc/sys/user/max_{kind}_namespaces; exec {sys.executable} -c '{LACK}'"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert done.stdout.startswith(said), done


STARTS = """
from pathlib import Path
from lightning_ray.rollouts import sandbox
try:
    print(len(sandbox.prefix(Path("/tmp"), [])) > 0)
except sandbox.SandboxError as error:
    print(error)
"""


@pytest.mark.parametrize("network", [True, False])
def test_what_once_worked_is_remembered_with_a_network_of_its_own_or_not(
    elsewhere: pytest.MonkeyPatch, tmp_path: Path, network: bool
) -> None:
    elsewhere.setenv("LIGHTNING_RAY_CACHE", str(tmp_path))
    able = [Protection("bwrap", network, ("x",)), Protection(None, False, ("no namespaces",))]
    cached = sandbox.protection
    elsewhere.setattr(sandbox, "protection", lambda: able[0])
    elsewhere.setattr(sandbox.protection, "cache_clear", cached.cache_clear, raising=False)
    assert sandbox.steady() == able[0]
    able.pop(0)
    with pytest.raises(SandboxError, match="worked before on this machine, and now: no namespaces"):
        sandbox.steady()


@boxed
def test_where_a_sandbox_worked_once_nothing_runs_without_one_later(tmp_path: Path) -> None:
    shell = """
$PYTHON -c "$STARTS"
echo 0 > /proc/sys/user/max_user_namespaces
$PYTHON -c "$STARTS"
rm -r $LIGHTNING_RAY_CACHE/sandbox
$PYTHON -c "$STARTS"
"""
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", shell],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHON": sys.executable,
            "STARTS": STARTS,
            "LIGHTNING_RAY_CACHE": str(tmp_path),
        },
        check=True,
    )
    with_it, used_up, at_first = done.stdout.splitlines()
    assert with_it == "True"
    assert used_up.startswith("a sandbox worked before on this machine, and now: bubblewrap cannot")
    assert at_first == "False"


def test_a_grader_runs_no_code_without_the_sandbox_that_the_run_requires(
    elsewhere: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    elsewhere.setenv("PATH", str(tmp_path / "bin"))  # no bubblewrap
    elsewhere.setenv("LIGHTNING_RAY_CACHE", str(tmp_path))
    found = {}
    for require in (False, True):
        elsewhere.setenv(*next(iter(sandbox.for_graders(Wanted(require=require)).items())))
        try:
            found[require] = sandbox.prefix(tmp_path, [])
        except SandboxError as error:
            found[require] = str(error)
    assert found[False] == []
    assert "sandbox_require=true, but this machine cannot: bubblewrap is not" in found[True]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_ends_at_an_instruction(machine: str) -> None:
    code = list(struct.iter_unpack("=HBBI", syscalls.assemble(machine)))
    for at, (kind, then, other, _) in enumerate(code):
        if kind & 7 == 5:
            assert at + 1 + max(then, other) < len(code)
    assert code[-1][0] == 6  # a return
    with pytest.raises(OSError, match="no filter of system calls for mips"):
        syscalls.assemble("mips")


def test_a_control_group_is_made_where_the_kernel_has_them(tmp_path: Path) -> None:
    def parents(ours: str) -> list[str]:
        return [str(p.relative_to(tmp_path)) for p in usage._parents(tmp_path, ours)]

    assert parents("9:name=systemd:/\n8:pids:/a\n4:cpu,memory:/b/c\n0::/\n") == [
        "memory/b/c",
        "pids/a",
    ]
    own = tmp_path / "user.slice" / "session.scope"
    own.mkdir(parents=True)
    for folder, controllers in ((own, ""), (own.parent, "cpu memory pids"), (tmp_path, "memory")):
        (folder / "cgroup.subtree_control").write_text(controllers)
    assert parents("0::/user.slice/session.scope\n") == ["user.slice"]
    assert parents("0::/\n") == []
