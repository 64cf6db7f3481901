"""A full disk pauses the store; nothing is lost, nothing is there twice."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from small_disk import full, mounted, skip_without
from support import Running

from lightning_ray.gateway import deploy

_MOUNT = 'mount -t tmpfs -o size=2m tmpfs "$0" && exec "$@"'


def on_a_small_disk(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that has a file system of 2 MiB in `folder`."""
    alone = ["unshare", "--mount"] + (["--user", "--map-root-user"] if os.geteuid() else [])
    return subprocess.run(
        [*alone, "sh", "-c", _MOUNT, str(folder), *command],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("scenario", [("pause",), ("rounds", "0"), ("rounds", "1")])
def test_a_full_disk_pauses_the_store_and_loses_nothing(tmp_path: Path, scenario):
    skip_without(on_a_small_disk(tmp_path, "true"))
    script = Path(__file__).with_name("small_disk.py")
    name, *seed = scenario
    ran = on_a_small_disk(tmp_path, sys.executable, str(script), name, str(tmp_path), *seed)
    assert ran.returncode == 0, ran.stderr


def insist(gateway: Running, attempt: str, body: dict) -> str:
    """What a client is told that comes back until the store has noticed the room, a second or so
    later."""
    deadline = time.monotonic() + 60
    while (reply := gateway.post(attempt, body)).status_code == 503:
        assert time.monotonic() < deadline, reply.text
    return reply.json()["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_calls_wait_for_room_on_the_disk_and_are_answered_once(tmp_path: Path):
    settings = ("gateway.hold_s=2", "gateway.longest_hold_s=2", "model.max_model_len=9000")
    gateway = Running(tmp_path, [["once", "twice"]], *settings)
    long = {"messages": [{"role": "user", "content": "x" * 8000}]}
    with mounted(tmp_path / "store"), contextlib.ExitStack() as ending:
        ending.callback(ray.shutdown)
        ending.callback(deploy.stop)
        gateway.start()
        first, second = gateway.attempt(), gateway.attempt()
        with full(tmp_path / "store"):
            # Sampled already, so it is parked; the next one does not begin.
            for attempt in (first, second):
                refused = gateway.post(attempt, long)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "20")
                assert "disk of the store is full" in refused.json()["error"]["message"]
        assert [insist(gateway, attempt, long) for attempt in (first, second)] == ["once", "twice"]
        for attempt in (first, second):
            assert len(ray.get(gateway.store.calls.remote(attempt))) == 1
