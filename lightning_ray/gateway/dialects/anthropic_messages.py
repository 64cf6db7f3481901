"""Anthropic Messages, with streaming: what Claude Code and the `anthropic` SDK speak.

A request is translated to a Chat Completions body and read by `openai_chat`; only errors, answers
and events have a form of their own. The signature of a thinking block is the id of the turn, and
comes back with the history. An answer and a stream are written from the same content blocks.

Invariants: a field that we do not know is ignored; a value that we cannot serve is a 400 that names
it as the client sent it; nothing that the model said is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import orjson

from lightning_ray.gateway import bodies
from lightning_ray.gateway.dialects import Answer, ChatRequest, Head, Usage, openai_chat
from lightning_ray.gateway.errors import ApiError, bad
from lightning_ray.records import FinishReason, Json, ToolCall, Turn

NAME = "anthropic_messages"
TOOL_CALL_PREFIX = "toolu_"
# Claude Code's attribution, a system block of its own, begins so. It differs between conversations:
# it would end the common prefix of all prompts at their first line.
BILLING_HEADER = "x-anthropic-billing-header"
# Levels around a call's arguments in the request that sends them back.
_AROUND = 5

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def parse(body: Json) -> ChatRequest:
    """Reads a request body.

    Raises:
        ApiError: 400, with the name of the field.
    """
    limit = body.get("max_tokens")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise bad("max_tokens", "must be an integer of at least 1")
    return _chat_request(body, {"max_tokens": limit})


def count_request(body: Json) -> ChatRequest:
    """Reads a request body of `/v1/messages/count_tokens`, which has no `max_tokens`.

    Raises:
        ApiError: 400, with the name of the field.
    """
    return _chat_request(body, {})


def respond(request: ChatRequest, answer: Answer) -> Json:
    """The response body."""
    content = _content(answer)
    return {
        **_message(request, answer.head),
        "content": content,
        "stop_reason": _stop_reason(answer.turns[0], content),
        "usage": _usage(answer.usage),
    }


def start(request: ChatRequest, head: Head) -> bytes:
    """The events that can be sent before anything is sampled."""
    return _event("message_start", message=_message(request, head))


def keepalive(request: ChatRequest, head: Head) -> bytes:
    """Claude Code counts a ping as a sign of life where CLAUDE_STREAM_IDLE_TIMEOUT_MS is set."""
    return _event("ping")


def finish(request: ChatRequest, answer: Answer) -> Iterator[bytes]:
    """The events after `start`, up to the terminal one."""
    content = _content(answer)
    for index, block in enumerate(content):
        empty, deltas = _as_deltas(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    stop = {"stop_reason": _stop_reason(answer.turns[0], content), "stop_sequence": None}
    yield _event("message_delta", delta=stop, usage=_usage(answer.usage))
    yield _event("message_stop")


def failure(request: ChatRequest, head: Head, error: ApiError) -> bytes:
    """The terminal event of a stream that fails after `start`."""
    return _event("error", error=_error(error))


def error(error: ApiError) -> Json:
    """The body of an answer other than 200."""
    return {"type": "error", "error": _error(error)}


# Requests.


def _chat_request(body: Json, chat: Json) -> ChatRequest:
    """Reads everything but `max_tokens`; `chat` is the beginning of the translated body."""
    messages, turn_ids = _messages(body)
    chat |= {"model": _str(body.get("model") or "", "model"), "messages": messages}
    stops = body.get("stop_sequences") or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise bad("stop_sequences", "must be a list of strings that are not empty")
    if stops:
        chat["stop"] = stops
    if tools := _tools(body.get("tools")):
        chat["tools"] = tools
    if choice := _tool_choice(body.get("tool_choice"), tools):
        chat["tool_choice"] = choice
    if (schema := _output_schema(body.get("output_config"))) is not None:
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": schema},
        }
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise bad("stream", "must be true or false")
    return replace(openai_chat.parse(chat), stream=stream, turn_ids=tuple(turn_ids))


def _messages(body: Json) -> tuple[list[Json], list[str]]:
    """The translated messages, and for each one the id of the turn that it is, or "".

    `openai_chat` puts tool results in the order of their calls, which leaves the ids in place."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise bad("messages", "must be a list with at least one message")
    messages = _system(body.get("system"), "system")
    turn_ids = [""] * len(messages)
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        role = _dict(message, where).get("role")
        content = message.get("content")
        turn_id = ""
        if role == "system":
            new = _system(content, f"{where}.content")
        elif role == "user":
            new = _user(content, f"{where}.content")
        elif role == "assistant":
            assistant, turn_id = _assistant(content, f"{where}.content")
            new = [assistant]
        else:
            raise bad(f"{where}.role", "must be user, assistant or system")
        messages += new
        turn_ids += [turn_id] * len(new)
    return messages, turn_ids


def _system(content: Any, where: str) -> list[Json]:
    """A system message; none if it would be empty."""
    texts = [_text(block, at) for block, at in _blocks(content, where)]
    if not isinstance(content, str):
        texts = [text for text in texts if not text.startswith(BILLING_HEADER)]
    text = _join(texts)
    return [{"role": "system", "content": text}] if text else []


def _user(content: Any, where: str) -> list[Json]:
    """The tool results in a user message, and then its text."""
    results, texts = [], []
    for block, at in _blocks(content, where):
        if block.get("type") != "tool_result":
            texts.append(_text(block, at))
            continue
        text = _join(_text(*part) for part in _blocks(block.get("content"), f"{at}.content"))
        results.append(
            {
                "role": "tool",
                "tool_call_id": _str(block.get("tool_use_id"), f"{at}.tool_use_id"),
                # Other errors say in their text that they are one.
                "content": text or ("Error" if block.get("is_error") else ""),
            }
        )
    text = _join(texts)
    return results if results and not text else [*results, {"role": "user", "content": text}]


