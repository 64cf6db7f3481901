"""A training step on real repositories: laid out, worked on, collected, judged by their tests."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from runs import PATIENCE, ROOT

from lightning_ray import metrics
from lightning_ray.tasks.swe import offline

# Sizes for the tiny model on two cores; the repository and its judge are the example's own.
SMALL = [
    "model.path=tiny",
    "model.dtype=float32",
    "model.max_model_len=1024",
    "engine.max_num_seqs=4",
    "engine.threads=1",
    "sampling.max_tokens=32",
    "gateway.port=0",
    "harness.args=[--model-class=litellm_textbased, -c, 'pkg:lightning_ray.tasks.swe/mini.yaml']",
    "rollout.n=2",
    "rollout.concurrency=2",
    "rollout.cpus=0.25",
    "rollout.timeout_s=120",
    "rollout.sandbox_require=false",  # not every machine lets a process have one
    "task.validation=null",
    "trainer.threads=1",
    "trainer.micro_batch_tokens=1024",
    "run.steps=1",
    "run.groups_per_step=1",
    "run.groups_in_flight=2",
    "run.validate_every=0",
]
# Of the form that the tiny model has half learnt; whether it changes anything is left to chance.
STATEMENT = "Package parse is broken. Create a file named a.txt that contains the word blue."


@pytest.mark.slow
def test_the_offline_example_trains_on_what_a_packages_own_suite_says(tmp_path: Path) -> None:
    """The package with the quickest suite. The model solves nothing there, and the run says so."""
    tasks = tmp_path / "parse.jsonl"
    with tasks.open("w") as file:
        for task in offline.train():
            if task.fields["package"] == "parse":
                row = {"task_id": task.task_id, "statement": STATEMENT, **task.fields}
                file.write(json.dumps(row) + "\n")
    done = subprocess.run(
        [
            sys.executable,
            "jobs/train_swe.py",
            "examples/swe/offline.yaml",
            *SMALL,
            f"task.train={tasks}",
            f"run.dir={tmp_path}/run",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics.read(tmp_path / "run")
    [row] = [row for row in rows if "reward/mean" in row]
    assert (row["outcomes/completed"], row["outcomes/grader_fault"]) == (2, 0), row
    assert row["batch/rollouts"] == 2
    fates = [value for name, value in row.items() if name.startswith("ledger/")]
    assert row["ledger/sampled"] > 0 and sum(fates) == 2 * row["ledger/sampled"]
    assert row["reward/mean"] > 0 or "step 1 trains nothing: the rollouts of" in done.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    with sqlite3.connect(tmp_path / "run" / "store" / "rollouts.sqlite") as database:
        found = database.execute("select finished from rollouts where finished is not null")
        said = [json.loads(finished)["reward"]["metrics"] for (finished,) in found]
    # The package's own tests ran.
    assert len(said) == 2 and all(one["test_runs"] and one["test_seconds"] for one in said), said
