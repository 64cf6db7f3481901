"""What a run shows: one view on a terminal or in a log, a picture, transcripts, a table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from lightning_ray import config, metrics
from lightning_ray.metrics import MetricsLog
from lightning_ray.records import Outcome
from lightning_ray.report import console, curves, statistics, summary, transcripts
from lightning_ray.report.console import Console, View
from lightning_ray.report.summary import Score
from lightning_ray.report.transcripts import Episode
from lightning_ray.run import ending


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def episode(reward: float, name: str = "r", calls: tuple[tuple[str, str], ...] = ()) -> Episode:
    return Episode(name, "task", "Mend it.", reward, reward == 1.0, Outcome.COMPLETED, calls)


# The console


def test_a_log_gets_a_line_per_phase_and_otherwise_one_every_twenty_seconds() -> None:
    out, now = io.StringIO(), [0.0]
    with Console("run", out, clock=lambda: now[0]) as shown:
        for second in range(45):
            now[0] = float(second)
            shown.update(View(1, 3, "collect", running=4, finished=second))
        shown.update(View(1, 3, "update"))
    lines = out.getvalue().splitlines()
    assert [line.split(" | ")[1] for line in lines] == ["collect"] * 3 + ["update"]
    assert lines[1] == "step 1/3 | collect | 4 running 20 finished 0 failed"


def test_a_view_that_does_not_change_is_not_repeated_in_a_log() -> None:
    out, now = io.StringIO(), [0.0]
    with Console("run", out, clock=lambda: now[0]) as shown:
        for second in range(0, 200, 10):
            now[0] = float(second)
            shown.update(View(1, 3, "update"))
    assert len(out.getvalue().splitlines()) == 1


def test_a_log_line_says_step_phase_rollouts_reward_speed_and_time_left() -> None:
    view = View(2, 9, "collect", 3, 2, 1, 10, 1, 0.4567, 0.25, 1234.5, 3675, "engine 2 restarted")
    assert console.line(view) == (
        "step 2/9 | collect | 3 queued 2 running 1 grading 10 finished 1 failed | reward 0.457 | "
        "solved 25% | 1,234 tokens/s | 1:01:15 left | engine 2 restarted"
    )


def test_a_terminal_gets_a_panel_that_goes_away_and_lasting_lines_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Console("my [run]", out) as shown:
        shown.update(View(2, 9, "collect", running=5, reward=0.5, tokens_per_s=321))
        shown.print("checkpoint [2] written")
    text = out.getvalue()
    for part in ("my [run]", "step 2/9", "collect", "5 running", "0.500", "321", "checkpoint [2]"):
        assert part in text
    assert "\x1b[2K" in text  # the panel's lines were erased


# The picture


def log(run_dir: Path, rows: list[dict[str, float | None]]) -> None:
    (run_dir / metrics.FILE_NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_curves_are_drawn_from_the_metrics_of_the_run(tmp_path: Path) -> None:
    log(tmp_path, [{"step": 0}])
    empty = curves.plot(tmp_path).read_bytes()
    row = {"reward/mean": 0.1, "policy/kl": None, "seconds/update": 3.0, "optim/grad_norm": 1.0}
    log(tmp_path, [{"step": 0, "validation/solve_rate": 0.2}, {"step": 1, **row}])
    path = curves.plot(tmp_path)
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.read_bytes() != empty


def test_every_metric_in_the_picture_is_one_that_runs_write() -> None:
    drawn = [name for panel in curves.PANELS for name in panel.lines]
    drawn += [f"seconds/{phase}" for phase in curves.PHASES]
    assert set(drawn) <= set(metrics.METRICS)


# The transcripts


def test_the_worst_the_median_and_the_best_rollout_are_chosen() -> None:
    episodes = [episode(reward, f"r{reward}") for reward in (0.5, 1.0, 0.0, 0.7, 0.2)]
    chosen = [(name, e.reward) for name, e in transcripts.choose(episodes)]
    assert chosen == [("Worst", 0.0), ("Median", 0.5), ("Best", 1.0)]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_no_rollout_is_shown_twice(count: int) -> None:
    episodes = [episode(float(i), f"r{i}") for i in range(count)]
    assert len(transcripts.choose(episodes)) == count


@given(st.text(alphabet="`~ab\n #", max_size=40))
def test_nothing_in_a_text_can_end_its_block(text: str) -> None:
    blocks = MarkdownIt().parse(f"before\n\n{transcripts.fenced(text)}\n\nafter\n")
    assert [b.content for b in blocks if b.type == "fence"] == [text + "\n"]
    assert [b.content for b in blocks if b.type == "inline"] == ["before", "after"]


def test_a_long_text_is_cut_in_the_middle_and_says_so() -> None:
    text = transcripts.fenced("a" * 10_000 + "z" * 10_000)
    assert len(text) < transcripts.LONGEST_TEXT + 100
    assert "[... 12,000 characters left out ...]" in text
    assert text.splitlines()[-2].endswith("z")


def test_of_a_continued_prompt_only_the_news_is_shown(tmp_path: Path) -> None:
    calls = (("system+user", "ls"), ("system+userls file.py", "cat"), ("another", "x"))
    text = transcripts.write(tmp_path, [episode(1.0, calls=calls)]).read_text()
    assert "[... as before ...] file.py" in text
    assert "another" in text
    assert text.count("system+user") == 1


def test_a_run_without_finished_rollouts_still_has_a_transcript_file(tmp_path: Path) -> None:
    assert "No rollout has finished." in transcripts.write(tmp_path, []).read_text()


# The table


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),  # Brown, Cai and DasGupta's formula (4), worked by hand
        (5, 10, 0.2366, 0.7634),
        (31, 32, 0.8426, 0.9945),
        (10, 10, 0.7225, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_the_interval_is_wilsons(successes: int, trials: int, low: float, high: float) -> None:
    assert statistics.wilson(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_more_successes_than_trials_are_refused() -> None:
    with pytest.raises(ValueError, match="3 successes in 2 trials"):
        statistics.wilson(3, 2)


def test_the_table_shows_solve_rates_with_intervals_before_and_after() -> None:
    out = io.StringIO()
    before = Score(32, 1, 0.1, 30.0, 1.0, 5.0)
    after = Score(32, 31, 0.97, 12.0, 1.0, 4.0, failed=2)
    Console("run", out).print(summary.final_table(before, after))
    text = out.getvalue()
    for part in ("3.1% (1/32)", "96.9% (31/32)", "+93.8 points", "84.3% – 99.4%", "-18.0"):
        assert part in text


def test_a_score_is_read_back_from_its_metrics(tmp_path: Path) -> None:
    score = Score(32, 31, 0.97, 12.0, 1.0, 4.0, failed=2)
    log = MetricsLog(tmp_path, config.load(None, ["tracking.backends=[]"]))
    log.log(3, ending.score_metrics(score))
    [row] = metrics.read(tmp_path)
    assert row.keys() - {"step", "time"} == {
        "validation/solve_rate",
        "validation/rollouts",
        "validation/solved",
        "validation/reward",
        "validation/sampled_tokens",
        "validation/calls",
        "validation/rollout_seconds",
        "validation/failed",
    }
    read = ending.score_of(row)
    assert read == score and type(read.solved) is int


def test_the_table_stands_without_a_validation() -> None:
    out = io.StringIO()
    Console("run", out).print(summary.final_table(None, Score(4, 2, 0.5, 10, 1, 1)))
    assert "50.0% (2/4)" in out.getvalue()


def test_the_closing_lines_name_what_there_is_and_the_next_commands(tmp_path: Path) -> None:
    run_dir = Path.cwd() / "runs" / "my run"
    lines = summary.closing_lines(
        run_dir,
        checkpoint=run_dir / "checkpoints/3",
        model=run_dir / "model",
        curves=None,
        transcripts=tmp_path / "t.md",
        resume="python jobs/train_swe.py run.steps=20",
    )
    text = "\n".join(lines)
    assert "curves" not in text
    assert "--model 'runs/my run/model'" in text
    assert "jobs/evaluate.py 'runs/my run'" in text
    assert str(tmp_path / "t.md") in text
    assert lines[-1].endswith("python jobs/train_swe.py run.steps=20")
