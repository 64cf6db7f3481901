"""Installs a harness: an environment of its own, once per machine.

`install` gives a recipe a virtual environment in the user's cache, with its Python packages, its
npm packages, or both. Invariant: an environment is used only if its installation ran to the end.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import filelock

from lightning_ray.files import cache_root
from lightning_ray.rollouts.harness import Recipe

_DONE = "installed"  # written last: an environment without it is half an installation
_NEWEST_MINOR = 20  # of Python 3; more than there are


class InstallError(RuntimeError):
    """A harness could not be installed on this machine; one line says why."""


def install(recipe: Recipe) -> Path | None:
    """The virtual environment of the harness, made first where this machine lacks it; None if the
    recipe has no packages. A lock file is installed as it stands (--no-deps), so it is complete or
    it fails here.

    Raises:
        InstallError: pip, venv or npm failed, or no Python is new enough.
    """
    if not recipe.has_packages:
        return None
    # The version of Python belongs to it: compiled packages and site-packages depend on it.
    identity = f"{sys.version_info[:3]}\n{recipe.lock_text != ''}\n{recipe.requirements}"
    identity += f"python {recipe.python}\n" * bool(recipe.python)
    identity += "".join(f"npm {package}\n" for package in recipe.npm)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    venv = cache_root() / "harnesses" / f"{recipe.name}-{digest}"
    if (venv / _DONE).exists():
        return venv
    venv.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{venv}.lock"):
        if not (venv / _DONE).exists():
            shutil.rmtree(venv, ignore_errors=True)
            _build(recipe, venv)
            (venv / _DONE).write_text(recipe.requirements)
    return venv


def site_packages(venv: Path) -> Path:
    [folder] = venv.glob("lib/python3*/site-packages")
    return folder


def interpreter(recipe: Recipe) -> str:
    """The Python that the harness's environment is made with: ours if the recipe names no other,
    else the oldest one of this machine (on PATH or in pyenv) that is new enough.

    Raises:
        InstallError: there is none.
    """
    if not recipe.python:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser()
    # Before PATH, where pyenv has stand-ins that refuse to start when another version is chosen.
    folders = [*sorted(map(str, pyenv.glob("versions/*/bin"))), os.environ.get("PATH", "")]
    for minor in range(int(recipe.python.removeprefix("3.")), _NEWEST_MINOR):
        if found := shutil.which(f"python3.{minor}", path=os.pathsep.join(folders)):
            return found
    raise InstallError(
        f"cannot install harness {recipe.name}: it needs Python {recipe.python} or newer, and "
        f"neither PATH nor pyenv has one; `uv python install {recipe.python}` gets it"
    )


def _build(recipe: Recipe, venv: Path) -> None:
    # Scripts name their interpreter by its full path, so an environment is made where it will stay.
    _check(recipe, [interpreter(recipe), "-m", "venv", str(venv)])
    if recipe.requirements:
        requirements = venv / "requirements.txt"
        requirements.write_text(recipe.requirements)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        exact = ["--no-deps"] if recipe.lock_text else []
        # Compiled now, because many short-lived harnesses would otherwise compile the same modules
        # each time.
        install = ["--no-input", "install", "--quiet", "--compile", *exact]
        _check(recipe, [*pip, *install, "-r", str(requirements)])
        if exact:
            _check(recipe, [*pip, "check"])
    if recipe.npm:
        if shutil.which("npm") is None:
            raise InstallError(
                f"cannot install harness {recipe.name}: npm not found; install Node.js 20 or newer"
            )
        # What is downloaded comes from the registry alone: no package's own scripts are run.
        quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
        _check(recipe, ["npm", "install", "--prefix", str(venv), *quiet, *recipe.npm])


def _check(recipe: Recipe, argv: list[str]) -> None:
    env = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise InstallError(
            f"cannot install harness {recipe.name} ({' '.join(argv[1:4])}): {errors[-1]}"
        )
