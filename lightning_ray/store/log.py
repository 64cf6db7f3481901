"""An append-only log of Arrow record batches, sealed into Arrow files.

The open segment (`000001.log`) is a sequence of frames: 4 bytes length, 4 bytes CRC-32, then one
record batch in Arrow IPC encoding. `append` returns after an fsync. When the segment is full it is
*sealed*: written as `000001.arrow` (Arrow IPC file, zstd) under a temporary name, renamed, and the
log removed.

Invariants: a batch is addressed by (segment, ordinal), also after sealing; what `append` returned
for survives a crash; a torn or corrupt tail is cut off when the log is opened, and `torn_bytes`
says so.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

# A segment is rewritten once when it is sealed; 64 MiB keeps that under a second.
SEGMENT_BYTES = 64 << 20
_FRAME = struct.Struct("<II")


class CallLog:
    """The log in `directory`; all batches have `schema`. One owner at a time."""

    def __init__(
        self, directory: Path, schema: pa.Schema, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.schema, self.segment_bytes = directory, schema, segment_bytes
        self.torn_bytes = 0
        self._segment, self._end, self._fd = 0, 0, -1
        self._offsets: list[int] = []
        self._sealed: dict[int, pa.ipc.RecordBatchFileReader] = {}
        for left_over in directory.glob("*.tmp"):
            left_over.unlink()
        logs = sorted(int(path.stem) for path in directory.glob("*.log"))
        arrows = sorted(int(path.stem) for path in directory.glob("*.arrow"))
        for segment in logs:
            if segment in arrows:  # a crash between the rename and the removal
                self._path(segment, "log").unlink()
        open_logs = [segment for segment in logs if segment not in arrows]
        for segment in open_logs[:-1]:
            self._recover(segment)
            self._seal(segment, self._offsets)
        self._open(open_logs[-1] if open_logs else (arrows[-1] if arrows else 0) + 1)

    def append(self, batch: pa.RecordBatch) -> tuple[int, int]:
        """Makes `batch` durable; returns its (segment, ordinal).

        Raises:
            OSError: the disk refused; nothing of the batch remains in the log.
        """
        payload = batch.serialize()
        frame = _FRAME.pack(payload.size, zlib.crc32(payload))
        start = self._end
        try:
            os.pwritev(self._fd, [frame, payload], start)
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, start)
            raise
        self._offsets.append(start)
        self._end = start + _FRAME.size + payload.size
        return self._segment, len(self._offsets) - 1

    def roll_if_full(self) -> bool:
        """Seals the open segment and opens the next one if it has reached its size."""
        if self._end < self.segment_bytes:
            return False
        os.close(self._fd)
        self._seal(self._segment, self._offsets)
        self._open(self._segment + 1)
        return True

    def read(self, segment: int, ordinal: int) -> pa.RecordBatch:
        """The batch at (segment, ordinal).

        Raises:
            KeyError: there is no such batch.
        """
        if segment == self._segment:
            if not 0 <= ordinal < len(self._offsets):
                raise KeyError(f"no batch {ordinal} in segment {segment} of {self.directory}")
            return self._read_frame(self._fd, self._offsets[ordinal])
        if segment not in self._sealed:
            path = self._path(segment, "arrow")
            if not path.exists():
                raise KeyError(f"no segment {segment} in {self.directory}")
            self._sealed[segment] = pa.ipc.open_file(pa.memory_map(str(path)))
        return self._sealed[segment].get_batch(ordinal)

    @property
    def open_segment(self) -> tuple[int, int]:
        """The number of the segment that is not sealed yet, and how many batches it holds."""
        return self._segment, len(self._offsets)

    def open_batches(self) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """(segment, ordinal, batch) of the segment that is not sealed yet."""
        for ordinal, offset in enumerate(self._offsets):
            yield self._segment, ordinal, self._read_frame(self._fd, offset)

    def close(self) -> None:
        os.close(self._fd)

    def _path(self, segment: int, suffix: str) -> Path:
        return self.directory / f"{segment:06d}.{suffix}"

    def _open(self, segment: int) -> None:
        self._segment = segment
        self._recover(segment)
        self._fd = os.open(self._path(segment, "log"), os.O_RDWR | os.O_CREAT, 0o600)
        fsync(self.directory)

    def _recover(self, segment: int) -> None:
        """Finds the frames of a log and cuts off what is not whole."""
        self._offsets = []
        self._end = 0
        path = self._path(segment, "log")
        if not path.exists():
            return
        size = path.stat().st_size
        fd = os.open(path, os.O_RDWR)
        try:
            while self._end + _FRAME.size <= size:
                length, crc = _FRAME.unpack(os.pread(fd, _FRAME.size, self._end))
                payload = os.pread(fd, length, self._end + _FRAME.size)
                if len(payload) < length or zlib.crc32(payload) != crc or length == 0:
                    break
                self._offsets.append(self._end)
                self._end += _FRAME.size + length
            if self._end < size:
                self.torn_bytes += size - self._end
                os.ftruncate(fd, self._end)
                os.fsync(fd)
        finally:
            os.close(fd)

    def _read_frame(self, fd: int, offset: int) -> pa.RecordBatch:
        length, _ = _FRAME.unpack(os.pread(fd, _FRAME.size, offset))
        return pa.ipc.read_record_batch(
            pa.py_buffer(os.pread(fd, length, offset + _FRAME.size)), self.schema
        )

    def _seal(self, segment: int, offsets: list[int]) -> None:
        target, temporary = self._path(segment, "arrow"), self._path(segment, "tmp")
        fd = os.open(self._path(segment, "log"), os.O_RDONLY)
        try:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            with (
                temporary.open("wb") as file,
                pa.ipc.new_file(file, self.schema, options=options) as writer,
            ):
                for offset in offsets:
                    writer.write_batch(self._read_frame(fd, offset))
            fsync(temporary)
        finally:
            os.close(fd)
        temporary.rename(target)
        fsync(self.directory)
        self._path(segment, "log").unlink()


def fsync(path: Path) -> None:
    """Makes a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
