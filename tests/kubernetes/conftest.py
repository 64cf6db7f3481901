"""A control plane for all tests of this folder: started once, `cluster` is clean for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import control_plane
import pytest
from control_plane import Cluster


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="lr-kube-"))
    with Cluster(folder, control_plane.build()) as cluster:
        cluster.start_node()
        yield cluster
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    yield _cluster
    _cluster.batch.delete_collection_namespaced_job("default", propagation_policy="Background")
    _cluster.core.delete_collection_namespaced_pod("default", grace_period_seconds=0)
    _cluster.until(lambda: not _cluster.batch.list_namespaced_job("default").items)
