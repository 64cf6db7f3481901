"""What decides about Jobs, without a cluster: outcomes, reconciliation, templates, changes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ray.config import ConfigError, load
from lightning_ray.records import Outcome, Task
from lightning_ray.rollouts import grading
from lightning_ray.rollouts.grading import Episode, RoomReport
from lightning_ray.rollouts.pods import changed, freedoms, manifest, staging
from lightning_ray.rollouts.pods.manifest import Frame, Room
from lightning_ray.rollouts.pods.outcomes import Patience, standing
from lightning_ray.rollouts.pods.reconcile import Create, Delete, Finish, Reconciler
from lightning_ray.rollouts.pods.template import JobTemplate, Names, TemplateFault
from lightning_ray.store.depot import Depot, Refusal
from lightning_ray.tasks.swe import embedded, offline
from lightning_ray.tasks.swe import grading as swe

PATIENCE = Patience(start_s=100, fault_s=10)
NAMES = Names("r-a0", "r", "g", "train", "http://gateway/rollout/r-a0")
TASK = Task("t1", "mend it: {{ not a placeholder }}", {"image": "repo:1", "cpu": 2, "uid": 1000})


def job(name: str = "j", uid: str = "u1", *conditions: dict[str, str]) -> dict[str, Any]:
    full = [{"status": "True", **condition} for condition in conditions]
    return {"metadata": {"name": name, "uid": uid}, "status": {"conditions": full}}


def pod(name: str = "j", uid: str = "p1", **status: Any) -> dict[str, Any]:
    deleted = {"deletionTimestamp": "now"} if status.pop("deleted", False) else {}
    metadata = {"name": f"{name}-{uid}", "uid": uid, "labels": {"job-name": name}, **deleted}
    return {"metadata": metadata, "status": status}


def ended(code: int = 0, reason: str = "", message: str = "") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"state": state}]}


def facts(ended_by: str, status: int | None = None, error: str = "") -> str:
    return json.dumps({"ended_by": ended_by, "status": status, "error": error, "seconds": 2})


def waiting(reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "because"}}
    return {"phase": "Pending", "containerStatuses": [{"state": state}]}


NOT_SCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
TAKEN = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
OWN_DISK = "Usage of EmptyDir volume lightning exceeds the limit 4Gi."


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (ended(0, "Completed", facts("exit", 0)), Outcome.COMPLETED),
        (ended(3, "Error", facts("exit", 3)), Outcome.HARNESS_ERROR),
        (ended(1, "Error", facts("signal", 11)), Outcome.HARNESS_ERROR),
        (ended(1, "Error", facts("time")), Outcome.TIMEOUT),
        (ended(1, "Error", facts("memory")), Outcome.OUT_OF_MEMORY),
        (ended(1, "Error", facts("disk")), Outcome.OUTPUT_LIMIT),
        (ended(1, "Error", facts("not_started")), Outcome.LAUNCH_FAULT),
        (ended(137, "OOMKilled"), Outcome.OUT_OF_MEMORY),
        # Nobody says that he did it: then it was the harness, whatever the message says.
        (ended(137, "Error"), Outcome.HARNESS_ERROR),
        (ended(137, "Error", facts("exit", 0)), Outcome.HARNESS_ERROR),
        (ended(137, "Error", facts("not_started")), Outcome.HARNESS_ERROR),
        (ended(152, "Error", facts("not_started")), Outcome.HARNESS_ERROR),
        (ended(137, "ContainerStatusUnknown"), Outcome.NODE_LOST),
        (ended(137, "Error") | {"deleted": True}, Outcome.NODE_LOST),
        (ended(137, "Error") | {"conditions": [TAKEN]}, Outcome.NODE_LOST),
        (ended(137, "Error") | {"reason": "Evicted", "message": "low"}, Outcome.NODE_LOST),
        (ended(0, "Completed", facts("exit", 0)) | {"deleted": True}, Outcome.COMPLETED),
        (ended(1, "Error", "gateway http://g, order: HTTP 401"), Outcome.LAUNCH_FAULT),
        (ended(128, "StartError", "exec: python3: not found"), Outcome.LAUNCH_FAULT),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, Outcome.NODE_LOST),
        ({"phase": "Failed", "reason": "Evicted", "message": OWN_DISK}, Outcome.OUTPUT_LIMIT),
        # A deadline of the pod's own is none of ours: a cluster's webhook gave it one.
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, Outcome.NODE_LOST),
        ({"phase": "Failed", "reason": "Preempting"}, Outcome.NODE_LOST),
        ({"phase": "Failed", "reason": "NodeLost"}, Outcome.NODE_LOST),
        ({"phase": "Failed", "reason": "Terminated"}, Outcome.NODE_LOST),
        ({"phase": "Running", "conditions": [TAKEN]}, Outcome.NODE_LOST),
        (waiting("InvalidImageName"), Outcome.LAUNCH_FAULT),
    ],
)
def test_what_a_pod_says_is_an_outcome(status, outcome) -> None:
    end = standing(job(), [pod(**status)], PATIENCE).end
    assert end is not None
    assert end.outcome is outcome
    assert end.detail


@pytest.mark.parametrize(
    ("status", "waits", "patience"),
    [
        (waiting("ImagePullBackOff"), "ImagePullBackOff: because", 10),
        (waiting("CreateContainerConfigError"), "CreateContainerConfigError: because", 10),
        ({"phase": "Pending", "conditions": [NOT_SCHEDULED]}, "Unschedulable", 100),
        ({"phase": "Pending"}, "its pod is starting", 100),
        ({"phase": "Unknown"}, "its node does not answer", 10),
        ({"phase": "Running", "deleted": True}, "its pod is being deleted", 5),
    ],
)
def test_what_may_pass_is_waited_for_and_said(status, waits, patience) -> None:
    how = standing(job(), [pod(**status)], PATIENCE)
    assert how.end is None
    assert how.waits.startswith(waits)
    assert how.patience_s == patience


def test_what_does_not_guard_the_first_process_is_said() -> None:
    told = json.dumps({**json.loads(facts("exit", 0)), "unguarded": "seccomp: not here"})
    end = standing(job(), [pod(**ended(0, "Completed", told))], PATIENCE).end
    assert end is not None
    assert "unguarded: seccomp: not here" in end.detail


def test_a_jobs_deadline_is_the_infrastructures() -> None:
    late = job("j", "u1", {"type": "Failed", "reason": "DeadlineExceeded", "message": ""})
    state = {"containerStatuses": [{"state": {"running": {}}}]}
    ran = standing(late, [pod(phase="Running", deleted=True, **state)], PATIENCE).end
    never = standing(late, [], PATIENCE).end
    assert ran is not None
    assert never is not None
    # A harness has its own limit, which is shorter: a node that hangs is not its doing.
    assert (ran.outcome, never.outcome) == (Outcome.NODE_LOST, Outcome.LAUNCH_FAULT)


def test_a_job_that_failed_waits_for_its_pods_own_words() -> None:
    failed = job("j", "u1", {"type": "Failed", "reason": "BackoffLimitExceeded", "message": ""})
    how = standing(failed, [pod(phase="Running")], PATIENCE)
    assert (how.end, how.patience_s) == (None, PATIENCE.words_s)
    how = standing(failed, [], PATIENCE)  # nor was the pod seen: the watch may be behind
    assert (how.end, how.patience_s, how.then) == (None, PATIENCE.words_s, Outcome.NODE_LOST)
    how = standing(failed, [pod(phase="Running", deleted=True)], PATIENCE)
    assert (how.end, how.patience_s, how.then) == (None, PATIENCE.settle_s, Outcome.NODE_LOST)


def test_of_several_containers_the_harnesss_own_counts() -> None:
    def state(name: str, **what: Any) -> dict[str, Any]:
        return {"name": name, "state": what}

    done = {"exitCode": 0, "reason": "Completed", "message": facts("exit", 0)}
    for phase, side in [
        ("Running", state("proxy", running={})),
        ("Failed", state("proxy", terminated={"exitCode": 143, "reason": "Error"})),
    ]:
        statuses = [side, state("zz-agent", terminated=done)]
        one = pod(phase=phase, containerStatuses=statuses)
        one["spec"] = {"containers": [{"name": "zz-agent"}, {"name": "proxy"}]}
        end = standing(job(), [one], PATIENCE).end
        assert end is not None
        assert end.outcome is Outcome.COMPLETED


def test_once_the_harness_runs_nobody_elses_wait_ends_it() -> None:
    back_off = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    never = {"waiting": {"reason": "InvalidImageName", "message": "?"}}
    for waits in (back_off, never):
        for state, running in [({"running": {}}, True), ({"waiting": {}}, False)]:
            statuses = [{"name": "proxy", "state": waits}, {"name": "agent", "state": state}]
            one = pod(phase="Running", containerStatuses=statuses)
            one["spec"] = {"containers": [{"name": "agent"}, {"name": "proxy"}]}
            how = standing(job(), [one], PATIENCE)
            assert how.running == running, how
            assert bool(how.waits or how.end) != running, how


def test_an_init_container_that_fails_says_why() -> None:
    failed = {"exitCode": 7, "reason": "Error", "message": "cloning\nno such host: git.example"}
    statuses = [{"name": "clone", "state": {"terminated": failed}}]
    end = standing(job(), [pod(phase="Failed", initContainerStatuses=statuses)], PATIENCE).end
    assert end is not None
    assert end.outcome is Outcome.LAUNCH_FAULT
    said = "init container clone failed: Error, exit status 7: cloning no such host: git.example"
    assert said in end.detail
    # Without words of its own it is the end of its output, where the template does not say
    # otherwise.
    own = {"name": "b", "terminationMessagePolicy": "File"}
    spec = {"containers": [{"name": "agent"}], "initContainers": [{"name": "a"}, own]}
    made = manifest.build(
        {"spec": {"template": {"spec": spec}}},
        Room("r-a0", "http://g", "k", manifest.AGENT, 1.0),
        Frame("run", None, 1, 1, 1, 0.0, None),
    )
    policies = [
        one["terminationMessagePolicy"]
        for one in made["spec"]["template"]["spec"]["initContainers"]
    ]
    assert policies == ["FallbackToLogsOnError", "File"]


def test_a_second_pod_ends_the_attempt() -> None:
    pods = [pod(uid="p1", phase="Running", deleted=True), pod(uid="p2", phase="Running")]
    end = standing(job(), pods, PATIENCE).end
    assert end is not None
    assert end.outcome is Outcome.NODE_LOST


# -- the reconciler against a cluster in which anything may happen ---------------------------------


class World:
    """Jobs and pods as an API server has them, an observer who misses things, and a clock."""

    def __init__(self, most: int) -> None:
        self.reconciler = Reconciler(PATIENCE, most, per_second=1000)
        self.most, self.now = most, 1.0
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.wished: set[str] = set()
        self.finished: dict[str, int] = {}
        self.made: dict[str, int] = {}
        self.dying: dict[str, int] = {}  # pods that take their time to end: steps left
        self.answered: set[str] = set()  # Jobs that the reconciler was told of when they were made
        self.uids = 0

    def uid(self) -> str:
        self.uids += 1
        return f"uid{self.uids}"

    def relist(self) -> None:
        self.now += 0.01
        self.reconciler.listed("jobs", list(self.jobs.values()), self.now)
        self.reconciler.listed("pods", list(self.pods.values()), self.now)

    def step(self, lost: bool = False) -> None:
        """Does what the reconciler asks for; a creation's answer may be `lost`."""
        self.now += 1.0
        for action in self.reconciler.actions(self.now, everything=True):
            name = action.name
            match action:
                case Create():
                    if name not in self.jobs:
                        self.made[name] = self.made.get(name, 0) + 1
                        self.jobs[name] = job(name, self.uid())
                        pod_uid = self.uid()
                        self.pods[pod_uid] = pod(name, pod_uid, phase="Running")
                    if lost:
                        self.reconciler.refused(name, "lost", self.now, for_good=False)
                    else:
                        self.answered.add(name)
                        self.reconciler.created(name, self.jobs[name], self.now)
                case Delete(_, uid):
                    if name in self.jobs and self.jobs[name]["metadata"]["uid"] == uid:
                        self.remove(name)
                case Finish():
                    self.finished[name] = self.finished.get(name, 0) + 1
        alive = [p for p in self.pods.values() if p["status"]["phase"] == "Running"]
        assert len(alive) <= self.most
        for uid in [u for u, left in self.dying.items() if left == 0]:
            del self.dying[uid]
            self.pods.pop(uid, None)
        self.dying = {uid: left - 1 for uid, left in self.dying.items()}

    def remove(self, name: str) -> None:
        self.jobs.pop(name, None)
        for uid in [u for u, p in self.pods.items() if p["metadata"]["labels"]["job-name"] == name]:
            if name in self.answered:
                self.dying.setdefault(uid, 3)
            else:  # its Job is not known, and somebody else deleted it: nobody can know the pod
                del self.pods[uid]
                self.dying.pop(uid, None)

    def complete(self, name: str) -> None:
        for uid, one in self.pods.items():
            if one["metadata"]["labels"]["job-name"] == name:
                self.pods[uid] = pod(name, uid, **ended(0, "Completed", facts("exit", 0)))


