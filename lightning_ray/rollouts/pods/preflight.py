"""What is looked at before a run that has rollouts as Jobs starts anything.

`check` asks whether we may do in the namespace all that a run does (`RIGHTS`), has the template
filled for the first task of each set that runs in pods, and has the API server look at that Job (a
dry run, which makes nothing). What it warns of is returned (Pod Security, say, judges pods and
refuses no Job), and what the template gives to pods that they need not have.

Invariants: nothing is made; a right that is missing and what the API server refuses are a
`ConfigError` with its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import kubernetes
from kubernetes.client import ApiException

from lightning_ray.config import ConfigError, RunConfig
from lightning_ray.records import Task
from lightning_ray.rollouts import grading
from lightning_ray.rollouts.places import in_pod
from lightning_ray.rollouts.pods.api import OUTAGE, Api
from lightning_ray.rollouts.pods.launcher import Launcher
from lightning_ray.rollouts.pods.podman.command import unlimited

_ASK_S = 30.0  # longest wait for an answer
# What a run does in the namespace: API group, resource, verbs. The Role in
# examples/kubernetes/access.yaml allows just this.
RIGHTS = (
    ("batch", "jobs", ("create", "get", "list", "watch", "delete")),
    ("", "pods", ("get", "list", "watch", "delete")),
    ("", "pods/log", ("get",)),
    ("", "secrets", ("create",)),
)


def check(config: RunConfig, *sets: Sequence[Task]) -> list[str]:
    """Returns what a person should know. `sets` are the run's tasks, for training and others.

    Raises:
        ConfigError: something cannot work.
    """
    tasks = list(firsts(config, *sets))
    if not tasks:
        return []
    try:
        check_rights(config)
        _check_grader(config)
        podman = config.rollout.launcher == "podman"
        notes = list(_of_podman() if podman else _of_address(config))
        launcher = Launcher(config, "check")
        notes.insert(0, f"rollouts are {launcher.place}")
        for task in tasks:
            notes += launcher.check(task)
    except OUTAGE as error:
        raise ConfigError(f"kubernetes: the API server does not answer: {error}") from error
    return list(dict.fromkeys(notes))  # each once, in order


def check_rights(config: RunConfig) -> None:
    """Raises ConfigError if the run may not do all that it needs: podman's are its user's own."""
    if config.rollout.launcher != "podman":
        Probe(config.kubernetes).check_rights()


def _of_address(config: RunConfig) -> Iterator[str]:
    if not config.gateway.advertise:
        yield (
            "pods reach the gateway by this node's address, which another head has not: set "
            "gateway.advertise to a name (of a Service), and gateway.port"
        )
    host = urlsplit(config.gateway.advertise or f"http://{config.gateway.host}").hostname or ""
    if host in ("127.0.0.1", "localhost", "::1"):
        yield f"pods reach the gateway at {host}? Set gateway.host and gateway.advertise"


def _of_podman() -> Iterator[str]:
    if lacks := unlimited():
        yield f"this user's containers have no limit of {', '.join(lacks)} here (see podman info)"


def firsts(config: RunConfig, *sets: Sequence[Task]) -> Iterator[Task]:
    """The first task of each set that runs in a pod, where there is one."""
    for tasks in sets:
        yield from [task for task in tasks if in_pod(config, task)][:1]


def _check_grader(config: RunConfig) -> None:
    """Raises ConfigError if the grader cannot work in pods and shall."""
    grader, by_command = config.task.grader, config.task.grader_command is not None
    if config.kubernetes.grade == "job" and (
        by_command or (grader and not grading.has_room(grader))
    ):
        named = f"grader={grader}" if grader else "grader_command"
        raise ConfigError(
            f"task.{named} cannot grade in a pod: its module has no `plan` and `judge`, nor "
            "`rooms`; write them (docs/kubernetes.md), or set kubernetes.grade=cluster"
        )


class Probe(Api):
    """Questions to the API server that change nothing."""

    def check_rights(self) -> None:
        """Raises ConfigError if we may not do all of `RIGHTS`."""
        lacks = [
            f"{verb} {resource}"
            for group, resource, verbs in RIGHTS
            for verb in verbs
            if not self._may(group, resource, verb)
        ]
        if lacks:
            raise ConfigError(
                f"kubernetes: this run may not {', '.join(lacks)} in the namespace "
                f"{self.namespace}: its service account, or the user of the kubeconfig, needs the "
                "Role in examples/kubernetes/access.yaml there"
            )

    def _may(self, group: str, resource: str, verb: str) -> bool:
        resource, _, below = resource.partition("/")
        asked = {"namespace": self.namespace, "group": group, "resource": resource, "verb": verb}
        review = {"spec": {"resourceAttributes": {**asked, "subresource": below}}}
        reviews: Any = kubernetes.client.AuthorizationV1Api(self._client)
        try:
            answer = reviews.create_self_subject_access_review(
                review, _preload_content=False, _request_timeout=_ASK_S
            )
            status, content = answer.status, answer.data
        except ApiException as error:  # older clients look at the status themselves
            status, content = error.status, b""
        if status == 401:
            raise ConfigError(
                "kubernetes: the API server does not know who asks (HTTP 401): the token of the "
                "service account, or the user of the kubeconfig, is missing or has expired"
            )
        # A server that does not answer this question refuses later what it must.
        return status != 201 or bool(json.loads(content)["status"].get("allowed"))
