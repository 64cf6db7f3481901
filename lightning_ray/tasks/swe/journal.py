"""Files of lines to which a run that may be killed appends what it has found out.

Invariant: after `whole` the file ends with a line, so that what is appended begins one.
"""

from __future__ import annotations

from pathlib import Path


def whole(path: Path) -> list[str]:
    """The lines of a journal, if it is there; what a killed writer left of another one goes."""
    if not path.exists():
        return []
    with path.open("r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        file.truncate(end)
    return content[:end].decode().split("\n")[:-1]
