"""pass@k of one or several models on a set of tasks, with the harness and the settings of a run.

One stack serves all: the engines start with the base model and are then given the other weights in
turn. The rollouts are kept in `evaluations/` of the run directory under a name that is made from
the weights, the settings and the task. A large file is known by its size and by blocks all over it;
the base model is known by every file of its folder, whatever the folder's path and times.

Invariants: an interrupted evaluation goes on where it was; a rollout made with other weights, of
another task or with other settings is never used; the run itself is not touched.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_ray.config import ConfigError, RunConfig, dump, load
from lightning_ray.engine.actor import Policy
from lightning_ray.placement import reserve
from lightning_ray.records import (
    Call,
    FinishedRollout,
    Json,
    PolicyVersion,
    RolloutSpec,
    RolloutState,
    Split,
    Task,
)
from lightning_ray.report import evaluations
from lightning_ray.report.console import Console, View
from lightning_ray.report.evaluations import Evaluation, Rollout
from lightning_ray.rollouts import harness
from lightning_ray.rollouts.lifecycle import ControllerStatus
from lightning_ray.run import cluster, data
from lightning_ray.run.collection import check_faults
from lightning_ray.run.stack import Progress, Stack, with_counts

# In the run directory.
FOLDER = "evaluations"
WEIGHTS = "model.safetensors"
BASE, TRAINED = "base", "trained"
# An evaluation whose first rollouts all end without a reward, so many, is ended.
_ENOUGH = 16
# Key of a result under which a task family gives the agent's change as a unified diff.
PATCH = "patch"
# Blocks of a weights file that its fingerprint reads, and their bytes: half a million weights, of
# which an update changes thousands even in bfloat16, read in milliseconds.
_BLOCKS, _BLOCK_BYTES = 256, 4096


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate. `weights` are what the engines are given; None: the base model."""

    name: str
    weights: Path | None


@dataclass(frozen=True)
class Job:
    """What is to be evaluated. `config.run_dir` is where the evaluations are kept; `base` is the
    fingerprint of the base model's folder, once that is known."""

    config: RunConfig
    tasks: list[Task]
    candidates: list[Candidate]
    samples: int = 1
    base: str = ""

    def version(self, candidate: Candidate) -> PolicyVersion:
        """What the rollouts of a candidate are labelled with: its name, and a fingerprint of its
        weights and of the settings that decide the numbers."""
        settings = evaluations.decisive(self.config.model_dump(mode="json"))
        weights = _fingerprint(candidate.weights) if candidate.weights else ""
        decisive = [*settings.values(), weights, self.base, _contents(self.config)]
        return PolicyVersion(f"{candidate.name}-{_digest(decisive)}", int(bool(candidate.weights)))

    def name(self, candidate: Candidate) -> str:
        """The name of a candidate's evaluation, which belongs to the tasks, too."""
        tasks = [_digest(vars(task)) for task in self.tasks]
        return f"{candidate.name}-{_digest([self.version(candidate).lineage, tasks])}"

    def specs(self, version: PolicyVersion) -> list[RolloutSpec]:
        """The rollouts of every task. Their ids hold a digest of the task: what was done for a task
        counts again when others are added or changed, or more samples are wanted."""
        groups = [f"{version.lineage}-{_digest(vars(task))}" for task in self.tasks]
        return [
            RolloutSpec(f"{group}-r{k:02d}", group, task, Split.VALIDATION, version.step)
            for task, group in zip(self.tasks, groups, strict=True)
            for k in range(self.samples)
        ]


def job(source: Path, models: Sequence[str], samples: int, overrides: Sequence[str]) -> Job:
    """The evaluation of `models` with the configuration of `source`: a run directory, or a
    configuration file, whose model is then the only one by default.

    `models` are `base`, `trained` (a finished run's result), a checkpoint of the run (`step-00010`)
    or a folder with `model.safetensors` of the same architecture. Empty: base and trained.

    Raises:
        ConfigError: there is no such run, configuration or model, or there are no validation tasks.
    """
    is_run = source.is_dir()
    if is_run and not (source / "config.yaml").exists():
        raise ConfigError(f"{source} is not a run directory: it has no config.yaml")
    config = load(source / "config.yaml" if is_run else source, overrides)
    run_dir = source if is_run else config.run_dir
    # Wherever the run was made, its evaluation stays beside it.
    keep = [f"run.dir={run_dir / FOLDER}", "rollout.keep_results=true"]
    config = load(source / "config.yaml" if is_run else source, [*overrides, *keep])
    if config.task.validation is None:
        raise ConfigError(f"{source} has no task.validation to evaluate on")
    wanted = list(dict.fromkeys(models or ([BASE, TRAINED] if is_run else [BASE])))
    found = [_candidate(run_dir, name) for name in wanted]
    if len({candidate.name for candidate in found}) < len(found):
        raise ConfigError(f"two models would have the same name: {', '.join(wanted)}")
    tasks = data.load_tasks(config.task.validation, "task.validation")
    return Job(config, tasks, found, samples)


