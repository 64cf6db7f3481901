"""A small repository as the images of SWE-smith's and SWE-bench's tasks have it, and its tasks."""

from __future__ import annotations

import subprocess
from pathlib import Path

from lightning_ray.records import Task
from lightning_ray.tasks.swe.patches import reverse
from lightning_ray.tasks.swe.record import RepositoryTask

CLEAN = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return add(a, a)\n"
BROKEN = CLEAN.replace("a + b", "a - b")
BUG = (
    "diff --git a/calc/core.py b/calc/core.py\n--- a/calc/core.py\n+++ b/calc/core.py\n"
    "@@ -1,4 +1,4 @@\n def add(a, b):\n-    return a + b\n+    return a - b\n \n \n"
)
TESTS = {
    f"tests/test_{name}.py": (
        f"from calc import core\n\n\ndef test_{name}():\n    assert core.add(2, {b}) == {2 + b}\n"
    )
    for name, b in (("add", 1), ("zero", 0))
}
ADDED = "".join(
    ["diff --git a/tests/test_add.py b/tests/test_add.py\nnew file mode 100644\n--- /dev/null\n"]
    + ["+++ b/tests/test_add.py\n@@ -0,0 +1,5 @@\n"]
    + [f"+{line}\n" for line in TESTS["tests/test_add.py"].splitlines()]
)
ROW = {
    "instance_id": "calc.1",
    "repo": "somebody/calc",
    "FAIL_TO_PASS": ["tests/test_add.py::test_add"],
    "PASS_TO_PASS": ["tests/test_zero.py::test_zero"],
    "problem_statement": "add subtracts",
    "image_name": "registry.example/calc:1",
}
ROWS = {
    "swe-smith": {**ROW, "patch": BUG},
    "swe-bench": {**ROW, "patch": reverse(BUG), "test_patch": ADDED, "base_commit": "abc"},
}


def task(form: str) -> Task:
    return RepositoryTask.from_row(ROWS[form]).to_task()


def git(folder: Path, *argv: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@x")
    done = subprocess.run(
        ["git", *who, *argv], cwd=folder, check=True, capture_output=True, text=True,
        errors="replace",
    )  # fmt: skip
    return done.stdout.strip()


def image(folder: Path, form: str) -> Path:
    """What the image has: SWE-smith's is clean, SWE-bench's broken, with the mended state in its
    history (as if somebody had fetched too much)."""
    files = {"calc/__init__.py": "", "calc/core.py": CLEAN, **TESTS}
    files |= {".gitignore": "*.pyc\n", "logo.png": "\0"}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "mended")
    if form == "swe-bench":
        (folder / "calc/core.py").write_text(BROKEN)
        (folder / "tests/test_add.py").unlink()
        git(folder, "commit", "-qam", "as it was")
    return folder
