"""An evaluation: which models it means, what it writes, what it shows."""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_ray.config import ConfigError, RunConfig, dump, load
from lightning_ray.records import (
    Call,
    FinishedRollout,
    FinishReason,
    Outcome,
    PolicyVersion,
    Reward,
    RolloutSpec,
    RolloutState,
    Span,
    Split,
    Task,
)
from lightning_ray.report import evaluation_tables, evaluations
from lightning_ray.report.console import Console, View
from lightning_ray.report.evaluations import Evaluation, Rollout
from lightning_ray.rollouts.lifecycle import ControllerStatus
from lightning_ray.run import command, ending, evaluation
from lightning_ray.run.evaluation import Candidate, Job
from lightning_ray.run.waiting import RunError

PATCH = "diff --git a/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+1\n"


def rollout(task: str, sample: int, solved: bool | None, **more) -> Rollout:
    outcome = Outcome.NODE_LOST if solved is None else Outcome.COMPLETED
    names = {"rollout_id": f"{task}-{sample}", "task_id": task, "sample": sample}
    return Rollout(**names, **{"outcome": outcome, "solved": solved} | more)


BEFORE = Evaluation(
    name="base-1",
    model="tiny",
    rollouts=(
        rollout("a", 0, True, sampled_tokens=100, prompt_tokens=1000, all_tokens=1100, seconds=2),
        rollout("a", 1, False, sampled_tokens=300, prompt_tokens=3000, all_tokens=3300, seconds=4),
        rollout("b", 0, False, metrics={"forged": 1.0}, outcome=Outcome.TIMEOUT),
        rollout("b", 1, None, all_tokens=600, seconds=94),
    ),
)
AFTER = Evaluation(
    name="trained-1",
    model="runs/x/model/model.safetensors",
    rollouts=tuple(
        rollout(task, sample, True, patch=PATCH if task == "a" else "")
        for task in "ab"
        for sample in range(2)
    ),
)


# What the numbers mean


def test_pass_at_k_is_over_the_tasks_that_have_so_many_graded_rollouts() -> None:
    found = evaluations.pass_at(BEFORE)
    assert {k: (e.value, e.tasks) for k, e in found.items()} == {1: (0.25, 2), 2: (1.0, 1)}


def test_lost_rollouts_are_counted_and_are_in_no_rate() -> None:
    assert sorted(evaluations.outcomes(BEFORE)) == [
        (Outcome.COMPLETED, 2, 1),
        (Outcome.NODE_LOST, 1, None),
        (Outcome.TIMEOUT, 1, 0),
    ]
    assert BEFORE.tallies["b"].rollouts == 1
    assert evaluations.signals(BEFORE) == {"forged": 1.0}


def test_a_void_rollout_is_unsolved_so_that_digging_never_raises_a_rate() -> None:
    dug = rollout("a", 1, None, outcome=Outcome.VOID, patch=PATCH)
    one = Evaluation(name="x", model="", rollouts=(rollout("a", 0, True, patch=PATCH), dug))
    assert one.tallies["a"].rollouts == 2
    assert evaluations.pass_at(one)[1].value == 0.5
    assert (Outcome.VOID, 1, 0) in evaluations.outcomes(one)
    assert list(evaluations.predictions(one)) == [0]  # no line, so not submitted
    assert "void" in shown(one)


def test_a_validation_during_training_counts_a_void_rollout_as_unsolved_too() -> None:
    def ended(name: str, outcome: Outcome, reward: Reward | None) -> FinishedRollout:
        spec = RolloutSpec(name, "g", Task("t", "Mend it."), Split.VALIDATION, 0)
        state = RolloutState.FINISHED if reward else RolloutState.FAILED
        return FinishedRollout(spec, state, outcome, f"{name}-a0", 1, reward, running_s=2)

    rollouts = [
        ended("good", Outcome.COMPLETED, Reward(1.0, True)),
        ended("dug", Outcome.VOID, None),
        ended("lost", Outcome.NODE_LOST, None),
    ]
    found = ending.score(rollouts, {})
    assert (found.rollouts, found.solved, found.failed, found.reward) == (2, 1, 1, 0.5)


def test_costs_are_per_graded_rollout_and_those_in_all_include_what_was_lost() -> None:
    found = evaluations.costs(BEFORE)
    tokens = found["sampled tokens"]
    assert (tokens.mean, tokens.median, tokens.total) == (pytest.approx(400 / 3), 100, 400)
    assert found["seconds"].total == 6
    assert sum(r.all_tokens for r in BEFORE.rollouts) == 5000


