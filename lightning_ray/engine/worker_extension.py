"""Mixed into vLLM's worker: loads new weights into the running model, from a safetensors file or
from the memory of the trainer rank beside it.

Invariant: what is checksummed is what is loaded (the same tensors). On a CPU vLLM packs linear
weights when it loads them, so plain `load_weights` fails there; its layerwise reload works on every
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from lightning_ray.engine.weights import checksum


class WeightLoader:
    """vLLM `worker_extension_cls`; its methods are called through `collective_rpc`, in every worker
    of the engine."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int

    def load_policy(self, path: str, verify: bool) -> str | None:
        """Loads Hugging Face-named weights from `path`. Returns their checksum if `verify`."""
        with safe_open(path, "pt", device="cpu") as file:
            names = sorted(file.keys())

            def tensors() -> Iterator[tuple[str, torch.Tensor]]:
                for name in names:
                    yield name, file.get_tensor(name)

            digest = checksum(dict(tensors())) if verify else None
            self.model_runner.reload_weights(weights_iterator=tensors(), is_checkpoint_format=True)
        self._repack_head()
        return digest

    def receive_policy(self, doors: Sequence[str], limit_s: float, verify: bool) -> str | None:
        """Loads the weights that a trainer rank sends to this worker's door. Returns their checksum
        if `verify`."""
        from lightning_ray.engine import transfer  # verl, which nothing else here needs

        model, seen = self.model_runner.model, dict[str, torch.Tensor]()

        def load(bucket: list[transfer.Named]) -> None:
            if verify:
                seen.update((name, tensor.cpu()) for name, tensor in bucket)
            model.load_weights(bucket)

        # `reload_weights`, which wants an iterator, in its parts.
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            transfer.receive(doors[self.rank], self.device, load, limit_s)
            finalize_layerwise_reload(model, self.model_runner.model_config)
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()
        self._repack_head()
        return checksum(seen) if verify else None

    def _repack_head(self) -> None:
        """A head that is tied to the embedding is not loaded itself; on a CPU it multiplies by a
        packed copy, which would stay that of the old weights."""
        for module in self.model_runner.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
