"""KubeRay's custom resource definitions as far as its own fields go, for machines that have no copy
of them: `kuberay-1.7.0.json` beside this file.

`python tests/kuberay.py CRDS` makes it of KubeRay's own file (Apache License 2.0), that is of what
`helm show crds kuberay-operator --version 1.7.0 --repo https://ray-project.github.io/kuberay-helm`
prints. What is left out: descriptions, versions before v1, and the fields of pod templates, which
are the core API's and are checked as such. What a RayJob says of its cluster is what RayCluster's
`spec` says, and stands there once.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

VERSION = "1.7.0"
FILE = Path(__file__).with_name(f"kuberay-{VERSION}.json")
# Where a developer may keep the file as it came: the tests compare it with ours.
ORIGINAL = (
    Path(os.environ.get("LIGHTNING_RAY_CACHE") or "~/.cache/lightning_ray").expanduser()
    / f"kuberay-crds-{VERSION}.yaml"
)
KINDS = ("RayCluster", "RayJob")
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
Object = dict[str, Any]


def reduced(original: str) -> dict[str, Object]:
    """The definitions of `KINDS`, by kind, in the form of our file."""
    documents = [tree for tree in yaml.load_all(original, yaml.CSafeLoader) if tree]
    found = {tree["spec"]["names"]["kind"]: tree for tree in documents}
    made = {}
    for kind in KINDS:
        spec = found[kind]["spec"]
        [version] = [each for each in spec["versions"] if each["name"] == "v1"]
        kept = {key: version[key] for key in ("name", "served", "storage", "subresources")}
        kept["schema"] = {"openAPIV3Schema": _bare(version["schema"]["openAPIV3Schema"])}
        named = {"name": found[kind]["metadata"]["name"]}
        made[kind] = {
            "apiVersion": found[kind]["apiVersion"],
            "kind": found[kind]["kind"],
            "metadata": named,
            "spec": {key: spec[key] for key in ("group", "names", "scope")} | {"versions": [kept]},
        }
    fields = schema(made["RayJob"])["properties"]["spec"]["properties"]
    assert fields.pop("rayClusterSpec") == schema(made["RayCluster"])["properties"]["spec"]
    return made


@functools.cache
def _kept() -> dict[str, Object]:
    made: dict[str, Object] = json.loads(FILE.read_text())
    fields = schema(made["RayJob"])["properties"]["spec"]["properties"]
    fields["rayClusterSpec"] = schema(made["RayCluster"])["properties"]["spec"]
    return made


def definitions() -> dict[str, Object]:
    """By kind, as an API server takes them."""
    return copy.deepcopy(_kept())


def schema(definition: Object) -> Object:
    """The OpenAPI schema of v1."""
    [version] = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    found: Object = version["schema"]["openAPIV3Schema"]
    return found


def _bare(tree: Any, of_fields: bool = False) -> Any:
    """Without descriptions; `of_fields`, the keys are names of fields, `description` is one too."""
    if isinstance(tree, list):
        return [_bare(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    fields = tree.get("properties", {})
    if not of_fields and "containers" in fields.get("spec", {}).get("properties", {}):
        return ANYTHING  # a pod template
    return {
        key: _bare(value, not of_fields and key == "properties")
        for key, value in tree.items()
        if of_fields or key != "description"
    }


if __name__ == "__main__":
    found = reduced(Path(sys.argv[1]).read_text())
    lines = [f'"{kind}": {json.dumps(found[kind], separators=(",", ":"))}' for kind in KINDS]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
