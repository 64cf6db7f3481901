"""The real mini-SWE-agent on offline tasks: a policy that solves a known share gets that share."""

from __future__ import annotations

import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import ray
from support import Running
from test_harnesses import CONTEXT_TOKENS, MINI, MINI_END

from lightning_ray.gateway import deploy
from lightning_ray.records import Outcome, Reward, Task
from lightning_ray.rollouts import grading, harness, local
from lightning_ray.rollouts.grading import Episode, GradeRequest
from lightning_ray.rollouts.process import Limits
from lightning_ray.rollouts.sandbox import Wanted
from lightning_ray.tasks.swe import offline
from lightning_ray.tasks.swe.record import RepositoryTask

REPAIR, IDLE, CHEAT = "repair", "idle", "cheat"
PLAN = (REPAIR, IDLE, REPAIR, CHEAT)
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
    gateway = Running(
        tmp_path,
        [["unset"]],
        f"model.max_model_len={CONTEXT_TOKENS}",
        "sampling.max_tokens=8000",
    )
    gateway.start()
    try:
        chosen = [t for t in offline.train() if t.fields["package"] == "parse"][: len(PLAN)]
        assert len(chosen) == len(PLAN)
        tasks = [
            replace(task, statement=f"{task.statement}\n\nTicket {number}.")
            for number, task in enumerate(chosen)
        ]
        scripts = {
            f"Ticket {number}.": [
                "I will work.\n" + MINI.call(command(plan, RepositoryTask.from_task(task))),
                MINI.call(MINI_END),
            ]
            for number, (plan, task) in enumerate(zip(PLAN, chosen, strict=True))
        }
        ray.get(gateway.engines[0].play.remote(scripts))
        requests = [asked(gateway, tmp_path / str(n), task) for n, task in enumerate(tasks)]
        spawn = multiprocessing.get_context("spawn")  # an attempt wants a main thread
        with ProcessPoolExecutor(2, mp_context=spawn) as pool:
            results = list(pool.map(local.run_attempt, requests))
        rewards = [
            reward(gateway, request, result)
            for request, result in zip(requests, results, strict=True)
        ]
    finally:
        deploy.stop()
        ray.shutdown()
    assert [given.solved for given in rewards] == [plan == REPAIR for plan in PLAN]
    assert [given.metrics["tampered"] for given in rewards] == [plan == CHEAT for plan in PLAN]
    share = sum(given.value for given in rewards) / len(rewards)
    assert share == PLAN.count(REPAIR) / len(PLAN)


def asked(gateway: Running, folder, task: Task) -> local.AttemptRequest:
    attempt_id = gateway.attempt()
    return local.AttemptRequest(
        attempt_id=attempt_id,
        task=task,
        recipe=harness.load(MINI.recipe, MINI.args),
        root_url=f"{gateway.url}/rollout/{attempt_id}",
        model="policy",
        context_tokens=CONTEXT_TOKENS,
        limits=Limits(timeout_s=240, memory_mib=6000),
        log_dir=folder / "a",
        prepare="lightning_ray.tasks.swe.repository:prepare",
        collect="lightning_ray.tasks.swe.repository:collect",
        keep_workspaces=False,
        api_key="secret",
        sandbox=Wanted(require=shutil.which("bwrap") is not None),
    )


def reward(gateway: Running, request: local.AttemptRequest, result: local.AttemptResult) -> Reward:
    """By the grader's process, as the controller asks for it."""
    log = (request.log_dir / "harness.log").read_text()[-2000:]
    assert result.outcome is Outcome.COMPLETED, (result.detail, log)
    texts, prompt_tokens = ray.get(gateway.store.said.remote(request.attempt_id))
    assert len(texts) == 2 and prompt_tokens > 0, log
    given = grading.grade(
        GradeRequest(
            task=request.task,
            result=result.result,
            episode=Episode("r", request.attempt_id, result.outcome, "", tuple(texts)),
            grader="lightning_ray.tasks.swe.repository:grade",
            limits=Limits(timeout_s=300, memory_mib=4000),
            log=request.log_dir / "grader.log",
        )
    )
    assert isinstance(given, Reward), given
    return given
