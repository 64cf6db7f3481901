"""What the gateway is compared with: servers that are processes of their own.

`upstream` stands for a vLLM server: it answers every chat completion at once (or after the delay
that `GET /delay/SECONDS` sets) with 200 prompt token ids and 100 sampled ones with their
log-probabilities, which is what a recording proxy asks for. `proxy` is a plain FastAPI + httpx
proxy in front of it that parses both bodies and records nothing. `trivial` only answers.

    python benchmarks/peers.py upstream PORT
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response

SAID = "word " * 100
REPLY = json.dumps(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "prompt_token_ids": list(range(1000, 1200)),
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": SAID},
                "finish_reason": "stop",
                "token_ids": list(range(1000, 1100)),
                "logprobs": {
                    "content": [
                        {
                            "token": "token_id:1234",
                            "logprob": -0.5123456789,
                            "bytes": [119, 111, 114, 100],
                            "top_logprobs": [],
                        }
                    ]
                    * 100
                },
            }
        ],
        "usage": {"prompt_tokens": 200, "completion_tokens": 100, "total_tokens": 300},
    }
).encode()


class Upstream:
    """An ASGI application."""

    def __init__(self) -> None:
        self._delay, self._running, self._most = 0.0, 0, 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        _, kind, *rest = scope["path"].split("/")
        body = REPLY
        if kind == "delay":
            self._delay, self._most = float(rest[0]), 0
        elif kind == "most":
            body = str(self._most).encode()
        else:
            self._running += 1
            self._most = max(self._most, self._running)
            if self._delay:
                await asyncio.sleep(self._delay)
            self._running -= 1
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def plain_proxy(upstream: str) -> FastAPI:
    """The proxy that everybody writes first."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=300) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    async def forward(request: Request) -> Response:
        answer = await app.state.client.post(
            f"{upstream}/v1/chat/completions", json=await request.json()
        )
        return Response(json.dumps(answer.json()), media_type="application/json")

    app.add_api_route("/v1/chat/completions", forward, methods=["POST"])
    return app


class Trivial(asyncio.Protocol):
    """Answers each packet."""

    ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n" + b"x" * 900

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self.ANSWER)  # type: ignore[attr-defined]


class Server:
    """A server process; `url` answers when the constructor returns.

    Raises:
        RuntimeError: it does not answer within a minute.
    """

    def __init__(self, name: str, port: int, command: list[str], folder: Path) -> None:
        self.url, self.port, self.log = f"http://127.0.0.1:{port}", port, folder / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(self.url, timeout=5)
                return
            except httpx.HTTPError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise RuntimeError(f"{name} did not start: {self.log.read_text()}") from None
                time.sleep(0.1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def start(kind: str, port: int, folder: Path, *arguments: str) -> Server:
    """One of the servers of this file."""
    command = [sys.executable, str(Path(__file__).resolve()), kind, str(port), *arguments]
    return Server(kind, port, command, folder)


class AgentLightning(Server):
    """The gateway of agentlightning 1.0.2, run by a Python that has it, with one rollout."""

    KEY, ROLLOUT = "key", "rollout"
    PATH = f"/proxy/rollout/{ROLLOUT}/attempt/0/mode/train/openai/v1/chat/completions"

    def __init__(self, python: str, port: int, upstream: str, folder: Path) -> None:
        settings = {
            "host": "127.0.0.1",
            "port": port,
            "key": self.KEY,
            "default_proxy.model_name": "policy",
            "hydra.run.dir": folder / "hydra",
        }
        arguments = [f"{name}={value}" for name, value in settings.items()]
        super().__init__(
            "agentlightning", port, [python, "-m", "agentlightning.server", *arguments], folder
        )
        self.headers = {"authorization": f"Bearer {self.KEY}"}
        for path, body in (
            ("models", [{"model": "policy", "endpoint": f"{upstream}/v1"}]),
            ("rollouts", [{"input": {}, "rollout_id": self.ROLLOUT}]),
        ):
            httpx.post(f"{self.url}/api/{path}", json=body, headers=self.headers).raise_for_status()


def main(kind: str, port: int, *arguments: str) -> None:
    if kind == "trivial":
        asyncio.run(_serve_trivial(port))
    import uvicorn

    app = Upstream() if kind == "upstream" else plain_proxy(*arguments)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_keep_alive=120)


async def _serve_trivial(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Trivial, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
