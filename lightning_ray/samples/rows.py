"""Training rows: one per branch of an attempt's forest, or one per call.

A row is the token sequence of a branch with, per token, whether it is trained, what its
log-probability was when it was sampled, and by which policy. `rows` lays out the branches of one
attempt and says of every call that is not trained why it is not (`Fate`).

Invariants: a sampled token is trainable in exactly one row of its attempt or in none; a row ends
with a trainable token and is no longer than the limit, cut at a call boundary; the tokens of a call
share one fate.
"""

# ruff: noqa: N815  # fields carry shapes
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np

from lightning_ray.records import Call
from lightning_ray.samples import forest


class Fate(StrEnum):
    """What became of a sampled token. Where several would fit, the first of this list holds."""

    INFRA = (
        "infra"  # no usable reward (a fault, void, an operator's cancel), or an abandoned attempt
    )
    STALE = "stale"  # of a group given up as too old, the rollouts cancelled for that included
    MASKED = "masked"  # its group has too few usable rollouts
    ZERO_ADVANTAGE = "zero_advantage"  # it is neither better nor worse than its group
    SIDE = "side"  # of a call that was no work on the task: a title, a summary
    CONSTRAINED = "constrained"  # sampled under a grammar, whose probabilities cannot be reproduced
    ORPHANED = "orphaned"  # one of several uncontinued samples of one prompt
    TRUNCATED = "truncated"  # beyond the longest row
    TRAINED = "trained"


@dataclass(frozen=True)
class CallFate:
    """What became of the tokens of one call, and the reason in a few words."""

    attempt_id: str
    seq: int
    tokens: int
    fate: Fate
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """One training row of T tokens. `logprobs_T` is 0 and `steps_T` and `calls_T` are -1 where
    nothing was sampled; `calls_T` is the `seq` of the call that sampled a token."""

    rollout_id: str
    attempt_id: str
    tokens_T: np.ndarray  # int32
    trainable_T: np.ndarray  # bool
    logprobs_T: np.ndarray  # float32, natural log, of the behaviour policy
    steps_T: np.ndarray  # int32, policy step that sampled the token
    calls_T: np.ndarray  # int32

    @property
    def trained(self) -> int:
        """Tokens that are trained."""
        return int(self.trainable_T.sum())


@dataclass(frozen=True)
class Layout:
    """How rows are made. `merge` "forest": calls that continue each other share a row; "call":
    every call is a row of its own, its prompt context."""

    max_tokens: int
    merge: Literal["forest", "call"] = "forest"
    train_side_calls: bool = False
    train_constrained: bool = False


def rows(
    rollout_id: str, calls: Sequence[Call], layout: Layout
) -> tuple[list[Row], list[CallFate]]:
    """The rows of one attempt, and the fate of each of its calls (in the order of the rows)."""
    if not calls:
        return [], []
    parent_of = forest.parents(calls)
    twins = forest.ambiguous_twins(calls, parent_of)
    branches = forest.branches(calls, parent_of)
    if layout.merge == "call":
        branches = [forest.Branch((call,), 0) for b in branches for call in b.calls[b.owned_from :]]
    made, fates = [], []
    for branch in branches:
        trained = []
        for number, call in enumerate(branch.calls[branch.owned_from :], branch.owned_from):
            fate, reason = _fate(call, layout, twins)
            fates.append(CallFate(call.attempt_id, call.seq, len(call.tokens), fate, reason))
            if fate is Fate.TRAINED and len(call.tokens):
                trained.append(number)
        if trained:
            made.append(_row(rollout_id, branch.calls[: trained[-1] + 1], set(trained)))
    return made, fates


def _fate(call: Call, layout: Layout, twins: frozenset[int]) -> tuple[Fate, str]:
    length = len(call.prompt) + len(call.tokens)
    if call.side is not None and not layout.train_side_calls:
        return Fate.SIDE, call.side
    if call.constrained and not layout.train_constrained:
        return Fate.CONSTRAINED, "sampled under a grammar"
    if call.seq in twins:
        return Fate.ORPHANED, "several samples of this prompt, none continued"
    if length > layout.max_tokens:
        return Fate.TRUNCATED, f"ends at token {length} of at most {layout.max_tokens}"
    return Fate.TRAINED, call.branch


def _row(rollout_id: str, calls: tuple[Call, ...], trained: set[int]) -> Row:
    """A row that ends where the last of `calls` ends; `trained` are positions in `calls`."""
    tokens_T = np.asarray(calls[-1].full, np.int32)
    row = Row(
        rollout_id,
        calls[0].attempt_id,
        tokens_T,
        trainable_T=np.zeros(len(tokens_T), bool),
        logprobs_T=np.zeros(len(tokens_T), np.float32),
        steps_T=np.full(len(tokens_T), -1, np.int32),
        calls_T=np.full(len(tokens_T), -1, np.int32),
    )
    for number, call in enumerate(calls):
        sampled = slice(len(call.prompt), len(call.prompt) + len(call.tokens))
        row.trainable_T[sampled] = number in trained
        row.logprobs_T[sampled] = call.logprobs
        row.calls_T[sampled] = call.seq
        row.steps_T[sampled] = np.repeat(
            [span.version.step for span in call.spans], [span.length for span in call.spans]
        )
    return row
