"""Real harnesses, installed from their registries and unchanged, against a real gateway.

The policy is scripted at the engine: its first turn makes two parallel tool calls, its second ends
the work; then the same through a pause, a sub-agent and a compaction. Everything above the engine
is real. Asserted is what was recorded. What was tried and held is what docs/harnesses.md tells
(`make docs-harnesses`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import ray
from support import Running, tokens_by_fate
from test_gateway_crash import kill_at_the_record, replica

from lightning_ray.gateway import deploy
from lightning_ray.records import Branch, Call, FinishReason, Outcome, SideCall, Task
from lightning_ray.rollouts import harness, installation, local, sandbox
from lightning_ray.rollouts.places import IN_SANDBOX
from lightning_ray.rollouts.process import Limits
from lightning_ray.rollouts.sandbox import Wanted
from lightning_ray.samples import forest, rows

# A byte is a token here, and these prompts are long.
CONTEXT_TOKENS = 400_000
TITLE = "A title"
DONE = "All done."
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
    extra: tuple[tuple[str, Any], ...] = ()
    end: str = ""

    @property
    def script(self) -> list[str]:
        first = "I will work.\n" + self.call("echo one > one.txt") + self.call("cat task.txt")
        return [first, self.call(self.end) if self.end else DONE]

    def call(self, command: str) -> str:
        return tool_call(self.tool, {self.argument: command, **dict(self.extra)})


class TextCase(Case):
    """One without tools: a command is a block of text, one each turn."""

    @property
    def script(self) -> list[str]:
        return [self.call("echo one > one.txt && cat task.txt"), self.call(self.end)]

    def call(self, command: str) -> str:
        return f"I will work.\n\n```mswea_bash_command\n{command}\n```"


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>\n"


CHAT, RESPONSES, MESSAGES = "openai_chat", "openai_responses", "anthropic_messages"
MINI = Case("mini-swe-agent", "bash", "command", CHAT, "COMPLETE_TASK_AND", end=MINI_END)
MINI_TEXT = TextCase(
    "mini-swe-agent",
    "",
    "",
    CHAT,
    "exactly ONE bash code block",
    end=MINI_END,
    args=(
        "--config={site_packages}/minisweagent/config/mini_textbased.yaml",
        "--model-class=litellm_textbased",
    ),
)
CASES = {
    "mini-swe-agent": MINI,
    "mini-swe-agent-responses": replace(
        MINI, dialect=RESPONSES, args=("--model-class=litellm_response",)
    ),
    "mini-swe-agent-text": MINI_TEXT,
    "claude-code": Case("claude-code", "Bash", "command", MESSAGES, '"name": "Bash"'),
    "codex": Case("codex", "exec_command", "cmd", RESPONSES, '"name": "exec_command"'),
    "openhands": Case(
        "openhands", "terminal", "command", CHAT, '"name": "terminal"',
        extra=(("security_risk", "LOW"), ("summary", "works")),
    ),
    "opencode": Case(
        "opencode", "bash", "command", CHAT, "opencode", extra=(("description", "works"),)
    ),
    "qwen-code": Case(
        "qwen-code", "run_shell_command", "command", CHAT, '"name": "run_shell_command"',
        extra=(("is_background", False),),
    ),
}  # fmt: skip
SCRIPTS = {
    "title generator": [TITLE],
    # Without tool messages: a prompt with the first turn asks for the second.
    MINI_TEXT.script[0]: MINI_TEXT.script[1:],
    **{case.marker: case.script for case in (MINI_TEXT, *CASES.values())},
}
# One harness per protocol in the fast suite.
FAST = ("mini-swe-agent", "mini-swe-agent-responses", "claude-code")
PAUSE_S = float(os.environ.get("LIGHTNING_RAY_PAUSE_S", "130"))
# In CI a pause is longer than any hold, so that every client sees a 503.
LONGEST_HOLD_S = 90 if PAUSE_S <= 130 else 480


@dataclass(frozen=True)
class SubAgent:
    """The tool that starts a sub-agent, the kind of agent, and how the command line must differ."""

    tool: str
    kind: str
    without: tuple[str, ...] = ()
    args: tuple[str, ...] = ()


SUB_AGENTS = {
    "claude-code": SubAgent("Agent", "general-purpose", ("--bare",), ("--tools=Bash,Agent",)),
    "opencode": SubAgent("task", "general"),
    "qwen-code": SubAgent("agent", "general-purpose"),
}
# What a compaction call says and no other does, and a context window that is too small for what
# follows a long first turn. OpenCode, which goes on compacting, needs one that is large enough for
# its own prompt (30,800 tokens here) and the 8,192 that it keeps free for an answer.
COMPACTIONS = {
    "codex": ("CONTEXT CHECKPOINT COMPACTION", 20_000),
    "opencode": ("summarization agent", 40_700),
    "qwen-code": ("summarizes internal chat history", 20_000),
}
LONG = "I have a lot to say before I work. " * 100
SUMMARY = "So far one.txt was made and task.txt was read."


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    running = Running(
        tmp_path_factory.mktemp("gateway"),
        [["unset"]],
        f"model.max_model_len={CONTEXT_TOKENS}",
        "sampling.max_tokens=4000",
        f"gateway.longest_hold_s={LONGEST_HOLD_S}",
    )
    running.start()
    yield running
    deploy.stop()
    ray.shutdown()


# The commit has one name: some harnesses tell it to the model.
DATES = {"GIT_AUTHOR_DATE": "2024-01-01T00:00Z", "GIT_COMMITTER_DATE": "2024-01-01T00:00Z"}


def prepare(task: Task, workspace: Path) -> None:
    (workspace / "task.txt").write_text("two\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "start"],
    ):
        subprocess.run(["git", *command], cwd=workspace, check=True, env={**os.environ, **DATES})


def collect(task: Task, workspace: Path) -> dict:
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=workspace, capture_output=True, text=True, check=True
    )
    made = workspace / "one.txt"
    return {"made": made.read_text() if made.exists() else None, "changed": changed.stdout}


def request(
    gateway, name: str, folder: Path, context_tokens: int = CONTEXT_TOKENS
) -> local.AttemptRequest:
    case = CASES[name]
    recipe = harness.load(case.recipe, case.args)
    if recipe.npm and shutil.which("npm") is None and "CI" not in os.environ:
        pytest.skip("npm is not installed; Debian and Ubuntu: apt-get install npm")
    try:
        installation.interpreter(recipe)
    except installation.InstallError as error:
        if "CI" in os.environ and name != "openhands":
            raise  # the others would be skipped with it
        pytest.skip(str(error))
    attempt_id = gateway.attempt()
    return local.AttemptRequest(
        attempt_id=attempt_id,
        task=Task("t", "Create one.txt and read task.txt."),
        recipe=recipe,
        root_url=f"{gateway.url}/rollout/{attempt_id}",
        model="policy",
        context_tokens=context_tokens,
        limits=Limits(timeout_s=240 + PAUSE_S, memory_mib=6000),
        log_dir=folder / name,
        prepare="test_harnesses:prepare",
        collect="test_harnesses:collect",
        keep_workspaces=False,
        api_key="secret",
        sandbox=Wanted(require=shutil.which("bwrap") is not None),
    )


def everyone(gateway, folder: Path) -> dict[str, local.AttemptRequest]:
    """What asks each harness to work; without OpenHands, with a warning, where there is no Python
    for it."""
    asked = {}
    for name in CASES:
        try:
            asked[name] = request(gateway, name, folder)
        except pytest.skip.Exception as reason:
            if name != "openhands":
                raise
            warnings.warn(pytest.PytestWarning(f"not tested: {reason}"), stacklevel=1)
    return asked


@contextmanager
def side_by_side(
    asked: dict[str, local.AttemptRequest],
) -> Iterator[dict[str, Future[local.AttemptResult]]]:
    """Runs attempts in processes, since one wants the main thread of its process."""
    with ProcessPoolExecutor(len(asked), mp_context=multiprocessing.get_context("spawn")) as pool:
        yield {name: pool.submit(local.run_attempt, one) for name, one in asked.items()}


@contextmanager
def trial(asked: local.AttemptRequest, name: str, scenario: str) -> Iterator[None]:
    """Writes down, where somebody wants to know, whether a scenario held."""
    folder = os.environ.get("LIGHTNING_RAY_HARNESS_RESULTS")
    passed = False
    try:
        yield
        passed = True
    finally:
        result = {
            "harness": asked.recipe.name,
            "version": asked.recipe.version,
            "args": CASES[name].args,
            "dialect": CASES[name].dialect,
            "scenario": scenario,
            "passed": passed,
        }
        if folder:
            (Path(folder) / f"{name}-{scenario}.json").write_text(json.dumps(result))


def check_work(
    gateway, name: str, asked: local.AttemptRequest, result: local.AttemptResult
) -> list[Call]:
    """The work is done, over the harness's protocol. Gives the calls."""
    log = (asked.log_dir / "harness.log").read_text()[-3000:]
    assert result.outcome is Outcome.COMPLETED, (result.detail, log)
    assert result.result == {"made": "one\n", "changed": "?? one.txt\n"}, log
    calls = ray.get(gateway.store.calls.remote(asked.attempt_id))
    assert {call.dialect for call in calls} == {CASES[name].dialect}
    return calls


