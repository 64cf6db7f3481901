"""A gateway replica and a store actor as bare processes: everything of theirs but Ray.

Where Ray carries messages to the store's actor, a Unix socket does; like Ray it sends a message
again to the actor's next life, until it is answered. Such a process lives for a moment only, so it
is forked from one that has imported what it needs (`NEEDS`).
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The last ones are imported by a gateway's first call.
NEEDS = [
    "support",
    "uvicorn",
    "lightning_ray.gateway.app",
    "vllm.parser.parser_manager",
    "vllm.tool_parsers.hermes_tool_parser",
    "vllm.entrypoints.openai.chat_completion.protocol",
]
# Between two tries to reach a store that is starting again.
AGAIN_S = 0.02
MODEL_LEN = 10_000


class Handle:
    """`handle.method.remote(...)` of an actor; `call` makes the coroutine that does it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Any:
        if method == "open_line":
            raise AttributeError(method)  # there is no Ray that could tell the nodes
        return SimpleNamespace(
            remote=lambda *args: asyncio.ensure_future(self._call(method, *args))
        )


async def ask(address: Path, method: str, *args: Any) -> Any:
    """What the store's actor returns or raises."""
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(address)
            writer.write(pickle.dumps((method, args)))
            writer.write_eof()
            answer = pickle.loads(await reader.read())
            writer.close()
            break
        except (OSError, EOFError, pickle.UnpicklingError):
            await asyncio.sleep(AGAIN_S)
    if isinstance(answer, BaseException):
        raise answer
    return answer


def run_store(directory: Path, address: Path) -> None:
    """The life of a store process."""
    from lightning_ray.store.actor import StoreActor

    actor = StoreActor(str(directory))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if question := await reader.read():  # else the gateway was killed as it asked
            method, args = pickle.loads(question)
            try:
                result = await getattr(actor, method)(*args)
            except Exception as error:
                result = error
            writer.write(pickle.dumps(result))
        writer.close()

    async def serve() -> None:
        address.unlink(missing_ok=True)
        async with await asyncio.start_unix_server(answer, address) as server:
            await server.serve_forever()

    asyncio.run(serve())


def run_gateway(model: Path, store: Path, listener: socket.socket) -> None:
    """The life of a gateway process."""
    import uvicorn
    from support import ScriptedEngine

    from lightning_ray.config import load
    from lightning_ray.gateway.app import GatewayDeployment, app

    class Teller(ScriptedEngine):
        """Never says the same twice."""

        def _say(self, prompt: Any) -> str:
            arguments = f'{{"command": "{secrets.token_hex(8)}"}}'
            call = f'{{"name": "bash", "arguments": {arguments}}}'
            return f"<tool_call>\n{call}\n</tool_call>"

    engine = Teller(str(model), [])
    settings = [
        f"model.max_model_len={MODEL_LEN}",
        "model.tool_parser=hermes",
        "sampling.max_tokens=100",
    ]
    gateway = GatewayDeployment.__mro__[1](  # what Serve has wrapped
        load(None, settings),
        str(model),
        [Handle(lambda method, *args: getattr(engine, method)(*args))],
        Handle(lambda method, *args: ask(store, method, *args)),
        None,
    )
    gateway.app = app
    asgi = gateway.__serve_build_asgi_app__()
    uvicorn.Server(uvicorn.Config(asgi, log_level="warning")).run(sockets=[listener])
