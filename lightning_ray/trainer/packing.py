"""Rows for the trainer's ranks: jagged, unpadded, dealt so that each rank gets as many tokens.

Invariants: rows are never padded nor dropped; inert rows, of two tokens without weight, are added
only until the ranks share the rows equally.
"""

# ruff: noqa: N815  # fields carry shapes
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np
import pyarrow as pa
import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


@dataclass(frozen=True)
class PackedRow:
    """T tokens for the model; the columns speak of the token at their own position."""

    tokens_T: np.ndarray
    weight_T: np.ndarray
    behaviour_T: np.ndarray
    advantage_T: np.ndarray
    call_T: np.ndarray
    old_T: np.ndarray | None = None
    reference_T: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens_T)

    @property
    def trained(self) -> int:
        """Tokens in the loss."""
        return int((self.weight_T > 0).sum())


def plain(tokens: np.ndarray) -> PackedRow:
    """A row whose log-probabilities are wanted, all but the first token's."""
    ones_T = np.ones(len(tokens), np.float32)
    return PackedRow(np.asarray(tokens, np.int64), ones_T, ones_T, ones_T, ones_T)


def optimizer_steps(tables: Iterable[pa.Table]) -> list[list[PackedRow]]:
    """The trained rows of each optimizer step that has any, from the parts of a batch
    (`batch.ROW_SCHEMA`)."""
    steps: dict[int, list[PackedRow]] = {}
    names = ("optimizer_step", "tokens", "weight", "logprobs", "advantage", "calls")
    for table in tables:
        for step, *columns in zip(*(table[name] for name in names), strict=True):
            tokens_T, *others = (column.values.to_numpy() for column in columns)
            row = PackedRow(tokens_T.astype(np.int64), *others)
            if row.trained:
                steps.setdefault(step.as_py(), []).append(row)
    return [steps[number] for number in sorted(steps)]


def deal(
    rows: Sequence[PackedRow], temperature_N: Sequence[float], ranks: int
) -> tuple[TensorDict, list[int]]:
    """verl's batch of N rows, and which of `rows` stands at each place (inert ones are beyond).

    Every column but the token ids is moved to the position that predicts its token.
    """
    inert_T = np.zeros(2, np.float32)
    missing = -len(rows) % ranks
    inert = PackedRow(np.zeros(2, np.int64), *[inert_T] * 4, *_optional(rows[0], inert_T))
    everything = [*rows, *[inert] * missing]
    lengths = [len(row) for row in everything]
    # verl gives each rank a run of N / ranks rows: let these be equally long.
    order = list(chain(*get_seqlen_balanced_partitions(lengths, ranks, equal_size=True)))
    placed = [everything[number] for number in order]
    columns = {
        "input_ids": [row.tokens_T for row in placed],
        "position_ids": [np.arange(len(row)) for row in placed],
        "loss_mask": [_ahead(row.weight_T > 0) for row in placed],
    }
    for field in fields(PackedRow)[1:]:
        values = [getattr(row, field.name) for row in placed]
        if values[0] is not None:
            columns[field.name.removesuffix("_T")] = [_ahead(value_T) for value_T in values]
    data = TensorDict(
        {name: _nested(arrays) for name, arrays in columns.items()}, batch_size=[len(placed)]
    )
    temperature_N = [*temperature_N, *[1.0] * missing]
    data["temperature"] = torch.tensor([temperature_N[number] for number in order])
    return data, order


def back(found: Sequence[torch.Tensor], order: Sequence[int], count: int) -> list[np.ndarray]:
    """What the ranks found for `count` rows, in the order in which they were given to `deal`, and
    back from the position that predicts a token to the token itself."""
    result: list[np.ndarray] = [np.empty(0)] * count
    for values_T, number in zip(found, order, strict=True):
        if number < count:
            result[number] = np.concatenate([[0.0], values_T.numpy()[:-1]]).astype(np.float32)
    return result


def _optional(example: PackedRow, inert_T: np.ndarray) -> list[np.ndarray | None]:
    return [None if value is None else inert_T for value in (example.old_T, example.reference_T)]


def _ahead(values_T: np.ndarray) -> np.ndarray:
    """float32 of T, moved to the position that predicts: what is said of token t+1 stands at t."""
    return np.append(values_T[1:], 0).astype(np.float32)


def _nested(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(map(torch.from_numpy, arrays)), layout=torch.jagged)
