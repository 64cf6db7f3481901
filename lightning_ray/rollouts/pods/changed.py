"""What a program changes below a folder of its pod. It travels with `entry.py`, in front of it, as
one file: standard library only, for any Python from 3.8.

`snapshot` is taken before the program runs, `originals` too where the repository is the image's own
and so nobody outside knows it; `changes` is what is sent back.

Invariants: nothing is read through a link; originals are in the memory of this process, where the
program can neither read nor change them.
"""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
import zlib

TYPE_CHECKING = False  # `typing` takes longer to import than most of this file
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Snapshot = dict[str, tuple[int, ...]]

MOST_ENTRIES = 200_000  # files of a workspace that are looked at
MOST_CHANGED = 20_000  # files that come back: a repair changes a few
# Bytes of a file whose original is kept, and, compressed, of all of them: texts of a large
# repository have some tens of MB.
MOST_ORIGINAL, MOST_ORIGINALS = 4 << 20, 256 << 20


class Ended(Exception):
    """The order could not be carried out: `why` is one of EndedBy's values."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(detail)
        self.why = why


def snapshot(root: str) -> Snapshot:
    """What lies below `root`: path to what changes when a file does. A harness that is not root
    cannot set the time of the last change of a file's metadata."""
    seen: Snapshot = {}
    for path, status in walk(root):
        kept = (
            status.st_mode,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
        )
        seen[path] = kept
    return seen


def walk(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Relative path and status of everything below `root` that is no folder."""
    folders, entries = [""], 0
    while folders:
        prefix = folders.pop()
        try:
            found = list(os.scandir(os.path.join(root, prefix)))
        except OSError:
            continue
        for entry in found:
            entries += 1
            if entries > MOST_ENTRIES:
                raise Ended("not_started", f"{root} has more than {MOST_ENTRIES} files")
            path = prefix + entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path + "/")
                else:
                    yield path, entry.stat(follow_symlinks=False)
            except OSError:
                continue  # a path that is too long, a folder that may not be entered


def originals(root: str, before: Snapshot) -> dict[str, bytes]:
    """The texts that a repair may change, compressed. What has a NUL, as programs and pictures do,
    is none of them."""
    kept, size = {}, 0
    for path, (mode, length, *_) in before.items():
        if path.startswith(".git/") or not stat.S_ISREG(mode) or length > MOST_ORIGINAL:
            continue
        try:
            with open(os.path.join(root, path), "rb") as file:
                content = file.read()
        except OSError:
            continue  # nor can the program change what it may not read
        if b"\0" not in content:
            kept[path] = zlib.compress(content, 1)
            size += len(kept[path])
        if size > MOST_ORIGINALS:
            raise Ended("not_started", f"the texts in {root} are more than a repository's")
    return kept


def changes(
    root: str, before: Snapshot, most: int, kept: Mapping[str, bytes] | None = None
) -> bytes | None:
    """A tar of what changed below `root`: `deleted` (JSON), and files and links below `changed/`;
    None if it is larger than `most` bytes. With `kept` originals, those of what changed come below
    `before/`, and what was there without one does not count: nobody could say how it differs. Nor
    does what git and Python write for themselves."""
    after = snapshot(root)
    gone = sorted(before.keys() - after.keys())
    changed = sorted(path for path, found in after.items() if before.get(path) != found)
    if kept is not None:
        gone = [path for path in gone if path in kept]
        changed = [path for path in changed if path in kept or _is_new(path, before)]
    if len(changed) > MOST_CHANGED:
        return None
    body, size = io.BytesIO(), 0
    with tarfile.open(fileobj=body, mode="w") as tar:
        for path in [*gone, *changed]:
            if kept and path in kept:
                content = zlib.decompress(kept[path])
                size += len(content)
                if size > most:
                    return None
                add(tar, "before/" + path, content)
        add(tar, "deleted", json.dumps(gone).encode("utf-8", "surrogateescape"))
        for path in changed:
            mode, length = after[path][:2]
            if stat.S_ISLNK(mode):
                link = tarfile.TarInfo("changed/" + path)
                link.type, link.linkname = tarfile.SYMTYPE, os.readlink(os.path.join(root, path))
                tar.addfile(link)
            elif stat.S_ISREG(mode):
                size += length
                if size > most:
                    return None
                try:
                    with open(os.path.join(root, path), "rb") as file:
                        add(tar, "changed/" + path, file.read(length), mode)
                except OSError:
                    continue  # unreadable: as if it had not changed
    return body.getvalue() if body.tell() <= most else None


def _is_new(path: str, before: Snapshot) -> bool:
    return path not in before and not {".git", "__pycache__"} & set(path.split("/"))


def add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), stat.S_IMODE(mode)
    tar.addfile(member, io.BytesIO(content))
