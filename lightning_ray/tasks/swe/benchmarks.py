"""SWE-bench's public benchmarks as tasks, from the Hugging Face hub, for evaluations.

`verified` and `lite` are what `task.validation` names. Their repositories are in the benchmark's
own images (`imaged`). All rows are there, those too whose tests pytest cannot be given (Django's,
SymPy's); with `task.grader_options.judge=false` nothing is judged here, and the predictions are
for the benchmark's own harness.
"""

from __future__ import annotations

from lightning_ray.records import Task
from lightning_ray.tasks.swe.preparation import rows
from lightning_ray.tasks.swe.record import Format, RecordError


def verified() -> list[Task]:
    """The 500 tasks of SWE-bench Verified. Raises RowsError, RecordError."""
    return read("SWE-bench/SWE-bench_Verified:test")


def lite() -> list[Task]:
    """The 300 tasks of SWE-bench Lite. Raises RowsError, RecordError."""
    return read("SWE-bench/SWE-bench_Lite:test")


def read(source: str) -> list[Task]:
    """The rows of a source in SWE-bench's form (see `rows`), none left out.

    Raises:
        RowsError, RecordError: it cannot be read, or one of its rows.
    """
    tasks = []
    for found in rows.records(source, Format.SWE_BENCH):
        if found.record is None:
            raise RecordError(f"{found.where}: {found.problem}")
        tasks.append(found.record.to_task())
    return tasks
