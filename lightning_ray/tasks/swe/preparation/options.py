"""How a data set of repository tasks is made: every option, its default and its meaning.

Pure declarations. Each can be set on the command line of `jobs/prepare_swe.py` as `name=value`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lightning_ray.sections import Section


class Options(Section):
    """What is split how, what the filters take for too much, and what the probe keeps."""

    seed: int = Field(0, description="Seed of the split and of the choice of hard tasks.")
    separate: Literal["function", "repository"] = Field(
        "function",
        description="What training and validation tasks must not share. By function a policy may "
        "know the repository, by repository it may not.",
    )
    separate_held_out: Literal["function", "repository"] = Field(
        "repository", description="Likewise, of training tasks and those of --held-out."
    )
    validation_share: float = Field(
        0.1, ge=0, lt=1, description="Part of the functions (or repositories) held out."
    )
    reference_runs: int = Field(
        3,
        ge=0,
        description="Runs of each task's tests, under other hash seeds and orders. 0: none.",
    )
    workers: int = Field(
        2, ge=1, description="Reference runs at a time; of a cluster, Jobs at a time."
    )
    runner: str = Field(
        "lightning_ray.tasks.swe.preparation.local:Local",
        description="Who runs the tests: `kubernetes` (a Job for each run, in the row's image), "
        "`podman` (a container of this machine), or `module:class` of a `reference.Runner`. The "
        "default runs the offline packages.",
    )
    export: bool = Field(
        False,
        description="Also write what is kept as rows of SWE-smith's and of SWE-bench's form.",
    )
    skip_unreadable: bool = Field(
        False,
        description="Drop and count rows that are no tasks, instead of stopping at the first.",
    )
    samples: int = Field(4, ge=2, description="Rollouts of the base model per task in the probe.")
    hard_share: float = Field(
        0.2, ge=0, description="Tasks that no probe solves kept for each one that some do."
    )
    most_mixed: int | None = Field(
        None, ge=1, description="Most tasks kept that some probes solve. null: all."
    )
    # What the filters take for too much.
    most_fail_to_pass: int = Field(
        20, ge=1, description="Most tests that the fix must make pass; more is no single bug."
    )
    most_tests: int = Field(5000, ge=1, description="Most tests of a task in all.")
    slowest_s: float = Field(
        300.0, gt=0, description="Longest run of a task's tests, in seconds: every rollout has one."
    )
    similar: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Patches of the same files are near-duplicates if they share this part of "
        "their changed lines (Jaccard).",
    )
    leak_characters: int = Field(
        16,
        ge=1,
        description="A line of the fix with fewer characters that are no space, such as `return "
        "x`, can stand in a statement by chance.",
    )
    leak_share: float = Field(
        0.5, gt=0, le=1, description="A statement leaks if it holds this part of the fix's lines."
    )
