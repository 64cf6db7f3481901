"""Connects to Ray: the cluster that RAY_ADDRESS names, or a local one that ends with the run; and
looks, before engines and trainer start, whether rollouts can run on what is there."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from lightning_ray.config import RunConfig
from lightning_ray.gateway import deploy
from lightning_ray.placement import Device, plan
from lightning_ray.records import Task
from lightning_ray.rollouts import harness, sandbox
from lightning_ray.rollouts.places import PODS
from lightning_ray.rollouts.sandbox import Mode

# Bytes of the object store of a local Ray: batches go through it, weights do not.
LOCAL_OBJECT_STORE_BYTES = 256 << 20
# Seconds without Ray's head after which a local Ray's processes, and the run, end.
HEADLESS_S = 15
# Ray warns of ever-changing internals on stderr; a run's own messages would drown in it.
_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore",
}

# Of a local Ray itself. Idle workers stay: a new one costs seconds of a core, and attempts come in
# waves. None is started before it is asked for: most would never have work.
_LOCAL_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "3600000",
}


def connect(config: RunConfig) -> None:
    """Joins the cluster that `RAY_ADDRESS` names (`ray job submit` sets it) or starts a local
    one."""
    quiet()
    env = environment(config)
    common = {
        "runtime_env": {"env_vars": env},
        "logging_level": "ERROR",
        "log_to_driver": False,
        "namespace": "lightning_ray",
    }
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**common)
    else:
        # Logical CPUs: at least what the bundles and all harnesses ask for. They mostly wait for
        # the model; rollout.concurrency is what bounds them on one machine.
        asked = sum(bundle["CPU"] for bundle in plan(config, Device.CPU))
        asked += config.rollout.concurrency * config.rollout.cpus + 1
        # A run starts more workers than Ray expects of two cores; it warns at five times this.
        workers = config.rollout.concurrency + 20
        os.environ |= {
            "RAY_worker_maximum_startup_concurrency": str(max(8, workers // 4)),
            # A head on this machine that does not answer is gone: no need to wait Ray's minute.
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEADLESS_S),
        }
        _start_local(
            **common,
            num_cpus=max(os.cpu_count() or 1, round(asked + 0.5)),
            object_store_memory=LOCAL_OBJECT_STORE_BYTES,
        )


def check_rollouts(
    config: RunConfig, say: Callable[[str], None], *sets: Sequence[Task]
) -> dict[str, str]:
    """Says what a person should know of how the tasks of `sets` will be run. Returns what this node
    lacks of the sandbox, by its name; what another node lacks it says with its first attempt.

    Raises:
        ConfigError: a recipe, a sandbox or a cluster that cannot be used.
    """
    harness.load(config.harness.recipe, config.harness.args, config.harness.env)
    in_pods = config.rollout.launcher in PODS and config.kubernetes.grade == "job"
    wanted, lacks = sandbox.wanted(config), dict[str, str]()
    asked = wanted.mode is Mode.NONE or runs_harnesses_here(config)
    if not in_pods and asked and (note := sandbox.check(wanted)):
        say(f"sandbox: {note}")
        lacks[socket.gethostname()] = note
    if config.rollout.launcher != "local":
        from lightning_ray.rollouts.pods import preflight

        for note in preflight.check(config, *sets):
            say(f"{'podman' if config.rollout.launcher == 'podman' else 'kubernetes'}: {note}")
    return lacks


def runs_harnesses_here(config: RunConfig) -> bool:
    """Whether Ray may run a harness on this node: on the head of cluster.yaml it runs none."""
    here = ray.get_runtime_context().get_node_id()
    nodes = (node for node in ray.nodes() if node["NodeID"] == here)
    return any(node["Resources"].get("CPU", 0) >= config.rollout.cpus for node in nodes)


def _start_local(**options: Any) -> None:
    try:
        ray.init(address="local", **options)
    except Exception as error:  # Ray raises nothing more special when 30 s were too short
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        ray.init(address="local", **options)


def environment(config: RunConfig) -> Mapping[str, str]:
    """Environment variables of every process of the run."""
    return {**_QUIET, **deploy.environment(config.gateway)}


def quiet() -> None:
    """Keeps libraries from writing over the run's own messages."""
    os.environ.update({**_QUIET, **_LOCAL_RAY})
    warnings.filterwarnings("ignore")
    logging.getLogger("ray").setLevel(logging.ERROR)
    for name in ("ray.serve", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
