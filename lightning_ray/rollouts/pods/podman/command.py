"""The command line of podman, which is all of it that is used: a user's own settings hold
(`containers.conf`, `registries.conf`, logins)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from lightning_ray.config import ConfigError

_OLDEST = (4, 0)
_ANSWER_S = 60.0  # for any command but those that wait for an image, a program or a disk

Done = subprocess.CompletedProcess[str]


def podman(
    *argv: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float | None = _ANSWER_S,
) -> Done:
    """Runs a command to its end, with the variables `env` besides ours.

    Raises:
        OSError: there is no podman, or it did not answer in time.
    """
    try:
        return subprocess.run(
            ["podman", *argv],
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"podman {argv[0]}: no answer within {timeout_s:g} s") from error


def sure(done: Done) -> Done:
    """Raises OSError with podman's last line if the command failed."""
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["podman: no message"])[-1])
    return done


def check() -> None:
    """Raises ConfigError if there is no podman here that could be used."""
    try:
        said = sure(podman("version", "--format={{.Client.Version}}")).stdout.strip()
        version = tuple(int(part) for part in said.split(".")[:2])
    except (OSError, ValueError) as error:
        why = "it is not installed" if isinstance(error, FileNotFoundError) else error
        raise ConfigError(
            f"rollout.launcher=podman: podman does not work on this machine: {why}"
        ) from error
    if version < _OLDEST:
        raise ConfigError(f"rollout.launcher=podman: podman {said} is too old: 4.0 is needed")


def unlimited() -> list[str]:
    """Which limits of containers do not hold on this machine, as far as podman says."""
    said = podman("info", "--format={{json .Host.CgroupControllers}}")
    has: list[str] | None = json.loads(said.stdout or "[]") or [] if not said.returncode else None
    return [name for name in ("memory", "cpu", "pids") if has is not None and name not in has]
