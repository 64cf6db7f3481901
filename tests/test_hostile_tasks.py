"""Dataset rows that somebody wrote to do harm, and files that a harness leaves for who comes after
it."""

from __future__ import annotations

import ast
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_ray.config import ConfigError
from lightning_ray.records import Outcome, RolloutSpec, Split, Task
from lightning_ray.rollouts.harness import Recipe
from lightning_ray.rollouts.lifecycle import Lifecycle
from lightning_ray.rollouts.local import AttemptRequest, AttemptResult, run_attempt
from lightning_ray.rollouts.process import Limits
from lightning_ray.run import data

# -- what is refused when the rows are read --------------------------------------------------------

GOOD = b'{"task_id": "a", "statement": "s", "x": 1}'
REFUSED = {
    "a lone surrogate in the statement": rb'{"task_id": "b", "statement": "\ud800"}',
    "a lone surrogate in the id": rb'{"task_id": "\udfff", "statement": "s"}',
    "a lone surrogate in a field": rb'{"task_id": "b", "statement": "s", "x": [{"\ud800": 1}]}',
    "a NUL in the statement": rb'{"task_id": "b", "statement": "s\u0000"}',
    "a NUL in the id": rb'{"task_id": "\u0000", "statement": "s"}',
    "Latin-1": '{"task_id": "b", "statement": "é"}'.encode("latin-1"),
    "UTF-16": '{"task_id": "b", "statement": "s"}'.encode("utf-16"),
    "a list": b'["task_id", "statement"]',
    "no statement": b'{"task_id": "b"}',
    "nested without an end": b'{"task_id": "b", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a launcher that there is not": b'{"task_id": "b", "statement": "s", "launcher": "kuberntes"}',
    "an endless number": b'{"task_id": "b", "statement": "s", "x": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_nothing_can_carry_is_refused_with_its_line(tmp_path, name):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(GOOD + b"\n\n" + REFUSED[name] + b"\n")
    with pytest.raises(ConfigError, match="tasks.jsonl, line 3: not a task") as caught:
        data.load_tasks(str(path), "task.train")
    assert len(str(caught.value)) < 1000


def test_a_tasks_function_is_held_to_the_same(monkeypatch):
    module = SimpleNamespace(rows=lambda: [Task("a", "s"), Task("b", "\ud800")])
    monkeypatch.setitem(sys.modules, "hostile", module)
    with pytest.raises(ConfigError, match="task.train=hostile:rows, task 1: .*surrogates"):
        data.load_tasks("hostile:rows", "task.train")


def test_lines_end_at_newlines_only(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"task_id": "a\u2028b\x85", "statement": "s\u2029"}\n', encoding="utf-8")
    assert data.load_tasks(str(path), "task.train") == [Task("a\u2028b\x85", "s\u2029")]


# -- what the others can do ------------------------------------------------------------------------

# Shows what it was given, and leaves a pickle that makes a file when somebody reads it.
HARNESS = """
import json, os, sys
with open("seen.txt", "w") as file:
    file.write(sys.argv[1])
evil = b"cposix\\nsystem\\n(S'touch %s'\\ntR." % sys.argv[2].encode()
for name in ("result.pkl", "state.pt", "seen.pickle", "../task.txt"):
    try:
        open(name, "wb").write(evil)
    except OSError:
        pass
sys.stdout.buffer.write(evil)
"""


def prepare(task: Task, workspace: Path) -> None:
    """A task family without anything to prepare."""


def collect(task: Task, workspace: Path) -> dict:
    return {"seen": (workspace / "seen.txt").read_text()}


def attempt(folder: Path, task: Task) -> AttemptResult:
    return run_attempt(
        AttemptRequest(
            attempt_id=f"hostile-{os.getpid()}",
            task=task,
            recipe=Recipe(
                name="script",
                command=[sys.executable, "-S", "-c", HARNESS, "{task}", str(folder / "PWNED")],
            ),
            root_url="http://127.0.0.1:1/rollout/a",
            model="policy",
            context_tokens=4096,
            limits=Limits(timeout_s=30),
            log_dir=folder / "rollouts" / "a",
            prepare="test_hostile_tasks:prepare",
            collect="test_hostile_tasks:collect",
            keep_workspaces=False,
            api_key="the-key",
        )
    )


@pytest.mark.parametrize(
    "text",
    [
        "$(touch PWNED); `touch PWNED` | tee PWNED > ../PWNED & touch PWNED\n",
        "'; touch PWNED #\" && touch PWNED",
        "../../../../etc/passwd",
        "--help",
        "{api_key} {{api_key}} %s ${HOME} $HOME \\x00",
        "\u202e\u0007\x1b[2J é\U0001f600\r\n" * 100,
    ],
)
def test_a_row_is_text_to_the_harness_and_nothing_to_the_machine(tmp_path, text):
    before = set(os.listdir(tempfile.gettempdir()))
    result = attempt(tmp_path, Task(text, text, {text: text}))
    assert result.outcome is Outcome.COMPLETED, result
    assert result.result == {"seen": text.replace("\r\n", "\n").replace("\r", "\n")}
    made = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert [path.name for path in made] == ["harness.log"]
    assert not {n for n in set(os.listdir(tempfile.gettempdir())) - before if "PWNED" in n}


def test_a_text_that_no_command_line_takes_is_an_outcome(tmp_path):
    result = attempt(tmp_path, Task("t", "a\0b"))  # an operator may ask for it over HTTP
    assert (result.outcome, result.result) == (Outcome.LAUNCH_FAULT, None), result


@pytest.mark.parametrize("name", ["../r", "a/b", "", "a\n", "a\0", "é", "a b", "%2e", "~", "$x"])
def test_an_id_with_path_tricks_is_refused(name):
    spec = RolloutSpec(name, "g", Task("t", "s"), Split.TRAIN, 1)
    with pytest.raises(ValueError, match="may hold only letters"):
        Lifecycle(concurrency=1, retries=0).submit(spec, now=0)


def test_pickles_come_from_our_own_processes_only():
    """What a harness wrote travels as JSON; what unpickles are the ends of our own actor calls."""
    package = Path(data.__file__).parents[1]
    readers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            whole = ast.unparse(node) if isinstance(node, ast.Attribute) else name
            if name == "Unpickler" or whole in ("pickle.load", "pickle.loads", "torch.load"):
                readers.add(str(path.relative_to(package)))
    # A line reads what follows the token only (tests/test_line.py).
    ours = {"engine/courier.py", "gateway/service.py", "line.py", "store/actor.py"}
    assert readers == ours
