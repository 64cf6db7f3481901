"""Finds the turns that the model sampled in the history that a harness sends back.

Harnesses do not return what they were given: they re-serialise tool-call JSON, trim or drop
reasoning, reorder parallel results. So a message counts as a sampled turn if it *means* the same:
its text but for white space, its tool calls by name and parsed arguments. `find` walks back through
a request's assistant messages to the deepest one that is a known turn after a known history;
everything up to it can then be replaced by the tokens that were sampled. `branch_of` says why a
call does not continue the turn before it.

Invariants: pure functions of the request and the attempt's earlier calls, so every gateway replica
comes to the same result; an id alone never decides, its meaning is checked too; ids, reasoning and
the order of parallel results do not change a message's digest.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ray.gateway import bodies
from lightning_ray.records import Branch, Call, SideCall, Turn

Message = Mapping[str, Any]
DIGEST_BYTES = 8
# Turns whose digest is kept: those of the rollouts that are under way, some tens of megabytes.
REMEMBERED_TURNS = 8192


@dataclass(frozen=True)
class Match:
    """Message `index` of the request is the turn of `call`."""

    call: Call
    index: int
    # The turn had reasoning and the message has none.
    lost_reasoning: bool


def digest(message: Message) -> bytes:
    """Eight bytes that are equal for messages of equal meaning."""
    meaning: list[Any] = [message["role"], _words(message.get("content"))]
    for call in message.get("tool_calls") or ():
        meaning += [call["function"]["name"], _arguments(call["function"]["arguments"])]
    return _hash(json.dumps(meaning, sort_keys=True))


def digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> bytes:
    """The digest of the tools and then of each message, one after the other: the `history` of a
    call."""
    head = _hash(json.dumps(list(tools or ()), sort_keys=True))
    return head + b"".join(map(digest, messages))


@functools.lru_cache(REMEMBERED_TURNS)
def turn_digest(turn: Turn) -> bytes:
    """The digest of the assistant message that means `turn`."""
    calls = [
        {"function": {"name": call.name, "arguments": call.arguments}} for call in turn.tool_calls
    ]
    return digest({"role": "assistant", "content": turn.content, "tool_calls": calls})


def find(
    messages: Sequence[Message],
    history: bytes,
    turn_ids: Sequence[str],
    calls: Sequence[Call],
) -> Match | None:
    """The deepest message that is a sampled turn.

    Args:
        messages: of the request.
        history: their digests.
        turn_ids: see `ChatRequest`.
        calls: the attempt's earlier calls, in the order of recording.
    """
    by_history: dict[bytes, list[Call]] = {}
    for call in calls:
        by_history.setdefault(call.history, []).append(call)
    for index in reversed(range(len(messages))):
        if messages[index]["role"] != "assistant":
            continue
        end = DIGEST_BYTES * (index + 1)  # the tools come first
        said = history[end : end + DIGEST_BYTES]
        same = [c for c in by_history.get(history[:end], ()) if turn_digest(c.turn) == said]
        if not same:
            continue
        turn_id = turn_ids[index] if index < len(turn_ids) else ""
        ids = {call.get("id") for call in messages[index].get("tool_calls") or ()}
        # Several samples of one prompt may mean the same: the ids tell them apart, else the last.
        call = max(same, key=lambda c: (c.call_id == turn_id, _has_id(c.turn, ids), c.seq))
        lost = bool(call.turn.reasoning) and not messages[index].get("reasoning_content")
        return Match(call, index, lost)
    return None


def branch_of(
    messages: Sequence[Message], history: bytes, match: Match | None, calls: Sequence[Call]
) -> Branch:
    """How a call with this history follows from the attempt's earlier calls; see `Branch`."""
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if match and match.index == assistants[-1]:
        return Branch.CONTINUED
    summaries = [_words(c.turn.content) for c in calls if c.side is SideCall.COMPACTION]
    if any(summaries):
        said = " ".join(_words(message.get("content")) for message in messages)
        if any(summary and summary in said for summary in summaries):
            return Branch.COMPACTED
    ours = _split(history)
    if not {turn_digest(call.turn) for call in calls}.intersection(ours):
        sent = {c.get("id") for message in messages for c in message.get("tool_calls") or ()}
        # The id of a tool call is ours, and what it means is not.
        return Branch.EDITED if any(_has_id(c.turn, sent) for c in calls) else Branch.ROOT
    if ours[0] not in {call.history[:DIGEST_BYTES] for call in calls}:
        return Branch.ROOT  # other tools
    nearest = max(calls, key=lambda call: (_shared(history, call.history), call.seq))
    theirs = [*_split(nearest.history), turn_digest(nearest.turn)]
    if sorted(ours[: len(theirs)]) == sorted(theirs):
        return Branch.REORDERED
    first = _shared(history, b"".join(theirs))
    if first < len(ours) and set(theirs) - set(ours):
        return Branch.DROPPED if ours[first] in theirs[first:] else Branch.EDITED
    return Branch.UNKNOWN


def _words(content: Any) -> str:
    return " ".join((content or "").split())


def _arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return bodies.decode_text(arguments)
        except ValueError:
            return _words(arguments)  # a malformed call means its text
    return arguments


def _has_id(turn: Turn, ids: set[Any]) -> bool:
    return any(call.call_id in ids for call in turn.tool_calls)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _split(history: bytes) -> list[bytes]:
    return [history[i : i + DIGEST_BYTES] for i in range(0, len(history), DIGEST_BYTES)]


def _shared(one: bytes, other: bytes) -> int:
    """How many digests both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(_split(one), _split(other), strict=False)) if a != b),
        min(len(one), len(other)) // DIGEST_BYTES,
    )
