"""A Job as one container of podman, and a container as the Job and pod that it stands for. Pure.

`faults` and `left_out` say what of a template podman cannot carry out, `Making` the arguments of
`podman run` for its init containers and its container. `job_of` and `pod` turn what podman says of
a container into what Kubernetes would say of the Job and of its pod, as far as `outcomes.py` and
`reconcile.py` look at it.

Invariants: what a template says about security is carried out or refused, never left out; a
container has no network; an end that nobody can have seen (the machine went down) is no exit
status.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubernetes.utils import parse_quantity

from lightning_ray.records import Json
from lightning_ray.rollouts.pods import entry, manifest
from lightning_ray.rollouts.pods.podman import way
from lightning_ray.rollouts.pods.reconcile import JOB_LABEL

UID_LABEL, TTL_LABEL, INIT_LABEL = "lightning-ray/uid", "lightning-ray/ttl", "lightning-ray/init-of"
WAY = "/lightning-way"  # where a container finds the folder of the socket
_POD = "spec.template.spec"
_POD_FIELDS = frozenset(
    {
        "containers",
        "initContainers",
        "volumes",
        "securityContext",
        "restartPolicy",
        "hostPID",
        "hostIPC",
        "hostNetwork",
        "automountServiceAccountToken",
        "enableServiceLinks",
        "shareProcessNamespace",
        "hostname",
        "terminationGracePeriodSeconds",
    }
)
_CONTAINER_FIELDS = frozenset(
    {
        "name",
        "image",
        "command",
        "args",
        "env",
        "workingDir",
        "resources",
        "securityContext",
        "volumeMounts",
        "imagePullPolicy",
        "terminationMessagePath",
        "terminationMessagePolicy",
        "stdin",
        "tty",
    }
)
# What pods may do beyond what podman's own containers may, and how podman is told.
_CONTEXT_FIELDS = frozenset(
    {
        "runAsUser",
        "runAsGroup",
        "runAsNonRoot",
        "readOnlyRootFilesystem",
        "allowPrivilegeEscalation",
        "capabilities",
        "privileged",
        "seccompProfile",
        "fsGroup",
        "supplementalGroups",
        "fsGroupChangePolicy",
    }
)
_VOLUMES = frozenset({"emptyDir", "hostPath"})
_NEVER = "0001-01-01"  # Go's zero time
# The machine went down, and podman knows no more.
UNKNOWN: Json = {"exitCode": 255, "reason": "ContainerStatusUnknown", "message": ""}
ENDED = frozenset({"exited", "stopped", "dead"})  # states of `podman ps`


def faults(job: Json) -> Iterator[tuple[str, str]]:
    """What podman cannot carry out, and nobody should do without: field and reason."""
    pod = job["spec"]["template"]["spec"]
    if len(pod["containers"]) > 1:
        yield f"{_POD}.containers[1]", "podman runs one container for an attempt: leave it out"
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"{_POD}.{field}", "under podman a rollout has no share in the machine's"
    for field in ("runtimeClassName", "hostUsers"):
        if field in pod:
            yield f"{_POD}.{field}", "podman has it from its own settings (containers.conf)"
    for number, volume in enumerate(pod.get("volumes", [])):
        if not volume.keys() - {"name"} <= _VOLUMES:
            yield f"{_POD}.volumes[{number}]", "podman has the volumes emptyDir and hostPath only"
    names = {volume["name"] for volume in pod.get("volumes", [])}
    for at, container in _containers(pod):
        for number, mount in enumerate(_mounts(container)):
            if mount["name"] not in names:
                yield f"{at}.volumeMounts[{number}]", f"there is no volume {mount['name']}"
        if container.get("restartPolicy", "Never") != "Never":
            yield f"{at}.restartPolicy", "podman runs an init container once, to its end"
        if "envFrom" in container:
            yield f"{at}.envFrom", "podman has no ConfigMaps and Secrets: write env"
        for number, one in enumerate(container.get("env", [])):
            if "valueFrom" in one and not one["name"].startswith("LIGHTNING_RAY_"):
                yield f"{at}.env[{number}]", "podman has no ConfigMaps and Secrets: write a value"
        for field in container.get("securityContext", {}).keys() - _CONTEXT_FIELDS:
            yield f"{at}.securityContext.{field}", "this is not carried out under podman"
    for field in pod.get("securityContext", {}).keys() - _CONTEXT_FIELDS:
        yield f"{_POD}.securityContext.{field}", "this is not carried out under podman"


def left_out(job: Json) -> list[str]:
    """What podman leaves out: nothing on which the safety of a rollout depends."""
    pod = job["spec"]["template"]["spec"]
    fields = {f"{_POD}.{field}" for field in pod.keys() - _POD_FIELDS}
    for at, container in _containers(pod):
        fields |= {f"{at}.{field}" for field in container.keys() - _CONTAINER_FIELDS}
    return sorted(fields)


@dataclass(frozen=True)
class Making:
    """How podman makes the container of a Job. `folder` is the attempt's on this machine, with the
    termination message and, where the Job has a gateway to reach, `way` in it."""

    job: Json
    uid: str
    secret: Mapping[str, str]
    folder: str
    way: str

    @property
    def name(self) -> str:
        name: str = self.job["metadata"]["name"]
        return name

    @property
    def pod(self) -> Json:
        pod: Json = self.job["spec"]["template"]["spec"]
        return pod

    @property
    def images(self) -> dict[str, str]:
        """The images and when each is pulled: always, missing, never."""
        policies = {"Always": "always", "Never": "never"}
        return {
            container["image"]: policies.get(container.get("imagePullPolicy", ""), "missing")
            for _, container in _containers(self.pod)
        }

    @property
    def volumes(self) -> list[str]:
        """Names of podman's volumes for it: one for each place of an emptyDir that is mounted."""
        mounts = (m for _, container in _containers(self.pod) for m in _mounts(container))
        return sorted({self._volume(m) for m in mounts if self._kind(m) == "emptyDir"})

    @property
    def labels(self) -> dict[str, str]:
        metadata = self.job["metadata"]
        ours = {
            name: metadata["labels"][name] for name in (manifest.RUN_LABEL, manifest.ROLE_LABEL)
        }
        return ours | {UID_LABEL: self.uid}

    def inits(self) -> Iterator[tuple[str, list[str]]]:
        """Each init container's name in the template and what comes after `podman run`."""
        for number, container in enumerate(self.pod.get("initContainers", [])):
            labels = self.labels | {INIT_LABEL: self.name}
            argv = ["--rm", f"--name={self.name}-{number}", *_labelled(labels)]
            yield container["name"], [*argv, *self._container(container)]

    def main(self) -> tuple[list[str], dict[str, str]]:
        """What comes after `podman run`, and variables that it takes over from its own environment:
        a command line is for everybody to read."""
        container, spec = self.pod["containers"][0], self.job["spec"]
        labels = self.labels | {
            TTL_LABEL: str(spec["ttlSecondsAfterFinished"]),
            manifest.ROOM_ANNOTATION: self.job["metadata"]["annotations"][manifest.ROOM_ANNOTATION],
        }
        told: dict[str, str] = {}
        for one in container.get("env", []):
            source = one.get("valueFrom", {})
            if reference := source.get("secretKeyRef"):
                told[one["name"]] = self.secret[reference["key"]]
            elif "fieldRef" in source:
                told[one["name"]] = self.uid
        program = list(container["command"])
        argv = [
            "--detach",
            f"--name={self.name}",
            *_labelled(labels),
            f"--timeout={spec['activeDeadlineSeconds']}",
            f"--volume={self.folder}/termination-log:{entry.TERMINATION_LOG}",
            *(f"--env={name}" for name in told),
        ]
        if any(one["name"] == "LIGHTNING_RAY_URL" for one in container["env"]):
            argv.append(f"--volume={self.way}:{WAY}:ro")
            program[-1] = way_out() + program[-1]
        return [*argv, *self._container({**container, "command": program})], told

    def _container(self, container: Json) -> Iterator[str]:
        yield from ("--network=none", "--hostname=attempt", "--log-driver=k8s-file")
        # The image's own health check would be another program in the container.
        yield from ("--no-healthcheck", "--http-proxy=false", "--pull=never")
        # Labels of SELinux keep containers from sockets of the machine.
        yield "--security-opt=label=disable"
        yield from _secured({**self.pod.get("securityContext", {})}, container)
        yield from _limited(container.get("resources", {}).get("limits", {}))
        for one in container.get("env", []):
            if "value" in one:
                yield f"--env={one['name']}={one['value']}"
        for mount in _mounts(container):
            yield f"--volume={self._source(mount)}:{mount['mountPath']}{self._how(mount)}"
        if "workingDir" in container:
            yield f"--workdir={container['workingDir']}"
        command = [*container.get("command", []), *container.get("args", [])]
        if "command" in container:
            yield f"--entrypoint={json.dumps(command[:1])}"
            command = command[1:]
        yield from (container["image"], *command)

    def _kind(self, mount: Json) -> str:
        volume = next(v for v in self.pod["volumes"] if v["name"] == mount["name"])
        return next(iter(volume.keys() - {"name"}), "emptyDir")

    def _volume(self, mount: Json) -> str:
        below = mount.get("subPath", "").strip("/").replace("/", "-")
        return "-".join(filter(None, (self.name, mount["name"], below)))

    def _source(self, mount: Json) -> str:
        if self._kind(mount) == "emptyDir":
            return self._volume(mount)
        volume = next(v for v in self.pod["volumes"] if v["name"] == mount["name"])
        path: str = volume["hostPath"]["path"]
        return f"{path.rstrip('/')}/{mount['subPath']}" if mount.get("subPath") else path

    def _how(self, mount: Json) -> str:
        if mount.get("readOnly"):
            return ":ro"
        # An emptyDir is empty, whatever the image has there, and its user's.
        return ":U,nocopy" if self._kind(mount) == "emptyDir" else ""


