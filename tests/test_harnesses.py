"""Real harnesses, installed from their registries and unchanged, against a real gateway.

The policy is scripted at the engine: its first turn makes two parallel tool calls, its second ends
the work. Everything above the engine is real. Asserted is what was recorded.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import ray
from support import Running, tokens_by_fate

from lightning_ray.gateway import deploy
from lightning_ray.records import Branch, Outcome, Task
from lightning_ray.rollouts import harness, local
from lightning_ray.rollouts.process import Limits
from lightning_ray.rollouts.sandbox import Wanted
from lightning_ray.samples import rows

# A byte is a token here, and these prompts are long.
CONTEXT_TOKENS = 400_000
TITLE = "A title"
MINI_END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@dataclass(frozen=True)
class Case:
    """A recipe, the name and the argument of its shell tool, what its prompt contains and no
    other's, and how it is told to end."""

    recipe: str
    tool: str
    argument: str
    dialect: str
    marker: str
    args: tuple[str, ...] = ()
    extra: tuple[tuple[str, str], ...] = ()
    end: str = ""

    @property
    def script(self) -> list[str]:
        first = "I will work.\n" + self.call("echo one > one.txt") + self.call("cat task.txt")
        return [first, self.call(self.end) if self.end else "All done."]

    def call(self, command: str) -> str:
        arguments = {self.argument: command, **dict(self.extra)}
        call = json.dumps({"name": self.tool, "arguments": arguments})
        return f"<tool_call>\n{call}\n</tool_call>\n"


CHAT, RESPONSES, MESSAGES = "openai_chat", "openai_responses", "anthropic_messages"
MINI = Case("mini-swe-agent", "bash", "command", CHAT, "COMPLETE_TASK_AND", end=MINI_END)
CASES = {
    "mini-swe-agent": MINI,
    "mini-swe-agent-responses": replace(
        MINI, dialect=RESPONSES, args=("--model-class=litellm_response",)
    ),
    "claude-code": Case("claude-code", "Bash", "command", MESSAGES, '"name": "Bash"'),
    "codex": Case("codex", "exec_command", "cmd", RESPONSES, '"name": "exec_command"'),
    "opencode": Case(
        "opencode", "bash", "command", CHAT, "opencode", extra=(("description", "works"),)
    ),
    "qwen-code": Case(
        "qwen-code", "run_shell_command", "command", CHAT, '"name": "run_shell_command"',
        extra=(("is_background", "false"),),
    ),
}  # fmt: skip
SCRIPTS = {"title generator": [TITLE], **{case.marker: case.script for case in CASES.values()}}
# One harness per protocol in the fast suite.
FAST = ("mini-swe-agent", "mini-swe-agent-responses", "claude-code")
# Longer than any hold, so that the 503 path is used.
PAUSE_S = 130.0


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    running = Running(
        tmp_path_factory.mktemp("gateway"),
        [["unset"]],
        f"model.max_model_len={CONTEXT_TOKENS}",
        "sampling.max_tokens=4000",
    )
    running.start()
    yield running
    deploy.stop()
    ray.shutdown()


def prepare(task: Task, workspace: Path) -> None:
    (workspace / "task.txt").write_text("two\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "start"],
    ):
        subprocess.run(["git", *command], cwd=workspace, check=True)


def collect(task: Task, workspace: Path) -> dict:
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=workspace, capture_output=True, text=True, check=True
    )
    made = workspace / "one.txt"
    return {"made": made.read_text() if made.exists() else None, "changed": changed.stdout}


def request(gateway, name: str, folder: Path) -> local.AttemptRequest:
    case = CASES[name]
    recipe = harness.load(case.recipe, case.args)
    if recipe.npm and shutil.which("npm") is None and "CI" not in os.environ:
        pytest.skip("npm is not installed; Debian and Ubuntu: apt-get install npm")
    attempt_id = gateway.attempt()
    return local.AttemptRequest(
        attempt_id=attempt_id,
        task=Task("t", "Create one.txt and read task.txt."),
        recipe=recipe,
        root_url=f"{gateway.url}/rollout/{attempt_id}",
        model="policy",
        context_tokens=CONTEXT_TOKENS,
        limits=Limits(timeout_s=240 + PAUSE_S, memory_mib=6000),
        log_dir=folder / name,
        prepare="test_harnesses:prepare",
        collect="test_harnesses:collect",
        keep_workspaces=False,
        api_key="secret",
        sandbox=Wanted(require=shutil.which("bwrap") is not None),
    )


def check(case: Case, result: local.AttemptResult, calls: list, log: str) -> None:
    """The work is done, and every call is recorded as one chain of trained tokens."""
    assert result.outcome is Outcome.COMPLETED, (result.detail, log)
    assert result.result == {"made": "one\n", "changed": "?? one.txt\n"}, log
    main = [call for call in calls if call.side is None]
    assert {call.dialect for call in calls} == {case.dialect}
    assert [call.branch for call in main] == [Branch.ROOT, Branch.CONTINUED], log
    assert [call.text for call in main] == case.script
    for before, after in pairwise(main):
        assert np.array_equal(after.prompt[: len(before.full)], before.full)
    made, fates = rows.rows("r", calls, rows.Layout(CONTEXT_TOKENS))
    assert len(made) == 1
    counted = tokens_by_fate(fates)
    assert counted[rows.Fate.TRAINED] == sum(len(call.tokens) for call in main)
    assert counted.total() == sum(len(call.tokens) for call in calls)


def said(asked: local.AttemptRequest) -> str:
    return (asked.log_dir / "harness.log").read_text()[-3000:]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES]
)
def test_a_harness_works_unchanged_and_every_token_can_be_trained(gateway, tmp_path, name):
    ray.get(gateway.engines[0].play.remote(SCRIPTS))
    asked = request(gateway, name, tmp_path)
    result = local.run_attempt(asked)
    calls = ray.get(gateway.store.calls.remote(asked.attempt_id))
    check(CASES[name], result, calls, said(asked))


@pytest.mark.slow
def test_no_harness_notices_a_long_pause(gateway, tmp_path):
    ray.get(gateway.engines[0].play.remote(SCRIPTS))
    asked = {name: request(gateway, name, tmp_path) for name in CASES}
    # Processes, since an attempt wants the main thread of one.
    with ProcessPoolExecutor(len(asked), mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {name: pool.submit(local.run_attempt, one) for name, one in asked.items()}
        ids = [one.attempt_id for one in asked.values()]
        while not any(ray.get([gateway.store.calls.remote(one) for one in ids])):
            time.sleep(0.2)
        ray.get(gateway.store.close_gate.remote())
        time.sleep(PAUSE_S)
        ray.get(gateway.store.open_gate.remote())
        results = {name: future.result() for name, future in running.items()}
    for name, one in asked.items():
        calls = ray.get(gateway.store.calls.remote(one.attempt_id))
        check(CASES[name], results[name], calls, said(one))
