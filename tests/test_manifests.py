"""cluster.yaml and examples/kuberay/: valid for Kubernetes, KubeRay and Ray, and true to the code.

Core objects and all pod templates are checked against Kubernetes' own schemas, the RayCluster by
the code with which Ray's autoscaler reads it, and RayCluster and RayJob against KubeRay's CRDs
(`kuberay.py`).
"""

from __future__ import annotations

import copy
import functools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import kuberay
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from ray.autoscaler._private.constants import AUTOSCALER_METRIC_PORT
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.kuberay.utils import parse_quantity
from ray.autoscaler.v2.instance_manager.cloud_providers.kuberay.cloud_provider import (
    KubeRayProvider,
)
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import ResourceRequestByCount
from ray.dashboard.consts import DASHBOARD_METRIC_PORT

from lightning_ray import config as configs
from lightning_ray.config import GatewaySection, RunConfig
from lightning_ray.gateway import deploy
from lightning_ray.placement import Device, plan
from lightning_ray.records import Task
from lightning_ray.rollouts import sandbox
from lightning_ray.rollouts.pods import manifest
from lightning_ray.rollouts.pods.manifest import Frame, Room
from lightning_ray.rollouts.pods.template import JobTemplate, Names
from lightning_ray.run import command, evaluation
from lightning_ray.tasks import models

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "kuberay"
DOCS = (ROOT / "docs" / "cluster.md").read_text()
# The oldest Kubernetes that still gets patches, and the newest that there is a schema for.
KUBERNETES = ("1.34", "1.37")
Object = dict[str, Any]


@functools.cache
def _read(path: Path) -> tuple[Object, ...]:
    return tuple(yaml.safe_load_all(path.read_text()))


def objects() -> list[Object]:
    files = [ROOT / "cluster.yaml", *sorted(FOLDER.glob("*.yaml"))]
    return [copy.deepcopy(each) for file in files for each in _read(file)]


def find(kind: str, name: str | None = None) -> Object:
    (found,) = [
        each
        for each in objects()
        if each["kind"] == kind and name in (None, each["metadata"]["name"])
    ]
    return found


def groups() -> dict[str, Object]:
    spec = find("RayCluster")["spec"]
    workers = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    return {"headgroup": spec["headGroupSpec"], **workers}


def ray_container(group: Object) -> Object:
    return group["template"]["spec"]["containers"][0]


def templates() -> dict[str, Object]:
    """Every pod template, by what makes pods of it."""
    return {
        **{name: group["template"] for name, group in groups().items()},
        "submitter": find("RayJob")["spec"]["submitterPodTemplate"],
        "redis": find("StatefulSet")["spec"]["template"],
    }


def job() -> RunConfig:
    """The configuration of the run that job.yaml starts."""
    python, _, *arguments = shlex.split(find("RayJob")["spec"]["entrypoint"])
    assert python == "python"
    arguments = [text.replace("/opt/lightning_ray", str(ROOT)) for text in arguments]
    config, dry_run = command.parse(arguments, ROOT / "no-default.yaml")
    assert not dry_run
    return config


def pinned_ray() -> str:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (ray,) = [r for r in map(Requirement, dependencies) if r.name == "ray"]
    return str(ray.specifier).removeprefix("==")


# -- schemas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", KUBERNETES)
def test_core_objects_and_pod_templates_are_valid(version: str) -> None:
    custom = ("ray.io/", "monitoring.coreos.com/")
    core = [each for each in objects() if not each["apiVersion"].startswith(custom)]
    assert {each["kind"] for each in core} >= {"NetworkPolicy", "Role", "PersistentVolumeClaim"}
    for template in templates().values():
        core.append({"apiVersion": "v1", "kind": "PodTemplate", "template": template})
    for each in core:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("template", [None, "job.yaml", "swe.yaml"])
@pytest.mark.parametrize("role", [manifest.AGENT, manifest.GRADER])
def test_a_rollouts_job_and_what_it_needs_are_valid(
    version: str, template: str | None, role: str
) -> None:
    folder = ROOT / "examples" / "kubernetes"
    for each in _read(folder / "access.yaml"):
        kubernetes_validate.validate(each, version, strict=True)
    made = JobTemplate(folder / template if template else None, "image:1")
    rendered = made.render(
        Task("t", "mend it", {"image_name": "i"}), Names("a", "r", "g", "train", "http://g:1")
    )
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "c", "uid": "u"}
    frame = Frame("run", owner, 0.5, 1024, 4096, 60.0, 600)
    job = manifest.build(rendered, Room("a", "http://g:1", "key", role, 60.0), frame)
    kubernetes_validate.validate(job, version, strict=True)
    secret = manifest.secret(job, "uid", {"key": "k"})
    kubernetes_validate.validate(secret, version, strict=True)


