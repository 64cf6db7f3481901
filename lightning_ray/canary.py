"""Strings that nobody may ever see: planted beside answers, watched for in what a model reads or
says.

All share a mark that occurs nowhere else, so that whoever watches (the gateway on every request,
the store on the replies) need not know which ones were planted.

>>> seen(f"... {MARK}git-{7:016x} ...")[0].startswith("lrcanary-git-")
True
>>> seen("a canary is a bird")
[]
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MARK = "lrcanary" + "-"  # in two parts: this file is no canary
_PATTERN = re.compile(MARK + r"[a-z]+-[0-9a-f]{16}")


def seen(text: str) -> list[str]:
    """The canaries in a text."""
    return _PATTERN.findall(text)


def first_seen(texts: Iterable[str]) -> tuple[int, str] | None:
    """(which text, from 0; which canary) of the first one."""
    for number, text in enumerate(texts):
        if found := seen(text):
            return number, found[0]
    return None
