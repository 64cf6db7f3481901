"""Rollouts of examples/swe/offline.yaml with the real mini-SWE-agent: a policy that solves a known
share gets that share."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

import pytest
import ray
from runs import ROOT
from support import Running
from test_harnesses import CONTEXT_TOKENS, MINI, MINI_END

from lightning_ray.config import load
from lightning_ray.gateway import deploy
from lightning_ray.records import FinishedRollout, Outcome, RolloutSpec, Split
from lightning_ray.rollouts import controller
from lightning_ray.tasks.swe import offline, sources
from lightning_ray.tasks.swe.record import RepositoryTask

REPAIR, IDLE, CHEAT = "repair", "idle", "cheat"
PLAN = (REPAIR, IDLE, REPAIR, CHEAT)  # of a task of each package
FORGERY = "from _pytest.python import Function; Function.runtest = lambda self: None"


def command(plan: str, record: RepositoryTask) -> str:
    match plan:
        case "repair":
            return f"git apply <<'PATCH'\n{record.gold_patch}PATCH"
        case "cheat":
            return f"echo '{FORGERY}' >> {record.function.partition('::')[0]}"
    return "python -m pytest -q -o addopts= tests | tail -1"


@pytest.mark.slow
def test_a_policy_that_solves_a_known_share_of_the_tasks_gets_that_share(tmp_path):
    limits = [f"model.max_model_len={CONTEXT_TOKENS}", "sampling.max_tokens=8000"]
    gateway = Running(tmp_path, [["unset"]], *limits)
    gateway.start()
    try:
        config = load(
            ROOT / "examples" / "swe" / "offline.yaml",
            [
                *limits,
                f"run.dir={tmp_path}",
                f"gateway.port={gateway.config.gateway.port}",
                # A model that knows tool calls.
                f"harness.args=[{', '.join(MINI.args)}]",
                f"harness.recipe={MINI.recipe}",
                "rollout.concurrency=2",
                "rollout.retries=0",
                f"rollout.sandbox_require={str(shutil.which('bwrap') is not None).lower()}",
            ],
        )
        specs, scripts = [], {}
        for number, (plan, package) in enumerate(zip(PLAN, sources.packages(), strict=True)):
            task = next(t for t in offline.train() if t.fields["package"] == package)
            ticket = f"Ticket {number}."
            asked = replace(task, statement=f"{task.statement}\n\n{ticket}")
            specs.append(RolloutSpec(f"r{number}", "g", asked, Split.TRAIN, 1))
            work = MINI.call(command(plan, RepositoryTask.from_task(task)))
            scripts[ticket] = ["I will work.\n" + work, MINI.call(MINI_END)]
        ray.get(gateway.engines[0].play.remote(scripts))
        actor = controller.start(config, gateway.store, gateway.url, "share", ())
        ray.get(actor.submit.remote(specs))
        found: dict[str, FinishedRollout] = {}
        deadline = time.monotonic() + 600
        while len(found) < len(specs):
            assert time.monotonic() < deadline, found
            for one in ray.get(actor.next_finished.remote(1.0)):
                found[one.spec.rollout_id] = one
        calls = [len(ray.get(gateway.store.calls.remote(f"{s.rollout_id}-a0"))) for s in specs]
        ray.get(actor.shutdown.remote())
    finally:
        deploy.stop()
        ray.shutdown()
    ended = [found[spec.rollout_id] for spec in specs]
    assert {one.outcome for one in ended} == {Outcome.COMPLETED}, ended
    assert calls == [2] * len(specs)
    rewards = [one.reward for one in ended]
    assert [given.solved for given in rewards] == [plan == REPAIR for plan in PLAN]
    assert [given.metrics["tampered"] for given in rewards] == [plan == CHEAT for plan in PLAN]
    share = sum(given.value for given in rewards) / len(rewards)
    assert share == PLAN.count(REPAIR) / len(PLAN)
