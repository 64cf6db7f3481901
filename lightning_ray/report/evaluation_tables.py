"""Evaluations on a screen: rich tables of pass@k, outcomes, cost, and of two models side by side.

Invariant: a rate never stands without its 95 % interval and its number of tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.table import Table

from lightning_ray.report import evaluations
from lightning_ray.report.evaluations import Evaluation
from lightning_ray.report.statistics import Estimate

# Task ids shown of those that got better or worse; the JSON has all.
SHOWN = 8


def tables(found: Sequence[Evaluation]) -> Iterator[Table | str]:
    """What an evaluation shows at its end: every model, and each against the first."""
    yield rates(found)
    for one in found:
        yield outcomes(one)
    yield costs(found)
    for other in found[1:]:
        yield from comparison(found[0], other)


def rates(found: Sequence[Evaluation]) -> Table:
    """pass@k of each model: a column per model, a row per k."""
    table = _table("pass@k", *(one.name for one in found))
    columns = [evaluations.pass_at(one) for one in found]
    for k in sorted(set().union(*columns)):
        table.add_row(f"pass@{k}", *(_percent(c[k].value) if k in c else "–" for c in columns))
        table.add_row("  95 % interval", *(_interval(c.get(k)) for c in columns))
        table.add_row("  tasks", *(str(c[k].tasks) if k in c else "–" for c in columns))
    lost = [sum(not r.graded for r in one.rollouts) for one in found]
    table.add_row("rollouts", *(str(len(one.graded)) for one in found))
    table.add_row("lost", *map(str, lost))
    return table


def outcomes(evaluation: Evaluation) -> Table:
    """How the rollouts ended, and what the grader said besides."""
    table = _table(f"outcomes of {evaluation.name}", "rollouts", "solved", "share")
    for outcome, count, solved in evaluations.outcomes(evaluation):
        share = "no reward" if solved is None else _percent(solved / count)
        table.add_row(str(outcome), str(count), "–" if solved is None else str(solved), share)
    for name, mean in evaluations.signals(evaluation).items():
        table.add_row(f"  {name}, mean", "", "", f"{mean:.3f}")
    return table


def costs(found: Sequence[Evaluation]) -> Table:
    """Tokens, calls and seconds, per graded rollout and of all of them."""
    heads = ("mean", "median", "95 %", "in all")
    table = _table("cost of graded rollouts", *heads)
    for one in found:
        table.add_row(f"[bold]{one.name}[/bold]")
        for name, cost in evaluations.costs(one).items():
            numbers = (cost.mean, cost.median, cost.highest, cost.total)
            table.add_row(f"  {name}", *map(_number, numbers))
        tokens = sum(rollout.all_tokens for rollout in one.rollouts)
        table.add_row("  all tokens, lost attempts too", "", "", "", _number(tokens))
    return table


def comparison(first: Evaluation, second: Evaluation) -> Iterator[Table | str]:
    """The second against the first on the same tasks.

    Raises:
        ConfigError: they have no task in common.
    """
    found = evaluations.comparison(first, second)
    table = _table(f"{second.name} against {first.name}, on {found.difference.tasks} tasks", "")
    for name, estimate in ((first.name, found.first), (second.name, found.second)):
        table.add_row(f"pass@1 of {name}", f"{_percent(estimate.value)} ({_interval(estimate)})")
    d = found.difference
    points = [f"{100 * value:+.1f}" for value in (d.value, d.low, d.high)]
    table.add_row("difference, points", f"{points[0]} ({points[1]} – {points[2]})")
    table.add_row("p, permutation test within tasks", _p_value(found.p_value))
    table.add_row("tasks better, worse, equal", f"{found.better}, {found.worse}, {found.equal}")
    yield table
    for line in evaluations.differences(first, second):
        yield f"made otherwise: {line}"
    for word, tasks in zip(("better", "worse"), evaluations.moved(first, second), strict=True):
        if tasks:
            more = f" and {len(tasks) - SHOWN} more" if len(tasks) > SHOWN else ""
            yield f"tasks {word}: {', '.join(tasks[:SHOWN])}{more}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_style="bold", title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _interval(estimate: Estimate | None) -> str:
    return f"{estimate.low:.1%} – {estimate.high:.1%}" if estimate else "–"


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"
