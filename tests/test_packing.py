"""Rows dealt to ranks: as many tokens for each, nothing padded, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ray.trainer import packing


def deal(lengths: list[int], ranks: int) -> tuple[list[list[list[int]]], list[int]]:
    """The token ids of each row of each rank, and the order; row n consists of n + 1."""
    rows = [packing.plain(np.full(length, number + 1)) for number, length in enumerate(lengths)]
    data, order = packing.deal(rows, [1.0] * len(rows), ranks)
    parts = [[row.tolist() for row in part["input_ids"].unbind()] for part in data.chunk(ranks)]
    return parts, order


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 400), min_size=1, max_size=40), st.integers(1, 4))
def test_every_row_is_dealt_once_and_ranks_get_as_many_rows(lengths, ranks) -> None:
    parts, order = deal(lengths, ranks)
    assert {len(part) for part in parts} == {-(-len(lengths) // ranks)}
    dealt = sorted(row for part in parts for row in part)
    inert = [[0, 0]] * (-len(lengths) % ranks)
    assert dealt == inert + [[number + 1] * length for number, length in enumerate(lengths)]
    # What is found for a row comes back to it, one position on.
    found = [torch.tensor(row) for part in parts for row in part]
    back = packing.back(found, order, len(lengths))
    for number, values_T in enumerate(back):
        assert values_T.tolist() == [0.0] + [number + 1.0] * (lengths[number] - 1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_get_as_many_tokens_however_long_the_longest_row_is(ranks: int) -> None:
    lengths = np.random.default_rng(0).lognormal(5.0, 0.9, 96).astype(int) + 2
    parts, _ = deal(lengths.tolist(), ranks)
    tokens = [sum(map(len, part)) for part in parts]
    assert max(tokens) <= 1.02 * sum(tokens) / ranks
    in_order = [int(lengths[rank * 96 // ranks :][: 96 // ranks].sum()) for rank in range(ranks)]
    assert max(in_order) > 1.05 * sum(tokens) / ranks  # what dealing in order would do
