"""The recipes of examples/swe: each is a valid plan, and the same file runs small on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import PATIENCE, ROOT

from lightning_ray import config, metrics
from lightning_ray.config import ConfigError, RunConfig
from lightning_ray.run import command
from lightning_ray.tasks.swe import rehearsal

RECIPES = sorted((ROOT / "examples" / "swe").glob("*.yaml"))
BIG = [path for path in RECIPES if path.stem.startswith("qwen")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("options", [(), ("--rehearse",)], ids=["itself", "rehearsed"])
def test_a_dry_run_shows_the_plan_of_each_recipe(
    recipe: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(recipe), "--dry-run", *options]
    assert command.main(Path(), Path, arguments, rehearsal.overrides) == 0
    shown = capsys.readouterr().out
    assert "bundles " in shown and ("step_limit=100" in shown or recipe not in BIG)


@pytest.mark.parametrize("recipe", BIG, ids=lambda path: path.stem)
def test_the_big_recipes_hold_the_published_settings(recipe: Path) -> None:
    found = config.load(recipe)
    assert (found.rollout.n, found.run.groups_per_step, found.run.max_staleness) == (8, 16, 2)
    assert (found.trainer.lr, found.algorithm.clip_low, found.algorithm.clip_high) == (
        1e-6,
        0.2,
        0.28,
    )
    assert (found.algorithm.kl, found.algorithm.importance, found.algorithm.importance_cap) == (
        0,
        "token",
        2,
    )
    assert (found.sampling.temperature, found.sampling.validation_temperature) == (1, 0.7)
    assert (found.sampling.max_tokens, found.model.max_model_len) == (65536, 131072)
    assert found.model.max_prompt_tokens == 65536
    assert found.rollout.timeout_s == 5400
    assert found.groups_in_flight > found.run.groups_per_step


def test_a_setting_that_megatron_does_not_have_is_found_by_a_dry_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [recipe] = [path for path in BIG if "35b" in path.stem]
    wrong = "trainer.megatron.expert_model_parallel=8"
    assert command.main(Path(), Path, [str(recipe), "--dry-run", wrong]) == 2
    assert "expert_model_parallel_size?" in capsys.readouterr().err
    wrong = "trainer.megatron.context_parallel_size=3"
    assert command.main(Path(), Path, [str(recipe), "--dry-run", wrong]) == 2
    assert "trainer.ranks=8 is no multiple of the 6 ranks" in capsys.readouterr().err


def test_an_override_wins_over_the_rehearsal() -> None:
    found, _ = command.parse(
        ["--rehearse", "rollout.n=3", "trainer.lr=1e-3"], RECIPES[0], rehearsal.overrides
    )
    assert (found.rollout.n, found.trainer.lr, found.model.path) == (3, 1e-3, "tiny")


def test_a_rehearsal_does_not_touch_what_belongs_to_the_run() -> None:
    real = config.load(
        None,
        [
            "run.name=mine",
            "run.dir=/data/mine",
            "run.storage=s3://b/mine",
            "gateway.advertise=http://x",
        ],
    )
    small = config.load(None, rehearsal.overrides(real))
    assert small.run_dir == Path("runs/mine-rehearsal").absolute()
    assert (small.run.storage, small.gateway.advertise, small.gateway.port) == (None, None, 0)
    assert small.tracking.backends == ()


def test_another_harness_is_replaced_with_its_arguments_and_environment() -> None:
    real = config.load(
        None, ["harness.recipe=codex", "harness.args=[--x]", "harness.env={OPENAI_X: y}"]
    )
    small = config.load(None, rehearsal.overrides(real))
    assert small.harness.recipe == "mini-swe-agent"
    assert "--x" not in small.harness.args and small.harness.env == {}


@st.composite
def runs(draw: st.DrawFn) -> list[str]:
    groups, staleness = draw(st.integers(1, 16)), draw(st.integers(1, 4))
    keys = {
        "run.groups_per_step": groups,
        "run.steps": draw(st.integers(1, 500)),
        "rollout.n": draw(st.integers(2, 16)),
        "rollout.concurrency": draw(st.integers(1, 512)),
        "trainer.ranks": draw(st.sampled_from([1, 2, 8])),
        "trainer.micro_batch_tokens": draw(st.sampled_from([256, 32768])),
        "model.max_model_len": draw(st.sampled_from([4096, 131072])),
        "engine.tensor_parallel": draw(st.sampled_from([1, 4])),
        "model.lora_rank": draw(st.sampled_from([0, 16])),
        "task.validation": draw(st.sampled_from(["null", "x.jsonl"])),
        "algorithm.kl": draw(st.sampled_from([0, 0.01])),
    }
    if draw(st.booleans()):
        in_flight = draw(st.integers(groups + 1, groups * (staleness + 1)))
        keys |= {"run.groups_in_flight": in_flight, "run.max_staleness": staleness}
    if draw(st.booleans()):
        keys |= {"trainer.optimizer_steps": draw(st.integers(1, groups * keys["rollout.n"]))}
    return [f"{key}={value}" for key, value in keys.items()]


@settings(deadline=None)
@given(runs())
def test_the_rehearsal_of_a_valid_run_is_valid_smaller_and_learns_in_the_same_way(
    keys: list[str],
) -> None:
    real = config.load(None, keys)
    small = config.load(None, [*keys, *rehearsal.overrides(real)])
    assert small.algorithm == real.algorithm and small.samples == real.samples
    assert (small.groups_in_flight > small.run.groups_per_step) == (
        real.groups_in_flight > real.run.groups_per_step
    )
    assert bool(small.task.validation) == bool(real.task.validation)
    for section, key in (
        ("run", "steps"),
        ("run", "groups_per_step"),
        ("rollout", "n"),
        ("rollout", "concurrency"),
        ("trainer", "ranks"),
        ("trainer", "micro_batch_tokens"),
        ("model", "max_model_len"),
        ("engine", "tensor_parallel"),
    ):
        assert getattr(getattr(small, section), key) <= getattr(getattr(real, section), key)


def test_a_configuration_that_is_wrong_is_wrong_in_a_rehearsal_too() -> None:
    with pytest.raises(ConfigError, match="rollout.n=1"):
        command.parse(["--rehearse", "rollout.n=1"], RECIPES[0], rehearsal.overrides)
    found, _ = command.parse(["--rehearse"], RECIPES[0], rehearsal.overrides)
    assert isinstance(found, RunConfig)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        pytest.param(BIG[0], 1, id=BIG[0].stem, marks=pytest.mark.demand),
        pytest.param(BIG[1], 2, id=BIG[1].stem),
    ],
)
def test_a_recipe_for_gpus_runs_from_end_to_end_on_a_cpu(
    recipe: Path, steps: int, tmp_path: Path
) -> None:
    """Two steps once, for the weights that come back; the other recipe differs in sizes only."""
    run = subprocess.run(
        [
            sys.executable,
            "jobs/train_swe.py",
            str(recipe),
            "--rehearse",
            f"run.dir={tmp_path}/run",
            f"run.steps={steps}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = metrics.read(tmp_path / "run")
    assert max(row["step"] for row in rows) == steps
    assert sum(row.get("ledger/sampled", 0) for row in rows) > 0
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert "Validation" in run.stdout
