"""What an evaluation's numbers are worth: pass@k, intervals, and the comparison of two models.

The unit is the task. Rollouts of one task resemble each other, so an interval over rollouts would
be too narrow; here every task gives one value (its share of solved rollouts, its pass@k), each
counts the same, and the spread between tasks is what the interval comes from. Everything is in
closed form or exact: no resampling, no seed, and the same numbers every time.

Invariants: an interval is within 0 and 1 (a difference's within -1 and 1), contains its estimate
and has a width also where all tasks agree; with one rollout a task it is Wilson's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Two-sided 95 % of the standard normal distribution.
Z_95 = 1.959964
# Differences between solve rates are multiples of 1/n. The exact test needs a common n; beyond this
# one (rollouts were lost, so that tasks have 3, 5, 7 and 8, say) it rounds to multiples of it.
MOST_STEPS = 840


@dataclass(frozen=True)
class Estimate:
    """A mean over `tasks` tasks with its 95 % interval."""

    value: float
    low: float
    high: float
    tasks: int


@dataclass(frozen=True)
class Tally:
    """The graded rollouts of one task: `solved` of `rollouts`.

    Raises:
        ValueError: that cannot be.
    """

    solved: int
    rollouts: int

    def __post_init__(self) -> None:
        if not 0 <= self.solved <= self.rollouts:
            raise ValueError(f"{self.solved} solved of {self.rollouts} rollouts")

    @property
    def rate(self) -> float:
        return self.solved / self.rollouts


@dataclass(frozen=True)
class Comparison:
    """The second model against the first, over the tasks that both have rollouts of. `difference`
    is that of pass@1; `p_value` is two-sided; `better`, `worse` and `equal` count tasks."""

    first: Estimate
    second: Estimate
    difference: Estimate
    p_value: float
    better: int
    worse: int
    equal: int


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """The 95 % score interval of a binomial proportion.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22
    (1927), as equation (4) in Brown, Cai and DasGupta, "Interval estimation for a binomial
    proportion", Statistical Science 16 (2001), who recommend it for small samples.

    Raises:
        ValueError: `successes` is not between 0 and `trials`.

    >>> tuple(round(bound, 3) for bound in wilson(31, 32))
    (0.843, 0.994)
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials")
    if trials == 0:
        return 0.0, 1.0
    rate, z2 = successes / trials, Z_95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(tally: Tally, k: int) -> float:
    """The chance that at least one of `k` rollouts solves a task, without bias: 1 - C(n-c, k) /
    C(n, k). Chen et al., "Evaluating large language models trained on code" (2021), equation 1.

    Raises:
        ValueError: the task has fewer than `k` rollouts.

    >>> pass_at_k(Tally(1, 4), 2)
    0.5
    """
    if not 1 <= k <= tally.rollouts:
        raise ValueError(f"pass@{k} of a task with {tally.rollouts} rollouts")
    unsolved = tally.rollouts - tally.solved
    return 1 - math.comb(unsolved, k) / math.comb(tally.rollouts, k)


def mean_pass_at_k(tallies: Sequence[Tally], k: int) -> Estimate:
    """Mean pass@k of the tasks that have `k` rollouts or more, with its interval."""
    enough = [tally for tally in tallies if tally.rollouts >= k]
    values = [pass_at_k(tally, k) for tally in enough]
    return mean_of_tasks(values, sum(tally.rollouts for tally in enough))


def mean_of_tasks(values: Sequence[float], rollouts: int) -> Estimate:
    """The mean of one value per task, each between 0 and 1, and its 95 % interval: Wilson's, with
    the number of independent trials that would spread as much (p (1-p) / variance of the mean), at
    least the tasks and at most the `rollouts`.

    Franco, Little, Louis and Slud, "Comparative study of confidence intervals for proportions in
    complex sample surveys", J. Survey Statistics and Methodology 7 (2019), who recommend it for
    clusters, also where they are few or the proportion is near 0 or 1.

    >>> mean_of_tasks([1, 0, 1, 1], 4) == Estimate(0.75, *wilson(3, 4), 4)
    True
    """
    count = len(values)
    if not count:
        return Estimate(math.nan, 0.0, 1.0, 0)
    mean = min(1.0, math.fsum(values) / count)
    binomial, variance = mean * (1 - mean), 0.0
    if count > 1:
        variance = float(np.var(values, ddof=1)) / count
    if count == 1 or not binomial:
        trials: float = count  # nothing says how much rollouts of one task differ
    else:
        trials = max(count, min(rollouts, binomial / variance if variance else math.inf))
    low, high = wilson(mean * trials, trials)
    return Estimate(mean, min(low, mean), max(high, mean), count)