def test_a_misspelt_field_of_a_pod_is_noticed() -> None:
    template = groups()["rollout"]["template"]
    template["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "PodTemplate", "template": template}, "1.37", strict=True
        )


@pytest.mark.parametrize("version", KUBERNETES)
def test_what_bubblewrap_needs_of_a_pod_is_valid_and_is_what_a_run_says(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "rollouts.md").read_text()
    [text] = re.findall(r"```yaml\n(spec:\n.*?)```", page, re.S)
    ours, template = yaml.safe_load(text)["spec"], groups()["rollout"]["template"]
    [context] = [container["securityContext"] for container in ours["containers"]]
    template["spec"]["hostUsers"] = ours["hostUsers"]
    ray_container({"template": template})["securityContext"] |= context
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "PodTemplate", "template": template}, version, strict=True
    )
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    for field in ("hostUsers: false", "procMount: Unmasked", "seccompProfile: {type: Unconfined}"):
        assert field in text
        assert field in sandbox.hint()


def _strict(schema: Any) -> Any:
    """As the API server's strict validation: no field that the schema does not name."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        made.setdefault("additionalProperties", False)
    return made


@pytest.mark.parametrize("kind", kuberay.KINDS)
def test_custom_objects_are_valid_for_kuberay(kind: str) -> None:
    found = _strict(kuberay.schema(kuberay.definitions()[kind]))
    schema = jsonschema.Draft202012Validator(found)
    schema.validate(find(kind))
    misspelt = find(kind)
    misspelt["spec"]["clusterSelectr"] = {}
    assert not schema.is_valid(misspelt)
    wrong = find(kind)
    cluster = find("RayCluster")["spec"]
    cluster["workerGroupSpecs"][0]["maxReplicas"] = "many"
    wrong["spec"] |= cluster if kind == "RayCluster" else {"rayClusterSpec": cluster}
    assert not schema.is_valid(wrong)
    cluster["workerGroupSpecs"][0]["maxReplicas"] = 3
    wrong["spec"] |= cluster if kind == "RayCluster" else {"rayClusterSpec": cluster}
    schema.validate(wrong)


@pytest.mark.skipif(
    not kuberay.ORIGINAL.exists(), reason="KubeRay's own file is not there: kuberay.py says how"
)
def test_what_is_kept_of_kuberays_definitions_is_what_they_say() -> None:
    assert kuberay.reduced(kuberay.ORIGINAL.read_text()) == json.loads(kuberay.FILE.read_text())


# -- Ray's autoscaler -----------------------------------------------------------------------------


def autoscaling() -> AutoscalingConfig:
    """cluster.yaml as Ray's autoscaler reads it; raises for what it cannot use."""
    config = _derive_autoscaling_config_from_ray_cr(find("RayCluster"))
    return AutoscalingConfig(config, skip_content_hash=True)


def launches(demand: list[dict[str, float]]) -> tuple[dict[str, int], int]:
    """The pods that Ray's autoscaler starts for `demand` on the empty cluster, and how many of the
    demands have no place even then."""
    config = autoscaling()
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=config.get_node_type_configs(),
        max_num_nodes=config.get_max_num_nodes(),
        resource_requests=[
            ResourceRequestByCount(request=ResourceRequestUtil.make(each), count=1)
            for each in demand
        ],
    )
    reply = ResourceDemandScheduler().schedule(request)
    pods = {launch.instance_type: launch.count for launch in reply.to_launch}
    return pods, len(reply.infeasible_resource_requests)


def packed(config: RunConfig) -> dict[str, float]:
    """The bundles of a run as Ray asks for them: STRICT_PACK is one request to one node."""
    bundles = plan(config, Device.GPU)
    return {name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}


def test_without_rollouts_there_is_no_rollout_pod_and_the_gpu_pod_stays() -> None:
    assert launches([]) == ({"gpu": 1}, 0)
    assert groups()["gpu"]["minReplicas"] > 0  # placement.detect must see a GPU


