"""Strings that nobody may ever see: planted beside answers, watched for in what a model reads or
says.

`mint` makes one, `seen` finds them. All share a mark that occurs nowhere else, so that whoever
watches (the gateway on every request, a grader on the replies) need not know which ones were
planted.

>>> seen(f"... {mint('git')} ...")[0].startswith("lrcanary-git-")
True
>>> seen("a canary is a bird")
[]
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable

MARK = "lrcanary" + "-"  # in two parts: this file is no canary
_PATTERN = re.compile(MARK + r"[a-z]+-[0-9a-f]{16}")


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


def seen(text: str) -> list[str]:
    """The canaries in a text."""
    return _PATTERN.findall(text)


def first_seen(texts: Iterable[str]) -> tuple[int, str] | None:
    """(which text, from 0; which canary) of the first one."""
    for number, text in enumerate(texts):
        if found := seen(text):
            return number, found[0]
    return None
