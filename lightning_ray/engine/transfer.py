"""Weights from a trainer rank's memory into the engine worker beside it.

verl's bucketed transfer moves them: bucket by bucket through one buffer that both processes map
(CUDA IPC on a GPU, POSIX shared memory elsewhere), each bucket announced and acknowledged over a
local socket. What is here is what it lacks for us: limits, and a loader for the worker.

Invariants: neither end waits for the other longer than the limit; a tensor that is handed on is not
overwritten by the next bucket.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
import verl
import zmq

from lightning_ray import cpu_platform as cpu_platform

Named = tuple[str, torch.Tensor]


def send(
    address: str, weights: Iterator[Named], bucket_mib: int, limit_s: float, shared: bool
) -> None:
    """Sends `weights` to the receiver at `address`, through shared memory if `shared`, else by CUDA
    IPC. If it does not answer within the limit, some of them are left."""
    sender = _verl().BucketedWeightSender(address, bucket_mib, use_shm=shared)
    with _limited(limit_s) as sender.zmq_context, contextlib.suppress(zmq.Again):
        asyncio.run(sender.async_send_weights(weights))


def receive(
    address: str, device: torch.device, load: Callable[[list[Named]], object], limit_s: float
) -> None:
    """Has `load` called with what a `send` to `address` sends, bucket by bucket.

    Raises:
        zmq.Again: nothing came within the limit.
    """
    receiver = _verl().BucketedWeightReceiver(address, device, use_shm=device.type == "cpu")
    with _limited(limit_s) as receiver.zmq_context:
        # vLLM keeps what it is given until it has the whole layer, and the buffer is used again.
        receiver.receive_weights(lambda bucket, _: load([(n, t.clone()) for n, t in bucket]))


def _limited(limit_s: float) -> zmq.Context:
    """Whose sockets wait no longer than that."""
    context: zmq.Context = zmq.Context()
    for option in (zmq.RCVTIMEO, zmq.SNDTIMEO, zmq.LINGER):
        context.setsockopt(option, int(limit_s * 1000))
    return context


def _verl() -> ModuleType:
    """verl's module, by its path: its package refuses vLLM's builds for a CPU."""
    path = Path(verl.__path__[0], "workers/rollout/vllm_rollout/bucketed_weight_transfer.py")
    spec = importlib.util.spec_from_file_location("verl_bucketed_weight_transfer", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
