"""How a call becomes an Arrow row and back (`CALL_SCHEMA`).

A prompt is stored as its difference from the earlier call of the same attempt that shares the
longest prefix with it. Invariant: `call_from_row` gives back exactly the call that `call_to_row`
was given, when `earlier` holds the calls before it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pyarrow as pa

from lightning_ray.records import (
    Branch,
    Call,
    FinishedRollout,
    FinishReason,
    Outcome,
    PolicyVersion,
    Reward,
    RolloutSpec,
    RolloutState,
    SideCall,
    Span,
    Split,
    Task,
    ToolCall,
    Turn,
)


def longest_shared_prefix(
    prompt: np.ndarray, earlier: Sequence[tuple[Call, np.ndarray]]
) -> tuple[Call | None, int]:
    """The earlier call whose tokens (the arrays) share the longest prefix with `prompt`, and how
    long that is."""
    best: tuple[Call | None, int] = (None, 0)
    for call, full in reversed(earlier):  # the latest one is the likeliest parent
        length = min(len(full), len(prompt))
        if length <= best[1]:
            continue
        differ = np.flatnonzero(full[:length] != prompt[:length])
        shared = int(differ[0]) if len(differ) else length
        if shared > best[1]:
            best = (call, shared)
        if shared == len(full):  # it is continued as it stands
            break
    return best


def call_to_row(call: Call, parent: Call | None, shared: int) -> dict[str, object]:
    pairs = zip(call.history, parent.history if parent else b"", strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return {
        "call_id": call.call_id,
        "attempt_id": call.attempt_id,
        "seq": call.seq,
        "parent": parent.call_id if parent else None,
        "shared": shared,
        "prompt_tail": call.prompt[shared:],
        "tokens": call.tokens,
        "logprobs": call.logprobs,
        "span_lineages": [span.version.lineage for span in call.spans],
        "span_steps": [span.version.step for span in call.spans],
        "span_lengths": [span.length for span in call.spans],
        "finish_reason": str(call.finish_reason),
        "text": call.text,
        "turn": json.dumps(dataclasses.asdict(call.turn)),
        "history_shared": same,
        "history_tail": call.history[same:],
        "branch": str(call.branch),
        "side": None if call.side is None else str(call.side),
        "request": call.request,
        "dialect": call.dialect,
        "model": call.model,
        "constrained": call.constrained,
        "cached_tokens": call.cached_tokens,
        "started_at": call.started_at,
        "seconds": call.seconds,
    }


def call_from_row(row: pa.RecordBatch, earlier: Mapping[str, Call]) -> Call:
    def array(name: str, dtype: type) -> np.ndarray:
        return np.asarray(row.column(name).flatten().to_numpy(zero_copy_only=False), dtype=dtype)

    def scalar(name: str) -> Any:
        return row.column(name)[0].as_py()

    tail = array("prompt_tail", np.int32)
    parent = scalar("parent")
    prompt, history = tail, scalar("history_tail")
    if parent:
        prompt = np.concatenate([earlier[parent].full[: scalar("shared")], tail])
        history = earlier[parent].history[: scalar("history_shared")] + history
    spans = zip(*(scalar(f"span_{part}") for part in ("lineages", "steps", "lengths")), strict=True)
    return Call(
        call_id=str(scalar("call_id")),
        attempt_id=str(scalar("attempt_id")),
        seq=int(scalar("seq")),
        prompt=prompt,
        tokens=array("tokens", np.int32),
        logprobs=array("logprobs", np.float32),
        spans=tuple(Span(PolicyVersion(lineage, step), length) for lineage, step, length in spans),
        finish_reason=FinishReason(str(scalar("finish_reason"))),
        text=str(scalar("text")),
        turn=_turn(scalar("turn")),
        history=history,
        branch=Branch(scalar("branch")),
        side=SideCall(scalar("side")) if scalar("side") else None,
        request=str(scalar("request")),
        dialect=str(scalar("dialect")),
        model=str(scalar("model")),
        constrained=bool(scalar("constrained")),
        cached_tokens=int(scalar("cached_tokens")),
        started_at=float(scalar("started_at")),
        seconds=float(scalar("seconds")),
    )


def _turn(text: str) -> Turn:
    data = json.loads(text)
    data["tool_calls"] = tuple(ToolCall(**call) for call in data["tool_calls"])
    return Turn(**data | {"finish_reason": FinishReason(data["finish_reason"])})


def finished_to_json(finished: FinishedRollout) -> str:
    data = dataclasses.asdict(finished)
    del data["spec"]
    return json.dumps(data)


def spec_from_row(row: tuple) -> RolloutSpec:
    rollout_id, group_id, split, step, task = row
    return RolloutSpec(rollout_id, group_id, Task(**json.loads(task)), Split(split), step)


def finished_from_row(row: tuple) -> FinishedRollout:
    *spec, finished = row
    data = json.loads(finished)
    reward = data.pop("reward")
    return FinishedRollout(
        spec=spec_from_row(tuple(spec)),
        state=RolloutState(data.pop("state")),
        outcome=Outcome(data.pop("outcome")),
        reward=Reward(**reward) if reward else None,
        **data,
    )
