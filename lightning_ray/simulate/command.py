"""`python -m lightning_ray simulate [RUN_DIR] [--devices N ...]`: schedules side by side."""

from __future__ import annotations

import argparse
from dataclasses import Field, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_ray.config import ConfigError, load
from lightning_ray.simulate import workload
from lightning_ray.simulate.schedules import SCHEDULES, Result, Setting, Work, simulate
from lightning_ray.simulate.workload import Stated


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        type=Path,
        nargs="?",
        help="replay this run; the options below change its setting",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the stated distribution")
    for field in (*fields(Setting), *fields(Stated)):
        text = f"{field.metadata['help']} (default without RUN_DIR: {field.default})"
        parser.add_argument(_flag(field), type=type(field.default), help=text)


def main(options: argparse.Namespace) -> int:
    """Prints the table.

    Raises:
        ConfigError: the options do not go together, or there is no such run.
        StoreLocked: the run is going on.
    """
    given = {name: value for name, value in vars(options).items() if value is not None}
    stated = {f.name: given[f.name] for f in fields(Stated) if f.name in given}
    changed = {f.name: given[f.name] for f in fields(Setting) if f.name in given}
    setting, distribution, measured = Setting(**changed), Stated(**stated), None
    _check(setting)
    _check(distribution)
    work = distribution.work(options.seed)
    if options.run_dir is not None:
        if stated:
            raise ConfigError(f"{', '.join(stated)}: no effect on a recorded run")
        run = workload.recorded(options.run_dir)
        ratio = run.setting.devices / changed.get("devices", run.setting.devices)
        setting = replace(run.setting, **{"update": run.setting.update * ratio} | changed)
        work, measured = run.work, run.groups_per_hour
    _check_schedule(setting)
    Console().print(table(setting, work, measured))
    return 0


def table(setting: Setting, work: Work, measured: float | None) -> Table:
    """All schedules; `measured` groups per hour of the run that is replayed come last."""
    shown = Table(
        title=f"{setting.steps} updates of {setting.groups_per_step} groups, async with "
        f"{setting.in_flight} in flight, on {setting.devices} devices"
    )
    shown.add_column("schedule", no_wrap=True)
    for column in ("groups/h", "× sync", "idle", "mean age", "oldest"):
        shown.add_column(column, justify="right")
    results = {schedule.name: simulate(schedule, setting, work) for schedule in SCHEDULES}
    base = results["synchronous"]
    assert base is not None  # it needs nothing
    for name, result in results.items():
        shown.add_row(name, *_cells(result, base))
    if None in results.values():
        shown.caption = "The others need two devices, and a staleness of at least 1."
    if measured is not None:
        speed_up = measured / base.groups_per_hour
        shown.add_row("the recorded run, measured", f"{measured:.1f}", f"{speed_up:.2f}")
    return shown


def _cells(result: Result | None, base: Result) -> list[str]:
    if result is None:
        return ["-"] * 5
    return [
        f"{result.groups_per_hour:.1f}",
        f"{result.groups_per_hour / base.groups_per_hour:.2f}",
        f"{result.idle:.0%}",
        f"{mean(result.ages):.2f}",
        f"{max(result.ages)}",
    ]


def _check(options: Setting | Stated) -> None:
    for field in fields(options):
        least = field.metadata["least"]
        if field.name.endswith("_p99"):
            least = getattr(options, field.name.removesuffix("_p99"))
        if getattr(options, field.name) < least:
            raise ConfigError(f"{_flag(field)} must be at least {least:g}")


def _check_schedule(setting: Setting) -> None:
    """What a run would refuse is refused here too, in the same words."""
    names = {"groups_per_step": setting.groups_per_step, "groups_in_flight": setting.in_flight}
    if setting.in_flight > setting.groups_per_step:
        names["max_staleness"] = setting.max_staleness
    load(None, [f"run.{name}={value}" for name, value in names.items()])


def _flag(field: Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")