def compare(first: Mapping[str, Tally], second: Mapping[str, Tally]) -> Comparison:
    """The second model against the first on the same tasks (tallies by task id).

    The interval of the difference is put together from those of both rates and the correlation of
    the tasks' rates: G. Zou and A. Donner, "Construction of confidence limits about effect
    measures", Statistics in Medicine 27 (2008), equation 7; with one rollout a task it is R. G.
    Newcombe's method 10 for paired proportions (Statistics in Medicine 17, 1998), his continuity
    correction of the correlation included. The p-value is that of `permutation`.

    Raises:
        ValueError: they have no task in common.
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ValueError("the two evaluations have no task in common")
    pairs = [(first[task], second[task]) for task in shared]
    one, two = (mean_pass_at_k([pair[i] for pair in pairs], 1) for i in (0, 1))
    rates = np.array([[pair[i].rate for pair in pairs] for i in (0, 1)])
    spread = rates.std(axis=1)
    covariance = float(np.mean(np.prod(rates - rates.mean(axis=1, keepdims=True), axis=0)))
    if covariance > 0:
        rollouts = sum(a.rollouts + b.rollouts for a, b in pairs) / 2
        covariance = max(0.0, covariance - 1 / (2 * rollouts))
    correlation = covariance / float(np.prod(spread)) if spread.all() else 0.0
    difference = two.value - one.value

    def reach(of_second: float, of_first: float) -> float:
        together = of_second**2 + of_first**2 - 2 * correlation * of_second * of_first
        return math.sqrt(max(0.0, together))

    low = difference - reach(two.value - two.low, one.high - one.value)
    high = difference + reach(two.high - two.value, one.value - one.low)
    # Multiplied out: rates of unequal numbers of rollouts are compared without rounding.
    ahead = [b.solved * a.rollouts - a.solved * b.rollouts for a, b in pairs]
    return Comparison(
        one,
        two,
        Estimate(difference, max(-1.0, low), min(1.0, high), len(shared)),
        permutation(pairs),
        better=sum(d > 0 for d in ahead),
        worse=sum(d < 0 for d in ahead),
        equal=sum(d == 0 for d in ahead),
    )


def permutation(pairs: Sequence[tuple[Tally, Tally]]) -> float:
    """The two-sided p-value of the difference of two models' rates: the share of all ways to deal
    each task's rollouts to the two models, as many to each as it has, whose mean difference is at
    least as far from 0. Exact, by counting every sum.

    R. A. Fisher, "The design of experiments" (1935), section 21; E. S. Edgington, "Randomization
    tests". Within a task the solved rollouts that a model is dealt are hypergeometric, which holds
    for unequal numbers of rollouts, too; with one rollout a task it is the exact McNemar test.

    >>> won, lost = (Tally(0, 1), Tally(1, 1)), (Tally(1, 1), Tally(0, 1))
    >>> permutation([won] * 5 + [lost])  # McNemar with 5 and 1: 2 * (1 + 6) / 2 ** 6
    0.21875
    """
    whole = min(MOST_STEPS, math.lcm(*{tally.rollouts for pair in pairs for tally in pair}))
    chance = np.ones(1)  # of each sum of differences, in steps of 1 / whole, from `least`
    least = seen = 0
    for first, second in pairs:
        n, m = first.rollouts, second.rollouts
        solved = first.solved + second.solved
        dealt = range(max(0, solved - n), min(m, solved) + 1)  # solved ones, to the second model
        steps = {k: round(whole * (k * n - (solved - k) * m) / (n * m)) for k in dealt}
        seen += steps[second.solved]
        least += (lowest := min(steps.values()))
        after = np.zeros(len(chance) + max(steps.values()) - lowest)
        for k, step in steps.items():
            share = math.comb(m, k) * math.comb(n, solved - k) / math.comb(n + m, solved)
            after[step - lowest :][: len(chance)] += chance * share
        chance = after
    sums = np.abs(np.arange(least, least + len(chance)))
    return min(1.0, float(chance[sums >= abs(seen)].sum()))


def powers_of_two(most: int) -> list[int]:
    """The `k` worth a line: 1, 2, 4, ... and `most` itself.

    >>> powers_of_two(6)
    [1, 2, 4, 6]
    """
    powers = [1 << bit for bit in range(max(1, most).bit_length())]
    return sorted({*powers, most}) if most > 0 else []
