"""What a run leaves behind: transcripts, curves, the table before and after, the trained model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter

from lightning_ray import metrics
from lightning_ray.records import Call, FinishedRollout, Outcome
from lightning_ray.report import curves, summary, transcripts
from lightning_ray.report.console import Console
from lightning_ray.report.summary import Score
from lightning_ray.run.checkpoint import Checkpoints


@dataclass(frozen=True)
class Results:
    """Where a finished run's results lie. `model` is a Hugging Face folder with the best
    weights."""

    run_dir: Path
    checkpoint: Path
    model: Path


def score(rollouts: Sequence[FinishedRollout], calls: Mapping[str, Sequence[Call]]) -> Score:
    """What a validation found; a void rollout solved nothing. `calls` are those of every attempt,
    by attempt id."""
    good = [r for r in rollouts if r.reward is not None or r.outcome is Outcome.VOID]
    rewards = [r.reward for r in good if r.reward is not None]
    mine = [call for r in good for call in calls.get(r.attempt_id, ())]
    count = max(len(good), 1)
    return Score(
        rollouts=len(good),
        solved=sum(reward.solved for reward in rewards),
        reward=sum(reward.value for reward in rewards) / count,
        sampled_tokens=sum(len(call.tokens) for call in mine) / count,
        calls=len(mine) / count,
        rollout_seconds=sum(r.running_s for r in good) / count,
        failed=len(rollouts) - len(good),
    )


def score_metrics(score: Score) -> dict[str, float]:
    """A score as metrics; `score_of` reads them again."""
    found = {f"validation/{name}": value for name, value in asdict(score).items()}
    return {"validation/solve_rate": score.solve_rate, **found}


def score_of(row: Mapping[str, float]) -> Score:
    """The score in a line of metrics."""
    found = {field.name: row[f"validation/{field.name}"] for field in fields(Score)}
    return TypeAdapter(Score).validate_python(found)  # counts are floats in a line


def write_transcripts(
    run_dir: Path,
    model_dir: Path,
    rollouts: Sequence[FinishedRollout],
    calls: Mapping[str, Sequence[Call]],
) -> Path:
    """Writes the worst, the median and the best of `rollouts` for reading."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    episodes = [
        transcripts.Episode(
            rollout_id=r.spec.rollout_id,
            task_id=r.spec.task.task_id,
            statement=r.spec.task.statement,
            reward=r.reward.value,
            solved=r.reward.solved,
            outcome=r.outcome,
            calls=tuple(
                (tokenizer.decode(call.prompt.tolist()), tokenizer.decode(call.tokens.tolist()))
                for call in calls.get(r.attempt_id, ())
            ),
        )
        for r in rollouts
        if r.reward is not None
    ]
    return transcripts.write(run_dir, episodes)


def keep_model(run_dir: Path, checkpoints: Checkpoints) -> Results:
    """Puts the best checkpoint's Hugging Face folder at `model/` of the run directory (hard links
    where the file system has them, so it costs no space)."""
    latest, best = checkpoints.latest(), checkpoints.best()
    assert latest is not None  # the last step is always checkpointed
    source = (best[0] if best else latest[0]) / "hf"
    partial, final = run_dir / "model.partial", run_dir / "model"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=_link)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return Results(run_dir, latest[0], final)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def report(results: Results, resume: str, console: Console) -> None:
    """The last thing a run shows."""
    rows = metrics.read(results.run_dir)
    validated = [row for row in rows if "validation/rollouts" in row]
    if validated:
        before, after = score_of(validated[0]), score_of(validated[-1])
        console.print(summary.final_table(before, after if len(validated) > 1 else None))
    picture = curves.plot(results.run_dir)
    reading = results.run_dir / transcripts.FILE_NAME
    for line in summary.closing_lines(
        results.run_dir,
        checkpoint=results.checkpoint,
        model=results.model,
        curves=picture,
        transcripts=reading if reading.exists() else None,
        resume=resume,
    ):
        console.print(line)