def test_the_runs_bundles_fit_the_gpu_pod_and_leave_no_room_for_a_harness() -> None:
    bundles, config = packed(job()), job()
    assert launches([bundles]) == ({"gpu": 1}, 0)
    resources = autoscaling().get_node_type_configs()["gpu"].resources
    assert resources["CPU"] - bundles["CPU"] < config.rollout.cpus
    assert resources["GPU"] == bundles["GPU"]


def test_queued_rollouts_bring_just_the_rollout_pods_that_they_need() -> None:
    config = job()
    harness = {"CPU": config.rollout.cpus}
    demand = [packed(config), *[harness] * config.rollout.concurrency]
    assert launches(demand) == ({"gpu": 1, "rollout": 4}, 0)  # 64 x 0.25 CPU, 4 CPUs a pod
    # 64 pods of 16 harnesses are full; the rest waits.
    assert launches([packed(config), *[harness] * 1030]) == ({"gpu": 1, "rollout": 64}, 6)


def test_a_rollout_pod_has_the_memory_that_its_harnesses_may_use() -> None:
    rollout, config = autoscaling().get_node_type_configs()["rollout"], job().rollout
    harnesses = rollout.resources["CPU"] / config.cpus
    assert rollout.resources["memory"] >= harnesses * config.memory_mib * 2**20 + 2 * 2**30


