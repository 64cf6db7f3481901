"""What the operator API takes and shows, as JSON: the store makes these, the gateway sends them,
`client.Client` gives them to the user.

Invariant: a view holds nothing that opens anything (no key, nor its hash), and what an agent must
not see of its task (`fields`) only where it was asked for.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from lightning_ray.records import (
    Branch,
    FinishReason,
    Json,
    Outcome,
    Reward,
    RolloutState,
    SideCall,
    Span,
    Split,
    Turn,
)

# SQLite's integers end here.
_Number = Annotated[int, Field(ge=0, le=2**63 - 1)]
_MOST_ROWS = 500  # of a page: it is made on the thread that also records calls


class PageQuery(BaseModel):
    """Which page of a list: what comes behind `after`, the `next` of the page before."""

    limit: Annotated[int, Field(ge=1, le=_MOST_ROWS)] = 100
    after: _Number | None = None


class RolloutQuery(PageQuery):
    """Which rollouts."""

    state: RolloutState | None = None
    split: Split | None = None
    step: _Number | None = None


class CallQuery(PageQuery):
    """Which calls of a rollout: those of the attempt with this number, by default of the last."""

    attempt: _Number | None = None
    tokens: bool = Field(False, description="also token ids and log-probs")


class NewRollout(BaseModel):
    """A rollout that somebody wants. `fields` are the task family's own data, which the agent
    never sees; with a `rollout_id` of the caller's, asking again asks for the same rollout."""

    rollout_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
    task_id: str = Field(min_length=1, max_length=1000)
    statement: str = Field(min_length=1)
    fields: Json = {}
    split: Split = Split.TRAIN
    step: int = Field(0, ge=0, lt=2**31)


class NewEvent(BaseModel):
    """Something that happened to a rollout, at `time` (seconds since the epoch; by default
    now)."""

    kind: str = Field(min_length=1, max_length=200)
    data: Json = {}
    time: float | None = Field(None, ge=0, le=1e12)


class Created(BaseModel):
    """The rollout is in the queue, or was there before."""

    rollout_id: str


class RolloutSummary(BaseModel):
    """A line of the list. The state is the store's: what is between two attempts or at the grader
    is `running`."""

    rollout_id: str
    group_id: str
    task_id: str
    split: Split
    step: int
    state: RolloutState
    attempts: int
    outcome: Outcome | None = None
    reward: Reward | None = None


class AttemptView(BaseModel):
    """One try. Times are seconds since the epoch; `last_fault` is the HTTP status (500 or above)
    that the gateway gave last, None if its last answer was fine."""

    attempt_id: str
    number: int
    started_at: float
    ended_at: float | None
    outcome: Outcome | None
    detail: str | None
    last_fault: int | None
    calls: int
    sampled_tokens: int


class RolloutDetail(RolloutSummary):
    """Everything about a rollout but its calls. `detail` says how it ended, `reward_source` how the
    reward was posted (None: the run's own grader gave it, or there is none)."""

    statement: str
    fields: Json | None = None
    tries: list[AttemptView]
    reward_source: str | None = None
    detail: str = ""
    queued_s: float = 0.0
    running_s: float = 0.0
    grading_s: float = 0.0


class TokenIds(BaseModel):
    """The tokens of a call. `logprobs` (natural log) are those of the sampled ones."""

    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]


class CallView(BaseModel):
    """One model call."""

    call_id: str
    attempt_id: str
    seq: int
    turn: Turn
    finish_reason: FinishReason
    branch: Branch
    side: SideCall | None
    dialect: str
    model: str
    constrained: bool
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    spans: list[Span]
    started_at: float
    seconds: float
    tokens: TokenIds | None = None


class Event(BaseModel):
    """What somebody reported with `NewEvent`. `seq` grows with each event of the run."""

    seq: int
    rollout_id: str
    kind: str
    data: Json
    time: float


class RolloutPage(BaseModel):
    """A page; `next` is None on the last one."""

    rollouts: list[RolloutSummary]
    next: int | None


class CallPage(BaseModel):
    """A page; `next` is None on the last one."""

    calls: list[CallView]
    next: int | None


class EventPage(BaseModel):
    """A page; `next` is None on the last one."""

    events: list[Event]
    next: int | None