EVENT = st.tuples(
    st.sampled_from(["want", "release", "delete", "complete", "relist", "step", "lose", "event"]),
    st.integers(0, 5),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENT, max_size=40), st.integers(1, 4))
def test_the_reconciler_converges_from_any_state(events, most) -> None:
    world = World(most)
    world.relist()
    for what, number in events:
        name = f"j{number}"
        match what:
            case "want" if name not in world.wished and name not in world.made:
                world.wished.add(name)
                world.reconciler.want(name, world.now)
            case "release":
                world.wished.discard(name)
                world.reconciler.release(name)
            case "delete":
                world.remove(name)
            case "complete":
                world.complete(name)
            case "relist":
                world.relist()
            case "step" | "lose":
                world.step(lost=what == "lose")
            case "event":
                for one in list(world.pods.values())[number : number + 1]:
                    world.reconciler.event("pods", "MODIFIED", one)
    for _ in range(80):
        for name in list(world.jobs):
            world.complete(name)
        world.relist()
        world.step()
    # Each wish ended once, what nobody wishes is gone; nothing was made twice after it was there.
    assert {n: c for n, c in world.finished.items() if c != 1} == {}
    assert world.wished <= world.finished.keys()
    assert world.jobs.keys() <= world.wished


def test_an_old_list_does_not_lose_a_job_that_was_made_meanwhile() -> None:
    reconciler = Reconciler(PATIENCE, 5, 100)
    reconciler.listed("jobs", [], 1.0)
    reconciler.listed("pods", [], 1.0)
    reconciler.want("j", 2.0)
    assert reconciler.actions(2.0) == [Create("j")]
    reconciler.created("j", job(), 3.0)
    reconciler.listed("jobs", [], 2.5)  # asked for before it was there
    assert reconciler.actions(3.1, everything=True) == []
    reconciler.listed("jobs", [], 4.0)
    [finish] = reconciler.actions(4.1)
    assert isinstance(finish, Finish)
    assert finish.end.outcome is Outcome.NODE_LOST


