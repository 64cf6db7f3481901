"""The only way out of a sandbox: bytes between its loopback and the gateway.

A box has a network of its own with nothing in it but a listening socket. `Relay` accepts on that
socket from outside, connects each connection to the gateway and copies bytes both ways, in a
thread; it knows nothing of HTTP. Invariants: what is inside chooses no address, only when to
connect; it can hold `CONNECTIONS` connections at a time, further ones wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from asyncio import TaskGroup
from collections.abc import AsyncIterator
from typing import Any

CONNECTIONS = 64  # a harness with parallel sub-agents has a dozen; each costs us two descriptors
_CHUNK = 1 << 16


class Relay:
    """Carries what connects to `listener` to `address` until it is closed."""

    def __init__(self, listener: socket.socket, address: tuple[str, int]) -> None:
        self._listener, self._address = listener, address
        listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cuts every connection."""
        with contextlib.suppress(RuntimeError):  # its loop is closed: it failed before
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    def _run(self) -> None:
        cancelled = contextlib.suppress(asyncio.CancelledError)
        with self._listener, contextlib.closing(self._loop), cancelled:
            self._loop.run_until_complete(self._serving)

    async def _serve(self) -> None:
        free = asyncio.Semaphore(CONNECTIONS)
        async with TaskGroup() as group:
            while True:
                await free.acquire()
                inside, _ = await self._loop.sock_accept(self._listener)
                group.create_task(self._carry(inside)).add_done_callback(lambda _: free.release())

    async def _carry(self, inside: socket.socket) -> None:
        try:
            async with _open(sock=inside) as (request, reply):
                host, port = self._address
                async with _open(host=host, port=port) as (answer, question), TaskGroup() as both:
                    asking = both.create_task(_copy(request, question))
                    await _copy(answer, reply)
                    asking.cancel()  # the gateway has closed: nobody reads any more
        except* OSError:
            pass  # either side may go away; the other one is then cut


@contextlib.asynccontextmanager
async def _open(**where: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(**where)
    try:
        yield reader, writer
    finally:
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
