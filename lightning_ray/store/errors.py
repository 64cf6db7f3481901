"""Why the store refuses."""

from __future__ import annotations


class StoreError(Exception):
    """The store refused; the message says what and why."""


class StoreLocked(StoreError):
    """Another process owns this store, or has taken it over."""


class CorruptSegment(StoreError):
    """A file of the call log is not what was written: damaged at a byte offset, or missing."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(path, offset, reason)  # all three, so that it can be pickled
        self.path, self.offset, self.reason = path, offset, reason

    def __str__(self) -> str:
        return (
            f"{self.path} is damaged at byte {self.offset}: {self.reason}. Model calls that were "
            "answered are in it, so the run does not go on without them: check the disk, put the "
            "file back from a copy, or begin anew under another run.name"
        )


class UnknownAttempt(StoreError):
    """There is no such attempt."""


class AttemptOver(StoreError):
    """The attempt has ended and takes no more calls."""


class DuplicateReward(StoreError):
    """The rollout already has another reward."""
