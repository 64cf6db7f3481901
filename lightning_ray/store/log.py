"""An append-only log of Arrow record batches, sealed into Arrow files.

The open segment (`000001.log`) is a sequence of frames: 4 bytes length, 4 bytes CRC-32 of the
payload, then one record batch in Arrow IPC encoding. `append` returns after an fsync. When it is
full the next segment is opened, and the old one is *sealed*: written as `000001-CRC.arrow` (Arrow
IPC file, zstd; the CRC-32 of its bytes is in its name) under a temporary name, renamed, and the log
removed. One that could not be sealed stays a log and is tried again with the next.

Invariants: a batch is addressed by (segment, ordinal), also after sealing; what `append` returned
for survives a crash; no batch is given out, or sealed, whose checksum does not hold (a frame's is
compared whenever it is read, a sealed file's when it is opened). The torn tail of a crash in
`append` is cut off when the log is opened, and kept in `torn`; a log that lacks a batch it is known
to hold, or has whole frames behind a bad one, is damaged and does not open.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from lightning_ray.files import fsync, replace
from lightning_ray.store.errors import CorruptSegment

log = logging.getLogger(__name__)

# A segment is rewritten once when it is sealed; 64 MiB keeps that under a second.
SEGMENT_BYTES = 64 << 20
_FRAME = struct.Struct("<II")
# The first bytes of every payload (Arrow's continuation marker): where a frame may begin.
_MARKER = b"\xff\xff\xff\xff"


@dataclass
class _Frames:
    """A segment that is not sealed: where its frames begin, and where they end."""

    path: Path
    fd: int
    offsets: list[int] = field(default_factory=list)
    end: int = 0


class CallLog:
    """The log in `directory`; all batches have `schema`. One owner at a time. `known` says how many
    batches were written to a segment, at least.

    Raises:
        CorruptSegment: a segment is missing or damaged.
    """

    def __init__(
        self,
        directory: Path,
        schema: pa.Schema,
        segment_bytes: int = SEGMENT_BYTES,
        known: Mapping[int, int] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.schema, self.segment_bytes = directory, schema, segment_bytes
        self.torn: list[Path] = []
        self._frames: dict[int, _Frames] = {}
        self._readers: dict[int, pa.ipc.RecordBatchFileReader] = {}
        for left_over in directory.glob("*.tmp"):
            left_over.unlink()
        self._sealed = {int(path.stem[:6]): path for path in directory.glob("*.arrow")}
        known = known or {}
        try:
            for path in sorted(directory.glob("*.log")):
                segment = int(path.stem)
                if segment in self._sealed:  # a crash between the rename and the removal
                    path.unlink()
                else:
                    self._frames[segment] = self._recover(path, known.get(segment, 0))
            for segment in known.keys() - set(self.segments):
                raise CorruptSegment(str(self._log_path(segment)), 0, "the file is missing")
            self._newest = max(self.segments, default=0)
            if self._newest not in self._frames:
                self._open_next()
        except BaseException:
            self.close()
            raise

    def append(self, batch: pa.RecordBatch) -> tuple[int, int]:
        """Makes `batch` durable; returns its (segment, ordinal).

        Raises:
            OSError: the disk refused; nothing of the batch remains in the log.
        """
        payload = batch.serialize()
        header = _FRAME.pack(payload.size, zlib.crc32(payload))
        frames = self._frames[self._newest]
        try:
            written = os.pwritev(frames.fd, [header, payload], frames.end)
            if written < len(header) + payload.size:  # the disk had room for a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(frames.path))
            os.fdatasync(frames.fd)
        except OSError:
            os.ftruncate(frames.fd, frames.end)
            raise
        frames.offsets.append(frames.end)
        frames.end += written
        return self._newest, len(frames.offsets) - 1

    @property
    def is_full(self) -> bool:
        """True if it is time for the next segment."""
        return self._frames[self._newest].end >= self.segment_bytes

    def roll(self) -> None:
        """Opens the next segment and seals those before it.

        Raises:
            OSError: the disk refused; the old segment stays open.
        """
        self._open_next()
        self.seal()

    def seal(self) -> None:
        """Seals all segments but the newest; one that cannot be sealed stays as it is."""
        for segment in sorted(self._frames)[:-1]:
            try:
                self._seal(segment)
            except (OSError, CorruptSegment) as error:
                log.warning("segment %d of %s is not sealed: %s", segment, self.directory, error)

    def read(self, segment: int, ordinal: int) -> pa.RecordBatch:
        """The batch at (segment, ordinal).

        Raises:
            CorruptSegment: it is not there, or damaged.
        """
        if ordinal >= self.batches(segment):
            raise CorruptSegment(str(self.path(segment)), 0, f"there is no batch {ordinal}")
        if segment in self._frames:
            return self._read_frame(self._frames[segment], ordinal)
        return self._reader(segment).get_batch(ordinal)

    @property
    def segments(self) -> list[int]:
        """The numbers of all segments, in order."""
        return sorted([*self._sealed, *self._frames])

    def batches(self, segment: int) -> int:
        """How many batches a segment holds. Raises `CorruptSegment` if it is missing or damaged."""
        if segment in self._frames:
            return len(self._frames[segment].offsets)
        return int(self._reader(segment).num_record_batches)

    def path(self, segment: int) -> Path:
        """The file that holds a segment."""
        return self._sealed.get(segment, self._log_path(segment))

    def close(self) -> None:
        for frames in self._frames.values():
            os.close(frames.fd)

    # -- logs -----------------------------------------------------------------------------------

    def _log_path(self, segment: int) -> Path:
        return self.directory / f"{segment:06d}.log"

    def _open_next(self) -> None:
        path = self._log_path(self._newest + 1)
        frames = _Frames(path, os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        try:
            fsync(self.directory)
        except OSError:
            os.close(frames.fd)
            raise
        self._newest += 1
        self._frames[self._newest] = frames

    def _recover(self, path: Path, known: int) -> _Frames:
        """Finds the frames of a log and cuts off a torn tail."""
        data = path.read_bytes()
        offsets, end = [], 0
        while length := _payload(data, end):
            offsets.append(end)
            end += _FRAME.size + length
        if len(offsets) < known:
            raise CorruptSegment(str(path), end, f"whole are {len(offsets)} of {known} batches")
        if (after := _next_frame(data, end)) is not None:
            raise CorruptSegment(str(path), end, f"whole batches follow from byte {after} on")
        fd = os.open(path, os.O_RDWR)
        try:
            if end < len(data):
                torn = path.with_name(f"{path.stem}-{end}.torn")
                replace(torn, data[end:], durable=True)
                self.torn.append(torn)
                log.warning("%s: an unfinished write was cut off and kept in %s", path, torn.name)
                os.ftruncate(fd, end)
                os.fsync(fd)
        except OSError:
            os.close(fd)
            raise
        return _Frames(path, fd, offsets, end)

    def _read_frame(self, frames: _Frames, ordinal: int) -> pa.RecordBatch:
        start, end = [*frames.offsets[ordinal : ordinal + 2], frames.end][:2]
        data = os.pread(frames.fd, end - start, start)
        if _payload(data, 0) != end - start - _FRAME.size:
            raise CorruptSegment(str(frames.path), start, "the checksum of a batch does not hold")
        return pa.ipc.read_record_batch(pa.py_buffer(data).slice(_FRAME.size), self.schema)

    # -- sealed segments ------------------------------------------------------------------------

    def _seal(self, segment: int) -> None:
        frames, sink = self._frames[segment], pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(sink, self.schema, options=options) as writer:
            for ordinal in range(len(frames.offsets)):
                writer.write_batch(self._read_frame(frames, ordinal))
        data = sink.getvalue()
        sealed = self.directory / f"{segment:06d}-{zlib.crc32(data):08x}.arrow"
        replace(sealed, data, durable=True)
        fsync(self.directory)
        self._sealed[segment] = sealed
        del self._frames[segment]
        os.close(frames.fd)
        frames.path.unlink()

    def _reader(self, segment: int) -> pa.ipc.RecordBatchFileReader:
        if segment not in self._readers:
            path = self.path(segment)
            if not path.exists():
                raise CorruptSegment(str(path), 0, "the file is missing")
            _, _, wanted = path.stem.partition("-")  # none, if an earlier version sealed it
            if wanted and int(wanted, 16) != _crc(path):
                raise CorruptSegment(str(path), 0, "the checksum of the file does not hold")
            self._readers[segment] = pa.ipc.open_file(pa.memory_map(str(path)))
        return self._readers[segment]


def _payload(data: bytes, offset: int) -> int:
    """The length of the payload of the frame at `offset`; 0 if there is no whole one."""
    if offset + _FRAME.size > len(data):
        return 0
    length, crc = _FRAME.unpack_from(data, offset)
    payload = memoryview(data)[offset + _FRAME.size :][:length]
    return len(payload) if len(payload) == length and zlib.crc32(payload) == crc else 0


def _next_frame(data: bytes, offset: int) -> int | None:
    """Where the first whole frame behind `offset` begins."""
    marker = data.find(_MARKER, offset + _FRAME.size + 1)
    while marker >= 0:
        if _payload(data, marker - _FRAME.size):
            return marker - _FRAME.size
        marker = data.find(_MARKER, marker + 1)
    return None


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc
