"""Reference runs of rows with an image, as Jobs on a real API server. Images are folders."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from control_plane import Cluster
from swe import images

from lightning_ray.tasks.swe import sources
from lightning_ray.tasks.swe.preparation import cluster as runner
from lightning_ray.tasks.swe.preparation import command

pytestmark = pytest.mark.slow

JOB = Path(__file__).parents[2] / "jobs" / "prepare_swe.py"


class Data:
    """A data set that is prepared in `cluster`."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.out, self.cluster = folder, folder / "out", cluster
        # The image is this machine's file system, so which Python has pytest is for its PATH.
        template = folder / "job.yaml"
        path = f"value: {sources.environment() / 'bin'}:/usr/bin:/bin"
        template.write_text(re.sub("value: .*", path, runner.TEMPLATE.read_text()))
        self.settings = [
            *("runner=kubernetes", "workers=3", "reference_runs=2", "validation_share=0"),
            f"kubernetes.kubeconfig={cluster.kubeconfig()}",
            f"kubernetes.template={template}",
            "kubernetes.fault_timeout_s=4",
            "rollout.retries=1",
        ]

    def row(self, name: str, form: str, files: dict[str, str] | None = None, **columns: Any) -> str:
        """A row, whose image has further `files`."""
        where = images.image(self.folder / name, form)
        for path, text in (files or {}).items():
            (where / path).write_text(text)
        named = {"instance_id": name, "repo": f"acme/{name}", "image_name": f"folder:{where}"}
        return json.dumps({**images.ROWS[form], **named, **columns}) + "\n"

    def arguments(self, *rows: str) -> list[str]:
        source = self.folder / f"{len(list(self.folder.iterdir()))}.jsonl"
        source.write_text("".join(rows))
        return [str(source), "--out", str(self.out), *self.settings]

    def begun(self, *rows: str) -> subprocess.Popen[str]:
        """A job in a process of its own, one of whose pods runs."""
        argv = [sys.executable, str(JOB), *self.arguments(*rows)]
        before = {pod.metadata.uid for pod in self.pods()}
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)

        def runs() -> bool:
            new = [pod for pod in self.pods() if pod.metadata.uid not in before]
            return any(pod.status.phase == "Running" for pod in new)

        self.cluster.until(runs)
        return process

    def jobs(self) -> list[Any]:
        return list(self.cluster.batch.list_namespaced_job("default").items)

    def pods(self) -> list[Any]:
        return list(self.cluster.core.list_namespaced_pod("default").items)


def by_hash_seed() -> str:
    """A test that passes under one of the hash seeds 0 and 1."""
    words = [f"word{number}" for number in range(40)]
    ask = f"print(*[hash(word) % 2 for word in {words}])"
    python = str(sources.environment() / "bin" / "python")
    zero, one = (
        subprocess.check_output(
            [python, "-c", ask], text=True, env={**os.environ, "PYTHONHASHSEED": seed}
        ).split()
        for seed in "01"
    )
    word = next(w for w, a, b in zip(words, zero, one, strict=True) if a != b)
    return f"def test_word():\n    assert hash({word!r}) % 2 == {zero[words.index(word)]}\n"


def test_rows_of_both_forms_are_run_in_their_images_and_cleaned(tmp_path, cluster, capsys) -> None:
    data = Data(tmp_path, cluster)
    slow = data.row(
        "slow",
        "swe-smith",
        {"tests/test_zero.py": "import time\n\n\ndef test_zero():\n    time.sleep(90)\n"},
    )
    killed = data.begun(slow)
    killed.kill()
    killed.wait()
    assert data.jobs()
    asked = data.begun(slow)
    assert len(data.jobs()) == 1  # that of the first is gone
    asked.send_signal(signal.SIGINT)
    _, said = asked.communicate(timeout=60)
    assert (asked.returncode, "the same command goes on" in said) == (130, True), said
    assert not data.jobs()

    flaky = ["tests/test_zero.py::test_zero", "tests/test_word.py::test_word"]
    wrong = images.ROWS["swe-bench"]["patch"].replace("+    return a + b", "+    return a")
    rows = [
        data.row("good-smith", "swe-smith"),
        data.row("good-bench", "swe-bench"),
        data.row("flaky", "swe-smith", {"tests/test_word.py": by_hash_seed()}, PASS_TO_PASS=flaky),
        data.row("wrong", "swe-bench", patch=wrong),
        data.row("missing", "swe-smith", image_name="missing:1"),
        data.row("no-git", "swe-bench", image_name="python"),
    ]
    assert command.main(Path, data.arguments(*rows)) == 0
    kept = [json.loads(line)["task_id"] for line in (data.out / "train.jsonl").open()]
    assert kept == ["good-smith", "good-bench"]
    dropped = {
        row["instance_id"]: row for row in map(json.loads, (data.out / "dropped.jsonl").open())
    }
    found = {name: (row["filter"], row["reason"]) for name, row in dropped.items()}
    assert found["flaky"] == (
        "flaky", "tests/test_word.py::test_word with the fix: passed 1 of 2 times",
    )  # fmt: skip
    assert found["wrong"] == ("fix does not pass", "tests/test_add.py::test_add with the fix")
    assert found["missing"][0] == found["no-git"][0] == "does not run"
    assert "failed to pull missing:1: not found" in found["missing"][1]
    assert "is no repository" in found["no-git"][1]
    # Of a cluster at fault nothing is learnt.
    lost = data.row("lost", "swe-smith", image_name="evict")
    assert command.main(Path, [*data.arguments(lost), "rollout.retries=0"]) == 2
    assert "lost: no pod could run its tests in evict: node_lost" in capsys.readouterr().err
    assert "lost" not in (data.out / "checks.jsonl").read_text()
    assert not data.jobs()
    by_label = {"label_selector": "lightning-ray/run"}
    cluster.until(lambda: not cluster.core.list_namespaced_secret("default", **by_label).items)
