"""What a failed write says about the disk. A full disk passes, so that is worth another try."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
# A file system with less room than this counts as full, in bytes: SQLite needs some pages at a
# time, and only for a part of its failures it says that there was no room.
LEAST_BYTES = 1 << 16


def disk_fault(error: OSError | sqlite3.OperationalError, directory: Path) -> OSError | None:
    """The fault of the disk of `directory` behind `error`; its `errno` is one of `FULL` if there is
    no room, or no quota. None if the disk is not to blame."""
    if isinstance(error, OSError):
        return error
    kind = error.sqlite_errorcode & 0xFF  # the other bits are details
    if kind not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return None
    disk = os.statvfs(directory)
    no_room = disk.f_bavail * disk.f_frsize < LEAST_BYTES or not disk.f_favail
    number = errno.ENOSPC if no_room or kind == sqlite3.SQLITE_FULL else errno.EIO
    return OSError(number, f"{os.strerror(number)} ({error})", str(directory))