@pytest.mark.parametrize("first", ["jobs", "pods"])
def test_nothing_is_decided_before_both_lists_are_there(first) -> None:
    lists = {"jobs": [job()], "pods": [pod(**ended(3, "Error", facts("exit", 3)))]}
    failed = {"type": "Failed", "reason": "BackoffLimitExceeded", "message": ""}
    lists["jobs"] = [job("j", "u1", failed)]
    reconciler = Reconciler(PATIENCE, 5, 100)
    reconciler.want("j", 1.0, there=True)
    reconciler.listed(first, lists.pop(first), 2.0)
    assert reconciler.actions(2.0, everything=True) == []
    [(second, objects)] = lists.items()
    reconciler.listed(second, objects, 3.0)
    [finish] = reconciler.actions(3.0, everything=True)
    assert isinstance(finish, Finish)
    assert finish.end.outcome is Outcome.HARNESS_ERROR


def test_patience_ends_however_often_the_words_change() -> None:
    reconciler = Reconciler(PATIENCE, 5, 100)
    reconciler.want("j", 0.0, there=True)
    reconciler.listed("jobs", [job()], 1.0)
    reconciler.listed("pods", [], 1.0)
    for second in range(1, 200):
        waits = NOT_SCHEDULED | {"message": f"0/{second} nodes are available"}
        reconciler.event("pods", "MODIFIED", pod(phase="Pending", conditions=[waits]))
        if found := reconciler.actions(float(second)):
            break
        if second > 10:
            assert f"0/{second} nodes" in reconciler.trouble(float(second))
    assert second == pytest.approx(PATIENCE.start_s, abs=3)
    assert isinstance(found[0], Finish)


