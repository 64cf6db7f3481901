"""The trainer: verl policy workers in the run's bundles, driven from the run's process.

`update` takes a batch's table, forms one jagged mini-batch per optimizer step, and has all ranks
step. `export` writes weights for the engines, `save` and `load` are the exact checkpoint, `save_hf`
is a folder for other programs. One `Trainer` is one worker group; after `TrainerDied` make a new
one and `load`.

Invariants: an update equals the same update with other micro-batches or another number of ranks;
after `load` training goes on as if it had not stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import ray
from ray.data import Dataset
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tensordict import TensorDict
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.base import get_master_addr_port
from verl.utils import tensordict_utils as tu

from lightning_ray import cpu_platform
from lightning_ray.config import RunConfig
from lightning_ray.placement import Bundles, Device
from lightning_ray.trainer import loss, packing, verl_config
from lightning_ray.trainer.packing import PackedRow
from lightning_ray.trainer.policy_worker import PolicyWorker

# Environment of the ranks: our platform for verl, and silence.
WORKER_ENV = {
    "VERL_USE_EXTERNAL_MODULES": cpu_platform.__name__,
    "VERL_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
# Seconds in which a rank that is there says so, if it is not busy.
PING_S = 10.0
# What of a model folder is weights, which `save_hf` replaces.
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")


class TrainerDied(RuntimeError):
    """A trainer rank raised or was killed; the group is unusable and its bundles can be used
    again."""


class TrainerKilled(TrainerDied):
    """A trainer rank was killed, or did not answer for run.wait_timeout_s and was."""


class Trainer:
    """Policy workers for a run.

    Args:
        config: the run's.
        model_dir: Hugging Face folder of the base model.
        bundles: where the ranks live.
        total_steps: optimizer batches of the whole run.
        weights: Hugging Face folder with other weights to start from.

    Raises:
        ConfigError: verl's engine for `trainer.strategy` cannot be had here.
        TrainerDied: from every method, when a rank raised or was killed.
    """

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        bundles: Bundles,
        total_steps: int,
        weights: Path | None = None,
    ) -> None:
        self._config, self._model_dir = config, model_dir
        self._ranks, self._gpu = config.trainer.ranks, bundles.device is Device.GPU
        self._parallel = verl_config.data_parallel(config)
        settings = verl_config.settings(config, weights or model_dir, total_steps, self._gpu)
        with self._watched("starting"):
            self._group = _Group(
                resource_pool=bundles.trainer_pool(self._ranks),
                ray_cls_with_init=RayClassWithInitArgs(
                    ray.remote(num_cpus=bundles.trainer_cpus)(PolicyWorker),
                    settings,
                    config,
                ),
                device_name="cuda" if self._gpu else "cpu",
                use_gpu=self._gpu,
                worker_env=WORKER_ENV,
            )
            self._group.start(loss.PolicyLoss(config.algorithm), _wants_reference(config))

    def update(self, batch: Dataset) -> dict[str, float]:
        """Trains on a batch (`samples.batch.ROW_SCHEMA`) and returns metrics.

        A batch without trained tokens makes no optimizer step: `optim/steps` is 0 and little else
        is said.
        """
        started = time.monotonic()
        # Block by block, and not by `iter_batches`: that starts two more processes, which stay.
        steps = packing.optimizer_steps(ray.get(block) for block in batch.to_arrow_refs())
        if not steps:
            return {"optim/steps": 0.0, "trainer/seconds": time.monotonic() - started}
        prepared = [self._with_references(rows, len(steps) > 1) for rows in steps]
        each = [self._optimizer_step(rows) for rows in prepared]
        seconds = time.monotonic() - started
        rows = list(chain(*steps))
        tokens = sum(map(len, rows))
        return {name: float(np.mean([metrics[name] for metrics in each])) for name in each[0]} | {
            "optim/steps": float(len(steps)),
            "trainer/rows": float(len(rows)),
            "trainer/tokens": float(tokens),
            "trainer/trained_tokens": float(sum(row.trained for row in rows)),
            "trainer/tokens_per_second": tokens / seconds,
            "trainer/seconds": seconds,
        }

    def logprobs(self, rows: Sequence[tuple[np.ndarray, float]]) -> list[np.ndarray]:
        """Log-probabilities of (tokens, temperature) rows under the current weights, one float32
        array of T each; the first token, which nothing predicts, has 0."""
        return self._logprobs(
            [packing.plain(tokens) for tokens, _ in rows], [temperature for _, temperature in rows]
        )

    def export(self, path: Path) -> str:
        """Writes the weights, whole, in `model.dtype`, as one safetensors file; returns their
        checksum."""
        self.gather()
        return self.write(path)

    def make_room(self) -> None:
        """Moves the optimizer off the GPU, so that the weights of an engine have room there."""
        if self._gpu:
            with self._watched("offloading the optimizer"):
                self._group.to("cpu", model=False, grad=False)

    def open_doors(self) -> list[str]:
        """Where the next `gather` can send weights, an address for each rank."""
        with self._watched("preparing a weight sync"):
            return self._group.open_door()

    def gather(self, doors: Sequence[str] = (), limit_s: float = 0) -> None:
        """Keeps the weights as they are for `write`; and the ranks, from the first on, send them
        to `doors`, where engines wait for them. One that says nothing for `limit_s` seconds is left
        out."""
        with self._watched("gathering weights"):
            self._group.gather(list(doors), limit_s)

    def write(self, path: Path) -> str:
        """Writes what `gather` kept, as one safetensors file; returns its checksum. The trainer may
        sleep."""
        with self._watched("writing weights"):
            return self._group.write(path.absolute())[0]

    def save(self, folder: Path) -> None:
        """Writes the checkpoint: weights, optimizer, learning-rate schedule and random state, per
        rank."""
        with self._watched("saving a checkpoint"):
            self._group.save_checkpoint(str(folder.absolute()))

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote with as many ranks."""
        with self._watched("loading a checkpoint"):
            self._group.load_checkpoint(str(folder.absolute()))

    def save_hf(self, folder: Path) -> str:
        """Writes a Hugging Face folder that transformers and `vllm serve` load; replaces an older
        one. Returns the weights' checksum."""
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(
            self._model_dir, partial, ignore=shutil.ignore_patterns(*WEIGHT_FILES, ".*")
        )
        checksum = self.export(partial / "model.safetensors")
        about = json.loads((partial / "config.json").read_text())
        about.pop("torch_dtype", None)  # the older name of "dtype"
        about["dtype"] = self._config.model.dtype
        (partial / "config.json").write_text(json.dumps(about, indent=2) + "\n")
        if self._config.model.chat_template:
            shutil.copy(self._config.model.chat_template, partial / "chat_template.jinja")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
        return checksum

    def sleep(self) -> None:
        """Moves weights and optimizer off the GPU, so that the engines have it. Save before, not
        after."""
        if self._gpu:
            with self._watched("offloading"):
                self._group.to("cpu")

    def wake(self) -> None:
        """Moves weights and optimizer back to the GPU."""
        if self._gpu:
            with self._watched("loading onto the GPU"):
                self._group.to("device")

    def close(self) -> None:
        """Ends the ranks, if they have started."""
        for worker in self._group.workers if hasattr(self, "_group") else ():
            ray.kill(worker)

    def _with_references(self, rows: list[PackedRow], several: bool) -> list[PackedRow]:
        """`rows` with what must be computed before the first of several optimizer steps."""
        temperatures = [self._config.sampling.temperature] * len(rows)
        if several:
            old = self._logprobs(rows, temperatures)
            rows = [replace(row, old_T=old_T) for row, old_T in zip(rows, old, strict=True)]
        if self._config.algorithm.kl:
            base = self._logprobs(rows, temperatures, of_reference=True)
            rows = [
                replace(row, reference_T=base_T) for row, base_T in zip(rows, base, strict=True)
            ]
        return rows

    def _optimizer_step(self, rows: list[PackedRow]) -> dict[str, float]:
        data, _ = self._dealt(rows, [self._config.sampling.temperature] * len(rows))
        with self._watched("training"):
            metrics = tu.get(self._group.train_batch(data).get(), "metrics")
            lr = self._group.advance_schedule()[0]
        trained = sum(row.trained for row in rows)
        return {
            "policy/loss": float(metrics["loss"]),
            **{
                # Sums per micro-batch and rank.
                f"policy/{name}": float(np.sum(metrics[name])) / trained
                for name in loss.SUMS
                if name in metrics
            },
            "optim/grad_norm": float(metrics["grad_norm"]),
            "optim/lr": lr,
        }

    def _logprobs(
        self, rows: list[PackedRow], temperatures: list[float], of_reference: bool = False
    ) -> list[np.ndarray]:
        data, order = self._dealt(rows, temperatures)
        tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=False)
        with self._watched("computing log-probabilities"):
            if of_reference and not self._config.model.lora_rank:
                found = self._group.infer_reference(data)
            else:
                tu.assign_non_tensor(data, no_lora_adapter=of_reference)
                found = self._group.infer_batch(data)
            return packing.back(found.get()["log_probs"].unbind(), order, len(rows))

    def _dealt(
        self, rows: list[PackedRow], temperatures: list[float]
    ) -> tuple[TensorDict, list[int]]:
        data, order = packing.deal(rows, temperatures, self._parallel)
        tu.assign_non_tensor(
            data,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=max(self._config.trainer.micro_batch_tokens, *map(len, rows), 2),
            calculate_entropy=True,
            entropy_in_loss=self._config.algorithm.entropy > 0,
            pad_token_id=0,
        )
        return data, order

    @contextlib.contextmanager
    def _watched(self, doing: str) -> Iterator[None]:
        # verl's calls wait without a limit; they end when the ranks do.
        limit = threading.Timer(self._config.run.wait_timeout_s, self.close)
        limit.daemon = True
        limit.start()
        try:
            yield
        except ray.exceptions.RayTaskError as error:
            if self._has_lost_a_rank():  # the others raise because it does not answer them
                raise TrainerKilled(f"a trainer rank was killed while {doing}") from error
            raise TrainerDied(f"a trainer rank raised while {doing}: {error.cause!r}") from error
        except ray.exceptions.RayActorError as error:
            raise TrainerKilled(f"a trainer rank was killed while {doing}") from error
        finally:
            limit.cancel()

    def _has_lost_a_rank(self) -> bool:
        for worker in self._group.workers:
            try:
                ray.get(worker.__ray_ready__.remote(), timeout=PING_S)
            except ray.exceptions.RayActorError:
                return True
            except ray.exceptions.GetTimeoutError:
                continue  # it waits for the one that is gone
        return False


class _Group(RayWorkerGroup):
    """verl's worker group in bundles that have no whole CPU to spare, which verl asks of bundle 0
    for a moment to find a free port there."""

    def _get_master_addr_port(
        self, pg: PlacementGroup, bundle_index: int = 0, master_port_range: None = None
    ) -> None:
        self._master_addr, self._master_port = ray.get(
            get_master_addr_port.options(
                num_cpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=pg, placement_group_bundle_index=bundle_index
                ),
            ).remote(master_port_range=master_port_range)
        )


def _wants_reference(config: RunConfig) -> bool:
    """True if the ranks need the starting weights beside the trained ones; with LoRA they have
    them without the adapter."""
    return config.algorithm.kl > 0 and config.model.lora_rank == 0
