"""The batches that a run trained on, as files and as a Ray Dataset.

`write` puts a batch's rows under `batches/` of the run directory and its ledger under `ledger/`;
`read` makes a Ray Dataset of all rows, for inspection, for supervised fine-tuning on what was
sampled, or for training elsewhere, also while the run goes on; the trainer gets its batch as one
from `of`.

Invariants: a file is whole or absent; writing a step again replaces it; after `truncate(k)` no step
above k remains.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lightning_ray.files import replace
from lightning_ray.samples.batch import Batch

if TYPE_CHECKING:
    from ray.data import Dataset


def path(run_dir: Path, step: int, kind: str = "batches") -> Path:
    """Where the rows ("batches") or the ledger ("ledger") of training step `step` lie."""
    return run_dir / kind / f"step-{step:06d}.parquet"


def write(batch: Batch, run_dir: Path, step: int) -> Path:
    """Writes the batch of training step `step` (columns: `batch.ROW_SCHEMA`) and its ledger."""
    _write(batch.ledger.table, path(run_dir, step, "ledger"))
    return _write(batch.table, path(run_dir, step))


def truncate(run_dir: Path, after_step: int) -> None:
    """Deletes what steps above `after_step` wrote: a run that resumes there trains them again."""
    for kind in ("batches", "ledger"):
        for file in (run_dir / kind).glob("step-*"):
            if _step(file) > after_step:
                file.unlink()


def of(table: pa.Table) -> Dataset:
    """The rows of one batch (`batch.ROW_SCHEMA`), in Ray's object store."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.from_arrow(table)


def read(run_dir: Path) -> Dataset:
    """A Ray Dataset of every batch of the run, in step order. Rows are read as they are asked for.

    Raises:
        FileNotFoundError: the run has trained on nothing yet.
    """
    import ray.data

    files = sorted(map(str, (run_dir / "batches").glob("step-*.parquet")))
    if not files:
        raise FileNotFoundError(
            f"no batches under {run_dir / 'batches'}: the run has made no update yet"
        )
    return ray.data.read_parquet(files)


def find(run_dir: Path, rollout_id: str) -> tuple[int, pa.Table, pa.Table] | None:
    """The step whose batch has a rollout, the rollout's part of the ledger, and its rows; None if
    no batch has it."""
    for file in sorted((run_dir / "ledger").glob("step-*.parquet")):
        wanted = pc.field("rollout_id") == rollout_id
        ledger = pq.read_table(file, filters=wanted)
        if ledger.num_rows:
            step = _step(file)
            return step, ledger, pq.read_table(path(run_dir, step), filters=wanted)
    return None


def _step(file: Path) -> int:
    return int(file.name.removeprefix("step-").partition(".")[0])


def _write(table: pa.Table, final: Path) -> Path:
    final.parent.mkdir(parents=True, exist_ok=True)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    replace(final, sink.getvalue())
    return final
