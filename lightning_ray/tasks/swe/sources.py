"""Where offline repositories come from: source distributions, pinned by hash, and an environment.

`packages` is the checked-in manifest (`data/packages.json`); `tree` gives a package's files, from
its source distribution, which pip downloads once into the user's cache; `environment` makes the
virtual environment of `data/environment.lock`, in which its tests run.

Invariants: a file that has another hash than the manifest's is never unpacked; an environment is
used only if its installation ran to the end, and holds no copy of any package of the manifest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import filelock
from pydantic import BaseModel, ConfigDict, Field

from lightning_ray.files import cache_root
from lightning_ray.tasks.swe.evidence import Tree

DATA = Path(__file__).with_name("data")
_DONE = "installed"  # written last: an environment without it is half an installation
# What every sandbox shows, and the Python of the environment.
_SHOWN = ("/usr", sys.base_prefix)
# Folders with packages, wherever they lie: of Python's installations, conda's, distributions'.
_PACKAGES = ("site-packages", "dist-packages", "_vendor", "vendor", "third_party")
_SEARCH_S = 60.0  # two seconds for 200,000 files
_DOWNLOAD_S = 300  # a source distribution is below a megabyte


class SourceError(RuntimeError):
    """A package or an environment cannot be had on this machine; one line says why."""


class Package(BaseModel):
    """A repository that tasks are made of. `modules` are the import names whose copies would give
    answers away; `targets` the tests, `path` the folder to import from, both below the root."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: str
    owner: str
    sdist_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    modules: tuple[str, ...]
    targets: tuple[str, ...]
    path: str = ""
    options: tuple[str, ...] = ()  # of pytest, where the package's own want plug-ins
    bugs: int = 8  # tried per modifier of the generator
    licence: str


@functools.cache
def packages() -> dict[str, Package]:
    rows = json.loads((DATA / "packages.json").read_text())
    return {row["name"]: Package.model_validate(row) for row in rows}


def cache() -> Path:
    return cache_root() / "swe"


@functools.cache
def tree(name: str) -> Tree:
    """The files of a package's source distribution, without what its build wrote.

    Raises:
        SourceError: the manifest does not know it, or it cannot be downloaded.
    """
    if (package := packages().get(name)) is None:
        raise SourceError(
            f"no package {name!r} in {DATA / 'packages.json'}: {', '.join(packages())}"
        )
    files: Tree = {}
    with tarfile.open(fileobj=io.BytesIO(_sdist(package))) as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            if not member.isfile() or ".egg-info/" in path or path in ("PKG-INFO", ""):
                continue
            content = archive.extractfile(member)
            assert content is not None
            files[path] = content.read()
    return files


def _sdist(package: Package) -> bytes:
    folder = cache() / "sdists" / package.sdist_sha256
    for there in folder.glob("*.tar.gz"):  # in an image it cannot be written, not even for a lock
        content = there.read_bytes()
        if hashlib.sha256(content).hexdigest() == package.sdist_sha256:
            return content
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        found = list(folder.glob("*.tar.gz"))
        if not found:
            wanted = f"{package.name}=={package.version}"
            pinned = folder / "requirement.txt"
            pinned.write_text(f"{wanted} --hash=sha256:{package.sdist_sha256}\n")
            _pip(
                f"download the sources of {wanted}",
                [
                    "download",
                    "--quiet",
                    "--no-deps",
                    f"--no-binary={package.name}",  # not what builds it
                    f"--dest={folder}",
                ],
                pinned,
            )
            found = list(folder.glob("*.tar.gz"))
    content = found[0].read_bytes() if found else b""
    if hashlib.sha256(content).hexdigest() != package.sdist_sha256:
        raise SourceError(
            f"{folder}: not the source distribution of the manifest; delete the folder"
        )
    return content


def keep(path: Path, text: str) -> None:
    """Writes a file of the cache, whole, whoever else writes it too. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.chmod(partial, 0o644)  # as files are: who may look into the folder may read it
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        raise


def environment(name: str = "environment.lock") -> Path:
    """The virtual environment of a lock, by default that which tests run in; made first where this
    machine lacks it.

    Raises:
        SourceError: pip or venv failed.
    """
    lock = DATA / name
    identity = f"{sys.version_info[:3]}\n{lock.read_text()}"
    venv = cache() / "environments" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if (venv / _DONE).exists():
        return venv
    venv.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{venv}.lock"):
        if not (venv / _DONE).exists():
            shutil.rmtree(venv, ignore_errors=True)
            argv = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
            _checked("make the environment of the tests", argv)
            python = f"--python={venv / 'bin' / 'python'}"
            install = [python, "install", "--quiet", "--no-deps", "--compile"]
            _pip("fill the environment of the tests", install, lock)
            for path in [venv, *venv.rglob("*")]:  # nobody means to write there again
                if not path.is_symlink():
                    path.chmod(path.stat().st_mode & ~0o222 | (0o200 if path == venv else 0))
            (venv / _DONE).write_text(lock.read_text())
    return venv


def environment_name() -> str:
    """What a task's `image_name` calls it."""
    digest = hashlib.sha256((DATA / "environment.lock").read_bytes()).hexdigest()
    return f"venv:pytest@{digest[:12]}"


def readable() -> list[Path]:
    """What must be seen of this machine for the environment to work."""
    return [environment(), Path(sys.base_prefix).resolve()]


@functools.cache
def shared() -> tuple[Path, ...]:
    """Folders that keep Python packages in what every sandbox shows of this machine.

    Raises:
        SourceError: there is too much to look through.
    """
    found, queue, deadline = [], list(map(Path, _SHOWN)), time.monotonic() + _SEARCH_S
    while queue:
        if time.monotonic() > deadline:
            raise SourceError(f"not through with {' and '.join(_SHOWN)} after {_SEARCH_S:g} s")
        folder = queue.pop()
        if folder.name in _PACKAGES:
            found.append(folder)
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            queue += [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
    return tuple(sorted({path.resolve() for path in found}))


def copies(package: Package, roots: Iterable[Path]) -> list[Path]:
    """Where else a package's code lies, installed or vendored below `roots`: an agent, or the code
    under test, could read the answer there."""
    return sorted(
        path
        for root in roots
        for module in package.modules
        for pattern in ("{}", "*/_vendor/{}", "*/vendor/{}")
        for name in (f"{module}.py", f"{module}/__init__.py")
        for path in root.glob(pattern.format(name))
    )


def ours() -> list[Path]:
    """What must not be seen, should a sandbox show it: our data and sources (the cache or
    lightning_ray itself may lie below a system folder)."""
    return [DATA, *(cache() / name for name in ("sdists", "making", "agreement", "imaged"))]


def hidden(package: Package) -> list[Path]:
    """What an agent must not see: `ours`, and the folders of `shared` with a copy. Code under test
    sees none of `shared` (`runtime`)."""
    return [*ours(), *(root for root in shared() if copies(package, [root]))]


def _pip(what: str, argv: list[str], requirements: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _checked(what, [*pip, *argv, "-r", str(requirements)])


def _checked(what: str, argv: list[str]) -> None:
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    try:
        done = subprocess.run(argv, env=env, text=True, capture_output=True, timeout=_DOWNLOAD_S)
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"cannot {what}: not done after {_DOWNLOAD_S} s") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise SourceError(f"cannot {what}: {errors[-1]}")
