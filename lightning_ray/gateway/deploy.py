"""Starts and stops the gateway on Ray Serve.

Serve reads its settings from the environment of its own processes, so `environment` must be part of
the Ray job's runtime environment before Serve starts. HAProxy's files and side ports are derived
from the gateway's port: two clusters on one machine do not collide.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from lightning_ray.config import GatewaySection, RunConfig

log = logging.getLogger(__name__)

APPLICATION = "lightning_ray"
# Requests one replica holds at a time: agents wait for the model, so this only guards memory.
MOST_REQUESTS = 10_000
# The longest model call: HAProxy must not give up before the harness does.
PROXY_TIMEOUT_SECONDS = 3600
# Serve makes a record of each request before it looks whether anybody wants it.
LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
# Longest wait for Serve to end.
STOP_SECONDS = 30.0


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
    }
    if not (gateway.haproxy and sys.platform == "linux"):
        return variables
    folder = _proxy_folder(gateway.port)
    return {
        **variables,
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        # HAProxy sends calls there while no replica is up.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(PROXY_TIMEOUT_SECONDS),
    }


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settle_port(config: RunConfig) -> RunConfig:
    """`config` with a gateway port that can be listened on: port 0 becomes a free one.

    Raises:
        GatewayStartError: the port is taken.
    """
    gateway = config.gateway
    if gateway.port == 0:
        settled = gateway.model_copy(update={"port": free_port()})
        return config.model_copy(update={"gateway": settled})
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
    return config


def _proxy_folder(port: int) -> Path:
    # Short, and not below TMPDIR: Ray adds a 56-character folder, a socket's path ends at 97.
    return Path("/tmp") / f"lr-haproxy-{port}"


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
        GatewayStartError: another run has its gateway on this cluster.
    """
    from lightning_ray.gateway.app import GatewayDeployment

    gateway = config.gateway
    if APPLICATION in serve.status().applications:
        raise GatewayStartError(
            "another run has its gateway on this Ray cluster; stop that run, or use another cluster"
        )
    serve.start(http_options={"host": gateway.host, "port": gateway.port})
    deployment = serve.deployment(GatewayDeployment).options(
        name="gateway",
        num_replicas=gateway.replicas,
        max_ongoing_requests=MOST_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        # Harnesses are gone when the gateway stops; nothing is left to drain.
        graceful_shutdown_timeout_s=2,
        graceful_shutdown_wait_loop_s=0.2,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.run(
        deployment.bind(config, str(model_dir), engines, store),
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
