"""Whose key is it? A harness key makes model calls for its own attempt while that attempt lives,
and nothing else; a grader key posts the reward of one rollout; the operator's key opens the
operator API.

Invariants: keys are compared in constant time and as hashes; no key, nor part of one, is in an
error.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from lightning_ray.gateway.errors import ApiError
from lightning_ray.store.attempts import AttemptInfo


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


def hash_key(key: str) -> str:
    """SHA-256 in hex: how keys are kept at rest."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def check_harness(attempt_id: str, attempt: AttemptInfo | None, key: str) -> AttemptInfo:
    """The attempt, if `key` may make model calls for it.

    Raises:
        ApiError: 404 unknown attempt, 401 wrong key, 410 the attempt has ended.
    """
    if attempt is None:
        raise ApiError(404, f"There is no attempt {attempt_id!r}.", code="attempt_not_found")
    if not hmac.compare_digest(attempt.key_hash, hash_key(key)):
        raise ApiError(401, "This key is not the key of this attempt.", code="invalid_api_key")
    if not attempt.live:
        raise ApiError(410, f"Attempt {attempt_id} has ended.", code="attempt_over")
    return attempt


def check_grader(expected: str, key: str) -> None:
    """Raises `ApiError` (401) unless `key` is the rollout's grader key `expected`."""
    if not hmac.compare_digest(hash_key(expected), hash_key(key)):
        raise ApiError(401, "This key may not post this reward.", code="invalid_api_key")


def check_operator(expected: str, key: str) -> None:
    """Raises `ApiError` (401) unless `key` is the operator's key `expected`."""
    if not hmac.compare_digest(hash_key(expected), hash_key(key)):
        raise ApiError(401, "This is not the operator's key.", code="invalid_api_key")