def test_why_an_image_could_not_be_pulled_is_said_also_by_nodes_that_forget_it() -> None:
    world = Reconciler(PATIENCE, 5, 100.0)
    world.listed("jobs", [], 0.0)
    world.listed("pods", [], 0.0)
    world.want("j", 0.0)
    assert world.actions(1.0) == [Create("j")]
    world.created("j", job(), 1.0)
    found = []
    for now, reason in ((2.0, "ErrImagePull"), (3.0, "ImagePullBackOff"), (99.0, "")):
        if reason:
            world.event("pods", "MODIFIED", pod(**waiting(reason)))
        found += world.actions(now, everything=True)
    [ended] = found
    assert ended.end.detail == ("ImagePullBackOff: because (ErrImagePull: because) (for 10 s)")


def test_no_more_jobs_a_second_than_asked_for_be_it_less_than_one() -> None:
    for per_second, seconds, made in ((0.5, 10, 5), (3.0, 10, 30)):
        reconciler = Reconciler(PATIENCE, 1000, per_second)
        reconciler.listed("jobs", [], 0.0)
        reconciler.listed("pods", [], 0.0)
        for number in range(100):
            reconciler.want(f"j{number}", 0.0)
        found = [len(reconciler.actions(tick / 4)) for tick in range(1, 4 * seconds + 1)]
        assert made <= sum(found) <= made + per_second + 1


@pytest.mark.parametrize("status", [{"phase": "Pending"}, waiting("ErrImagePull")])
@pytest.mark.parametrize("kind", ["jobs", "pods"])
def test_while_the_api_server_is_away_nobodys_patience_ends(kind, status) -> None:
    reconciler = Reconciler(PATIENCE, 5, 100)
    reconciler.want("j", 0.0, there=True)
    reconciler.listed("jobs", [job()], 1.0)
    reconciler.listed("pods", [pod(**status)], 1.0)
    assert reconciler.actions(2.0, everything=True) == []
    reconciler.lost(kind)
    assert reconciler.actions(1000.0, everything=True) == []
    reconciler.listed(kind, [job()] if kind == "jobs" else [pod(**status)], 1001.0)
    assert reconciler.actions(1002.0, everything=True) == []
    [finish] = reconciler.actions(1200.0, everything=True)
    assert isinstance(finish, Finish)
    assert finish.end.outcome is Outcome.LAUNCH_FAULT


def test_a_failed_job_waits_for_the_watch_of_pods_that_is_behind() -> None:
    failed = job("j", "u1", {"type": "Failed", "reason": "BackoffLimitExceeded", "message": ""})
    reconciler = Reconciler(PATIENCE, 5, 100)
    reconciler.want("j", 0.0, there=True)
    reconciler.listed("jobs", [job()], 1.0)
    reconciler.listed("pods", [pod(phase="Running")], 1.0)
    reconciler.event("jobs", "MODIFIED", failed)
    assert reconciler.actions(2.0, everything=True) == []
    assert reconciler.actions(100.0, everything=True) == []
    reconciler.event("pods", "MODIFIED", pod(**ended(3, "Error", facts("exit", 3))))
    [finish] = reconciler.actions(101.0)
    assert isinstance(finish, Finish)
    assert finish.end.outcome is Outcome.HARNESS_ERROR


def test_a_job_that_is_deleted_before_its_creation_is_answered_has_ended() -> None:
    reconciler = Reconciler(PATIENCE, 5, 100)
    reconciler.listed("jobs", [], 1.0)
    reconciler.listed("pods", [], 1.0)
    reconciler.want("j", 1.0)
    assert reconciler.actions(2.0) == [Create("j")]
    reconciler.event("jobs", "ADDED", job())
    reconciler.event("jobs", "DELETED", job())
    reconciler.created("j", job(), 3.0)
    [finish] = reconciler.actions(3.0)
    assert isinstance(finish, Finish)
    assert finish.end.outcome is Outcome.NODE_LOST


def test_graders_come_first_and_in_order_also_when_they_were_refused() -> None:
    reconciler = Reconciler(PATIENCE, 1, 100)
    reconciler.listed("jobs", [], 1.0)
    reconciler.listed("pods", [], 1.0)
    reconciler.want("agent", 1.0)
    for name in ("g1", "g2"):
        reconciler.want(name, 1.0, urgent=True)
    assert reconciler.actions(2.0) == [Create("g1")]
    reconciler.refused("g1", "HTTP 403: quota", 2.0, for_good=False)
    assert reconciler.actions(2.5) == []  # its place is kept
    assert reconciler.actions(4.0) == [Create("g1")]
    reconciler.release("g1")
    reconciler.refused("g1", "HTTP 422", 4.0, for_good=True)
    assert reconciler.actions(5.0) == [Create("g2")]


def test_an_ordinary_start_is_not_worth_a_line_but_one_that_takes_long_is() -> None:
    reconciler = Reconciler(PATIENCE, 5, 100)
    reconciler.want("j", 1.0, there=True)
    reconciler.listed("jobs", [job()], 1.0)
    reconciler.listed("pods", [pod(phase="Pending")], 1.0)
    assert reconciler.actions(2.0, everything=True) == []
    assert reconciler.trouble(30.0) == ""
    assert reconciler.trouble(70.0) == "1 x its pod is starting"


