"""What the store promises, and what a crash may not break."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from lightning_ray.store.attempts import Known
from lightning_ray.store.errors import (
    AttemptOver,
    DuplicateReward,
    StoreError,
    StoreLocked,
    UnknownAttempt,
)
from lightning_ray.store.rollouts import RolloutStore


def make_call(call_id: str, prompt: list[int], tokens: list[int], attempt: str = "r-a0") -> Call:
    return Call(
        call_id=call_id,
        attempt_id=attempt,
        seq=-1,
        prompt=np.array(prompt, np.int32),
        tokens=np.array(tokens, np.int32),
        logprobs=np.linspace(-1, 0, len(tokens), dtype=np.float32),
        spans=(Span(PolicyVersion("abc", 3), len(tokens)),),
        finish_reason=FinishReason.STOP,
        text="hello",
    )


def make_spec(rollout_id: str = "r") -> RolloutSpec:
    return RolloutSpec(rollout_id, "g", Task("t", "do it", {"file": "a.txt"}), Split.TRAIN, 1)


@pytest.fixture
def store(tmp_path: Path):
    store = RolloutStore(tmp_path / "store", segment_bytes=2000)
    store.create_rollouts([make_spec()])
    store.start_attempt("r-a0", "r", 0, "hash", 1.0)
    yield store
    store.close()


def same(one: Call, other: Call) -> bool:
    return (
        one.call_id == other.call_id
        and np.array_equal(one.full, other.full)
        and np.array_equal(one.logprobs, other.logprobs)
        and one.spans == other.spans
    )


def test_calls_come_back_as_they_were_recorded(store: RolloutStore):
    calls = [
        make_call("c0", [1, 2], [3, 4]),
        make_call("c1", [1, 2, 3, 4, 5], [6]),
        make_call("c2", [9], []),
    ]
    assert store.append(calls[:2]) == [0, 1]
    assert store.append(calls[2:]) == [2]
    store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0)  # from here on it is read from disk
    assert all(same(a, b) for a, b in zip(store.calls("r-a0"), calls, strict=True))
    assert [call.seq for call in store.calls("r-a0")] == [0, 1, 2]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=5)
        ),
        max_size=12,
    )
)
def test_any_history_survives_the_difference_encoding(tmp_path_factory, history):
    store = RolloutStore(tmp_path_factory.mktemp("s"), segment_bytes=1500)
    store.create_rollouts([make_spec()])
    store.start_attempt("r-a0", "r", 0, "hash", 1.0)
    calls = [make_call(f"c{i}", prompt, tokens) for i, (prompt, tokens) in enumerate(history)]
    for call in calls:
        store.append([call])
    store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0)
    assert all(same(a, b) for a, b in zip(store.calls("r-a0"), calls, strict=True))
    store.close()


def test_a_call_recorded_twice_is_stored_once(store: RolloutStore):
    call = make_call("c0", [1], [2])
    assert store.append([call, call]) == [0, 0]
    assert store.append([call]) == [0]
    assert len(store.calls("r-a0")) == 1


def test_an_attempt_that_ended_takes_no_more_calls(store: RolloutStore):
    store.append([make_call("c0", [1], [2, 3])])
    summary = store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0)
    assert (summary.calls, summary.last_fault) == (1, None)
    refusals = store.append(
        [make_call("c1", [1], [2]), make_call("c2", [1], [2], attempt="nobody")]
    )
    assert [type(refusal) for refusal in refusals] == [AttemptOver, UnknownAttempt]
    assert not store.attempt("r-a0").live


def test_the_last_fault_is_forgotten_when_a_later_call_succeeds(store: RolloutStore):
    store.record_fault("r-a0", 503)
    assert store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0).last_fault == 503
    store.start_attempt("r-a1", "r", 1, "hash", 1.0)
    store.record_fault("r-a1", 503)
    store.append([make_call("c0", [1], [2], attempt="r-a1")])
    assert store.end_attempt("r-a1", Outcome.COMPLETED, "", 2.0).last_fault is None


def test_another_reward_is_refused_and_the_first_one_stays(store: RolloutStore):
    first = Reward(0.5, False, {"tests": 3.0})
    store.post_reward("r", first, "grader")
    for reward, source in ((Reward(1.0, True), "grader"), (first, "post")):
        with pytest.raises(DuplicateReward):
            store.post_reward("r", reward, source)
    assert store.reward("r") == first
    with pytest.raises(StoreError, match="no rollout"):
        store.post_reward("nobody", first, "grader")


def test_what_is_asked_for_twice_is_done_once(store: RolloutStore):
    """Ray sends a request again when the store died before it answered."""
    store.append([make_call("c0", [1], [2])])
    ends = [store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0) for _ in range(2)]
    assert ends[0] == ends[1] and ends[0].calls == 1
    store.start_attempt("r-a0", "r", 0, "hash", 1.0)
    assert not store.attempt("r-a0").live  # it had ended
    with pytest.raises(StoreError, match="another key"):
        store.start_attempt("r-a0", "r", 0, "another hash", 1.0)
    for _ in range(2):
        store.post_reward("r", Reward(0.5, False, {"tests": 3.0}), "grader")


def test_a_refused_write_takes_no_other_calls_with_it(store: RolloutStore):
    store.start_attempt("r-a1", "r", 1, "hash", 1.0)
    store.post_reward("r", Reward(1.0, True), "grader")
    store.append([make_call("c0", [1], [2]), make_call("c1", [1, 2, 3], [4], attempt="r-a1")])
    with pytest.raises(DuplicateReward):
        store.post_reward("r", Reward(0.0, False), "grader")
    with pytest.raises(StoreError):
        store.start_attempt("r-a1", "r", 1, "another hash", 1.0)
    assert store.end_attempt("r-a0", Outcome.COMPLETED, "", 2.0).calls == 1
    assert store.end_attempt("r-a1", Outcome.COMPLETED, "", 2.0).calls == 1
    assert len(store.calls("r-a0")) == len(store.calls("r-a1")) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", None])
def test_a_reward_that_is_not_a_finite_number_is_an_error(value):
    with pytest.raises(ValueError, match="value"):
        Reward(value, False)


def test_finished_rollouts_come_back_equal(store: RolloutStore):
    finished = FinishedRollout(
        make_spec(),
        RolloutState.FINISHED,
        Outcome.COMPLETED,
        "r-a0",
        1,
        Reward(1.0, True, {"m": 2.0}),
        "",
        1.0,
        2.0,
    )
    store.finish_rollout(finished)
    assert store.finished(["r", "unknown"]) == [finished]


def test_a_second_owner_is_refused(store: RolloutStore):
    with pytest.raises(StoreLocked, match="another run"):
        RolloutStore(store.directory)


def test_attempts_continue_their_numbering_after_a_restart(store: RolloutStore):
    assert store.create_rollouts([make_spec()]) == {"r": Known(1, False, True, open=0)}
    assert store.end_orphans(5.0) == 1
    assert not store.attempt("r-a0").live
    assert store.create_rollouts([make_spec()]) == {"r": Known(1, False, True)}


def test_an_attempt_that_runs_on_is_no_orphan(store: RolloutStore):
    assert store.end_orphans(5.0, keep=["r-a0", "another"]) == 0
    assert store.attempt("r-a0").live
    assert store.create_rollouts([make_spec()]) == {"r": Known(1, False, True, open=0)}


def test_a_torn_tail_is_cut_off_and_everything_before_it_stays(tmp_path: Path):
    store = RolloutStore(tmp_path / "before")
    store.create_rollouts([make_spec()])
    store.start_attempt("r-a0", "r", 0, "hash", 1.0)
    store.append([make_call("c0", [1], [2])])
    store.append([make_call("c1", [1, 2, 3], [4])])
    shutil.copytree(tmp_path / "before", tmp_path / "after")  # what a crash leaves
    store.close()
    log = next((tmp_path / "after" / "calls").glob("*.log"))
    log.write_bytes(log.read_bytes()[:-3])
    store = RolloutStore(tmp_path / "after")
    assert [torn.stat().st_size > 0 for torn in store.torn] == [True]
    assert [call.call_id for call in store.calls("r-a0")] == ["c0"]
    store.append([make_call("c2", [1, 2, 5], [6])])
    assert [call.call_id for call in store.calls("r-a0")] == ["c0", "c2"]
    store.close()


def test_what_was_answered_survives_kill_minus_nine(tmp_path: Path):
    script = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_store import *
        store = RolloutStore(Path({str(tmp_path)!r}), segment_bytes=4000)
        store.create_rollouts([make_spec()]); store.start_attempt("r-a0", "r", 0, "hash", 1.0)
        prompt = [1]
        for i in range(10_000):
            store.append([make_call(f"c{{i}}", prompt, [i, i + 1])])
            print(i, flush=True)
            prompt = [*prompt[-50:], i, i + 1, 7]
    """)
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    answered = -1
    for line in child.stdout:
        answered = int(line)
        if answered == 60:
            os.kill(child.pid, signal.SIGKILL)
            break
    answered = max([answered, *(int(line) for line in child.stdout)])
    child.wait()
    store = RolloutStore(tmp_path)
    ids = [call.call_id for call in store.calls("r-a0")]
    assert ids[: answered + 1] == [f"c{i}" for i in range(answered + 1)]
    assert len(ids) <= answered + 2
    store.close()
