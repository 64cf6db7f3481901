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
from pydantic import TypeAdapter

from lightning_ray.records import (
    Branch,
    Call,
    FinishedRollout,
    FinishReason,
    PolicyVersion,
    Reward,
    RolloutSpec,
    SideCall,
    Span,
    Split,
    Task,
    Turn,
)

# Fields of a call that are columns as they are.
_AS_IT_IS = (
    "call_id",
    "attempt_id",
    "seq",
    "text",
    "request",
    "dialect",
    "model",
    "constrained",
    "cached_tokens",
    "started_at",
    "seconds",
)
# Not from JSON at once: pydantic's parser refuses lone surrogates, which a model can write.
_TURN, _FINISHED = TypeAdapter(Turn), TypeAdapter(FinishedRollout)


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
        **{name: getattr(call, name) for name in (*_AS_IT_IS, "tokens", "logprobs")},
        "parent": parent.call_id if parent else None,
        "shared": shared,
        "prompt_tail": call.prompt[shared:],
        "span_lineages": [span.version.lineage for span in call.spans],
        "span_steps": [span.version.step for span in call.spans],
        "span_lengths": [span.length for span in call.spans],
        "finish_reason": str(call.finish_reason),
        "turn": json.dumps(dataclasses.asdict(call.turn)),
        "history_shared": same,
        "history_tail": call.history[same:],
        "branch": str(call.branch),
        "side": None if call.side is None else str(call.side),
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
        **{name: scalar(name) for name in _AS_IT_IS},
        prompt=prompt,
        tokens=array("tokens", np.int32),
        logprobs=array("logprobs", np.float32),
        spans=tuple(Span(PolicyVersion(lineage, step), length) for lineage, step, length in spans),
        finish_reason=FinishReason(scalar("finish_reason")),
        turn=_TURN.validate_python(json.loads(scalar("turn"))),
        history=history,
        branch=Branch(scalar("branch")),
        side=SideCall(scalar("side")) if scalar("side") else None,
    )


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
    reward = data["reward"] and Reward(**data["reward"])
    return _FINISHED.validate_python({**data, "spec": spec_from_row(tuple(spec)), "reward": reward})
