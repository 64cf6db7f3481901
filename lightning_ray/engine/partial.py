"""A generation in the making: its tokens so far, in spans of one policy version each.

An update may interrupt a generation; it is continued under the new weights from its prompt and what
was sampled so far. Invariants: a token belongs to the version that sampled it; the tokens end where
they would have ended without an interruption, also when a stop string straddles one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_ray.records import FinishReason, PolicyVersion, Span


@dataclass(frozen=True)
class Generation:
    """What one call sampled. `tokens` int32 and `logprobs` float32 (natural log) of equal length;
    `cached_tokens` prompt tokens came from the prefix cache."""

    tokens: np.ndarray
    logprobs: np.ndarray
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    cached_tokens: int


@dataclass
class Partial:
    """See the module. `stop` are the call's stop strings, which vLLM looks for within a span;
    `decode` is what it makes text with."""

    stop: Sequence[str]
    decode: Callable[[list[int]], str]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    cached_tokens: int | None = None  # of the prompt: what a continuation finds is its own

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], version: PolicyVersion, cached: int
    ) -> bool:
        """Adds what `version` sampled; True if a stop string ends the generation here, one that
        began before an interruption."""
        seam = len(self.tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        end = self._straddled(seam)
        if end is not None:
            del self.tokens[end:], self.logprobs[end:]
        if len(self.tokens) > seam:
            self.spans.append(Span(version, len(self.tokens) - seam))
        self.cached_tokens = cached if self.cached_tokens is None else self.cached_tokens
        return end is not None

    def finished(self, reason: FinishReason) -> Generation:
        return Generation(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            tuple(self.spans),
            reason,
            self.cached_tokens or 0,
        )

    def _straddled(self, seam: int) -> int | None:
        """The first end of the tokens that completes a stop string which began before `seam`."""
        if not (self.stop and seam):
            return None
        before = self.decode(self.tokens[:seam])
        longest = max(map(len, self.stop))
        for end in range(seam + 1, len(self.tokens) + 1):
            text = self.decode(self.tokens[:end])
            if any(stop in text for stop in self.stop):
                return end
            if len(text) - len(before) >= longest:
                break  # whatever is completed from here on begins after the seam
        return None
