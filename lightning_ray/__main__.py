"""`python -m lightning_ray`: small commands around runs. Training itself starts from `jobs/`.

install [RECIPE ...]   makes the environments of built-in harnesses (default: mini-swe-agent)
curves RUN_DIR         draws curves.png anew from metrics.jsonl, also while the run goes on
resolve CONFIG [a.b=c] prints the resolved configuration
why RUN_DIR --rollout R [--token N]   what became of a rollout's tokens, and why
simulate [RUN_DIR]     schedules of training side by side, in virtual time
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lightning_ray.config import ConfigError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lightning_ray")
    commands = parser.add_subparsers(dest="command", required=True)
    install = commands.add_parser("install", help="make the environments of built-in harnesses")
    install.add_argument("recipe", nargs="*", default=["mini-swe-agent"])
    curves = commands.add_parser("curves", help="draw the curves of a run anew")
    curves.add_argument("run_dir", type=Path)
    resolve = commands.add_parser("resolve", help="print the resolved configuration")
    resolve.add_argument("config", type=Path)
    resolve.add_argument("overrides", nargs="*")
    why = commands.add_parser("why", help="what became of a rollout's tokens, and why")
    why.add_argument("run_dir", type=Path)
    why.add_argument("--rollout", required=True)
    why.add_argument("--token", type=int, help="number of a sampled token of the rollout, from 0")
    simulate = commands.add_parser("simulate", help="compare schedules of training")
    if (sys.argv[1:] if arguments is None else arguments)[:1] == ["simulate"]:
        # Its options are the fields of a module that the other commands do not pay for.
        from lightning_ray.simulate import command

        command.add_options(simulate)
    options = parser.parse_args(arguments)
    try:
        return _COMMANDS[options.command](options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


# The imports are inside, so that one command does not pay for the libraries of another.
def _install(options: argparse.Namespace) -> int:
    from lightning_ray.rollouts import harness, installation

    try:
        for recipe in options.recipe:
            print(f"{recipe}: {installation.install(harness.load(recipe))}")
    except (harness.RecipeError, installation.InstallError) as error:
        raise ConfigError(str(error)) from error
    return 0


def _curves(options: argparse.Namespace) -> int:
    from lightning_ray.metrics import FILE_NAME
    from lightning_ray.report import curves

    if not (options.run_dir / FILE_NAME).exists():
        raise ConfigError(f"{options.run_dir} has no {FILE_NAME}; name the directory of a run")
    print(curves.plot(options.run_dir))
    return 0


def _resolve(options: argparse.Namespace) -> int:
    from lightning_ray import config

    print(config.dump(config.load(options.config, options.overrides)), end="")
    return 0


def _why(options: argparse.Namespace) -> int:
    from rich.console import Console

    from lightning_ray.report import why
    from lightning_ray.store.errors import StoreLocked

    console = Console()
    try:
        if options.token is None:
            for part in why.ledger(options.run_dir, options.rollout):
                console.print(part)
        else:
            for name, fact in why.token(options.run_dir, options.rollout, options.token).items():
                console.print(f"[bold]{name:16}[/bold] {fact}", highlight=False, soft_wrap=True)
    except (why.NothingToExplain, StoreLocked) as error:
        raise ConfigError(str(error)) from error
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from lightning_ray.simulate import command
    from lightning_ray.store.errors import StoreLocked

    try:
        return command.main(options)
    except StoreLocked as error:
        raise ConfigError(str(error)) from error


_COMMANDS = {
    "install": _install,
    "curves": _curves,
    "resolve": _resolve,
    "why": _why,
    "simulate": _simulate,
}

if __name__ == "__main__":
    sys.exit(main())
