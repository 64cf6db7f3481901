"""The nouns of lightning_ray, and how calls look in Arrow.

A *task* is a dataset row; the `n` *rollouts* made from it form a *group*; a rollout is tried in one
or more *attempts*; an attempt makes *calls* to the model; a call has *spans*, runs of sampled
tokens of one policy version. Everything here is plain data: no I/O, no clock, no Ray.

Invariants: `len(call.tokens) == len(call.logprobs) == sum(span.length for span in call.spans)`;
only outcomes for which `caused_by_policy` holds may carry a reward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

Json = dict[str, Any]


class Split(StrEnum):
    """Which data set a rollout's task comes from."""

    TRAIN = "train"
    VALIDATION = "validation"


class RolloutState(StrEnum):
    """Where a rollout stands. The last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    GRADING = "grading"
    FINISHED = "finished"  # has a reward
    FAILED = "failed"  # every attempt ended by an infrastructure fault, or the last is void: masked
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (RolloutState.FINISHED, RolloutState.FAILED, RolloutState.CANCELLED)


class Outcome(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"  # the harness exited with status 0
    HARNESS_ERROR = (
        "harness_error"  # the harness exited with another status, after calling the model
    )
    TIMEOUT = "timeout"  # the harness was still running at its time limit
    OUT_OF_MEMORY = "out_of_memory"  # the harness or its tools passed the memory limit
    OUTPUT_LIMIT = "output_limit"  # the harness wrote more than it may
    LAUNCH_FAULT = (
        "launch_fault"  # workspace or process could not be made, or it never called the model
    )
    GATEWAY_FAULT = "gateway_fault"  # the gateway answered one of its calls with a 5xx at the end
    GRADER_FAULT = (
        "grader_fault"  # no valid reward came: missing, not a number, or the grader failed
    )
    VOID = (
        "void"  # the agent read or said what it must not have seen: whatever it did tells nothing
    )
    NODE_LOST = "node_lost"  # the machine or Ray worker that ran the harness went away
    CANCELLED = "cancelled"  # somebody asked for it

    @property
    def caused_by_policy(self) -> bool:
        """True if the model's behaviour led here, so that a reward is fair."""
        return self in _POLICY_OUTCOMES

    @property
    def retryable(self) -> bool:
        """True for infrastructure faults: another attempt may end differently. Of a void one it
        might, too, but who fails could have it by seeing what it must not."""
        return not self.caused_by_policy and self not in (Outcome.VOID, Outcome.CANCELLED)


_POLICY_OUTCOMES = frozenset(
    {
        Outcome.COMPLETED,
        Outcome.HARNESS_ERROR,
        Outcome.TIMEOUT,
        Outcome.OUT_OF_MEMORY,
        Outcome.OUTPUT_LIMIT,
    }
)


@dataclass(frozen=True)
class Task:
    """One dataset row. `statement` is what the agent reads; `fields` are the task family's own
    data, which the agent never sees (hidden tests, the files of the repository, ...)."""

    task_id: str
    statement: str
    fields: Json = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutSpec:
    """One execution of the harness that somebody wants. `step` is the training step it was queued
    in."""

    rollout_id: str
    group_id: str
    task: Task
    split: Split
    step: int


@dataclass(frozen=True)
class Reward:
    """What a grader says of a rollout: `value` is trained on, `solved` is reported, `metrics` are
    named extras.

    Raises:
        ValueError: the value or a metric is not a finite number, or is a bool or a string.
    """

    value: float
    solved: bool
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, number in {"value": self.value, **self.metrics}.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise ValueError(f"reward {name} must be a number, got {number!r}")
            if not math.isfinite(number):
                raise ValueError(f"reward {name} must be finite, got {number!r}")
        if not isinstance(self.solved, bool):
            raise ValueError(f"reward solved must be true or false, got {self.solved!r}")


@dataclass(frozen=True)
class PolicyVersion:
    """The number of weight updates (`step`) behind some weights. `lineage` differs between two runs
    of the same run directory, so weights minted again after a rollback are not mistaken for lost
    ones."""

    lineage: str
    step: int


@dataclass(frozen=True)
class Span:
    """`length` consecutive sampled tokens of one policy version."""

    version: PolicyVersion
    length: int


