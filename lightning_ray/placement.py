"""Where engines and trainer ranks live: the same bundles, two tenants.

`plan` says which bundles a run asks of Ray: one per GPU, or one share of CPU where there is none.
`reserve` asks for them, as a placement group for each node (STRICT_PACK: all of it on one), and
waits a bounded time. `Bundles` then hands out the two tenancies: actor options for an engine, a
verl resource pool for the ranks.

Invariants: a trainer rank and an engine fit into a bundle together and see the same GPU; a third
tenant of either kind does not fit; an engine is on one node; without GPUs one rank and one engine
leave most of two CPUs to harnesses.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from lightning_ray.config import RunConfig

if TYPE_CHECKING:
    from verl.single_controller.ray.base import SubRayResourcePool

# A bundle's CPUs without a GPU. Ranks and engines take turns and use their own thread settings, so
# this is a token: small enough that a two-core `ray start --head` keeps room for seven harnesses of
# 0.25.
CPU_BUNDLE_CPUS = 0.2
# A bundle's CPUs beside its GPU: the tenants' Python threads. GPU nodes have at least eight per
# GPU.
GPU_BUNDLE_CPUS = 1.0
# The tenants' shares of a bundle. verl gives each rank 1 / (a whole number) of a GPU, so one half;
# the engine takes less than the other half, so that two engines and a rank can never share a
# bundle.
TRAINER_SHARE = 0.5
ENGINE_SHARE = 0.4
# Longest wait for the bundles, in seconds: a new node of an autoscaled cluster takes minutes.
WAIT_S = 300.0
# Longest look of a node for the run's files.
LOOK_S = 60.0
# Ray gives every node this label.
NODE_LABEL = "ray.io/node-id"


class Device(StrEnum):
    """What ranks and engines compute on."""

    CPU = "cpu"
    GPU = "gpu"


class WeightSyncWay(StrEnum):
    """How new weights get from the trainer into the engines."""

    FILE = "file"  # a safetensors file that they read
    MEMORY = "memory"  # from each trainer rank into the engine worker in its bundle


class PlacementError(RuntimeError):
    """The cluster cannot give the run its bundles; the message says what to change."""


def detect() -> Device:
    """GPU if the connected Ray cluster has any, or may get one from its autoscaler."""
    # For Ray's own libraries, but there is no other way to ask.
    may_get = ray._private.state.state.get_max_resources_from_cluster_config() or {}
    gpus = max(ray.cluster_resources().get("GPU", 0), may_get.get("GPU", 0))
    return Device.GPU if gpus >= 1 else Device.CPU


def seeing(folder: Path) -> list[str]:
    """The ids of those nodes, as they are now, that see a folder which this one has; it is the
    first."""
    here = ray.get_runtime_context().get_node_id()
    others = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != here]
    looks = {
        _unseen.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote({folder: folder}): node
        for node in others
    }
    looked, _ = ray.wait(list(looks), num_returns=len(looks), timeout=LOOK_S) if looks else ([], [])
    found = [here]
    for look in looked:
        with contextlib.suppress(ray.exceptions.RayError):  # that node is gone
            if not ray.get(look)[1]:
                found.append(looks[look])
    return found


def weight_sync_way(config: RunConfig, device: Device) -> WeightSyncWay:
    """That of a run on `device`."""
    if config.trainer.weight_sync != "auto":
        return WeightSyncWay(config.trainer.weight_sync)
    beside = config.trainer.ranks >= config.engine_workers
    return WeightSyncWay.MEMORY if device is Device.GPU and beside else WeightSyncWay.FILE


def plan(config: RunConfig, device: Device) -> list[dict[str, float]]:
    """The resources of each bundle.

    Raises:
        PlacementError: the configuration wants what the device cannot do.
    """
    engine = config.engine
    if device is Device.CPU and engine.tensor_parallel > 1:
        raise PlacementError(
            f"engine.tensor_parallel={engine.tensor_parallel} needs GPUs and the cluster has none; "
            "set it to 1"
        )
    one = {"CPU": CPU_BUNDLE_CPUS} if device is Device.CPU else {"GPU": 1.0, "CPU": GPU_BUNDLE_CPUS}
    return [dict(one) for _ in range(config.bundles)]


def describe(config: RunConfig, device: Device) -> str:
    """What a run asks of the cluster, for people (`--dry-run`)."""
    bundles, engine, rollout = plan(config, device), config.engine, config.rollout
    each = ", ".join(f"{amount:g} {name}" for name, amount in bundles[0].items())
    cpus, nodes = sum(bundle["CPU"] for bundle in bundles), config.run.nodes
    return "\n".join(
        [
            f"device    {device}",
            f"bundles   {len(bundles)} x ({each}), "
            + ("all on one node" if nodes == 1 else f"{len(bundles) // nodes} on each of {nodes}"),
            f"trainer   {config.trainer.ranks} rank(s), {TRAINER_SHARE:g} of a bundle each",
            f"engines   {engine.count} x tensor-parallel {engine.tensor_parallel}, "
            + (
                f"{ENGINE_SHARE:g} of a bundle each"
                if engine.tensor_parallel == 1
                else "whole GPUs in turns"
            ),
            f"weights   into the engines by way of: {weight_sync_way(config, device)}",
            f"harnesses up to {rollout.concurrency} x {rollout.cpus:g} CPU",
            f"total     {cpus:g} CPU and {rollout.cpus:g} for at least one harness; "
            f"{cpus + rollout.concurrency * rollout.cpus:g} CPU for all of them at a time",
        ]
    )


def reserve(config: RunConfig, device: Device | None = None, wait_s: float = WAIT_S) -> Bundles:
    """Asks Ray for the run's bundles and waits at most `wait_s` seconds for them.

    Raises:
        PlacementError: they did not come; nothing stays reserved.
    """
    device = device or detect()
    shapes = plan(config, device)
    each = len(shapes) // config.run.nodes
    deadline, groups, taken = time.monotonic() + wait_s, list[PlacementGroup](), list[str]()
    for _ in range(config.run.nodes):
        # Ray would put a second group beside the first where it fits.
        elsewhere = [{NODE_LABEL: f"!in({','.join(taken)})"}] * each if taken else None
        group = placement_group(
            shapes[:each], strategy="STRICT_PACK", bundle_label_selector=elsewhere
        )
        groups.append(group)
        if not group.wait(max(0.0, deadline - time.monotonic())):
            break
        taken.append(placement_group_table(group)["bundles_to_node_id"][0])
    else:
        return Bundles(tuple(groups), device, shapes[0], each, config.engine.tensor_parallel)
    for group in groups:
        remove_placement_group(group)
    has = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
    free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
    where = "one node" if config.run.nodes == 1 else f"each of {config.run.nodes} nodes"
    raise PlacementError(
        f"asked {where} for {each} bundles of {shapes[0]} and waited {wait_s:g} s; the "
        f"cluster has {has} in all, of which {free} is free. Lower trainer.ranks, engine.count or "
        "engine.tensor_parallel, end what else uses the cluster, or add a node that has this much"
    )


@dataclass(frozen=True)
class Bundles:
    """The reserved bundles, all alike: `each` of them in every group, and so on a node. They are
    numbered through the groups."""

    groups: tuple[PlacementGroup, ...]
    device: Device
    shape: dict[str, float]
    each: int
    tensor_parallel: int

    def strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        """Puts a task or an actor into `bundle`."""
        group, index = divmod(bundle, self.each)
        return PlacementGroupSchedulingStrategy(
            placement_group=self.groups[group], placement_group_bundle_index=index
        )

    def check_shared(self, run_dir: Path, model_dir: Path) -> None:
        """Looks from every node for what the run keeps in files.

        Raises:
            PlacementError: a node does not see one of the folders as this process does.
        """
        if len(self.groups) == 1:
            return
        mark = run_dir / f"seen-{secrets.token_hex(8)}"
        mark.touch()
        try:
            for group in range(len(self.groups)):
                place = self.strategy(group * self.each)
                look = _unseen.options(num_cpus=0, scheduling_strategy=place)
                looked = look.remote({run_dir: mark, model_dir: model_dir})
                node, unseen = ray.get(looked, timeout=LOOK_S)
                if unseen:
                    raise PlacementError(
                        f"the node {node} does not see {unseen[0]}: with run.nodes="
                        f"{len(self.groups)} the run directory and the model's folder must be on "
                        "storage that all nodes mount at the same path"
                    )
        except ray.exceptions.RayError as error:
            raise PlacementError(f"a node was lost when it was looked at: {error}") from error
        finally:
            mark.unlink(missing_ok=True)

    @property
    def trainer_cpus(self) -> float:
        """CPUs of one trainer rank."""
        return self.shape["CPU"] * TRAINER_SHARE

    def engine_options(self, engine: int) -> dict[str, Any]:
        """Actor options for engine number `engine`."""
        if self.tensor_parallel == 1:
            return {
                "num_cpus": self.shape["CPU"] * ENGINE_SHARE,
                "num_gpus": self.shape.get("GPU", 0) * ENGINE_SHARE,
                "scheduling_strategy": self.strategy(engine),
            }
        first = engine * self.tensor_parallel
        places = ray.get(
            [self._place(bundle) for bundle in range(first, first + self.tensor_parallel)]
        )
        # vLLM starts a process per GPU itself: the actor holds no GPU and is told which ones are
        # its.
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=places[0][0], soft=False),
            "runtime_env": {
                "env_vars": {
                    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
                    "CUDA_VISIBLE_DEVICES": ",".join(gpu for _, gpu in places),
                }
            },
        }

    def trainer_pool(self, ranks: int) -> SubRayResourcePool:
        """verl's view of the first `ranks` bundles, one rank in each."""
        from verl.single_controller.ray.base import SubRayResourcePool

        return SubRayResourcePool(
            placement_groups=list(self.groups),
            start_bundle_index=0,
            subgroup_world_size=ranks,
            process_on_nodes=[min(self.each, ranks)] * len(self.groups),
            use_gpu=self.device is Device.GPU,
            max_colocate_count=round(1 / TRAINER_SHARE),
        )

    def remove(self) -> None:
        """Gives the bundles back; actors in them are killed."""
        for group in self.groups:
            remove_placement_group(group)

    def _place(self, bundle: int) -> ray.ObjectRef:
        return _where.options(
            num_cpus=0, num_gpus=ENGINE_SHARE, scheduling_strategy=self.strategy(bundle)
        ).remote()


@ray.remote
def _where() -> tuple[str, str]:
    """Node id and GPU id of the bundle this task runs in."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]


@ray.remote
def _unseen(marks: dict[Path, Path]) -> tuple[str, list[Path]]:
    """The node that this task runs on, and the folders whose mark is not there."""
    node = ray.util.get_node_ip_address()
    return node, [folder for folder, mark in marks.items() if not mark.exists()]
