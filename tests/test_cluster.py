"""The README's way onto a running cluster: `ray start --head`, then `ray job submit`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from lightning_ray.gateway.deploy import free_port

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
# Seconds: a head on two busy cores, and a job of four rollouts of the tiny model.
HEAD_S, JOB_S = 120, 900


@pytest.fixture
def head():
    """A Ray head with two CPUs of our own ports and folders; its dashboard's address, the
    environment, and the head's own address."""
    names = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port")
    ports = {name: free_port() for name in names}
    env = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
    }
    with tempfile.TemporaryDirectory(prefix="lrj") as folder:  # short: Unix sockets lie in it
        options = [f"--{name}={port}" for name, port in ports.items()]
        process = subprocess.Popen(
            [
                BIN / "ray",
                "start",
                "--head",
                "--block",
                "--num-cpus=2",
                f"--temp-dir={folder}",
                *options,
            ],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        address = f"http://127.0.0.1:{ports['dashboard-port']}"
        deadline = time.monotonic() + HEAD_S
        while not _answers(f"{address}/api/version"):
            assert process.poll() is None and time.monotonic() < deadline, "the head did not start"
            time.sleep(1)
        yield address, env, f"127.0.0.1:{ports['port']}"
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
    return True


@pytest.mark.slow
def test_a_submitted_job_trains_on_a_running_two_core_cluster(head, tmp_path):
    address, env, _ = head
    run_dir = tmp_path / "run"
    command = [
        *(BIN / "ray", "job", "submit", f"--address={address}", "--working-dir=.", "--"),
        *("python", "jobs/train_swe.py", f"run.dir={run_dir}", "model.path=tiny"),
        *("run.steps=1", "run.groups_per_step=1", "rollout.n=4", "rollout.concurrency=2"),
        *("task.validation=null", "gateway.port=0", "tracking.backends=[]"),
        *("model.max_model_len=512", "trainer.micro_batch_tokens=1024"),
    ]
    deadline = time.monotonic() + HEAD_S
    while True:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=JOB_S
        )
        # The head answers before its agent, which starts jobs, has told it where it is.
        if "No available agent" not in done.stderr or time.monotonic() > deadline:
            break
        time.sleep(2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/1" in done.stdout
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert [row["rollouts/finished"] for row in rows if "rollouts/finished" in row] == [4]
    assert (run_dir / "model" / "model.safetensors").exists()


# A run as far as its gateway, which answers one call.
RUN = """
import sys
from pathlib import Path
from lightning_ray.gateway import deploy
from support import HELLO, Running
run = Running(Path(sys.argv[1]), [["hello"]], f"gateway.port={sys.argv[2]}")
run.start()
print(run.post(run.attempt(), {"messages": HELLO}).status_code, flush=True)
sys.stdin.readline()
deploy.stop()
"""


@pytest.mark.slow
def test_a_gateway_that_a_killed_driver_left_makes_room_but_a_living_one_does_not(head, tmp_path):
    _, env, address = head
    env = env | {"RAY_ADDRESS": address, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    port = str(free_port())

    def run(name: str) -> subprocess.Popen:
        command = [sys.executable, "-c", RUN, str(tmp_path / name), port]
        return subprocess.Popen(command, env=env, stdin=-1, stdout=-1, stderr=-1, text=True)

    first = run("first")
    assert first.stdout.readline() == "200\n", first.stderr.read()
    rival = run("rival")
    _, complaint = rival.communicate(timeout=HEAD_S)
    assert rival.returncode and f"cannot listen on 127.0.0.1:{port}" in complaint
    first.kill()
    first.wait()
    second = run("second")
    assert second.stdout.readline() == "200\n", second.stderr.read()
    _, complaint = second.communicate("\n", timeout=HEAD_S)
    assert second.returncode == 0, complaint
