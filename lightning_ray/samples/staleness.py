"""How old the tokens of a batch are, in policy updates, for the run's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from lightning_ray.records import Call


def statistics(table: pa.Table, calls: Mapping[str, Sequence[Call]], step: int) -> dict[str, float]:
    """Numbers on the trained tokens of a batch (`batch.ROW_SCHEMA`) at the update of the weights of
    `step`: mean and largest age, the share of each age, the share of calls that several versions
    sampled."""
    every = [call for some in calls.values() for call in some]
    mixed = sum(len({span.version for span in call.spans}) > 1 for call in every)
    found = {"async/calls_of_several_versions": mixed / max(1, len(every))}
    trained, steps = (
        table[name].combine_chunks().values.to_numpy(zero_copy_only=False)
        for name in ("trainable", "steps")
    )
    ages = step - steps[trained.astype(bool)]
    if len(ages):
        found |= {"async/age_mean": float(ages.mean()), "async/age_max": float(ages.max())}
        values, counts = np.unique(ages, return_counts=True)
        found |= {
            f"async/age_{value}": count / len(ages)
            for value, count in zip(values.tolist(), counts.tolist(), strict=True)
        }
    return found
