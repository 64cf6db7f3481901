"""The Pod Security Standards, as far as fields go that a template of ours may have.

After https://kubernetes.io/docs/concepts/security/pod-security-standards/ ("baseline" and
"restricted", Linux pods). Left out: SELinux, sysctls, Windows, host ports' ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]
_ADDABLE = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE",
    "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip
_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def violations(level: str, pod: Object) -> set[str]:
    """The fields of a pod's spec that the level refuses."""
    found = set(_baseline(pod))
    return found | set(_restricted(pod)) if level == "restricted" else found


def _baseline(pod: Object) -> Iterator[str]:
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    if any("hostPath" in volume for volume in pod.get("volumes", [])):
        yield "hostPath"
    for context in [pod.get("securityContext", {}), *map(_context, containers(pod))]:
        for profile in ("seccompProfile", "appArmorProfile"):
            if context.get(profile, {}).get("type") == "Unconfined":
                yield profile
        if context.get("privileged"):
            yield "privileged"
        if not set(context.get("capabilities", {}).get("add", [])) <= _ADDABLE:
            yield "capabilities.add"
        if context.get("procMount", "Default") != "Default" and pod.get("hostUsers", True):
            yield "procMount"


def _restricted(pod: Object) -> Iterator[str]:
    of_pod = pod.get("securityContext", {})
    if not all(volume.keys() & _VOLUMES for volume in pod.get("volumes", [])):
        yield "volumes"
    for context in map(_context, containers(pod)):
        if context.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation"
        if context.get("capabilities", {}).get("drop") != ["ALL"]:
            yield "capabilities.drop"
        if not set(context.get("capabilities", {}).get("add", [])) <= {"NET_BIND_SERVICE"}:
            yield "capabilities.add"
        if (of_pod | context).get("runAsNonRoot") is not True:
            yield "runAsNonRoot"
        if 0 in (of_pod.get("runAsUser"), context.get("runAsUser")):
            yield "runAsUser"
        profile = (of_pod | context).get("seccompProfile", {})
        if profile.get("type") not in ("RuntimeDefault", "Localhost"):
            yield "seccompProfile"


def _context(container: Object) -> Object:
    context: Object = container.get("securityContext", {})
    return context
