"""Why the store refuses."""

from __future__ import annotations


class StoreError(Exception):
    """The store refused; the message says what and why."""


class StoreLocked(StoreError):
    """Another process owns this store."""


class UnknownAttempt(StoreError):
    """There is no such attempt."""


class AttemptOver(StoreError):
    """The attempt has ended and takes no more calls."""


class DuplicateReward(StoreError):
    """The rollout already has a reward."""
