"""Whose key is it? A harness key makes model calls for its own attempt while that attempt lives,
and nothing else; a grader key posts the reward of one rollout; the operator's key opens the
operator API.

Invariants: keys are compared in constant time and as hashes; no key, nor part of one, is in an
error; whoever has the wrong key gets the same answer whether what it asks for is there or not.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_ray.gateway.errors import ApiError
from lightning_ray.store.attempts import AttemptInfo
from lightning_ray.store.keys import matches


def key_of(headers: Mapping[str, str]) -> str:
    """The key in `Authorization: Bearer` or `x-api-key`.

    Raises:
        ApiError: 401, there is none.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not key:
        raise ApiError(
            401,
            "No key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
            code="missing_api_key",
        )
    return key


def check(expected_hash: str | None, key: str) -> None:
    """Raises `ApiError` (401) unless `key` has this hash (None: no key does)."""
    if not matches(expected_hash, key):
        raise ApiError(401, "This key does not open this.", code="invalid_api_key")


def check_harness(attempt: AttemptInfo | None, key: str) -> AttemptInfo:
    """The attempt, if `key` may make model calls for it.

    Raises:
        ApiError: 401 there is no such attempt, or the key is another's; 410 it is the key of this
            attempt, which has ended.
    """
    check(None if attempt is None else attempt.key_hash, key)
    assert attempt is not None
    if not attempt.live:
        raise ApiError(410, f"Attempt {attempt.attempt_id} has ended.", code="attempt_over")
    return attempt
