"""The rollout lifecycle, driven without a cluster and without a clock."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightning_ray.records import (
    FinishedRollout,
    Outcome,
    Reward,
    RolloutSpec,
    RolloutState,
    Split,
    Task,
)
from lightning_ray.rollouts.lifecycle import Lifecycle, Next

REWARD = Reward(1.0, True)


def spec(rollout_id: str) -> RolloutSpec:
    return RolloutSpec(rollout_id, "group", Task("task", "do it"), Split.TRAIN, 0)


def test_a_rollout_that_goes_well_is_finished_with_its_times() -> None:
    life = Lifecycle(concurrency=1, retries=0)
    life.submit(spec("r"), now=0)
    (attempt,) = life.start(now=2)
    assert (attempt.attempt_id, attempt.number) == ("r-a0", 0)
    assert life.attempt_ended("r-a0", Outcome.TIMEOUT, "too long", now=5) is Next.GRADE
    assert life.graded("r-a0", REWARD, now=9) is Next.FINAL
    (finished,) = life.take_finished()
    assert (finished.state, finished.outcome, finished.reward) == (
        RolloutState.FINISHED,
        Outcome.TIMEOUT,
        REWARD,
    )
    assert (finished.queued_s, finished.running_s, finished.grading_s) == (2, 3, 4)
    assert (finished.attempts, finished.detail) == (1, "too long")
    assert life.take_finished() == []


def test_submitting_again_changes_nothing_even_after_the_end() -> None:
    life = Lifecycle(concurrency=4, retries=0)
    assert life.submit(spec("r"), now=0)
    assert not life.submit(spec("r"), now=0)
    assert len(life.start(now=0)) == 1
    life.cancel(["r"], now=0)
    assert not life.submit(spec("r"), now=0)
    assert life.start(now=0) == []


def test_a_fault_is_tried_again_before_the_queue_and_then_given_up() -> None:
    life = Lifecycle(concurrency=1, retries=1)
    for rollout_id in ("first", "second"):
        life.submit(spec(rollout_id), now=0)
    life.start(now=0)
    assert life.attempt_ended("first-a0", Outcome.NODE_LOST, "node 3", now=1) is Next.RETRY
    assert [attempt.attempt_id for attempt in life.start(now=2)] == ["first-a1"]
    assert life.attempt_ended("first-a1", Outcome.GATEWAY_FAULT, "503", now=3) is Next.FINAL
    (finished,) = life.take_finished()
    assert (finished.state, finished.outcome) == (RolloutState.FAILED, Outcome.GATEWAY_FAULT)
    assert (finished.attempts, finished.attempt_id, finished.reward) == (2, "first-a1", None)
    assert (finished.queued_s, finished.running_s) == (1, 2)
    assert life.status().outcomes == {Outcome.NODE_LOST: 1, Outcome.GATEWAY_FAULT: 1}


def test_a_grader_that_fails_leads_to_a_new_attempt_and_never_to_a_reward() -> None:
    life = Lifecycle(concurrency=1, retries=1)
    life.submit(spec("r"), now=0)
    for number, leads_to in enumerate([Next.RETRY, Next.FINAL]):
        life.start(now=0)
        life.attempt_ended(f"r-a{number}", Outcome.COMPLETED, "", now=0)
        assert life.grader_failed(f"r-a{number}", Outcome.GRADER_FAULT, "nan", 0) is leads_to
    (finished,) = life.take_finished()
    assert (finished.outcome, finished.reward, finished.detail) == (
        Outcome.GRADER_FAULT,
        None,
        "nan",
    )


def test_a_void_attempt_is_the_last_one_of_its_rollout() -> None:
    life = Lifecycle(concurrency=1, retries=3)
    life.submit(spec("r"), now=0)
    life.start(now=0)
    life.attempt_ended("r-a0", Outcome.COMPLETED, "", now=0)
    assert life.grader_failed("r-a0", Outcome.VOID, "call 3 said a canary", 0) is Next.FINAL
    (finished,) = life.take_finished()
    assert (finished.state, finished.outcome) == (RolloutState.FAILED, Outcome.VOID)
    assert (finished.attempts, finished.reward) == (1, None)
    assert not finished.usable
    assert life.status().outcomes == {Outcome.VOID: 1}
    assert life.start(now=0) == []


def test_attempts_of_an_earlier_life_of_the_run_keep_their_ids_and_cost_no_retries() -> None:
    life = Lifecycle(concurrency=1, retries=1)
    life.submit(spec("r"), now=0, attempts_before=2)
    assert life.start(now=0)[0].attempt_id == "r-a2"
    assert life.attempt_ended("r-a2", Outcome.NODE_LOST, "", now=0) is Next.RETRY
    assert life.start(now=0)[0].attempt_id == "r-a3"
    assert life.attempt_ended("r-a3", Outcome.NODE_LOST, "", now=0) is Next.FINAL


def test_a_cancelled_attempt_holds_its_place_until_its_process_is_gone() -> None:
    life = Lifecycle(concurrency=1, retries=3)
    life.submit(spec("r"), now=0)
    life.submit(spec("s"), now=0)
    life.start(now=0)
    assert life.cancel(["r", "unknown"], now=1) == ["r-a0"]
    assert life.start(now=1) == []
    assert life.attempt_ended("r-a0", Outcome.CANCELLED, "", now=2) is Next.NOTHING
    assert [attempt.attempt_id for attempt in life.start(now=2)] == ["s-a0"]


def test_a_reward_after_a_cancellation_is_ignored() -> None:
    life = Lifecycle(concurrency=1, retries=0)
    life.submit(spec("r"), now=0)
    life.start(now=0)
    life.attempt_ended("r-a0", Outcome.COMPLETED, "", now=0)
    assert life.cancel(["r"], now=0) == ["r-a0"]
    assert life.graded("r-a0", REWARD, now=0) is Next.NOTHING
    assert [finished.state for finished in life.take_finished()] == [RolloutState.CANCELLED]


def test_an_id_that_a_file_name_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="a/b"):
        Lifecycle(1, 0).submit(spec("a/b"), now=0)


def test_a_reward_for_an_attempt_that_still_runs_is_an_error() -> None:
    life = Lifecycle(concurrency=1, retries=0)
    life.submit(spec("r"), now=0)
    life.start(now=0)
    with pytest.raises(ValueError, match="r-a0 is running"):
        life.graded("r-a0", REWARD, now=0)


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens in whatever order: the invariants of the module's docstring."""

    CONCURRENCY, RETRIES = 3, 2

    def __init__(self) -> None:
        super().__init__()
        self.life = Lifecycle(self.CONCURRENCY, self.RETRIES)
        self.now = 0.0
        self.submitted: set[str] = set()
        self.running: set[str] = set()
        self.grading: set[str] = set()
        self.attempts: dict[str, int] = {}
        self.over: dict[str, FinishedRollout] = {}

    def collect(self) -> None:
        for finished in self.life.take_finished():
            assert finished.spec.rollout_id not in self.over
            assert finished.state.final
            assert (finished.reward is not None) == (finished.state is RolloutState.FINISHED)
            assert finished.reward is None or finished.outcome.caused_by_policy
            self.over[finished.spec.rollout_id] = finished

    @rule(number=st.integers(0, 8), wait=st.floats(0, 5))
    def submit(self, number: int, wait: float) -> None:
        self.now += wait
        new = self.life.submit(spec(f"r{number}"), self.now)
        assert new == (f"r{number}" not in self.submitted)
        self.submitted.add(f"r{number}")

    @rule(wait=st.floats(0, 5))
    def start(self, wait: float) -> None:
        self.now += wait
        for attempt in self.life.start(self.now):
            rollout_id = attempt.spec.rollout_id
            assert rollout_id not in self.over
            assert attempt.number == self.attempts.get(rollout_id, 0) <= self.RETRIES
            self.attempts[rollout_id] = attempt.number + 1
            self.running.add(attempt.attempt_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from(Outcome), wait=st.floats(0, 5))
    def end(self, data: st.DataObject, outcome: Outcome, wait: float) -> None:
        self.now += wait
        attempt_id = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(attempt_id)
        if self.life.attempt_ended(attempt_id, outcome, "", self.now) is Next.GRADE:
            self.grading.add(attempt_id)
        self.collect()

    @precondition(lambda self: self.grading)
    @rule(
        data=st.data(),
        fault=st.sampled_from([None, Outcome.GRADER_FAULT, Outcome.VOID]),
        wait=st.floats(0, 5),
    )
    def grade(self, data: st.DataObject, fault: Outcome | None, wait: float) -> None:
        self.now += wait
        attempt_id = data.draw(st.sampled_from(sorted(self.grading)))
        self.grading.remove(attempt_id)
        if fault is None:
            self.life.graded(attempt_id, REWARD, self.now)
        else:
            leads_to = self.life.grader_failed(attempt_id, fault, "", self.now)
            assert leads_to is not Next.RETRY or fault is Outcome.GRADER_FAULT
        self.collect()

    @rule(number=st.integers(0, 8))
    def cancel(self, number: int) -> None:
        stop = self.life.cancel([f"r{number}"], self.now)
        assert set(stop) <= self.running | self.grading
        self.collect()

    @invariant()
    def nothing_is_lost_and_nothing_is_too_much(self) -> None:
        status = self.life.status()
        assert status.running == len(self.running) <= self.CONCURRENCY
        assert set(self.life.live) | set(self.over) == self.submitted
        assert not set(self.life.live) & set(self.over)

    def teardown(self) -> None:
        """Everything that was submitted ends, once the world stops interfering."""
        for _ in range(100):
            self.start(0.0)
            for attempt_id in sorted(self.running):
                self.running.remove(attempt_id)
                if (
                    self.life.attempt_ended(attempt_id, Outcome.COMPLETED, "", self.now)
                    is Next.GRADE
                ):
                    self.grading.add(attempt_id)
            for attempt_id in sorted(self.grading):
                self.grading.remove(attempt_id)
                self.life.graded(attempt_id, REWARD, self.now)
            self.collect()
        assert set(self.over) == self.submitted


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def lines_of(work) -> int:
    """How many lines of Python a piece of work executes."""
    counted = 0

    def trace(_frame: FrameType, event: str, _argument: object):
        nonlocal counted
        counted += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return counted


def test_what_a_tick_costs_does_not_grow_with_the_rollouts_that_are_over() -> None:
    life = Lifecycle(concurrency=16, retries=1)
    for i in range(10_000):
        life.submit(spec(f"r{i}"), now=0)
    running = [attempt.attempt_id for attempt in life.start(now=0)]

    def tick() -> None:
        attempt = running.pop(0)
        life.attempt_ended(attempt, Outcome.COMPLETED, "", now=1)
        running.extend(each.attempt_id for each in life.start(now=1))
        life.graded(attempt, REWARD, now=1)
        life.take_finished()

    first, first_status = lines_of(tick), lines_of(life.status)
    for _ in range(9_000):
        tick()
    assert life.status().finished == 9_001
    assert lines_of(tick) <= first
    assert lines_of(life.status) <= first_status
