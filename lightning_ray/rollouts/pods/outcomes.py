"""How an attempt stands, from what Kubernetes says of its Job and its pod. Pure.

Invariants: only what the harness did itself is an outcome that the policy caused; whatever a node,
a registry, a scheduler or a person did, and Kubernetes says so, is a fault of the infrastructure;
nothing that the harness can do or write makes one; a pod that cannot start says why in `waits`,
from the first moment.

Sources: the Kubernetes documentation on the pod lifecycle, on Jobs, and on node-pressure eviction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ray.records import Json, Outcome

# Names in the termination message of `entry.py`, as in `supervisor.EndedBy`.
_ENDED_BY = {
    "time": Outcome.TIMEOUT,
    "memory": Outcome.OUT_OF_MEMORY,
    "output": Outcome.OUTPUT_LIMIT,
    "disk": Outcome.OUTPUT_LIMIT,
    "signal": Outcome.HARNESS_ERROR,
    "not_started": Outcome.LAUNCH_FAULT,
}
# Reasons of a waiting container that may pass by themselves: an image that is being pushed, a
# registry that limits us, a Secret that comes a moment after its Job.
_MAY_PASS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "RegistryUnavailable",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)
_NEVER_PASS = frozenset({"InvalidImageName", "ErrImageNeverPull"})
STARTING = "its pod is starting"
# Exit codes above are of a signal: `entry.py` was ended, and did not write the message; 255 is its
# own, where it could not write it.
_SIGNALLED, _NO_MESSAGE = 128, 255
# Why a container ended, where the node knows no more than the exit code. Other reasons
# (ContainerStatusUnknown, Unknown) say that the node lost sight of it.
_BY_ITSELF = frozenset({"", "Error", "Completed"})
_WORDS_CHARS = 500  # of an init container's output: the end of it, which says what went wrong


@dataclass(frozen=True)
class End:
    """How an attempt ended, as far as Kubernetes can tell; `lack` is what its pod says that it
    should have been kept from, and was not; None: it said nothing."""

    outcome: Outcome
    detail: str
    lack: str | None = None


@dataclass(frozen=True)
class Standing:
    """How an attempt stands: it has ended, or runs, or `waits` for something; `patience_s` is how
    long that may last, and `then` what it means if it does."""

    end: End | None = None
    running: bool = False
    waits: str = ""
    patience_s: float | None = None
    then: Outcome = Outcome.LAUNCH_FAULT


@dataclass(frozen=True)
class Patience:
    """Seconds: for a pod to be scheduled and started; for a reason that may pass; for the Job to
    say why its pod is gone; for the pod's own words when its Job has failed."""

    start_s: float
    fault_s: float
    settle_s: float = 5.0  # the Job's controller writes both within a second
    # They are written already; the watch that brings them may be a connection that died, which is
    # noticed after `api.QUIET_S`.
    words_s: float = 200.0


def standing(job: Json | None, pods: Sequence[Json], patience: Patience) -> Standing:
    """How the attempt of `job` stands. `pods` are all that there have been, in the order in which
    they came."""
    if job is None:
        return _ended(Outcome.NODE_LOST, "its Job was deleted")
    pod = pods[0] if pods else None
    if pod is not None and (end := _end_of_pod(pod)):
        return Standing(end)
    if len(pods) > 1:
        # The second one gets no order: the harness would begin from the start.
        return _ended(Outcome.NODE_LOST, "its pod was lost, and Kubernetes made another one")
    failed = _condition(job, "Failed")
    if failed and failed.get("reason") == "DeadlineExceeded":
        # A harness has a time limit of its own, which is shorter: what took so long was not it.
        if pod is not None and any("waiting" not in c.get("state", {}) for c in _containers(pod)):
            return _ended(Outcome.NODE_LOST, "its pod ran past the deadline of its Job")
        return _ended(Outcome.LAUNCH_FAULT, "its pod had not started by the deadline of its Job")
    if failed and not (pod and pod["metadata"].get("deletionTimestamp")):
        reason = f"{failed.get('reason')}: {failed.get('message')}"
        then = Outcome.NODE_LOST if pod is None else Outcome.LAUNCH_FAULT
        return Standing(None, False, f"its Job failed, {reason}", patience.words_s, then)
    if _condition(job, "Complete") and pod is not None:
        # Its pod's own words are on their way: they may say more.
        done = Outcome.COMPLETED
        return Standing(None, False, "its Job is complete", patience.words_s, done)
    if _condition(job, "Complete"):
        return _ended(Outcome.COMPLETED, "its Job is complete")
    if pod is None:
        waits = "its Job has no pod yet (a quota, or a rule for pods? see kubectl describe job)"
        return Standing(waits=waits, patience_s=patience.start_s)
    return _standing_of_pod(pod, patience)


def finished(job: Json) -> bool:
    """True if no pod of the Job will begin."""
    return bool(_condition(job, "Complete") or _condition(job, "Failed"))


