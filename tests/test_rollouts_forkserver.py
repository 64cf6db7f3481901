"""A program forked from a warm interpreter behaves as one that was executed."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest

from lightning_ray.rollouts import forkserver, process
from lightning_ray.rollouts.forkserver import Preload, PreloadError
from lightning_ray.rollouts.process import EndedBy, ExitReport, Limits

STATE = """
import atexit, json, os, random, signal, sys
atexit.register(print, "at exit")
print(json.dumps({
    "name": __name__, "argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ),
    "path": sys.path[0], "stdin": sys.stdin.read(), "random": random.random(),
    "warm": "decimal" in sys.modules, "files": os.listdir("/proc/self/fd"),
    "session": os.getsid(0) == os.getpid(), "sigchld": int(signal.getsignal(signal.SIGCHLD)),
}))
"""


@pytest.fixture
def warm():
    """A server of this test alone; it ends when its connection is closed."""
    preload = Preload(sys.executable, ("decimal",), (("LANG", "C.UTF-8"), ("T", uuid.uuid4().hex)))
    yield preload
    if connection := forkserver._connections.pop(preload, None):
        connection.close()


def run(tmp_path: Path, preload: Preload, source: str, *, timeout_s: float = 30, stdin: str = ""):
    script = tmp_path / "script"
    script.write_text(source)
    log = tmp_path / "log"
    return process.run(
        [str(script), "an argument"],
        env={"OWN": "1"},
        cwd=tmp_path,
        log=log,
        limits=Limits(timeout_s),
        attempt_id="r1-a0",
        stdin=stdin,
        preload=preload,
    )


def state_of(report: ExitReport) -> dict:
    import json

    assert report.ended_by is EndedBy.EXIT, report
    assert report.status == 0, report
    return json.loads(report.output_tail.splitlines()[0])


def test_a_forked_program_sees_what_an_executed_one_would(tmp_path, warm):
    report = run(tmp_path, warm, STATE, stdin="the task")
    state = state_of(report)
    assert report.output_tail.splitlines()[1] == "at exit"
    assert state["warm"]
    assert state["name"] == "__main__"
    assert state["argv"] == [str(tmp_path / "script"), "an argument"]
    assert state["cwd"] == state["path"] == str(tmp_path)
    assert state["env"] == {"OWN": "1", process.MARKER: "r1-a0"}
    assert state["stdin"] == "the task"
    # 0, 1, 2, and the folder that is being listed.
    assert len(state["files"]) == 4
    assert state["session"]
    assert state["sigchld"] == signal.SIG_DFL


def test_two_attempts_draw_different_random_numbers(tmp_path, warm):
    first, second = (state_of(run(tmp_path, warm, STATE))["random"] for _ in range(2))
    assert first != second


def test_exit_status_and_traceback_are_those_of_the_program(tmp_path, warm):
    assert run(tmp_path, warm, "raise SystemExit(7)").status == 7
    failed = run(tmp_path, warm, "1 / 0")
    assert failed.status == 1
    assert failed.output_tail.strip().endswith("ZeroDivisionError: division by zero")


def test_what_a_forked_program_leaves_behind_dies(tmp_path, warm):
    report = run(
        tmp_path,
        warm,
        "import os, subprocess, time\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "if os.fork() == 0:\n    os.setsid(); time.sleep(60)\n",
    )
    assert (report.ended_by, report.status) == (EndedBy.EXIT, 0)
    assert process.marked("r1-a0") == []


def test_a_forked_program_ends_at_its_time_limit(tmp_path, warm):
    report = run(tmp_path, warm, "import time; time.sleep(60)", timeout_s=1)
    assert report.ended_by is EndedBy.TIME
    assert process.marked("r1-a0") == []


def test_a_killed_server_is_started_again_and_running_programs_go_on(tmp_path, warm):
    source = (
        "import os, signal, pathlib, time\n"
        "stat = lambda pid: pathlib.Path(f'/proc/{pid}/stat').read_text().rsplit(')')[1].split()\n"
        "server = int(stat(os.getppid())[1])\n"
        "os.kill(server, signal.SIGKILL)\n"
        "time.sleep(0.3); print('went on')\n"
    )
    for _ in range(2):
        report = run(tmp_path, warm, source)
        assert (report.ended_by, report.status) == (EndedBy.EXIT, 0), report
        assert report.output_tail == "went on\n"


def test_the_server_ends_with_its_last_connection(tmp_path, warm):
    run(tmp_path, warm, "pass")
    name = warm.address[1:].decode()

    def servers() -> list[str]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                found += [pid] if name in Path(f"/proc/{pid}/cmdline").read_text() else []
            except OSError:
                continue
        return found

    assert servers()
    forkserver._connections.pop(warm).close()
    deadline = time.monotonic() + 20
    while servers():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_checkouts_with_other_code_do_not_share_a_server(tmp_path, warm):
    for name in ("as it is", "changed"):
        folder = shutil.copytree(Path(forkserver.__file__).parent, tmp_path / name)
        if name == "changed":
            with (folder / "supervisor.py").open("a") as file:
                file.write("# another version\n")
        preload = runpy.run_path(str(folder / "forkserver.py"))["Preload"]
        address = preload(warm.python, warm.modules, warm.env).address
        assert (address == warm.address) == (name == "as it is")


def test_a_module_that_is_not_there_is_named(tmp_path):
    broken = Preload(sys.executable, ("no_such_module",), ())
    with pytest.raises(PreloadError, match=r"cannot preload no_such_module: .*No module named"):
        run(tmp_path, broken, "pass")
