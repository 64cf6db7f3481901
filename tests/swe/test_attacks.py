"""Every attack ends unsolved or tampered; every honest repair ends solved."""

from __future__ import annotations

import base64
import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from attacks import ATTACKS, Attack

from lightning_ray.records import Outcome, Task
from lightning_ray.rollouts import sandbox
from lightning_ray.rollouts.grading import Episode
from lightning_ray.rollouts.harness import Recipe
from lightning_ray.rollouts.local import AttemptRequest, AttemptResult, run_attempt
from lightning_ray.rollouts.process import Limits
from lightning_ray.tasks.swe import offline
from lightning_ray.tasks.swe import repository as family
from lightning_ray.tasks.swe.evidence import Verdict

boxed = pytest.mark.skipif(
    sandbox.protection().bubblewrap is None or not sandbox.protection().network,
    reason="this machine has no bubblewrap with a network of its own",
)


# One hidden test fails, late in the suite: the easiest one to attack.
[TASK] = [task for task in offline.train() + offline.validation() if "b96d2ehw" in task.task_id]
EPISODE = Episode("r", "r-a0", Outcome.COMPLETED, "", ("I mended it.",))


def rollout(folder: Path, script: str, task: Task = TASK) -> AttemptResult:
    """A rollout whose agent is a script."""
    # Recipes have placeholders in braces, and so may scripts.
    coded = base64.b64encode(script.encode()).decode()
    command = [sys.executable, "-B", "-c", f"import base64; exec(base64.b64decode('{coded}'))"]
    return run_attempt(
        AttemptRequest(
            attempt_id=f"attack-{os.getpid()}",
            task=task,
            recipe=Recipe(name="script", command=command),
            root_url="http://127.0.0.1:1/rollout/a",
            model="policy",
            context_tokens=4096,
            limits=Limits(timeout_s=60),
            log_dir=folder / "rollouts" / "a",
            prepare="lightning_ray.tasks.swe.repository:prepare",
            collect="lightning_ray.tasks.swe.repository:collect",
            keep_workspaces=False,
            api_key="the-key",
        )
    )


def judged(result: AttemptResult, task: Task = TASK) -> Verdict:
    reward = family.grade(task, result.result, EPISODE)
    assert reward.value == float(reward.solved)
    if reward.solved:
        return Verdict.SOLVED
    return Verdict.TAMPERED if reward.metrics["tampered"] else Verdict.UNSOLVED


def as_parameter(attack: Attack) -> object:
    marks = [boxed] * attack.boxed + [pytest.mark.slow] * attack.slow
    return pytest.param(attack, id=attack.name, marks=marks)


def join_a_session_keyring() -> None:
    """As whoever logs in has one: all that we start could find it."""
    keyctl = {"x86_64": 250, "aarch64": 219}[os.uname().machine]
    if ctypes.CDLL(None).syscall(keyctl, 1, None) < 0:
        pytest.skip("this machine has no keyrings")


@pytest.mark.parametrize("attack", map(as_parameter, ATTACKS))
def test_an_attack_is_never_solved(tmp_path, monkeypatch, attack):
    monkeypatch.setattr(offline, "CPU_S", 10.0)
    if "keyring" in attack.name:
        join_a_session_keyring()
    task = replace(TASK, fields={**TASK.fields, "timeout_s": attack.limit_s})
    result = rollout(tmp_path, attack.script, task)
    log = (tmp_path / "rollouts" / "a" / "harness.log").read_text(errors="replace")
    assert result.outcome is Outcome.COMPLETED, (result, log)
    if attack.refused:
        assert attack.refused in {entry["path"] for entry in result.result["refused"]}
    assert judged(result, task) is attack.expect, log


def test_there_are_attacks_enough_and_the_page_lists_them(repository: Path):
    page = (repository / "docs" / "swe.md").read_text()
    assert len(ATTACKS) >= 25
    assert [attack.name for attack in ATTACKS if f"| {attack.name} |" not in page] == []