def test_jobs_that_are_being_made_are_left_to_be_deleted() -> None:
    reconciler = Reconciler(PATIENCE, 5, 100)
    reconciler.listed("jobs", [], 1.0)
    reconciler.listed("pods", [], 1.0)
    reconciler.want("j", 1.0)
    assert reconciler.actions(2.0) == [Create("j")]
    reconciler.release("j")
    assert reconciler.left == 1
    reconciler.created("j", job(), 3.0)
    assert reconciler.left == 1
    reconciler.event("jobs", "DELETED", job())
    assert reconciler.left == 0


def test_a_pod_that_outlives_its_deleted_job_still_runs() -> None:
    reconciler = Reconciler(PATIENCE, 5, 100)
    reconciler.listed("jobs", [job()], 1.0)
    reconciler.listed("pods", [pod(phase="Running")], 1.0)
    assert reconciler.actions(2.0) == [Delete("j", "u1")]  # nobody wishes it
    reconciler.event("jobs", "DELETED", job())
    assert reconciler.actions(3.0, everything=True) == []
    assert reconciler.runs("j")
    reconciler.event("pods", "DELETED", pod(phase="Running"))
    assert reconciler.actions(4.0, everything=True) == []
    assert not reconciler.runs("j")
    assert reconciler.left == 0


def test_who_grades_is_not_kept_waiting_by_those_that_have_not_begun() -> None:
    reconciler = Reconciler(PATIENCE, 1, 100)
    reconciler.listed("jobs", [], 1.0)
    reconciler.listed("pods", [], 1.0)
    for name in ("a", "b"):
        reconciler.want(name, 1.0)
    reconciler.want("grader", 1.0, urgent=True)
    assert reconciler.actions(2.0) == [Create("grader")]


# -- templates ------------------------------------------------------------------------------------

TEMPLATE = """\
apiVersion: batch/v1
kind: Job
metadata:
  labels: {team: blue}
spec:
  template:
    spec:
      imagePullSecrets: [{name: registry}]
      securityContext: {runAsUser: "{{ task.fields.uid }}"}
      containers:
        - name: agent
          image: "{{ task.fields.image }}"
          resources: {limits: {cpu: "{{ task.fields.cpu }}", memory: 2Gi}}
        - name: side
          image: proxy
"""
FRAME = Frame("run1", None, 0.25, 2048, 4096, 40.0, None)
ROOM = Room("r-a0", "http://gateway/rollout/r-a0", "s3cret", "agent", 60.0)


def template(tmp_path: Path, text: str) -> JobTemplate:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return JobTemplate(str(path), None)


def test_a_template_is_filled_for_a_task_and_keeps_what_it_says(tmp_path) -> None:
    made = manifest.build(template(tmp_path, TEMPLATE).render(TASK, NAMES), ROOM, FRAME)
    spec = made["spec"]["template"]["spec"]
    [agent, side] = spec["containers"]
    assert (agent["image"], side) == ("repo:1", {"name": "side", "image": "proxy"})
    assert agent["resources"] == {"limits": {"cpu": "2", "memory": "2Gi"}}
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    annotations = made["spec"]["template"]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"
    assert made["metadata"]["labels"]["team"] == "blue"
    assert made["metadata"]["labels"]["lightning-ray/run"] == "run1"
    assert (made["spec"]["backoffLimit"], made["spec"]["activeDeadlineSeconds"]) == (0, 100)
    assert "s3cret" not in json.dumps(made)
    secret = manifest.secret(made, "uid", ROOM.secret)
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid"
    assert secret["stringData"] == {"key": "s3cret"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("image: repo:1\n          imagePullPolice: Always", "line 9: .*imagePullPolicy"),
        ('image: "{{ task.fields.imagee }}"', "line 8: .*imagee.*task t1"),
        ('image: "{{ task.fields.image"', "line 8: "),
        ('image: "{{ task.__class__.__mro__ }}"', "line 8: "),
    ],
)
def test_what_is_wrong_in_a_template_is_said_with_its_line(tmp_path, wrong, said) -> None:
    head = "apiVersion: batch/v1\nkind: Job\nspec:\n  template:\n    spec:\n      containers:\n"
    text = f"{head}        - name: agent\n          {wrong}\n"
    with pytest.raises(TemplateFault, match=said):
        template(tmp_path, text).render(TASK, NAMES)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("metadata: [1]", "line 3: metadata is .1.; write an object"),
        ("metadata: {labels: x}", "line 3: metadata.labels is 'x'; write an object"),
        ("metadata: {labels: {team: 5}}", 'line 3: .*labels.team is 5; write a text, .*"5"'),
        ("metadata: {labels: {5: team}}", "line 3: metadata.labels: 5 is no text"),
        ("metadata: {annotations: {a: true}}", 'annotations.a is True; .*"true"'),
        ("metadata: {labels: {day: 2026-12-01}}", 'labels.day .*"2026-12-01"'),
        ("metadata: {name: [a]}", "metadata.name is .*write a text"),
        ("metadata: {1: a}", "line 3: metadata has no field '1'"),
    ],
)
def test_a_value_of_another_type_is_said_with_its_line(tmp_path, wrong, said) -> None:
    text = TEMPLATE.replace("metadata:\n  labels: {team: blue}", wrong)
    with pytest.raises(TemplateFault, match=said):
        template(tmp_path, text).render(TASK, NAMES)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('{runAsUser: "{{ task.fields.uid }}"}', "[]", "line 9: .*securityContext is .*an object"),
        ("imagePullSecrets: [{name: registry}]", "imagePullSecrets: x", "line 8: .*a list"),
        ("imagePullSecrets: [{name: registry}]", "imagePullSecrets: [x]", "line 8: .*an object"),
        ("image: proxy", "image: proxy\n          env: [{name: A, value: 5}]", 'line 16: .*"5"'),
        ("image: proxy", "image: proxy\n          command: sleep", "line 16: .*a list"),
        ("image: proxy", "image: proxy\n          tty: 1", "line 16: .*true or false"),
        ('"{{ task.fields.uid }}"', "1.5", "line 9: .*a whole number"),
        ('"{{ task.fields.uid }}"', "true", "line 9: .*a whole number"),
        ('"{{ task.fields.uid }}"', '"{{ task.task_id }}"', "line 9: .*a whole number"),
        ("- name: side", "-\n        - name: side", "line 14: .*containers.1 is None"),
    ],
)
def test_so_is_one_of_a_pod(tmp_path, right, wrong, said) -> None:
    assert right in TEMPLATE
    with pytest.raises(TemplateFault, match=said):
        template(tmp_path, TEMPLATE.replace(right, wrong)).render(TASK, NAMES)