def evaluate(job: Job, base_dir: Path, console: Console) -> list[Evaluation]:
    """Runs what is missing and writes each evaluation; `base_dir` is the base model's folder."""
    config, job = job.config, replace(job, base=_folder_fingerprint(base_dir))
    stack = Stack(config, base_dir, config.run_dir, console.print)
    stack.pointer.parent.mkdir(parents=True, exist_ok=True)
    bundles = None
    found: dict[str, Evaluation] = {}
    try:
        # The base model first, while the engines have it.
        order = sorted(job.candidates, key=lambda candidate: candidate.weights is not None)
        specs_of = [job.specs(job.version(candidate)) for candidate in order]

        def served_first(attempt_id: str) -> bool:
            """What runs on in a pod is answered by the model that is served first: another's
            rollouts would end as that one's."""
            open_ = (specs for specs in specs_of if len(stack.finished(specs)) < len(specs))
            first = {spec.rollout_id for spec in next(open_, [])}
            return attempt_id.rpartition("-a")[0] in first

        stack.open_store(served_first)
        for number, candidate in enumerate(order, 1):
            version = job.version(candidate)
            specs = job.specs(version)
            rollouts = stack.finished(specs)
            if len(rollouts) < len(specs):
                if bundles is None:  # an evaluation that is done needs no engines
                    stack.know(cluster.check_rollouts(config, console.print, job.tasks))
                    bundles = reserve(config)
                    bundles.check_shared(config.run_dir, base_dir)
                    stack.start(bundles, PolicyVersion(BASE, 0))
                if candidate.weights:
                    policy = Policy(str(candidate.weights.absolute()), version)
                    stack.remember(policy)
                    stack.load(policy, checksum=None)
                else:
                    stack.open()
                view = View(number, len(order), f"evaluate {candidate.name}")
                rollouts = stack.collect(specs, _progress(console, view, rollouts, config.run_dir))
            evaluation = Evaluation(
                name=job.name(candidate),
                model=str(candidate.weights or config.model.path),
                settings=dump(config),
                rollouts=tuple(_rollout(r, i % job.samples, stack) for i, r in enumerate(rollouts)),
            )
            for path in evaluations.write(evaluation, config.run_dir):
                console.print(f"wrote {path}")
            found[candidate.name] = evaluation
        return [found[candidate.name] for candidate in job.candidates]
    finally:
        stack.stop()
        if bundles is not None:
            bundles.remove()


def _progress(
    console: Console, view: View, before: Sequence[FinishedRollout], run_dir: Path
) -> Progress:
    """Shows how it goes; ends what cannot come to anything. `before` had ended when it began."""
    known = {finished.spec.rollout_id for finished in before}

    def progress(done: Sequence[FinishedRollout], status: ControllerStatus) -> None:
        console.update(with_counts(view, done, status))
        new = [finished for finished in done if finished.spec.rollout_id not in known]
        if len(new) >= _ENOUGH and all(r.state is RolloutState.FAILED for r in new):
            check_faults(new, 0.0, run_dir)

    return progress


def _rollout(finished: FinishedRollout, sample: int, stack: Stack) -> Rollout:
    # One rollout at a time: the calls of thousands do not fit into memory together.
    return summed_up(finished, sample, stack.calls([finished]), stack.result(finished))


def summed_up(
    finished: FinishedRollout, sample: int, calls: dict[str, list[Call]], result: Json | None
) -> Rollout:
    """A rollout as its evaluation keeps it. `calls` are those of all its attempts, by attempt
    id."""
    mine = calls.get(finished.attempt_id, [])
    patch = (result or {}).get(PATCH)
    return Rollout(
        rollout_id=finished.spec.rollout_id,
        task_id=finished.spec.task.task_id,
        sample=sample,
        outcome=finished.outcome,
        solved=finished.reward.solved if finished.reward else None,
        reward=finished.reward.value if finished.reward else None,
        metrics=finished.reward.metrics if finished.reward else {},
        detail=finished.detail,
        attempts=finished.attempts,
        calls=len(mine),
        prompt_tokens=sum(len(call.prompt) for call in mine),
        cached_tokens=sum(call.cached_tokens for call in mine),
        sampled_tokens=sum(len(call.tokens) for call in mine),
        all_tokens=sum(
            len(call.prompt) + len(call.tokens) for some in calls.values() for call in some
        ),
        seconds=finished.running_s,
        patch=patch if isinstance(patch, str) else None,
    )


def _candidate(run_dir: Path, name: str) -> Candidate:
    if name == BASE:
        return Candidate(BASE, None)
    if name == TRAINED:
        weights = run_dir / "model" / WEIGHTS
        if not weights.exists():
            raise ConfigError(
                f"{run_dir} has no trained model yet: let the run finish first, or name one of its "
                f"checkpoints ({', '.join(_checkpoints(run_dir)) or 'it has none'})"
            )
        return Candidate(TRAINED, weights)
    folder = run_dir / "checkpoints" / name / "hf"
    folder = folder if folder.is_dir() else Path(name)
    if not (folder / WEIGHTS).exists():
        raise ConfigError(
            f"no model {name!r}: name base, trained, a checkpoint "
            f"({', '.join(_checkpoints(run_dir)) or f'{run_dir} has none'}) or a folder with "
            f"{WEIGHTS}"
        )
    label = re.sub(r"[^A-Za-z0-9._-]", "-", Path(name).name).strip(".-") or "model"
    return Candidate(label, folder / WEIGHTS)


def _checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in run_dir.glob("checkpoints/step-?????/hf"))


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def _contents(config: RunConfig) -> list[str]:
    """Fingerprints of the files that settings name by their path: "" for one that is no file."""
    named = (config.model.chat_template, config.kubernetes.template)
    paths = [Path(path).expanduser() for path in named if path]
    paths.append(harness.path_of(config.harness.recipe))
    return [_fingerprint(path) if path.is_file() else "" for path in paths]


def _folder_fingerprint(folder: Path) -> str:
    """Of a model's folder: names, sizes and contents of its files, as `_fingerprint` reads them;
    settings of its weights, such as a quantisation, are among them."""
    found = (path for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    return _digest({path.name: _fingerprint(path) for path in found})


def _fingerprint(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with file.open("rb") as content:
        if size <= _BLOCKS * _BLOCK_BYTES:
            digest.update(content.read())
        else:
            for block in range(_BLOCKS):
                content.seek(block * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
                digest.update(content.read(_BLOCK_BYTES))
    return digest.hexdigest()