def way_out() -> str:
    """The program that lets a container without a network reach the gateway."""
    with open(way.__file__) as file:
        return way.WAY_OUT.format(socket=f"{WAY}/gateway", program=file.read())


def job_of(container: Json) -> Json:
    """What Kubernetes would say of the Job. `container` is one of `podman ps --format json`."""
    labels, name = container["Labels"], container["Names"][0]
    metadata = {
        "name": name,
        "uid": labels[UID_LABEL],
        "resourceVersion": "1",
        "labels": dict(labels),
        "annotations": {manifest.ROOM_ANNOTATION: labels[manifest.ROOM_ANNOTATION]},
    }
    ended = container["State"] in ENDED
    kind = "Complete" if container.get("ExitCode") == 0 else "Failed"
    conditions = [{"type": kind, "status": "True"}] if ended else []
    return {"metadata": metadata, "status": {"conditions": conditions}}


def pod(job: Json, state: Json, inits: Sequence[Json] = ()) -> Json:
    """What Kubernetes would say of the pod of a Job with the metadata `job`. `state` is that of its
    container: `waiting`, `running` or `terminated`; `inits` are its init containers' statuses."""
    phase = "Running" if "running" in state else "Pending"
    if "terminated" in state:
        phase = "Failed" if state["terminated"]["exitCode"] else "Succeeded"
    labels = {**job["labels"], JOB_LABEL: job["name"]}
    metadata = {"name": job["name"], "uid": job["uid"], "resourceVersion": "1", "labels": labels}
    status = {"phase": phase, "initContainerStatuses": [*inits]}
    if not inits:
        status["containerStatuses"] = [{"name": "agent", "state": state}]
    return {"metadata": metadata, "spec": {"containers": [{"name": "agent"}]}, "status": status}


