"""OpenAI Chat Completions, without streaming.

Invariant: fields that we do not know are ignored; a value that we cannot serve is a 400 that names
it.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from pydantic import ValidationError

from lightning_ray.gateway.dialects import Answer, ChatRequest, Turn
from lightning_ray.gateway.errors import ApiError
from lightning_ray.records import FinishReason

NAME = "openai_chat"
ROLES = ("system", "developer", "user", "assistant", "tool")
# Choices per request: each one is a sequence in the engine, so an absurd number must not reach it.
MOST_CHOICES = 64


def parse(body: dict[str, Any]) -> ChatRequest:
    """Reads a request body.

    Raises:
        ApiError: 400, with the name of the field.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(
            400, "`messages` must be a list with at least one message.", param="messages"
        )
    if body.get("stream"):
        raise ApiError(400, "Streaming is not supported yet; send `stream: false`.", param="stream")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ApiError(400, "`tool_choice` must be `auto` or `none`.", param="tool_choice")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise ApiError(400, "`response_format` must be `text`.", param="response_format")
    normal = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    try:
        parsed = ChatCompletionRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or None
        raise ApiError(400, f"{where or 'body'}: {first['msg']}", param=where) from error
    samples = 1 if parsed.n is None else parsed.n
    if not 1 <= samples <= MOST_CHOICES:
        raise ApiError(400, f"`n` must be between 1 and {MOST_CHOICES}.", param="n")
    max_tokens = parsed.max_completion_tokens or parsed.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(400, "`max_tokens` must be at least 1.", param="max_tokens")
    stop = [parsed.stop] if isinstance(parsed.stop, str) else parsed.stop or []
    return ChatRequest(
        messages=normal,
        tools=[tool.model_dump() for tool in parsed.tools] if parsed.tools else None,
        model=parsed.model or "",
        samples=samples,
        max_tokens=max_tokens,
        stop=tuple(stop),
        parsed=parsed,
    )


def respond(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    """The response body."""
    usage = answer.usage
    return {
        "id": answer.response_id,
        "object": "chat.completion",
        "created": answer.created,
        "model": request.model,
        "choices": [_choice(index, turn) for index, turn in enumerate(answer.turns)],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.sampled_tokens,
            "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
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


def _message(message: Any, where: str) -> dict[str, Any]:
    """One message in the form that chat templates take."""
    if not isinstance(message, dict):
        raise ApiError(400, f"`{where}` must be an object.", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(
            400, f"`{where}.role` must be one of {', '.join(ROLES)}.", param=f"{where}.role"
        )
    normal: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content"), f"{where}.content"),
    }
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(key), str):
            normal[key] = message[key]
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise ApiError(
                400, f"`{where}.tool_calls` must be a list.", param=f"{where}.tool_calls"
            )
        normal["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return normal


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            text = (
                part
                if isinstance(part, str)
                else part.get("text")
                if isinstance(part, dict)
                else None
            )
            if not isinstance(text, str):
                raise ApiError(400, f"`{where}` has a part that is not text.", param=where)
            parts.append(text)
        return "\n".join(parts)
    raise ApiError(400, f"`{where}` must be text, a list of text parts, or null.", param=where)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"`{where}` must be a function call with a name.", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        # A malformed call of the model comes back as it was: templates take text too.
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
