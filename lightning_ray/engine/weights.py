"""Weights between trainer and engines: one checksum that both sides compute.

Invariants: two sets of weights have the same checksum exactly if names, dtypes, shapes and bytes
agree; the order in which they are given does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

# Bytes of the digest: 128 bits, which nobody forges here and logs can bear.
DIGEST_BYTES = 16


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """The checksum of named weights, as hexadecimal text."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
