"""Three rollouts to read: the worst, the median and the best by reward, as Markdown.

`write(run_dir, episodes)` picks them with `choose` and writes `transcripts.md`. Of a call whose
prompt continues the call before it, only what is new is shown, so that a long rollout reads like a
conversation.

Invariants: every text stands in a fence longer than any run of backticks in it, so no output of a
model or a tool can end its own block; text is cut only in the middle, and says how much was left
out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_ray.records import Outcome

FILE_NAME = "transcripts.md"
# Characters shown of one text: about four screens, enough to see what went wrong.
LONGEST_TEXT = 8000


@dataclass(frozen=True)
class Episode:
    """One finished rollout with the text of its calls: pairs of a prompt and what was sampled."""

    rollout_id: str
    task_id: str
    statement: str
    reward: float
    solved: bool
    outcome: Outcome
    calls: tuple[tuple[str, str], ...]


def choose(episodes: Iterable[Episode]) -> list[tuple[str, Episode]]:
    """The worst, the median and the best episode by reward (ties by id), each at most once."""
    ranked = sorted(episodes, key=lambda episode: (episode.reward, episode.rollout_id))
    places = {"Worst": 0, "Best": len(ranked) - 1, "Median": (len(ranked) - 1) // 2}
    names = ("Worst", "Median", "Best") if len(ranked) > 2 else ("Worst", "Best")[: len(ranked)]
    return [(name, ranked[places[name]]) for name in names]


def write(run_dir: Path | str, episodes: Iterable[Episode]) -> Path:
    """Writes the sample transcripts into `run_dir` and returns the file's path."""
    chosen = choose(episodes)
    parts = ["# Sample transcripts", "Worst, median and best rollout by reward."]
    if not chosen:
        parts = ["# Sample transcripts", "No rollout has finished."]
    for name, episode in chosen:
        parts += _episode(name, episode)
    path = Path(run_dir) / FILE_NAME
    path.write_text("\n\n".join(parts) + "\n")
    return path


def fenced(text: str) -> str:
    """`text` as a Markdown code block that nothing in it can close."""
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        cut = len(text) - 2 * half
        text = f"{text[:half]}\n[... {cut:,} characters left out ...]\n{text[-half:]}"
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _episode(name: str, episode: Episode) -> Iterable[str]:
    solved = "solved" if episode.solved else "not solved"
    yield f"## {name}: reward {episode.reward:.3f}, {solved}"
    yield f"Task `{episode.task_id}`, rollout `{episode.rollout_id}`, {episode.outcome.value}."
    yield "### Task"
    yield fenced(episode.statement)
    for number, (prompt, sampled) in enumerate(episode.calls, start=1):
        yield f"### Call {number}: prompt"
        yield fenced(_news(prompt, episode.calls[: number - 1]))
        yield f"### Call {number}: sampled"
        yield fenced(sampled)


def _news(prompt: str, earlier: Sequence[tuple[str, str]]) -> str:
    """What `prompt` adds to the latest earlier call that it continues, or all of it."""
    for before, sampled in reversed(earlier):
        known = before + sampled
        if prompt.startswith(known):
            return f"[... as before ...]{prompt[len(known) :]}"
    return prompt
