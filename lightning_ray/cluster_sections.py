"""The section of the configuration on Kubernetes. Pure declarations; import from `config.py`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lightning_ray.sections import Section


class KubernetesSection(Section):
    namespace: str | None = Field(
        None, description="Namespace of the Jobs. Default: this pod's, or that of the context."
    )
    template: str | None = Field(
        None,
        description="Path of a Job in YAML, with {{ placeholders }} for what a task says: image, "
        "resources, node selector. Default: a pod with the image alone.",
    )
    image: str | None = Field(
        None, description="Image of the pods, and the placeholder {{ image }} of the template."
    )
    kubeconfig: str | None = Field(
        None, description="Path of a kubeconfig. Default: this pod's service account, or kubectl's."
    )
    context: str | None = Field(None, description="Context of the kubeconfig. Default: current.")
    max_pods: int = Field(
        100, ge=1, description="Most Jobs at a time, those that grade included; more are queued."
    )
    creates_per_s: float = Field(20, gt=0, description="Most Jobs that are created in a second.")
    start_timeout_s: float = Field(
        900,
        gt=0,
        description="Longest wait for a pod to be scheduled and started; then the attempt is tried "
        "again. What it waits for is shown meanwhile.",
    )
    fault_timeout_s: float = Field(
        120,
        gt=0,
        description="Longest that a pod may show a fault that can pass: an image that cannot be "
        "pulled, a node that does not answer.",
    )
    harness_venv: str = Field(
        "/opt/harness",
        description="Where the image has the harness: {venv} of its recipe, a virtual environment "
        "with the recipe's packages.",
    )
    python: str = Field(
        "python3",
        description="Our own program's interpreter in a pod, 3.8 or newer: `python3` of its PATH, "
        "or a path. Tests always run with the first `python3` of the PATH.",
    )
    grade: Literal["job", "cluster"] = Field(
        "job",
        description="Where hidden tests run: in a second Job of the same template, or on the "
        "nodes of Ray.",
    )
    keep_s: int | None = Field(
        None,
        # Kubernetes deletes them then, and what we have not seen with them: how a pod ended, a log.
        ge=60,
        description="Keep ended Jobs for so many seconds, 60 at least. Default: they are deleted.",
    )