def _assistant(content: Any, where: str) -> tuple[Json, str]:
    """An assistant message and the id of the turn that it is."""
    texts, thoughts, signatures, calls = [], [], set(), []
    for block, at in _blocks(content, where):
        match block.get("type"):
            case "thinking":
                thoughts.append(_str(block.get("thinking") or "", f"{at}.thinking"))
                signatures.add(_str(block.get("signature") or "", f"{at}.signature"))
            case "redacted_thinking":
                pass  # Encrypted by another model's server: it was never ours.
            case "tool_use":
                calls.append(_tool_call(block, at))
            case _:
                texts.append(_text(block, at))
    message: Json = {"role": "assistant", "content": _join(texts)}
    if thought := _join(thoughts):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    # Two signatures: the client has put two turns together, and the message is neither of them.
    return message, signatures.pop() if len(signatures) == 1 else ""


def _tool_call(block: Json, where: str) -> Json:
    name = _str(block.get("name"), f"{where}.name")
    arguments = _dict(block.get("input") or {}, f"{where}.input")
    return {
        "id": _str(block.get("id"), f"{where}.id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _tools(tools: Any) -> list[Json]:
    if not isinstance(tools, list | None):
        raise bad("tools", "must be a list")
    functions = []
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        kind, schema = _dict(tool, where).get("type"), tool.get("input_schema")
        if schema is None and kind not in (None, "custom"):
            continue  # A tool of Anthropic's servers, such as web_search: we have none.
        functions.append(
            {
                "type": "function",
                "function": {
                    "name": _str(tool.get("name"), f"{where}.name"),
                    "description": _str(tool.get("description") or "", f"{where}.description"),
                    "parameters": _dict(schema, f"{where}.input_schema"),
                },
            }
        )
    return functions


def _tool_choice(choice: Any, tools: list[Json]) -> str | Json | None:
    """The choice in OpenAI's form; None is the default."""
    names = [tool["function"]["name"] for tool in tools]
    match _dict(choice or {"type": "auto"}, "tool_choice").get("type"):
        case "auto":
            return None
        case "none":
            return "none" if names else None
        case "any" if names:
            return "required"
        case "tool" if choice.get("name") in names:
            return {"type": "function", "function": {"name": choice["name"]}}
        case "any" | "tool":
            raise bad("tool_choice", "asks for a tool that is not among `tools`")
    raise bad("tool_choice.type", "must be auto, any, tool or none")


def _output_schema(config: Any) -> Json | None:
    form = _dict(config or {}, "output_config").get("format")
    if form is None:
        return None
    if _dict(form, "output_config.format").get("type") != "json_schema":
        raise bad("output_config.format.type", "must be json_schema")
    return _dict(form.get("schema"), "output_config.format.schema")


def _blocks(content: Any, where: str) -> Iterator[tuple[Json, str]]:
    """The content blocks and their names."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, where
    elif isinstance(content, list):
        for i, block in enumerate(content):
            yield _dict(block, f"{where}[{i}]"), f"{where}[{i}]"
    elif content is not None:
        raise bad(where, "must be a string or a list of content blocks")


def _text(block: Json, where: str) -> str:
    if block.get("type") != "text":
        raise bad(where, f"is a block of type {block.get('type')!r}, which cannot be served here")
    return _str(block.get("text"), f"{where}.text")


def _join(texts: Iterable[str]) -> str:
    return "\n".join(text for text in texts if text)


def _dict(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise bad(where, "must be an object")
    return value


def _str(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad(where, "must be a string")
    return value


# Answers.


def _message(request: ChatRequest, head: Head) -> Json:
    """An answer before anything is sampled."""
    return {
        "id": f"msg_{head.call_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(Usage(head.prompt_tokens, 0)),
    }


def _usage(usage: Usage) -> Json:
    """The prompt is the sum of the three kinds of input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.sampled_tokens,
    }


def _content(answer: Answer) -> list[Json]:
    """The content blocks of the only sample there is in this protocol."""
    turn = answer.turns[0]
    blocks: list[Json] = []
    if turn.reasoning:
        signature = answer.head.call_id
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": signature})
    if turn.content:
        blocks.append({"type": "text", "text": turn.content})
    return blocks + [_tool_use(call) for call in turn.tool_calls]


def _tool_use(call: ToolCall) -> Json:
    """The block of a call; a text block if its arguments are no JSON object, which is all that this
    protocol can carry."""
    try:
        given = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        given = None
    if isinstance(given, dict) and bodies.is_shallow(given, bodies.MOST_LEVELS - _AROUND):
        return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": given}
    name = orjson.dumps(call.name).decode()
    return {"type": "text", "text": f'{{"name": {name}, "arguments": {call.arguments}}}'}


def _stop_reason(turn: Turn, content: list[Json]) -> str:
    if turn.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    return "tool_use" if any(block["type"] == "tool_use" for block in content) else "end_turn"


def _as_deltas(block: Json) -> tuple[Json, list[Json]]:
    """A content block as the block that a stream starts with, and what it adds."""
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    arguments = orjson.dumps(block["input"]).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def _error(error: ApiError) -> Json:
    other = "invalid_request_error" if error.status < 500 else "api_error"
    message, details = error.message, error.details
    if error.code == "context_length_exceeded" and {"prompt_tokens", "limit"} <= details.keys():
        # Claude Code knows by this wording that it must compact.
        message = (
            f"prompt is too long: {details['prompt_tokens']} tokens > {details['limit']} maximum"
        )
    return {"type": _ERROR_TYPES.get(error.status, other), "message": message}
