"""Runs in virtual time: what is conserved, and that the schedules take as long as they must."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_samples import call, rollout

from lightning_ray.__main__ import main
from lightning_ray.config import dump, load
from lightning_ray.records import Call, Outcome
from lightning_ray.samples import dataset
from lightning_ray.simulate import workload
from lightning_ray.simulate.schedules import SCHEDULES, Setting, simulate
from lightning_ray.simulate.workload import Stated
from lightning_ray.simulate.world import Engine, Rollout, Script, World
from lightning_ray.store.rollouts import RolloutStore

SCHEDULE = {schedule.name: schedule for schedule in SCHEDULES}
SYNC, ONE_OFF, DRAIN, INTERRUPT, APART = SCHEDULES


def fixed(place: int) -> Sequence[Script]:
    """Two rollouts of two turns: 1 s of sampling, 3 s of tools."""
    return [Script(((1.0, 3.0), (1.0, 3.0)))] * 2


def test_fixed_latencies_take_what_they_add_up_to() -> None:
    setting = Setting(steps=3, groups_per_step=2, in_flight=4, devices=2, update=5.0, sync=0.5)
    sync = simulate(SYNC, setting, fixed)
    assert sync.seconds == pytest.approx(3 * (8 + 5 + 0.5))
    assert sync.groups_per_hour == pytest.approx(3600 * 2 / 13.5)
    assert sync.ages == [0] * 6
    # Both devices are busy for 5.5 s of each step, and each for two calls of 1 s.
    assert sync.idle == pytest.approx(1 - (5.5 + 2) / 13.5)
    # The update has one device, and takes 10 s: longer than sampling, but for the first batch.
    one_off = simulate(ONE_OFF, setting, fixed)
    assert one_off.seconds == pytest.approx(8 + 3 * (10 + 0.5))
    assert one_off.ages == [0, 0, 1, 1, 1, 1]
    apart = simulate(APART, setting, fixed)
    assert apart.seconds == pytest.approx(8 + 3 * (10 + 0.5))


def note(world: World, ended: list[float]) -> None:
    ended.append(world.now)


def test_calls_share_an_engine() -> None:
    for slowdown, most, seconds in ((0.0, 9, 2.0), (1.0, 9, 6.0), (0.5, 9, 4.0), (0.0, 1, 6.0)):
        world, ended = World(1, most, slowdown, concurrency=3), list[float]()
        for number in range(3):
            end = partial(note, world, ended)
            world.begin(Rollout(f"{number}", Script(((2.0, 0.0),)), lambda: None, end))
        while len(ended) < 3:
            world.advance()
        assert ended[-1] == pytest.approx(seconds)


def test_a_stopped_engine_loses_nothing() -> None:
    engine, ended = Engine(most=4, slowdown=0.0), list[str]()
    engine.take(2.0, lambda: ended.append("a"))
    engine.let_in()
    engine.go_on(1.5)
    engine.open, engine.stopped = False, True
    engine.take(1.0, lambda: ended.append("b"))
    engine.let_in()
    assert engine.go_on(100.0) == [] and engine.running == 1
    engine.open, engine.stopped = True, False
    engine.let_in()
    [then] = engine.go_on(0.5)
    then()
    assert ended == ["a"] and engine.running == 1 and engine.busy_s == 2.0


def test_draining_waits_for_a_long_call_and_interrupting_does_not() -> None:
    def work(place: int) -> Sequence[Script]:
        return [Script(((20.0 if place == 1 else 1.0, 0.0),))]

    setting = Setting(
        steps=4, groups_per_step=1, in_flight=2, max_staleness=3, devices=1, update=1.0, sync=0.0
    )
    drained, interrupted = (simulate(s, setting, work) for s in (DRAIN, INTERRUPT))
    # Three updates in the first six seconds; then it is the long one's turn, with 17 s to go.
    assert interrupted.seconds == pytest.approx(6 + 17 + 1)
    assert interrupted.ages == [0, 0, 0, 3]
    # The first update comes after 20 s, and the second at once; the others had to wait for both.
    assert drained.seconds == pytest.approx(20 + 1 + 1 + 1 + 1 + 1)
    assert drained.ages == [0, 1, 1, 1]
    assert simulate(INTERRUPT, dataclasses.replace(setting, drain=100.0), work) == drained


settings_of_runs = st.builds(
    Setting,
    steps=st.integers(1, 6),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    drain=st.floats(0, 3),
    devices=st.integers(1, 4),
    max_num_seqs=st.integers(1, 8),
    concurrency=st.integers(1, 30),
    slowdown=st.floats(0, 1),
    update=st.floats(0, 20),
    sync=st.floats(0, 2),
    checkpoint=st.floats(0, 1),
)


@settings(max_examples=150, deadline=None)
@given(settings_of_runs, st.floats(0, 1), st.integers(0, 99))
def test_every_schedule_trains_on_each_group_once_and_on_none_too_old(
    setting: Setting, share: float, seed: int
) -> None:
    most = setting.groups_per_step * (setting.max_staleness + 1)
    in_flight = setting.groups_per_step + int(share * (most - setting.groups_per_step))
    setting = dataclasses.replace(setting, in_flight=in_flight)
    begun, groups = list[int](), Stated(n=2, turns=2).work(seed)

    def work(place: int) -> Sequence[Script]:
        begun.append(place)
        return groups(place)

    for schedule in SCHEDULES:
        begun.clear()
        result = simulate(schedule, setting, work)
        if result is None:
            assert schedule.apart and (setting.devices < 2 or setting.max_staleness < 1)
            continue
        assert begun == list(range(setting.steps * setting.groups_per_step))
        assert len(result.ages) == len(begun)
        assert 0 <= min(result.ages) <= max(result.ages) <= setting.max_staleness
        assert -1e-6 <= result.idle < 1


def test_async_is_never_slower_than_sync_when_tails_are_heavy() -> None:
    for seed in range(10):
        work, setting = Stated().work(seed), Setting(concurrency=64)
        results = {s.name: simulate(s, setting, work) for s in SCHEDULES}
        base = results["synchronous"].seconds
        assert results["collocated async, drain"].seconds < base
        assert results["collocated async, interrupt"].seconds < base


T0 = 1_700_000_000.0


def timed(attempt: str, seq: int, begin: float, end: float, tokens: int) -> Call:
    made = call(seq, [1], list(range(tokens)), attempt)
    return dataclasses.replace(made, started_at=T0 + begin, seconds=end - begin)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two synchronous updates of one group of two rollouts. A token takes a quarter of a second,
    and half as long again for two calls at a time."""
    attempts = {
        "a": (0.0, [(1, 4, 8), (6, 7, 4)], 8.0),
        "b": (0.0, [(1, 4, 8), (9, 10, 4)], 12.0),
        "c": (17.5, [(18.5, 20.5, 8), (23.5, 26.5, 8)], 26.5),
        "d": (17.5, [(23.5, 26.5, 8)], 26.5),
    }
    store = RolloutStore(tmp_path / "store")
    for name, (started, calls, ended) in attempts.items():
        done = rollout(name, "g0" if name in "ab" else "g1", 1.0)
        done = dataclasses.replace(done, grading_s=0.0)
        store.create_rollouts([done.spec])
        store.start_attempt(name, name, 0, "hash", T0 + started)
        store.append([timed(name, seq, *one) for seq, one in enumerate(calls)])
        store.end_attempt(name, Outcome.COMPLETED, "", T0 + ended)
        store.finish_rollout(done)
    store.close()
    for step, names in enumerate((["a", "b"], ["c", "d"])):
        dataset.path(tmp_path, step, "ledger").parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"rollout_id": names}), dataset.path(tmp_path, step, "ledger"))
    (tmp_path / "config.yaml").write_text(
        dump(load(None, ["rollout.n=2", "run.groups_per_step=1", "trainer.optimizer_steps=1"]))
    )
    lines = [
        {"step": step, "time": T0 + opened, "seconds/collect": collect, "seconds/drain": 0.0,
         "seconds/update": 5.0, "seconds/sync": 0.5, "seconds/gate_closed": 5.5}
        for step, opened, collect in ((1, 17.5, 12.0), (2, 32.0, 9.0))
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_record_is_undone_to_what_its_rollouts_do_alone(run_dir: Path) -> None:
    run = workload.recorded(run_dir)
    assert run.setting.slowdown == pytest.approx(0.5, abs=1e-3)
    expected = [
        [Script(((2, 2), (1, 1)), 1), Script(((2, 5), (1, 2)), 1)],
        [Script(((2, 3), (2, 0)), 1), Script(((2, 0),), 6)],
    ]
    for found, wanted in zip(run.groups, expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert np.allclose(one.turns, other.turns, atol=1e-3)
            assert one.start_s == pytest.approx(other.start_s)
    again = simulate(SYNC, run.setting, run.work)
    assert again.groups_per_hour == pytest.approx(run.groups_per_hour, rel=1e-3)
    assert run.groups_per_hour == pytest.approx(3600 * 2 / 32)


def test_what_a_pause_added_to_calls_and_tools_is_taken_off() -> None:
    pause = workload.Pause(T0 + 10, T0 + 11, T0 + 16)
    slowdown, alone = workload.alone_s([timed("a", 0, 8, 18, 4)], [pause], load(None))
    assert slowdown == 0 and alone == pytest.approx([5.0])
    for end, begin, busy in ((2, 5, 3), (9, 16.2, 4), (12, 16.2, 2), (9, 20, 11), (17, 18, 1)):
        found = workload.between(T0 + end, T0 + begin, [pause])
        assert found == pytest.approx(busy)


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["simulate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_command_shows_all_schedules_and_what_was_measured(run_dir, capsys) -> None:
    code, said = ask(capsys, run_dir, "--devices", 2, "--in-flight", 2)
    assert code == 0
    for name in (*SCHEDULE, "the recorded run, measured", "225.0", "2 in flight, on 2 devices"):
        assert name in said
    code, said = ask(capsys, "--steps", 2, "--devices", 1, "--tool-p99", 3)
    assert code == 0 and "measured" not in said and "need two devices" in said


def test_options_that_do_not_go_together_are_refused(run_dir, tmp_path, capsys) -> None:
    running = RolloutStore(run_dir / "store")
    for arguments, message in (
        (["--in-flight", 99], "at most 24"),
        (["--in-flight", 2], "wait for ever"),
        (["--devices", 0], "--devices must be at least 1"),
        (["--tool", 5, "--tool-p99", 3], "--tool-p99 must be at least 5"),
        ([run_dir, "--turns", 3], "turns: no effect"),
        ([run_dir / "store"], "no metrics of an update"),
        ([run_dir], "in use"),
    ):
        code, said = ask(capsys, *arguments)
        assert code == 2 and message in said, said
    running.close()
