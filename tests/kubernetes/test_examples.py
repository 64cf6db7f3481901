"""cluster.yaml and the examples on a real API server: what a user applies is accepted and kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kuberay
import pytest
import yaml
from control_plane import Cluster
from kubernetes import client
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ConflictError, ResourceNotFoundError
from runs import ROOT

pytestmark = pytest.mark.slow
Object = dict[str, Any]


def pod_monitors() -> Object:
    """A definition that takes any PodMonitor."""
    names = {"kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor"}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": kuberay.ANYTHING},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "podmonitors.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "names": names,
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def definitions() -> list[Object]:
    theirs = [without_empty_defaults(tree) for tree in kuberay.definitions().values()]
    return [*theirs, pod_monitors()]


def without_empty_defaults(tree: Any) -> Any:
    """An API server of 1.20 takes a default of "" for null: another stands for it."""
    if isinstance(tree, list):
        return [without_empty_defaults(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: "-" if (key, value) == ("default", "") else without_empty_defaults(value)
        for key, value in tree.items()
    }


def objects() -> Iterator[Object]:
    folder = ROOT / "examples" / "kuberay"
    files = [folder / "namespace.yaml", *sorted(folder.glob("*.yaml")), ROOT / "cluster.yaml"]
    for file in [*files, ROOT / "examples" / "kubernetes" / "access.yaml"]:
        yield from filter(None, yaml.safe_load_all(file.read_text()))


def kept(sent: Any, found: Any, path: str = "") -> Iterator[str]:
    """Where what was sent is not in what was found."""
    if isinstance(sent, dict) and isinstance(found, dict):
        for key, value in sent.items():
            yield from kept(value, found.get(key), f"{path}.{key}")
    elif isinstance(sent, list) and isinstance(found, list) and len(sent) == len(found):
        for number, (one, other) in enumerate(zip(sent, found, strict=True)):
            yield from kept(one, other, f"{path}[{number}]")
    elif sent != found and sent not in ({}, [], None):
        yield f"{path}: {sent!r} became {found!r}"


def test_everything_that_a_user_applies_is_accepted(cluster: Cluster) -> None:
    api = client.ApiClient()
    crds = definitions()
    dynamic = DynamicClient(api).resources.get(
        api_version="apiextensions.k8s.io/v1", kind="CustomResourceDefinition"
    )
    for crd in crds:
        dynamic.create(body=crd)

    def resource(tree: Object) -> Any:
        try:
            found = DynamicClient(api).resources
            return found.get(api_version=tree["apiVersion"], kind=tree["kind"])
        except ResourceNotFoundError:  # it is being established
            return None

    checked, made = set[str](), list[str]()
    try:
        for tree in objects():
            where = cluster.until(lambda tree=tree: resource(tree))
            namespace = tree["metadata"].get("namespace")
            # What has pods is not kept, so that nobody starts them. Nobody here does for KubeRay's.
            dry = {"dry_run": "All"} if tree["kind"] == "StatefulSet" else {}
            try:
                answer = where.create(body=tree, namespace=namespace, **dry).to_dict()
            except ConflictError:  # another test has applied it
                continue
            checked.add(tree["kind"])
            if tree["kind"] == "Namespace":
                made.append(tree["metadata"]["name"])
            if tree["apiVersion"] == "ray.io/v1":
                assert not list(kept(tree["spec"], answer["spec"]))
    finally:
        for name in made:
            cluster.core.delete_namespace(name)
        for crd in crds:
            dynamic.delete(name=crd["metadata"]["name"])
    assert checked >= {"RayCluster", "RayJob", "PodMonitor", "StatefulSet", "PersistentVolumeClaim"}
