"""The picture of a run: six small plots of its metrics over the steps.

`plot(run_dir)` reads `metrics.jsonl` and writes `curves.png`. `PANELS` says which metrics share a
plot; the seconds per phase are stacked bars.

Invariants: a metric that was never logged leaves its place empty and says so; drawing keeps no
state in matplotlib, so it may run in any process and thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lightning_ray import metrics

FILE_NAME = "curves.png"


@dataclass(frozen=True)
class Panel:
    """One plot: `lines` maps metric names to their labels."""

    title: str
    lines: dict[str, str]
    share: bool = False  # values are shares: the axis runs from 0 to 100 %


PANELS = (
    Panel("Reward", {"reward/mean": "training", "validation/reward": "validation"}),
    Panel(
        "Solve rate",
        {"reward/solve_rate": "training", "validation/solve_rate": "validation"},
        share=True,
    ),
    Panel("KL to the rollout policy (nats per token)", {"policy/kl": ""}),
    Panel("Gradient norm", {"optim/grad_norm": ""}),
    Panel("Entropy (nats per token)", {"policy/entropy": ""}),
)
PHASES = ("collect", "update", "sync", "validate", "checkpoint")
# Okabe & Ito (2008): told apart also by readers with a colour vision deficiency.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#999999")
INK = "#444444"


def plot(run_dir: Path | str) -> Path:
    """Draws the metrics of `run_dir` into its `curves.png` and returns that path."""
    run_dir = Path(run_dir)
    rows = metrics.read(run_dir)
    figure = Figure(figsize=(12, 6.2), dpi=130, layout="constrained")
    axes: Sequence[Axes] = figure.subplots(2, 3).flat
    for axis, panel in zip(axes, PANELS, strict=False):
        _lines(axis, panel, rows)
    _phases(axes[len(PANELS)], rows)
    figure.supxlabel("step", fontsize=10, color=INK)
    path = run_dir / FILE_NAME
    figure.savefig(path)
    return path


def _lines(axis: Axes, panel: Panel, rows: list[dict[str, float]]) -> None:
    drawn = 0
    styles = ("-", "--")  # validation is sparse: its line only joins the points
    for colour, style, (name, label) in zip(COLOURS, styles, panel.lines.items(), strict=False):
        points = [
            (row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))
        ]
        if points:
            steps, values = zip(*points, strict=True)
            axis.plot(steps, values, style, color=colour, label=label, marker="o", ms=4, lw=1.8)
            axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]) if min(values) < 0 else 0.0)
            drawn += 1
    if panel.share:
        axis.set_ylim(-0.03, 1.03)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _dress(axis, panel.title, drawn)
    if drawn and len(panel.lines) > 1:
        axis.legend(frameon=False, fontsize=9, labelcolor=INK)


def _phases(axis: Axes, rows: list[dict[str, float]]) -> None:
    timed = [row for row in rows if any(f"seconds/{phase}" in row for phase in PHASES)]
    steps = [row["step"] for row in timed]
    below = [0.0] * len(timed)
    for colour, phase in zip(COLOURS, PHASES, strict=True):
        seconds = [row.get(f"seconds/{phase}", 0.0) for row in timed]
        if any(seconds):
            axis.bar(steps, seconds, bottom=below, color=colour, width=0.7, label=phase)
            below = [base + more for base, more in zip(below, seconds, strict=True)]
    _dress(axis, "Seconds per phase", len(timed))
    if timed:
        small = {"fontsize": 8, "handlelength": 0.8, "handletextpad": 0.4, "columnspacing": 0.9}
        axis.set_ylim(top=1.15 * max(below))  # room for the legend above the bars
        axis.legend(loc="upper left", frameon=False, labelcolor=INK, ncols=len(PHASES), **small)


def _dress(axis: Axes, title: str, drawn: int) -> None:
    axis.set_title(title, fontsize=11, loc="left", color=INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#bbbbbb")
    axis.tick_params(colors=INK, labelsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not drawn:
        axis.text(
            0.5, 0.5, "nothing logged", transform=axis.transAxes, ha="center", color="#999999"
        )
        axis.set_xticks([])
        axis.set_yticks([])
        return
    axis.grid(axis="y", color="#e6e6e6", lw=0.8)
    axis.set_axisbelow(True)
