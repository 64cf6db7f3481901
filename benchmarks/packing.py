"""How much of what the trainer processes is padding, and what that costs.

    python benchmarks/packing.py [RUN_DIR] [--rows 96] [--budget 2048] [--ranks 2] [--no-time]

Row lengths have a heavy tail (log-normal), or are those of a recorded run. "packed" is what the
trainer does: jagged rows in token-budget micro-batches, dealt to the ranks; "padded" pads every
micro-batch of the same rows to its longest one; "to maximum" pads to the longest of all. Prints
non-padding tokens / processed tokens, and the time of forward and backward of a small model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils.seqlen_balancing import rearrange_micro_batches

from lightning_ray.trainer import packing

VOCABULARY = 512


def lengths_of(run_dir: Path) -> list[int]:
    """Row lengths of all batches of a run."""
    files = sorted((run_dir / "batches").glob("step-*.parquet"))
    return [len(row) for file in files for row in pq.read_table(file)["tokens"]]


def micro_batches(lengths: list[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Row lengths of each micro-batch of each rank, as the trainer and verl make them."""
    rows = [packing.plain(np.zeros(n, np.int64)) for n in lengths]
    data, _ = packing.deal(rows, [1.0] * len(rows), ranks)
    made = []
    for part in data.chunk(ranks):
        part["attention_mask"] = part["loss_mask"]
        batches, _ = rearrange_micro_batches(part, max_token_len=max(budget, *lengths))
        made.append([batch["input_ids"].offsets().diff().tolist() for batch in batches])
    return made


def seconds(model: LlamaForCausalLM, shape: list[int], padded_to: int | None) -> float:
    """Forward and backward of one micro-batch: row after row unpadded, or padded together."""
    started = time.perf_counter()
    if padded_to is None:
        total = sum(shape)
        positions = torch.cat([torch.arange(n) for n in shape])[None]
        model(
            torch.zeros(1, total, dtype=torch.long), position_ids=positions
        ).logits.sum().backward()
    else:
        ids = torch.zeros(len(shape), padded_to, dtype=torch.long)
        mask = torch.arange(padded_to)[None] < torch.tensor(shape)[:, None]
        model(ids, attention_mask=mask.long()).logits.sum().backward()
    model.zero_grad()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", nargs="?", type=Path)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--no-time", action="store_true")
    options = parser.parse_args()
    if options.run_dir:
        lengths = lengths_of(options.run_dir)
    else:
        random = np.random.default_rng(0)
        lengths = np.clip(random.lognormal(5.0, 0.9, options.rows), 16, 2048).astype(int).tolist()
    made = [
        batch for rank in micro_batches(lengths, options.budget, options.ranks) for batch in rank
    ]
    longest = max(lengths)
    ways = {
        "packed (ours)": (lambda batch: sum(batch), lambda batch: None),
        "padded": (lambda batch: len(batch) * max(batch), max),
        "to maximum": (lambda batch: len(batch) * longest, lambda batch: longest),
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        )
    )  # fmt: skip
    table = Table(title=f"{len(lengths)} rows, {sum(lengths)} tokens, longest {longest}")
    for column in ("way", "processed", "non-padding / processed", "seconds", "ratio"):
        table.add_column(column, justify="right")
    times: dict[str, float] = {}
    for name, (processed, padded_to) in ways.items():
        tokens = sum(processed(batch) for batch in made)
        if not options.no_time:
            rounds = [
                sum(seconds(model, batch, padded_to(batch)) for batch in made) for _ in range(3)
            ]
            times[name] = statistics.median(rounds)
        took = times.get(name, 0.0)
        table.add_row(
            name, str(tokens), f"{sum(lengths) / tokens:.3f}", f"{took:.2f}",
            f"{took / times['packed (ours)']:.2f}" if times else "-",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
