"""What podman is told of a Job, and what is made of what it says: no podman is needed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kubernetes.client import ApiException

from lightning_ray.config import ConfigError, load
from lightning_ray.records import Json, Outcome, Task
from lightning_ray.rollouts.pods import manifest
from lightning_ray.rollouts.pods.api import OUTAGE
from lightning_ray.rollouts.pods.manifest import AGENT, Frame, Room
from lightning_ray.rollouts.pods.outcomes import Patience, finished, standing
from lightning_ray.rollouts.pods.podman import command, containers, way
from lightning_ray.rollouts.pods.podman import folder as podman_folder
from lightning_ray.rollouts.pods.podman.containers import Making
from lightning_ray.rollouts.pods.podman.folder import Folder
from lightning_ray.rollouts.pods.template import JobTemplate, Names, TemplateFault

FRAME = Frame("run", None, 0.5, 1024, 100, 60.0, None)
ROOM = Room("a", "http://127.0.0.1:8765/rollout/a", "the key", AGENT, 90.0)
SWE = Path(__file__).parents[1] / "examples/kubernetes/swe.yaml"
TASK = Task("t", "mend", {"image_name": "swe:1"})


def job(template: Path | None = None, room: Room = ROOM) -> Json:
    names = Names("a", "r", "g", "train", "http://gateway")
    rendered = JobTemplate(str(template) if template else None, "agent:1").render(TASK, names)
    return manifest.build(rendered, room, FRAME)


def making(one: Json) -> Making:
    name = one["metadata"]["name"]
    secret = {"key": "the key", "order-0": "part"}
    return Making(one, "u", secret, f"/runs/{name}", "/runs/way")


def test_a_job_without_a_template_is_one_container_with_nothing_to_spare():
    one = making(job())
    argv, told = one.main()
    name = one.name
    assert {
        "--detach",
        f"--name={name}",
        "--label=lightning-ray/run=run",
        "--label=lightning-ray/role=agent",
        "--label=lightning-ray/uid=u",
        "--label=lightning-ray/room=a",
        "--label=lightning-ray/ttl=3600",
        "--timeout=150",
        "--network=none",
        "--http-proxy=false",
        "--user=65534:65534",
        "--read-only",
        "--read-only-tmpfs=false",
        "--security-opt=no-new-privileges",
        "--cap-drop=ALL",
        f"--memory={1 << 30}",
        f"--memory-swap={1 << 30}",
        f"--volume={name}-lightning-ray:/lightning:U,nocopy",
        f"--volume={name}-lightning-ray-tmp:/tmp:U,nocopy",
        f"--volume=/runs/{name}/termination-log:/dev/termination-log",
        "--volume=/runs/way:/lightning-way:ro",
        '--entrypoint=["python3"]',
    } <= set(argv)
    assert one.volumes == [f"{name}-lightning-ray", f"{name}-lightning-ray-tmp"]
    # The key is in the environment of podman, not on a command line that everybody reads.
    assert told == {"LIGHTNING_RAY_KEY": "the key", "LIGHTNING_RAY_POD": "u"}
    assert "the key" not in " ".join(argv)
    assert argv[argv.index("agent:1") + 1 : -1] == ["-I", "-c"]
    assert argv[-1].endswith(manifest.BOOTSTRAP)
    compile(argv[-1], "program", "exec")


def test_the_documented_template_is_carried_out_in_order():
    one = making(job(SWE))
    [(called, init)] = one.inits()
    name = one.name
    assert called == "harness"
    assert {"--rm", f"--label=lightning-ray/init-of={name}", "--user=0:0", "--cap-drop=ALL"} <= set(
        init
    )
    assert f"--volume={name}-harness:/harness:U,nocopy" in init
    assert init[-4:] == ["agent:1", "-a", "/opt/harness/.", "/harness"]
    argv, _ = one.main()
    assert f"--volume={name}-harness:/opt/harness:ro" in argv
    assert "--read-only" not in argv and "--workdir=/testbed" in argv and "swe:1" in argv
    assert any(text.startswith("--env=PATH=/opt/miniconda3/envs/testbed/bin:") for text in argv)
    assert one.images == {"agent:1": "missing", "swe:1": "missing"}
    assert list(containers.faults(one.job)) == [] and containers.left_out(one.job) == []


def test_a_room_without_a_gateway_has_no_way_out():
    room = Room("a", "", "", "grader", 90.0, ("part",), "print()")
    argv, told = making(job(room=room)).main()
    assert told == {"LIGHTNING_RAY_ORDER_0": "part"}
    assert argv[-1] == "print()" and not [text for text in argv if "lightning-way" in text]


TEMPLATE = """\
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      {pod}
      containers:
        - name: agent
          image: agent:1
          {container}
