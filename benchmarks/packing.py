"""How much of what the trainer processes is padding, and what that costs.

    python benchmarks/packing.py [RUN_DIR] [--rows 96] [--budget 2048] [--ranks 2]

The rows of a batch have lengths with a heavy tail (log-normal), or are as long as those of a
recorded run, batch by batch. Each batch goes through an update of a real trainer, on real ranks;
then forward and backward of its micro-batches are timed in this process (CPU time, one thread),
packed as the trainer does, padded to the longest row of a micro-batch, and padded to the longest
row of all. What is printed as processed is what was counted at the model's embedding.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging
from verl.utils.seqlen_balancing import rearrange_micro_batches

from lightning_ray.config import RunConfig
from lightning_ray.placement import Device, reserve
from lightning_ray.run import cluster
from lightning_ray.samples import dataset
from lightning_ray.samples.batch import ROW_SCHEMA
from lightning_ray.trainer import packing
from lightning_ray.trainer.trainer import Trainer

VOCABULARY = 512
ROUNDS = 2  # of which the faster one is shown


def recorded(run_dir: Path) -> list[list[int]]:
    """Row lengths of each batch of a run that trained on something."""
    files = sorted((run_dir / "batches").glob("step-*.parquet"))
    batches = [[len(row) for row in pq.read_table(file)["tokens"]] for file in files]
    return [lengths for lengths in batches if lengths]


def new_model(longest: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=longest,
        )
    )  # fmt: skip


def rows_of(lengths: Sequence[int]) -> pa.Table:
    """Rows as long as these, trained in their second halves."""
    table = []
    for number, length in enumerate(lengths):
        trained = np.arange(length) >= length // 2
        table.append(
            {
                "rollout_id": f"r{number}", "group_id": "g", "attempt_id": f"r{number}-a0",
                "optimizer_step": 0, "reward": 0.0, "tokens": np.zeros(length),
                "trainable": trained, "calls": trained - 1, "logprobs": np.zeros(length),
                "steps": trained - 1, "advantage": trained * 1.0,
                "weight": trained / (len(lengths) * trained.sum()),
            }
        )  # fmt: skip
    return pa.Table.from_pylist(table, schema=ROW_SCHEMA)


def updated(
    model: LlamaForCausalLM, batches: list[list[int]], budget: int, ranks: int
) -> tuple[int, float]:
    """Tokens that the ranks of a trainer processed in updates with these batches, and the seconds
    that passed."""
    longest = max(map(max, batches))
    config = RunConfig.model_validate(
        {
            "model": {"dtype": "float32", "max_model_len": max(longest, 4096)},
            "trainer": {"ranks": ranks, "micro_batch_tokens": budget, "threads": 1},
        }
    )

    def watch(worker):
        worker.processed = 0

        def count(_module, arguments):
            worker.processed += arguments[0].numel()

        worker.engine.module.get_input_embeddings().register_forward_pre_hook(count)

    cluster.connect(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        trainer = Trainer(config, Path(folder), reserve(config, Device.CPU), len(batches))
        workers = trainer._group.workers
        ray.get([worker.__ray_call__.remote(watch) for worker in workers])
        started = time.perf_counter()
        for lengths in batches:
            trainer.update(dataset.of(rows_of(lengths)))
        took = time.perf_counter() - started
        counts = [worker.__ray_call__.remote(lambda rank: rank.processed) for worker in workers]
        processed = sum(ray.get(counts))
    ray.shutdown()
    return processed, took


def micro_batches(lengths: list[int], budget: int, ranks: int) -> list[list[int]]:
    """Row lengths of each micro-batch of all ranks, as the trainer and verl make them."""
    rows = [packing.plain(np.zeros(n, np.int64)) for n in lengths]
    data, _ = packing.deal(rows, [1.0] * len(rows), ranks)
    made = []
    for part in data.chunk(ranks):
        part["attention_mask"] = part["loss_mask"]
        batches, _ = rearrange_micro_batches(part, max_token_len=max(budget, *lengths))
        made += [batch["input_ids"].offsets().diff().tolist() for batch in batches]
    return made


def packed(model: LlamaForCausalLM, shape: list[int]) -> None:
    """Row after row; without a cache transformers keeps them apart by their positions."""
    positions = torch.cat([torch.arange(n) for n in shape])[None]
    ids = torch.zeros(1, sum(shape), dtype=torch.long)
    model(ids, position_ids=positions, use_cache=False).logits.sum().backward()


def padded(model: LlamaForCausalLM, shape: list[int], length: int) -> None:
    ids = torch.zeros(len(shape), length, dtype=torch.long)
    mask = torch.arange(length)[None] < torch.tensor(shape)[:, None]
    model(ids, attention_mask=mask.long(), use_cache=False).logits.sum().backward()


def timed(
    model: LlamaForCausalLM, shapes: list[list[int]], way: Callable[[list[int]], None]
) -> tuple[int, float]:
    """Tokens that the model processed in one round over all micro-batches, and seconds."""
    processed = 0

    def count(_module, arguments):
        nonlocal processed
        processed += arguments[0].numel()

    handle = model.get_input_embeddings().register_forward_pre_hook(count)
    rounds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for shape in shapes:
            way(shape)
            model.zero_grad()
        rounds.append(time.process_time() - started)
    handle.remove()
    return processed // ROUNDS, min(rounds)


def main() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", nargs="?", type=Path)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if options.run_dir:
        batches = recorded(options.run_dir)
    else:
        random = np.random.default_rng(0)
        drawn = np.clip(random.lognormal(5.0, 0.9, options.rows), 16, 2048)
        batches = [drawn.astype(int).tolist()]
    lengths = [length for batch in batches for length in batch]
    longest = max(lengths)
    model = new_model(max(longest, 4096))
    found = {"an update (trainer)": updated(model, batches, options.budget, options.ranks)}
    shapes = [s for batch in batches for s in micro_batches(batch, options.budget, options.ranks)]
    found["packed"] = timed(model, shapes, lambda shape: packed(model, shape))
    found["padded"] = timed(model, shapes, lambda shape: padded(model, shape, max(shape)))
    found["to maximum"] = timed(model, shapes, lambda shape: padded(model, shape, longest))
    table = Table(
        title=f"{len(batches)} batches, {len(lengths)} rows, {sum(lengths)} tokens, "
        f"median {statistics.median(lengths):g}, longest {longest}"
    )
    for column in ("way", "processed", "non-padding / processed", "seconds", "ratio"):
        table.add_column(column, justify="right")
    for name, (processed, seconds) in found.items():
        table.add_row(
            name, str(processed), f"{sum(lengths) / processed:.3f}", f"{seconds:.2f}",
            "" if "trainer" in name else f"{seconds / found['packed'][1]:.2f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
