"""Request bodies: reading, decoding, and when two of them are the same request."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from lightning_ray.config import GatewaySection
from lightning_ray.gateway.errors import ApiError, bad

# Levels of JSON that every part of ours, of vLLM and of a chat template can walk and print.
MOST_LEVELS = 100
# Items of these lists: several times what the longest sessions of any harness send.
MOST_ITEMS = {"messages": 10_000, "input": 10_000, "tools": 1_000}
# Fields of a body that may differ between a request and its retry.
_VOLATILE = frozenset({"stream", "stream_options", "metadata", "client_metadata"})

# Reads a request's body: after the key was checked, so that nothing of a stranger's is read.
Body = Callable[[], Awaitable[bytes]]


async def read(request: Request, limits: GatewaySection) -> bytes:
    """The whole body.

    Raises:
        ApiError: 400, 408, 413 or 415: it is compressed, too large or too slow, or its sender left.
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "The body is compressed; send it as it is.")
    most, seconds = limits.max_body_mib << 20, limits.body_timeout_s
    declared = request.headers.get("content-length", "0")
    received = bytearray()
    try:
        if not declared.isdigit() or int(declared) <= most:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    received += chunk
                    if len(received) > most:
                        break
                else:
                    return bytes(received)
    except TimeoutError as error:
        raise ApiError(408, f"The body did not come within {seconds:g} s.") from error
    except ClientDisconnect as error:
        raise ApiError(400, "The client left before its body had come.") from error
    raise ApiError(413, f"The body is larger than {limits.max_body_mib} MiB.")


def decode(body: bytes) -> dict[str, Any]:
    """A request body as an object.

    Raises:
        ApiError: 400, it is no JSON object (orjson also refuses invalid UTF-8, lone surrogates, NaN
            and absurd nesting), or has too much in it.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"The body must be a JSON object, not {type(data).__name__}.")
    if not is_shallow(data):
        raise ApiError(400, f"The body is nested deeper than {MOST_LEVELS} levels.")
    for name, most in MOST_ITEMS.items():
        if isinstance(items := data.get(name), list) and len(items) > most:
            raise bad(name, f"has {len(items)} items, {most} may be")
    return data


def decode_text(text: str) -> Any:
    """JSON that stands as text inside of JSON, as the arguments of a tool call do.

    Raises:
        ValueError: it is no JSON, or nested deeper than `MOST_LEVELS`.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not is_shallow(value):
        raise ValueError("nested too deeply")
    return value


def is_shallow(value: Any, levels: int = MOST_LEVELS) -> bool:
    """True if no more than `levels` objects and lists stand inside of each other."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        if not level:
            break
        parts = [item.values() if isinstance(item, dict) else item for item in level]
        level = [part for some in parts for part in some if isinstance(part, dict | list)]
    return not level


def fingerprint(dialect: str, data: Mapping[str, Any]) -> str:
    """Equal for a request and its retry, which may differ in transport and caching only."""
    steady = {name: value for name, value in data.items() if name not in _VOLATILE}
    return hashlib.blake2b(
        orjson.dumps([dialect, _steady(steady)], option=orjson.OPT_SORT_KEYS), digest_size=16
    ).hexdigest()


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _steady(v) for k, v in value.items() if k != "cache_control"}
    return [_steady(item) for item in value] if isinstance(value, list) else value
