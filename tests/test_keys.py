"""Who gets in: every route of the gateway with every kind of key, what listens where, and where a
key can be read."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import re
import secrets
import socket
import stat
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from support import HELLO, Running

from lightning_ray.config import load
from lightning_ray.gateway import deploy
from lightning_ray.gateway.app import app
from lightning_ray.gateway.deploy import GatewayStartError
from lightning_ray.gateway.dispatch import DIALECTS
from lightning_ray.records import Outcome, RolloutSpec, RolloutState, Split, Task
from lightning_ray.rollouts import controller

BODY_TIMEOUT_S = 3
# Opens nothing by itself; its harness says its key to this test, and waits.
HARNESS = """
import json, os, sys, time, urllib.request
with open("key.tmp", "w") as file:
    file.write(os.environ["KEY"])
request = urllib.request.Request(
    sys.argv[1] + "/chat/completions",
    b'{"messages": [{"role": "user", "content": "hi"}]}',
    {"authorization": "Bearer " + os.environ["KEY"]},
)
urllib.request.urlopen(request).read()
os.rename("key.tmp", sys.argv[2] + ".key")
while not os.path.exists("go"):
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "harness.py").write_text(HARNESS)
    recipe = {
        "name": "script",
        "command": [sys.executable, "-S", f"{folder}/harness.py", "{base_url}", "{attempt}"],
        "env": {"KEY": "{api_key}"},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    running = Running(
        folder / "run",
        [["hello"]],
        f"gateway.body_timeout_s={BODY_TIMEOUT_S}",
        f"harness.recipe={folder}/recipe.yaml",
        "rollout.concurrency=1",
        "task.prepare=null",
        "task.collect=null",
        "task.grader=null",
    )
    operator = secrets.token_hex(32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(deploy.OPERATOR_KEY, operator)
        running.start()
    for name in ("mine", "other", "ended"):
        running.attempt(key=f"key-of-{name}", rollout=name)
    own = hashlib.sha256(b"key-of-mine").hexdigest()
    ray.get(running.store.open_room.remote("mine-a0", own, {"order": b"do", "workspace": b"it"}))
    end(running, "ended-a0")
    running.keys = {
        "none": None,
        "wrong": "é",
        "own": "key-of-mine",
        "other": "key-of-other",
        "ended": "key-of-ended",
        "grader": ray.get(running.store.grader_key.remote("mine")),
        "other grader": ray.get(running.store.grader_key.remote("other")),
        "operator": operator,
        # Not the operator's once somebody has chosen another.
        "derived": ray.get(running.store.operator_key.remote()),
    }
    yield running
    deploy.stop()
    ray.shutdown()


def end(gateway, attempt: str) -> None:
    ray.get(gateway.store.end_attempt.remote(attempt, Outcome.COMPLETED, "", time.time()))


# -- every route with every key --------------------------------------------------------------------

# What a key gets where it does not get 401: it opens the route, or 410.
OPENS = "opens"
HARNESSES = {"own": OPENS, "ended": 410}
GRADERS = {"grader": OPENS}
# The rooms of pods: there is one for the attempt that lives.
PODS = {"own": OPENS}
OPERATORS = {"operator": OPENS}
EVERYBODY = None
MODEL = "/rollout/{attempt_id}/v1"
ROLLOUT = "/api/v1/rollouts/{rollout_id}"
MATRIX = {
    ("POST", f"{MODEL}/chat/completions"): HARNESSES,
    ("POST", f"{MODEL}/responses"): HARNESSES,
    ("POST", f"{MODEL}/messages"): HARNESSES,
    ("POST", f"{MODEL}/messages/count_tokens"): HARNESSES,
    ("GET", f"{MODEL}/models"): HARNESSES,
    ("POST", "/rollout/{rollout_id}/reward"): GRADERS,
    ("GET", "/rollout/{room}/files/{name}"): PODS,
    ("PUT", "/rollout/{room}/files/result"): PODS,
    ("GET", "/api/v1/rollouts"): OPERATORS,
    ("POST", "/api/v1/rollouts"): OPERATORS,
    ("GET", ROLLOUT): OPERATORS,
    ("POST", f"{ROLLOUT}/cancel"): OPERATORS,
    ("GET", f"{ROLLOUT}/calls"): OPERATORS,
    ("GET", f"{ROLLOUT}/events"): OPERATORS,
    ("POST", f"{ROLLOUT}/events"): OPERATORS,
    ("HEAD", "/rollout/{attempt_id}"): EVERYBODY,
    ("HEAD", "/rollout/{attempt_id}/"): EVERYBODY,
    ("GET", "/v1/models"): EVERYBODY,
    ("GET", "/healthz"): EVERYBODY,
    ("GET", "/openapi.json"): EVERYBODY,
    ("HEAD", "/openapi.json"): EVERYBODY,
}


def test_every_route_has_a_row():
    assert {(m, route.path) for route in app.routes for m in route.methods} == set(MATRIX)


def path_for(path: str, kind: str) -> str:
    rollout = "ended" if kind == "ended" else "mine"
    attempt = f"{rollout}-a0"
    return path.format(attempt_id=attempt, room=attempt, rollout_id=rollout, name="order")


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
@pytest.mark.parametrize(("method", "path"), MATRIX)
def test_a_key_opens_what_it_is_for_and_nothing_else(gateway, method, path, header):
    refusals = set()
    for kind, key in gateway.keys.items():
        value = f"Bearer {key}" if header == "authorization" else key
        reply = httpx.request(
            method,
            gateway.url + path_for(path, kind),
            headers={} if key is None else {header: value.encode()},
            content=b"{}" if method in ("POST", "PUT") else b"",
            timeout=30,
        )
        wanted = OPENS if MATRIX[method, path] is EVERYBODY else MATRIX[method, path].get(kind, 401)
        if wanted is OPENS:
            assert reply.status_code not in (401, 403, 404, 410), (kind, reply.text)
        else:
            assert reply.status_code == wanted, (kind, reply.text)
        if reply.status_code == 401 and kind != "none":
            refusals.add(reply.text)
        assert not [k for k in gateway.keys.values() if k and len(k) > 1 and k in reply.text]
    assert len(refusals) <= 1  # they tell nothing apart


@pytest.mark.parametrize(("method", "path"), MATRIX)
def test_a_key_in_the_query_string_is_no_key(gateway, method, path):
    if MATRIX[method, path] is EVERYBODY:
        return
    for name, key in itertools.product(("key", "api_key", "authorization"), ("own", "operator")):
        reply = httpx.request(
            method, gateway.url + path_for(path, "own"), params={name: gateway.keys[key]}
        )
        assert reply.status_code == 401, reply.text


def test_a_stranger_learns_not_which_attempts_there_are(gateway):
    for route in DIALECTS:
        told = set()
        for attempt in ("mine-a0", "ended-a0", "nobody-a0", "%00"):
            reply = httpx.post(
                f"{gateway.url}/rollout/{attempt}/v1/{route}",
                headers={"x-api-key": "key-of-other"},
                json={"messages": HELLO},
            )
            told.add((reply.status_code, reply.text))
        assert len(told) == 1 and next(iter(told))[0] == 401, told


@pytest.mark.parametrize("query", ["", "?limit=0", "/mine?fields=perhaps", "/mine/calls?attempt=x"])
def test_a_stranger_learns_not_what_is_wrong_with_a_query(gateway, query):
    url = f"{gateway.url}/api/v1/rollouts{query}"
    for key in ("own", "grader", "none"):
        headers = {} if key == "none" else {"x-api-key": gateway.keys[key]}
        assert httpx.get(url, headers=headers).status_code == 401, key


def test_a_key_that_a_replica_remembers_is_dead_with_its_attempt(gateway):
    attempt = gateway.attempt(key="short-lived")
    url, key = f"{gateway.url}/rollout/{attempt}/v1", {"x-api-key": "short-lived"}
    message = {"model": "m", "max_tokens": 5, "messages": HELLO}
    routes = [
        ("GET", "models"),
        ("POST", "chat/completions"),
        ("POST", "messages"),
        ("POST", "messages/count_tokens"),
    ]
    for status in (200, 410):
        for method, route in routes:
            reply = httpx.request(method, f"{url}/{route}", headers=key, json=message)
            assert reply.status_code == status, (route, reply.text)
        if status == 200:
            end(gateway, attempt)


# -- bodies ----------------------------------------------------------------------------------------


def ask(
    gateway, path: str, key: str, *headers: str, drip: bool = False, method: str = "POST"
) -> bytes:
    """Sends the head of a request, and of its body nothing or a byte now and then, until the
    answer comes."""
    lines = [f"{method} {path} HTTP/1.1", "host: gateway", f"x-api-key: {key}", *headers, "", ""]
    with socket.create_connection(("127.0.0.1", gateway.config.gateway.port), 30) as stream:
        stream.sendall("\r\n".join(lines).encode())
        stream.settimeout(0.2)
        deadline = time.monotonic() + 30
        reply = b""
        while not reply.endswith(b"}"):
            assert time.monotonic() < deadline, f"no answer but {reply!r}"
            try:
                reply += stream.recv(1 << 16)
            except TimeoutError:
                if drip:
                    stream.sendall(b" ")
        return reply


@pytest.mark.parametrize(("method", "path"), [row for row in MATRIX if row[0] in ("POST", "PUT")])
def test_of_a_stranger_no_body_is_read(gateway, method, path):
    started = time.monotonic()
    where, size = path_for(path, "own"), "content-length: 1000"
    reply = ask(gateway, where, "key-of-other", size, method=method)
    assert reply.startswith(b"HTTP/1.1 401"), reply
    assert time.monotonic() - started < BODY_TIMEOUT_S


def test_clients_that_send_slowly_are_ended_and_hold_up_nobody(gateway):
    paths = [f"/rollout/mine-a0/v1/{route}" for route in [*DIALECTS, "messages/count_tokens"]] * 8
    started = time.monotonic()
    with ThreadPoolExecutor(len(paths)) as pool:
        slow = [
            pool.submit(ask, gateway, path, "key-of-mine", "content-length: 1000", drip=True)
            for path in paths
        ]
        assert gateway.post("mine-a0", {"messages": HELLO}, "key-of-mine").status_code == 200
        assert not any(each.done() for each in slow)
        for each in slow:
            reply = each.result()
            assert reply.startswith(b"HTTP/1.1 408") and b"did not come within 3 s" in reply, reply
    assert BODY_TIMEOUT_S <= time.monotonic() - started < 5 * BODY_TIMEOUT_S


def test_an_order_goes_to_one_pod_and_only_a_result_comes_back(gateway):
    key = hashlib.sha256(b"pod-key").hexdigest()
    ray.get(gateway.store.open_room.remote("room", key, {"order": b"do", "workspace": b"tree"}))
    url = f"{gateway.url}/rollout/room/files"

    def ask_as(pod: str, method: str, name: str, content: bytes = b"") -> httpx.Response:
        headers = {"x-api-key": "pod-key", "x-lightning-ray-pod": pod}
        return httpx.request(method, f"{url}/{name}", headers=headers, content=content)

    assert ask_as("first", "GET", "order").content == b"do"
    assert ask_as("first", "GET", "order").status_code == 200  # its answer was lost, say
    refused = ask_as("second", "GET", "order")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "order_taken")
    assert ask_as("second", "GET", "workspace").content == b"tree"
    for name in ("result", "%2ekey", ".claimant", "nothing", "%2e%2e", "x" * 300):
        assert ask_as("first", "GET", name).status_code == 404, name
    assert ask_as("first", "PUT", "order", b"other").status_code == 405
    assert ask_as("first", "PUT", "result", b"x" * (2 << 20)).status_code == 413
    assert ask_as("first", "PUT", "result", b"changes").status_code == 204
    assert ask_as("first", "PUT", "result", b"final").status_code == 204
    assert ray.get(gateway.store.room_result.remote("room")) == b"final"
    ray.get(gateway.store.close_room.remote("room"))
    assert ask_as("first", "GET", "workspace").status_code == 401
    assert ask_as("first", "PUT", "result", b"late").status_code == 401


@pytest.mark.slow
def test_a_client_that_sends_its_headers_slowly_is_ended(gateway):
    with socket.create_connection(("127.0.0.1", gateway.config.gateway.port), 60) as stream:
        stream.sendall(b"GET /healthz HTTP/1.1\r\n")
        started = time.monotonic()
        stream.settimeout(1)
        while time.monotonic() < started + 60:
            try:
                reply = stream.recv(1 << 16)
                break
            except TimeoutError:
                stream.sendall(b"x: y\r\n")
    assert reply.startswith(b"HTTP/1.1 408") or not reply, reply
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("route", [*DIALECTS, "messages/count_tokens"])
def test_a_body_that_is_too_large_or_compressed_is_refused_unread(gateway, route):
    path = f"/rollout/mine-a0/v1/{route}"
    large = ask(gateway, path, "key-of-mine", "content-length: 2000000")
    assert large.startswith(b"HTTP/1.1 413"), large
    for encoding in ("gzip", "deflate", "br", "zstd", "gzip, gzip"):
        bomb = ask(
            gateway, path, "key-of-mine", f"content-encoding: {encoding}", "content-length: 1000"
        )
        assert bomb.startswith(b"HTTP/1.1 415") and b'"error"' in bomb, bomb


def test_a_body_that_grows_above_the_limit_is_refused(gateway):
    chunks = (b"x" * (1 << 16) for _ in range(20))  # of no declared length
    reply = gateway.post("mine-a0", chunks, "key-of-mine")
    assert reply.status_code == 413


# -- what listens ----------------------------------------------------------------------------------


def test_nothing_of_the_gateway_listens_beyond_loopback(gateway):
    folder = f"/tmp/lr-haproxy-{gateway.config.gateway.port}"
    proxies = [p for p in psutil.process_iter(["cmdline"]) if folder in str(p.info["cmdline"])]
    assert proxies
    ours = {c.laddr for p in proxies for c in p.net_connections("tcp") if c.status == "LISTEN"}
    assert len(ours) == 3  # the gateway, statistics, metrics
    [config] = glob.glob(f"{folder}/*/haproxy.cfg")
    ports = {int(port) for port in re.findall(r"server \S+ \S+:(\d+)", Path(config).read_text())}
    assert len(ports) == 2  # the replica, and Serve's own proxy
    everyone = {c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
    behind = {address for address in everyone if address.port in ports}
    assert {address.port for address in behind} == ports
    assert {address.ip for address in ours | behind} == {"127.0.0.1"}


def test_nobody_else_reads_the_proxys_files_or_uses_its_admin_socket(gateway):
    folder = Path(f"/tmp/lr-haproxy-{gateway.config.gateway.port}")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    [admin] = folder.glob("*/admin.sock")
    assert stat.S_IMODE(admin.stat().st_mode) == 0o600
    assert list(folder.glob("*/metrics.sock"))


def test_a_folder_that_somebody_else_made_is_not_used(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o755)
    deploy._own_folder(mine)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(mine)
    (tmp_path / "file").touch()
    theirs = ["link", "file"]
    if os.geteuid() == 0:
        (tmp_path / "other").mkdir()
        os.chown(tmp_path / "other", 65534, 65534)
        theirs.append("other")
    for name in theirs:
        with pytest.raises(GatewayStartError, match=f"{name} is another user's"):
            deploy._own_folder(tmp_path / name)


def test_without_a_chosen_operators_key_nothing_listens_beyond_loopback(monkeypatch):
    def settle(host: str):
        return deploy.settle_port(load(None, [f"gateway.host='{host}'", "gateway.port=0"]))

    monkeypatch.delenv(deploy.OPERATOR_KEY, raising=False)
    for host in ("0.0.0.0", "::", "192.0.2.1", "gateway.example"):
        with pytest.raises(GatewayStartError, match=f"set .* {deploy.OPERATOR_KEY} to at least"):
            settle(host)
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert settle(host).gateway.port
    monkeypatch.setenv(deploy.OPERATOR_KEY, "x" * 31)
    for host in ("0.0.0.0", "127.0.0.1"):
        with pytest.raises(GatewayStartError, match="has 31 characters") as caught:
            settle(host)
        assert "xxx" not in str(caught.value)
    monkeypatch.setenv(deploy.OPERATOR_KEY, secrets.token_hex(16))
    assert settle("0.0.0.0").gateway.port


# -- where a key can be read -----------------------------------------------------------------------


def wait_for(condition, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


def test_no_key_is_in_a_file_that_others_read_nor_on_a_command_line_nor_in_a_log(gateway):
    actor = controller.start(gateway.config, gateway.store, gateway.url)
    rollout = f"seen-{os.getpid()}"
    spec = RolloutSpec(rollout, rollout, Task("t", "s"), Split.TRAIN, 1)
    assert ray.get(actor.submit.remote([spec])) == []
    pattern = f"{tempfile.gettempdir()}/lr-*/workspace/{rollout}-a0.key"
    [file] = wait_for(lambda: glob.glob(pattern))
    grader = ray.get(gateway.store.grader_key.remote(rollout))
    keys = {
        "harness": Path(file).read_text(),
        "grader": grader,
        **{kind: gateway.keys[kind] for kind in ("operator", "derived")},
    }
    assert min(map(len, keys.values())) > 40 and len(set(keys.values())) == len(keys)

    def kinds_in(content: bytes) -> set[str]:
        return {kind for kind, key in keys.items() if key.encode() in content}

    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert any(f"{rollout}-a0" in line for line in lines)
    assert not [line for line in lines if kinds_in(line.encode())]
    Path(file).with_name("go").touch()
    wanted = gateway.config.run_dir / "to_grade" / f"{rollout}-a0.json"
    wait_for(wanted.exists)
    asked = json.loads(wanted.read_text())
    reply = httpx.post(asked["url"], headers={"x-api-key": asked["key"]}, json={"reward": 1.0})
    assert reply.status_code == 200, reply.text
    [finished] = wait_for(lambda: ray.get(actor.next_finished.remote(1.0)))
    assert finished.state is RolloutState.FINISHED, finished
    ray.get(actor.shutdown.remote())

    session = Path(ray._private.worker._global_node.get_session_dir_path())
    proxy = Path(f"/tmp/lr-haproxy-{gateway.config.gateway.port}")
    found = {
        path: kinds
        for folder in (gateway.config.run_dir, session / "logs", proxy)
        for path in folder.rglob("*")
        if path.is_file() and (kinds := kinds_in(path.read_bytes()))
    }
    # These are for whoever owns the run, and for nobody else.
    assert {path.name: kinds for path, kinds in found.items()} == {
        "operator.key": {"derived"},
        f"{rollout}-a0.json": {"grader"},
    }
    for path in [*found, gateway.folder / "store" / "grader.key"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_free_port_is_none_that_linux_or_ray_may_give_to_somebody_while_a_run_starts(monkeypatch):
    taken = deploy.free_port()
    assert 19_999 < taken < 30_000
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", taken))
        somebody.listen()
        monkeypatch.setattr(deploy, "QUIET_PORTS", range(taken, taken + 1))
        with pytest.raises(GatewayStartError, match=f"no free port from {taken} to {taken}"):
            deploy.free_port()
