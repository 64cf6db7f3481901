"""Numbers of an evaluation, against formulas worked by hand and against brute force."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ray.report import statistics
from lightning_ray.report.statistics import Estimate, Tally, compare, mean_of_tasks, wilson

tallies = st.integers(1, 8).flatmap(lambda n: st.builds(Tally, st.integers(0, n), st.just(n)))
binary = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12)


def by_task(tallies: list[Tally]) -> dict[str, Tally]:
    return {f"t{number}": tally for number, tally in enumerate(tallies)}


# pass@k


@given(tallies, st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_rollouts_that_hold_a_solved_one(
    tally: Tally, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, tally.rollouts))
    rollouts = [number < tally.solved for number in range(tally.rollouts)]
    choices = list(itertools.combinations(rollouts, k))
    assert statistics.pass_at_k(tally, k) == pytest.approx(
        float(Fraction(sum(map(any, choices)), len(choices)))
    )


@pytest.mark.parametrize(
    ("solved", "rollouts", "k", "by_hand"),
    [
        (1, 5, 1, 0.2),
        (2, 5, 2, 1 - 3 / 10),  # 3 of the 10 pairs are of the three unsolved
        (3, 10, 5, 1 - 21 / 252),
        (0, 4, 4, 0.0),
        (1, 4, 4, 1.0),
        (100, 200, 100, 1.0),  # no overflow, and no product of many small factors
    ],
)
def test_pass_at_k_by_hand(solved: int, rollouts: int, k: int, by_hand: float) -> None:
    assert statistics.pass_at_k(Tally(solved, rollouts), k) == pytest.approx(by_hand)


def test_more_rollouts_than_there_are_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match="pass@3 of a task with 2 rollouts"):
        statistics.pass_at_k(Tally(1, 2), 3)


def test_a_task_that_lost_rollouts_is_left_out_of_the_pass_at_k_it_has_too_few_for() -> None:
    found = statistics.mean_pass_at_k([Tally(1, 4), Tally(1, 2)], 3)
    assert (found.tasks, found.value) == (1, 0.75)


# Intervals


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_with_one_rollout_a_task_the_interval_is_wilsons(solved: list[bool]) -> None:
    found = mean_of_tasks([float(one) for one in solved], len(solved))
    assert (found.low, found.high) == pytest.approx(wilson(sum(solved), len(solved)))


@given(st.lists(tallies, min_size=1, max_size=30))
def test_an_interval_is_never_narrower_than_of_independent_rollouts_nor_wider_than_of_tasks(
    some: list[Tally],
) -> None:
    found = statistics.mean_pass_at_k(some, 1)
    rollouts = sum(tally.rollouts for tally in some)
    narrow = wilson(found.value * rollouts, rollouts)
    wide = wilson(found.value * len(some), len(some))
    assert wide[0] - 1e-9 <= found.low <= narrow[0] + 1e-9
    assert narrow[1] - 1e-9 <= found.high <= wide[1] + 1e-9
    assert found.low <= found.value <= found.high and found.low < found.high


def test_rollouts_of_the_same_task_that_always_agree_count_once() -> None:
    found = statistics.mean_pass_at_k([Tally(8, 8)] * 5 + [Tally(0, 8)] * 5, 1)
    assert (found.low, found.high) == pytest.approx(wilson(5, 10))


def test_the_design_effect_by_hand() -> None:
    # Rates 0, 1/2, 1: mean 1/2, variance 1/4 among tasks, 1/12 of the mean: 3 independent trials.
    # Rates 1/4, 1/2, 3/4: 1/16 among tasks, 1/48 of the mean: 12 trials.
    for rates, trials in (([0, 0.5, 1], 3), ([0.25, 0.5, 0.75], 12)):
        found = mean_of_tasks(rates, 12)
        assert (found.low, found.high) == pytest.approx(wilson(trials / 2, trials))


def test_no_task_says_nothing() -> None:
    found = mean_of_tasks([], 0)
    assert math.isnan(found.value) and (found.low, found.high, found.tasks) == (0, 1, 0)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("alpha_beta", [(0.3, 0.6), (4, 1), (0.2, 6)])
def test_the_intervals_hold_the_truth_about_as_often_as_they_say(
    samples: int, alpha_beta: tuple[float, float]
) -> None:
    """60 tasks whose difficulty is Beta distributed; the second model is better on each."""
    rng, truth = np.random.default_rng(0), alpha_beta[0] / sum(alpha_beta)
    times, held, held_difference = 300, 0, 0
    for _ in range(times):
        rate = rng.beta(*alpha_beta, 60)
        better = rate + 0.2 * (1 - rate)
        first, second = (
            by_task([Tally(int(s), samples) for s in rng.binomial(samples, p)])
            for p in (rate, better)
        )
        found = compare(first, second)
        held += found.first.low <= truth <= found.first.high
        held_difference += found.difference.low <= 0.2 * (1 - truth) <= found.difference.high
    # 95 % promised; three standard errors of 300 tries are 3.8 %.
    assert held >= 0.912 * times
    assert held_difference >= 0.912 * times


# Two models


def test_a_comparison_by_hand() -> None:
    """Newcombe's method 10 for 20 tasks: 8 solved by both, 1 by the first, 7 by the second only."""
    pairs = [(1, 1)] * 8 + [(1, 0)] + [(0, 1)] * 7 + [(0, 0)] * 4
    first, second = (by_task([Tally(pair[i], 1) for pair in pairs]) for i in (0, 1))
    found = compare(first, second)
    (l1, u1), (l2, u2) = wilson(9, 20), wilson(15, 20)
    phi = (8 * 4 - 1 * 7 - 20 / 2) / math.sqrt(9 * 11 * 15 * 5)
    below = math.sqrt((0.75 - l2) ** 2 - 2 * phi * (0.75 - l2) * (u1 - 0.45) + (u1 - 0.45) ** 2)
    above = math.sqrt((u2 - 0.75) ** 2 - 2 * phi * (u2 - 0.75) * (0.45 - l1) + (0.45 - l1) ** 2)
    assert found.difference == Estimate(
        pytest.approx(0.3), pytest.approx(0.3 - below), pytest.approx(0.3 + above), 20
    )
    assert (found.better, found.worse, found.equal) == (7, 1, 12)
    assert found.p_value == pytest.approx(2 * (1 + 8) / 2**8)  # exact McNemar, 7 against 1


