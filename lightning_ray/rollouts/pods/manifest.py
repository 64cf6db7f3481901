"""The Job of one attempt: what the user's template says, and what we add.

We add the name, labels, owner, a deadline, one try (`backoffLimit: 0`), the command that fetches
the order, the gateway's address, the key by way of a Secret, a volume at `places.ROOT`, and, where
the template says nothing, a security context that gives away as little as Kubernetes lets us: no
root, no service account, no capabilities, seccomp, a read-only root.

Invariants: the key is in the Secret alone; what the template says about security, resources and its
other containers stays.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ray.records import Json
from lightning_ray.rollouts import places
from lightning_ray.rollouts.pods import entry

AGENT, GRADER = "agent", "grader"  # what a Job is for
RUN_LABEL, ROLE_LABEL = "lightning-ray/run", "lightning-ray/role"
ROOM_ANNOTATION = "lightning-ray/room"
_MANAGED = {"app.kubernetes.io/managed-by": "lightning-ray"}
# Nobody's, on every distribution that has one: images seldom have a user of their own.
_USER = 65534
# A Job that no controller of ours deletes (its cluster is gone) goes by itself after so long.
_TTL_S = 3600
# Who takes away nodes that are half empty leaves those alone where an attempt would be lost.
_STAYS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
_NOT_PLAIN = re.compile(r"[^a-z0-9]+")
_NAME_CHARS = 40  # of the attempt's id in a Job's name, which may have 63 and gets a suffix
VOLUME = "lightning-ray"
VENV_LINK = f"{places.ROOT}/site-packages"


# The command of the container: fetches our files with the order. `request` is used by them too; it
# is patient, since the gateway may be starting again, and a new pod's first look-ups can fail. Only
# the gateway's own words are a refusal: while it is away, the proxy in front of it knows no such
# path. What runs here may be root, and change what names mean and whom to trust: certificates are
# read before, and what the gateway's name meant then is tried, too, and first in every other turn.
BOOTSTRAP = """
import http.client, json, os, socket, time, urllib.parse, urllib.request
url, key, pod = (os.environ.pop("LIGHTNING_RAY_" + name) for name in ("URL", "KEY", "POD"))
host, look_up, before = urllib.parse.urlsplit(url).hostname, socket.getaddrinfo, []
def addresses(asked, *more, **named):
    try:
        now = look_up(asked, *more, **named)
    except OSError:
        if asked != host or not before:
            raise
        now = []
    if asked != host:
        return now
    before.extend(() if before else now)
    return list(dict.fromkeys(now + before if turns[0] % 2 else before + now))
socket.getaddrinfo, turns = addresses, [0]
handlers = [urllib.request.ProxyHandler({})]
if url.startswith("https:"):
    import ssl
    handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context()))
opener = urllib.request.build_opener(*handlers)
def refused(error):
    try:
        said = json.loads(error.read(65536))["error"]["type"]
    except Exception:
        return False
    return said and error.code < 500 and error.code not in (408, 429)
def request(name, body=None):
    headers = {"Authorization": "Bearer " + key, "X-Lightning-Ray-Pod": pod}
    method = "GET" if body is None else "PUT"
    call = urllib.request.Request(url + "/files/" + name, body, headers, method=method)
    for turn in range(60):
        turns[0] = turn
        try:
            return opener.open(call, timeout=120).read()
        except (OSError, http.client.HTTPException) as error:
            if refused(error) or turn == 59:
                raise SystemExit("gateway %s, %s: %s" % (url, name, error))
            time.sleep(min(1 + turn, 10))
order = json.loads(request("order"))
space = {"__name__": "entry"}
for name, source in order.pop("entry"):
    exec(compile(source, name, "exec"), space)