def test_a_comparison_names_the_tasks_that_moved() -> None:
    assert evaluations.moved(BEFORE, AFTER) == (["a", "b"], [])
    with pytest.raises(ConfigError, match="no task in common"):
        evaluations.comparison(BEFORE, Evaluation(name="x", model="", rollouts=()))


# What is written


def test_an_evaluation_is_read_as_it_was_written(tmp_path: Path) -> None:
    [path] = evaluations.write(BEFORE, tmp_path)
    assert evaluations.read(path) == BEFORE
    summary = json.loads(path.read_text())["summary"]
    assert (summary["tasks"], summary["rollouts"], summary["lost"]) == (2, 4, 1)
    assert summary["pass_at"]["1"]["value"] == 0.25
    assert summary["all_tokens"] == 5000


def test_predictions_have_swe_benchs_columns_and_a_file_per_sample(tmp_path: Path) -> None:
    paths = evaluations.write(AFTER, tmp_path)
    assert [path.name for path in paths] == [
        "trained-1.json",
        "trained-1.predictions-0.jsonl",
        "trained-1.predictions-1.jsonl",
    ]
    rows = [json.loads(line) for line in paths[1].read_text().splitlines()]
    assert rows == [
        {"instance_id": "a", "model_name_or_path": "trained-1", "model_patch": PATCH},
        {"instance_id": "b", "model_name_or_path": "trained-1", "model_patch": ""},
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x", "rollouts": [{}]}'])
def test_a_file_that_is_no_evaluation_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="x.json is no evaluation"):
        evaluations.read(path)


