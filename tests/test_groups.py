"""Which groups are in flight, waited for, taken and given up: the schedule without a cluster."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ray.config import ConfigError, load
from lightning_ray.run.groups import FOREIGN, Group, Groups, Limits


def name(place: int) -> str:
    return f"g{place}"


def finish(groups: Groups, *places: int, birth: int = 0, silent: bool = False) -> None:
    for place in places:
        groups.completed(name(place), birth, silent)


def ids(groups: list[Group]) -> list[str]:
    return [group.group_id for group in groups]


def test_synchronous_training_begins_nothing_before_the_update() -> None:
    groups = Groups(Limits(2, 2, 2))
    assert len(groups.begin(5, name)) == 2
    finish(groups, 0)
    assert not groups.begin(5, name) and not groups.ready(0)
    finish(groups, 1)
    assert groups.ready(0) and not groups.late(0)
    assert ids(groups.take(0).groups) == ["g0", "g1"]
    assert ids(groups.begin(4, name)) == ["g2", "g3"]


def test_an_update_takes_the_oldest_complete_groups_and_carries_the_rest_over() -> None:
    groups = Groups(Limits(2, 5, 2))
    groups.begin(9, name)
    groups.born(map(name, range(5)), 0)
    finish(groups, 4, 2)
    assert groups.ready(0) and not groups.late(0)
    assert ids(groups.take(0).groups) == ["g2", "g4"]
    assert ids(groups.live) == ["g0", "g1", "g3"]
    assert ids(groups.begin(8, name)) == ["g5", "g6"]


def test_an_update_waits_for_groups_that_later_ones_could_not_all_take_in_time() -> None:
    groups = Groups(Limits(per_update=2, in_flight=6, max_staleness=2))
    groups.begin(9, name)
    groups.born(map(name, range(6)), 0)
    finish(groups, 0, 1)
    groups.take(0)
    groups.begin(9, name)
    groups.born(["g6", "g7"], 1)
    finish(groups, 6, 7, birth=1)
    # Four of step 0 are left for the updates 1 and 2, two each: the young ones cannot go first.
    assert groups.ready(1) and ids(groups.late(1)) == ["g2", "g3", "g4", "g5"]
    finish(groups, 5, 3)
    assert not groups.late(1)
    assert set(ids(groups.take(1).groups)) == {"g3", "g5"}
    assert groups.ready(2) and ids(groups.late(2)) == ["g2", "g4"]
    finish(groups, 2, 4)
    assert set(ids(groups.take(2).groups)) == {"g2", "g4"}


def test_what_is_too_old_is_given_up_and_its_task_begun_again() -> None:
    groups = Groups(Limits(1, 2, 1))
    groups.begin(9, name)
    groups.born(["g0", "g1"], 0)
    finish(groups, 0)
    groups.take(0)
    groups.begin(9, name)
    finish(groups, 2, birth=1)
    assert ids(groups.late(1)) == ["g1"]
    assert not groups.give_up(1, waited=False)
    [(old, new)] = groups.give_up(1, waited=True)
    assert (old.group_id, new.group_id, new.place) == ("g1", "g1.1", 1)
    assert ids(groups.take(1).groups) == ["g2"]
    groups.completed("g1.1", FOREIGN, False)
    [(old, new)] = groups.give_up(2, waited=False)
    assert (old.group_id, new.group_id) == ("g1.1", "g1.2")


def test_silent_groups_make_room_for_others_as_far_as_refill_goes() -> None:
    groups = Groups(Limits(2, 2, 0, refill=1))
    groups.begin(9, name)
    finish(groups, 0, 1, silent=True)
    assert not groups.ready(0)
    assert ids(groups.begin(9, name)) == ["g2", "g3"]
    finish(groups, 2, silent=True)
    assert not groups.begin(9, name)
    finish(groups, 3)
    taken = groups.take(0)
    assert ids(taken.silent) == ["g0", "g1"] and ids(taken.counted) == ["g2", "g3"]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), st.booleans(), st.integers(0, 1 << 30))
def test_no_group_is_taken_twice_none_is_lost_and_none_is_too_old(
    per_update, staleness, patient, seed
) -> None:
    """Random arrivals, waits that run out, crashes that go back to the last checkpoint."""
    random = Random(seed)
    in_flight = random.randint(per_update, per_update * (staleness + 1))
    limits = Limits(per_update, in_flight, staleness)
    steps = 6
    groups, step, taken = Groups(limits), 0, list[Group]()
    saved = (0, 0, (), ())
    crashes = 2
    while step < steps:
        groups.begin(steps - step, name)
        assert len(groups.live) <= in_flight
        waiting = [group for group in groups.live if not group.complete]
        if waiting:
            some = random.sample(waiting, random.randint(0, len(waiting)))
            groups.born(ids(some), step)
            for group in some:
                if random.random() < 0.5:
                    birth = next(g.birth for g in groups.live if g.group_id == group.group_id)
                    groups.completed(group.group_id, birth, False)
        impatient = not patient and random.random() < 0.1
        given_up = groups.give_up(step, impatient)
        assert not (patient and given_up)
        assert {old.place for old, _ in given_up} == {new.place for _, new in given_up}
        if groups.ready(step) and (impatient or not groups.late(step)):
            found = groups.take(step)
            assert len(found.counted) == per_update
            assert all(step - group.birth <= staleness for group in found.groups)
            taken += found.groups
            step += 1
            saved = (step, groups.next_place, tuple(groups.live), tuple(taken))
        elif crashes and random.random() < 0.05:
            crashes -= 1
            step, place, pending, before = saved
            fresh = tuple(Group(g.place, g.group_id, g.tries) for g in pending)
            groups, taken = Groups(limits, place, fresh), list(before)
    counted = Counter(group.place for group in taken)
    assert set(counted.values()) == {1}
    assert not groups.live
    assert sorted(counted) == list(range(per_update * steps))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["run.groups_in_flight=3"], "wait for ever"),
        (["run.groups_in_flight=13", "run.max_staleness=2"], "at most 12"),
        (["run.drain_s=5"], "no effect"),
        (["run.max_staleness=7"], "no effect"),
    ],
)
def test_schedules_that_cannot_work_are_refused(overrides, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(None, ["run.groups_per_step=4", *overrides])
