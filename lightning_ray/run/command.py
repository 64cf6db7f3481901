"""The command line of a training job.

    python jobs/train_swe.py [CONFIG.yaml] [section.key=value ...] [--rehearse] [--dry-run]

Whatever a user can put right (configuration, a taken port, a full disk, a busy run directory) ends
in one line on stderr and exit status 2; an interrupted run says how to resume and ends with 130.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lightning_ray import config as configuration
from lightning_ray.config import ConfigError, RunConfig
from lightning_ray.report.console import Console, View

if TYPE_CHECKING:
    from lightning_ray.report.evaluations import Evaluation
    from lightning_ray.run.ending import Results
    from lightning_ray.run.evaluation import Job

ModelResolver = Callable[[str], Path]
# The overrides that make a configuration small enough for two cores.
Rehearsal = Callable[[RunConfig], list[str]]


def parse(
    argv: Sequence[str], default: Path, rehearsal: Rehearsal | None = None
) -> tuple[RunConfig, bool]:
    """The configuration, and whether this is a dry run. A job without a `rehearsal` has no
    --rehearse.

    Raises:
        ConfigError: see `config.load`.
    """
    parser = argparse.ArgumentParser(
        description="Trains a policy on the rollouts of an agent harness.",
        epilog="docs/configuration.md lists every key.",
    )
    parser.add_argument("arguments", nargs="*", metavar="CONFIG.yaml | section.key=value")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and exit")
    if rehearsal:
        parser.add_argument(
            "--rehearse",
            action="store_true",
            help="run this configuration small: "
            "a tiny model, the embedded tasks, no GPU, two steps",
        )
    options = parser.parse_intermixed_args(argv)  # options may stand anywhere
    files = [argument for argument in options.arguments if "=" not in argument]
    if len(files) > 1:
        raise ConfigError(f"one configuration file at most, not {', '.join(files)}")
    overrides = [argument for argument in options.arguments if "=" in argument]
    file = files[0] if files else default
    config = configuration.load(file, overrides)
    if rehearsal and options.rehearse:
        config = configuration.load(file, [*rehearsal(config), *overrides])
    return config, options.dry_run


def main(
    default: Path,
    resolve_model: ModelResolver,
    argv: Sequence[str] | None = None,
    rehearsal: Rehearsal | None = None,
) -> int:
    """Runs a training job; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        config, dry_run = parse(arguments, default, rehearsal)
        if dry_run:
            _dry_run(config)
            return 0
        return _train(config, resolve_model, " ".join(map(shlex.quote, [sys.argv[0], *arguments])))
    except ConfigError as error:
        return _fail(str(error))


def _dry_run(config: RunConfig) -> None:
    import torch

    from lightning_ray.placement import Device, describe
    from lightning_ray.rollouts import harness

    harness.load(config.harness.recipe, config.harness.args, config.harness.env)
    if config.trainer.strategy == "megatron":
        from lightning_ray.trainer import verl_config

        verl_config.check(config)
    # What needs GPUs is planned for a machine that has them, wherever it is asked.
    needs = config.engine.tensor_parallel > 1 or config.trainer.strategy == "megatron"
    device = Device.GPU if needs or torch.cuda.is_available() else Device.CPU
    print(configuration.dump(config))
    print(describe(config, device))


def _train(config: RunConfig, resolve_model: ModelResolver, command: str) -> int:
    resume = f"python {command}"

    def work(config: RunConfig, console: Console) -> None:
        from lightning_ray.run import ending

        with console:
            results = _until_done(config, resolve_model(config.model.path), console)
        ending.report(results, resume, console)

    return _on_cluster(config, work, resume)


def _until_done(config: RunConfig, model_dir: Path, console: Console) -> Results:
    """Runs to the end, also where a process of the run is lost: then it goes on from its last
    checkpoint, up to run.restarts times without a new one in between."""
    from lightning_ray.engine.actor import EngineStartError
    from lightning_ray.placement import PlacementError
    from lightning_ray.run.checkpoint import Checkpoints
    from lightning_ray.run.driver import Run
    from lightning_ray.run.waiting import ProcessLost
    from lightning_ray.trainer.trainer import TrainerKilled

    lost, before, lacks, device = 0, None, None, None
    while True:
        run = Run(config, model_dir, console, lacks, device)
        try:
            return run.execute(goes_on=lost < config.run.restarts)
        except (ProcessLost, TrainerKilled, EngineStartError, PlacementError) as error:
            if isinstance(error, EngineStartError | PlacementError) and not lost:
                raise  # the configuration; after a loss it may be a node that is not back yet
            latest = Checkpoints(config.run_dir, config.run.keep_checkpoints).latest()
            lost, before = (lost + 1 if latest == before else 1), latest
            lacks, device = run.lacks, run.device
            if lost > config.run.restarts:
                raise
            said = getattr(error, "cause", error)  # Ray's copy is a whole trace
            console.print(
                f"{said}\ngoing on from the last checkpoint, try {lost} of {config.run.restarts}"
            )


