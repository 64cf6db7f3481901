"""The trainer: verl policy workers in the run's bundles, driven from the run's process.

`update` takes a batch's table, forms one jagged mini-batch per optimizer step, and has all ranks
step. `export` writes weights for the engines, `save` and `load` are the exact checkpoint, `save_hf`
is a folder for other programs. One `Trainer` is one worker group; after `TrainerDied` make a new
one and `load`.

Invariants: rows are never padded nor dropped, only inert rows are added until the ranks share them
equally; an update equals the same update with other micro-batches or another number of ranks; after
`load` training goes on as if it had not stopped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
import torch
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tensordict import TensorDict
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.base import get_master_addr_port
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)

from lightning_ray.config import RunConfig
from lightning_ray.placement import Bundles, Device
from lightning_ray.trainer import cpu_platform, loss
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
# What of a model folder is weights, which `save_hf` replaces.
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")


class TrainerDied(RuntimeError):
    """A trainer rank raised or was killed; the group is unusable and its bundles can be used
    again."""


@dataclass(frozen=True)
class _Sequence:
    """T tokens for the model; the columns speak of the token at their own position."""

    tokens_T: np.ndarray  # noqa: N815
    weight_T: np.ndarray  # noqa: N815
    behaviour_T: np.ndarray  # noqa: N815
    advantage: float = 0.0

    def __len__(self) -> int:
        return len(self.tokens_T)


_INERT = _Sequence(np.zeros(2, np.int64), np.zeros(2, np.float32), np.zeros(2, np.float32))


class Trainer:
    """Policy workers for a run.

    Args:
        config: the run's.
        model_dir: Hugging Face folder with the weights to start from.
        bundles: where the ranks live.
        total_steps: optimizer batches of the whole run.

    Raises:
        TrainerDied: from every method, when a rank raised or was killed.
    """

    def __init__(
        self, config: RunConfig, model_dir: Path, bundles: Bundles, total_steps: int
    ) -> None:
        self._config, self._model_dir = config, model_dir
        self._ranks, self._gpu = config.trainer.ranks, bundles.device is Device.GPU
        settings = _worker_config(config, model_dir, total_steps, self._gpu)
        with self._watched("starting"):
            self._group = _Group(
                resource_pool=bundles.trainer_pool(self._ranks),
                ray_cls_with_init=RayClassWithInitArgs(
                    ray.remote(num_cpus=bundles.trainer_cpus)(PolicyWorker),
                    settings,
                    config.trainer.threads,
                    config.run.seed,
                ),
                device_name="cuda" if self._gpu else "cpu",
                use_gpu=self._gpu,
                worker_env=WORKER_ENV,
            )
            self._group.start(loss.PolicyLoss(config.algorithm))

    def update(self, table: pa.Table) -> dict[str, float]:
        """Trains on a batch (`samples.batch.ROW_SCHEMA`) and returns metrics.

        A table without trained tokens makes no optimizer step: `optim/steps` is 0 and little else
        is said.
        """
        started = time.monotonic()
        steps = _optimizer_steps(table)
        if not steps:
            return {"optim/steps": 0.0, "trainer/seconds": time.monotonic() - started}
        old = [self._logprobs(rows) if len(steps) > 1 else None for rows in steps]
        each = [self._optimizer_step(*pair) for pair in zip(steps, old, strict=True)]
        seconds = time.monotonic() - started
        tokens = sum(len(row) for row in chain(*steps))
        return {name: float(np.mean([metrics[name] for metrics in each])) for name in each[0]} | {
            "optim/steps": float(len(steps)),
            "trainer/rows": float(sum(map(len, steps))),
            "trainer/tokens": float(tokens),
            "trainer/trained_tokens": float(
                sum(int((row.weight_T > 0).sum()) for row in chain(*steps))
            ),
            "trainer/tokens_per_second": tokens / seconds,
            "trainer/seconds": seconds,
        }

    def logprobs(self, rows: Sequence[tuple[np.ndarray, float]]) -> list[np.ndarray]:
        """Log-probabilities of (tokens, temperature) rows under the current weights, one float32
        array of T each; the first token, which nothing predicts, has 0."""
        sequences = [
            _Sequence(np.asarray(tokens, np.int64), *np.ones((2, len(tokens)), np.float32))
            for tokens, _ in rows
        ]
        return self._logprobs(sequences, [temperature for _, temperature in rows])

    def export(self, path: Path) -> str:
        """Writes the weights, whole, in `model.dtype`, as one safetensors file; returns their
        checksum."""
        with self._watched("exporting weights"):
            return self._group.export(path.absolute(), self._config.model.dtype)[0]

    def save(self, folder: Path) -> None:
        """Writes the checkpoint: weights, optimizer, learning-rate schedule and random state, per
        rank."""
        with self._watched("saving a checkpoint"):
            self._group.save_checkpoint(str(folder.absolute()))

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote.

        Raises:
            ValueError: the folder is no checkpoint of this many ranks.
        """
        if not (folder / f"model_world_size_{self._ranks}_rank_0.pt").exists():
            there = sorted(path.name for path in folder.glob("model_world_size_*"))
            raise ValueError(
                f"{folder} has no checkpoint of {self._ranks} trainer ranks (it has "
                f"{there or 'nothing'}); set trainer.ranks to the number it was written with, or "
                "start from an exported model"
            )
        with self._watched("loading a checkpoint"):
            self._group.load_checkpoint(str(folder.absolute()))

    def save_hf(self, folder: Path) -> None:
        """Writes a Hugging Face folder that transformers and `vllm serve` load; replaces an older
        one."""
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(
            self._model_dir, partial, ignore=shutil.ignore_patterns(*WEIGHT_FILES, ".*")
        )
        self.export(partial / "model.safetensors")
        about = json.loads((partial / "config.json").read_text())
        about.pop("torch_dtype", None)  # the older name of "dtype"
        about["dtype"] = self._config.model.dtype
        (partial / "config.json").write_text(json.dumps(about, indent=2) + "\n")
        if self._config.model.chat_template:
            shutil.copy(self._config.model.chat_template, partial / "chat_template.jinja")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)

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
        """Ends the ranks."""
        for worker in self._group.workers:
            ray.kill(worker)

    def _optimizer_step(
        self, rows: list[_Sequence], old: list[np.ndarray] | None
    ) -> dict[str, float]:
        temperature = self._config.sampling.temperature
        data, _ = self._jagged(rows, [temperature] * len(rows), old)
        with self._watched("training"):
            metrics = tu.get(self._group.train_batch(data).get(), "metrics")
            lr = self._group.advance_schedule()[0]
        trained = sum(int((row.weight_T > 0).sum()) for row in rows)
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
        self, rows: list[_Sequence], temperatures: list[float] | None = None
    ) -> list[np.ndarray]:
        data, order = self._jagged(
            rows, temperatures or [self._config.sampling.temperature] * len(rows)
        )
        tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=False)
        with self._watched("computing log-probabilities"):
            found = self._group.infer_batch(data).get()["log_probs"].unbind()
        result: list[np.ndarray] = [np.empty(0)] * len(rows)
        for place, number in enumerate(order):
            if number < len(rows):
                # Back from the position that predicts a token to the token itself.
                result[number] = np.concatenate([[0.0], found[place].numpy()[:-1]]).astype(
                    np.float32
                )
        return result

    def _jagged(
        self,
        rows: list[_Sequence],
        temperature_N: list[float],
        old: list[np.ndarray] | None = None,
    ) -> tuple[TensorDict, list[int]]:
        """verl's batch of N rows, and which of `rows` stands at each place (inert ones are
        beyond)."""
        inert = -len(rows) % self._ranks
        everything = [*rows, *[_INERT] * inert]
        lengths = [len(row) for row in everything]
        # verl gives each rank a run of N / ranks rows: let these be equally long.
        order = list(chain(*get_seqlen_balanced_partitions(lengths, self._ranks, equal_size=True)))
        placed = [everything[number] for number in order]
        columns = {
            "input_ids": [row.tokens_T for row in placed],
            "position_ids": [np.arange(len(row)) for row in placed],
            "loss_mask": [_ahead(row.weight_T > 0) for row in placed],
            "weight": [_ahead(row.weight_T) for row in placed],
            "behaviour": [_ahead(row.behaviour_T) for row in placed],
            "advantage": [np.full(len(row), row.advantage, np.float32) for row in placed],
        }
        if old is not None:
            everything_old = [*old, *[_INERT.behaviour_T] * inert]
            columns["old"] = [_ahead(everything_old[number]) for number in order]
        data = TensorDict(
            {name: _nested(arrays) for name, arrays in columns.items()}, batch_size=[len(placed)]
        )
        temperature_N = [*temperature_N, *[1.0] * inert]
        data["temperature"] = torch.tensor([temperature_N[number] for number in order])
        tu.assign_non_tensor(
            data,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=max(self._config.trainer.micro_batch_tokens, *lengths),
            calculate_entropy=True,
            entropy_in_loss=self._config.algorithm.entropy > 0,
            pad_token_id=0,
        )
        return data, order

    @contextlib.contextmanager
    def _watched(self, doing: str) -> Iterator[None]:
        try:
            yield
        except ray.exceptions.RayTaskError as error:
            raise TrainerDied(f"a trainer rank raised while {doing}: {error.cause!r}") from error
        except ray.exceptions.RayActorError as error:
            raise TrainerDied(f"a trainer rank was killed while {doing}: {error}") from error


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


