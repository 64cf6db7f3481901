"""Calls SWE-smith, which has an environment of its own: its requirements do not fit beside ours."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from lightning_ray.records import Json
from lightning_ray.tasks.swe import sources


def run(order: Json) -> list[Json]:
    """What `smith_adapter.py` answers to an order.

    Raises:
        SourceError: SWE-smith cannot be installed, or failed.
    """
    python = sources.environment("generator.lock") / "bin" / "python"
    adapter = Path(__file__).with_name("smith_adapter.py")
    with tempfile.TemporaryDirectory(prefix="lr-smith-") as name:
        path = Path(name) / "order.json"
        path.write_text(json.dumps(order))
        argv = [str(python), "-s", str(adapter), str(path)]
        done = subprocess.run(argv, cwd=name, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise sources.SourceError(f"SWE-smith failed on {order['name']}: {last}")
    return [json.loads(line) for line in done.stdout.splitlines()]
