"""What is told to a person, and when again: pure, so that a console of a long run stays readable.

A node's missing sandbox is told once, in full where no other node lacked the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Telling:
    """See the module. `told` is what is known already of nodes that lack something."""

    def __init__(self, say: Callable[[str], None], told: Mapping[str, str]) -> None:
        self._say, self._told = say, dict(told)

    def sandboxes(self, lacks: Mapping[str, str]) -> None:
        """What nodes lack of the sandbox."""
        for node, lack in lacks.items():
            if self._told.get(node) != lack:
                known = lack in self._told.values()
                self._say(f"sandbox: node {node}: {'the same' if known else lack}")
                self._told[node] = lack