def ended(state: Json, message: str) -> Json:
    """How a container ended, from the `State` of `podman inspect` and its termination message, or
    the last it wrote if it left none."""
    code: int = state["ExitCode"]
    if state["OOMKilled"] and not message:
        return {"exitCode": code or 137, "reason": "OOMKilled", "message": ""}
    if not message and state["FinishedAt"].startswith(_NEVER):
        return UNKNOWN
    return {"exitCode": code, "reason": "Error" if code else "Completed", "message": message}


def _containers(pod: Json) -> Iterator[tuple[str, Json]]:
    for field in ("initContainers", "containers"):
        for number, container in enumerate(pod.get(field, [])):
            yield f"{_POD}.{field}[{number}]", container


def _mounts(container: Json) -> Sequence[Json]:
    found: Sequence[Json] = container.get("volumeMounts", [])
    return found


def _labelled(labels: Mapping[str, str]) -> Iterator[str]:
    return (f"--label={name}={text}" for name, text in labels.items())


def _secured(pod: dict[str, Any], container: Json) -> Iterator[str]:
    context = pod | container.get("securityContext", {})
    user, group = context.get("runAsUser"), context.get("runAsGroup")
    if user is not None:
        yield f"--user={user}" + (f":{group}" if group is not None else "")
    yield from (f"--group-add={one}" for one in context.get("supplementalGroups", []))
    if context.get("readOnlyRootFilesystem"):
        # podman would give it a /run and a /dev/shm besides, which Kubernetes does not.
        yield from ("--read-only", "--read-only-tmpfs=false")
    if context.get("privileged"):
        yield "--privileged"
    elif not context.get("allowPrivilegeEscalation"):
        yield "--security-opt=no-new-privileges"
    capabilities = context.get("capabilities", {})
    yield from (f"--cap-drop={one}" for one in capabilities.get("drop", []))
    yield from (f"--cap-add={one}" for one in capabilities.get("add", []))
    profile = context.get("seccompProfile", {})
    if profile.get("type") == "Unconfined":
        yield "--security-opt=seccomp=unconfined"
    elif profile.get("type") == "Localhost":
        yield f"--security-opt=seccomp={profile['localhostProfile']}"


def _limited(limits: Json) -> Iterator[str]:
    if "memory" in limits:
        size = int(parse_quantity(limits["memory"]))
        yield from (f"--memory={size}", f"--memory-swap={size}")
    if "cpu" in limits:
        yield f"--cpus={parse_quantity(limits['cpu'])}"
