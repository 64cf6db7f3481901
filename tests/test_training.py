"""The whole cycle, every part real: mini-SWE-agent, the gateway on Ray Serve, vLLM, grading, verl
on two ranks, new weights back into vLLM, and a run that is killed and goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from runs import PATIENCE, ROOT, command, start, wait_for

from lightning_ray import metrics
from lightning_ray.report import evaluations
from lightning_ray.run.checkpoint import Checkpoints
from lightning_ray.samples import dataset
from lightning_ray.tasks.swe import embedded


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory, request):
    """A run of two steps that was killed after its first checkpoint and started again. Its weights
    go from memory to memory, and both sides' checksums are compared."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    log = run_dir.parent / "log"
    settings = ["run.steps=2", "trainer.weight_sync=memory", "engine.verify_sync=true"]
    first = start(run_dir, log, *settings)
    wait_for(first, log, lambda: Checkpoints(run_dir, keep=2).latest())
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    saved = Checkpoints(run_dir, keep=2).latest()
    # As if it had been further when it was killed, and a later checkpoint were lost.
    for kind in ("batches", "ledger"):
        shutil.copy(dataset.path(run_dir, 1, kind), dataset.path(run_dir, 9, kind))
    log = run_dir.parent / "second.log"
    second = start(run_dir, log, *settings)
    assert second.wait(PATIENCE) == 0, log.read_text()
    return run_dir, saved, log.read_text()


def test_a_killed_run_goes_on_with_the_same_weights_and_trains_each_step_once(killed_and_resumed):
    run_dir, (_, state), output = killed_and_resumed
    # The driver compares the checksum of the restored weights with the one in the checkpoint.
    assert f"resuming at step {state.version.step}" in output
    assert [row["step"] for row in metrics.read(run_dir)] == [1, 2]
    _, last = Checkpoints(run_dir, keep=2).latest()
    assert last.version.step == 2
    assert last.checksum != state.checksum
    assert not set(last.consumed) & set(state.consumed)
    # What was in flight at the checkpoint was trained on next: it was the oldest.
    assert {group.group_id for group in state.pending} & set(last.consumed)


def test_every_sampled_token_is_accounted_for_and_the_numbers_are_there(killed_and_resumed):
    run_dir, _, _ = killed_and_resumed
    for row in metrics.read(run_dir):
        fates = [v for k, v in row.items() if k.startswith("ledger/") and k != "ledger/sampled"]
        assert row["ledger/sampled"] == sum(fates) > 0
        assert row["rollouts/finished"] == 8
        for name in ("reward/mean", "rate/tokens_per_s", "length/sampled_tokens", "seconds/update"):
            assert name in row
        if row["optim/steps"]:
            assert row["optim/grad_norm"] > 0
            if row["async/age_max"] == 0:
                assert abs(row["policy/kl"]) < 1e-3  # one step on fresh samples: on-policy


def test_the_result_is_a_model_that_transformers_loads(killed_and_resumed):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir, _, output = killed_and_resumed
    AutoTokenizer.from_pretrained(run_dir / "model")
    AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert (run_dir / "curves.png").exists()
    assert "python jobs/evaluate.py" in output


@pytest.mark.slow
def test_an_evaluation_reports_base_and_trained_weights_and_goes_on_where_it_was(
    killed_and_resumed, tmp_path
):
    run_dir, _, _ = killed_and_resumed
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        "".join(
            json.dumps({"task_id": t.task_id, "statement": t.statement, **t.fields}) + "\n"
            for t in embedded.validation()[:2]
        )
    )
    evaluate = [
        sys.executable,
        "jobs/evaluate.py",
        str(run_dir),
        f"task.validation={tasks}",
        "gateway.port=0",
    ]
    for _ in range(2):  # the second time every rollout is there already
        done = subprocess.run(
            evaluate,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "95 % interval" in done.stdout and "permutation test" in done.stdout
    folder = run_dir / "evaluations"
    rollouts = sorted(path.name for path in (folder / "rollouts").iterdir())
    assert len(rollouts) == 4, rollouts
    found = [evaluations.read(path) for path in sorted(folder.glob("*-*.json"))]
    assert [one.name.partition("-")[0] for one in found] == ["base", "trained"]
    for one in found:
        assert len(one.graded) == 2 and all(r.sampled_tokens for r in one.graded)
        # Whatever the model wrote is in the patch, in SWE-bench's format.
        [file] = folder.glob(f"{one.name}.predictions-*.jsonl")
        patches = [json.loads(line)["model_patch"] for line in file.read_text().splitlines()]
        written = [bool(r.metrics["right_file"]) for r in one.graded]
        assert all(patch for patch, right in zip(patches, written, strict=True) if right)


def test_the_batches_are_a_ray_dataset_of_the_steps_that_count(killed_and_resumed):
    import ray

    from lightning_ray.samples.batch import ROW_SCHEMA

    run_dir, _, _ = killed_and_resumed
    assert sorted(path.stem for path in (run_dir / "ledger").iterdir()) == [
        "step-000001",
        "step-000002",
    ]
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        rows = dataset.read(run_dir)
        assert rows.schema().names == ROW_SCHEMA.names
        assert rows.count() == sum(row["batch/rows"] for row in metrics.read(run_dir))
        trained = sum(sum(row["trainable"]) for row in rows.iter_rows())
        assert trained == sum(row["ledger/trained"] for row in metrics.read(run_dir))
    finally:
        ray.shutdown()


def test_every_token_of_a_run_can_be_explained(killed_and_resumed, capsys):
    import pyarrow.parquet as pq

    from lightning_ray.__main__ import main

    run_dir, _, _ = killed_and_resumed
    ledger = pq.read_table(dataset.path(run_dir, 2, "ledger")).to_pylist()
    # A rollout's first token is of its first attempt, which the kill may have ended.
    entry = next(entry for entry in ledger if entry["attempt_id"].endswith("-a0"))
    assert main(["why", str(run_dir), "--rollout", entry["rollout_id"], "--token", "0"]) == 0
    said = capsys.readouterr().out
    assert entry["attempt_id"] in said and "batch            step 2" in said
    assert main(["why", str(run_dir), "--rollout", entry["rollout_id"]]) == 0
    assert entry["fate"] in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(killed_and_resumed):
    run_dir, _, _ = killed_and_resumed
    log = run_dir.parent / "one_rank.log"
    # It compares the checksum of the weights with the checkpoint's before it goes on.
    assert start(run_dir, log, "run.steps=3", "trainer.ranks=1").wait(PATIENCE) == 0, (
        log.read_text()
    )
    said = log.read_text()
    assert "was written with trainer.ranks=2: the weights go on with 1" in said
    assert "resuming at step 2" in said
    _, state = Checkpoints(run_dir, keep=2).latest()
    assert state.version.step == 3


def test_a_taken_port_is_one_line(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            command(tmp_path / "run", f"gateway.port={port}"),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
