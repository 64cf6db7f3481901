"""Finds the folder of a model: a built-in name, a folder, or a name on the Hugging Face hub.

`resolve` makes a built-in model on first use, into a cache folder whose name carries a
fingerprint of the code that makes it. A model is made in a temporary folder and renamed when it
is whole; a file lock lets one process make it while others wait.

Invariants: a folder that `resolve` returns is complete; a try that was interrupted leaves nothing
that could be taken for a model.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from lightning_ray.config import ConfigError
from lightning_ray.files import cache_root

HERE = Path(__file__).parent
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class ModelError(ConfigError):
    """A model that cannot be had; the message says why and what to do, in one line."""


@dataclass(frozen=True)
class BuiltIn:
    """A model we can make: `module.make(folder)`, and the files that decide what comes out."""

    module: str
    sources: tuple[str, ...]


BUILT_IN = {
    "smollm2-135m": BuiltIn("lightning_ray.tasks.smollm2", ("smollm2.py", "chatml.jinja")),
    "tiny": BuiltIn(
        "lightning_ray.tasks.tiny_model",
        ("tiny_model.py", "chatml.jinja", "swe/embedded.py", "swe/mini.yaml"),
    ),
}


def resolve(name_or_path: str, cache: Path | None = None) -> Path:
    """The folder of a model.

    Args:
        name_or_path: `smollm2-135m`, `tiny`, a folder with a config.json, or a hub name.
        cache: where built-in models are kept. Default: $LIGHTNING_RAY_CACHE, or
            ~/.cache/lightning_ray, and there the folder `models`.

    Raises:
        ModelError: no such model, or it cannot be fetched.
    """
    if name_or_path in BUILT_IN:
        return _built_in(name_or_path, cache or default_cache())
    folder = Path(name_or_path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.exists():
        raise ModelError(
            f"model {name_or_path}: {folder} is no model folder, it has no config.json"
        )
    return _from_hub(name_or_path)


def default_cache() -> Path:
    return cache_root() / "models"


def _built_in(name: str, cache: Path) -> Path:
    model = BUILT_IN[name]
    sources = b"\0".join((HERE / source).read_bytes() for source in model.sources)
    folder = cache / f"{name}-{hashlib.sha256(sources).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        if folder.is_dir():  # made by another process while this one waited
            return folder
        for leftover in cache.glob(f".{name}-*"):  # only the holder of the lock has such a folder
            shutil.rmtree(leftover)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            importlib.import_module(model.module).make(scratch)
            scratch.chmod(0o755)
            scratch.rename(folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    known = f"built in: {', '.join(BUILT_IN)}"
    if not HUB_NAME.fullmatch(name):
        raise ModelError(f"model {name}: no such folder, and not a hub name ({known})")
    try:
        return Path(snapshot_download(name))
    except GatedRepoError as error:
        raise ModelError(f"model {name}: accept its licence on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"model {name}: no such folder or hub model ({known})") from error
    except (OSError, ValueError) as error:  # what the hub client raises offline or for a bad name
        raise ModelError(
            f"model {name}: no such folder, and the hub cannot be asked "
            f"({type(error).__name__}); check the spelling and the network ({known})"
        ) from error
