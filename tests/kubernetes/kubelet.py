"""A kubelet that runs the containers of its pods as processes of this machine, in bubblewrap.

Every image is this machine's file system, read-only; `folder:PATH` has a copy of that folder at the
container's working directory, which can be written. emptyDir volumes, Secrets in the environment,
the downward API, termination messages, logs, graceful deletion and node heartbeats work
as a user of the API would expect; probes, restarts and networks of pods do not exist. Faults that
real nodes have are asked for by the name of the image: `missing` cannot be pulled, `invalid` has no
valid name, `oom` is killed for its memory, `evict` is evicted since the node has no memory left.
A pod that keeps more in an emptyDir than its limit is evicted for that.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.utils import parse_quantity

NODE = os.environ["NODE"]
FOLDER = Path(os.environ["FOLDER"])
CPUS, PODS = os.environ.get("CPUS", "64"), os.environ.get("PODS", "2500")
BEAT_S = 2.0
LOOK_S = 2.0  # between two looks at the volumes of a pod; a real kubelet takes 10
AGAIN_S = 0.2

config.load_kube_config(os.environ["KUBECONFIG"])
settings = client.Configuration.get_default_copy()
settings.connection_pool_maxsize = 64
api = client.ApiClient(settings)
core = client.CoreV1Api(api)
running: dict[str, subprocess.Popen[bytes]] = {}
begun: set[str] = set()
lock = threading.Lock()


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()


def register(port: int) -> None:
    labels = {"kubernetes.io/hostname": NODE, "kubernetes.io/os": "linux"}
    with contextlib.suppress(client.ApiException):
        core.create_node({"metadata": {"name": NODE, "labels": labels}, "spec": {}})
    beat(port)
    core.patch_node(NODE, {"spec": {"taints": []}})


def beat(port: int) -> None:
    size = {"cpu": CPUS, "memory": "4Ti", "pods": PODS, "ephemeral-storage": "100Gi"}
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "test",
        "lastHeartbeatTime": now(),
        "lastTransitionTime": now(),
    }
    names = (
        "architecture bootID containerRuntimeVersion kernelVersion kubeProxyVersion kubeletVersion"
    )
    info = dict.fromkeys(
        [*names.split(), "machineID", "operatingSystem", "osImage", "systemUUID"], ""
    )
    status = {
        "capacity": size,
        "allocatable": size,
        "conditions": [ready],
        "nodeInfo": info,
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    core.patch_node_status(NODE, {"status": status})


def patch(pod: dict[str, Any], status: dict[str, Any]) -> None:
    metadata = pod["metadata"]
    for _ in range(50):  # the API server may be away
        try:
            core.patch_namespaced_pod_status(
                metadata["name"],
                metadata["namespace"],
                {"status": {"hostIP": "127.0.0.1", **status}},
            )
            return
        except client.ApiException as error:
            if error.status in (404, 409):
                return
        except Exception as error:
            print("patch", repr(error)[:200], file=sys.stderr)
        time.sleep(AGAIN_S)


def container_status(container: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    full = {"waiting": None, "running": None, "terminated": None, **state}
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": "running" in state,
        "restartCount": 0,
        "state": full,
    }


def waits(pod: dict[str, Any], reason: str, message: str) -> None:
    container = pod["spec"]["containers"][0]
    state = {"waiting": {"reason": reason, "message": message}}
    patch(pod, {"phase": "Pending", "containerStatuses": [container_status(container, state)]})


def run(pod: dict[str, Any]) -> None:
    """One pod from its start to its end."""
    container = pod["spec"]["containers"][0]
    image = container["image"]
    metadata = pod["metadata"]
    if image.startswith("missing"):
        waits(pod, "ErrImagePull", f"failed to pull {image}: not found")
        time.sleep(1)
        waits(pod, "ImagePullBackOff", f"back-off pulling image {image}")
        return
    if image.startswith("invalid"):
        waits(pod, "InvalidImageName", f"couldn't parse image reference {image}")
        return
    if image.startswith("evict"):
        message = "The node was low on resource: memory."
        patch(pod, {"phase": "Failed", "reason": "Evicted", "message": message})
        return
    env = environment(pod, container)
    if env is None:
        return
    folder = FOLDER / metadata["uid"]
    argv = [*(container.get("command") or []), *(container.get("args") or [])]
    try:
        box = bubblewrap(pod, container, folder)
    except OSError as error:
        waits(pod, "CreateContainerError", str(error))
        return
    message_file = folder / "termination-log"
    started = now()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*box, *argv], env=env, stdout=log, stderr=log, start_new_session=True
        )
    with lock:
        running[metadata["uid"]] = process
    conditions = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
    status = container_status(container, {"running": {"startedAt": started}})
    patch(
        pod,
        {
            "phase": "Running",
            "startTime": started,
            "podIP": "127.0.0.1",
            "conditions": conditions,
            "containerStatuses": [status],
        },
    )
    code = None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(LOOK_S)
        if code is None and (name := overfull(pod, folder)):
            os.killpg(process.pid, signal.SIGKILL)
            message = f"Usage of EmptyDir volume {json.dumps(name)} exceeds the limit. "
            patch(pod, {"phase": "Failed", "reason": "Evicted", "message": message})
            return
    message = message_file.read_text(errors="replace")
    if not message and code:
        message = (folder / "log").read_text(errors="replace")[-2000:]
    reason = "Completed" if code == 0 else "Error"
    if image.startswith("oom"):
        code, reason = 137, "OOMKilled"
    ended = {
        "exitCode": code if code >= 0 else 128 - code,
        "reason": reason,
        "message": message,
        "startedAt": started,
        "finishedAt": now(),
    }
    status = container_status(container, {"terminated": ended})
    phase = "Succeeded" if code == 0 else "Failed"
    patch(pod, {"phase": phase, "containerStatuses": [status]})


def overfull(pod: dict[str, Any], folder: Path) -> str | None:
    """The volume that holds more than it may."""
    for volume in pod["spec"].get("volumes") or []:
        limit = (volume.get("emptyDir") or {}).get("sizeLimit")
        if not limit:
            continue
        used = 0
        for where, _, files in os.walk(folder / "volumes" / volume["name"]):
            for name in files:
                with contextlib.suppress(OSError):
                    used += os.lstat(os.path.join(where, name)).st_size
        if used > parse_quantity(limit):
            return str(volume["name"])
    return None


def environment(pod: dict[str, Any], container: dict[str, Any]) -> dict[str, str] | None:
    """The container's environment; waits for its Secrets."""
    env = {"PATH": os.environ["PATH"]}
    for one in container.get("env") or []:
        source = one.get("valueFrom") or {}
        if "secretKeyRef" in source:
            found = secret(pod, source["secretKeyRef"])
            if found is None:
                return None
            env[one["name"]] = found
        elif "fieldRef" in source:
            value: Any = pod
            for step in source["fieldRef"]["fieldPath"].split("."):
                value = value[step]
            env[one["name"]] = value
        else:
            env[one["name"]] = one.get("value") or ""
    return env


