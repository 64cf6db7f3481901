"""A copy of a run's checkpoints in another place: a folder, or an object store's URL.

The run directory itself must be on a disk of the machine, since SQLite locks files there. `Mirror`
copies every checkpoint that it keeps, and brings them back to a machine that has none.

Invariants: a checkpoint whose `state.json` is there is whole, since that file is written last and
removed first; an upload never holds up the run for longer than until the next checkpoint; a failed
one is said by the next call.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pyarrow import fs

from lightning_ray.config import ConfigError

STATE, BEST = "state.json", "best.json"  # files of a checkpoint, and beside the checkpoints


class Mirror:
    """The copy of a run's checkpoints at `url`: a path, or whatever `pyarrow.fs` or fsspec knows
    (`s3://`, `gs://`, `hdfs://`, ...).

    Raises:
        ConfigError: no file system is known for the URL.
        OSError: from every method, when the storage refused.
    """

    def __init__(self, url: str) -> None:
        self._there, self._root = _file_system(url)
        self._here = fs.LocalFileSystem()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._upload: Future[None] | None = None

    def fetch(self, here: Path, say: Callable[[str], None]) -> None:
        """Brings the copies into the folder `here`."""
        for name in sorted(self._whole()):
            say(f"fetching {self._root}/{name}")
            partial = here / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            fs.copy_files(f"{self._root}/{name}", str(partial), self._there, self._here)
            partial.rename(here / name)
        if self._exists(f"{self._root}/{BEST}"):
            fs.copy_files(f"{self._root}/{BEST}", str(here / BEST), self._there, self._here)

    def update(self, here: Path, folders: Sequence[Path]) -> None:
        """Copies in the background those of the checkpoints `folders` (all that there are in
        `here`) that are new, and removes there what has gone here."""
        self.wait()
        self._upload = self._thread.submit(self._update, here, folders)

    def wait(self) -> None:
        """Returns when the last `update` is done."""
        if self._upload is not None:
            self._upload.result()

    def _update(self, here: Path, folders: Sequence[Path]) -> None:
        there = self._whole()
        for folder in folders:
            if folder.name not in there:
                files = sorted(path for path in folder.rglob("*") if path.is_file())
                for file in sorted(files, key=lambda path: path == folder / STATE):  # the last one
                    self._copy(file, f"{self._root}/{file.relative_to(here)}")
        if (here / BEST).exists():
            self._copy(here / BEST, f"{self._root}/{BEST}")
        for name in there - {folder.name for folder in folders}:
            self._there.delete_file(f"{self._root}/{name}/{STATE}")
            self._there.delete_dir(f"{self._root}/{name}")

    def _whole(self) -> set[str]:
        """Names of the checkpoints there."""
        entries = self._there.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        folders = [e.base_name for e in entries if e.type is fs.FileType.Directory]
        return {name for name in folders if self._exists(f"{self._root}/{name}/{STATE}")}

    def _exists(self, path: str) -> bool:
        return bool(self._there.get_file_info(path).type is fs.FileType.File)

    def _copy(self, file: Path, target: str) -> None:
        self._there.create_dir(target.rpartition("/")[0], recursive=True)
        fs.copy_files(str(file), target, self._here, self._there)


def _file_system(url: str) -> tuple[fs.FileSystem, str]:
    """The file system of a URL, and the path in it."""
    if "://" not in url:
        return fs.LocalFileSystem(), str(Path(url).expanduser().absolute())
    try:
        system, path = fs.FileSystem.from_uri(url)
    except (ValueError, NotImplementedError, OSError):
        system, path = _fsspec(url)
    return system, path.rstrip("/")


def _fsspec(url: str) -> tuple[fs.FileSystem, str]:
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"run.storage={url}: {error}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path
