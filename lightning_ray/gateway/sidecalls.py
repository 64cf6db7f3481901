"""Tells work on the task from side calls: titles and summaries that a harness makes for itself.

By the headers and shapes of the harnesses that were looked at, and one generic rule: a call without
tools, in an attempt whose other calls have tools, is no work on the task. A sub-agent's call is not
a side call. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from lightning_ray.gateway.dialects import ChatRequest
from lightning_ray.records import SideCall

# What the instructions of title calls say (Claude Code, OpenCode).
_TITLE = re.compile(r"title generator|generate a (concise|short|brief)[^.]{0,80}\btitle\b")
# What the instructions of compaction calls say (Codex, OpenCode, qwen-code, Claude Code).
_COMPACTION = re.compile(
    r"context checkpoint compaction|context summari[sz]ation|"
    r"summari[sz]es? (internal )?(the |this |our )?(chat|conversation)|"
    r"detailed summary of (the|our) conversation"
)


def classify(
    headers: Mapping[str, str], request: ChatRequest, attempt_has_tools: bool
) -> SideCall | None:
    """The kind of side call that this is, None for work on the task.

    Args:
        headers: of the HTTP request, names in lower case.
        request: the parsed request.
        attempt_has_tools: an earlier call of the attempt offered tools.
    """
    if _codex_kind(headers) == "compaction":
        return SideCall.COMPACTION
    if request.tools:
        return None
    system = [m["content"] for m in request.messages if m["role"] == "system"]
    instructions = "\n".join([*system, request.messages[-1]["content"] or ""]).lower()
    # Looking for a word is a hundred times faster than these expressions.
    if ("summar" in instructions or "compact" in instructions) and _COMPACTION.search(instructions):
        return SideCall.COMPACTION
    if "title" in instructions and _TITLE.search(instructions):
        return SideCall.TITLE
    return SideCall.OTHER if attempt_has_tools else None


def _codex_kind(headers: Mapping[str, str]) -> str:
    try:
        metadata = json.loads(headers.get("x-codex-turn-metadata", "{}"))
    except ValueError:
        return ""
    return str(metadata.get("request_kind", "")) if isinstance(metadata, dict) else ""