"""


@pytest.mark.parametrize(
    ("pod", "container", "line", "said"),
    [
        ("hostNetwork: true", "", 6, "no share in the machine's"),
        ("volumes: [{name: x, nfs: {server: a, path: b, readOnly: true}}]", "", 6, "emptyDir and"),
        ("runtimeClassName: gvisor", "", 6, "from its own settings"),
        ("hostUsers: false", "", 6, "from its own settings"),
        ("", "volumeMounts: [{name: x, mountPath: /x}]", 10, "there is no volume x"),
        ("", "envFrom: [{configMapRef: {name: x}}]", 10, "write env"),
        (
            "",
            "env: [{name: A, valueFrom: {secretKeyRef: {name: x, key: y}}}]",
            10,
            "write a value",
        ),
        ("", "securityContext: {seLinuxOptions: {type: t}}", 10, "not carried out"),
        ("securityContext: {sysctls: [{name: a, value: b}]}", "", 6, "not carried out"),
    ],
)
def test_what_podman_cannot_carry_out_is_refused_with_its_line(
    tmp_path, pod, container, line, said
):
    path = tmp_path / "job.yaml"
    path.write_text(TEMPLATE.format(pod=pod, container=container))
    [(field, why)] = containers.faults(job(path))
    error = ApiException(status=422)
    error.body = json.dumps({"details": {"causes": [{"field": field, "message": why}]}})
    found = JobTemplate(str(path), "agent:1").explain(error)
    assert isinstance(found, TemplateFault)
    assert f"{path}, line {line}: " in str(found) and said in str(found)


def test_what_is_left_out_is_named(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        TEMPLATE.format(pod="nodeSelector: {pool: a}", container="ports: [{containerPort: 1}]")
    )
    assert containers.left_out(job(path)) == [
        "spec.template.spec.containers[0].ports",
        "spec.template.spec.nodeSelector",
    ]


def test_pods_of_root_may_have_what_their_template_says(tmp_path):
    path = tmp_path / "job.yaml"
    context = (
        "securityContext: {runAsUser: 0, runAsNonRoot: false, allowPrivilegeEscalation: true, "
        "capabilities: {drop: [ALL], add: [CHOWN]}, readOnlyRootFilesystem: false, "
        "seccompProfile: {type: Unconfined}}"
    )
    path.write_text(TEMPLATE.format(pod="", container=context))
    argv, _ = making(job(path)).main()
    assert {"--cap-drop=ALL", "--cap-add=CHOWN", "--security-opt=seccomp=unconfined"} <= set(argv)
    assert not {"--security-opt=no-new-privileges", "--read-only"} & set(argv)


SAID = json.dumps({"ended_by": "exit", "status": 0, "error": "", "seconds": 1.0})


@pytest.mark.parametrize(
    ("code", "oom", "message", "outcome"),
    [
        (0, False, SAID, Outcome.COMPLETED),
        (3, False, SAID.replace(": 0,", ": 3,"), Outcome.HARNESS_ERROR),
        (1, True, SAID.replace("exit", "memory"), Outcome.OUT_OF_MEMORY),
        (137, True, "", Outcome.OUT_OF_MEMORY),
        (137, False, "", Outcome.HARNESS_ERROR),
        # There was no space for its message, see `entry.py`.
        (0, False, "", Outcome.COMPLETED),
        (255, False, "", Outcome.HARNESS_ERROR),
        (1, False, "Traceback\nOSError: no gateway", Outcome.LAUNCH_FAULT),
    ],
)
def test_each_end_means_what_it_means_in_a_pod(code, oom, message, outcome):
    labels = {
        "lightning-ray/uid": "u",
        "lightning-ray/room": "a",
        "lightning-ray/run": "run",
        "lightning-ray/role": "agent",
    }
    listed = {"Names": ["lr-a"], "Labels": labels, "State": "exited", "ExitCode": code}
    state = {"ExitCode": code, "OOMKilled": oom, "FinishedAt": "2026-12-01T14:00:00Z"}
    ended = containers.ended(state, message)
    found = containers.job_of(listed)
    pod = containers.pod(found["metadata"], {"terminated": ended})
    assert finished(found) and pod["metadata"]["labels"]["job-name"] == "lr-a"
    end = standing(found, [pod], Patience(900, 120)).end
    assert end is not None and end.outcome is outcome, end


def test_after_a_restart_of_the_machine_its_attempts_are_lost():
    state = {"ExitCode": 0, "OOMKilled": False, "FinishedAt": "0001-01-01T00:00:00Z"}
    assert containers.ended(state, "") == containers.UNKNOWN
    assert containers.ended(state, SAID)["exitCode"] == 0  # it had ended before
    job = {"name": "lr-a", "uid": "u", "labels": {}}
    pod = containers.pod(job, {"terminated": containers.UNKNOWN})
    end = standing({"metadata": job, "status": {}}, [pod], Patience(900, 120)).end
    assert end is not None and end.outcome is Outcome.NODE_LOST


def test_a_job_that_is_complete_waits_for_its_pods_own_words():
    """They come by another list: it may have ended by its limit of disk."""
    job = {"metadata": {}, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    named = {"name": "lr-a", "uid": "u", "labels": {}}
    running = containers.pod(named, {"running": {}})
    how = standing(job, [running], Patience(900, 120))
    assert (how.end, how.then, how.patience_s) == (None, Outcome.COMPLETED, 200.0)
    message = SAID.replace("exit", "disk")
    ended = containers.pod(named, {"terminated": {"exitCode": 0, "message": message}})
    end = standing(job, [ended], Patience(900, 120)).end
    assert end is not None and end.outcome is Outcome.OUTPUT_LIMIT


def test_no_more_of_a_message_is_read_than_kubernetes_keeps(folder):
    folder.make_job("lr-a")
    path = folder.job("lr-a") / "termination-log"
    path.write_text("x" * 10)
    os.truncate(path, 1 << 40)
    assert len(folder.message("lr-a")) == 4096


def test_a_podman_that_does_not_answer_is_an_outage(tmp_path, monkeypatch):
    program = tmp_path / "podman"
    program.write_text("#!/bin/sh\nexec sleep 5\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(OUTAGE, match="podman ps: no answer within 0.2 s"):
        command.podman("ps", timeout_s=0.2)


def test_a_missing_or_old_podman_is_said_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="not installed"):
        command.check()
    program = tmp_path / "podman"
    program.write_text("#!/bin/sh\necho 3.4.4\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match=r"podman 3.4.4 is too old"):
        command.check()
    program.write_text("#!/bin/sh\necho cannot clone: Operation not permitted >&2\nexit 125\n")
    with pytest.raises(ConfigError, match="cannot clone: Operation not permitted"):
        command.check()


def test_a_run_in_containers_needs_an_image():
    with pytest.raises(ConfigError, match="podman needs kubernetes.image"):
        load(None, ["rollout.launcher=podman"])


# -- the way out ---------------------------------------------------------------------------------


@pytest.fixture
def gateway():
    """A server that answers one line with its upper case."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as file:
            file.write(file.readline().upper())

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    made = Folder("x")
    yield made
    made.remove()


