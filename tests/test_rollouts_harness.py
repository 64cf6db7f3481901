"""Recipes: what they may say, what comes out of them, and their installation (real venv and
pip)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ValidationError

from lightning_ray.rollouts import harness, installation, process
from lightning_ray.rollouts.harness import RecipeError, Values
from lightning_ray.rollouts.installation import InstallError, install, interpreter, site_packages

VALUES = Values(
    base_url="http://gateway/rollout/r-a0/v1",
    root_url="http://gateway/rollout/r-a0",
    model="policy",
    task="fix {the} bug in {api_key}",
    task_file="/box/task.txt",
    attempt="r-a0",
    workspace="/box/workspace",
    home="/box/home",
    context_tokens="4096",
    venv="/cache/venv",
    site_packages="/cache/venv/lib",
    recipe_dir="/recipes",
    api_key="the-key",
)


def recipe_file(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_an_own_harness_needs_only_name_command_and_env(tmp_path: Path) -> None:
    path = recipe_file(
        tmp_path,
        "name: mine\ncommand: [agent, '{task}']\nenv: {KEY: '{api_key}', URL: '{base_url}'}",
    )
    recipe = harness.load(path, ["--window", "{context_tokens}"], {"MORE": "{{task}} ${HOME}"})
    argv, env, stdin = harness.command_line(recipe, VALUES)
    assert argv == ["agent", "fix {the} bug in {api_key}", "--window", "4096"]
    assert env == {"KEY": "the-key", "URL": VALUES.base_url, "MORE": "{task} ${HOME}"}
    assert stdin == ""
    assert install(recipe) is None


def test_a_harness_that_names_no_task_reads_it_on_stdin(tmp_path: Path) -> None:
    recipe = harness.load(recipe_file(tmp_path, "name: mine\ncommand: [agent, '{\"json\": {}}']"))
    argv, _, stdin = harness.command_line(recipe, VALUES)
    assert (argv, stdin) == (["agent", '{"json": {}}'], VALUES.task)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name: mine\ncommand: [agent, '{tsk}']", "unknown placeholder {tsk}"),
        ("name: mine\ncommand: [agent, '--key={api_key}']", "may stand in env only"),
        ("name: mine\ncommand: [a]\ncwd: '{api_key}'", "may stand in env only"),
        ("name: mine\ncommand: ['{venv}/bin/agent']", "needs `packages`"),
        ("name: mine\ncommand: []", "command"),
        ("name: mine\ncommand: [a]\ncomand: [b]", "comand"),
        ("name: ../mine\ncommand: [a]", "name"),
        ("name: mine\ncommand: [a]\nlock: gone.lock", "gone.lock does not exist"),
        ("- a", "must be a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_with_the_reason(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(RecipeError, match=r"mine\.yaml") as error:
        harness.load(recipe_file(tmp_path, text))
    assert complaint in str(error.value)


def test_a_key_in_added_arguments_is_refused_too(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, "name: mine\ncommand: [agent]")
    with pytest.raises(RecipeError, match=r"command\[2\]"):
        harness.load(path, ["--key", "{api_key}"])


def test_an_unknown_recipe_names_the_built_in_ones() -> None:
    with pytest.raises(RecipeError, match="mini-swe-agent"):
        harness.load("mini-swe-agnet")


def test_values_do_not_show_the_key() -> None:
    assert "the-key" not in repr(VALUES)


def test_an_argument_can_name_a_file_inside_a_python_package(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, "name: mine\ncommand: [agent]")
    inside = "pkg:lightning_ray.rollouts/recipes/mini-swe-agent.yaml"
    argv, _, _ = harness.command_line(harness.load(path, ["-c", inside]), VALUES)
    assert Path(argv[-1]).is_file()
    for wrong in (
        "pkg:lightning_ray.rollouts/none.yaml",
        "pkg:no_such_package/a",
        "pkg:lightning_ray",
    ):
        with pytest.raises(RecipeError, match=wrong):
            harness.command_line(harness.load(path, [wrong]), VALUES)


def test_an_interrupted_installation_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_RAY_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "toy"
    package.mkdir()
    (package / "pyproject.toml").write_text("[project]\nname = 'toy'\nversion = '1'\n")
    built: list[str] = []

    def build(recipe: harness.Recipe, venv: Path) -> None:
        venv.mkdir()  # fails if half an installation is still there
        built.append(recipe.name)
        (venv / "half").touch()
        if len(built) == 1:
            raise InstallError("no network")

    monkeypatch.setattr(installation, "_build", build)
    path = recipe_file(tmp_path, "name: toy\npackages: [toy]\ncommand: ['{venv}/bin/toy']")
    recipe = harness.load(path)
    with pytest.raises(InstallError):
        install(recipe)
    first, second = install(recipe), install(recipe)
    assert first == second
    assert built == ["toy", "toy"]
    other = install(recipe.model_copy(update={"packages": ["toy==2"]}))
    assert other != first


@pytest.mark.slow
def test_an_installation_that_fails_says_why_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_RAY_CACHE", str(tmp_path))
    path = recipe_file(
        tmp_path, f"name: mine\npackages: ['{tmp_path}/no-such.whl']\ncommand: ['{{venv}}/x']"
    )
    with pytest.raises(InstallError, match=r"cannot install harness mine .*no-such\.whl") as error:
        install(harness.load(path))
    assert "\n" not in str(error.value)


def test_the_table_of_harnesses_tells_what_the_pinned_versions_did(generate) -> None:
    assert generate.HARNESSES.read_text() == generate.render_harnesses(), "run `make docs`"
    recipes = [harness.load(path.stem) for path in generate.RECIPES.glob("*.yaml")]
    tried = generate.results()
    assert {(result["harness"], result["version"]) for result in tried} == {
        (recipe.name, recipe.version) for recipe in recipes
    }, "run `make docs-harnesses`"
    assert all(result["passed"] for result in tried)


def test_the_mini_swe_agent_lock_pins_every_package() -> None:
    recipe = harness.load("mini-swe-agent")
    assert all("==" in line for line in recipe.requirements.splitlines())
    assert f"mini-swe-agent=={recipe.version}" in recipe.requirements.splitlines()


class OneTurn(BaseHTTPRequestHandler):
    """A model that writes one file and submits."""

    requests: ClassVar[list[tuple[str, str | None, dict[str, object]]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, self.headers["Authorization"], body))
        first = len(self.requests) == 1
        command = "pwd > where" if first else "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        call = {
            "id": f"call_{first}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": command})},
        }
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        reply = json.dumps(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "policy",
                "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_mini_swe_agent_runs_unchanged_from_its_recipe(tmp_path: Path) -> None:
    recipe = harness.load("mini-swe-agent")
    venv = install(recipe)
    assert venv is not None
    server = ThreadingHTTPServer(("127.0.0.1", 0), OneTurn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}/rollout/r-a0"
    workspace, home = tmp_path / "workspace", tmp_path / "home"
    workspace.mkdir()
    home.mkdir()
    (workspace / "mini.yaml").write_text("agent: {}")  # must not be taken for the harness's own
    values = Values(
        base_url=f"{root}/v1",
        root_url=root,
        model="policy",
        task="say where you are",
        task_file="",
        attempt="r-a0",
        workspace=str(workspace),
        home=str(home),
        context_tokens="4096",
        venv=str(venv),
        site_packages=str(site_packages(venv)),
        recipe_dir=recipe.recipe_dir,
        api_key="the-key",
    )
    argv, env, _ = harness.command_line(recipe, values)
    report = process.run(
        argv,
        env=process.base_environment(home, tmp_path) | env,
        cwd=workspace,
        log=tmp_path / "log",
        limits=process.Limits(timeout_s=120),
        attempt_id=f"mini-{os.getpid()}",
    )
    server.shutdown()
    assert (report.ended_by, report.status) == (process.EndedBy.EXIT, 0), report.output_tail
    assert (workspace / "where").read_text().strip() == str(workspace)
    assert [(path, key) for path, key, _ in OneTurn.requests] == [
        ("/rollout/r-a0/v1/chat/completions", "Bearer the-key")
    ] * 2
    assert sorted(os.listdir(workspace)) == ["mini.yaml", "where"]
    assert json.loads((home / "trajectory.json").read_text())["info"]["exit_status"] == "Submitted"


@pytest.mark.slow
def test_an_installed_harness_has_its_own_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_RAY_CACHE", str(tmp_path))
    recipe = harness.Recipe(name="empty", packages=["pip"], command=["{venv}/bin/python"])
    venv = install(recipe)
    assert venv is not None
    prefix = subprocess.check_output(
        [venv / "bin" / "python", "-c", "import sys; print(sys.prefix)"], text=True
    )
    assert Path(prefix.strip()) == venv != Path(sys.prefix)
    assert site_packages(venv).is_dir()


def test_a_harness_may_need_a_newer_python_than_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("LIGHTNING_RAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    needs = {"name": "new", "packages": ["pip"], "command": ["x"]}
    recipe = harness.Recipe(**needs, python="3.12")
    with pytest.raises(InstallError, match=r"needs Python 3\.12 or newer.*uv python install 3\.12"):
        install(recipe)
    for path in ("bin/python3.11", "bin/python3.13", "versions/3.14.1/bin/python3.14"):
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch(mode=0o755)
    assert interpreter(recipe) == str(tmp_path / "bin/python3.13")
    assert interpreter(harness.Recipe(**needs)) == sys.executable
    with pytest.raises(ValidationError, match="python"):
        harness.Recipe(**needs, python="2.7")


@pytest.mark.parametrize(
    ("program", "folder"),
    [
        ("/opt/agent/main.py", "/opt/agent"),
        ("/opt/n/lib/node_modules/a/node_modules/b/cli.js", "/opt/n/lib/node_modules"),
        ("/opt/agent", None),
        ("/usr/bin/agent", None),
    ],
)
def test_what_a_program_in_opt_came_with_is_shown_with_it(program: str, folder: str | None):
    shown = [Path(program), *([Path(folder)] if folder else [])]
    assert harness._with_its_own(Path(program)) == shown