CLAIM = "volumes: [{name: v, persistentVolumeClaim: {claimName: c}}]"
POD = "imagePullSecrets: [{name: registry}]"
SIDE, FIRST = "image: proxy", "- name: agent"


@pytest.mark.parametrize(
    ("where", "added", "said"),
    [
        ("spec:\n  template:", "spec:\n  suspend: true\n  template:", "line 6: .*suspend"),
        ("spec:\n  template:", "spec:\n  completionMode: Indexed\n  template:", "line 6: .*index"),
        (
            "spec:\n  template:",
            "spec:\n  podFailurePolicy: {rules: [{action: Ignore}]}\n  template:",
            "line 6: .*no second one",
        ),
        (POD, "activeDeadlineSeconds: 60", "line 8: .*counts as lost"),
        (POD, "hostIPC: true", "line 8: .*outlives the pod"),
        (FIRST, f"{FIRST}\n          livenessProbe: {{}}", "line 12: .*like a harness"),
        (SIDE, f"{SIDE}\n          restartPolicy: Always", "line 16: .*starts again"),
    ],
)
def test_what_would_break_a_promise_in_silence_is_refused(tmp_path, where, added, said) -> None:
    assert where in TEMPLATE
    with pytest.raises(TemplateFault, match=said):
        template(tmp_path, TEMPLATE.replace(where, added)).render(TASK, NAMES)


@pytest.mark.parametrize(
    ("volume", "mount", "refused"),
    [
        ("persistentVolumeClaim: {claimName: c}", "mountPath: /v", True),
        ("persistentVolumeClaim: {claimName: c}", "mountPath: /v, readOnly: true", False),
        ("persistentVolumeClaim: {claimName: c, readOnly: true}", "mountPath: /v", False),
        ("hostPath: {path: /data}", "mountPath: /v", True),
        ("hostPath: {path: /data}", "mountPath: /v, readOnly: true", False),
        ("nfs: {server: s, path: /}", "mountPath: /v", True),
        ("csi: {driver: d}", "mountPath: /v", True),
        ("emptyDir: {}", "mountPath: /v", False),
        ("ephemeral: {volumeClaimTemplate: {spec: {}}}", "mountPath: /v", False),
        ("secret: {secretName: s}", "mountPath: /v", False),
    ],
)
@pytest.mark.parametrize("container", ["containers", "initContainers"])
def test_no_volume_leads_from_an_agents_pod_into_its_graders(
    tmp_path, volume, mount, refused, container
) -> None:
    volumes = f"volumes: [{{name: v, {volume}}}]"
    mounts = f"volumeMounts: [{{name: v, {mount}}}]"
    if container == "containers":
        text = TEMPLATE.replace(POD, volumes).replace(SIDE, f"{SIDE}\n          {mounts}")
    else:
        first = f"initContainers:\n        - name: first\n          {mounts}"
        text = TEMPLATE.replace(POD, f"{volumes}\n      {first}")
    made = template(tmp_path, text)
    if refused:
        line = 16 if container == "containers" else 11
        with pytest.raises(
            TemplateFault, match=f"line {line}: .*outlives the pod .*readOnly: true"
        ):
            made.render(TASK, NAMES)
    else:
        made.render(TASK, NAMES)


def test_a_block_device_that_outlives_the_pod_is_refused_and_an_unused_claim_is_not(
    tmp_path,
) -> None:
    unused = TEMPLATE.replace(POD, CLAIM)
    template(tmp_path, unused).render(TASK, NAMES)
    device = unused.replace(
        SIDE, f"{SIDE}\n          volumeDevices: [{{name: v, devicePath: /dev/x}}]"
    )
    with pytest.raises(TemplateFault, match="line 16: .*outlives"):
        template(tmp_path, device).render(TASK, NAMES)


def test_what_weakens_a_pod_is_named(tmp_path) -> None:
    def weak(text: str) -> list[str]:
        rendered = template(tmp_path, text).render(TASK, NAMES)
        return [
            one.split(" ")[0] for one in freedoms.weaknesses(manifest.build(rendered, ROOM, FRAME))
        ]

    assert weak(TEMPLATE) == []
    of_pod = """hostNetwork: true
      automountServiceAccountToken: true
      volumes:
        - {name: v, hostPath: {path: /data}}
        - {name: t, projected: {sources: [{serviceAccountToken: {path: t}}]}}"""
    assert weak(TEMPLATE.replace(POD, of_pod)) == [
        "automountServiceAccountToken",
        "hostNetwork",
        "hostPath",
        "serviceAccountToken",
    ]
    context = """securityContext:
            privileged: true
            allowPrivilegeEscalation: true
            capabilities: {add: [SYS_ADMIN]}
            seccompProfile: {type: Unconfined}"""
    assert weak(TEMPLATE.replace(SIDE, f"{SIDE}\n          {context}")) == [
        "allowPrivilegeEscalation",
        "capabilities.add",
        "privileged",
        "seccompProfile",
    ]