def check_tokens(calls: list[Call], chains: Sequence[Sequence[Call]]) -> None:
    """Each chain is a tree of its own whose sampled tokens are all trained, in one row; whatever
    else was sampled is a side call."""
    for chain in chains:
        for before, after in pairwise(chain):
            assert after.branch is Branch.CONTINUED
            assert np.array_equal(after.prompt[: len(before.full)], before.full)
    made, fates = rows.rows("r", calls, rows.Layout(CONTEXT_TOKENS))
    trained = [list(dict.fromkeys(row.calls_T[row.trainable_T].tolist())) for row in made]
    assert sorted(trained) == sorted([call.seq for call in chain] for chain in chains)
    parents = forest.parents(calls)
    assert all(parents[chain[0].seq] is None for chain in chains)
    sampled = Counter[rows.Fate]()
    for call in calls:
        sampled[rows.Fate.SIDE if call.side else rows.Fate.TRAINED] += len(call.tokens)
    assert tokens_by_fate(fates) == sampled


def check_two_turns(
    gateway, name: str, asked: local.AttemptRequest, result: local.AttemptResult
) -> None:
    calls = check_work(gateway, name, asked, result)
    main = [call for call in calls if call.side is None]
    assert [call.text for call in main] == CASES[name].script
    assert main[0].branch is Branch.ROOT
    check_tokens(calls, [main])


