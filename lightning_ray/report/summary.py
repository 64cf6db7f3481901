"""The end of a run: a table before/after, and where everything is.

`final_table` compares two `Score`s, the validation before the first and after the last step;
`closing_lines` says where the results lie and which commands come next.

Invariants: a rate never stands without its 95 % interval and its number of rollouts.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from lightning_ray.report.statistics import wilson


@dataclass(frozen=True)
class Score:
    """What one validation found. Means are over `rollouts`, which `failed` ones are not among."""

    rollouts: int
    solved: int
    reward: float
    sampled_tokens: float
    calls: float
    rollout_seconds: float
    failed: int = 0

    @property
    def solve_rate(self) -> float:
        return self.solved / self.rollouts if self.rollouts else math.nan


def final_table(before: Score | None, after: Score | None) -> Table:
    """Validation before and after training, side by side. None where there was no validation."""
    table = Table(title="Validation", title_style="bold")
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    table.add_row("solve rate", _rate(before), _rate(after), _points(before, after))
    table.add_row("  95 % interval", _interval(before), _interval(after), "")
    for label, field, form in (
        ("mean reward", "reward", "{:.3f}"),
        ("tokens per rollout", "sampled_tokens", "{:.1f}"),
        ("calls per rollout", "calls", "{:.1f}"),
        ("seconds per rollout", "rollout_seconds", "{:.1f}"),
    ):
        old, new = (getattr(score, field, None) for score in (before, after))
        change = "" if old is None or new is None else form.replace(":", ":+").format(new - old)
        table.add_row(label, *("–" if x is None else form.format(x) for x in (old, new)), change)
    table.add_row("lost rollouts", *(str(s.failed) if s else "–" for s in (before, after)), "")
    return table


def closing_lines(
    run_dir: Path,
    *,
    checkpoint: Path | None,
    model: Path | None,
    curves: Path | None,
    transcripts: Path | None,
    resume: str,
) -> list[str]:
    """Where the results are, and the commands that come next. `model` is the Hugging Face folder,
    `resume` the command that continues this run; paths below the working directory are short."""
    found = {
        "run directory": run_dir,
        "model": model,
        "checkpoint": checkpoint,
        "curves": curves,
        "transcripts": transcripts,
    }
    lines = [f"{name:<14} {short(path)}" for name, path in found.items() if path is not None]
    if model is not None:
        serve = "python -m vllm.entrypoints.openai.api_server --model"
        lines.append(f"{'serve it':<14} {serve} {shlex.quote(short(model))}")
        run = shlex.quote(short(run_dir))
        lines.append(f"{'evaluate it':<14} python jobs/evaluate.py {run}")
    return [*lines, f"{'resume':<14} {resume}"]


def short(path: Path) -> str:
    """`path` relative to the working directory where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _rate(score: Score | None) -> str:
    return f"{score.solve_rate:.1%} ({score.solved}/{score.rollouts})" if score else "–"


def _interval(score: Score | None) -> str:
    return "{:.1%} – {:.1%}".format(*wilson(score.solved, score.rollouts)) if score else "–"


def _points(before: Score | None, after: Score | None) -> str:
    if before is None or after is None:
        return ""
    return f"{100 * (after.solve_rate - before.solve_rate):+.1f} points"
