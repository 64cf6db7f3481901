"""A program in its limits: real processes, small Python scripts that misbehave on purpose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_ray.rollouts import process
from lightning_ray.rollouts.process import EndedBy, ExitReport, Limits

ATTEMPT = f"test-{os.getpid()}"


def run_script(folder: Path, script: str, **options: object) -> ExitReport:
    limits = Limits(**{"timeout_s": 20, **options})  # type: ignore[arg-type]
    return process.run(
        [sys.executable, "-S", "-c", script],
        env=process.base_environment(folder, folder),
        cwd=folder,
        log=folder / "log",
        limits=limits,
        attempt_id=ATTEMPT,
    )


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] != "Z"  # a zombie that init has not collected yet is dead


def written_pid(path: Path) -> int:
    deadline = time.monotonic() + 10
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.01)
    return int(path.read_text())


def test_a_program_that_ends_is_reported_with_its_status_and_output(tmp_path: Path) -> None:
    report = run_script(
        tmp_path, "import sys; print('hello'); print('oops', file=sys.stderr); sys.exit(3)"
    )
    assert (report.ended_by, report.status) == (EndedBy.EXIT, 3)
    assert sorted(report.output_tail.split()) == ["hello", "oops"]
    assert report.describe().startswith("exit status 3 after")
    assert report.cpu_seconds > 0
    assert report.peak_rss_bytes > 1 << 20


def test_a_program_killed_by_a_signal_is_reported_with_the_signal(tmp_path: Path) -> None:
    report = run_script(tmp_path, "import os; os.kill(os.getpid(), 11)")
    assert (report.ended_by, report.status) == (EndedBy.SIGNAL, signal.SIGSEGV)
    assert "Segmentation fault" in report.describe()


def test_the_end_of_a_program_is_noticed_at_once(tmp_path: Path) -> None:
    # The polls of memory come every 0.25 s; six programs that ended on a poll would take 1.5 s
    # more.
    script = "import time; print(time.time())"
    late = []
    for _ in range(6):
        said = float(run_script(tmp_path, script).output_tail)
        late.append(time.time() - said)
    assert sorted(late)[1] < 0.2


def test_a_program_that_ignores_sigterm_ends_at_its_time_limit(tmp_path: Path) -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    report = run_script(tmp_path, script, timeout_s=0.7)
    assert report.ended_by is EndedBy.TIME
    assert 0.7 <= report.seconds < 5


def test_a_daemonised_grandchild_without_our_marker_dies_too(tmp_path: Path) -> None:
    script = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        code = "import os, time; open('pid', 'w').write(f'{os.getpid()}\\\\n'); time.sleep(60)"
        os.execve(%r, ['daemon', '-S', '-c', code], {})
    os._exit(0)
while not os.path.exists('pid'):
    time.sleep(0.01)
time.sleep(0.1)
"""
    report = run_script(tmp_path, script % sys.executable)
    assert report.ended_by is EndedBy.EXIT
    assert not alive(written_pid(tmp_path / "pid"))


def test_memory_is_counted_over_all_processes(tmp_path: Path) -> None:
    script = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        hog = bytearray(os.urandom(1)) * (60 << 20)
        time.sleep(60)
