"""The command line of `jobs/prepare_swe.py`.

    python jobs/prepare_swe.py SOURCE ... --out DIR [--held-out SOURCE ...] [name=value ...]
                               [--probe CONFIG.yaml] [section.key=value ...]

Overrides with a dot are of the probe's configuration, or of reference runs with runner=kubernetes.
Cleans, probes if asked, writes the card. Each part goes on where it was interrupted: verdicts of
reference runs are kept in DIR, rollouts of the probe in DIR/probe. Whatever a user can put right
ends in one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import difflib
import json
import pkgutil
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_ray.config import ConfigError
from lightning_ray.records import Split
from lightning_ray.report.statistics import Tally
from lightning_ray.rollouts.places import PODS
from lightning_ray.run import command
from lightning_ray.run.command import ModelResolver
from lightning_ray.tasks.swe.cleanroom import RoomFault
from lightning_ray.tasks.swe.preparation import card, pipeline
from lightning_ray.tasks.swe.preparation.options import Options
from lightning_ray.tasks.swe.preparation.pipeline import Outcome
from lightning_ray.tasks.swe.preparation.reference import Elsewhere, Runner
from lightning_ray.tasks.swe.sources import SourceError


def main(resolve_model: ModelResolver, argv: Sequence[str] | None = None) -> int:
    """Prepares a data set; returns the exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    positional: list[str] = arguments.arguments
    settings = [text for text in positional if "=" in text]
    found = [text for text in positional if "=" not in text]
    try:
        if not found:
            raise ConfigError("name at least one source; --help says what it can be")
        options = parse([text for text in settings if "." not in text.partition("=")[0]])
        overrides = [text for text in settings if "." in text.partition("=")[0]]
        clustered = options.runner in PODS and options.reference_runs > 0
        if overrides and arguments.probe is None and not clustered:
            raise ConfigError(f"{overrides[0]} has no effect without --probe CONFIG.yaml")
        outcome = _clean(arguments, found, options, overrides)
        if arguments.probe is not None:
            tallies = _probe(arguments.probe, arguments.out, options, overrides, resolve_model)
            if tallies is None:
                return 2
            outcome = pipeline.probed(arguments.out, outcome, options, tallies)
        else:
            pipeline.unprobed(arguments.out)
        exported = pipeline.export(found, arguments.out, options) if options.export else []
        _report(outcome, arguments.out, options, exported)
        return 0
    except (ConfigError, OSError, RoomFault, SourceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130


def parse(settings: Sequence[str]) -> Options:
    """Options from `name=value` pairs, values in YAML.

    Raises:
        ConfigError: one line per problem.
    """
    try:
        pairs = (text.partition("=") for text in settings)
        return Options.model_validate({name: yaml.safe_load(value) for name, _, value in pairs})
    except yaml.YAMLError as error:
        raise ConfigError(f"a value is not valid YAML: {error}") from error
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            name = str(problem["loc"][0])
            near = difflib.get_close_matches(name, Options.model_fields, n=1)
            known = (
                f"did you mean {near[0]}?" if near else f"known: {', '.join(Options.model_fields)}"
            )
            unknown = problem["type"] == "extra_forbidden"
            lines.append(f"{name}: unknown; {known}" if unknown else f"{name}: {problem['msg']}")
        raise ConfigError("\n".join(lines)) from error


def _parser() -> argparse.ArgumentParser:
    named = "\n".join(
        f"  {name}={field.default!s:<12} {field.description}"
        for name, field in Options.model_fields.items()
    )
    parser = argparse.ArgumentParser(
        description="Makes clean training and validation tasks from rows of SWE-smith's or "
        "SWE-bench's form, with a data card that accounts for every row.",
        epilog=f"options (name=value):\n{named}\n\ndocs/data.md says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="SOURCE | name=value",
        help="a .jsonl, .json or .parquet file, a folder of them or of `datasets`, or a name on "
        "the hub, such as SWE-bench/SWE-smith:train",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument(
        "--held-out",
        action="append",
        default=[],
        metavar="SOURCE",
        help="nothing is trained on that overlaps with this (a benchmark); can be repeated",
    )
    parser.add_argument(
        "--probe",
        type=Path,
        metavar="CONFIG.yaml",
        help="run the tasks with this configuration's model and harness, and keep those that are "
        "solved sometimes",
    )
    return parser


def _runner(
    options: Options,
    probe: Path | None,
    overrides: list[str],
    out: Path,
    say: Callable[[str], None],
) -> Runner | None:
    if not options.reference_runs:
        return None
    if options.runner in PODS:
        from lightning_ray.tasks.swe.preparation import cluster

        settings = cluster.settings(options.runner, probe, overrides)
        return cluster.Cluster(settings, out, options.slowest_s, say)
    try:
        runner: Runner = pkgutil.resolve_name(options.runner)()
        return runner
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"runner={options.runner}: {error}") from error


def _clean(
    arguments: argparse.Namespace, found: list[str], options: Options, overrides: list[str]
) -> Outcome:
    console, out = Console(stderr=True), arguments.out
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    runner = _runner(options, arguments.probe, overrides, out, say)
    with Progress(*columns, console=console, transient=True) as shown:
        bar = shown.add_task("reading")

        def progress(split: str, seen: int, kept: int) -> None:
            shown.update(bar, description=f"{split}: {seen} rows read, {kept} kept")

        try:
            return pipeline.clean(found, arguments.held_out, out, options, runner, progress)
        finally:
            if isinstance(runner, Elsewhere):
                runner.stop()


def _probe(
    config: Path, out: Path, options: Options, overrides: list[str], resolve_model: ModelResolver
) -> dict[str, Tally] | None:
    """How often the base model solves each task, as training would sample it; None if the rollouts
    came to no end, for a reason that was said."""
    from lightning_ray.run import evaluation

    probed = [
        f"run.dir={out / 'probe'}",
        f"task.validation={out / pipeline.CLEANED}",
        "sampling.validation_temperature=null",
    ]
    job = evaluation.job(config, [evaluation.BASE], options.samples, [*overrides, *probed])
    again = " ".join(map(shlex.quote, ["python", *sys.argv]))
    _, found = command.run_evaluation(job, resolve_model, again)
    return found[0].tallies if found else None


def _report(outcome: Outcome, out: Path, options: Options, exported: list[Path]) -> None:
    found = card.tree(outcome, options)
    (out / "card.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    (out / "card.md").write_text(card.markdown(found))
    table = Table(title="rows", title_style="bold", title_justify="left")
    for heading in ("", *outcome.splits):
        table.add_column(heading, justify="right" if heading else "left")
    accounts = outcome.splits.values()
    table.add_row("read", *(str(account.read) for account in accounts))
    for name in outcome.meanings:
        if any(account.dropped[name] for account in accounts):
            table.add_row(f"  {name}", *(str(account.dropped[name]) for account in accounts))
    table.add_row("kept", *(str(account.kept) for account in accounts))
    console = Console()
    console.print(table)
    names = (pipeline.TRAIN, pipeline.VALIDATION, pipeline.DROPPED, "card.md")
    for path in (*(out / name for name in names), *exported):
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    if not outcome.splits[Split.TRAIN].kept:
        raise ConfigError(f"no training task is left; {out / pipeline.DROPPED} says why")
