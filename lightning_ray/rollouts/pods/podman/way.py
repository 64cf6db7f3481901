"""The only way out of a container without a network: bytes between its loopback and the gateway.

This program runs at both ends of a Unix socket that is mounted into the container. Inside,
`WAY_OUT` (which stands before `manifest.BOOTSTRAP`) starts it with a socket that listens on the
loopback: `way.py inside FD SOCKET`. On the machine it is `way.py outside FOLDER`: it listens on
`FOLDER/way/gateway`, reads for each connection from `FOLDER/address` where the gateway is now, and
ends when that file is gone or nobody has touched it for `LEASE_S`. So it outlives a controller
that is killed, and no harness notices.

Standard library only, for any Python from 3.8: the inner end runs in the user's own image.
Invariants: whoever is inside chooses no address; a container holds `CONNECTIONS` connections at a
time, as many wait, and further ones are closed; the inner end knows no key.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fcntl
import os
import resource
import socket
import struct
import sys
import time

CONNECTIONS = 64  # as in relay.py
LEASE_S = 1200.0
PATIENCE_S = 60.0  # of the inner end, while the outer one is started again
ADDRESS, SOCKET = "address", "way/gateway"
_CHUNK = 1 << 16
_NS_GET_PARENT = 0xB702  # ioctl_ns(2)
_PEER = struct.Struct("iII")  # SO_PEERCRED: pid, uid, gid

# Before our own program in a container (its first process, which goes through the socket itself and
# needs no network): the inner end is another program, with nothing of what the first one knows.
WAY_OUT = """
import http.client, os, socket, subprocess, sys, urllib.parse
def through(connection):
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(connection.timeout)
    connection.sock.connect({socket!r})
http.client.HTTPConnection.connect = through
door = socket.socket()
door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
door.bind(("127.0.0.1", urllib.parse.urlsplit(os.environ["LIGHTNING_RAY_URL"]).port))
door.listen(64)
subprocess.Popen(
    [sys.executable, "-I", "-c", {program!r}, "inside", str(door.fileno()), {socket!r}],
    env={{n: t for n, t in os.environ.items() if not n.startswith("LIGHTNING_RAY_")}},
    # Others of its user may open what it has open.
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    pass_fds=[door.fileno()], start_new_session=True,
)
door.close()
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
    Carry = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def inside(door: socket.socket, way: str) -> None:
    """Carries what connects to `door` to the Unix socket `way`, for ever."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                beyond = await asyncio.open_unix_connection(way)
                break
            except OSError:
                if time.monotonic() > deadline:
                    writer.close()
                    return
                await asyncio.sleep(0.2)
        await join((reader, writer), beyond)

    await asyncio.start_server(carry, sock=door)
    await asyncio.Event().wait()


async def outside(folder: str) -> None:
    """Carries what connects to the folder's socket to the address that its file names."""
    address = os.path.join(folder, ADDRESS)
    places: dict[int, asyncio.Semaphore] = collections.defaultdict(
        lambda: asyncio.Semaphore(CONNECTIONS)
    )
    here: collections.Counter[int] = collections.Counter()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError):
            container = whose(writer.get_extra_info("socket"))
            here[container] += 1
            try:
                if here[container] <= 2 * CONNECTIONS:
                    async with places[container]:
                        with open(address) as file:
                            host, _, port = file.read().strip().rpartition(":")
                        await join((reader, writer), await asyncio.open_connection(host, int(port)))
            finally:
                here[container] -= 1
                if not here[container]:
                    del here[container], places[container]
        writer.close()

    path = os.path.join(folder, SOCKET)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # an earlier one's: only one of us has the lock
    server = await asyncio.start_unix_server(carry, path)
    os.chmod(path, 0o666)  # the user of a container is nobody here; the folder above is ours alone
    with contextlib.suppress(FileNotFoundError):
        while time.time() - os.stat(address).st_mtime < LEASE_S:
            await asyncio.sleep(1.0)
    server.close()


def whose(connection: socket.socket) -> int:
    """What the connections of one container have in common: its process namespace, in which others
    may be that it has made."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    ours = os.stat("/proc/self/ns/pid").st_ino
    space = os.open(f"/proc/{_PEER.unpack(peer)[0]}/ns/pid", os.O_RDONLY)
    found = os.fstat(space).st_ino
    try:
        while found != ours:
            above = fcntl.ioctl(space, _NS_GET_PARENT)
            os.close(space)
            space = above
            if os.fstat(space).st_ino == ours:
                break
            found = os.fstat(space).st_ino
    finally:
        os.close(space)
    return found


async def join(one: Pair, other: Pair) -> None:
    """Copies bytes both ways until `other` has no more."""
    asking = asyncio.ensure_future(copy(one[0], other[1]))
    try:
        await copy(other[0], one[1])
    finally:
        asking.cancel()
        for _, writer in (one, other):
            writer.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while True:
            data = await reader.read(_CHUNK)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def main(argv: list[str]) -> None:
    if argv[0] == "inside":
        asyncio.run(inside(socket.socket(fileno=int(argv[1])), argv[2]))
        return
    lock = os.open(os.path.join(argv[1], "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # another one is there
    if os.fork():
        os._exit(0)  # Ray ends the children of a worker with it
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(outside(argv[1]))  # the lock goes with the last of us


if __name__ == "__main__":
    main(sys.argv[1:])
