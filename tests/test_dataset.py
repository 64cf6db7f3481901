"""A run as a Ray Dataset: ten thousand rollouts in less memory than they have; while it goes on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import ray

from lightning_ray.config import RunConfig
from lightning_ray.records import (
    Call,
    FinishedRollout,
    FinishReason,
    Outcome,
    PolicyVersion,
    Reward,
    RolloutSpec,
    RolloutState,
    Span,
    Split,
    Task,
)
from lightning_ray.samples import batch, dataset
from lightning_ray.trainer import advantages

pytestmark = pytest.mark.slow

STEPS, ROLLOUTS, TOKENS = 20, 500, 1000
STORE_BYTES = 100 << 20


def one_step() -> tuple[list[FinishedRollout], dict[str, list[Call]]]:
    """Rollouts of one call each, in groups of ten."""
    random = np.random.default_rng(0)
    rollouts, calls = [], {}
    for number in range(ROLLOUTS):
        spec = RolloutSpec(f"r{number}", f"g{number // 10}", Task("t", "s"), Split.TRAIN, 1)
        reward = Reward(float(number % 3), False)
        rollouts.append(
            FinishedRollout(
                spec, RolloutState.FINISHED, Outcome.COMPLETED, f"r{number}-a0", 1, reward
            )
        )
        tokens = random.integers(0, 50_000, TOKENS).astype(np.int32)
        logprobs = -random.random(TOKENS).astype(np.float32)
        spans = (Span(PolicyVersion("l", 0), TOKENS),)
        call = Call(
            "c", f"r{number}-a0", 0, tokens[:100], tokens, logprobs, spans, FinishReason.STOP
        )
        calls[call.attempt_id] = [call]
    return rollouts, calls


@pytest.fixture
def small_store() -> Iterator[None]:
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        object_store_memory=STORE_BYTES, logging_level="ERROR",
    )  # fmt: skip
    yield
    ray.shutdown()


def test_a_run_of_ten_thousand_rollouts_streams_through_a_small_object_store(
    tmp_path, small_store
) -> None:
    config = RunConfig()
    made = batch.build(*one_step(), config, advantages.estimator(config.algorithm))
    for step in range(1, STEPS + 1):
        dataset.write(made, tmp_path, step)
    whole = STEPS * made.table.nbytes
    assert whole > 2 * STORE_BYTES  # what would not fit
    process, rows, tokens, peak, before = psutil.Process(), 0, 0, 0, 0
    for part in dataset.read(tmp_path).iter_batches(batch_size=64, batch_format="pyarrow"):
        rows += part.num_rows
        tokens += sum(map(len, part["tokens"]))
        # Without the object store, which is shared; libraries are there since the first part.
        mine = process.memory_full_info().uss
        before = before or mine
        peak = max(peak, mine - before)
    assert rows == STEPS * made.table.num_rows
    assert tokens == rows * (TOKENS + 100)
    assert peak < whole / 2


def test_a_run_can_be_read_while_it_goes_on(tmp_path, small_store) -> None:
    config = RunConfig()
    rollouts, calls = one_step()
    few = {r.attempt_id: calls[r.attempt_id] for r in rollouts[:20]}
    made = batch.build(rollouts[:20], few, config, advantages.estimator(config.algorithm))
    dataset.write(made, tmp_path, 1)
    begun = dataset.read(tmp_path)
    rows = iter(begun.iter_rows())
    next(rows)
    dataset.write(made, tmp_path, 2)
    # What is being written is not looked at.
    dataset.path(tmp_path, 3).with_suffix(".parquet.0f.tmp").write_bytes(b"PAR1")
    each = made.table.num_rows
    assert 1 + sum(1 for _ in rows) == each  # it has the steps that there were
    assert begun.count() == each and dataset.read(tmp_path).count() == 2 * each