def test_quantities_may_be_numbers(tmp_path) -> None:
    text = TEMPLATE.replace('cpu: "{{ task.fields.cpu }}"', "cpu: 0.5, ephemeral-storage: 1000")
    made = template(tmp_path, text).render(TASK, NAMES)
    limits = made["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "0.5", "ephemeral-storage": "1000", "memory": "2Gi"}


def test_a_field_that_the_server_refuses_has_its_line(tmp_path) -> None:
    made = template(tmp_path, TEMPLATE)
    fault = made.fault_at("spec.template.spec.containers[1].image", "Required value")
    assert "line 15: Required value" in str(fault)


def test_the_example_is_a_template_for_the_embedded_tasks() -> None:
    path = Path(__file__).parents[1] / "examples" / "kubernetes" / "job.yaml"
    made = JobTemplate(str(path), "agent:1").render(embedded.train()[0], NAMES)
    assert made["spec"]["template"]["spec"]["containers"][0]["image"] == "agent:1"
    named = JobTemplate(str(path), "agent:1").render(TASK, NAMES)
    assert named["spec"]["template"]["spec"]["containers"][0]["image"] == "repo:1"


def test_the_example_for_images_gives_a_harness_to_each_of_them(repository) -> None:
    path = repository / "examples" / "kubernetes" / "swe.yaml"
    task = Task("t", "s", {"image_name": "swebench/one:latest"})
    made = JobTemplate(str(path), "harness:1").render(task, NAMES)
    pod = manifest.build(made, ROOM, FRAME)["spec"]["template"]["spec"]
    [harness], [agent] = pod["initContainers"], pod["containers"]
    assert (harness["image"], agent["image"]) == ("harness:1", "swebench/one:latest")
    assert manifest.workdir_of(made) == "/testbed"
    assert pod["securityContext"]["runAsUser"] == 0
    assert agent["securityContext"]["readOnlyRootFilesystem"] is False


def test_the_pages_template_gives_repository_tasks_their_image(repository, tmp_path) -> None:
    page = (repository / "docs" / "swe.md").read_text().splitlines()
    [line] = [
        line.strip() for line in page if "task.fields.image_name" in line and "image:" in line
    ]
    path = tmp_path / "job.yaml"
    path.write_text(TEMPLATE.replace('image: "{{ task.fields.image }}"', line))
    shown = JobTemplate(str(path), "offline:1")
    ours = offline.validation()[0]
    others = replace(ours, fields={**ours.fields, "image_name": "swebench/one:latest"})
    for task, image in ((ours, "offline:1"), (others, "swebench/one:latest")):
        made = shown.render(replace(task, fields={**TASK.fields, **task.fields}), NAMES)
        assert made["spec"]["template"]["spec"]["containers"][0]["image"] == image


@pytest.mark.parametrize("text", ["kind: Pod\n", "[]", "kind: Job\nspec: {}\n", "a: [", "- 1"])
def test_what_is_no_job_is_refused(tmp_path, text) -> None:
    with pytest.raises(TemplateFault):
        template(tmp_path, text)


def test_a_job_name_is_a_dns_label_whatever_the_attempt_is_called() -> None:
    names = {manifest.job_name("run", room) for room in ("A_b.c-a0", "x" * 300, "...", "a-b.c-a0")}
    assert len(names) == 4
    for name in names:
        assert len(name) < 63
        assert name.strip("abcdefghijklmnopqrstuvwxyz0123456789-") == ""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.launcher=kubernetes"], "needs kubernetes.image or kubernetes.template"),
        (["kubernetes.image=x"], "no effect with rollout.launcher=local"),
        (["rollout.launcher=kubernets"], "rollout.launcher"),
        # A Job that Kubernetes deletes at once is gone before its end and its log are read.
        (
            ["rollout.launcher=kubernetes", "kubernetes.image=x", "kubernetes.keep_s=0"],
            "kubernetes.keep_s.*60",
        ),
    ],
)
def test_settings_that_have_no_effect_are_refused(overrides, said) -> None:
    with pytest.raises(ConfigError, match=said):
        load(None, overrides)


# -- what comes out of a pod ----------------------------------------------------------------------


def tar(**members: bytes | tuple[str, str]) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as out:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, tuple):
                member.type = {"link": tarfile.SYMTYPE, "fifo": tarfile.FIFOTYPE}[content[0]]
                member.linkname = content[1]
                out.addfile(member)
            else:
                member.size = len(content)
                out.addfile(member, io.BytesIO(content))
    return body.getvalue()