class FinishReason(StrEnum):
    """Why sampling of a call stopped."""

    STOP = "stop"  # end-of-turn token or a stop string
    LENGTH = "length"  # max_tokens or the context window
    ABORT = "abort"  # interrupted; the tokens so far are kept


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is JSON as the model wrote it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """What the model said in one call, parsed."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP


class Branch(StrEnum):
    """How a call follows from the calls before it. All but the first two begin a branch of the
    forest that the harness or the chat template forced; each is counted."""

    # Nothing sampled is in its history, or it offers other tools: a first call, a sub-agent, a side
    # call.
    ROOT = "root"
    CONTINUED = "continued"  # the last assistant message is a sampled turn, and its tokens are used
    EDITED = "edited"  # an earlier message was changed
    DROPPED = "dropped"  # an earlier message is missing
    COMPACTED = "compacted"  # the history was replaced by a summary
    REORDERED = "reordered"  # the earlier messages come in another order
    REASONING_DROPPED = "reasoning_dropped"  # the harness left the reasoning of a turn out
    TEMPLATE = "template"  # the chat template renders earlier turns differently than before
    UNKNOWN = "unknown"


class SideCall(StrEnum):
    """A call that is no work on the task: recorded, by default not trained."""

    TITLE = "title"  # a name for the conversation
    COMPACTION = "compaction"  # a summary that replaces the history
    OTHER = "other"


@dataclass(frozen=True)
class Call:
    """One model call: `prompt` (int32) in, `tokens` (int32) with `logprobs` (float32, natural log,
    of the behaviour policy: temperature included) out. `turn` is what they mean, `text` what was
    decoded from them; `history` the digests of tools and messages (`gateway.continuity`)."""

    call_id: str
    attempt_id: str
    seq: int
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    text: str = ""
    turn: Turn = Turn(None)
    history: bytes = b""
    branch: Branch = Branch.ROOT
    side: SideCall | None = None
    request: str = ""  # fingerprint of the request's body: a retry has the same
    dialect: str = "openai_chat"
    model: str = ""  # the model name that the harness asked for: recorded, otherwise ignored
    constrained: bool = False
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    started_at: float = 0.0  # seconds since the epoch
    seconds: float = 0.0

    def __post_init__(self) -> None:
        spans = sum(span.length for span in self.spans)
        if not len(self.tokens) == len(self.logprobs) == spans:
            raise ValueError(
                f"call {self.call_id}: {len(self.tokens)} tokens, "
                f"{len(self.logprobs)} log-probs and "
                f"{spans} tokens in spans must be equally many"
            )

    @property
    def full(self) -> np.ndarray:
        """Prompt and sampled tokens together."""
        return np.concatenate([self.prompt, self.tokens])


# Calls on disk. The prompt is stored as its difference from the longest known prefix among the
# earlier calls of the same attempt: `parent` names that call, `shared` counts the tokens taken from
# its `full`.
CALL_SCHEMA = pa.schema(
    [
        pa.field("call_id", pa.string(), nullable=False),
        pa.field("attempt_id", pa.string(), nullable=False),
        pa.field("seq", pa.int32(), nullable=False),
        pa.field("parent", pa.string()),
        pa.field("shared", pa.int32(), nullable=False),
        pa.field("prompt_tail", pa.list_(pa.int32()), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("span_lineages", pa.list_(pa.string()), nullable=False),
        pa.field("span_steps", pa.list_(pa.int32()), nullable=False),
        pa.field("span_lengths", pa.list_(pa.int32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("turn", pa.string(), nullable=False),  # JSON
        pa.field("history_shared", pa.int32(), nullable=False),
        pa.field("history_tail", pa.binary(), nullable=False),
        pa.field("branch", pa.string(), nullable=False),
        pa.field("side", pa.string()),
        pa.field("request", pa.string(), nullable=False),
        pa.field("dialect", pa.string(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("constrained", pa.bool_(), nullable=False),
        pa.field("cached_tokens", pa.int32(), nullable=False),
        pa.field("started_at", pa.float64(), nullable=False),
        pa.field("seconds", pa.float32(), nullable=False),
    ]
)


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout in a final state, with what training and reports need of it."""

    spec: RolloutSpec
    state: RolloutState
    outcome: Outcome
    attempt_id: str
    attempts: int
    reward: Reward | None
    detail: str = ""
    queued_s: float = 0.0
    running_s: float = 0.0
    grading_s: float = 0.0

    @property
    def usable(self) -> bool:
        """True if the rollout may enter a baseline and the loss."""
        return self.state is RolloutState.FINISHED and self.reward is not None
