"""The forest of an attempt: its calls arranged by token prefix.

A call is a child of the earlier call whose prompt and sampled tokens are the longest prefix of its
own prompt, so a harness that keeps one context makes one chain, and one that edits or forks it
makes branches. `branches` lists the root-to-leaf paths, depth first and older children first.

Invariants: every call is on at least one branch and owned by exactly one, the first that it is on;
what a branch does not own is a prefix of it; the order in which calls are given does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_ray.records import Call


@dataclass(frozen=True)
class Branch:
    """A root-to-leaf path. The calls from `owned_from` on belong to it; earlier ones are context
    here."""

    calls: tuple[Call, ...]
    owned_from: int


def parents(calls: Iterable[Call]) -> dict[int, int | None]:
    """The `seq` of each call's parent, by its own `seq`; None for a root."""
    ordered = sorted(calls, key=lambda call: call.seq)
    full = {call.seq: call.full for call in ordered}
    return {
        call.seq: max(
            (
                earlier.seq
                for earlier in ordered[:number]
                if _is_prefix(full[earlier.seq], call.prompt)
            ),
            # Of equal twins the older one is the parent.
            key=lambda seq: (len(full[seq]), -seq),
            default=None,
        )
        for number, call in enumerate(ordered)
    }


def branches(calls: Sequence[Call]) -> list[Branch]:
    """The branches of one attempt's calls."""
    by_seq = {call.seq: call for call in calls}
    if len(by_seq) != len(calls):
        raise ValueError(f"attempt {calls[0].attempt_id}: two calls have the same seq")
    children: dict[int | None, list[int]] = defaultdict(list)
    for seq, parent in parents(calls).items():
        children[parent].append(seq)
    found, owned = [], set[int]()
    # An explicit stack: a thousand-turn rollout is deeper than Python's.
    stack: list[tuple[int, ...]] = [(seq,) for seq in reversed(children[None])]
    while stack:
        path = stack.pop()
        below = children[path[-1]]
        stack.extend((*path, seq) for seq in reversed(below))
        if not below:
            owned_from = next(n for n, seq in enumerate(path) if seq not in owned)
            owned.update(path)
            found.append(Branch(tuple(by_seq[seq] for seq in path), owned_from))
    return found


def ambiguous_twins(calls: Iterable[Call]) -> frozenset[int]:
    """The `seq`s of calls that sampled one same prompt, none of them continued: nobody can say
    which of the replies the harness got, so none is a sample of what it acted on."""
    calls = list(calls)
    continued = set(parents(calls).values())
    twins: dict[bytes, list[int]] = defaultdict(list)
    for call in calls:
        twins[np.asarray(call.prompt, np.int32).tobytes()].append(call.seq)
    return frozenset(
        seq
        for group in twins.values()
        if len(group) > 1 and not continued.intersection(group)
        for seq in group
    )


def _is_prefix(head_T: np.ndarray, whole_T: np.ndarray) -> bool:
    return len(head_T) <= len(whole_T) and np.array_equal(head_T, whole_T[: len(head_T)])