def evaluate(resolve_model: ModelResolver, argv: Sequence[str] | None = None) -> int:
    """Runs an evaluation job, or shows finished ones; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="pass@k, cost and outcomes of a run's base model and of what it trained, and "
        "their paired comparison.",
        epilog="docs/evaluation.md says what the numbers mean.",
    )
    parser.add_argument("source", type=Path, nargs="?", metavar="RUN_DIR | CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--samples", type=int, default=1, help="rollouts per task (default: 1)")
    parser.add_argument(
        "--models",
        default="",
        metavar="A,B",
        help="base, trained, step-00010 or a folder with weights (default: base,trained)",
    )
    parser.add_argument(
        "--show",
        nargs="+",
        type=Path,
        metavar="FILE.json",
        help="run nothing; show these evaluations, each compared with the first",
    )
    options = parser.parse_intermixed_args(argv)
    try:
        from lightning_ray.report import evaluation_tables, evaluations

        if options.show:
            console = Console("evaluation")
            for part in evaluation_tables.tables([evaluations.read(f) for f in options.show]):
                console.print(part)
            return 0
        if options.source is None or options.samples < 1:
            raise ConfigError("name a run directory or a configuration, and at least one sample")
        from lightning_ray.run import evaluation

        models = [name for name in options.models.split(",") if name]
        job = evaluation.job(options.source, models, options.samples, options.overrides)
    except ConfigError as error:
        return _fail(str(error))

    again = " ".join(map(shlex.quote, ["python", *sys.argv]))
    status, found = run_evaluation(job, resolve_model, again)
    for part in evaluation_tables.tables(found) if found else ():
        Console("evaluation").print(part)
    return status


def run_evaluation(
    job: Job, resolve_model: ModelResolver, again: str
) -> tuple[int, list[Evaluation]]:
    """Runs a job on a cluster: the exit status, and the evaluations if it came to its end. `again`
    is the command that goes on."""
    from lightning_ray.run import evaluation

    found: list[Evaluation] = []

    def work(config: RunConfig, console: Console) -> None:
        with console:
            model = resolve_model(config.model.path)
            found.extend(evaluation.evaluate(replace(job, config=config), model, console))

    return _on_cluster(job.config, work, again), found


def _on_cluster(config: RunConfig, work: Callable[[RunConfig, Console], None], again: str) -> int:
    """Does `work` on a Ray cluster; `again` is the command that goes on after a failure."""
    from lightning_ray.run import cluster

    cluster.quiet()
    import ray

    from lightning_ray.engine.actor import EngineStartError
    from lightning_ray.gateway.deploy import GatewayStartError, reclaim_port, settle_port
    from lightning_ray.placement import PlacementError
    from lightning_ray.run.waiting import RunError
    from lightning_ray.store.errors import StoreError
    from lightning_ray.trainer.trainer import TrainerDied

    console = Console(config.run.name)
    try:
        config = settle_port(config)
        console.update(View(0, config.run.steps, "starting", note="Ray"))
        cluster.connect(config)
        reclaim_port(config.gateway)
        # After `connect`: Ray's own handler would print a stack trace and end the process at once.
        signal.signal(signal.SIGTERM, _interrupt)
        work(config, console)
        return 0
    except KeyboardInterrupt:
        console.close()
        console.print(f"interrupted; {config.run_dir} keeps what was done. Go on with: {again}")
        return 130
    except (
        ConfigError,
        EngineStartError,
        GatewayStartError,
        PlacementError,
        RunError,
        StoreError,
        TrainerDied,
        OSError,
    ) as error:
        said = getattr(error, "cause", error)  # Ray's copy of an actor's error is a whole trace
        return _fail(f"{said}\nGo on, once that is put right, with: {again}")
    finally:
        ray.shutdown()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
