"""Canaries to plant: strings beside answers that nobody may ever see (`lightning_ray.canary`)."""

from __future__ import annotations

import hashlib
import secrets

from lightning_ray.canary import MARK


def mint(place: str, of: str = "") -> str:
    """A new canary; `place` (lower-case letters) says where it was planted. That of a thing is the
    same each time, for where the same bytes must come out."""
    told = hashlib.blake2b(f"{place} {of}".encode(), digest_size=8).hexdigest() if of else ""
    return f"{MARK}{place}-{told or secrets.token_hex(8)}"


def below(text: str, place: str, of: str) -> str:
    """A file of Python with a canary as its last line: no line that was there has another number.

    >>> below("x = 1", "tests", of="a").startswith("x = 1\\n# lrcanary-tests-")
    True
    """
    end = "\n" * (text[-1:] not in ("", "\n"))
    return f"{text}{end}# {mint(place, of)}\n"
