"""Request bodies: decoding, and when two of them are the same request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from lightning_ray.gateway.errors import ApiError

# Fields of a body that may differ between a request and its retry.
_VOLATILE = frozenset({"stream", "stream_options", "metadata", "client_metadata"})


def decode(body: bytes) -> dict[str, Any]:
    """A request body as an object.

    Raises:
        ApiError: 400, it is no JSON object (orjson also refuses invalid UTF-8, lone surrogates, NaN
            and absurd nesting).
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"The body must be a JSON object, not {type(data).__name__}.")
    return data


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
