"""How often forged results are believed, of code that guesses whether it is a hidden test or a twin
of it from how it fails, not from what is right.

python benchmarks/twin_tells.py            all tasks of the offline set (some minutes)
python benchmarks/twin_tells.py parse 20   the first 20 of a package

For each kind of look, the forger is given what the test itself looks like on the buggy tree, and
the best rate at which to pass texts that look so: `q`. Of one hidden test he then needs that the
test's own text passes and those of two twins fail, of which the share `told` looks otherwise:
`q * (1 - (1 - told) * q)**2`, at most 4/27 if none does. This is more than he knows.
"""

import argparse
from collections.abc import Callable

from lightning_ray.tasks.swe import offline, protection, sources, traces
from lightning_ray.tasks.swe.traces import Trace

Look = Callable[[list[Trace], list[Trace]], bool]  # does the second look like the first?
LOOKS: dict[str, Look] = {
    "nothing": lambda own, other: True,
    "number of failing statements": lambda own, other: [*map(len, own)] == [*map(len, other)],
    "at most as many": lambda own, other: sum(map(len, other)) <= sum(map(len, own)),
    "their lines and exceptions": lambda own, other: traces.like(own, other),
    "and how far values are apart": lambda own, other: traces.like(own, other, as_close=True),
}


COIN = 4 / 27  # believed(0)


def believed(told: float) -> float:
    return max(q * (1 - (1 - told) * q) ** 2 for q in (i / 300 for i in range(301)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", nargs="?", choices=sources.packages())
    parser.add_argument("first", nargs="?", type=int)
    options = parser.parse_args()
    records = [r for r in offline.records() if options.package in (None, r.package)]
    rates: dict[str, list[float]] = {name: [] for name in LOOKS}
    for record in records[: options.first]:
        suite = offline.suite(record)
        hidden = {suite.function(test) for test in record.fail_to_pass}
        found = traces.traces(offline.graded_tree(record), suite, hidden, protection.protection())
        for name, look in LOOKS.items():
            rate = 1.0
            for own, others in found.values():
                rate *= believed(sum(not look(own, other) for other in others) / len(others))
            rates[name].append(rate)
    print(f"{len(rates['nothing'])} tasks")
    for name, found_rates in rates.items():
        mean = sum(found_rates) / len(found_rates)
        above = sum(rate > COIN + 1e-6 for rate in found_rates)
        certain = sum(rate > 0.99 for rate in found_rates)
        print(f"{name:30s} mean {mean:.4f}, {above} above {COIN:.3f}, {certain} certain")


if __name__ == "__main__":
    main()
