"""The load generator: a process of its own that only sends requests and measures.

It reads jobs (`Job` as JSON, one a line) on stdin and answers each with a `Result` on stdout. A
closed loop of `clients` keep-alive connections: each sends its next request as soon as it has the
answer, to the next target after `per_target` calls, as agents that make some calls and are
followed by others. In a job of conversations a target's calls carry the history of those before
them, and a client ends with its target, as a harness does. HTTP is written and read as bytes, since
a client library would cost more than the gateways that are measured; `trivial` says how much this
leaves to spare.

Invariant: any answer but a whole 200 ends the job with an error.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

# In a body this stands for the number of the request, so that no two are the same.
NUMBER = "000000"


@dataclass(frozen=True)
class Job:
    """`targets` are paths; `headers` and `body` go with each request. It ends after `seconds`, or
    after `calls` if that is not 0; with `conversation`, when each target has had `per_target`."""

    port: int
    targets: list[str]
    body: str
    clients: int
    headers: dict[str, str] = field(default_factory=dict)
    per_target: int = 20
    seconds: float = 1.0
    calls: int = 0
    conversation: bool = False


@dataclass(frozen=True)
class Result:
    """`rate` in calls per second; `latencies` in seconds, in the order in which the calls ended."""

    rate: float
    latencies: list[float]

    def quantile(self, q: float) -> float:
        """A latency in milliseconds."""
        ordered = sorted(self.latencies)
        return 1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, run: Run) -> None:
        self._run, self._buffer, self._missing, self._sent = run, bytearray(), 0, 0.0
        self._finished = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._requests = transport, self._run.requests()
        self._send(None)

    def _send(self, answer: bytes | None) -> None:
        try:
            request = self._requests.send(answer)
        except StopIteration:
            self._finished = True
            self._transport.close()
            self._run.leave()
            return
        self._sent = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._missing:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            length = head.partition(b"content-length:")[2].partition(b"\r")[0]
            if not head.startswith(b"http/1.1 200") or not length:
                self._run.fail(bytes(self._buffer[:1000]).decode(errors="replace"))
                return
            self._missing = end + 4 + int(length)
            self._body_at = end + 4
        if len(self._buffer) >= self._missing:
            answer = bytes(self._buffer[self._body_at :])
            self._buffer.clear()
            self._missing = 0
            self._run.latencies.append(time.perf_counter() - self._sent)
            self._send(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._finished:
            self._run.fail(f"the server closed the connection ({exc})")


class Run:
    """The state that the clients of one job share."""

    def __init__(self, job: Job) -> None:
        self._job, self.latencies, self._sent = job, [], 0
        self._targets, self._numbers = iter(job.targets), count()
        self._waiting, self._done = job.clients, asyncio.get_running_loop().create_future()

    async def measure(self) -> Result:
        loop, job = asyncio.get_running_loop(), self._job
        self._start = time.perf_counter()
        for _ in range(job.clients):
            await loop.create_connection(lambda: Client(self), "127.0.0.1", job.port)
        error = await self._done
        if error:
            raise RuntimeError(error)
        return Result(
            len(self.latencies) / (time.perf_counter() - self._start), list(self.latencies)
        )

    def requests(self) -> Generator[bytes, bytes | None, None]:
        """What one client sends; it is sent the answers."""
        return self._conversation() if self._job.conversation else self._independent()

    def _head(self, target: str, length: int) -> str:
        headers = "".join(f"{name}: {value}\r\n" for name, value in self._job.headers.items())
        return (
            f"POST {target} HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        )

    def _conversation(self) -> Generator[bytes, bytes | None, None]:
        target = next(self._targets)
        asked = json.loads(self._job.body)
        for turn in range(self._job.per_target):
            body = json.dumps(asked).encode()
            answer = yield self._head(target, len(body)).encode() + body
            asked["messages"] += [
                json.loads(answer or b"")["choices"][0]["message"],
                {"role": "user", "content": f"turn {turn}"},
            ]

    def _independent(self) -> Generator[bytes, bytes | None, None]:
        job = self._job
        length = len(job.body.encode())
        before, _, after = job.body.partition(NUMBER)
        for target in self._targets:
            head = (self._head(target, length) + before).encode()
            for _ in range(job.per_target):
                late = time.perf_counter() - self._start > job.seconds
                if self._sent >= job.calls if job.calls else late:
                    return
                self._sent += 1
                yield head + f"{next(self._numbers) % 10 ** len(NUMBER):06d}{after}".encode()
        self.fail("there are not enough targets for so many calls")

    def leave(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.fail("")

    def fail(self, error: str) -> None:
        if not self._done.done():
            self._done.set_result(error)


class LoadGenerator:
    """The process, seen from the benchmark."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: Job) -> Result:
        """Does a job.

        Raises:
            RuntimeError: an answer was no 200; the message is its beginning.
        """
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(f"{job.targets[0]} on port {job.port}: {answer['error']}")
        return Result(**answer)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


async def _do(job: Job) -> Result:
    return await Run(job).measure()


def main() -> None:
    for line in sys.stdin:
        try:
            answer = asdict(asyncio.run(_do(Job(**json.loads(line)))))
        except (RuntimeError, OSError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
