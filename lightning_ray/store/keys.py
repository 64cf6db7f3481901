"""How keys are compared, and those that are derived from a store's secret: graders' and the
operator's.

The secret is `grader.key` in the store's folder. The operator's key also lies in `operator.key`
next to that folder, for whoever may read the run directory. Both files are 0600.

Invariant: keys are kept and compared as hashes, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from lightning_ray.files import PRIVATE, replace

# The hash of no key, so that what is not there takes as long to refuse.
_NO_HASH = "0" * 64


def hash_key(key: str) -> str:
    """SHA-256 in hex: how keys are kept at rest."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def matches(expected_hash: str | None, key: str) -> bool:
    """True if `key` has this hash (None: no key does)."""
    return hmac.compare_digest(expected_hash or _NO_HASH, hash_key(key))


class Keys:
    """The keys of the store in `directory`; the secret is made if there is none."""

    def __init__(self, directory: Path) -> None:
        path = directory / "grader.key"
        if not path.exists():
            replace(path, secrets.token_hex(32).encode(), durable=True, mode=PRIVATE)
        self._secret = bytes.fromhex(path.read_text())
        shown = directory.parent / "operator.key"
        replace(shown, self.operator().encode(), durable=True, mode=PRIVATE)

    def grader(self, rollout_id: str) -> str:
        """Posts the reward of this rollout, and nothing else."""
        return self._derive(f"grader:{rollout_id}")

    def operator(self) -> str:
        """Opens the operator API."""
        return self._derive("operator")

    def _derive(self, purpose: str) -> str:
        return hmac.new(self._secret, purpose.encode(), hashlib.sha256).hexdigest()