def within(seconds: float, what) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(folder: Folder) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return not probe.connect_ex(str(folder.path / way.SOCKET))


def test_bytes_are_carried_to_the_gateway_wherever_it_is_now(folder, gateway):
    inside = folder.address(f"http://127.0.0.1:{gateway}/v")
    assert inside == f"http://127.0.0.1:{gateway}/v"
    door = socket.create_server(("127.0.0.1", 0))
    argv = [sys.executable, "-I", way.__file__, "inside", str(door.fileno())]
    argv.append(str(folder.path / way.SOCKET))
    with subprocess.Popen(argv, pass_fds=[door.fileno()]) as inner:
        port = door.getsockname()[1]

        def asked() -> bytes:
            with socket.create_connection(("127.0.0.1", port)) as one, one.makefile("rwb") as file:
                file.write(b"hello\n")
                file.flush()
                return file.read()

        assert asked() == b"HELLO\n"
        # The gateway moves: what is inside does not notice.
        folder.address("http://127.0.0.1:1")
        assert asked() == b""
        folder.address(f"http://127.0.0.1:{gateway}")
        assert asked() == b"HELLO\n"
        inner.kill()
    folder.remove()
    within(10, lambda: not running(folder))


def test_one_container_cannot_take_all_connections(folder, gateway, monkeypatch):
    monkeypatch.setattr(way, "CONNECTIONS", 2)
    folder.make(folder.way)
    (folder.path / way.ADDRESS).write_text(f"127.0.0.1:{gateway}")

    async def work() -> None:
        serving = asyncio.create_task(way.outside(str(folder.path)))
        path = str(folder.path / way.SOCKET)
        while not os.path.exists(path):
            await asyncio.sleep(0.01)
        first = [await asyncio.open_unix_connection(path) for _ in range(2)]
        await asyncio.sleep(0.2)
        reader, writer = await asyncio.open_unix_connection(path)
        await asyncio.open_unix_connection(path)
        # As many wait; what is more is not held open.
        more, _ = await asyncio.open_unix_connection(path)
        assert await asyncio.wait_for(more.read(), 5) == b""
        writer.write(b"third\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 0.5)
        first[0][1].write(b"first\n")
        assert await first[0][0].read() == b"FIRST\n"
        assert await asyncio.wait_for(reader.read(), 5) == b"THIRD\n"
        os.unlink(folder.path / way.ADDRESS)
        await asyncio.wait_for(serving, 5)

    asyncio.run(work())


def test_an_address_that_nobody_can_be_carried_to_is_refused(folder):
    with pytest.raises(ConfigError, match="leave it out"):
        folder.address("https://gateway.example")


def test_a_folder_with_too_long_a_path_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(podman_folder, "_START_S", 1.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 80)))
    (tmp_path / ("x" * 80)).mkdir()
    made = Folder("x")
    with pytest.raises(ConfigError, match="is TMPDIR longer"):
        made.address("http://127.0.0.1:1")
    made.remove()


def test_a_folder_of_somebody_else_is_not_used(folder, monkeypatch):
    folder.make()
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="somebody else's"):
        folder.make()
