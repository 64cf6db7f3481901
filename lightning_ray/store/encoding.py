"""How a call becomes an Arrow row and back (`CALL_SCHEMA`).

A prompt is stored as its difference from the earlier call of the same attempt that shares the
longest prefix with it. Invariant: `call_from_row` gives back exactly the call that `call_to_row`
was given, when `fulls` holds the tokens of the calls before it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lightning_ray.records import (
    Call,
    FinishedRollout,
    FinishReason,
    Outcome,
    PolicyVersion,
    Reward,
    RolloutSpec,
    RolloutState,
    Span,
    Split,
    Task,
)


def longest_shared_prefix(
    prompt: np.ndarray, earlier: Sequence[tuple[str, np.ndarray]]
) -> tuple[str | None, int]:
    """The earlier call whose tokens share the longest prefix with `prompt`, and how long that
    is."""
    best: tuple[str | None, int] = (None, 0)
    for call_id, full in reversed(earlier):  # the latest one is the likeliest parent
        length = min(len(full), len(prompt))
        if length <= best[1]:
            continue
        differ = np.flatnonzero(full[:length] != prompt[:length])
        shared = int(differ[0]) if len(differ) else length
        if shared > best[1]:
            best = (call_id, shared)
        if shared == len(prompt):
            break
    return best


def call_to_row(call: Call, seq: int, parent: str | None, shared: int) -> dict[str, object]:
    return {
        "call_id": call.call_id,
        "attempt_id": call.attempt_id,
        "seq": seq,
        "parent": parent,
        "shared": shared,
        "prompt_tail": call.prompt[shared:],
        "tokens": call.tokens,
        "logprobs": call.logprobs,
        "span_lineages": [span.version.lineage for span in call.spans],
        "span_steps": [span.version.step for span in call.spans],
        "span_lengths": [span.length for span in call.spans],
        "finish_reason": str(call.finish_reason),
        "text": call.text,
        "dialect": call.dialect,
        "model": call.model,
        "constrained": call.constrained,
        "started_at": call.started_at,
        "seconds": call.seconds,
    }


def call_from_row(row: pa.RecordBatch, fulls: Mapping[str, np.ndarray]) -> Call:
    def array(name: str, dtype: type) -> np.ndarray:
        return np.asarray(row.column(name).flatten().to_numpy(zero_copy_only=False), dtype=dtype)

    def scalar(name: str) -> Any:
        return row.column(name)[0].as_py()

    tail = array("prompt_tail", np.int32)
    parent = scalar("parent")
    prompt = np.concatenate([fulls[str(parent)][: scalar("shared")], tail]) if parent else tail
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
        dialect=str(scalar("dialect")),
        model=str(scalar("model")),
        constrained=bool(scalar("constrained")),
        started_at=float(scalar("started_at")),
        seconds=float(scalar("seconds")),
    )


def finished_to_json(finished: FinishedRollout) -> str:
    data = dataclasses.asdict(finished)
    del data["spec"]
    return json.dumps(data)


def finished_from_row(row: tuple) -> FinishedRollout:
    rollout_id, group_id, split, step, task, finished = row
    data = json.loads(finished)
    reward = data.pop("reward")
    return FinishedRollout(
        spec=RolloutSpec(rollout_id, group_id, Task(**json.loads(task)), Split(split), step),
        state=RolloutState(data.pop("state")),
        outcome=Outcome(data.pop("outcome")),
        reward=Reward(**reward) if reward else None,
        **data,
    )