space["main"](order, request, key)
"""


@dataclass(frozen=True)
class Frame:
    """What all Jobs of a run have in common. Memory and disk in MiB; `spare_s` is what a Job has
    besides its program's time, `keep_s` how long an ended one stays (None: it is deleted at once),
    `python` the interpreter of our own program."""

    run_id: str
    owner: Json | None
    cpus: float
    memory_mib: int
    disk_mib: int
    spare_s: float
    keep_s: int | None
    python: str = "python3"


@dataclass(frozen=True)
class Room:
    """What a pod is told: where its files are, and the key that opens them, or else the `parts` of
    its order, and a `program` that reads these; `program_s` is the longest that it takes."""

    name: str
    url: str
    key: str
    role: str
    program_s: float
    parts: tuple[str, ...] = ()
    program: str = BOOTSTRAP

    @property
    def secret(self) -> dict[str, str]:
        """What its Secret holds."""
        orders = {f"order-{number}": part for number, part in enumerate(self.parts)}
        return orders or {"key": self.key}


def job_name(run_id: str, room: str) -> str:
    """The same for the same attempt of the same run, in every life of the run."""
    digest = hashlib.sha256(f"{run_id}/{room}".encode()).hexdigest()[:10]
    return f"lr-{_NOT_PLAIN.sub('-', room.lower())[-_NAME_CHARS:].strip('-')}-{digest}"


def selector(run_id: str, role: str | None = None) -> str:
    """Of the Jobs and pods of a run."""
    return f"{RUN_LABEL}={run_id}" + (f",{ROLE_LABEL}={role}" if role else "")


def labels(frame: Frame, role: str) -> dict[str, str]:
    return {**_MANAGED, RUN_LABEL: frame.run_id, ROLE_LABEL: role}


def build(template: Json, room: Room, frame: Frame) -> Json:
    """The Job. `template` is a rendered one."""
    job = copy.deepcopy(template)
    name = job_name(frame.run_id, room.name)
    ours = labels(frame, room.role)
    metadata = job.setdefault("metadata", {})
    metadata["name"] = name
    metadata["labels"] = {**metadata.get("labels", {}), **ours}
    metadata["annotations"] = {**metadata.get("annotations", {}), ROOM_ANNOTATION: room.name}
    metadata.pop("namespace", None)
    metadata.pop("generateName", None)
    if frame.owner:
        metadata["ownerReferences"] = [frame.owner]
    spec = job["spec"]
    spec.update(
        backoffLimit=0,
        completions=1,
        parallelism=1,
        activeDeadlineSeconds=int(room.program_s + frame.spare_s),
        ttlSecondsAfterFinished=_TTL_S if frame.keep_s is None else frame.keep_s,
    )
    pod = spec["template"]
    pod_metadata = pod.setdefault("metadata", {})
    pod_metadata["labels"] = {**pod_metadata.get("labels", {}), **ours}
    pod_metadata["annotations"] = _STAYS | pod_metadata.get("annotations", {})
    _fill_pod(pod["spec"], frame)
    _fill_container(pod["spec"]["containers"][0], name, room, frame)
    return job


def _fill_pod(pod: Json, frame: Frame) -> None:
    pod["restartPolicy"] = "Never"
    # Else the agent could signal, or read, what keeps it.
    pod["shareProcessNamespace"] = pod["hostPID"] = False
    pod.setdefault("automountServiceAccountToken", False)
    pod.setdefault("enableServiceLinks", False)
    _default(
        pod.setdefault("securityContext", {}),
        {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    )
    for container in pod.get("initContainers", []):
        # So that the attempt can say why it could not begin.
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    volume = {"name": VOLUME, "emptyDir": {"sizeLimit": f"{frame.disk_mib}Mi"}}
    pod["volumes"] = [*pod.get("volumes", []), volume]


def _fill_container(container: Json, name: str, room: Room, frame: Frame) -> None:
    container["command"] = [frame.python, "-I", "-c", room.program]
    container.pop("args", None)
    container["terminationMessagePath"] = entry.TERMINATION_LOG
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    told = [
        {
            "name": f"LIGHTNING_RAY_{key.upper().replace('-', '_')}",
            "valueFrom": {"secretKeyRef": {"name": name, "key": key}},
        }
        for key in room.secret
    ]
    if not room.parts:
        told += [
            {"name": "LIGHTNING_RAY_URL", "value": room.url},
            {
                "name": "LIGHTNING_RAY_POD",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}},
            },
        ]
    container["env"] = [*container.get("env", []), *told]
    mounts = container.get("volumeMounts", [])
    ours = [{"name": VOLUME, "mountPath": places.ROOT}]
    if not any(mount.get("mountPath") == "/tmp" for mount in mounts):
        ours.append({"name": VOLUME, "mountPath": "/tmp", "subPath": "tmp"})
    container["volumeMounts"] = [*mounts, *ours]
    _default(
        container.setdefault("securityContext", {}),
        {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    )
    memory = f"{frame.memory_mib}Mi"
    container.setdefault(
        "resources",
        {
            "requests": {"cpu": f"{max(1, int(frame.cpus * 1000))}m", "memory": memory},
            "limits": {"memory": memory},
        },
    )


def command_of(template: Json) -> list[str] | None:
    """The command that the template gives its container, in place of the recipe's."""
    container = template["spec"]["template"]["spec"]["containers"][0]
    command = [*container.get("command", []), *container.get("args", [])]
    return command or None


def workdir_of(template: Json) -> str | None:
    """Where the image has the repository, if the template says so."""
    found: str | None = template["spec"]["template"]["spec"]["containers"][0].get("workingDir")
    return found


def secret(job: Json, uid: str, holds: Mapping[str, str]) -> Json:
    """The Secret of a Job, which goes with it."""
    metadata = job["metadata"]
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": metadata["name"],
        "uid": uid,
        "blockOwnerDeletion": False,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata["name"],
            "labels": dict(metadata["labels"]),
            "ownerReferences": [owner],
        },
        "stringData": dict(holds),
    }


def _default(context: dict[str, Any], ours: Mapping[str, Any]) -> None:
    for key, value in ours.items():
        context.setdefault(key, value)
