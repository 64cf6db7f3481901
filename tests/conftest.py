"""Shared by all tests: quiet libraries, and no run leaves anything outside pytest's folders."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
# A call after `ray.shutdown` is a mistake; Ray would start another cluster for it.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


@pytest.fixture(scope="module", autouse=True)
def ray_ends_with_its_module() -> Iterator[None]:
    """A fixture that fails on its way must not fail the files after its own."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


@pytest.fixture
def repository() -> Path:
    """The root of this checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture
def generate(repository: Path) -> ModuleType:
    """docs/generate.py, which writes pages from the code."""
    spec = importlib.util.spec_from_file_location("generate", repository / "docs/generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
