"""What an attempt of mini-SWE-agent costs: executed or forked, in a sandbox or not.

    python benchmarks/harness_start.py [--attempts 5]

One model call per attempt, answered at once by a stub, so that what is left is the harness's own
start and work. Prints medians. The first forked attempt starts the fork server and is reported
apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_ray.rollouts import harness, process, sandbox
from lightning_ray.rollouts.installation import install, site_packages
from lightning_ray.rollouts.places import IN_SANDBOX, Places
from lightning_ray.rollouts.sandbox import Mode

CONFIG = "pkg:lightning_ray.tasks.swe/mini.yaml"
ANSWER = {
    "id": "x", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop",
                 "message": {"role": "assistant", "content": "```bash\ntrue\n```"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}  # fmt: skip


class Stub(BaseHTTPRequestHandler):
    """Answers every call with one shell command."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def attempt(
    recipe: harness.Recipe, root: str, folder: Path, warm: bool, mode: Mode
) -> process.ExitReport:
    """One attempt in `folder`, which has a workspace, a home and a tmp."""
    venv = install(recipe)
    assert venv is not None
    readable = harness.readable(recipe, venv, process.search_path())
    box, url = sandbox.around(folder, root, readable, sandbox.Wanted(mode))
    places = IN_SANDBOX if box else Places.below(folder)
    values = harness.Values(
        base_url=f"{url}/v1", root_url=url, model="m", task="do nothing", attempt="a",
        context_tokens="1000", venv=str(venv), site_packages=str(site_packages(venv)),
        recipe_dir="", api_key="key", **places.placeholders,
    )  # fmt: skip
    argv, env, _ = harness.command_line(recipe, values)
    shared = Path(tempfile.gettempdir())
    report = process.run(
        argv,
        env=process.base_environment(places.home, places.tmp) | env,
        cwd=Path(places.workspace),
        log=folder / "log",
        limits=process.Limits(120),
        attempt_id="benchmark",
        preload=harness.preload(recipe, venv, process.base_environment(shared, shared))
        if warm
        else None,
        sandbox=box,
    )
    if report.status != 0:
        raise SystemExit(f"the harness failed: {report.describe()}\n{report.output_tail}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attempts", type=int, default=5)
    count = parser.parse_args().attempts
    recipe = harness.load("mini-swe-agent", ["--model-class", "litellm_textbased", "-c", CONFIG])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}"
    kinds = [
        ("executed", False, Mode.NONE),
        ("executed, in a sandbox", False, Mode.BUBBLEWRAP),
        ("forked", True, Mode.NONE),
        ("forked, in a sandbox", True, Mode.BUBBLEWRAP),
    ]
    reports: dict[str, list[process.ExitReport]] = {kind: [] for kind, _, _ in kinds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("workspace", "home", "tmp"):
            (folder / part).mkdir()
        install(recipe)
        started = time.monotonic()
        attempt(recipe, root, folder, True, Mode.NONE)
        first = time.monotonic() - started
        for _ in range(count):  # interleaved: a noisy machine hits all alike
            for kind, warm, mode in kinds:
                reports[kind].append(attempt(recipe, root, folder, warm, mode))
    table = Table("", "CPU seconds", "seconds", title="mini-SWE-agent, one call, median")
    for kind, done in reports.items():
        medians = (
            statistics.median(r.cpu_seconds for r in done),
            statistics.median(r.seconds for r in done),
        )
        table.add_row(kind, *(f"{value:.2f}" for value in medians))
    Console().print(table)
    print(f"the first forked attempt, which starts the fork server: {first:.1f} s")


if __name__ == "__main__":
    main()