def test_a_rollout_is_summed_up_over_all_its_attempts() -> None:
    def call(attempt: str, seq: int, prompt: int, sampled: int) -> Call:
        tokens, span = np.zeros(sampled, np.int32), Span(PolicyVersion("x", 0), sampled)
        empty = np.zeros(prompt, np.int32), tokens, np.zeros(sampled, np.float32)
        made = Call(f"{attempt}{seq}", attempt, seq, *empty, (span,), FinishReason.STOP)
        return replace(made, cached_tokens=prompt // 2)

    spec = RolloutSpec("r", "g", Task("t", "Mend it."), Split.VALIDATION, 0)
    reward = Reward(0.5, False, {"x": 1.0})
    ended = FinishedRollout(
        spec, RolloutState.FINISHED, Outcome.TIMEOUT, "r-a1", 2, reward, running_s=7
    )
    calls = {
        "r-a0": [call("r-a0", 0, 10, 5)],
        "r-a1": [call("r-a1", 0, 10, 4), call("r-a1", 1, 20, 6)],
    }
    found = evaluation.summed_up(ended, 3, calls, {"patch": PATCH, "files": {}})
    assert (found.calls, found.prompt_tokens, found.sampled_tokens) == (2, 30, 10)
    assert (found.cached_tokens, found.all_tokens, found.seconds) == (15, 55, 7)
    assert (found.sample, found.patch, found.reward) == (3, PATCH, 0.5)
    assert evaluation.summed_up(ended, 3, calls, None).patch is None


# What is shown


def shown(*parts: Evaluation) -> str:
    out = io.StringIO()
    console = Console("x", out)
    for part in evaluation_tables.tables(parts):
        console.print(part)
    return out.getvalue()


def test_the_tables_say_rates_with_intervals_outcomes_cost_and_difference() -> None:
    text = shown(BEFORE, AFTER)
    for part in (
        "pass@2",
        "25.0%",
        "95 % interval",
        "node_lost",
        "no reward",
        "forged, mean",
        "all tokens, lost attempts too",
        "5,000",
        "trained-1 against base-1, on 2 tasks",
        "+75.0",
        "0.167",  # one way of six: two of two and two of two, 1/2 times 1/3
        "tasks better: a, b",
    ):
        assert part in text, part


def test_a_comparison_says_which_settings_of_the_two_differ() -> None:
    def made(name: str, *overrides: str) -> Evaluation:
        settings = dump(load(None, list(overrides)))
        return Evaluation(name=name, model="", settings=settings, rollouts=AFTER.rollouts)

    free = ("model.path=x", "trainer.lr=1", "rollout.concurrency=3", "task.validation=x.jsonl")
    assert evaluations.differences(made("one"), made("two", *free)) == []
    other = made(
        "two",
        "sampling.validation_temperature=0.7",
        "harness.args=[--config=agent.step_limit=9]",
        "task.grader_options={judge: false}",
    )
    assert evaluations.differences(made("one"), other) == [
        'harness.args=[] in one, ["--config=agent.step_limit=9"] in two',
        "sampling.validation_temperature=null in one, 0.7 in two",
        'task.grader_options={} in one, {"judge": false} in two',
    ]
    assert "sampling.validation_temperature=null in one, 0.7 in two" in shown(made("one"), other)
    assert evaluations.differences(BEFORE, AFTER) == []  # as those whose settings nobody kept


def test_an_evaluation_without_a_graded_rollout_can_be_shown() -> None:
    assert "no reward" in shown(Evaluation(name="x", model="", rollouts=(rollout("a", 0, None),)))


def test_finished_evaluations_are_shown_without_running_anything(tmp_path: Path, capsys) -> None:
    paths = [str(evaluations.write(one, tmp_path)[0]) for one in (BEFORE, AFTER)]
    assert command.evaluate(Path, ["--show", *paths]) == 0
    assert "trained-1 against base-1" in capsys.readouterr().out
    assert command.evaluate(Path, ["--show", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


# Which models, and under which name


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for where in ("model", "checkpoints/step-00002/hf"):
        (folder / where).mkdir(parents=True)
        (folder / where / "model.safetensors").write_bytes(os.urandom(100_000))
    (folder / "config.yaml").write_text(dump(RunConfig()))
    return folder


def test_a_run_is_evaluated_with_its_base_model_and_its_result(run_dir: Path) -> None:
    job = evaluation.job(run_dir, [], 1, [])
    assert [candidate.name for candidate in job.candidates] == ["base", "trained"]
    assert job.config.run_dir == run_dir / "evaluations"
    assert job.config.rollout.keep_results


def test_checkpoints_and_folders_can_be_named_and_others_are_refused(run_dir: Path) -> None:
    other = run_dir.parent / "other model"
    shutil.copytree(run_dir / "model", other)
    job = evaluation.job(run_dir, ["step-00002", str(other)], 1, [])
    assert [candidate.name for candidate in job.candidates] == ["step-00002", "other-model"]
    with pytest.raises(ConfigError, match="two models would have the same name"):
        evaluation.job(run_dir, [str(other), f"{other}/../other model"], 1, [])
    with pytest.raises(ConfigError, match="no model 'step-00009'.*step-00002"):
        evaluation.job(run_dir, ["step-00009"], 1, [])
    shutil.rmtree(run_dir / "model")
    with pytest.raises(ConfigError, match="let the run finish first.*step-00002"):
        evaluation.job(run_dir, [], 1, [])


def test_a_configuration_alone_is_evaluated_with_its_model(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"run: {{dir: {tmp_path}/runs}}\n")
    job = evaluation.job(file, [], 4, ["sampling.validation_temperature=0.7"])
    assert [candidate.name for candidate in job.candidates] == ["base"]
    assert job.config.run_dir == tmp_path / "runs" / "evaluations"


def test_rollouts_of_a_task_count_again_when_other_tasks_or_more_samples_are_wanted() -> None:
    def ids(*tasks: Task, samples: int = 1) -> list[str]:
        job = Job(RunConfig(), list(tasks), [Candidate("base", None)], samples)
        return [spec.rollout_id for spec in job.specs(job.version(job.candidates[0]))]

    one, other = Task("a", "Mend it.", {"n": 1}), Task("b", "Mend it.")
    [first] = ids(one)
    assert ids(other, one)[1] == first
    assert ids(one, samples=2)[0] == first
    assert first not in ids(replace(one, fields={"n": 2}), replace(one, statement="Do."), other)


def test_other_weights_tasks_or_settings_are_another_evaluation(run_dir: Path) -> None:
    def name(*overrides: str, model: str = "base") -> str:
        job = evaluation.job(run_dir, [model], 1, overrides)
        return job.name(job.candidates[0])

    first = name()
    same = ("rollout.concurrency=3", "gateway.port=0", "run.steps=99", "rollout.n=4")
    assert name(*same) == first
    for other in ("sampling.validation_temperature=0.5", "rollout.timeout_s=9", "model.path=x"):
        assert name(other) != first
    assert name("task.validation=lightning_ray.tasks.swe.embedded:train") != first
    pods = ("kubernetes.image=a", "rollout.launcher=kubernetes")
    for other in ("kubernetes.image=b", "kubernetes.python=/p", "kubernetes.grade=cluster"):
        assert name(*pods, other) != name(*pods)
    assert name("engine.enforce_eager=true") != first
    for setting in ("model.chat_template", "kubernetes.template"):  # files changed in their place
        file = run_dir / setting
        file.write_text("kind: Job\nspec: {template: {spec: {containers: [{name: a}]}}}\n")
        before = name(*pods, f"{setting}={file}")
        file.write_text(file.read_text() + "# other\n")
        assert name(*pods, f"{setting}={file}") != before
    trained = name(model="trained")
    weights = run_dir / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for place in range(0, len(content), 1000):  # an update of the policy changes far more
        content[place] ^= 1
    weights.write_bytes(content)
    assert name(model="trained") != trained


def test_a_base_model_changed_in_its_place_is_evaluated_anew(run_dir: Path, monkeypatch) -> None:
    """As far as to the store, which is asked for rollouts made with these weights."""
    asked: list[str] = []

    class Asked(Exception):
        pass

    def finished(self, specs):
        asked.append(specs[0].rollout_id)
        raise Asked

    monkeypatch.setattr(evaluation.Stack, "open_store", lambda self, keep: None)
    monkeypatch.setattr(evaluation.Stack, "finished", finished)
    base = run_dir.parent / "base"
    shutil.copytree(run_dir / "model", base)

    def lineage() -> str:
        job = evaluation.job(run_dir, ["base"], 1, [])
        with pytest.raises(Asked):
            evaluation.evaluate(job, base, Console("x"))
        return asked.pop()

    first = lineage()
    os.utime(base / "model.safetensors", (0, 0))
    assert lineage() == first
    (base / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    quantised = lineage()
    assert quantised != first
    weights = bytearray((base / "model.safetensors").read_bytes())
    weights[0] ^= 1
    (base / "model.safetensors").write_bytes(weights)
    assert lineage() not in (first, quantised)


@pytest.mark.parametrize(("done", "first"), [("", "base"), ("base", "trained"), ("all", "")])
def test_of_an_evaluation_that_was_killed_only_pods_of_the_model_served_first_run_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, done: str, first: str
) -> None:
    """The engines would answer the others, too, which would count for their own model."""

    class Asked(Exception):
        pass

    kept: dict[str, bool] = {}

    def open_store(self, keep):
        for candidate in job.candidates:
            for spec in replace(job, base=base).specs(version(candidate)):
                kept[candidate.name] = keep(f"{spec.rollout_id}-a1")
        raise Asked

    def finished(self, specs):
        return specs if done == "all" or (done and specs[0].rollout_id.startswith(done)) else []

    def version(candidate: Candidate):
        return replace(job, base=base).version(candidate)

    monkeypatch.setattr(evaluation.Stack, "open_store", open_store)
    monkeypatch.setattr(evaluation.Stack, "finished", finished)
    job = evaluation.job(run_dir, ["trained", "base"], 1, [])
    base = evaluation._folder_fingerprint(run_dir / "model")
    with pytest.raises(Asked):
        evaluation.evaluate(job, run_dir / "model", Console("x"))
    assert kept == {name: name == first for name in ("base", "trained")}


def test_an_evaluation_whose_rollouts_are_all_lost_ends_and_says_why(tmp_path: Path) -> None:
    def ended(number: int, state: RolloutState) -> FinishedRollout:
        task = Task(f"t{number}", "s")
        spec = RolloutSpec(f"r{number}", "g", task, Split.VALIDATION, 0)
        lost = state is RolloutState.FAILED
        outcome = Outcome.LAUNCH_FAULT if lost else Outcome.COMPLETED
        reward = None if lost else Reward(0.0, False)
        return FinishedRollout(spec, state, outcome, f"r{number}-a0", 1, reward, "no folder")

    status = ControllerStatus(0, 0, 0, 0, 0, 0, {})
    lost = [ended(number, RolloutState.FAILED) for number in range(32)]
    console = Console("evaluation", io.StringIO())
    # Those of the first life of the job are not held against this one.
    progress = evaluation._progress(console, View(1, 1, "x"), lost[:16], tmp_path)
    progress(lost[:31], status)
    with pytest.raises(RunError, match="16 of 16 rollouts have no reward .*no folder"):
        progress(lost, status)
    progress([*lost, ended(99, RolloutState.FINISHED)], status)
