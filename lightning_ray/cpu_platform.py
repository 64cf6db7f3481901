"""verl's platform for a machine without a GPU.

verl knows accelerators only. This module registers a platform named "cpu" through verl's public
registry and makes it the current one where torch sees no GPU. Workers load it through
VERL_USE_EXTERNAL_MODULES; elsewhere importing anything of `lightning_ray.trainer`, or
`lightning_ray.engine.transfer`, loads it first.

Invariants: nothing of verl is patched; where torch sees a GPU, importing this module changes
nothing.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform


def _device_module() -> types.ModuleType:
    """`torch.cpu` and those names of `torch.cuda` that verl asks of any device module."""
    module = types.ModuleType("lightning_ray.cpu_device")
    zero = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
    nothing = ("empty_cache", "ipc_collect", "set_device", "reset_peak_memory_stats", "synchronize")
    answers: dict[str, Any] = dict.fromkeys(zero, 0) | dict.fromkeys(nothing)
    answers |= {
        "is_available": True,
        "device_count": 1,
        "current_device": "cpu",
        "get_device_name": "cpu",
        "mem_get_info": (0, 0),
    }
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer: answer)
    for name in ("get_rng_state", "set_rng_state"):
        setattr(module, name, getattr(torch, name))
    module.__getattr__ = lambda name: getattr(torch.cpu, name)  # type: ignore[method-assign]
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU as verl's device. Collectives go over gloo."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:  # verl uses it as in tensor.to(...)
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    # A driver without a GPU (a Kubernetes head) starts ranks on nodes that have some, so that Ray's
    # name for the resource is "GPU" here too; without GPUs verl does not ask.
    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


# verl warns of every engine whose library is not installed.
warnings.filterwarnings("ignore", category=UserWarning, module="verl")
if not torch.cuda.is_available():
    set_platform(CpuPlatform())
