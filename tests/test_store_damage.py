"""What the store does about a disk that fails, and about files that are not what was written."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from test_store import make_call, make_spec, same

from lightning_ray.records import Call, Outcome
from lightning_ray.store import log
from lightning_ray.store.errors import CorruptSegment, StoreError, StoreLocked
from lightning_ray.store.rollouts import RolloutStore

SEGMENT_BYTES = 6000


def begin(directory: Path, calls: int = 0) -> RolloutStore:
    """A store with one live attempt and so many calls, each recorded by itself."""
    store = RolloutStore(directory, SEGMENT_BYTES)
    store.create_rollouts([make_spec()])
    store.start_attempt("r-a0", "r", 0, "hash", 1.0)
    for call in some_calls(calls):
        store.append([call])
    return store


def some_calls(count: int) -> list[Call]:
    return [make_call(f"c{i}", [*range(i), i], [i + 1, 7]) for i in range(count)]


def read(directory: Path) -> tuple[list[Call], list[Path]]:
    """The calls of the attempt from disk, and what was cut off."""
    store = RolloutStore(directory, SEGMENT_BYTES)
    try:
        return store.calls("r-a0"), store.torn
    finally:
        store.close()


def all_equal(calls: list[Call]) -> bool:
    return all(same(*pair) for pair in zip(calls, some_calls(len(calls)), strict=True))


def newest_log(directory: Path) -> Path:
    return max((directory / "calls").glob("*.log"))


def oldest_sealed(directory: Path) -> Path:
    return min((directory / "calls").glob("*.arrow"))


# -- writes that fail ----------------------------------------------------------------------------


def test_a_write_for_which_there_is_room_in_part_leaves_nothing(tmp_path: Path):
    store = begin(tmp_path, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = newest_log(tmp_path).stat().st_size + 100
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError) as caught:
            store.append([make_call("big", list(range(500)), [1])])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.ENOSPC
    store.append(some_calls(3)[2:])
    store.close()
    calls, torn = read(tmp_path)
    assert len(calls) == 3 and all_equal(calls) and not torn


def test_a_segment_that_cannot_be_sealed_goes_on_as_a_log(tmp_path: Path, monkeypatch):
    def full(path, data, durable):
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(log, "replace", full)
        store = begin(tmp_path, 20)
        assert len(list((tmp_path / "calls").glob("*.log"))) > 2
        store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0)
        assert all_equal(store.calls("r-a0"))
    store.close()
    calls, _ = read(tmp_path)
    assert len(calls) == 20 and all_equal(calls)
    assert len(list((tmp_path / "calls").glob("*.log"))) == 1  # the others are sealed by now


def test_a_transaction_that_fails_leaves_the_index_for_the_next_one(tmp_path: Path):
    store = begin(tmp_path, 3)
    store.start_attempt("r-a1", "r", 1, "hash", 1.0)
    store.append([make_call("other", [5], [6], attempt="r-a1")])
    other = sqlite3.connect(tmp_path / "rollouts.sqlite")
    other.execute("begin immediate")
    store._db.execute("pragma busy_timeout = 1")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0)
    other.rollback()
    other.close()
    assert store.end_attempt("r-a1", Outcome.COMPLETED, "", 2.0).calls == 1
    assert store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0).calls == 3
    store.close()


def test_all_calls_that_the_index_lacks_are_found_in_the_log(tmp_path: Path):
    begin(tmp_path, 30).close()
    db = sqlite3.connect(tmp_path / "rollouts.sqlite", isolation_level=None)
    [last] = db.execute("select max(segment) from calls").fetchone()
    assert last > 4
    db.execute("delete from calls where segment > ?", (last - 3,))
    db.close()
    calls, _ = read(tmp_path)
    assert len(calls) == 30 and all_equal(calls)


def test_nobody_writes_after_another_owner_has_come(tmp_path: Path):
    first = begin(tmp_path / "a", 1)
    # As after a partition: the first owner lives on, and its lock is worth nothing.
    (tmp_path / "a" / "lock").unlink()
    second = RolloutStore(tmp_path / "a", SEGMENT_BYTES)
    for write in (
        lambda: first.append(some_calls(2)[1:]),
        lambda: first.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0),
    ):
        with pytest.raises(StoreLocked, match="another process"):
            write()
    first.close()
    second.append(some_calls(2)[1:])
    assert all_equal(second.calls("r-a0")) and second.epoch == first.epoch + 1
    second.close()


# -- files that were changed ---------------------------------------------------------------------


@pytest.mark.parametrize("file", [newest_log, oldest_sealed])
@pytest.mark.parametrize("crashed", [False, True])
def test_a_flipped_bit_is_never_a_wrong_call(tmp_path: Path, file, crashed: bool):
    whole, count = tmp_path / "whole", 18
    store = begin(whole, count)
    if crashed:  # what lies on the disk while the store runs
        shutil.copytree(whole, tmp_path / "image")
        store.close()
        whole = tmp_path / "image"
    else:
        store.close()
    size, refusals = file(whole).stat().st_size, []
    random = np.random.default_rng(0)
    for place in sorted(random.choice(size, 120, replace=False)):
        shutil.copytree(whole, tmp_path / "copy")
        damaged = file(tmp_path / "copy")
        data = bytearray(damaged.read_bytes())
        data[place] ^= 1 << random.integers(8)
        damaged.write_bytes(data)
        try:
            calls, torn = read(tmp_path / "copy")
        except CorruptSegment as error:
            refusals.append((error.path == str(damaged), error.offset <= place))
        else:
            assert all_equal(calls)
            assert torn and crashed and len(calls) == count - 1
        shutil.rmtree(tmp_path / "copy")
    # The last write of a crash may have been unfinished; all before it was answered.
    assert set(refusals) == {(True, True)}
    assert 60 < len(refusals) < 120 if crashed and file is newest_log else len(refusals) == 120


def test_a_damaged_segment_is_refused_and_the_message_says_where_and_what_to_do(tmp_path: Path):
    begin(tmp_path, 3).close()
    path = newest_log(tmp_path)
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            RolloutStore(tmp_path)
        assert f"{path} is damaged at byte 0" in str(caught.value)
        assert "put the file back from a copy" in str(caught.value)
        assert path.read_bytes() == data  # nothing was cut off
    data[20] ^= 1
    path.write_bytes(data)
    calls, _ = read(tmp_path)
    assert len(calls) == 3 and all_equal(calls)


@pytest.mark.parametrize("file", [newest_log, oldest_sealed])
def test_a_missing_or_shortened_file_is_refused(tmp_path: Path, file):
    begin(tmp_path / "whole", 18).close()
    for harm in (os.unlink, lambda path: os.truncate(path, 0)):
        shutil.copytree(tmp_path / "whole", tmp_path / "copy")
        path = file(tmp_path / "copy")
        harm(path)
        with pytest.raises(CorruptSegment) as caught:
            read(tmp_path / "copy")
        assert Path(caught.value.path).stem[:6] == path.stem[:6]
        shutil.rmtree(tmp_path / "copy")


def test_damage_while_the_store_runs_is_seen_when_it_is_read_and_is_not_sealed(tmp_path: Path):
    store = begin(tmp_path, 2)
    path = newest_log(tmp_path)
    data = bytearray(path.read_bytes())
    data[-10] ^= 4
    with path.open("r+b") as file:
        file.write(data)
    for call in some_calls(12)[2:]:
        store.append([call])
    store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0)
    with pytest.raises(CorruptSegment, match="checksum"):
        store.calls("r-a0")
    assert path.exists() and list((tmp_path / "calls").glob("*.arrow"))
    store.close()


def test_an_index_that_points_elsewhere_is_noticed(tmp_path: Path):
    begin(tmp_path, 3).close()
    db = sqlite3.connect(tmp_path / "rollouts.sqlite", isolation_level=None)
    db.execute("update calls set batch = 1 where call_id = 'c0'")
    db.close()
    with pytest.raises(CorruptSegment, match="c0 is not where it was written"):
        read(tmp_path)