# In CI the others work side by side, in a pause.
ALONE = [pytest.mark.slow, pytest.mark.demand]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else ALONE) for n in CASES])
def test_a_harness_works_unchanged_and_every_token_can_be_trained(gateway, tmp_path, name):
    ray.get(gateway.engines[0].play.remote(SCRIPTS))
    asked = request(gateway, name, tmp_path)
    with trial(asked, name, "two turns"):
        check_two_turns(gateway, name, asked, local.run_attempt(asked))


@pytest.mark.skipif(bool(sandbox.protection().missing), reason="paths differ without a sandbox")
@pytest.mark.parametrize(
    "name",
    ["mini-swe-agent"]
    + [pytest.param(n, marks=ALONE) for n in ("claude-code", "codex", "opencode", "qwen-code")],
)
def test_the_prompts_of_a_group_are_the_same_text(gateway, tmp_path, name):
    """So the engine reads them once, and no model learns the name of a folder."""
    case = CASES[name]
    script = [case.call("pwd; echo ~ $TMPDIR; ls -a ~ /tmp"), *case.script[-1:]]
    ray.get(gateway.engines[0].play.remote({"title generator": [TITLE], case.marker: script}))
    prompts = []
    for folder in ("one", "two"):
        asked = request(gateway, name, tmp_path / folder)
        assert local.run_attempt(asked).outcome is Outcome.COMPLETED
        calls = ray.get(gateway.store.calls.remote(asked.attempt_id))
        first, second = (
            gateway.tokenizer.decode(call.prompt.tolist()) for call in calls if call.side is None
        )
        assert IN_SANDBOX.workspace in second and IN_SANDBOX.home in second
        assert "lr-box-" not in second
        # What follows a command may tell how long it took.
        prompts.append((first, second if name == "mini-swe-agent" else ""))
    assert prompts[0] == prompts[1]


def ask_openai(gateway, attempt_id: str) -> list[str]:
    """What a client with its own settings is told, if that is also what was recorded, once."""
    client = openai.OpenAI(base_url=f"{gateway.url}/rollout/{attempt_id}/v1", api_key="secret")
    reply = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "title generator"}]
    )
    calls = ray.get(gateway.store.calls.remote(attempt_id))
    assert reply.choices[0].message.content == calls[0].text
    return [call.text for call in calls]


def ask_anthropic(gateway, attempt_id: str) -> list[str]:
    client = anthropic.Anthropic(base_url=f"{gateway.url}/rollout/{attempt_id}", api_key="secret")
    reply = client.messages.create(
        model="m", max_tokens=1000, messages=[{"role": "user", "content": "title generator"}]
    )
    calls = ray.get(gateway.store.calls.remote(attempt_id))
    assert reply.content[0].text == calls[0].text
    return [call.text for call in calls]


CLIENTS = (ask_openai, ask_anthropic)


@pytest.mark.slow
def test_no_harness_notices_a_long_pause(gateway, tmp_path):
    ray.get(gateway.engines[0].play.remote(SCRIPTS))
    asked = everyone(gateway, tmp_path)
    with side_by_side(asked) as running:
        ids = [one.attempt_id for one in asked.values()]
        while not any(ray.get([gateway.store.calls.remote(one) for one in ids])):
            time.sleep(0.2)
        ray.get(gateway.store.close_gate.remote())
        with ThreadPoolExecutor() as clients:
            answers = {ask: clients.submit(ask, gateway, gateway.attempt()) for ask in CLIENTS}
            time.sleep(PAUSE_S)
            ray.get(gateway.store.open_gate.remote())
        assert [answer.result() for answer in answers.values()] == [[TITLE], [TITLE]]
    for name, one in asked.items():
        with trial(one, name, "pause"):
            check_two_turns(gateway, name, one, running[name].result())


