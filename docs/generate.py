"""Writes docs/configuration.md, the reference of every setting, from `RunConfig`.

Run `python docs/generate.py` (or `make docs`) after a change of `lightning_ray/config.py`. A test
compares the file with what `render` gives.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from lightning_ray.config import RunConfig

PATH = Path(__file__).with_name("configuration.md")

HEAD = """# Configuration

<!-- Written by docs/generate.py from lightning_ray/config.py; edit that. -->

A run is described by one YAML file of sections, over these defaults, and by dotted overrides:

```
python jobs/train_swe.py CONFIG.yaml trainer.lr=1e-6 rollout.n=8
```

A value of an override is read as YAML (`null`, `true`, `[a, b]`). An unknown key, a setting that
contradicts another and one that would have no effect are errors. `--dry-run` prints the resolved
configuration and the resources it asks for, and exits.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, section in RunConfig.model_fields.items():
        parts.append(f"## {name}\n\n{section.description}\n")
        parts.append("| key | type | default | meaning |\n| --- | --- | --- | --- |")
        fields: dict[str, FieldInfo] = section.annotation.model_fields  # type: ignore[union-attr]
        parts += [_row(f"{name}.{key}", field) for key, field in fields.items()]
        parts.append("")
    return "\n".join(parts)


def _row(path: str, field: FieldInfo) -> str:
    kind = ", ".join([_type(field.annotation), *_bounds(field)])
    default = yaml.safe_dump(
        _plain(field.get_default(call_default_factory=True)),
        default_flow_style=True,
        width=1000,
    )
    default = default.removesuffix("\n").removesuffix("\n...")
    cells = [f"`{path}`", kind, f"`{default}`", field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _type(annotation: Any) -> str:
    """A type as a reader of YAML would say it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _type(part) for part in inner)
    if origin is list or inner[1:] == (...,):
        return f"list of {_type(inner[0])}"
    if origin is tuple:
        return f"list of {len(inner)} {_type(inner[0])}s"
    if origin is dict:
        return f"mapping to {_type(inner[1])}"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[annotation]


def _bounds(field: FieldInfo) -> list[str]:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in signs.items()
        if hasattr(limit, name)
    ]


if __name__ == "__main__":
    PATH.write_text(render())
