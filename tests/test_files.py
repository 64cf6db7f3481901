"""A file takes another's place whole, or not at all."""

from __future__ import annotations

import resource
import stat
from pathlib import Path

import pytest

from lightning_ray import files


@pytest.mark.parametrize("durable", [True, False])
def test_a_disk_that_refuses_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, durable: bool
) -> None:
    path = tmp_path / "file"
    files.replace(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError):
            files.replace(path, bytes(200), durable=durable)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_a_private_file_is_private_also_where_it_replaces_one_that_was_not(tmp_path: Path) -> None:
    path, usual = tmp_path / "file", tmp_path / "usual"
    usual.write_bytes(b"")
    files.replace(path, b"old")
    assert path.stat().st_mode == usual.stat().st_mode
    files.replace(path, b"new", durable=True, mode=files.PRIVATE)
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600
