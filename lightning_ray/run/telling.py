"""What is told to a person, and when again: pure, so that a console of a long run stays readable.

A node's missing sandbox is told once, in full where no other node lacked the same. What pods wait
for is told when a reason is new, and again every `AGAIN_S` seconds; counts change with each pod
and are no news.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from lightning_ray.samples.rows import Fate

# Seconds until the same reason is told again: often enough to see that the wait goes on.
AGAIN_S = 30.0
# Counts, times and addresses of objects in a message: they change while the reason stays.
_CHANGING = re.compile(r"0x[0-9a-f]+|[0-9]+")

_WITHOUT_TRAINING = {
    Fate.ZERO_ADVANTAGE: "the rollouts of each group got the same reward (easier or harder tasks, "
    "a larger rollout.n, or algorithm.refill would help)",
    Fate.INFRA: "no rollout has a reward (outcomes/ in its metrics says why)",
}


def nothing_to_learn(step: int, statistics: Mapping[str, float]) -> str:
    """Why the batch of a step trains no token; empty if it trains some."""
    tokens = {fate: statistics[f"ledger/{fate}"] for fate in Fate}
    if tokens[Fate.TRAINED]:
        return ""
    most = max(Fate, key=tokens.__getitem__)
    why = _WITHOUT_TRAINING.get(most, f"most of its tokens are {most} (ledger/ in its metrics)")
    return f"step {step} trains nothing: {why}"


class Telling:
    """See the module."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._told = say, dict[str, str]()
        self._reasons: dict[str, float] = {}  # when each was told

    def know(self, lacks: Mapping[str, str]) -> None:
        """What was told elsewhere of nodes that lack something."""
        self._told |= lacks

    def sandboxes(self, lacks: Mapping[str, str]) -> None:
        """What nodes lack of the sandbox."""
        for node, lack in lacks.items():
            if self._told.get(node) != lack:
                known = lack in self._told.values()
                where = node if " " in node else f"node {node}"  # a name, or what pods they are
                self._say(f"sandbox: {where}: {'the same' if known else lack}")
                self._told[node] = lack

    def pods(self, trouble: str, now: float) -> None:
        """What pods wait for; empty if for nothing. `now` in seconds."""
        reasons = {_CHANGING.sub("", reason) for reason in trouble.split("; ") if reason}
        if any(now - self._reasons.get(reason, -math.inf) >= AGAIN_S for reason in reasons):
            self._say(f"pods: {trouble}")
            self._reasons |= dict.fromkeys(reasons, now)