class _Api:
    """The part of Kubernetes' API that Ray's autoscaler uses; notes what it asked for."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, str]] = set()
        self.patches: list[Object] = []

    def get(self, path: str) -> Object:
        resource = re.split(r"[/?]", path)[0]
        self.asked.add(("list" if "?" in path else "get", resource))
        if resource == "rayclusters":
            return find("RayCluster")
        return {"metadata": {"resourceVersion": "1"}, "items": []}

    def patch(self, path: str, payload: list[Object]) -> Object:
        self.asked.add(("patch", path.split("/")[0]))
        assert path.split("/")[1] == find("RayCluster")["metadata"]["name"]
        self.patches += payload
        return {}


def test_the_role_allows_just_what_the_autoscaler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_HEAD_POD_NAME", "head")
    api, cluster = _Api(), find("RayCluster")["metadata"]
    gcs = SimpleNamespace()
    provider = KubeRayProvider(cluster["name"], {"namespace": cluster["namespace"]}, gcs, api)
    assert provider.get_non_terminated() == {}
    provider.launch({"rollout": 3}, "first")
    assert not provider.poll_errors()
    assert {"op": "replace", "path": "/spec/workerGroupSpecs/1/replicas", "value": 3} in api.patches
    allowed = {
        (verb, resource)
        for rule in find("Role")["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert api.asked <= allowed
    assert allowed - api.asked <= {("get", "pods")}  # of its own pod, where it lists many


def test_kuberay_finds_role_and_account_by_their_names() -> None:
    name = find("RayCluster")["metadata"]["name"]
    account = groups()["headgroup"]["template"]["spec"]["serviceAccountName"]
    (role,) = [r for r in find("Role")["rules"] if r["resources"] == ["rayclusters"]]
    assert role["resourceNames"] == [name]
    binding = find("RoleBinding")
    assert binding["metadata"]["name"] == find("Role")["metadata"]["name"] == name
    assert binding["roleRef"]["name"] == name
    assert [s["name"] for s in binding["subjects"]] == [account]
    assert find("ServiceAccount")["metadata"]["name"] == account


# -- true to the code -----------------------------------------------------------------------------


def test_versions_are_those_of_the_project() -> None:
    assert find("RayCluster")["spec"]["rayVersion"] == pinned_ray()
    texts = [*FOLDER.iterdir(), ROOT / "cluster.yaml", ROOT / "docs" / "cluster.md"]
    for text in map(Path.read_text, texts):
        for version in re.findall(r"\b[Rr]ay(?:==|:| )(\d+\.\d+(?:\.\d+)?)", text):
            assert pinned_ray().startswith(version)
    assert f"--version {kuberay.VERSION}" in DOCS
    python = re.search(r"^FROM python:([\d.]+)-", (FOLDER / "Dockerfile").read_text(), re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(project["requires-python"]).contains(python[1])


def test_every_node_has_the_environment_that_serve_needs() -> None:
    wanted = deploy.environment(GatewaySection())
    # Ports are free ones of the machine; a pod has a network of its own, where the defaults do.
    # HAProxy and what starts it are where the job's Python has them.
    own = ("_PORT", "_BINARY_PATH", "_HAPROXY")
    fixed = {name: value for name, value in wanted.items() if not name.endswith(own)}
    assert "RAY_SERVE_ENABLE_HA_PROXY" in fixed
    for group in groups().values():
        variables = {each["name"]: each["value"] for each in ray_container(group)["env"]}
        assert fixed.items() <= variables.items()


def test_the_job_is_a_run_whose_gateway_other_pods_reach() -> None:
    config = job()
    assert config.model_copy(update={"run": None, "gateway": None}) == command.parse(
        [str(ROOT / "examples" / "swe" / "gpu.yaml")], ROOT
    )[0].model_copy(update={"run": None, "gateway": None})
    assert config.gateway.host == "0.0.0.0"
    ports = {p["name"]: p["containerPort"] for p in ray_container(groups()["headgroup"])["ports"]}
    assert ports["gateway"] == config.gateway.port
    assert find("RayJob")["spec"]["clusterSelector"] == {
        "ray.io/cluster": find("RayCluster")["metadata"]["name"]
    }


def test_nodes_listen_on_the_ports_that_they_declare() -> None:
    head = groups()["headgroup"]
    ports = {p["name"]: str(p["containerPort"]) for p in ray_container(head)["ports"]}
    parameters = head["rayStartParams"]
    assert ports["gcs-server"] == parameters["port"]
    assert ports["dashboard"] == parameters["dashboard-port"]
    assert ports["client"] == parameters["ray-client-server-port"]
    assert ports["as-metrics"] == str(AUTOSCALER_METRIC_PORT)
    assert ports["dash-metrics"] == str(DASHBOARD_METRIC_PORT)
    for group in groups().values():
        container, parameters = ray_container(group), group["rayStartParams"]
        (metrics,) = [p for p in container["ports"] if p["name"] == "metrics"]
        assert str(metrics["containerPort"]) == parameters["metrics-export-port"]
        for probe in ("readinessProbe", "livenessProbe"):
            at = container[probe]["httpGet"]
            assert str(at["port"]) == parameters["dashboard-agent-listen-port"]
            assert at["path"] == "/api/healthz"


def test_prometheus_finds_every_ray_node() -> None:
    monitor = find("PodMonitor")["spec"]
    scraped = {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]}
    for name, group in groups().items():
        assert monitor["selector"]["matchLabels"].items() <= labels(name).items()
        assert scraped & {port["name"] for port in ray_container(group)["ports"]}
    assert scraped <= {p["name"] for p in ray_container(groups()["headgroup"])["ports"]}


# -- storage --------------------------------------------------------------------------------------


def mounts(group: Object) -> dict[str, Object]:
    """The mounts of the Ray container, by path; each must name a volume of the pod."""
    volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
    found = {each["mountPath"]: each for each in ray_container(group)["volumeMounts"]}
    assert {each["name"] for each in found.values()} <= volumes.keys()
    claim = find("PersistentVolumeClaim")["metadata"]["name"]
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim
    return found


def test_the_run_directory_is_on_the_claim_at_the_same_path_everywhere() -> None:
    run_dir = str(job().run_dir)
    for name in ("headgroup", "gpu"):
        assert mounts(groups()[name])["/runs"]["name"] == "runs"
    assert run_dir.startswith("/runs/")
    # A harness's pod has the rollouts' folders of this run and of its evaluations, at their paths,
    # and no more of the claim.
    theirs = [m for m in mounts(groups()["rollout"]).values() if m["name"] == "runs"]
    folders = [f"{run_dir}/rollouts", f"{run_dir}/{evaluation.FOLDER}/rollouts"]
    assert [m["mountPath"] for m in theirs] == folders
    assert [m["subPath"] for m in theirs] == [f.removeprefix("/runs/") for f in folders]
    (made,) = groups()["headgroup"]["template"]["spec"]["initContainers"]
    assert made["command"] == ["mkdir", "-p", *folders]
    assert find("PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("page", ["cluster", "kubernetes", "swe"])
def test_a_run_that_a_page_tells_to_start_on_a_cluster_can_write_and_has_its_model(
    page: str,
) -> None:
    """Its directory is on the claim; a built-in model would be made where nobody can write."""
    text = (ROOT / "docs" / f"{page}.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"ray job submit .*-- python jobs/train_swe.py (examples/.*)", text)
    assert commands
    for each in commands:
        assert re.search(r" run\.dir=/runs/[\w-]+ ", each), each
        recipe, *overrides = each.split()
        asked = configs.load(ROOT / recipe, [o for o in overrides if o.startswith("model.path=")])
        assert asked.model.path not in models.BUILT_IN, each


def test_what_ray_and_harnesses_write_is_on_a_volume() -> None:
    for group in groups().values():
        container = ray_container(group)
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {"/tmp", "/home/ray"} <= mounts(group).keys()
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert variables["HF_HOME"].startswith("/runs/")
        for name, value in variables.items():
            if value.startswith("/") and name != "HF_HOME":
                assert value.startswith("/tmp/"), name


# -- isolation ------------------------------------------------------------------------------------


def test_every_pod_meets_the_restricted_standard() -> None:
    assert (
        find("Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "restricted"
    )
    for name, template in templates().items():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for volume in pod.get("volumes", []):
            assert volume.keys() & {"emptyDir", "persistentVolumeClaim"}, name
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
    autoscaler = find("RayCluster")["spec"]["autoscalerOptions"]["securityContext"]
    assert autoscaler["allowPrivilegeEscalation"] is False
    assert autoscaler["capabilities"] == {"drop": ["ALL"]}


def test_only_the_head_has_a_service_account_token() -> None:
    for name, template in templates().items():
        if name != "headgroup":
            assert template["spec"]["automountServiceAccountToken"] is False, name


def labels(group: str) -> dict[str, str]:
    """The labels that KubeRay gives the pods of a group and lets nobody override."""
    return {
        "ray.io/cluster": find("RayCluster")["metadata"]["name"],
        "ray.io/node-type": "head" if group == "headgroup" else "worker",
        "ray.io/group": group,
    }


def allows(rules: list[Object], peer: str, group: str, port: int) -> bool:
    """Whether a policy's ingress ("from") or egress ("to") rules let TCP pass to a Ray pod."""
    for rule in rules:
        ours = [p for p in rule[peer] if "namespaceSelector" not in p]
        selected = any(
            p["podSelector"]["matchLabels"].items() <= labels(group).items() for p in ours
        )
        for each in rule["ports"]:
            last = each.get("endPort", each["port"])
            if selected and each["protocol"] == "TCP" and each["port"] <= port <= last:
                return True
    return False


