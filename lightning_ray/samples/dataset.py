"""The batches that a run trained on, as files and as a Ray Dataset.

`write` puts a batch's table under `batches/` of the run directory; `read` makes a Ray Dataset of
all of them, for inspection, for supervised fine-tuning on what was sampled, or for training
elsewhere.

Invariants: a batch file is whole or absent; writing a step again replaces it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from lightning_ray.samples.batch import Batch

if TYPE_CHECKING:
    from ray.data import Dataset


def path(run_dir: Path, step: int) -> Path:
    """Where the batch of training step `step` lies."""
    return run_dir / "batches" / f"step-{step:06d}.parquet"


def write(batch: Batch, run_dir: Path, step: int) -> Path:
    """Writes the batch of training step `step` (columns: `batch.ROW_SCHEMA`)."""
    final = path(run_dir, step)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_suffix(".partial")
    pq.write_table(batch.table, partial)
    os.replace(partial, final)
    return final


def read(run_dir: Path) -> Dataset:
    """A Ray Dataset of every batch of the run, in step order.

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
