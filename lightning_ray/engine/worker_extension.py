"""Mixed into vLLM's worker: loads a safetensors file into the running model.

Invariant: what is checksummed is what is loaded (the same tensors, read once). On a CPU vLLM packs
linear weights when it loads them, so plain `load_weights` fails there; its layerwise reload works
on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from lightning_ray.engine.weights import checksum


class WeightLoader:
    """vLLM `worker_extension_cls`; its methods are called through `collective_rpc`."""

    model_runner: Any

    def load_policy(self, path: str, verify: bool) -> str | None:
        """Loads Hugging Face-named weights from `path`. Returns their checksum if `verify`."""
        with safe_open(path, "pt", device="cpu") as file:
            names = sorted(file.keys())

            def tensors() -> Iterator[tuple[str, torch.Tensor]]:
                for name in names:
                    yield name, file.get_tensor(name)

            digest = checksum(dict(tensors())) if verify else None
            self.model_runner.reload_weights(weights_iterator=tensors(), is_checkpoint_format=True)
        for module in self.model_runner.model.modules():
            # A head that is tied to the embedding is not loaded itself; on a CPU it multiplies by a
            # packed copy, which would stay that of the old weights.
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
        return digest
