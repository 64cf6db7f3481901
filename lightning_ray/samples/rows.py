"""Training rows: one per branch of an attempt's forest.

A row is the token sequence of a branch with, per token, whether it is trained, what its
log-probability was when it was sampled, and by which policy. `rows` lays out the branches of one
attempt and says of every sampled token that is not trained why it is not (`Fate`).

Invariants: a sampled token is trainable in exactly one row of its attempt or in none; a row ends
with a trainable token and is no longer than the limit, cut at a call boundary; the fates of an
attempt's sampled tokens add up to their number.
"""

# ruff: noqa: N815  # fields carry shapes
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from lightning_ray.records import Call
from lightning_ray.samples import forest


class Fate(StrEnum):
    """What became of a sampled token. Where several would fit, the first of this list holds."""

    INFRA = "infra"  # no usable reward: an infrastructure fault, or an abandoned attempt
    ZERO_ADVANTAGE = "zero_advantage"  # its rollout is neither better nor worse than its group
    SIDE = "side"  # of a call that was no work on the task: a title, a summary
    CONSTRAINED = "constrained"  # sampled under a grammar, whose probabilities cannot be reproduced
    ORPHANED = "orphaned"  # one of several uncontinued samples of one prompt
    TRUNCATED = "truncated"  # beyond the longest row
    TRAINED = "trained"


@dataclass(frozen=True)
class Row:
    """One training row of T tokens. `logprobs_T` is 0 and `steps_T` is -1 where nothing was
    sampled; `calls` are the `seq`s of the calls trained in this row."""

    rollout_id: str
    attempt_id: str
    tokens_T: np.ndarray  # int32
    trainable_T: np.ndarray  # bool
    logprobs_T: np.ndarray  # float32, natural log, of the behaviour policy
    steps_T: np.ndarray  # int32, policy step that sampled the token
    calls: tuple[int, ...]


def rows(
    rollout_id: str, calls: Sequence[Call], max_tokens: int
) -> tuple[list[Row], Counter[Fate]]:
    """The rows of one attempt, none longer than `max_tokens`, and the fates of its sampled
    tokens."""
    fates: Counter[Fate] = Counter()
    if not calls:
        return [], fates
    twins = forest.ambiguous_twins(calls)
    made = []
    for branch in forest.branches(calls):
        trained = []
        for number, call in enumerate(branch.calls):
            if number < branch.owned_from:
                continue
            if call.side is not None:
                fate = Fate.SIDE
            elif call.constrained:
                fate = Fate.CONSTRAINED
            elif call.seq in twins:
                fate = Fate.ORPHANED
            elif len(call.prompt) + len(call.tokens) > max_tokens:
                fate = Fate.TRUNCATED
            else:
                fate = Fate.TRAINED
                trained += [number] if len(call.tokens) else []
            fates[fate] += len(call.tokens)
        if trained:
            made.append(_row(rollout_id, branch.calls[: trained[-1] + 1], trained))
    return made, fates


def _row(rollout_id: str, calls: tuple[Call, ...], trained: list[int]) -> Row:
    """A row that ends where the last of `calls` ends; `trained` are positions in `calls`."""
    tokens_T = np.asarray(calls[-1].full, np.int32)
    trainable_T = np.zeros(len(tokens_T), bool)
    logprobs_T = np.zeros(len(tokens_T), np.float32)
    steps_T = np.full(len(tokens_T), -1, np.int32)
    for number, call in enumerate(calls):
        sampled = slice(len(call.prompt), len(call.prompt) + len(call.tokens))
        trainable_T[sampled] = number in trained
        logprobs_T[sampled] = call.logprobs
        steps_T[sampled] = np.repeat(
            [span.version.step for span in call.spans], [span.length for span in call.spans]
        )
    return Row(
        rollout_id,
        calls[0].attempt_id,
        tokens_T,
        trainable_T,
        logprobs_T,
        steps_T,
        tuple(calls[number].seq for number in trained),
    )