def _standing_of_pod(pod: Json, patience: Patience) -> Standing:
    status = pod.get("status", {})
    if pod["metadata"].get("deletionTimestamp"):
        lost = Outcome.NODE_LOST
        return Standing(None, False, "its pod is being deleted", patience.settle_s, lost)
    # Once the harness runs, what others wait for, an image say, is no matter of the attempt's.
    for container in () if "running" in _harness(pod) else _containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        said = f"{reason}: {waiting.get('message', '')}".rstrip(": ")
        if reason in _NEVER_PASS:
            return _ended(Outcome.LAUNCH_FAULT, said)
        if reason in _MAY_PASS:
            return Standing(waits=said, patience_s=patience.fault_s)
    if status.get("phase") == "Running":
        return Standing(running=True)
    if status.get("phase") == "Unknown":
        return Standing(waits="its node does not answer", patience_s=patience.fault_s)
    scheduled = _condition(pod, "PodScheduled", "False")
    if scheduled:
        waits = f"{scheduled.get('reason', 'Unschedulable')}: {scheduled.get('message', '')}"
        return Standing(waits=waits, patience_s=patience.start_s)
    return Standing(waits=STARTING, patience_s=patience.start_s)


def _end_of_pod(pod: Json) -> End | None:
    status = pod.get("status", {})
    reason, message = status.get("reason", ""), status.get("message", "")
    said = f"{reason}: {message}".rstrip(": ")
    if reason == "Evicted":
        # What the harness wrote beyond its own limit is its doing; a full node is not.
        own = "exceeds the" in message or "exceeded its local ephemeral storage limit" in message
        return End(Outcome.OUTPUT_LIMIT if own else Outcome.NODE_LOST, said)
    if reason:
        # Preempting, NodeLost, Shutdown, UnexpectedAdmissionError, OutOfcpu, ... DeadlineExceeded
        # as well: no template gives a pod a deadline of its own, a cluster's webhook may.
        return End(Outcome.NODE_LOST, said)
    if target := _condition(pod, "DisruptionTarget"):
        return End(Outcome.NODE_LOST, f"{target.get('reason')}: {target.get('message')}")
    if ended := _harness(pod).get("terminated"):
        return _end_of_container(ended, "deletionTimestamp" in pod["metadata"])
    if status.get("phase") not in ("Succeeded", "Failed"):
        return None
    for container in status.get("initContainerStatuses") or []:
        ended = container.get("state", {}).get("terminated") or {}
        if code := ended.get("exitCode"):
            why = f"{ended.get('reason') or 'Error'}, exit status {code}"
            words = " ".join((ended.get("message") or "no message").split())[-_WORDS_CHARS:]
            said = f"its init container {container.get('name')} failed: {why}: {words}"
            return End(Outcome.LAUNCH_FAULT, said)
    return End(Outcome.NODE_LOST, "its pod failed before its container ran")


def _end_of_container(ended: Json, deleted: bool) -> End:
    code, reason = ended.get("exitCode", 0), ended.get("reason", "")
    message = (ended.get("message") or "").strip()
    if reason == "OOMKilled":
        return End(Outcome.OUT_OF_MEMORY, "passed its memory limit (OOMKilled)")
    if reason in ("StartError", "ContainerCannotRun"):
        return End(Outcome.LAUNCH_FAULT, f"{reason}: {message}")
    if code > _SIGNALLED:
        number = code - _SIGNALLED
        if deleted:
            return End(Outcome.NODE_LOST, f"its pod was deleted (signal {number})")
        if reason not in _BY_ITSELF:
            return End(Outcome.NODE_LOST, f"{reason}: exit status {code}")
        # Whoever evicts, preempts, deletes or shuts down says so, in the pod, before it kills. What
        # is left is the harness, should it find a way past `guard.py`, and, hardly ever, a node
        # that kills without a word (one without control groups of version 2 that has no memory
        # left). Nobody can tell these apart, and a rollout that could be undone by whoever is about
        # to lose it is worse than one that is judged as it stands.
        said = f"its first process was ended by signal {number}, and no node says that it did that"
        if code == _NO_MESSAGE:
            said = "there was no space for its termination message"
        return End(Outcome.HARNESS_ERROR, said)
    try:
        facts = json.loads(message)
        ended_by, seconds = facts["ended_by"], float(facts.get("seconds") or 0.0)
        status = facts.get("status")
    except (ValueError, TypeError, KeyError):
        last = message.splitlines()[-1] if message else "no message"
        if code == 0:
            return End(Outcome.COMPLETED, "exit status 0")
        return End(Outcome.LAUNCH_FAULT, f"exit status {code} before it had its order: {last}")
    error, lacks = str(facts.get("error") or ""), (facts.get("unguarded"), facts.get("network"))
    lack = "; ".join(str(each) for each in lacks if each)
    after = f"after {seconds:.1f} s" + (f" (unguarded: {lack})" if lack else "")
    if ended_by == "exit":
        outcome = Outcome.COMPLETED if status == 0 else Outcome.HARNESS_ERROR
        why = f": {error}" if error else ""
        return End(outcome, f"exit status {status} {after}{why}", lack)
    why = error or f"ended by {ended_by}"
    return End(_ENDED_BY.get(ended_by, Outcome.LAUNCH_FAULT), f"{why} {after}", lack)


def _ended(outcome: Outcome, detail: str) -> Standing:
    return Standing(End(outcome, detail))


def _harness(pod: Json) -> Json:
    """The state of the harness's container, the first of the template; others may run on, or end
    otherwise."""
    name = (pod.get("spec", {}).get("containers") or [{}])[0].get("name")
    for container in pod.get("status", {}).get("containerStatuses") or []:
        if name in (None, container.get("name")):
            state: Json = container.get("state", {})
            return state
    return {}


def _containers(pod: Json) -> list[Json]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _condition(thing: Json, kind: str, value: str = "True") -> Json | None:
    conditions: list[Json] = thing.get("status", {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind and c.get("status") == value), None)
