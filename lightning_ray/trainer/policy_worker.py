"""One trainer rank: verl's `TrainingWorker`, and what it lacks for us.

`PolicyWorker` starts verl's engine on a CPU too, sends and writes weights for the engines, and
steps the learning rate itself. `SampledTokensEngine` is verl's FSDP engine for the CPU; it computes
logits only for the tokens in the loss, which on long prompts and large vocabularies is most of the
memory and a quarter of the time.

Invariants: every method runs on all ranks at once (gathering weights is collective, also for a rank
whose engine is gone); a written file is whole or absent.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from transformers.utils import logging as transformers_logging
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
from verl.utils.model import convert_weight_keys
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker

from lightning_ray.config import RunConfig
from lightning_ray.engine import transfer
from lightning_ray.engine.weights import checksum

# Where POSIX shared memory is. A write beyond its room ends a process without a word.
SHARED_MEMORY = "/dev/shm"


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])
class SampledTokensEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine, with logits only where `loss_mask` is set; log-probabilities are 0
    elsewhere."""

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        kept = micro_batch["loss_mask"].values().nonzero().squeeze(-1)
        # A micro-batch of inert rows keeps one token, so that every parameter gets its (zero)
        # gradient.
        kept = kept if len(kept) else kept.new_zeros(1)
        return inputs | {"logits_to_keep": kept}, arguments | {"kept": kept}

    def prepare_model_outputs(
        self, output: Any, output_args: dict, micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        kept, tokens = output_args["kept"], micro_batch["input_ids"]
        temperature = output_args["temperature_rmpad"][kept].unsqueeze(-1)
        logits = output.logits.squeeze(0).float() / temperature

        def spread(values: torch.Tensor) -> torch.Tensor:
            whole = values.new_zeros(len(tokens.values())).index_copy(0, kept, values)
            return torch.nested.nested_tensor_from_jagged(whole, tokens.offsets())

        labels = output_args["input_ids_rmpad_rolled"][kept]
        outputs = {
            "log_probs": spread(logprobs_from_logits(logits, labels, inplace_backward=False))
        }
        if micro_batch["calculate_entropy"]:
            # As a mere metric it needs no graph, which would hold the logits a second time.
            wanted = micro_batch["entropy_in_loss"]
            outputs["entropy"] = spread(entropy_from_logits(logits if wanted else logits.detach()))
        return outputs


class PolicyWorker(TrainingWorker):
    """A data-parallel trainer rank."""

    engine: Any  # verl's, which `infer_reference` changes for a moment
    kept: dict[str, torch.Tensor]  # by `gather`, for `write`
    door: tempfile.TemporaryDirectory[str]  # where the next `gather` sends

    def __init__(self, config: TrainingWorkerConfig, run: RunConfig) -> None:
        warnings.filterwarnings("ignore")
        logging.getLogger("torch").setLevel(logging.ERROR)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        if not torch.cuda.is_available():
            torch.set_num_threads(run.trainer.threads)
            # verl would ask for "cpu:gloo,cpu:gloo", which torch refuses.
            torch.distributed.init_process_group(
                "cpu:gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
            )
        torch.manual_seed(run.run.seed)
        self.dtype = getattr(torch, run.model.dtype)  # of weights that leave
        self.bucket_mib = run.trainer.weight_sync_mib
        with contextlib.redirect_stdout(io.StringIO()):  # verl prints
            super().__init__(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start(self, loss: Callable, wants_reference: bool) -> None:
        """Loads model and optimizer, and beside them the weights as they are now if a term of the
        loss compares with them."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.engine.initialize()
            if wants_reference:
                # verl keeps what is only evaluated off the GPU, in pinned memory, which needs one.
                frozen = replace(self.engine_config, forward_only=torch.cuda.is_available())
                self.reference = EngineRegistry.new(
                    model_type=self.config.model_type,
                    backend=self.engine_config.strategy,
                    model_config=self.model_config,
                    engine_config=frozen,
                    optimizer_config=self.optimizer_config,
                    checkpoint_config=self.checkpoint_config,
                )
                self.reference.initialize()
        # verl's warm-up begins at a learning rate of 0, which would waste the first update.
        self.engine.lr_scheduler_step()
        self.loss_fn = loss

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False
    )
    def infer_reference(self, data: TensorDict) -> TensorDict:
        """Like `infer_batch`, under the weights that the run started with."""
        trained = self.engine
        self.engine = self.reference
        try:
            return self.infer_batch(data)
        finally:
            self.engine = trained

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def advance_schedule(self) -> float:
        """The learning rate of the optimizer step just made; the next step gets the schedule's
        next."""
        used: float = self.engine.optimizer.param_groups[0]["lr"]
        self.engine.lr_scheduler_step()
        return used

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_door(self) -> str:
        """The address at which the next `gather` sends weights.

        Raises:
            OSError: shared memory has no room for the ranks' buffers.
        """
        torch.cuda.empty_cache()  # an engine's weights come beside the trainer's
        free, need = shutil.disk_usage(SHARED_MEMORY).free >> 20, self._bucket() * self.world_size
        if free < need and not torch.cuda.is_available():
            raise OSError(
                f"trainer.weight_sync=memory needs {need} MiB in {SHARED_MEMORY}, which has {free} "
                "left; make it larger (docker run --shm-size), or set trainer.weight_sync=file"
            )
        # Private, since what comes through it is unpickled; a socket's path has at most 107 bytes.
        self.door = tempfile.TemporaryDirectory(prefix="lightning-ray-", dir="/tmp")
        return f"ipc://{self.door.name}/door"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gather(self, doors: Sequence[str], limit_s: float) -> None:
        """Gathers the whole weights under their Hugging Face names. Rank 0 keeps them for `write`,
        and the ranks that have one of the `doors` send them there."""
        sends = self.rank < len(doors)
        weights = self._whole(wanted=sends or self.rank == 0)
        if sends:
            shared = not torch.cuda.is_available()
            transfer.send(doors[self.rank], weights, self._bucket(), limit_s, shared)
        for _ in weights:  # if nobody took them: the other ranks cannot without this one
            pass
        if doors:
            self.door.cleanup()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write(self, path: Path) -> str | None:
        """Writes the weights that `gather` kept; rank 0 returns their checksum."""
        if self.rank != 0:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        save_file(self.kept, partial, metadata={"format": "pt"})
        os.replace(partial, path)
        digest = checksum(self.kept)
        self.kept = {}
        return digest

    def _whole(self, wanted: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """What engines load, if `wanted`; else it is gathered only."""
        self.kept = {}
        tied = getattr(self.engine.module, "all_tied_weights_keys", {})
        for name, tensor in self._gathered():
            if wanted and name not in tied:
                whole = tensor.detach().to(self.dtype).contiguous()
                if self.rank == 0:
                    self.kept[name] = whole.cpu()
                yield name, whole

    def _bucket(self) -> int:
        """Size of the buffer in MiB. Shared memory must hold the largest tensor; by CUDA IPC verl
        sends what is larger by itself."""
        if torch.cuda.is_available():
            return self.bucket_mib
        largest = max(tensor.numel() for tensor in self.engine.module.state_dict().values())
        return max(self.bucket_mib, largest * self.dtype.itemsize // 2**20 + 1)

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole weights one by one, adapters merged into them."""
        if self.model_config.lora_rank == 0:
            yield from self.engine.get_per_tensor_param()[0]
            return
        # As verl does it, but verl rounds them to bfloat16, whatever the model's precision.
        module = self.engine.module
        with merged_lora_context(module, backup_adapters=True):
            named = convert_weight_keys(normalize_peft_param_name(module.state_dict()), module)
            for name, tensor in named.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                yield name, whole.detach().clone()  # the module's own are put back at the end
