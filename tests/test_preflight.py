"""What is said before a run with pods starts, and that its examples fit where they are applied."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from pod_security import containers, violations

from lightning_ray.config import ConfigError, RunConfig, load
from lightning_ray.records import Task
from lightning_ray.rollouts.pods import manifest, preflight
from lightning_ray.rollouts.pods.manifest import Frame, Room
from lightning_ray.rollouts.pods.template import JobTemplate, Names, TemplateFault

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "kubernetes"
TASK = Task("t1", "mend it", {"image_name": "repo:1"})
Object = dict[str, Any]


def applied(*files: Path) -> list[Object]:
    return [tree for file in files for tree in yaml.safe_load_all(file.read_text()) if tree]


def of_kind(kind: str, objects: list[Object]) -> Object:
    [found] = [each for each in objects if each["kind"] == kind]
    return found


# -- examples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["job", "swe"])
def test_pod_security_lets_the_pods_of_each_example_into_its_namespace(name: str) -> None:
    access = applied(EXAMPLES / "access.yaml")
    namespaces = {
        each["metadata"]["name"]: each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for each in applied(EXAMPLES / "access.yaml", ROOT / "examples/kuberay/namespace.yaml")
        if each["kind"] == "Namespace"
    }
    level = namespaces[of_kind("Role", access)["metadata"]["namespace"]]
    assert level in ("baseline", "restricted")
    template = JobTemplate(str(EXAMPLES / f"{name}.yaml"), "harness:1")
    rendered = template.render(TASK, Names("a", "r", "g", "s", "u"))
    frame = Frame("run", None, 0.25, 2048, 4096, 40.0, None)
    job = manifest.build(rendered, Room("a", "http://gateway", "", "agent", 60.0), frame)
    pod = job["spec"]["template"]["spec"]
    assert violations(level, pod) == set()
    # Root, where an image needs it, and nothing else that `restricted` refuses.
    root = {"runAsNonRoot", "runAsUser"} if name == "swe" else set()
    assert violations("restricted", pod) == root
    # Else a node that is full ends a pod as if it had taken more than it may.
    for container in containers(pod):
        asked = container["resources"]
        assert asked["requests"]["memory"] == asked["limits"]["memory"]


def test_rollouts_are_in_a_namespace_without_secrets_of_the_cluster_and_behind_a_wall() -> None:
    access = applied(EXAMPLES / "access.yaml")
    cluster = of_kind("Namespace", applied(ROOT / "examples/kuberay/namespace.yaml"))
    ours, theirs = of_kind("Namespace", access)["metadata"]["name"], cluster["metadata"]["name"]
    assert ours != theirs
    for each in access:
        assert each["metadata"].get("namespace", ours) == ours
    [account] = of_kind("RoleBinding", access)["subjects"]
    head = of_kind("ServiceAccount", applied(ROOT / "examples/kuberay/rbac.yaml"))["metadata"]
    assert (account["name"], account["namespace"]) == (head["name"], head["namespace"])
    wall = of_kind("NetworkPolicy", access)["spec"]
    assert wall["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in wall
    gateway, dns = wall["egress"]
    [to] = gateway["to"]
    assert to["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": theirs}
    assert [port["port"] for port in gateway["ports"]] == [RunConfig().gateway.port]
    assert {port["port"] for port in dns["ports"]} == {53}
    # What the pages tell to type.
    for page in ("kubernetes.md", "swe.md"):
        text = (ROOT / "docs" / page).read_text()
        for command in text.split("```")[1::2]:
            if "rollout.launcher=kubernetes" in command:
                assert f"kubernetes.namespace={ours}" in command
                assert f"gateway.advertise=http://lightning-ray-head-svc.{theirs}:8765" in command


# -- an API server that warns ---------------------------------------------------------------------


class Server(BaseHTTPRequestHandler):
    """Answers as a server whose Pod Security warns: the one of the tests is too old to have it."""

    knows = True
    refuses: tuple[tuple[str, str], ...] = ()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path.endswith("/selfsubjectaccessreviews"):
            asked = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
            allowed = (asked["verb"], resource) not in self.refuses
            self.send_response(201 if self.knows else 401)
            body["status"] = {"allowed": allowed}
        else:
            assert "dryRun=All" in self.path and "fieldValidation=Strict" in self.path
            self.send_response(201)
            said = 'would violate PodSecurity \\"restricted:latest\\": x'
            self.send_header("Warning", f'299 - "{said}"')
            self.send_header("Warning", '299 - "something is deprecated", 299 - "and more"')
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    path = tmp_path / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    yield path
    server.shutdown()
    server.server_close()


def settings(kubeconfig: Path, *more: str) -> RunConfig:
    ours = (f"kubernetes.kubeconfig={kubeconfig}", "kubernetes.image=agent:1")
    return load(None, ["rollout.launcher=kubernetes", *ours, *more])


def test_where_tasks_say_who_runs_them_the_first_of_each_set_in_pods_is_looked_at(
    kubeconfig: Path,
) -> None:
    local, train, validation = (
        Task(name, "", {"launcher": launcher, "image_name": "repo:1"})
        for name, launcher in (("l", "local"), ("t", "kubernetes"), ("v", "kubernetes"))
    )
    unsaid = Task("u", "", {})  # it is local
    mixed = settings(kubeconfig, "rollout.launcher=task", "kubernetes.grade=cluster")
    found = preflight.firsts(mixed, [unsaid, local, train, validation], [local], [validation])
    assert list(found) == [train, validation]
    every = settings(kubeconfig)
    assert list(preflight.firsts(every, [unsaid, train], [local])) == [unsaid, local]
    # A template that only tasks in pods can fill; of others it is not asked.
    template = f"kubernetes.template={EXAMPLES}/swe.yaml"
    wrong = settings(kubeconfig, "rollout.launcher=task", "kubernetes.grade=cluster", template)
    assert preflight.check(wrong, [unsaid, local], [local]) == []
    broken = Task("b", "", {"launcher": "kubernetes"})
    with pytest.raises(TemplateFault, match="task b"):
        preflight.check(wrong, [unsaid, train], [local, broken])


def test_what_the_api_server_warns_of_is_told_at_the_start(kubeconfig: Path) -> None:
    config = settings(kubeconfig, "kubernetes.grade=cluster")
    assert [note for note in preflight.check(config, [TASK]) if "warns" in note] == [
        'the API server warns: would violate PodSecurity "restricted:latest": x',
        "the API server warns: something is deprecated",
        "the API server warns: and more",
    ]


def test_what_the_template_gives_to_pods_is_told_in_one_line(
    kubeconfig: Path, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    text = (EXAMPLES / "job.yaml").read_text()
    path.write_text(text.replace("      containers:", "      hostNetwork: true\n      containers:"))
    config = settings(kubeconfig, "kubernetes.grade=cluster")
    assert not [note for note in preflight.check(config, [TASK]) if "more than" in note]
    config = settings(kubeconfig, "kubernetes.grade=cluster", f"kubernetes.template={path}")
    [note] = [note for note in preflight.check(config, [TASK], [TASK]) if "more than" in note]
    assert "hostNetwork (the node's network" in note


def test_the_role_of_the_example_is_what_is_asked_for(kubeconfig: Path) -> None:
    rules = {
        (group, resource, tuple(rule["verbs"]))
        for rule in of_kind("Role", applied(EXAMPLES / "access.yaml"))["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert rules == set(preflight.RIGHTS)


def test_a_right_that_is_missing_is_named_with_the_role_that_has_it(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(kubeconfig, "kubernetes.grade=cluster", "kubernetes.namespace=there")
    monkeypatch.setattr(Server, "refuses", (("watch", "pods"), ("create", "secrets")))
    said = "may not watch pods, create secrets in the namespace there: .*access.yaml"
    with pytest.raises(ConfigError, match=said):
        preflight.check(config, [TASK])
    monkeypatch.setattr(Server, "refuses", (("get", "pods/log"),))
    with pytest.raises(ConfigError, match="may not get pods/log in"):
        preflight.check(config, [TASK])
    monkeypatch.setattr(Server, "knows", False)
    with pytest.raises(ConfigError, match="does not know who asks"):
        preflight.check(config, [TASK])
