"""The decisions of a run, without a cluster: phases, task order, checkpoints on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_samples import rollout

from lightning_ray.config import ConfigError
from lightning_ray.records import Outcome, PolicyVersion, RolloutSpec, RolloutState, Task
from lightning_ray.run import checkpoint, data
from lightning_ray.run.checkpoint import Checkpoints, State
from lightning_ray.run.collection import check_faults
from lightning_ray.run.cycle import Phase, Plan, Position
from lightning_ray.run.groups import Group
from lightning_ray.run.waiting import RunError

PENDING = (Group(3, "p3"), Group(4, "p4.1", tries=1, birth=2))

plans = st.builds(Plan, st.integers(1, 12), st.integers(1, 5), st.integers(0, 5), st.booleans())


def walk(plan: Plan, position: Position) -> list[Position]:
    seen = [position]
    while seen[-1].phase is not Phase.DONE:
        seen.append(plan.following(seen[-1]))
        assert len(seen) < 200
    return seen


@given(plans)
def test_every_step_collects_updates_and_syncs_once(plan):
    seen = walk(plan, plan.first())
    for phase in (Phase.COLLECT, Phase.DRAIN, Phase.UPDATE):
        assert [p.step for p in seen if p.phase is phase] == list(range(plan.steps))
    assert [p.step for p in seen if p.phase is Phase.SYNC] == list(range(1, plan.steps + 1))


@given(plans)
def test_the_gate_is_closed_from_drain_to_sync_and_open_when_model_calls_are_wanted(plan):
    closed = False
    for position in walk(plan, plan.first()):
        match position.phase:
            case Phase.DRAIN:
                assert not closed
                closed = True
            case Phase.UPDATE | Phase.CHECKPOINT:
                assert closed
            case Phase.SYNC:
                assert closed
                closed = False
            case Phase.COLLECT | Phase.VALIDATE | Phase.DONE:
                assert not closed


@given(plans)
def test_a_validated_step_is_checkpointed_first_and_the_last_step_always(plan):
    seen = walk(plan, plan.first())
    saved = [p.step for p in seen if p.phase is Phase.CHECKPOINT]
    validated = [p.step for p in seen if p.phase is Phase.VALIDATE]
    assert saved[-1] == plan.steps
    assert set(validated) - {0} <= set(saved)
    assert (0 in validated and plan.steps in validated) == plan.has_validation


@given(plans, st.integers(1, 6))
def test_a_resumed_run_visits_what_the_first_one_would_have(plan, more):
    seen = walk(plan, plan.first())
    for number, position in enumerate(seen):
        if position.phase is Phase.CHECKPOINT:
            stored = plan.after_sync(position.step)
            assert walk(plan, plan.resumed(stored)) == seen[number + 2 :]
    longer = Plan(
        plan.steps + more, plan.checkpoint_every, plan.validate_every, plan.has_validation
    )
    assert longer.resumed(Position(plan.steps, Phase.DONE)) == Position(plan.steps, Phase.COLLECT)


@given(st.integers(1, 30), st.integers(0, 5), st.integers(1, 7))
def test_an_epoch_takes_every_task_once_whatever_the_step_size(count, seed, step):
    chosen: list[int] = []
    while len(chosen) < 2 * count:
        chosen += data.order(count, seed, len(chosen), step)
    assert sorted(chosen[:count]) == sorted(chosen[count : 2 * count]) == list(range(count))


def test_ids_of_a_group_depend_on_the_lineage_that_samples_it_and_its_task_on_the_place():
    tasks = [Task(f"t{i}", "s") for i in range(5)]

    def specs(place: int, lineage: str) -> list[RolloutSpec]:
        group = Group(place, data.group_name(place, PolicyVersion(lineage, 2)))
        return data.training_specs(tasks, group, [f"{group.group_id}-r{k}" for k in range(4)], 0, 3)

    one, again, other, more = specs(3, "aa"), specs(3, "aa"), specs(3, "bb"), specs(4, "aa")
    assert one == again
    assert not {s.rollout_id for s in one} & {s.rollout_id for s in [*other, *more]}
    assert [s.task for s in one] == [s.task for s in other] != [s.task for s in more]
    assert len({s.group_id for s in one}) == 1 and len({s.rollout_id for s in one}) == 4


def test_weights_descend_from_those_before_a_rollback_but_not_from_lost_ones():
    earlier = (PolicyVersion("a", 3), PolicyVersion("b", 5))
    state = State(Position(7, Phase.COLLECT), PolicyVersion("c", 7), "", 0, ancestry=earlier)
    for version, expected in [
        (PolicyVersion("a", 3), True),
        (PolicyVersion("a", 4), False),
        (PolicyVersion("b", 4), True),
        (PolicyVersion("c", 7), True),
        (PolicyVersion("d", 1), False),
    ]:
        assert state.descends_from(version) == expected


def test_bad_task_files_name_the_line(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"task_id": "a", "statement": "s", "x": 1}) + "\n{oops\n")
    with pytest.raises(ConfigError, match="line 2"):
        data.load_tasks(str(path), "task.train")
    path.write_text('{"task_id": "a", "statement": "s", "x": 1}\n')
    assert data.load_tasks(str(path), "task.train") == [Task("a", "s", {"x": 1})]
    path.write_text('{"task_id": "a", "statement": "s"}\n' * 2)
    with pytest.raises(ConfigError, match="twice"):
        data.load_tasks(str(path), "task.train")
    for source in ("no.such.module:f", "json:nothing", str(tmp_path / "absent.jsonl")):
        with pytest.raises(ConfigError, match=r"task\.train"):
            data.load_tasks(source, "task.train")


def write(checkpoints: Checkpoints, step: int) -> None:
    state = State(
        Position(step, Phase.COLLECT), PolicyVersion("l", step), "sum", 4, ("g",), PENDING
    )

    def fill(folder):
        (folder / "weights").write_text(str(step))
        return state

    checkpoints.write(step, fill)


def test_checkpoints_come_back_and_old_ones_go_but_the_best_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in range(1, 6):
        write(checkpoints, step)
        if step == 1:
            checkpoints.mark_best(step, 0.9)
    checkpoints.mark_best(5, 0.5)
    folder, state = checkpoints.latest()
    assert (folder / "weights").read_text() == "5"
    assert state == State(
        Position(5, Phase.COLLECT), PolicyVersion("l", 5), "sum", 4, ("g",), PENDING
    )
    assert sorted(p.name for p in folder.parent.glob("step-*")) == [
        "step-00001",
        "step-00004",
        "step-00005",
    ]
    assert checkpoints.best()[0].name == "step-00001"


def test_a_checkpoint_that_was_cut_off_is_not_seen(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)

    def killed(folder):
        (folder / "weights").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(2, killed)
    again = Checkpoints(tmp_path, keep=2)
    assert again.latest()[1].version.step == 1
    write(again, 2)
    assert again.latest()[1].version.step == 2
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_a_checkpoint_whose_removal_was_cut_off_is_not_seen(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1)

    def killed(folder):
        (folder / "weights").unlink(missing_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(checkpoints, 2)
    monkeypatch.undo()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00001.partial", "step-00002"]
    assert Checkpoints(tmp_path, keep=1).latest()[1].version.step == 2


def test_a_step_that_lost_too_much_to_infrastructure_stops_with_a_diagnosis():
    good, lost = rollout("good", "g", 1.0), rollout("lost", "g", None)
    cancelled = replace(lost, state=RolloutState.CANCELLED, outcome=Outcome.CANCELLED)
    check_faults([good, lost], 0.5, Path("run"))
    check_faults([good, cancelled, cancelled], 0.5, Path("run"))  # nobody's fault
    with pytest.raises(
        RunError, match=r"2 of 3 rollouts have no reward .*2 x node_lost.* lost: node"
    ):
        check_faults([good, lost, lost], 0.5, Path("run"))
