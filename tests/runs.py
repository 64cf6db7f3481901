"""A real run of the tiny model, as a process that tests start, watch and kill."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
# Seconds for one run of the tiny model; four times what two busy cores need.
PATIENCE = 600


def command(run_dir: Path, *overrides: str) -> list[str]:
    return [
        sys.executable,
        "jobs/train_swe.py",
        f"run.dir={run_dir}",
        "model.path=tiny",
        "model.max_model_len=512",
        "trainer.ranks=2",
        "trainer.threads=1",
        "trainer.micro_batch_tokens=1024",
        "engine.threads=1",
        "run.groups_per_step=2",
        # Collocated async: a group is carried over, its calls are interrupted.
        "run.groups_in_flight=3",
        "run.drain_s=0",
        "run.checkpoint_every=1",
        "rollout.n=4",
        "rollout.concurrency=4",
        "task.validation=null",
        "gateway.port=0",
        "tracking.backends=[]",
        *overrides,
    ]


def start(run_dir: Path, log: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Starts a run whose output is added to `log`."""
    with log.open("a") as file:
        return subprocess.Popen(command(run_dir, *overrides), cwd=ROOT, stdout=file, stderr=file)


def wait_for(run: subprocess.Popen[bytes], log: Path, what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert run.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def process_of(parent: int, name: str) -> psutil.Process:
    """Raises LookupError if there is none."""
    for process in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error, IndexError):  # it ends, or is a thread of the kernel
            if process.cmdline()[0].startswith(name):
                return process
    raise LookupError(f"no process of {parent} is called {name}")
