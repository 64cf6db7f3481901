"""The program of a pod, run here as a process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from lightning_ray.rollouts.grading import RoomOrder, RoomReport
from lightning_ray.rollouts.pods import entry, staging
from lightning_ray.tasks.swe import sources

POD = """
import json, sys
from pathlib import Path
root = Path(sys.argv[1])
order = json.loads((root / "order").read_text())
def request(name, body=None):
    if body is None:
        return (root / name).read_bytes()
    (root / name).write_bytes(body)
space = {"__name__": "entry"}
for name, source in order.pop("entry"):
    exec(compile(source, name, "exec"), space)
space["main"](order, request, "key")
"""


def python() -> str:
    """One that has pytest."""
    return str(sources.environment() / "bin" / "python")


def run_pod(files: dict[str, bytes], folder: Path, image: str = "") -> str:
    """Runs an order, with `folder` in the place of the pod's volume; its termination message."""
    folder.mkdir(parents=True)
    told = folder / "termination-log"
    order = files["order"].replace(b'"/lightning', f'"{folder}/volume'.encode())
    order = order.replace(entry.TERMINATION_LOG.encode(), str(told).encode())
    for name, content in {**files, "order": order, told.name: b""}.items():
        (folder / name).write_bytes(content)
    image = image or python()
    path = f"{Path(image).parent}:/usr/local/bin:/usr/bin:/bin"  # whose python3 is the image's
    argv = [image, "-I", "-c", POD, str(folder)]
    subprocess.run(argv, capture_output=True, env={**os.environ, "PATH": path})
    return told.read_text()


def carried_out(order: RoomOrder, folder: Path, image: str = "") -> RoomReport:
    """What the program of a pod makes of an order."""
    [files] = staging.room_files([order], 32 << 20)
    said = run_pod(files, folder, image)
    assert (folder / "result").exists(), said
    return staging.room_report((folder / "result").read_bytes())
