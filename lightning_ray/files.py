"""Files that outlive a process: where those of a machine lie."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """The folder of what is made or fetched once per machine."""
    return Path(os.environ.get("LIGHTNING_RAY_CACHE") or "~/.cache/lightning_ray").expanduser()
