"""What a person is told while a run goes on, and how often."""

from __future__ import annotations

from lightning_ray.run.telling import AGAIN_S, Telling, nothing_to_learn
from lightning_ray.samples.rows import Fate


def test_each_node_that_lacks_something_is_named_once() -> None:
    said: list[str] = []
    telling = Telling(said.append)
    telling.know({"head": "no bubblewrap"})
    telling.sandboxes({"head": "no bubblewrap"})
    assert said == []
    for _ in range(3):
        telling.sandboxes({"head": "no bubblewrap", "a": "no namespaces", "b": "no namespaces"})
    assert said == ["sandbox: node a: no namespaces", "sandbox: node b: the same"]
    telling.sandboxes({"pods of default": "no NetworkPolicy"})
    assert said[-1] == "sandbox: pods of default: no NetworkPolicy"


def test_counts_that_change_are_no_news_and_new_reasons_are() -> None:
    said: list[tuple[int, str]] = []
    now = 0
    telling = Telling(lambda text: said.append((now, text)))
    for now in range(60):
        reasons = [f"{60 - now} x its pod is starting"]
        if now >= 20:
            reasons += [f"{now} x Unschedulable: 0/{now % 7} nodes are available"]
        # For a moment nothing is waited for: that makes no reason new.
        telling.pods("" if now == 10 else "; ".join(reasons), float(now))
    assert [at for at, _ in said] == [0, 20, 50]
    assert AGAIN_S == 30
    assert said[1][1].startswith("pods: 40 x its pod is starting; 20 x Unschedulable")


def test_an_api_server_that_is_away_is_not_news_each_second() -> None:
    said: list[str] = []
    telling = Telling(said.append)
    for now in range(25):
        telling.pods(f"no answer since 12:00:0{now % 10} (<Connection at 0x7f{now:02x}>)", now)
    assert len(said) == 1


def test_a_batch_that_trains_nothing_says_why() -> None:
    none = {f"ledger/{fate}": 0.0 for fate in Fate}
    same = none | {"ledger/zero_advantage": 40.0, "ledger/infra": 8.0}
    assert nothing_to_learn(3, same).startswith("step 3 trains nothing: the rollouts of each group")
    assert "no rollout has a reward" in nothing_to_learn(3, none | {"ledger/infra": 8.0})
    assert "most of its tokens are side" in nothing_to_learn(3, none | {"ledger/side": 8.0})
    assert nothing_to_learn(3, same | {"ledger/trained": 1.0}) == ""