@pytest.mark.slow
def test_a_sub_agent_is_a_tree_of_its_own_and_is_trained(gateway, tmp_path):
    scripts, expected, asked = {"title generator": [TITLE]}, {}, {}
    for name, agent in SUB_AGENTS.items():
        case, order = CASES[name], f"Make one.txt for {name}."
        delegate = {"description": "make one", "prompt": order, "subagent_type": agent.kind}
        main = [tool_call(agent.tool, delegate) + case.call("cat task.txt"), DONE]
        below = [case.call("echo one > one.txt"), f"{name} has one.txt."]
        # Only in the sub-agent's own prompt is the order a line of its own.
        scripts = {f"\n{order}": below, **scripts, case.marker: main}
        expected[name] = (main, below)
        one = request(gateway, name, tmp_path)
        command = [arg for arg in one.recipe.command if arg not in agent.without]
        recipe = one.recipe.model_copy(update={"command": [*command, *agent.args]})
        asked[name] = replace(one, recipe=recipe)
    ray.get(gateway.engines[0].play.remote(scripts))
    with side_by_side(asked) as running:
        pass
    for name, one in asked.items():
        with trial(one, name, "sub-agent"):
            calls = check_work(gateway, name, one, running[name].result())
            assert {call.side for call in calls} <= {None, SideCall.TITLE}
            trees = [
                [call for call in calls if not call.side and call.text in texts]
                for texts in expected[name]
            ]
            assert [[call.text for call in tree] for tree in trees] == list(expected[name])
            assert [tree[0].branch for tree in trees] == [Branch.ROOT, Branch.ROOT]
            main, below = trees
            assert main[0].seq < below[0].seq < below[-1].seq < main[-1].seq
            check_tokens(calls, trees)


@pytest.mark.slow
def test_a_compaction_is_a_side_call_and_begins_a_tree(gateway, tmp_path):
    # What a prompt with the summary asks for comes first, then the summary itself.
    scripts, asked = {SUMMARY: [DONE], "title generator": [TITLE]}, {}
    for name, (said, context_tokens) in COMPACTIONS.items():
        case = CASES[name]
        scripts |= {said: [SUMMARY], case.marker: [LONG + case.script[0]]}
        asked[name] = request(gateway, name, tmp_path, context_tokens)
    ray.get(gateway.engines[0].play.remote(scripts))
    with side_by_side(asked) as running:
        pass
    for name, one in asked.items():
        with trial(one, name, "compaction"):
            calls = check_work(gateway, name, one, running[name].result())
            work = [call for call in calls if call.side is None]
            (summary,) = [call for call in calls if call.side is SideCall.COMPACTION]
            assert {call.side for call in calls} <= {None, SideCall.TITLE, SideCall.COMPACTION}
            assert [call.text for call in work] == [LONG + CASES[name].script[0], DONE]
            assert [call.branch for call in work] == [Branch.ROOT, Branch.COMPACTED]
            assert summary.text == SUMMARY
            assert SUMMARY in gateway.tokenizer.decode(work[1].prompt.tolist())
            assert work[0].seq < summary.seq < work[1].seq
            check_tokens(calls, [work[:1], work[1:]])


@pytest.mark.slow
def test_a_turn_that_is_cut_off_ends_codex_and_is_graded(gateway, tmp_path):
    # Codex does not go on after `response.incomplete`, and does not ask again either.
    ray.get(gateway.engines[0].play.remote({CASES["codex"].marker: [LONG * 2]}))
    asked = request(gateway, "codex", tmp_path)
    result = local.run_attempt(asked)
    assert result.outcome.caused_by_policy, result.detail
    [call] = ray.get(gateway.store.calls.remote(asked.attempt_id))
    assert call.finish_reason is FinishReason.LENGTH and len(call.tokens) == 4000
    check_tokens([call], [[call]])


@pytest.mark.slow
def test_no_harness_notices_a_replica_that_dies_before_it_answers(gateway, tmp_path):
    ray.get(gateway.engines[0].play.remote(SCRIPTS))
    asked = everyone(gateway, tmp_path)
    gateway.attempt()  # the store has begun its log
    [log] = (gateway.folder / "store" / "calls").glob("*.log")
    with side_by_side(asked) as running:
        kill_at_the_record(log, replica())
    for name, one in asked.items():
        with trial(one, name, "replica"):
            check_two_turns(gateway, name, one, running[name].result())
