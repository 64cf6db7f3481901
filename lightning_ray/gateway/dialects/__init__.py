"""The protocols that harnesses speak, one module each, all of one shape (`Dialect`).

A dialect turns a request body into a `ChatRequest` and an `Answer` into a response body or a stream
of server-sent events. A stream is `start`, any number of `keepalive`s, and then `finish` or
`failure`; put together they are exactly what the protocol's own server would send. Nothing else
knows a protocol, and a dialect knows nothing but its protocol: no model, no store, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_ray.gateway.errors import ApiError
from lightning_ray.records import Turn

# Key of a message whose content came in several parts: their texts. Some templates want them apart.
PARTS = "content_parts"


@dataclass(frozen=True)
class ChatRequest:
    """What a harness asks for, whatever its protocol.

    `messages` and `tools` are in the form that chat templates take: content is text, tool-call
    arguments are objects (or the text of a malformed call). `turn_ids[i]` is the id of the turn
    that message i is, where the protocol has a place for it, else "". `options` belong to the
    dialect alone. `parsed` is the request as vLLM's type, which its parsers want."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    model: str
    samples: int
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool = False
    turn_ids: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    parsed: Any = None

    @property
    def constrained(self) -> bool:
        """True if the answer must be sampled under a grammar."""
        choice = self.parsed.tool_choice
        form = self.parsed.response_format
        return (form is not None and form.type != "text") or choice not in (None, "none", "auto")


@dataclass(frozen=True)
class Usage:
    """Tokens of a request, exact: harnesses compact their history by it."""

    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Head:
    """What is known of an answer before it is sampled. `call_id` is unique; `created` is in seconds
    since the epoch."""

    call_id: str
    created: int
    prompt_tokens: int


@dataclass(frozen=True)
class Answer:
    """Everything a dialect needs to write its response: one turn per sample."""

    head: Head
    turns: tuple[Turn, ...]
    usage: Usage


class Dialect(Protocol):
    """What a module of this package provides."""

    NAME: str
    # Beginning of the ids of tool calls.
    TOOL_CALL_PREFIX: str

    def parse(self, body: dict[str, Any]) -> ChatRequest:
        """Reads a request body. Unknown fields are ignored.

        Raises:
            ApiError: 400, with the name of the field.
        """
        ...

    def respond(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        """The response body."""
        ...

    def start(self, request: ChatRequest, head: Head) -> bytes:
        """The events that can be sent before anything is sampled."""
        ...

    def keepalive(self, request: ChatRequest, head: Head) -> bytes:
        """An event that changes nothing, but which the protocol's clients count as a sign of
        life."""
        ...

    def finish(self, request: ChatRequest, answer: Answer) -> Iterator[bytes]:
        """The events after `start`, up to the terminal one."""
        ...

    def failure(self, request: ChatRequest, head: Head, error: ApiError) -> bytes:
        """The terminal event of a stream that fails after `start`."""
        ...

    def error(self, error: ApiError) -> dict[str, Any]:
        """The body of an answer other than 200."""
        ...
