"""The protocols that harnesses speak, one module each, all of one shape:

`parse(body) -> ChatRequest` reads a request body; `respond(request, turns, usage) -> dict` writes
the answer. Nothing else knows a protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_ray.records import FinishReason


@dataclass(frozen=True)
class ChatRequest:
    """What a harness asks for, whatever its protocol. `messages` and `tools` are in the form that
    chat templates take: content is text, tool-call arguments are objects."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    model: str
    samples: int
    max_tokens: int | None
    stop: tuple[str, ...]
    # The request as vLLM's type, which its tool and reasoning parsers want.
    parsed: Any = None


@dataclass(frozen=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """What the model said in one call, parsed."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True)
class Usage:
    """Tokens of a request, exact: harnesses compact their history by it."""

    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Answer:
    """Everything a dialect needs to write its response."""

    response_id: str
    created: int
    turns: list[Turn] = field(default_factory=list)
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
