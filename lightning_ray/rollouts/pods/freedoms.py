"""What a template may not say, since it would break a promise in silence, and what weakens a pod.

Pure: functions over a rendered Job. `refusals` are wrong in any run: a second run of the harness,
an infrastructure's end that would be graded, a way from the agent's pod into the grader's (both are
made of one template). `weaknesses` are the user's to choose, and are told at the start: some of
them (privileged, hostNetwork) are such ways, too, for who knows how.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_ray.records import Json

Path = tuple[str | int, ...]

_POD: Path = ("spec", "template", "spec")
# Volumes that begin and end with their pod, or that no container can write.
_OF_THE_POD = frozenset(
    {"configMap", "downwardAPI", "emptyDir", "ephemeral", "gitRepo", "image", "projected", "secret"}
)


def refusals(job: Json) -> Iterator[tuple[Path, str]]:
    """Where the Job says what it may not, and what to do."""
    spec = job["spec"]
    pod = spec["template"]["spec"]
    if spec.get("suspend"):
        yield ("spec", "suspend"), "a Job that is suspended has no pod: leave this out"
    if spec.get("completionMode", "NonIndexed") != "NonIndexed":
        yield ("spec", "completionMode"), "an attempt is one pod without an index: leave this out"
    if spec.get("podFailurePolicy"):
        why = "an attempt is one pod, and no second one runs its harness: leave this out"
        yield ("spec", "podFailurePolicy"), why
    if "activeDeadlineSeconds" in pod:
        yield (
            (*_POD, "activeDeadlineSeconds"),
            "a pod that this ends counts as lost, however long its rollout may take: leave it out; "
            "rollout.timeout_s and kubernetes.start_timeout_s are the limits",
        )
    if pod.get("hostIPC"):
        yield (
            (*_POD, "hostIPC"),
            "shared memory of the node outlives the pod, and its grader's pod finds what an agent "
            "leaves there: leave this out",
        )
    for probe in ("livenessProbe", "startupProbe"):
        if probe in pod["containers"][0]:
            yield (
                (*_POD, "containers", 0, probe),
                "a container that this ends would be graded like a harness that failed: leave it "
                "out",
            )
    for number, container in enumerate(pod["containers"]):
        if container.get("restartPolicy", "Never") != "Never":
            yield (
                (*_POD, "containers", number, "restartPolicy"),
                "a container that starts again gets no order, which is given once: leave this out",
            )
    yield from _channels(pod)


def _channels(pod: Json) -> Iterator[tuple[Path, str]]:
    """Where containers write what outlives their pod."""
    lasting = {volume.get("name"): kind for volume, kind in _lasting(pod)}
    for at, container in _containers(pod):
        for field in ("volumeMounts", "volumeDevices"):
            for number, mount in enumerate(container.get(field, [])):
                name = mount.get("name")
                if name in lasting and not mount.get("readOnly"):
                    yield (
                        (*at, field, number),
                        f"the volume {name} ({lasting[name]}) outlives the pod and can be written: "
                        "what an agent leaves there is found by its grader's pod, which is made of "
                        "the same template, and by other rollouts. Write readOnly: true, or take "
                        "an emptyDir or ephemeral volume",
                    )


def _lasting(pod: Json) -> Iterator[tuple[Json, str]]:
    """Volumes that outlive their pod and may be written, and what they are."""
    for volume in pod.get("volumes", []):
        for kind in volume.keys() - _OF_THE_POD - {"name"}:
            if not volume[kind].get("readOnly"):
                yield volume, kind


def weaknesses(job: Json) -> list[str]:
    """What the Job gives to the code in its pods that it need not have, by field."""
    pod = job["spec"]["template"]["spec"]
    return sorted({*_of_pod(pod), *_of_containers(pod)})


def _of_pod(pod: Json) -> Iterator[str]:
    if pod.get("hostNetwork"):
        yield "hostNetwork (the node's network, which no NetworkPolicy holds back)"
    for volume in pod.get("volumes", []):
        if "hostPath" in volume:
            yield f"hostPath (files of the node at {volume['hostPath'].get('path')})"
        sources = volume.get("projected", {}).get("sources", [])
        if any("serviceAccountToken" in source for source in sources):
            yield "serviceAccountToken (a key to the API server)"
    if pod.get("automountServiceAccountToken"):
        yield "automountServiceAccountToken (a key to the API server)"


def _of_containers(pod: Json) -> Iterator[str]:
    contexts = (container.get("securityContext", {}) for _, container in _containers(pod))
    for context in (pod.get("securityContext", {}), *contexts):
        if context.get("privileged"):
            yield "privileged (root of the node)"
        if context.get("allowPrivilegeEscalation"):
            yield "allowPrivilegeEscalation"
        if added := context.get("capabilities", {}).get("add"):
            yield f"capabilities.add ({', '.join(added)})"
        for profile in ("seccompProfile", "appArmorProfile"):
            if context.get(profile, {}).get("type") == "Unconfined":
                yield f"{profile} (Unconfined)"


def _containers(pod: Json) -> Iterator[tuple[Path, dict[str, Any]]]:
    for field in ("initContainers", "containers"):
        for number, container in enumerate(pod.get(field, [])):
            yield (*_POD, field, number), container
