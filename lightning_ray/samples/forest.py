"""The forest of an attempt: its calls arranged by token prefix.

A call is a child of the call whose prompt and sampled tokens are the longest prefix of its own
prompt, so a harness that keeps one context makes one chain, and one that edits or forks it makes
branches. `branches` lists the root-to-leaf paths, depth first and older children first.

Invariants: every call is on at least one branch and owned by exactly one, the first that it is on;
what a branch does not own is a prefix of it; the trees are the same in whatever order calls came
(`seq`) and are given; a chain costs one comparison a call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    found: dict[int, int | None] = {}
    shorter: list[Call] = []
    # A parent is not longer than its child's prompt, so it comes first.
    for call in sorted(calls, key=lambda c: (_length(c), len(c.prompt), c.seq)):
        parent = next((c for c in reversed(shorter) if _continues(call, c)), None)
        found[call.seq] = parent.seq if parent else None
        shorter.append(call)
    return dict(sorted(found.items()))


def shared(calls: Sequence[Call]) -> list[Call]:
    """The same calls, with the prompts of a chain as views of the longest one, so that they take
    memory by its length and are not compared again."""
    by_seq = {call.seq: call for call in calls}
    parent_of = parents(calls)
    made: dict[int, Call] = {}
    for leaf in sorted(calls, key=_length, reverse=True):
        seq: int | None = leaf.seq
        while seq is not None and seq not in made:
            call = by_seq[seq]
            made[seq] = replace(call, prompt=leaf.prompt[: len(call.prompt)])
            seq = parent_of[seq]
    return [made[call.seq] for call in calls]


def branches(
    calls: Sequence[Call], parent_of: Mapping[int, int | None] | None = None
) -> list[Branch]:
    """The branches of one attempt's calls; `parent_of` is what `parents` said of them."""
    by_seq = {call.seq: call for call in calls}
    if len(by_seq) != len(calls):
        raise ValueError(f"attempt {calls[0].attempt_id}: two calls have the same seq")
    children: dict[int | None, list[int]] = defaultdict(list)
    for seq, parent in (parent_of or parents(calls)).items():
        children[parent].append(seq)
    found = []
    # An explicit stack, since a thousand-turn rollout is deeper than Python's: a call, how many
    # calls are above it, and whether it is the first child of its parent.
    stack = [(seq, 0, True) for seq in reversed(children[None])]
    path: list[int] = []
    owned_from = 0
    while stack:
        seq, depth, first = stack.pop()
        del path[depth:]
        path.append(seq)
        owned_from = owned_from if first and depth else depth
        below = children[seq]
        stack.extend((child, depth + 1, child == below[0]) for child in reversed(below))
        if not below:
            found.append(Branch(tuple(by_seq[seq] for seq in path), owned_from))
    return found


def ambiguous_twins(
    calls: Iterable[Call], parent_of: Mapping[int, int | None] | None = None
) -> frozenset[int]:
    """The `seq`s of calls that sampled one same prompt, none of them continued: nobody can say
    which of the replies the harness got, so none is a sample of what it acted on."""
    by_seq = {call.seq: call for call in calls}
    parent_of = parent_of or parents(by_seq.values())
    continued = set(parent_of.values())
    # Equal prompts have one parent, so what they add to it tells them apart from others.
    twins: dict[tuple[int | None, bytes], list[int]] = defaultdict(list)
    for seq, parent in parent_of.items():
        added = by_seq[seq].prompt[0 if parent is None else _length(by_seq[parent]) :]
        twins[parent, np.asarray(added, np.int32).tobytes()].append(seq)
    return frozenset(
        seq
        for group in twins.values()
        if len(group) > 1 and not continued.intersection(group)
        for seq in group
    )


def _length(call: Call) -> int:
    return len(call.prompt) + len(call.tokens)


def _continues(call: Call, earlier: Call) -> bool:
    """True if `earlier`, prompt and reply, is a prefix of the prompt of `call`."""
    head, whole, reply = len(earlier.prompt), call.prompt, earlier.tokens
    is_view = _address(earlier.prompt) == _address(whole)
    # The reply first: it is short, and where two conversations differ most.
    return (
        head + len(reply) <= len(whole)
        and np.array_equal(reply, whole[head : head + len(reply)])
        and (is_view or np.array_equal(earlier.prompt, whole[:head]))
    )


def _address(array: np.ndarray) -> int:
    """Where it begins in memory: arrays that begin together agree as far as both go."""
    return int(array.__array_interface__["data"][0])
