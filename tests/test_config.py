"""The configuration is strict: what it does not know or cannot do is an error that says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ray import config
from lightning_ray.config import ConfigError, RunConfig


def test_without_a_file_every_setting_has_a_default() -> None:
    assert config.load() == RunConfig()


def test_a_file_goes_over_the_defaults_and_overrides_go_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {lr: 1.0e-5, ranks: 2}\nrun: {name: mine}\n")
    loaded = config.load(file, ["trainer.lr=3e-5", "tracking.backends=[]", "task.validation=null"])
    assert (loaded.trainer.lr, loaded.trainer.ranks) == (3e-5, 2)
    assert loaded.tracking.backends == ()
    assert loaded.task.validation is None
    assert loaded.run_dir == Path("runs/mine").absolute()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.lrr=1", "trainer.lrr: unknown key; did you mean trainer.lr?"),
        ("rolout.n=8", "rolout: unknown key; did you mean rollout?"),
        ("run.temperature=1", "run.temperature: unknown key; did you mean sampling.temperature?"),
        ("trainer.zzz=1", "trainer.zzz: unknown key; known: ranks, strategy, megatron,"),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_nearest_valid_name(
    override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, [override])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["sampling.max_tokens=512", "model.max_model_len=512"], "sampling.max_tokens=512"),
        (["model.max_prompt_tokens=32768"], "max_prompt_tokens must be below"),
        (["rollout.n=1"], "rollout.n=1"),
        (["trainer.optimizer_steps=99"], "trainer.optimizer_steps=99"),
        (["task.grader_command=[cat]"], "task.grader and task.grader_command"),
        (["task.validation=null", "run.validate_every=2"], "run.validate_every has no effect"),
        (
            ["task.validation=null", "sampling.validation_temperature=0.5"],
            "sampling.validation_temperature has no effect",
        ),
        (["trainer.max_row_tokens=99999"], "trainer.max_row_tokens"),
        (["run.dir=s3://bucket/runs"], "run.dir=s3://bucket/runs is a URL.*SQLite"),
    ],
)
def test_settings_that_contradict_or_have_no_effect_are_refused_by_name(
    overrides: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        config.load(None, overrides)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, ["rollout.n=none", "trainer.lr=-1", "gateway.hots=x"])
    lines = str(caught.value).splitlines()
    assert {line.partition(":")[0] for line in lines} == {"rollout.n", "trainer.lr", "gateway.hots"}


@pytest.mark.parametrize("override", ["rollout.n", "=3", "rollout..n=3", "rollout.n=[1", "a=1"])
def test_an_override_that_cannot_be_read_is_quoted(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, [override])
    assert override.partition("=")[0] in str(caught.value)


def test_an_override_below_a_plain_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot set run.name.first: name is not a section"):
        config.load(None, ["run.name=x", "run.name.first=y"])


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot read the configuration"), ("a: [", "not valid YAML"), ("- 1", "a mapping")],
)
def test_a_file_that_is_no_configuration_is_named(
    tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        config.load(file)
    assert str(file) in str(caught.value)


def test_a_dumped_configuration_loads_to_an_equal_one(tmp_path: Path) -> None:
    before = config.load(None, ["trainer.betas=[0.9, 0.95]", "harness.env={A: '1'}", "run.name=r"])
    file = tmp_path / "resolved.yaml"
    file.write_text(config.dump(before))
    assert config.load(file) == before


def test_a_rejection_that_verl_does_not_know_is_refused_before_anything_is_collected() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.reject"):
        config.load(None, ["algorithm.reject=token_k9", "algorithm.reject_threshold='2.0'"])
    config.load(None, ["algorithm.reject=token_k2", "algorithm.reject_threshold='2.0'"])


def test_every_setting_has_a_meaning() -> None:
    for name, section in RunConfig.model_fields.items():
        for key, field in section.annotation.model_fields.items():
            assert field.description, f"{name}.{key}"


def test_the_reference_of_settings_is_up_to_date(generate) -> None:
    assert generate.PATH.read_text() == generate.render(), "run `make docs`"