few = st.integers(1, 3).flatmap(lambda n: st.builds(Tally, st.integers(0, n), st.just(n)))


def dealt(first: Tally, second: Tally) -> list[Fraction]:
    """The difference of the rates for each choice of the second model's rollouts, one by one."""
    solved = first.solved + second.solved
    found = []
    for mine in itertools.combinations(range(first.rollouts + second.rollouts), second.rollouts):
        won = sum(number < solved for number in mine)
        found.append(Fraction(won, second.rollouts) - Fraction(solved - won, first.rollouts))
    return found


@settings(deadline=None)
@given(st.lists(st.tuples(few, few), min_size=1, max_size=3))
def test_the_p_value_counts_every_way_to_deal_the_rollouts(
    pairs: list[tuple[Tally, Tally]],
) -> None:
    ways = [abs(sum(way)) for way in itertools.product(*(dealt(*pair) for pair in pairs))]
    seen = abs(
        sum(Fraction(b.solved, b.rollouts) - Fraction(a.solved, a.rollouts) for a, b in pairs)
    )
    share = sum(way >= seen for way in ways) / len(ways)
    assert statistics.permutation(pairs) == pytest.approx(share)


@pytest.mark.parametrize("samples", [(1, 8), (4, 4), (2, 7)])
def test_models_that_are_alike_differ_significantly_as_seldom_as_promised(
    samples: tuple[int, int],
) -> None:
    rng, times = np.random.default_rng(0), 400
    significant = 0
    for _ in range(times):
        rates = np.full(20, 0.05)
        first, second = (
            by_task([Tally(int(solved), n) for solved in rng.binomial(n, rates)]) for n in samples
        )
        significant += compare(first, second).p_value <= 0.05
    assert significant <= 0.083 * times  # 5 % promised, and three standard errors of 400 tries


@settings(deadline=None)
@given(st.lists(st.tuples(tallies, tallies), min_size=1, max_size=12))
def test_the_order_of_the_models_changes_signs_only(pairs: list[tuple[Tally, Tally]]) -> None:
    first, second = (by_task([pair[i] for pair in pairs]) for i in (0, 1))
    there, back = compare(first, second), compare(second, first)
    assert there.difference.value == pytest.approx(-back.difference.value)
    assert there.difference.low == pytest.approx(-back.difference.high)
    assert there.p_value == pytest.approx(back.p_value)
    assert (there.better, there.worse) == (back.worse, back.better)
    assert -1 <= there.difference.low <= there.difference.value + 1e-9
    assert there.difference.value - 1e-9 <= there.difference.high <= 1


@given(binary)
def test_of_equal_results_nothing_is_significant(pairs: list[tuple[bool, bool]]) -> None:
    results = by_task([Tally(int(one), 1) for one, _ in pairs])
    found = compare(results, results)
    assert found.p_value == 1 and found.equal == len(pairs)
    assert found.difference.low < 0 < found.difference.high


def test_only_tasks_that_both_have_are_compared() -> None:
    found = compare({"a": Tally(1, 1), "b": Tally(0, 1)}, {"b": Tally(1, 1), "c": Tally(0, 1)})
    assert (found.difference.tasks, found.difference.value) == (1, 1.0)
    with pytest.raises(ValueError, match="no task in common"):
        compare({"a": Tally(1, 1)}, {"b": Tally(1, 1)})


def test_tasks_with_odd_numbers_of_rollouts_are_rounded_by_less_than_a_hundredth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = by_task([Tally(3, n) for n in (11, 13, 17, 19)])
    second = by_task([Tally(6, n) for n in (11, 13, 17, 19)])
    rounded = compare(first, second).p_value
    monkeypatch.setattr(statistics, "MOST_STEPS", 11 * 13 * 17 * 19)
    assert rounded == pytest.approx(compare(first, second).p_value, abs=0.01)
