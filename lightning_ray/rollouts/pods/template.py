"""The Job template that a user gives: YAML whose texts may hold Jinja placeholders.

The YAML is read first and each text in it rendered by itself, so what a task holds cannot change
the structure. The result is checked against the models of the official client: an unknown field is
an error, with its line and the nearest field that there is, and so is a value of another type; what
is a number in a Job may be written as a placeholder. The rest is the API server's to say (a dry
run, `launcher.check`).

Invariants: every error names the file and the line; placeholders see the task, never a key.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kubernetes.client
import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from kubernetes.client import ApiException

from lightning_ray.config import ConfigError
from lightning_ray.records import Json, Task
from lightning_ray.rollouts.pods import freedoms

# A run that only names an image needs no more than this.
_DEFAULT = """\
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
        - name: agent
          image: "{{ image }}"
"""
# Older clients write list[V1Container] and dict(str, str).
_ITEMS = re.compile(r"[Ll]ist\[(.+)\]")
_VALUES = re.compile(r"[Dd]ict[\[(]str, (.+)[\])]")
# What these hold is a quantity (500m, 2Gi), which may be a number, while the client has a text.
_QUANTITIES = frozenset({"limits", "requests", "overhead", "capacity", "sizeLimit", "divisor"})
_NUMBER = re.compile(r"-?[0-9]+")
# `spec.template.spec.containers[0].image`, as the API server names a field
_STEP = re.compile(r"[^.\[\]]+")

_Path = tuple[str | int, ...]


class TemplateFault(ConfigError):
    """A Job template that cannot be used; says where and what to do."""


@dataclass(frozen=True)
class Names:
    """What placeholders see besides the task and the image."""

    attempt: str
    rollout: str
    group: str
    split: str
    gateway_url: str


class JobTemplate:
    """The template in the file at `path`; without one, that of a pod with the image alone.

    Raises:
        TemplateFault: it cannot be read, or is no Job with a container.
    """

    def __init__(self, path: str | None, image: str | None) -> None:
        self._image = image
        self._name = path or "kubernetes.image"
        try:
            text = Path(path).expanduser().read_text() if path else _DEFAULT
            self._root = yaml.compose(text)
            self._tree = yaml.safe_load(text)
        except OSError as error:
            raise TemplateFault(f"kubernetes.template: {path}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise TemplateFault(
                f"kubernetes.template: {path} is not valid YAML: {error}"
            ) from error
        if not isinstance(self._tree, dict) or self._tree.get("kind") != "Job":
            raise TemplateFault(f"{self._name}: one object of `kind: Job` is wanted")
        tree: Any = self._tree
        try:
            containers = tree["spec"]["template"]["spec"]["containers"]
            assert isinstance(containers[0], dict)
        except (KeyError, TypeError, IndexError, AssertionError):
            raise self.fault((), "spec.template.spec.containers must hold a container") from None
        # Texts are rendered with nothing of Python in reach: a template is configuration.
        self._jinja = SandboxedEnvironment(undefined=StrictUndefined)

    def render(self, task: Task, names: Names) -> Json:
        """The Job for one attempt, as the user wants it.

        Raises:
            TemplateFault: a placeholder that the task cannot fill, an unknown field, something that
                no run can have (`freedoms.refusals`).
        """
        known = {"task": asdict(task), "image": self._image, **asdict(names)}
        rendered = self._render(self._tree, known, (), task.task_id)
        job: Json = self._conform(rendered, "V1Job", ())
        for path, problem in freedoms.refusals(job):
            raise self.fault(path, f"{_at(path)}: {problem}")
        return job

    def fault(self, path: _Path, problem: str) -> TemplateFault:
        """An error at `path` of the template."""
        return TemplateFault(f"{self._name}, line {self._line(path)}: {problem}")

    def fault_at(self, field: str, problem: str) -> TemplateFault:
        """An error at a field as the API server names it; ours if the template has nothing of
        it."""
        steps = _STEP.findall(field)
        return self.fault(tuple(int(s) if s.isdigit() else s for s in steps), problem)

    def explain(self, error: ApiException) -> ConfigError:
        """The API server's refusal, with the template's line where it names a field."""
        try:
            told = json.loads(error.body or "")
            causes = (told.get("details") or {}).get("causes") or []
            message = told.get("message") or error.reason
        except (ValueError, AttributeError):
            causes, message = [], f"HTTP {error.status} {error.reason}"
        for cause in causes:
            if cause.get("field"):
                return self.fault_at(cause["field"], f"{cause['field']}: {cause.get('message')}")
        if error.status in (400, 422):
            return TemplateFault(f"kubernetes: the API server refuses the Job: {message}")
        return ConfigError(f"kubernetes: HTTP {error.status}: {message}")

    def _line(self, path: _Path) -> int:
        """The line of the deepest part of `path` that the template has."""
        node, line = self._root, 1
        for step in path:
            below = None
            if isinstance(node, yaml.MappingNode):
                below = next(((k, v) for k, v in node.value if k.value == step), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                below = (node.value[step],) * 2 if step < len(node.value) else None
            if below is None:
                break
            line, node = below[0].start_mark.line + 1, below[1]
        return line

    def _render(self, value: Any, known: Mapping[str, Any], path: _Path, task_id: str) -> Any:
        if isinstance(value, dict):
            filled = {k: v for k, v in value.items() if v is not None}
            return {k: self._render(v, known, (*path, k), task_id) for k, v in filled.items()}
        if isinstance(value, list):
            return [self._render(v, known, (*path, i), task_id) for i, v in enumerate(value)]
        if not isinstance(value, str):
            return value
        try:
            text = self._jinja.from_string(value).render(known)
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise self.fault(path, f"{error} (task {task_id}); in {value!r}") from error
        if text == "None" or (value and not text):
            raise self.fault(path, f"{value} has no value (task {task_id})")
        return text

    def _conform(self, value: Any, kind: str, path: _Path) -> Any:
        """`value` as the client's model `kind` has it; numbers that are texts become numbers."""
        if items := _ITEMS.fullmatch(kind):
            entries = self._expect(value, list, path)
            return [self._conform(v, items[1], (*path, i)) for i, v in enumerate(entries)]
        if values := _VALUES.fullmatch(kind):
            self._expect(value, dict, path)
            for key in value:
                if not isinstance(key, str):
                    raise self.fault(path, f'{_at(path)}: {key!r} is no text; write "{key}"')
            return {k: self._conform(v, values[1], (*path, k)) for k, v in value.items()}
        model = getattr(kubernetes.client, kind, None)
        if model is None or not hasattr(model, "attribute_map"):
            return self._scalar(value, kind, path)
        self._expect(value, dict, path)
        types = {json: model.openapi_types[name] for name, json in model.attribute_map.items()}
        for key in value:
            if key not in types:
                raise self.fault((*path, key), _unknown(str(key), list(types), path))
        return {k: self._conform(v, types[k], (*path, k)) for k, v in value.items()}

    def _scalar(self, value: Any, kind: str, path: _Path) -> Any:
        text = value if isinstance(value, str) else ""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        match kind:
            case "int":
                if _NUMBER.fullmatch(text):
                    return int(text)
                if not number or isinstance(value, float):
                    raise self._mistaken(value, "a whole number", path)
            case "bool":
                if text.lower() in ("true", "false"):
                    return text.lower() == "true"
                if not isinstance(value, bool):
                    raise self._mistaken(value, "true or false", path)
            case "str" if number and _QUANTITIES.intersection(path[-2:]):
                return str(value)
            case "str" if not isinstance(value, str):
                plain = not isinstance(value, dict | list)
                written = str(value).lower() if isinstance(value, bool) else value
                hint = f', in quotes: "{written}"' if plain else ""
                raise self._mistaken(value, f"a text{hint}", path)
        return value

    def _expect(self, value: Any, kind: type, path: _Path) -> Any:
        if not isinstance(value, kind):
            wanted = "a list (`- ...`)" if kind is list else "an object (`key: value`)"
            raise self._mistaken(value, wanted, path)
        return value

    def _mistaken(self, value: Any, wanted: str, path: _Path) -> TemplateFault:
        return self.fault(path, f"{_at(path)} is {value!r}; write {wanted}")


def _unknown(key: str, known: Sequence[str], path: _Path) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{_at(path)} has no field {key!r}{hint}"


def _at(path: _Path) -> str:
    return ".".join(str(step) for step in path) or "a Job"
