"""Which agent program to run, and how: recipes.

A `Recipe` is read from YAML: a built-in one by name, or your own by path, for which `name`,
`command` and `env` are enough. `install` gives it a virtual environment of its own, once per
machine; `command_line` fills in the placeholders of one attempt.

Invariants: an unknown placeholder is an error that names it; the API key reaches the harness
through its environment only, never through a command line, which every process of the machine can
read; an environment is used only if its installation ran to the end.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lightning_ray.config import ConfigError
from lightning_ray.rollouts.forkserver import Preload

_BUILT_IN = Path(__file__).parent / "recipes"
# Lower-case names in single braces are ours; {{name}} stands for {name}. JSON and ${SHELL} pass
# unchanged.
_PLACEHOLDER = re.compile(r"\{\{([a-z_]+)\}\}|\{([a-z_]+)\}")
MODEL_NAME = "policy"  # what harnesses are told; the gateway serves one model and ignores the name
_KEY = "api_key"
PACKAGE_FILE = "pkg:"  # pkg:some.package/dir/file names a file inside an installed Python package


class RecipeError(ConfigError):
    """A recipe that cannot be used; the message says which one, where and what to do."""


@dataclass(frozen=True)
class Values:
    """What placeholders stand for in one attempt. `base_url` ends in /v1, `root_url` is the same
    without it; `task_file` is a file that holds the task; `context_tokens` is the model's context
    window. Paths are those that the harness knows (`places.py`)."""

    base_url: str
    root_url: str
    model: str
    task: str
    task_file: str
    attempt: str
    workspace: str
    home: str
    context_tokens: str
    venv: str
    site_packages: str
    recipe_dir: str
    api_key: str = field(repr=False)


class Recipe(BaseModel):
    """How one harness is installed and started."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Name, also of its cache folder."""
    version: str = ""
    """Version of the harness, for people."""

    packages: list[str] = Field(default_factory=list)
    """pip requirements of the harness."""
    npm: list[str] = Field(default_factory=list)
    """npm packages of the harness; commands are in {venv}/node_modules/.bin."""
    python: str = Field("", pattern=r"^(3\.[0-9]+)?$")
    """Oldest Python that the packages work with, as 3.12; they get ours by default."""
    lock: str | None = None
    """File beside the recipe that pins every package; `packages` is then a comment."""

    command: list[str] = Field(min_length=1)
    """Program and arguments, with {placeholders}."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment; {api_key} belongs here."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files written before the start: path (below {home}) to content."""
    cwd: str = "{workspace}"
    """Folder that the harness starts in."""
    preload: list[str] = Field(default_factory=list)
    """Modules of a Python harness that are imported once per machine instead of in every attempt;
    the command must be a script of {venv}/bin. Name libraries, not the harness itself: they see
    only the entries of `env` without placeholders."""

    artifacts: list[str] = Field(default_factory=list)
    """Files and folders kept beside the harness's log."""

    recipe_dir: str = ""
    """Folder of the recipe; filled in when it is read."""
    lock_text: str = ""
    """Contents of `lock`; filled in when it is read."""

    @model_validator(mode="after")
    def _placeholders(self) -> Recipe:
        for where, text in self._texts():
            for name in _names(text):
                if name not in Values.__dataclass_fields__:
                    known = ", ".join(sorted(Values.__dataclass_fields__))
                    raise ValueError(
                        f"{where}: unknown placeholder {{{name}}}; known: {known} "
                        f"(write {{{{{name}}}}} for the text itself)"
                    )
                if name == _KEY and not where.startswith("env."):
                    raise ValueError(
                        f"{where}: {{{_KEY}}} may stand in env only; "
                        "other processes can read a command line"
                    )
                if name in ("venv", "site_packages") and not self.has_packages:
                    raise ValueError(
                        f"{where}: {{{name}}} needs `packages` or `npm`, but the recipe has none"
                    )
        if self.preload and not self.command[0].startswith("{venv}/bin/"):
            raise ValueError("preload: command[0] must be a Python script in {venv}/bin/")
        for path in self.files:
            if not path.startswith("{home}/"):
                raise ValueError(f"files.{path}: a file must be below {{home}}")
        return self

    def _texts(self) -> Iterator[tuple[str, str]]:
        yield from ((f"command[{i}]", text) for i, text in enumerate(self.command))
        yield from ((f"env.{name}", text) for name, text in self.env.items())
        yield "cwd", self.cwd
        for path, content in self.files.items():
            yield from ((f"files.{path}", text) for text in (path, content))
        yield from ((f"artifacts[{i}]", text) for i, text in enumerate(self.artifacts))

    @property
    def task_on_stdin(self) -> bool:
        """True if neither {task} nor {task_file} stands anywhere: the harness then reads it on
        stdin."""
        return not any({"task", "task_file"} & set(_names(text)) for _, text in self._texts())

    @property
    def has_packages(self) -> bool:
        """True if there is something to install."""
        return bool(self.packages or self.lock or self.npm)

    @property
    def requirements(self) -> str:
        """What pip installs, as a requirements file."""
        return self.lock_text or "".join(f"{package}\n" for package in self.packages)


def path_of(name_or_path: str) -> Path:
    """Where a recipe is, built-in or not."""
    built_in = _BUILT_IN / f"{name_or_path}.yaml"
    return built_in if built_in.is_file() else Path(name_or_path).expanduser().absolute()