time.sleep(60)
"""
    report = run_script(tmp_path, script, memory_mib=128)
    assert report.ended_by is EndedBy.MEMORY
    assert report.peak_rss_bytes > 128 << 20
    assert report.seconds < 10


def test_a_fork_bomb_is_stopped_and_leaves_nothing(tmp_path: Path) -> None:
    script = "import os, time\nfor _ in range(50):\n    os.fork() or time.sleep(60)\ntime.sleep(60)"
    report = run_script(tmp_path, script, max_processes=20)
    assert report.ended_by is EndedBy.PROCESSES
    assert process.marked(ATTEMPT) == []


def test_a_flood_of_output_is_cut_at_its_limit(tmp_path: Path) -> None:
    report = run_script(tmp_path, "while True: print('x' * 4096)", output_mib=1)
    assert report.ended_by is EndedBy.OUTPUT
    assert (tmp_path / "log").stat().st_size == 1 << 20


def test_a_file_cannot_grow_past_its_limit(tmp_path: Path) -> None:
    script = "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 16))"
    report = run_script(tmp_path, script, file_mib=1)
    assert (tmp_path / "big").stat().st_size == 1 << 20
    assert report.status != 0


def test_a_program_sees_nothing_of_our_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    monkeypatch.setenv("RAY_ADDRESS", "secret")
    report = run_script(
        tmp_path, "import os, sys; print(*os.environ); print(sys.stdin.read() == '')"
    )
    names, stdin_is_empty = report.output_tail.splitlines()
    assert set(names.split()) <= {"PATH", "HOME", "TMPDIR", "LANG", process.MARKER, "LC_CTYPE"}
    assert stdin_is_empty == "True"
    assert os.path.join(sys.prefix, "bin") not in process.base_environment(tmp_path, tmp_path)[
        "PATH"
    ].split(":")


def test_text_on_stdin_and_stdout_of_its_own(tmp_path: Path) -> None:
    report = process.run(
        [
            sys.executable,
            "-S",
            "-c",
            "import sys; print(sys.stdin.read()[::-1]); sys.stderr.write('log')",
        ],
        env={},
        cwd=tmp_path,
        log=tmp_path / "log",
        limits=Limits(timeout_s=20),
        attempt_id=ATTEMPT,
        stdin="añb" * 50_000,
        stdout=tmp_path / "out",
    )
    assert (tmp_path / "out").read_text().strip() == "bña" * 50_000
    assert report.output_tail == "log"


@pytest.mark.parametrize("argv", [["no-such-program"], ["true", "x" * (1 << 18)], ["true", "\0"]])
def test_a_program_that_cannot_start_says_why(tmp_path: Path, argv: list[str]) -> None:
    report = process.run(
        argv,
        env={},
        cwd=tmp_path,
        log=tmp_path / "log",
        limits=Limits(timeout_s=5),
        attempt_id=ATTEMPT,
    )
    assert report.ended_by is EndedBy.NOT_STARTED
    assert report.error
    assert report.error in report.describe()


def test_the_program_dies_with_its_caller(tmp_path: Path) -> None:
    caller = f"""
from pathlib import Path
from lightning_ray.rollouts import process
script = "import os, time; open('pid', 'w').write(f'{{os.getpid()}}\\\\n'); time.sleep(60)"
process.run([{sys.executable!r}, "-c", script], env={{}}, cwd=Path({str(tmp_path)!r}),
    log=Path({str(tmp_path / "log")!r}), limits=process.Limits(60), attempt_id={ATTEMPT!r})
"""
    with subprocess.Popen([sys.executable, "-c", caller]) as worker:
        pid = written_pid(tmp_path / "pid")
        worker.kill()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


def test_killing_the_supervisor_saves_nobody(tmp_path: Path) -> None:
    script = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    open('pid', 'w').write(f'{os.getpid()}\\n')
    time.sleep(60)
while not os.path.exists('pid'):
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60)
"""
    report = run_script(tmp_path, script)
    assert report.ended_by is EndedBy.LOST
    assert process.marked(ATTEMPT) == []
    assert not alive(written_pid(tmp_path / "pid"))


def test_an_exception_in_the_caller_ends_the_program(tmp_path: Path) -> None:
    def interrupt() -> None:
        written_pid(tmp_path / "pid")
        signal.raise_signal(signal.SIGINT)

    # As a shell starts background jobs: with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    thread = threading.Thread(target=interrupt)
    thread.start()
    script = "import os, time; open('pid', 'w').write(f'{os.getpid()}\\n'); time.sleep(60)"
    try:
        with pytest.raises(KeyboardInterrupt):
            run_script(tmp_path, script)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert not alive(written_pid(tmp_path / "pid"))
