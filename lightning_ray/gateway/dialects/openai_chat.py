"""OpenAI Chat Completions.

A request is checked and brought into the form that chat templates take; vLLM's own type of it holds
what vLLM's parsers read. A stream tells a whole turn in a few large chunks: nothing is sent of it
before it is complete.

Invariants: fields that we do not know are ignored; a value that we cannot serve is a 400 that names
it; no message is added or dropped; tool results stand in the order of their calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import orjson
from pydantic import ValidationError

from lightning_ray.gateway import bodies
from lightning_ray.gateway.dialects import PARTS, Answer, ChatRequest, Head, Usage
from lightning_ray.gateway.errors import ApiError, bad
from lightning_ray.records import FinishReason, Turn

NAME = "openai_chat"
TOOL_CALL_PREFIX = "call_"
ROLES = ("system", "developer", "user", "assistant", "tool")
FORMATS = ("text", "json_object", "json_schema")
# Choices per request: each one is a sequence in the engine, so an absurd number must not reach it.
MOST_CHOICES = 64
# The requests of a run differ in their messages and hardly in the rest. That has the tools, whose
# check takes longer than all else.
REMEMBERED_SETTINGS = 64
# What vLLM's type is made of. Messages are not: nothing reads them there, and they are long.
_FIELDS = (
    "model",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
)


def parse(body: dict[str, Any]) -> ChatRequest:
    """Reads a request body.

    Raises:
        ApiError: 400, with the name of the field.
    """
    from vllm.exceptions import VLLMValidationError

    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages", "must be a list with at least one message")
    normal = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    _check_tools(body.get("tools"))
    _check_tool_choice(body.get("tool_choice"))
    _check_format(body.get("response_format"))
    known = {key: body[key] for key in _FIELDS if body.get(key) is not None}
    try:
        parsed, tools = _settings(orjson.dumps(known))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or None
        raise ApiError(400, f"{where or 'body'}: {first['msg']}", param=where) from error
    except VLLMValidationError as error:
        raise ApiError(400, str(error), param=error.parameter) from error
    samples = 1 if parsed.n is None else parsed.n
    if not 1 <= samples <= MOST_CHOICES:
        raise bad("n", f"must be between 1 and {MOST_CHOICES}")
    limit = "max_tokens" if parsed.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = vars(parsed)[limit]  # asked as an attribute, a deprecated field warns
    if max_tokens is not None and max_tokens < 1:
        raise bad(limit, "must be at least 1")
    stop = [parsed.stop] if isinstance(parsed.stop, str) else parsed.stop or []
    include_usage = parsed.stream_options is not None and parsed.stream_options.include_usage
    return ChatRequest(
        messages=_in_call_order(normal),
        tools=tools,
        model=parsed.model or "",
        samples=samples,
        max_tokens=max_tokens,
        stop=tuple(stop),
        stream=bool(parsed.stream),
        options={"include_usage": bool(include_usage)},
        parsed=parsed.model_copy(),
    )


@lru_cache(REMEMBERED_SETTINGS)
def _settings(known: bytes) -> tuple[Any, list[dict[str, Any]] | None]:
    """A request without its messages, as vLLM's type, and its tools. Nobody changes either."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    parsed = ChatCompletionRequest.model_validate({"messages": [], **orjson.loads(known)})
    return parsed, [tool.model_dump() for tool in parsed.tools] if parsed.tools else None