def test_changes_of_a_workspace_come_back_as_they_were(tmp_path, monkeypatch) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for root in (theirs, ours):
        (root / "pkg").mkdir(parents=True)
        (root / "pkg" / "a.py").write_text("old")
        (root / "gone.py").write_text("x")
        (root / "turned").write_text("a file")
    before = changed.snapshot(str(theirs))
    (theirs / "pkg" / "a.py").write_text("new")
    (theirs / "gone.py").unlink()
    (theirs / "turned").unlink()
    (theirs / "turned").mkdir()
    (theirs / "turned" / "b.txt").write_text("in a folder")
    (theirs / "link").symlink_to("/etc/passwd")
    (theirs / "bytes.bin").write_bytes(b"\xff\x00")
    body = changed.changes(str(theirs), before, 1 << 20)
    assert body is not None
    staging.apply_changes(ours, body, tmp_path / "originals")
    assert (ours / "pkg" / "a.py").read_text() == "new"
    assert not (ours / "gone.py").exists()
    assert (ours / "turned" / "b.txt").read_text() == "in a folder"
    assert (ours / "link").is_symlink()
    assert (ours / "bytes.bin").read_bytes() == b"\xff\x00"
    assert changed.changes(str(theirs), before, 5) is None
    monkeypatch.setattr(changed, "MOST_CHANGED", 3)
    assert changed.changes(str(theirs), before, 1 << 20) is None


@pytest.mark.parametrize(
    "members",
    [
        {"changed/../../out": b"x"},
        {"changed//etc/out": b"x"},
        {"deleted": b'["../../out"]'},
        {"deleted": b"{"},
        {"deleted": b"5"},
    ],
)
def test_what_leaves_the_workspace_is_refused(tmp_path, members) -> None:
    root = tmp_path / "deep" / "root"
    root.mkdir(parents=True)
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match=r"leaves|cannot be read|Expecting"):
        staging.apply_changes(root, tar(**members), tmp_path / "originals")
    assert (tmp_path / "out").read_text() == "mine"


def test_nothing_is_written_through_a_link(tmp_path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "old").symlink_to(outside)
    sent = {"changed/new": ("link", str(outside)), "changed/new/a": b"x", "changed/old/b": b"y"}
    staging.apply_changes(
        root, tar(**sent, **{"changed/pipe": ("fifo", "")}), tmp_path / "originals"
    )
    assert list(outside.iterdir()) == []
    assert (root / "new" / "a").read_bytes() == b"x"
    assert (root / "old" / "b").read_bytes() == b"y"
    assert not (root / "pipe").exists()


def test_a_compressed_result_is_none(tmp_path) -> None:
    bomb = gzip.compress(tar(**{"changed/zeros": bytes(1 << 20)}))
    found, problem = staging.outcome_of(TASK, None, bomb, "no:matter")
    assert found is None
    assert "cannot be read" in problem


def test_the_harnesss_key_does_not_open_its_room(tmp_path) -> None:
    depot = Depot(tmp_path)
    depot.open("r-a0", hashlib.sha256(b"room").hexdigest(), {"order": b"x"})
    assert depot.bring("r-a0", staging.harness_key("room"), b"forged") is Refusal.KEY
    assert depot.bring("r-a0", "room", b"real") is None
    depot.open("other", "0", {})
    depot.sweep(["r-a0"])
    assert depot.result("r-a0") == b"real"
    assert [folder.name for folder in tmp_path.iterdir()] == ["r-a0"]


def test_code_that_takes_the_graders_memory_is_unsolved_and_no_fault() -> None:
    task = embedded.train()[0]
    order = swe.plan(task, {"files": {}})
    assert order is not None
    episode = Episode("r", "a", Outcome.COMPLETED, "", ())
    report = RoomReport(None, "", "OOMKilled", overran=True)
    assert swe.judge(task, {"files": {}}, episode, order, report).solved is False
    with pytest.raises(swe.GradingError):
        swe.judge(task, {"files": {}}, episode, order, RoomReport(1, "", "no python"))


def test_a_grader_without_pieces_has_no_room() -> None:
    assert grading.has_room("lightning_ray.tasks.swe.grading:grade")
    assert grading.has_room("lightning_ray.tasks.swe.repository:grade")
    assert not grading.has_room("lightning_ray.records:Reward")
    assert not grading.has_room(None)


def test_a_pod_that_takes_its_time_to_end_keeps_its_place() -> None:
    world = World(most=1)
    world.relist()
    for name in ("j0", "j1"):
        world.wished.add(name)
        world.reconciler.want(name, world.now)
    world.step()
    world.relist()
    world.reconciler.release("j0")
    steps = 0
    while "j1" not in world.made:
        world.step()  # which looks that no two run
        world.relist()
        steps += 1
    assert steps == 5  # three to end, one for the observer, one to create


def test_a_job_that_is_cancelled_while_it_is_made_keeps_its_place() -> None:
    reconciler = Reconciler(PATIENCE, 1, 100)
    reconciler.listed("jobs", [], 1.0)
    reconciler.listed("pods", [], 1.0)
    reconciler.want("j", 2.0)
    reconciler.want("k", 2.0)
    assert reconciler.actions(2.0) == [Create("j")]
    reconciler.release("j")
    assert reconciler.actions(3.0) == []
    reconciler.created("j", job(), 4.0)
    assert reconciler.actions(4.0) == [Delete("j", "u1")]
    assert reconciler.actions(5.0, everything=True) == []  # its pod may have begun
    reconciler.event("jobs", "DELETED", job())
    assert reconciler.actions(6.0) == [Create("k")]


def test_a_pod_on_a_lost_node_does_not_keep_its_place_for_ever() -> None:
    reconciler = Reconciler(PATIENCE, 1, 100)
    reconciler.listed("jobs", [job()], 1.0)
    reconciler.listed("pods", [pod(phase="Running")], 1.0)
    reconciler.want("k", 2.0)
    assert reconciler.actions(2.0) == [Delete("j", "u1")]
    reconciler.event("jobs", "DELETED", job())
    waited = next(s for s in range(3, 200) if reconciler.actions(float(s), everything=True))
    assert waited == 2 + 60
