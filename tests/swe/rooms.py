"""The program of a pod, run here as a process."""

from __future__ import annotations

import subprocess
from pathlib import Path

from lightning_ray.rollouts.grading import RoomOrder, RoomReport
from lightning_ray.rollouts.pods import staging
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
for source in order.pop("entry"):
    exec(compile(source, "entry.py", "exec"), space)
space["main"](order, request, "key")
"""


def python() -> str:
    """One that has pytest."""
    return str(sources.environment() / "bin" / "python")


def run_pod(
    files: dict[str, bytes], folder: Path, image: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs an order, with `folder` in the place of the pod's volume."""
    folder.mkdir(parents=True)
    files = files | {"order": files["order"].replace(b'"/lightning', f'"{folder}/volume'.encode())}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    argv = [image or python(), "-I", "-c", POD, str(folder)]
    return subprocess.run(argv, capture_output=True, text=True)


def carried_out(order: RoomOrder, folder: Path, image: str = "") -> RoomReport:
    """What the program of a pod makes of an order."""
    [files] = staging.room_files([order])
    done = run_pod(files, folder, image)
    assert (folder / "result").exists(), done
    return staging.room_report((folder / "result").read_bytes())
