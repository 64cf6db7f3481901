"""What a person is told while a run goes on, and how often."""

from __future__ import annotations

from lightning_ray.run.telling import Telling


def test_each_node_that_lacks_something_is_named_once() -> None:
    said: list[str] = []
    telling = Telling(said.append, {"head": "no bubblewrap"})
    telling.sandboxes({"head": "no bubblewrap"})
    assert said == []
    for _ in range(3):
        telling.sandboxes({"head": "no bubblewrap", "a": "no namespaces", "b": "no namespaces"})
    assert said == ["sandbox: node a: no namespaces", "sandbox: node b: the same"]
