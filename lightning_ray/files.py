"""Files that outlive a process: where those of a machine lie, and how one takes another's place.

Invariant: who reads a file while it is replaced sees the old one or the new one, whole; a disk that
refuses leaves the old one and nothing else. A process that is killed meanwhile leaves a `*.tmp`.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

PRIVATE = 0o600  # only the owner may read
_USUAL = 0o666  # less what the umask takes, as for any new file


def cache_root() -> Path:
    """The folder of what is made or fetched once per machine."""
    return Path(os.environ.get("LIGHTNING_RAY_CACHE") or "~/.cache/lightning_ray").expanduser()


def replace(
    path: Path, data: bytes | pa.Buffer, *, durable: bool = False, mode: int = _USUAL
) -> None:
    """Makes `data` the content of the file `path`, which need not exist, and `mode` its mode. A
    durable one is on disk when it gets its name; for the name to be, `fsync` its folder.

    Raises:
        OSError: the disk refused.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def fsync(path: Path) -> None:
    """Makes a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
