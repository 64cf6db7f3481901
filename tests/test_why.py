"""`python -m lightning_ray why`: a rollout's ledger and a token's way into the loss."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from test_samples import build, call, rollout

from lightning_ray.__main__ import main
from lightning_ray.records import Call, FinishedRollout
from lightning_ray.samples import dataset
from lightning_ray.store.rollouts import RolloutStore


def record(folder: Path, finished: list[FinishedRollout], calls: dict[str, list[Call]]) -> Path:
    """Makes `folder` the directory of a run that trained on these rollouts in step 3."""
    store = RolloutStore(folder / "store")
    store.create_rollouts([r.spec for r in finished])
    for attempt, some in calls.items():
        store.start_attempt(attempt, attempt.partition("-")[0], 0, "hash", 1.0)
        store.append(some)
    store.close()
    dataset.write(build(finished, calls), folder, 3)
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has x, whose second call branches off, and y."""
    calls = {
        "x": [
            call(0, [1], [2, 3], "x"),
            call(1, [1, 2, 3, 9], [5, 6, 7], "x"),
            call(2, [8], [4], "x", constrained=True),
        ],
        "y": [call(0, [1], [4], "y")],
    }
    finished = [rollout("x", "g", 1.0), rollout("y", "g", 0.0)]
    return record(tmp_path_factory.mktemp("run"), finished, calls)


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["why", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_rollout_is_explained_call_by_call(run_dir, capsys) -> None:
    code, said = ask(capsys, run_dir, "--rollout", "x")
    assert code == 0
    assert "step 3" in said and "constrained" in said
    assert "reward 1, 1 training rows; 6 sampled = 5 trained + 1 constrained" in said


def test_a_trained_token_is_explained_to_its_weight(run_dir, capsys) -> None:
    code, said = ask(capsys, run_dir, "--rollout", "x", "--token", 3)
    assert code == 0
    for fact in (
        "6 (number 1 of call 1 of x)", "x-1, branch root", "step 1 of lineage x", "-2 when it",
        "1 of 1, position 5 of 7, optimizer step 1", "0.5 (reward 1)",
        "0.1\n", "batch            step 3",
    ):  # fmt: skip
        assert fact in said, (fact, said)


def test_a_token_that_was_not_trained_has_a_reason(run_dir, capsys) -> None:
    code, said = ask(capsys, run_dir, "--rollout", "x", "--token", 5)
    assert code == 0 and "constrained: sampled under a grammar" in said and "weight" not in said


def test_what_is_not_there_is_said(run_dir, capsys, tmp_path) -> None:
    for arguments, message in (
        ((run_dir, "--rollout", "x", "--token", 6), "the sampled tokens 0 to 5"),
        ((run_dir, "--rollout", "z"), "no batch of"),
        ((tmp_path, "--rollout", "x"), "no ledger"),
    ):
        code, said = ask(capsys, *arguments)
        assert code == 2 and message in said
    running = RolloutStore(run_dir / "store")
    code, said = ask(capsys, run_dir, "--rollout", "x", "--token", 0)
    running.close()
    assert code == 2 and "in use" in said


def test_a_token_of_an_attempt_that_was_given_up_is_not_taken_for_one_of_the_next(
    tmp_path, capsys
) -> None:
    retried = replace(rollout("x", "g", 1.0), attempt_id="x-a1", attempts=2)
    calls = {
        "x-a0": [call(0, [1], [2, 3, 4, 5], "x-a0")],
        "x-a1": [call(0, [1], [6, 7], "x-a1")],
        "y": [call(0, [1], [4], "y")],
    }
    record(tmp_path, [retried, rollout("y", "g", 0.0)], calls)
    for number in range(4):  # the second attempt's call has no such place as 3
        code, said = ask(capsys, tmp_path, "--rollout", "x", "--token", number)
        assert code == 0 and "infra: an attempt that was given up" in said
        assert "weight" not in said and "advantage" not in said
    code, said = ask(capsys, tmp_path, "--rollout", "x", "--token", 4)
    assert code == 0 and "6 (number 0 of call 0 of x-a1)" in said and "0.5 (reward 1)" in said


def test_a_store_or_a_batch_that_is_gone_is_said_and_not_made_anew(
    run_dir, tmp_path, capsys
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    RolloutStore(copy / "other").close()
    for folder, message in (("other", "no call 0 of attempt x"), (None, "has no store")):
        shutil.rmtree(copy / "store")
        if folder:
            (copy / folder).rename(copy / "store")
        code, said = ask(capsys, copy, "--rollout", "x", "--token", 0)
        assert code == 2 and message in said
    assert not (copy / "store").exists()
    dataset.path(copy, 3).unlink()
    code, said = ask(capsys, copy, "--rollout", "x")
    assert code == 2 and "its rows are not there" in said
