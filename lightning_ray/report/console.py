"""The live view of a run: a small panel on a terminal, plain lines elsewhere.

The run hands `Console.update` one `View` as often as it likes. On a terminal rich redraws a panel
in place; in a pipe (CI, `ray job logs`) a line is printed when the phase changes and otherwise at
most every `LINE_EVERY_S` seconds. `Console.print` writes a lasting line above the panel.

Invariants: nothing here knows Ray or the run; `line` and `panel` are functions of one `View`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Often enough to see that a run is alive, seldom enough that an hour fits on a few screens.
LINE_EVERY_S = 20.0
# A line of a log file that is not a terminal is not wrapped below this width.
PLAIN_WIDTH = 120


@dataclass(frozen=True)
class View:
    """What the run looks like at this moment. Rollout counts are those of the present phase;
    `reward` and `solve_rate` are of the newest rollouts, None while there are none."""

    step: int
    steps: int
    phase: str
    queued: int = 0
    running: int = 0
    grading: int = 0
    finished: int = 0
    failed: int = 0
    reward: float | None = None
    solve_rate: float | None = None
    tokens_per_s: float | None = None
    seconds_left: float | None = None
    note: str = ""


def _stage(view: View) -> tuple[int, str, str]:
    return view.step, view.phase, view.note


def duration(seconds: float | None) -> str:
    """`75` → `1:15`, `3675` → `1:01:15`, None → `–`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def line(view: View) -> str:
    """The view in one plain line; what is not known yet is left out."""
    parts = [f"step {view.step}/{view.steps}", view.phase]
    counts = {name: getattr(view, name) for name in ("queued", "running", "grading")}
    waiting = [f"{count} {name}" for name, count in counts.items() if count]
    if waiting or view.finished or view.failed:
        parts.append(" ".join([*waiting, f"{view.finished} finished {view.failed} failed"]))
    if view.reward is not None:
        parts.append(f"reward {view.reward:.3f}")
    if view.solve_rate is not None:
        parts.append(f"solved {view.solve_rate:.0%}")
    if view.tokens_per_s is not None:
        parts.append(f"{view.tokens_per_s:,.0f} tokens/s")
    if view.seconds_left is not None:
        parts.append(f"{duration(view.seconds_left)} left")
    return " | ".join([*parts, *([view.note] if view.note else [])])


def panel(view: View, title: str) -> RenderableType:
    """The view as a panel of four lines."""
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True)
    head.add_row(
        f"[bold]step {view.step}/{view.steps}[/]  [cyan]{escape(view.phase)}[/]",
        ProgressBar(total=max(1, view.steps), completed=view.step),
        f"{duration(view.seconds_left)} left",
    )
    failed = f"[red]{view.failed} failed[/]" if view.failed else "0 failed"
    body = Table.grid(padding=(0, 2))
    body.add_row(
        "[dim]rollouts[/]",
        f"{view.queued} queued  [yellow]{view.running} running[/]  {view.grading} grading  "
        f"[green]{view.finished} finished[/]  {failed}",
    )
    reward = "–" if view.reward is None else f"{view.reward:.3f}"
    solved = "–" if view.solve_rate is None else f"{view.solve_rate:.0%}"
    speed = "–" if view.tokens_per_s is None else f"{view.tokens_per_s:,.0f}"
    body.add_row("[dim]reward[/]", f"{reward}  [dim]solved[/] {solved}  [dim]tokens/s[/] {speed}")
    body.add_row("", Text(view.note, style="dim", overflow="ellipsis", no_wrap=True))
    layout = Table.grid(expand=True)
    layout.add_row(head)
    layout.add_row(body)
    return Panel(layout, title=escape(title), title_align="left", border_style="dim")


class Console:
    """Shows a run on `stream`. A context manager: leaving it takes the panel away."""

    def __init__(
        self,
        title: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = stream or sys.stdout
        self.rich = RichConsole(file=stream, width=None if stream.isatty() else PLAIN_WIDTH)
        self._title = title
        self._clock = clock
        self._shown: View | None = None
        self._shown_at = -math.inf
        self._live: Live | None = None
        if self.rich.is_terminal:
            self._live = Live(console=self.rich, refresh_per_second=4, transient=True)

    def __enter__(self) -> Console:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, view: View) -> None:
        """Shows `view`, or skips it if a plain stream has had its line."""
        if self._live:
            self._live.update(panel(view, self._title))
            return
        shown, now = self._shown, self._clock()
        moved = shown is None or _stage(shown) != _stage(view)
        if moved or (view != shown and now - self._shown_at >= LINE_EVERY_S):
            self._shown, self._shown_at = view, now
            self.print(line(view))

    def print(self, text: RenderableType) -> None:
        """Writes something that stays: a line of plain text (no markup), or a rich table."""
        content = Text(text) if isinstance(text, str) else text
        self.rich.print(content, soft_wrap=isinstance(text, str))
        self.rich.file.flush()

    def close(self) -> None:
        if self._live:
            self._live.stop()
