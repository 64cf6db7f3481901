"""Which attempt comes next: the queue of rollouts as a pure state machine.

Rollouts are submitted, wait in a queue (those of a validation ahead of all others) and are started,
at most `concurrency` at a time. An attempt
that ends by a fault of the infrastructure is followed by another one, up to `retries` times and
ahead of the queue, because its group waits for it; an attempt whose end the policy caused is
graded; a void one ends its rollout. Time is passed in; nothing here does I/O.

Invariants: each rollout reaches exactly one final state, and is handed out once by `take_finished`;
never more than `concurrency` attempts run (a cancelled one counts until it has really ended);
nothing starts for a rollout in a final state; only an outcome that the policy caused carries a
reward.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from lightning_ray.records import (
    FinishedRollout,
    Outcome,
    Reward,
    RolloutSpec,
    RolloutState,
    Split,
)

_ID = re.compile(r"[A-Za-z0-9._-]+")  # ids become parts of URLs and file names


class Next(StrEnum):
    """What an attempt's end leads to."""

    RETRY = "retry"  # the rollout is queued again
    GRADE = "grade"  # the attempt's result goes to the grader
    FINAL = "final"  # the rollout is over
    NOTHING = "nothing"  # the rollout was over before


@dataclass(frozen=True)
class Attempt:
    """One try at a rollout; `number` counts from 0."""

    attempt_id: str
    number: int
    spec: RolloutSpec


@dataclass(frozen=True)
class ControllerStatus:
    """How many rollouts stand where. `finished` have a reward, `failed` were lost to
    infrastructure or are void; `outcomes` counts the ends of attempts, also of those that were
    tried again; `groups` are those with an attempt that runs; `trouble` is what a person must know
    of who runs them; `lacks` says of each node that has less than the sandbox asked for what it
    lacks."""

    queued: int
    running: int
    grading: int
    finished: int
    failed: int
    cancelled: int
    outcomes: dict[Outcome, int]
    groups: frozenset[str] = frozenset()
    trouble: str = ""
    lacks: dict[str, str] = field(default_factory=dict)


@dataclass
class _Rollout:
    spec: RolloutSpec
    attempts: int  # made so far, those before a restart included
    last_attempt: int  # the number of the last one that may be made
    since: float  # when the present state began
    state: RolloutState = RolloutState.QUEUED
    attempt_id: str = ""
    outcome: Outcome = Outcome.CANCELLED
    detail: str = ""
    queued_s: float = 0.0
    running_s: float = 0.0
    grading_s: float = 0.0

    def enter(self, state: RolloutState, now: float) -> None:
        """Books the time spent in the present state, and leaves it."""
        spent = max(0.0, now - self.since)
        match self.state:
            case RolloutState.QUEUED:
                self.queued_s += spent
            case RolloutState.RUNNING:
                self.running_s += spent
            case RolloutState.GRADING:
                self.grading_s += spent
        self.state, self.since = state, now


