"""The whole cycle with every rollout and every grading a Job: the tiny model, the real harness, the
controller's rights just those of examples/kubernetes/access.yaml; on the way the API server and the
controller are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import runs
import yaml
from control_plane import Cluster
from kubernetes import client

from lightning_ray import metrics
from lightning_ray.config import ConfigError, load
from lightning_ray.records import Task
from lightning_ray.rollouts import harness, installation
from lightning_ray.rollouts.pods import preflight
from lightning_ray.run.checkpoint import Checkpoints

ROOT = runs.ROOT
HEAD, NAMESPACE = "lightning-ray", "lightning-ray-rollouts"  # of the account, of the Jobs
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def head(_cluster: Cluster) -> Path:
    """A kubeconfig of the head's service account, with what the examples let it do."""
    cluster = _cluster
    for name in ("kuberay/namespace", "kuberay/rbac", "kubernetes/access"):
        cluster.apply(ROOT / "examples" / f"{name}.yaml")
    cluster.until(lambda: cluster.core.read_namespaced_service_account("default", NAMESPACE))
    cluster.until(lambda: cluster.core.read_namespaced_service_account("default", HEAD))
    asked = client.AuthenticationV1TokenRequest(
        spec=client.V1TokenRequestSpec(audiences=["https://kubernetes.default.svc"])
    )
    answer = cluster.core.create_namespaced_service_account_token("lightning-ray-head", HEAD, asked)
    tree = yaml.safe_load(cluster.kubeconfig().read_text())
    tree["users"] = [{"name": "admin", "user": {"token": answer.status.token}}]
    path = cluster.folder / "head.kubeconfig"
    path.write_text(yaml.safe_dump(tree))
    return path


def may(kubeconfig: Path, verb: str, group: str, resource: str, namespace: str = NAMESPACE) -> bool:
    from kubernetes import config

    api = config.new_client_from_config(str(kubeconfig))
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": resource}
    spec = client.V1SelfSubjectAccessReviewSpec(
        resource_attributes=client.V1ResourceAttributes(**attributes)
    )
    review = client.AuthorizationV1Api(api).create_self_subject_access_review(
        client.V1SelfSubjectAccessReview(spec=spec)
    )
    return bool(review.status.allowed)


def test_a_run_without_the_rights_of_the_example_is_told_which_it_lacks(cluster, head) -> None:
    def check(kubeconfig: Path) -> list[str]:
        ours = (f"kubernetes.kubeconfig={kubeconfig}", f"kubernetes.namespace={NAMESPACE}")
        more = ("kubernetes.image=agent:1", "rollout.launcher=kubernetes")
        config = load(None, [*ours, *more, "kubernetes.grade=cluster"])
        return preflight.check(config, [Task("t", "mend it", {})])

    with pytest.raises(ConfigError, match="may not create jobs, get jobs, .* create secrets in"):
        check(cluster.kubeconfig("controller"))
    assert check(head)[0] == f"rollouts are Jobs in the namespace {NAMESPACE}"
    rbac = client.RbacAuthorizationV1Api()
    role = rbac.read_namespaced_role("lightning-ray-rollouts", NAMESPACE)
    rules = role.rules
    role.rules = [rule for rule in rules if rule.resources != ["secrets"]]
    role = rbac.replace_namespaced_role("lightning-ray-rollouts", NAMESPACE, role)
    try:
        with pytest.raises(ConfigError, match="this run may not create secrets in the namespace"):
            cluster.until(lambda: check(head) == [])  # the authorizer needs a moment
    finally:
        role.rules = rules
        rbac.replace_namespaced_role("lightning-ray-rollouts", NAMESPACE, role)
        cluster.until(lambda: may(head, "create", "", "secrets"))


def test_every_rollout_is_a_job_and_the_run_outlives_api_server_and_controller(
    cluster, head, tmp_path
):
    assert may(head, "create", "batch", "jobs")
    for verb, group, resource in [
        ("get", "", "secrets"),
        ("list", "", "secrets"),
        ("create", "", "pods"),
        ("create", "", "pods/exec"),
        ("patch", "batch", "jobs"),
    ]:
        assert not may(head, verb, group, resource), (verb, resource)
    # Where the cluster's own Secrets are, it makes nothing that could mount them.
    assert not may(head, "create", "batch", "jobs", HEAD)
    venv = installation.install(harness.load("mini-swe-agent"))
    run_dir, log = tmp_path / "run", tmp_path / "log"
    run = runs.start(
        run_dir,
        log,
        "run.steps=2",
        "rollout.launcher=kubernetes",
        f"kubernetes.kubeconfig={head}",
        f"kubernetes.namespace={NAMESPACE}",
        "kubernetes.image=python",
        f"kubernetes.harness_venv={venv}",
        "gateway.port=8799",
    )

    def pods(role: str) -> list[str]:
        selector = f"lightning-ray/role={role}"
        found = cluster.core.list_namespaced_pod(NAMESPACE, label_selector=selector).items
        return [pod.metadata.name for pod in found if pod.status.phase == "Running"]

    try:
        runs.wait_for(run, log, lambda: pods("agent"))
        cluster.kill("kube-apiserver")
        cluster.start_api()
        runs.wait_for(run, log, lambda: Checkpoints(run_dir, keep=2).latest() and pods("agent"))
        for process in psutil.Process(run.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith("ray::RolloutController"):
                    process.send_signal(signal.SIGKILL)
        assert run.wait(runs.PATIENCE) == 0, log.read_text()[-4000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGKILL)
    rows = metrics.read(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollouts/finished"] == 8, json.dumps(row)
        # Nobody who ran on was answered by another model than that of the checkpoint.
        assert row["async/groups_given_up"] == 0, json.dumps(row)
    output = log.read_text()
    assert f"rollouts are Jobs in the namespace {NAMESPACE}" in output
    assert "run on in pods since the run was stopped" in output
    # Nothing of the run is left in the cluster.
    cluster.until(lambda: not cluster.batch.list_namespaced_job(NAMESPACE).items)
    cluster.until(
        lambda: (
            not cluster.core.list_namespaced_secret(
                NAMESPACE, label_selector="lightning-ray/run"
            ).items
        )
    )
