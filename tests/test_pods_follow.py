"""The watch on Jobs, against a server that says what the real one says seldom: bookmarks, expired
versions, silence, and nonsense. What it says always is in tests/kubernetes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from lightning_ray.rollouts.pods import api
from lightning_ray.rollouts.pods.api import Api, Follower
from lightning_ray.sections import KubernetesSection


def thing(name: str, version: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name, "resourceVersion": version}}


class Server:
    """Answers lists with `items` at `version`, and each watch with the next of `watches`: lines,
    or None for silence. `asked` are the versions of watches, "list" for a list."""

    def __init__(self) -> None:
        self.version, self.items = "1", [thing("a", "1")]
        self.watches: list[list[Any]] = []
        self.asked: list[str] = []
        self.ends = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                self.send_response(200)
                self.end_headers()
                if "watch" not in query:
                    server.asked.append("list")
                    answer = {"metadata": {"resourceVersion": server.version}}
                    self.wfile.write(json.dumps({**answer, "items": server.items}).encode())
                    return
                server.asked.append(query["resourceVersion"][0])
                for line in server.watches.pop(0) if server.watches else [None]:
                    if line is None:
                        server.ends.wait(20)
                    else:
                        self.wfile.write((json.dumps(line) + "\n").encode())
                        self.wfile.flush()

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.ends.set()
    server.http.shutdown()


class Follow:
    """A follower and what it told."""

    def __init__(self, server: Server, folder: Path) -> None:
        config = folder / "config"
        url = f"http://127.0.0.1:{server.http.server_port}"
        told = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": {"server": url}}],
            "users": [{"name": "me", "user": {}}],
        }
        config.write_text(json.dumps(told))
        self.lists: list[list[str]] = []
        self.events: list[tuple[str, str]] = []
        self.away: list[str] = []
        self.follower = Follower(
            Api(KubernetesSection(kubeconfig=str(config))),
            "jobs",
            "",
            lambda objects, _: self.lists.append([o["metadata"]["name"] for o in objects]),
            lambda kind, one: self.events.append((kind, one["metadata"]["name"])),
            self.away.append,
        )
        self.follower.start()


@pytest.fixture
def follow(server, tmp_path) -> Iterator[Any]:
    made: list[Follow] = []

    def start() -> Follow:
        made.append(Follow(server, tmp_path))
        return made[-1]

    yield start
    for one in made:
        one.follower.stop()
    server.ends.set()
    for one in made:
        one.follower.join(10)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_watch_goes_on_from_the_last_bookmark(server, follow) -> None:
    added = {"type": "ADDED", "object": thing("b", "5")}
    mark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}
    server.watches = [[added, mark]]
    one = follow()
    until(lambda: len(server.asked) == 3)
    assert server.asked == ["list", "1", "9"]
    assert one.events == [("ADDED", "b")]
    assert set(one.away) == {""}


def test_an_expired_version_is_a_new_list_and_no_outage(server, follow) -> None:
    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
    server.watches = [[gone]]
    one = follow()
    until(lambda: len(server.asked) == 4)
    assert server.asked == ["list", "1", "list", "1"]
    assert one.lists == [["a"], ["a"]]
    assert set(one.away) == {""}


def test_a_connection_that_has_died_without_a_word_is_made_anew(
    server, follow, monkeypatch
) -> None:
    monkeypatch.setattr(api, "QUIET_S", 0.6)
    one = follow()
    until(lambda: len(server.asked) == 3)
    assert server.asked == ["list", "1", "1"]
    assert set(one.away) == {""}


def test_what_nobody_thought_of_is_said_and_the_watch_goes_on(server, follow) -> None:
    server.watches = [[{"type": "ADDED", "object": [1]}]]
    one = follow()
    until(lambda: len(server.asked) == 4)
    assert server.asked == ["list", "1", "list", "1"]
    assert any("TypeError" in problem for problem in one.away)
    until(lambda: one.away[-1] == "")