def secret(pod: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    told = False
    while True:
        try:
            found = core.read_namespaced_secret(wanted["name"], pod["metadata"]["namespace"])
            return base64.b64decode(found.data[wanted["key"]]).decode()
        except client.ApiException:
            if not told:
                message = f"secret {wanted['name']!r} not found"
                waits(pod, "CreateContainerConfigError", message)
                told = True
        except Exception as error:
            print("secret", repr(error)[:200], file=sys.stderr)
        try:
            core.read_namespaced_pod(pod["metadata"]["name"], pod["metadata"]["namespace"])
        except client.ApiException as error:
            if error.status == 404:
                return None
        time.sleep(AGAIN_S)


def bubblewrap(pod: dict[str, Any], container: dict[str, Any], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "termination-log").touch()
    root = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    # What is below it is what this machine's tests keep there, not the image's.
    box = ["bwrap", *root, "--unshare-pid", "--as-pid-1", "--die-with-parent"]
    box += ["--bind", str(folder / "termination-log"), "/dev/termination-log"]
    capabilities = (container.get("securityContext") or {}).get("capabilities") or {}
    if "ALL" in (capabilities.get("drop") or []):
        box += ["--cap-drop", "ALL"]
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
    for mount in container.get("volumeMounts") or []:
        if "emptyDir" not in volumes[mount["name"]]:
            continue
        source = folder / "volumes" / mount["name"] / (mount.get("subPath") or "")
        source.mkdir(parents=True, exist_ok=True)
        target = mount["mountPath"]
        if not Path(target).exists():
            Path(target).mkdir(parents=True)  # the root of bubblewrap is read-only
        box += ["--bind", str(source), target]
    if container["image"].startswith("folder:"):
        target = Path(container["workingDir"])
        target.mkdir(parents=True, exist_ok=True)
        shutil.copytree(container["image"][len("folder:") :], folder / "image", symlinks=True)
        box += ["--bind", str(folder / "image"), str(target)]
    if container.get("workingDir"):
        box += ["--chdir", container["workingDir"]]
    return [*box, "--"]


def handle(pod: dict[str, Any]) -> None:
    metadata = pod["metadata"]
    uid = metadata["uid"]
    if metadata.get("deletionTimestamp"):
        with lock:
            process = running.pop(uid, None)
        if process and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(client.ApiException):
            core.delete_namespaced_pod(
                metadata["name"], metadata["namespace"], grace_period_seconds=0
            )
        shutil.rmtree(FOLDER / uid, ignore_errors=True)
    elif uid not in begun and pod["status"].get("phase") == "Pending":
        begun.add(uid)
        threading.Thread(target=run, args=(pod,), daemon=True).start()


def forget(pod: dict[str, Any]) -> None:
    """The pod was removed at once."""
    with lock:
        process = running.pop(pod["metadata"]["uid"], None)
    if process and process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def follow() -> None:
    mine = f"spec.nodeName={NODE}"
    while True:
        try:
            listed = json.loads(
                core.list_pod_for_all_namespaces(field_selector=mine, _preload_content=False).data
            )
            for pod in listed["items"]:
                handle(pod)
            answer = core.list_pod_for_all_namespaces(
                field_selector=mine,
                resource_version=listed["metadata"]["resourceVersion"],
                watch=True,
                _preload_content=False,
            )
            from kubernetes.watch.watch import iter_resp_lines

            for line in iter_resp_lines(answer):
                event = json.loads(line) if line else {"type": ""}
                if event["type"] in ("ADDED", "MODIFIED"):
                    handle(event["object"])
                elif event["type"] == "DELETED":
                    forget(event["object"])
                elif event["type"] == "ERROR":
                    break
        except Exception as error:
            print("follow", repr(error)[:200], file=sys.stderr)
        time.sleep(AGAIN_S)


class Logs(BaseHTTPRequestHandler):
    """/containerLogs/NAMESPACE/POD/CONTAINER, as the API server asks for them."""

    def do_GET(self) -> None:
        from urllib.parse import parse_qs, urlsplit

        parts = urlsplit(self.path)
        _, what, namespace, name, _ = parts.path.split("/")
        pod = core.read_namespaced_pod(name, namespace)
        content = (FOLDER / pod.metadata.uid / "log").read_bytes()
        if limit := parse_qs(parts.query).get("limitBytes"):
            content = content[: int(limit[0])]
        self.send_response(200 if what == "containerLogs" else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def serve_logs() -> int:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Logs)
    certificate, key = FOLDER / "kubelet.crt", FOLDER / "kubelet.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    port = serve_logs()
    register(port)
    threading.Thread(target=follow, daemon=True).start()
    while True:
        time.sleep(BEAT_S)
        try:
            beat(port)
        except Exception as error:
            print("beat", repr(error)[:200], file=sys.stderr)


if __name__ == "__main__":
    main()
