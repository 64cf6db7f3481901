"""The run configuration: one `RunConfig`, read from YAML with dotted overrides.

`load(path, overrides)` merges the YAML file over the defaults and `a.b=c` overrides over both, and
validates the result. Every key has a default, a meaning (`Field(description=...)`, from which
`docs/configuration.md` is made) and belongs to one section.

Invariants: an unknown key is an error that names its path and the nearest valid name; a setting
that contradicts another, or that would have no effect, is an error; the resolved configuration
written by `dump` loads to an equal `RunConfig`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lightning_ray.settings import AlgorithmSection, GatewaySection, ModelSection, RunConfig

__all__ = [
    "AlgorithmSection",
    "ConfigError",
    "GatewaySection",
    "ModelSection",
    "RunConfig",
    "dump",
    "load",
]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says which key and what to do."""


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads `path` (YAML; None for the defaults) and applies `section.key=value` overrides.

    Raises:
        ConfigError: unreadable file, unknown key, bad value, or a contradiction. One line per
        problem.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = yaml.safe_load(Path(path).read_text()) or {}
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from error
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} must be a mapping of sections, such as `trainer:`")
    for override in overrides:
        _apply(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from error


def dump(config: RunConfig) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"cannot read the override {override!r}; write it as section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the value of the override {override!r} is not valid YAML: {error}"
        ) from error
    for key in keys[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise ConfigError(f"cannot set {dotted}: {key} is not a section")
        tree = below
    tree[keys[-1]] = value


def _explain(problem: Any) -> str:
    path = [str(part) for part in problem["loc"]]
    where = ".".join(path)
    if problem["type"] == "extra_forbidden":
        siblings = _field_names(path[:-1])
        near = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.5)
        elsewhere = [
            f"{s}.{path[-1]}" for s in RunConfig.model_fields if path[-1] in _field_names([s])
        ]
        hint = ".".join([*path[:-1], near[0]]) if near else (elsewhere[0] if elsewhere else "")
        return f"{where}: unknown key" + (
            f"; did you mean {hint}?" if hint else f"; known: {', '.join(siblings)}"
        )
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message} (got {problem['input']!r})" if where else message


def _field_names(path: list[str]) -> list[str]:
    model: Any = RunConfig
    for key in path:
        model = (
            model.model_fields[key].annotation
            if key in getattr(model, "model_fields", {})
            else None
        )
    return list(getattr(model, "model_fields", {}))