def node_ports(group: Object) -> Iterator[int]:
    """The ports of a Ray node that other nodes talk to."""
    parameters = group["rayStartParams"]
    for name in ("node-manager-port", "object-manager-port", "dashboard-agent-grpc-port"):
        yield int(parameters[name])
    yield from (int(parameters["min-worker-port"]), int(parameters["max-worker-port"]))


def test_rollout_pods_reach_the_gateway_and_ray_and_no_more() -> None:
    policy = find("NetworkPolicy", "rollout")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["podSelector"]["matchLabels"].items() <= labels("rollout").items()
    for name in ("headgroup", "gpu"):
        assert not policy["podSelector"]["matchLabels"].items() <= labels(name).items()
    egress, head = policy["egress"], groups()["headgroup"]["rayStartParams"]
    assert allows(egress, "to", "headgroup", job().gateway.port)
    assert allows(egress, "to", "headgroup", int(head["port"]))
    for denied in ("dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port"):
        assert not allows(egress, "to", "headgroup", int(head[denied])), denied
    for rule in egress:
        assert rule["ports"], "a rule without ports allows all of them"
        assert all("ipBlock" not in peer for peer in rule["to"])
    (dns,) = [rule for rule in egress if "namespaceSelector" in rule["to"][0]]
    assert {each["port"] for each in dns["ports"]} == {53}


def test_rays_own_traffic_passes_the_policy_both_ways() -> None:
    policy = find("NetworkPolicy", "rollout")["spec"]
    for name, group in groups().items():
        for port in node_ports(group):
            assert allows(policy["egress"], "to", name, port), (name, port)
    for port in node_ports(groups()["rollout"]):
        for name in groups():
            assert allows(policy["ingress"], "from", name, port), (name, port)


def test_the_redis_of_the_cluster_is_for_its_head_only() -> None:
    cluster = find("RayCluster")["spec"]["gcsFaultToleranceOptions"]
    service, stateful = find("Service"), find("StatefulSet")["spec"]
    assert (
        cluster["redisAddress"]
        == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    )
    assert service["spec"]["selector"] == stateful["template"]["metadata"]["labels"]
    policy = find("NetworkPolicy", "redis")["spec"]
    assert policy["podSelector"]["matchLabels"] == service["spec"]["selector"]
    assert allows(policy["ingress"], "from", "headgroup", 6379)
    assert not allows(policy["ingress"], "from", "rollout", 6379)
    assert not allows(policy["ingress"], "from", "gpu", 6379)


