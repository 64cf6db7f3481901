"""A line to an actor on the same node: a parcel costs a thirtieth of a call through Ray.

A Ray call takes each side about a millisecond of a slow core, and a model call makes three in a row
(claim, sample, record). A `Line` asks the actor once, through Ray, for a Unix socket, and sends its
parcels there; to an actor on another node it sends them through Ray. Parcels are bytes, and what
they mean is the actor's business.

Invariants: each parcel gets its own answer or error; it is sent again only if the actor was lost,
and only where that is asked for; nothing is read from a caller who does not begin with the token
that Ray brought.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import secrets
import socket
import struct
import sys
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import ray

# Bytes of the token with which a line begins: 128 bits, and seconds within which it comes.
TOKEN_BYTES = 16
TOKEN_S = 10.0
# Before each parcel and each answer: its length, and the parcel's number on this line.
_HEAD = struct.Struct("<II")
# The first byte of an answer.
_RESULT, _ERROR = b"\0", b"\1"


class LineLost(ConnectionError):
    """The actor's process ended before it answered."""


class LineEnd:
    """Gives an actor the other end. `LINE` names its method `(name: str, parcel: bytes) -> bytes`
    that answers, which callers on other nodes ask through Ray."""

    LINE: str
    _line: tuple[str, bytes] | None = None
    _listening: asyncio.AbstractServer  # which uvloop closes when nobody refers to it

    async def open_line(self, node_id: str) -> tuple[str, bytes] | None:
        """The socket and the token for callers on node `node_id`; None if the actor is on
        another."""
        if sys.platform != "linux" or node_id != ray.get_runtime_context().get_node_id():
            return None
        if self._line is None:
            # An abstract socket: a process that is killed leaves no file.
            address = f"\0lightning_ray-{uuid.uuid4().hex}"
            token, answer = secrets.token_bytes(TOKEN_BYTES), getattr(self, self.LINE)
            self._listening = await asyncio.get_running_loop().create_unix_server(
                lambda: _Server(answer, token), address
            )
            self._line = address, token
        return self._line


class Line:
    """Sends parcels to `method` (`LineEnd.LINE`) of an actor. With `again`, a parcel that was lost
    is sent once more, through Ray, which starts the actor again first. Belongs to one event
    loop."""

    def __init__(self, actor: Any, method: str, again: bool = False) -> None:
        self._method, self._again = getattr(actor, method), again
        # What stands for an actor without being one has no line.
        self._open: Any = getattr(actor, "open_line", None)
        self._client: _Client | None = None
        self._connecting: asyncio.Task[_Client | None] | None = None

    async def send(self, name: str, parcel: bytes) -> bytes:
        """The actor's answer.

        Raises:
            LineLost: see there. RayActorError means the same of a parcel that went through Ray.
        """
        try:
            client = await self._connected()
            if client:
                return await client.send(name, parcel)
        except LineLost:
            if not self._again:
                raise
        answer: bytes = await self._method.remote(name, parcel)
        return answer

    async def _connected(self) -> _Client | None:
        if self._open is None or (self._client and not self._client.lost):
            return self._client
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Client | None:
        line = await self._open.remote(ray.get_runtime_context().get_node_id())
        if line is None:  # it stays on its node when it is started again
            self._open = self._client = None
            return None
        address, token = line
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)  # at once; uvloop knows no abstract addresses
            connection.send(token)
        except OSError as error:
            connection.close()
            raise LineLost(f"the actor ended as it was called: {error}") from error
        loop = asyncio.get_running_loop()
        _, self._client = await loop.create_unix_connection(_Client, sock=connection)
        return self._client


class _Frames(asyncio.Protocol):
    """Numbered messages on a stream."""

    _transport: Any  # uvloop's is no asyncio.Transport

    def __init__(self) -> None:
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def _write(self, number: int, *parts: bytes) -> None:
        length = sum(map(len, parts))
        self._transport.writelines((_HEAD.pack(length, number), *parts))

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        """What has come whole."""
        received = self._received
        while len(received) >= _HEAD.size:
            length, number = _HEAD.unpack_from(received)
            end = _HEAD.size + length
            if len(received) < end:
                return
            body = bytes(memoryview(received)[_HEAD.size : end])
            del received[:end]
            yield number, body


class _Server(_Frames):
    def __init__(self, answer: Callable[[str, bytes], Awaitable[bytes]], token: bytes) -> None:
        super().__init__()
        self._answer, self._token, self._known = answer, token, False
        self._answering: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._late = asyncio.get_running_loop().call_later(TOKEN_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._known:
            if len(self._received) < TOKEN_BYTES:
                return
            if not hmac.compare_digest(bytes(self._received[:TOKEN_BYTES]), self._token):
                self._transport.abort()
                return
            del self._received[:TOKEN_BYTES]
            self._known = True
            self._late.cancel()
        for number, body in self._frames():
            name, _, parcel = body.partition(b"\0")
            task = asyncio.create_task(self._serve(number, name.decode(), parcel))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _serve(self, number: int, name: str, parcel: bytes) -> None:
        try:
            answer = (_RESULT, await self._answer(name, parcel))
        except Exception as error:
            answer = (_ERROR, pickle.dumps(portable(error)))
        if not self._transport.is_closing():  # else the caller is gone
            self._write(number, *answer)


class _Client(_Frames):
    def __init__(self) -> None:
        super().__init__()
        self.lost = False
        self._numbers, self._waiting = count(), dict[int, asyncio.Future[bytes]]()

    async def send(self, name: str, parcel: bytes) -> bytes:
        if self.lost:
            raise LineLost("the actor's process ended")
        number = next(self._numbers) & 0xFFFFFFFF
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._write(number, name.encode(), b"\0", parcel)
        return await answered

    def data_received(self, data: bytes) -> None:
        self._received += data
        for number, body in self._frames():
            answered = self._waiting.pop(number)
            if answered.done():  # nobody waits for it any longer
                continue
            if body[:1] == _RESULT:
                answered.set_result(body[1:])
            else:
                answered.set_exception(_unpacked(body[1:]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(LineLost("the actor's process ended"))
        self._waiting.clear()


def _unpacked(error: bytes) -> Exception:
    try:
        unpacked: Exception = pickle.loads(error)
    except Exception as unknown:
        return RuntimeError(f"the actor raised what is not known here: {unknown}")
    return unpacked


def portable(error: BaseException) -> BaseException:
    """The error, with where it came from, as something that can be pickled."""
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = (ValueError if isinstance(error, ValueError) else RuntimeError)(str(error))
    error.add_note(trace)
    return error