def respond(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    """The response body."""
    return {
        **_envelope("chat.completion", request, answer.head),
        "choices": [_choice(index, turn) for index, turn in enumerate(answer.turns)],
        "usage": _usage(answer.usage),
    }


def start(request: ChatRequest, head: Head) -> bytes:
    """The role, once per sample."""
    return b"".join(
        _chunk(request, head, index, {"role": "assistant"}) for index in range(request.samples)
    )


def keepalive(request: ChatRequest, head: Head) -> bytes:
    """A chunk without a change."""
    return _chunk(request, head, 0, {})


def finish(request: ChatRequest, answer: Answer) -> Iterator[bytes]:
    """The turns, one after the other, and the end of the stream."""
    for index, turn in enumerate(answer.turns):
        choice = _choice(index, turn)
        for delta in _deltas(choice["message"]):
            yield _chunk(request, answer.head, index, delta)
        yield _chunk(request, answer.head, index, {}, choice["finish_reason"])
    if request.options.get("include_usage"):
        envelope = _envelope("chat.completion.chunk", request, answer.head)
        yield _event({**envelope, "choices": [], "usage": _usage(answer.usage)})
    yield b"data: [DONE]\n\n"


def failure(request: ChatRequest, head: Head, error: ApiError) -> bytes:
    """The error instead of a chunk. Clients raise it; no `[DONE]` comes after it."""
    return _event(error.body)


def error(error: ApiError) -> dict[str, Any]:
    """The body of an answer other than 200."""
    return dict(error.body)


def text_of(content: Any, where: str) -> str:
    """Content as text, whatever the types of its parts are called.

    Raises:
        ApiError: 400, something in it is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(where, "must be text, a list of text parts, or null")
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise bad(where, "has a part that is not text")
    return "\n".join(texts)


def _envelope(kind: str, request: ChatRequest, head: Head) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{head.call_id}",
        "object": kind,
        "created": head.created,
        "model": request.model,
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _chunk(
    request: ChatRequest, head: Head, index: int, delta: dict[str, Any], reason: str | None = None
) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
    return _event({**_envelope("chat.completion.chunk", request, head), "choices": [choice]})


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("reasoning_content", "content"):
        if message.get(key):
            yield {key: message[key]}
    for index, call in enumerate(message.get("tool_calls", ())):
        arguments = {"arguments": call["function"]["arguments"]}
        begun = {**call, "function": {**call["function"], "arguments": ""}}
        yield {"tool_calls": [{"index": index, **begun}]}
        yield {"tool_calls": [{"index": index, "function": arguments}]}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.sampled_tokens,
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _choice(index: int, turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.tool_calls
        ]
    stopped = "tool_calls" if turn.tool_calls else "stop"
    reason = "length" if turn.finish_reason is FinishReason.LENGTH else stopped
    return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}


def _check_tools(tools: Any) -> None:
    # vLLM's own check of `tool_choice` takes the shape of tools for granted.
    if tools is not None and not isinstance(tools, list):
        raise bad("tools", "must be a list")
    for i, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(f"tools[{i}]", "must be a function with a name")


def _check_tool_choice(choice: Any) -> None:
    if choice in (None, "auto", "none", "required"):
        return
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad("tool_choice", "must be `auto`, `none`, `required` or a named function")


def _check_format(form: Any) -> None:
    if form is None:
        return
    if not isinstance(form, dict) or form.get("type") not in FORMATS:
        raise ApiError(
            400,
            f"`response_format.type` must be one of {', '.join(FORMATS)}.",
            param="response_format",
        )
    if form["type"] == "json_schema":
        schema = form.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise bad("response_format.json_schema", "must be an object with a `schema`")


def _message(message: Any, where: str) -> dict[str, Any]:
    """One message in the form that chat templates take."""
    if not isinstance(message, dict):
        raise bad(where, "must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    normal: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": text_of(message.get("content"), f"{where}.content"),
    }
    content = message.get("content")
    if isinstance(content, list) and len(content) > 1:
        normal[PARTS] = [text_of([part], f"{where}.content") for part in content]
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(key)
        if isinstance(value, str):
            normal[key] = value
        elif value is not None:
            raise bad(f"{where}.{key}", "must be text or null")
    # Another name for it, which is in nobody's protocol: other clients may mean something else.
    if isinstance(message.get("reasoning"), str):
        normal.setdefault("reasoning_content", message["reasoning"])
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise bad(f"{where}.tool_calls", "must be a list")
        normal["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return normal


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(where, "must be a function call with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        # A malformed call of the model comes back as it was: templates take text too.
        with contextlib.suppress(ValueError):
            decoded = bodies.decode_text(arguments)
            arguments = decoded if isinstance(decoded, dict) else arguments
    elif not isinstance(arguments, dict):
        raise bad(f"{where}.function.arguments", "must be JSON as text")
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _in_call_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some harnesses send results of parallel calls in the order in which they finished."""
    ordered = list(messages)
    for i, message in enumerate(ordered):
        places = {call["id"]: place for place, call in enumerate(message.get("tool_calls", ()))}
        end = i + 1
        while places and end < len(ordered) and ordered[end]["role"] == "tool":
            end += 1
        ordered[i + 1 : end] = sorted(
            ordered[i + 1 : end],
            key=lambda result: places.get(result.get("tool_call_id", ""), len(places)),
        )
    return ordered