# -- the image and the way there ------------------------------------------------------------------


def test_all_ray_pods_run_the_image_that_the_documentation_builds() -> None:
    images = {
        container["image"]
        for name, template in templates().items()
        if name != "redis"
        for container in [
            *template["spec"]["containers"],
            *template["spec"].get("initContainers", []),
        ]
    }
    (image,) = images
    assert f"docker build -f examples/kuberay/Dockerfile -t {image} ." in DOCS


def test_the_page_waits_for_a_pod_before_it_reads_its_log() -> None:
    name = find("RayJob")["metadata"]["name"]
    [commands] = [part for part in DOCS.split("```") if "kubectl apply -f cluster.yaml" in part]
    order = [
        "apply -f examples/kuberay/job.yaml",
        f"wait rayjob/{name} --for=jsonpath='{{.status.jobDeploymentStatus}}'=Running",
        f"wait job/{name} --for",
        f"logs -f -l job-name={name}",
    ]
    assert [commands.index(text) for text in order] == sorted(map(commands.index, order))


def test_the_tasks_that_prepare_rollouts_in_pods_fit_one_rollout_pod_that_stays() -> None:
    config = job()
    # Nothing else has a CPU for them: the head has none, and the bundles take the GPU pod's.
    prepare = {"CPU": config.rollout.cpus}
    assert launches([packed(config), prepare]) == ({"gpu": 1, "rollout": 1}, 0)


def test_the_image_holds_what_the_manifests_name() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    user = re.search(r"^USER (\d+):(\d+)$", text, re.M)
    for name, template in templates().items():
        security = template["spec"]["securityContext"]
        if name != "redis":
            assert [str(security["runAsUser"]), str(security["runAsGroup"])] == list(user.groups())
    extra = re.search(r"pip install [^\n]*\"\.\[(\w+)\]\"", text)[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]
    ignore = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert all((ROOT / path).exists() for path in kept)
    assert {project["readme"], *project["license-files"], "pyproject.toml"} <= kept
    workdir = re.search(r"^WORKDIR (.+)$", text, re.M)[1]
    for argument in shlex.split(find("RayJob")["spec"]["entrypoint"]):
        if argument.startswith(workdir):
            path = argument.removeprefix(f"{workdir}/")
            assert (ROOT / path).is_file()
            assert path.split("/")[0] in kept
    # The harness's environment must not lie under a volume that hides it.
    cache = re.search(r"LIGHTNING_RAY_CACHE=(\S+)", text)[1]
    for group in groups().values():
        assert not any(cache.startswith(path) for path in mounts(group))


def test_the_documentation_applies_every_file_and_makes_every_secret() -> None:
    for file in ["cluster.yaml", *(f"examples/kuberay/{f.name}" for f in FOLDER.glob("*.yaml"))]:
        assert f"-f {file}" in DOCS, file
    namespaces = {each["metadata"].get("namespace") for each in objects()}
    assert namespaces == {None, find("Namespace")["metadata"]["name"]}
    cluster = find("RayCluster")["spec"]["gcsFaultToleranceOptions"]
    secret = cluster["redisPassword"]["valueFrom"]["secretKeyRef"]
    (theirs,) = templates()["redis"]["spec"]["containers"][0]["env"]
    assert theirs["valueFrom"]["secretKeyRef"] == secret
    assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in DOCS
    ((source,),) = [
        ray_container(g)["envFrom"] for g in groups().values() if "envFrom" in ray_container(g)
    ]
    name = source["secretRef"]["name"]
    assert f"create secret generic {name} --from-literal={deploy.OPERATOR_KEY}=" in DOCS


def test_quantities_are_requested_within_their_limits() -> None:
    for name, template in templates().items():
        for container in template["spec"]["containers"]:
            requests = container["resources"]["requests"]
            limits = container["resources"]["limits"]
            assert {"cpu", "memory"} <= requests.keys() and "memory" in limits, name
            for resource, amount in requests.items():
                if resource in limits:
                    assert parse_quantity(amount) <= parse_quantity(limits[resource]), name
