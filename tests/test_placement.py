"""Bundles and their two tenants, on a real Ray with logical GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from lightning_ray.config import RunConfig
from lightning_ray.placement import Bundles, Device, PlacementError, describe, detect, plan, reserve


def config(**sections: dict) -> RunConfig:
    return RunConfig(**sections)


def test_without_gpus_one_rank_and_one_engine_leave_two_cores_to_the_harnesses() -> None:
    (bundle,) = plan(config(), Device.CPU)
    assert (2 - bundle["CPU"]) // config().rollout.cpus >= 7


@pytest.mark.parametrize(
    ("ranks", "count", "tensor_parallel", "bundles"), [(1, 3, 1, 3), (4, 1, 1, 4), (2, 2, 2, 4)]
)
def test_there_are_as_many_bundles_as_the_larger_tenant_needs(
    ranks: int, count: int, tensor_parallel: int, bundles: int
) -> None:
    wanted = config(
        trainer={"ranks": ranks}, engine={"count": count, "tensor_parallel": tensor_parallel}
    )
    assert plan(wanted, Device.GPU) == [{"GPU": 1.0, "CPU": 1.0}] * bundles


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"trainer": {"ranks": 3}}, "run.nodes=2 does not divide the 3 bundles"),
        ({"engine": {"count": 2}}, "run.nodes=2 needs a trainer rank in each of the 2 bundles"),
        (
            {"trainer": {"ranks": 4}, "engine": {"tensor_parallel": 4}},
            "tensor_parallel=4 needs one node",
        ),
    ],
)
def test_bundles_that_nodes_cannot_share_evenly_are_refused(sections: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(run={"nodes": 2}, **sections)


def test_tensor_parallel_without_gpus_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"engine.tensor_parallel=2 needs GPUs"):
        plan(config(engine={"tensor_parallel": 2}), Device.CPU)


def test_the_dry_run_says_what_will_be_asked_for() -> None:
    text = describe(config(engine={"count": 2}), Device.GPU)
    assert "2 x (1 GPU, 1 CPU)" in text
    assert "16 x 0.25 CPU" in text


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=6,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir="/tmp/ray_placement_test",
        object_store_memory=100 << 20,
    )
    yield
    ray.shutdown()


@pytest.fixture(params=[1, 2])
def bundles(cluster: None, request: pytest.FixtureRequest) -> Iterator[Bundles]:
    """Two bundles, in one placement group or in two, here of one node (test_nodes.py has two)."""
    each = 2 // request.param
    parts = [
        reserve(config(trainer={"ranks": each}, engine={"count": each}))
        for _ in range(request.param)
    ]
    reserved = replace(parts[0], groups=tuple(part.groups[0] for part in parts))
    yield reserved
    reserved.remove()


@ray.remote
class Tenant:
    def gpus(self) -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    def visible(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


def rank(bundles: Bundles, bundle: int) -> ray.actor.ActorHandle:
    """An actor with what verl gives a rank."""
    share = 1 / bundles.trainer_pool(2).max_colocate_count
    return Tenant.options(
        num_cpus=bundles.trainer_cpus,
        num_gpus=share,
        scheduling_strategy=bundles.strategy(bundle),
    ).remote()


def test_a_rank_and_an_engine_of_a_bundle_see_the_same_gpu(bundles: Bundles) -> None:
    assert detect() is Device.GPU
    tenants = [
        [rank(bundles, i), Tenant.options(**bundles.engine_options(i)).remote()] for i in (0, 1)
    ]
    (a, b), (c, d) = [ray.get([t.gpus.remote() for t in pair], timeout=60) for pair in tenants]
    assert a == b
    assert c == d
    assert {*a, *c} == {"0", "1"}


def test_verl_finds_the_bundle_of_each_rank(bundles: Bundles) -> None:
    pool = bundles.trainer_pool(2)
    groups = pool.get_placement_groups()
    # As verl's RayWorkerGroup counts.
    places = [divmod(rank, pool.store[0]) for rank in range(pool.world_size)]
    for bundle, (group, index) in enumerate(places):
        ours = bundles.strategy(bundle)
        assert ours.placement_group == groups[group]
        assert ours.placement_group_bundle_index == index


def test_nodes_that_do_not_see_the_runs_files_are_named(cluster: None, tmp_path: Path) -> None:
    reserved = reserve(config())
    try:
        two = replace(reserved, groups=reserved.groups * 2)
        two.check_shared(tmp_path, tmp_path)
        with pytest.raises(PlacementError, match=r"node \S+ does not see \S+/model.*same path"):
            two.check_shared(tmp_path, tmp_path / "model")
    finally:
        reserved.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_second_group_is_not_put_beside_the_first(cluster: None) -> None:
    with pytest.raises(PlacementError, match="asked each of 2 nodes for 1 bundles"):
        reserve(config(run={"nodes": 2}, trainer={"ranks": 2}), wait_s=3)
    reserve(config(trainer={"ranks": 2}), wait_s=30).remove()  # nothing stayed reserved


@pytest.mark.parametrize("third", ["engine", "rank"])
def test_a_third_tenant_does_not_fit(bundles: Bundles, third: str) -> None:
    def engine() -> ray.actor.ActorHandle:
        return Tenant.options(**bundles.engine_options(0)).remote()

    in_time = [rank(bundles, 0), engine()]
    ray.get([tenant.gpus.remote() for tenant in in_time], timeout=60)
    late = engine() if third == "engine" else rank(bundles, 0)
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(late.gpus.remote(), timeout=3)


def test_a_tensor_parallel_engine_holds_no_gpu_and_is_told_its_bundles_gpus(cluster: None) -> None:
    reserved = reserve(config(engine={"tensor_parallel": 2}))
    ranks = [rank(reserved, 0), rank(reserved, 1)]
    engine = Tenant.options(**reserved.engine_options(0)).remote()
    theirs = [gpu for r in ranks for gpu in ray.get(r.gpus.remote(), timeout=60)]
    assert ray.get(engine.visible.remote(), timeout=60) == ",".join(theirs)
    assert ray.get(engine.gpus.remote()) == []
    reserved.remove()


def test_bundles_that_do_not_come_are_an_error_that_says_what_to_change(cluster: None) -> None:
    with pytest.raises(PlacementError, match=r"3 bundles .* has .*'GPU': 2.*Lower trainer.ranks"):
        reserve(config(trainer={"ranks": 3}), wait_s=1)
    reserve(config(trainer={"ranks": 2}), wait_s=30).remove()  # nothing stayed reserved