def load(
    name_or_path: str, args: Iterable[str] = (), env: Mapping[str, str] | None = None
) -> Recipe:
    """Reads a built-in recipe or a YAML file, with `args` added to its command and `env` to its
    environment.

    Raises:
        RecipeError: no such recipe, a bad key or placeholder, or a missing lock file.
    """
    path = path_of(name_or_path)
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        names = ", ".join(sorted(file.stem for file in _BUILT_IN.glob("*.yaml")))
        raise RecipeError(
            f"no harness recipe {name_or_path!r}: {error.strerror}; built-in ones are {names}, "
            "your own is given as the path of a YAML file"
        ) from error
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise RecipeError(
            f"recipe {path} must be a mapping with at least `name`, `command` and `env`"
        )
    tree["recipe_dir"] = str(path.parent)
    if tree.get("lock"):
        lock = path.parent / str(tree["lock"])
        if not lock.is_file():
            raise RecipeError(f"recipe {path}: the lock file {lock} does not exist")
        tree["lock_text"] = lock.read_text()
    try:
        recipe = Recipe.model_validate(tree)
        return Recipe.model_validate(
            recipe.model_dump()
            | {"command": [*recipe.command, *args], "env": {**recipe.env, **(env or {})}}
        )
    except ValidationError as error:
        problems = "; ".join(_explain(problem) for problem in error.errors())
        raise RecipeError(f"recipe {path}: {problems}") from error


def command_line(recipe: Recipe, values: Values) -> tuple[list[str], dict[str, str], str]:
    """Arguments, environment and stdin of one attempt.

    Raises:
        RecipeError: `pkg:` names a file that is not there.
    """
    argv = [_argument(text, values) for text in recipe.command]
    env = {name: fill(text, values) for name, text in recipe.env.items()}
    return argv, env, values.task if recipe.task_on_stdin else ""


def preload(recipe: Recipe, venv: Path | None, env: Mapping[str, str]) -> Preload | None:
    """The warm interpreter that `recipe` asks for, with `env` and what of the recipe's environment
    is the same in every attempt."""
    if not (recipe.preload and venv):
        return None
    fixed = {name: text for name, text in recipe.env.items() if not _names(text)}
    return Preload(
        str(venv / "bin" / "python"),
        tuple(recipe.preload),
        tuple(sorted(({**env, **fixed}).items())),
    )


def readable(recipe: Recipe, venv: Path | None, path: str) -> list[Path]:
    """What of this machine a harness reads besides the system's folders: its environment, its
    interpreter, its recipe's folder if that uses it, and what its command names. `path` is the
    harness's PATH.

    Raises:
        RecipeError: `pkg:` names a file that is not there.
    """
    found = [Path(sys.base_prefix)]
    found += [venv, _interpreter(venv)] if venv else []
    if any("recipe_dir" in _names(text) for _, text in recipe._texts()):
        found.append(Path(recipe.recipe_dir))
    for text in recipe.command:
        if text.startswith("/"):
            # The whole of a virtual environment whose interpreter it is.
            of_venv = Path(text).parent.parent
            is_venv = (of_venv / "pyvenv.cfg").exists()
            found += [of_venv, _interpreter(of_venv)] if is_venv else _with_its_own(Path(text))
        elif text.startswith(PACKAGE_FILE):
            found.append(Path(_package_file(text)))
    programs = [shutil.which(name, path=path) for name in (recipe.command[0], "node")]
    for program in filter(None, programs):
        # A link may lead to what is not shown.
        found += [Path(program), *_with_its_own(Path(program).resolve())]
    return found


def _with_its_own(path: Path) -> list[Path]:
    """A program, and where it lies below /opt what it came with: its npm package, or its folder."""
    if Path("/opt") not in path.parents:
        return [path]
    packages = [folder for folder in path.parents if folder.name == "node_modules"]
    if packages:  # the outermost one: packages share what they need
        return [path, packages[-1]]
    return [path] if path.parent == Path("/opt") else [path, path.parent]


def _interpreter(venv: Path) -> Path:
    """Where the Python is installed that a virtual environment was made with."""
    return (venv / "bin" / "python").resolve().parents[1]


def fill(text: str, values: Values) -> str:
    """`text` with its placeholders replaced, in one pass: what a value contains stays as it is."""
    replace = asdict(values)
    return _PLACEHOLDER.sub(lambda m: f"{{{m[1]}}}" if m[1] else replace[m[2]], text)


def _argument(text: str, values: Values) -> str:
    return _package_file(text) if text.startswith(PACKAGE_FILE) else fill(text, values)


@functools.cache
def _package_file(text: str) -> str:
    package, _, inner = text.removeprefix(PACKAGE_FILE).partition("/")
    try:
        path = Path(str(importlib.resources.files(package).joinpath(inner)))
    except ModuleNotFoundError as error:
        raise RecipeError(f"{text}: there is no Python package {package}") from error
    if not inner or not path.exists():
        raise RecipeError(f"{text}: there is no {inner or 'file name'} in the package {package}")
    return str(path)


def _names(text: str) -> list[str]:
    return [match[2] for match in _PLACEHOLDER.finditer(text) if match[2]]


def _explain(problem: Mapping[str, object]) -> str:
    where = ".".join(str(part) for part in problem["loc"])  # type: ignore[attr-defined]
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