def _optimizer_steps(table: pa.Table) -> list[list[_Sequence]]:
    """The trained rows of each optimizer step that has any."""
    steps: dict[int, list[_Sequence]] = {}
    columns = [
        table[name] for name in ("optimizer_step", "tokens", "weight", "logprobs", "advantage")
    ]
    for step, tokens, weight, logprobs, advantage in zip(*columns, strict=True):
        row = _Sequence(
            tokens.values.to_numpy().astype(np.int64),
            weight.values.to_numpy(),
            logprobs.values.to_numpy(),
            advantage.as_py(),
        )
        if row.weight_T.any():
            steps.setdefault(step.as_py(), []).append(row)
    return [steps[number] for number in sorted(steps)]


def _ahead(values_T: np.ndarray) -> np.ndarray:
    """float32 of T, moved to the position that predicts: what is said of token t+1 stands at t."""
    return np.append(values_T[1:], 0).astype(np.float32)


def _nested(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(map(torch.from_numpy, arrays)), layout=torch.jagged)


def _worker_config(
    config: RunConfig, model_dir: Path, total_steps: int, gpu: bool
) -> TrainingWorkerConfig:
    """verl's settings for a rank. Weights, gradients and optimizer are float32; `model.dtype` is
    what forward and backward compute in."""
    trainer = config.trainer
    # verl's packed rows need an attention that knows where one ends. flash-attn is an extra to
    # install.
    flash = gpu and importlib.util.find_spec("flash_attn") is not None
    precision = {
        "param_dtype": config.model.dtype,
        "reduce_dtype": "float32",
        "buffer_dtype": "float32",
    }
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=str(model_dir),
            load_tokenizer=False,
            trust_remote_code=config.model.trust_remote_code,
            use_remove_padding=True,
            enable_gradient_checkpointing=trainer.gradient_checkpointing,
            override_config={"attn_implementation": "flash_attention_2" if flash else "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy=trainer.strategy,
            model_dtype="float32",
            mixed_precision=precision,
            use_torch_compile=gpu,
            # Holding unsharded gradients back saves collectives on GPUs and costs memory
            # everywhere.
            use_no_sync_for_gradient_accumulation=gpu,
            max_token_len_per_gpu=trainer.micro_batch_tokens,
            infer_max_token_len_per_gpu=trainer.micro_batch_tokens,
            seed=config.run.seed,
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=trainer.lr,
            lr_warmup_steps=trainer.warmup_steps,
            lr_scheduler_type="constant",
            total_training_steps=total_steps * trainer.optimizer_steps,
            weight_decay=trainer.weight_decay,
            betas=trainer.betas,
            clip_grad=trainer.clip_grad,
        ),
        checkpoint_config=CheckpointConfig(
            save_contents=["model", "optimizer", "extra"],
            load_contents=["model", "optimizer", "extra"],
        ),
    )
