"""Files for and from pods: what a node hands over by a folder, a pod gets over HTTP.

A *room* is a folder under the id of an attempt (or of its grading), with a few files of ours, one
that comes back (`RESULT`), and the hash of the key that opens it. It lies in the store's folder, so
that any gateway replica can serve it through the store actor.

Invariants: only who has the key of a room reads or writes it, and only `RESULT` can be written; the
first pod that asks for the order of a room is the only one that ever gets it; a file is there whole
or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from lightning_ray.files import PRIVATE, replace
from lightning_ray.store.keys import matches

RESULT = "result"  # what a pod sends back
ORDER = "order"  # what a pod is to do: handed to one pod only
_KEY, _CLAIMANT = ".key", ".claimant"  # no file of a pod has such a name
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,239}")  # names of rooms and files


class Refusal(StrEnum):
    """Why a file is not handed over."""

    KEY = "key"  # no such room, or not its key
    NAME = "name"  # the room has no such file
    CLAIMED = "claimed"  # another pod has the order


class Depot:
    """The rooms below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self, room: str, key_hash: str, files: Mapping[str, bytes]) -> None:
        """Makes a room with `files` in it. A room of that name is replaced."""
        self.close(room)
        folder = self._directory / room
        folder.mkdir(mode=0o700, parents=True)
        for name, content in files.items():
            replace(folder / name, content, durable=True, mode=PRIVATE)
        # The last one: without it the room is closed.
        replace(folder / _KEY, key_hash.encode(), durable=True, mode=PRIVATE)

    def take(self, room: str, key: str, name: str, pod: str) -> bytes | Refusal:
        """What `pod` may read."""
        if not self.opens(room, key):
            return Refusal.KEY
        path = self._directory / room / name
        if not _PLAIN.fullmatch(name) or not path.is_file():
            return Refusal.NAME
        if name == ORDER and not self._claim(room, pod):
            return Refusal.CLAIMED
        return path.read_bytes()

    def bring(self, room: str, key: str, content: bytes) -> Refusal | None:
        """Takes the room's result; of several the last one counts."""
        if self.opens(room, key):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                result = self._directory / room / RESULT
                replace(result, content, durable=True, mode=PRIVATE)
                return None
        return Refusal.KEY

    def result(self, room: str) -> bytes | None:
        """What the pod sent back, if anything."""
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / room / RESULT).read_bytes()
        return None

    def delivered(self) -> list[str]:
        """The rooms whose pods have sent something back."""
        return [path.parent.name for path in self._directory.glob(f"*/{RESULT}")]

    def file(self, room: str, name: str) -> bytes | None:
        """A file of ours in a room."""
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / room / name).read_bytes()
        return None

    def close(self, room: str) -> None:
        """Removes the room; its key opens nothing from here on."""
        shutil.rmtree(self._directory / room, ignore_errors=True)

    def sweep(self, keep: list[str]) -> None:
        """Removes the rooms that an earlier life left, except those of `keep`."""
        for folder in self._directory.glob("*"):
            if folder.name not in keep:
                self.close(folder.name)

    def opens(self, room: str, key: str) -> bool:
        """True if `key` is that of the room."""
        expected = None
        if _PLAIN.fullmatch(room):
            with contextlib.suppress(OSError):
                expected = (self._directory / room / _KEY).read_text()
        return matches(expected, key)

    def _claim(self, room: str, pod: str) -> bool:
        path = self._directory / room / _CLAIMANT
        with contextlib.suppress(FileExistsError):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(pod)
            return True
        return path.read_text() == pod