class Lifecycle:
    """All rollouts of a run that are not over, and those that ended since `take_finished` last
    looked."""

    def __init__(self, concurrency: int, retries: int) -> None:
        self._concurrency = concurrency
        self._retries = retries
        self._live: dict[str, _Rollout] = {}  # by rollout id
        self._attempts: dict[str, str] = {}  # attempt id -> rollout id, while it runs or is graded
        self._running: set[str] = set()  # attempt ids whose process may be alive
        # The first one that has any is served.
        self._queues: dict[Split, deque[str]] = {
            s: deque() for s in (Split.VALIDATION, Split.TRAIN)
        }
        self._over: set[str] = set()
        self._finished: list[FinishedRollout] = []
        self._states: Counter[RolloutState] = Counter()
        self._outcomes: Counter[Outcome] = Counter()

    def submit(self, spec: RolloutSpec, now: float, attempts_before: int = 0) -> bool:
        """Queues a rollout, unless it is known; says whether it was new. `attempts_before` are
        attempts that an earlier life of the run made: their ids are not used again.

        Raises:
            ValueError: the rollout id has characters that a URL or a file name might not take.
        """
        if not _ID.fullmatch(spec.rollout_id):
            raise ValueError(
                f"rollout id {spec.rollout_id!r} may hold only letters, digits and . _ -"
            )
        if spec.rollout_id in self._live or spec.rollout_id in self._over:
            return False
        last = attempts_before + self._retries
        self._live[spec.rollout_id] = _Rollout(spec, attempts_before, last, since=now)
        self._queues[spec.split].append(spec.rollout_id)
        return True

    def start(self, now: float) -> list[Attempt]:
        """The attempts to start at once; they count as running from here on."""
        started = []
        while len(self._running) < self._concurrency:
            queue = next(filter(None, self._queues.values()), None)
            if queue is None:
                break
            started.append(self._start(self._live[queue.popleft()], now))
        return started

    def _start(self, rollout: _Rollout, now: float) -> Attempt:
        number = rollout.attempts
        rollout.attempt_id = f"{rollout.spec.rollout_id}-a{number}"
        rollout.attempts += 1
        rollout.enter(RolloutState.RUNNING, now)
        self._attempts[rollout.attempt_id] = rollout.spec.rollout_id
        self._running.add(rollout.attempt_id)
        return Attempt(rollout.attempt_id, number, rollout.spec)

    def adopt(self, spec: RolloutSpec, number: int, now: float) -> Attempt | None:
        """An attempt that an earlier life of the run began, and that runs on; None if the rollout
        is known already."""
        if not self.submit(spec, now, number):
            return None
        self._queues[spec.split].remove(spec.rollout_id)
        return self._start(self._live[spec.rollout_id], now)

    def attempt_ended(self, attempt_id: str, outcome: Outcome, detail: str, now: float) -> Next:
        """The attempt's process is gone, for good."""
        if attempt_id not in self._running:
            raise ValueError(f"attempt {attempt_id} is not running")
        self._running.remove(attempt_id)
        if attempt_id not in self._attempts:
            return Next.NOTHING
        rollout = self._live[self._attempts[attempt_id]]
        rollout.outcome, rollout.detail = outcome, detail
        if outcome.caused_by_policy:
            rollout.enter(RolloutState.GRADING, now)
            return Next.GRADE
        return self._fault(rollout, now)

    def graded(self, attempt_id: str, reward: Reward, now: float) -> Next:
        """The grader gave a valid reward."""
        if (rollout := self._grading(attempt_id)) is None:
            return Next.NOTHING
        self._end(rollout, RolloutState.FINISHED, rollout.outcome, now, reward)
        return Next.FINAL

    def grader_failed(self, attempt_id: str, outcome: Outcome, detail: str, now: float) -> Next:
        """No valid reward came, or none may."""
        if (rollout := self._grading(attempt_id)) is None:
            return Next.NOTHING
        rollout.outcome, rollout.detail = outcome, detail
        return self._fault(rollout, now)

    def cancel(self, rollout_ids: Iterable[str], now: float) -> list[str]:
        """Ends these rollouts; returns the attempts whose process or grader is to be stopped."""
        stop = []
        for rollout in [
            self._live[rollout_id] for rollout_id in rollout_ids if rollout_id in self._live
        ]:
            if rollout.state is RolloutState.QUEUED:
                self._queues[rollout.spec.split].remove(rollout.spec.rollout_id)
            else:
                stop.append(rollout.attempt_id)
            rollout.detail = "cancelled"
            self._end(rollout, RolloutState.CANCELLED, Outcome.CANCELLED, now)
        return stop

    def take_finished(self) -> list[FinishedRollout]:
        """Rollouts that ended since the last look, in the order in which they ended."""
        taken, self._finished = self._finished, []
        return taken

    def status(self) -> ControllerStatus:
        states = Counter(rollout.state for rollout in self._live.values()) + self._states
        return ControllerStatus(
            queued=states[RolloutState.QUEUED],
            running=len(self._running),
            grading=states[RolloutState.GRADING],
            finished=states[RolloutState.FINISHED],
            failed=states[RolloutState.FAILED],
            cancelled=states[RolloutState.CANCELLED],
            outcomes=dict(self._outcomes),
            groups=frozenset(
                self._live[self._attempts[attempt]].spec.group_id
                for attempt in self._running & self._attempts.keys()
            ),
        )

    @property
    def live(self) -> list[str]:
        """Ids of the rollouts that are not over."""
        return list(self._live)

    def _grading(self, attempt_id: str) -> _Rollout | None:
        """The rollout that the attempt is graded for; None if that was over before (cancelled)."""
        if attempt_id not in self._attempts:
            return None
        rollout = self._live[self._attempts[attempt_id]]
        if rollout.state is not RolloutState.GRADING:
            raise ValueError(f"attempt {attempt_id} is {rollout.state}, not being graded")
        return rollout

    def _fault(self, rollout: _Rollout, now: float) -> Next:
        if rollout.outcome is Outcome.CANCELLED:
            self._end(rollout, RolloutState.CANCELLED, Outcome.CANCELLED, now)
            return Next.FINAL
        if rollout.attempts > rollout.last_attempt or not rollout.outcome.retryable:
            self._end(rollout, RolloutState.FAILED, rollout.outcome, now)
            return Next.FINAL
        self._outcomes[rollout.outcome] += 1
        del self._attempts[rollout.attempt_id]
        rollout.enter(RolloutState.QUEUED, now)
        self._queues[rollout.spec.split].appendleft(rollout.spec.rollout_id)
        return Next.RETRY

    def _end(
        self,
        rollout: _Rollout,
        state: RolloutState,
        outcome: Outcome,
        now: float,
        reward: Reward | None = None,
    ) -> None:
        rollout.enter(state, now)
        self._states[state] += 1
        self._outcomes[outcome] += 1
        self._attempts.pop(rollout.attempt_id, None)
        del self._live[rollout.spec.rollout_id]
        self._over.add(rollout.spec.rollout_id)
        self._finished.append(
            FinishedRollout(
                spec=rollout.spec,
                state=state,
                outcome=outcome,
                attempt_id=rollout.attempt_id,
                attempts=rollout.attempts,
                reward=reward,
                detail=rollout.detail,
                queued_s=rollout.queued_s,
                running_s=rollout.running_s,
                grading_s=rollout.grading_s,
            )
        )


def judge(outcome: Outcome, calls: int, last_fault: int | None) -> Outcome:
    """The outcome of an attempt, given how its model calls went: the policy cannot have caused an
    end that came before its first reply, or after the gateway failed the harness (HTTP status
    `last_fault`)."""
    if not outcome.caused_by_policy:
        return outcome
    if last_fault is not None:
        return Outcome.GATEWAY_FAULT
    return outcome if calls else Outcome.LAUNCH_FAULT
