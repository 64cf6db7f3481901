"""OpenAI Responses, stateless: the whole history is in every request.

A request becomes one of Chat Completions, the items of each assistant turn merged into one message.
An answer becomes items again, and a stream tells every item in one delta. The id of a turn goes out
as the `encrypted_content` of its reasoning, which clients send back as it is.

Invariants: unknown fields, items and tools are ignored; what refers to state that we do not keep is
a 400; a tool is called by the name and namespace under which the client declared it; sequence
numbers are 0 and 1 in `start`, 2 in every `keepalive`, and run on from 3 in `finish`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import orjson

from lightning_ray.gateway.dialects import Answer, ChatRequest, Head, Usage, openai_chat
from lightning_ray.gateway.errors import ApiError, bad
from lightning_ray.records import FinishReason, Turn

NAME = "openai_responses"
TOOL_CALL_PREFIX = openai_chat.TOOL_CALL_PREFIX

_KEEPALIVE, _FINISH = 2, 3  # sequence numbers: see the invariants
# Fields that name state on a server.
_STATE = ("previous_response_id", "conversation")
# The items of an assistant turn in the order in which we send them.
_PLACES = {"reasoning": 0, "message": 1, "function_call": 2}

# A function tool's namespace ("" for none) and name, by the name that the model sees.
Origins = dict[str, tuple[str, str]]


def parse(body: dict[str, Any]) -> ChatRequest:
    """Reads a request body.

    Raises:
        ApiError: 400, with the name of the field.
    """
    for key in _STATE:
        if body.get(key) is not None:
            raise bad(key, "is not supported: nothing is stored here; send the whole `input`")
    tools, origins = _tools(body.get("tools"))
    names = {origin: name for name, origin in origins.items()}
    messages, turn_ids = _messages(body, names)
    chat: dict[str, Any] = {
        "model": body.get("model"),
        "messages": messages,
        "stream": body.get("stream"),
        "max_tokens": _max_tokens(body.get("max_output_tokens")),
        "response_format": _response_format(body.get("text")),
        "tool_choice": _tool_choice(body.get("tool_choice"), tools, names),
        "tools": tools or None,
    }
    parallel = body.get("parallel_tool_calls")
    echo = {
        "instructions": body.get("instructions"),
        "max_output_tokens": chat["max_tokens"],
        "parallel_tool_calls": parallel if isinstance(parallel, bool) else True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
    }
    return replace(
        openai_chat.parse(chat),
        turn_ids=tuple(turn_ids),
        options={"echo": echo, "origins": origins},
    )


def respond(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    """The response body."""
    turn = answer.turns[0]
    cut = turn.finish_reason is FinishReason.LENGTH
    return _response(
        request,
        answer.head,
        status="incomplete" if cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        output=list(_items(turn, answer.head.call_id, request.options["origins"])),
        usage=_usage(answer.usage),
    )


def start(request: ChatRequest, head: Head) -> bytes:
    """A response without output, created and in progress."""
    response = _response(request, head, status="in_progress")
    return _event("response.created", 0, response=response) + _event(
        "response.in_progress", 1, response=response
    )


def keepalive(request: ChatRequest, head: Head) -> bytes:
    """Says again that the response is in progress: Codex does not count comments, and strict
    clients know no other event that changes nothing."""
    response = _response(request, head, status="in_progress")
    return _event("response.in_progress", _KEEPALIVE, response=response)


def finish(request: ChatRequest, answer: Answer) -> Iterator[bytes]:
    """The items, one after the other, and the whole response."""
    response = respond(request, answer)
    number = _FINISH
    for index, item in enumerate(response["output"]):
        for kind, fields in _item_events(item):
            yield _event(kind, number, output_index=index, **fields)
            number += 1
    yield _event(f"response.{response['status']}", number, response=response)


def failure(request: ChatRequest, head: Head, error: ApiError) -> bytes:
    """The response, failed. Codex tells by the code whether it may try again."""
    code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
    response = _response(
        request, head, status="failed", error={"code": code, "message": error.message}
    )
    return _event("response.failed", _FINISH, response=response)


def error(error: ApiError) -> dict[str, Any]:
    """The body of an answer other than 200."""
    return dict(error.body)


def _string(holder: Mapping[str, Any], key: str, where: str = "") -> str:
    value = holder.get(key)
    if not isinstance(value, str):
        raise bad(f"{where}.{key}".lstrip("."), "must be text")
    return value


def _tools(tools: Any) -> tuple[list[dict[str, Any]], Origins]:
    """The function tools in the form of Chat Completions, and where they come from."""
    found = list(_functions(tools, "", "tools"))
    uses = Counter(function["name"] for _, function in found)
    chat: dict[str, dict[str, Any]] = {}
    origins: Origins = {}
    for namespace, function in found:
        given = name = function["name"]
        if namespace and uses[given] > 1:
            name = f"{namespace}__{given}"
        origins[name] = (namespace, given)
        about = {key: function.get(key) for key in ("description", "parameters")}
        chat[name] = {"type": "function", "function": {"name": name, **about}}
    return list(chat.values()), origins


def _functions(tools: Any, namespace: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Function tools with their namespaces."""
    if tools is not None and not isinstance(tools, list):
        raise bad(where, "must be a list")
    for i, tool in enumerate(tools or ()):
        here = f"{where}[{i}]"
        if not isinstance(tool, dict):
            raise bad(here, "must be an object")
        if tool.get("type") == "namespace" and not namespace:
            yield from _functions(tool.get("tools"), _string(tool, "name", here), f"{here}.tools")
        elif tool.get("type") == "function":
            _string(tool, "name", here)
            if not isinstance(tool.get("description"), str | None):
                raise bad(f"{here}.description", "must be text or null")
            if not isinstance(tool.get("parameters"), dict | None):
                raise bad(f"{here}.parameters", "must be a JSON schema or null")
            yield namespace, tool


def _tool_choice(choice: Any, tools: list[Any], names: dict[tuple[str, str], str]) -> Any:
    if choice in (None, "auto", "none"):
        # Codex compacts with an empty list of tools and `auto`.
        return choice if tools else None
    if choice == "required":
        return choice
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise bad("tool_choice", "must be `auto`, `none`, `required` or a function")
    name = _string(choice, "name", "tool_choice")
    return {"type": "function", "function": {"name": names.get(("", name), name)}}


def _max_tokens(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise bad("max_output_tokens", "must be a whole number of at least 1")
    return value


def _response_format(text: Any) -> dict[str, Any] | None:
    if not isinstance(text, dict | None):
        raise bad("text", "must be an object")
    form = (text or {}).get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") not in openai_chat.FORMATS:
        raise bad("text.format.type", f"must be one of {', '.join(openai_chat.FORMATS)}")
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    if not isinstance(form.get("schema"), dict):
        raise bad("text.format.schema", "must be a JSON schema")
    name = _string(form, "name", "text.format")
    return {"type": "json_schema", "json_schema": {"name": name, "schema": form["schema"]}}


def _messages(
    body: dict[str, Any], names: dict[tuple[str, str], str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The history as messages of Chat Completions, and the turn ids of these."""
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise bad("input", "must be text or a list with at least one item")
    messages: list[dict[str, Any]] = []
    turn_ids: list[str] = []
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": _string(body, "instructions")})
        turn_ids.append("")
    last: int | None = None  # place of the last item in its assistant turn, if one is open
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise bad(where, "must be an object")
        kind = (
            "message" if "role" in item and not item.get("type") else _string(item, "type", where)
        )
        if kind == "item_reference":
            raise bad(where, "is not supported: nothing is stored here; send the item itself")
        if kind == "function_call_output":
            output = openai_chat.text_of(item.get("output"), f"{where}.output")
            call_id = _string(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            turn_ids.append("")
            last = None
        elif kind == "message" and item.get("role") != "assistant":
            messages.append(_plain(item, where))
            turn_ids.append("")
            last = None
        elif kind in _PLACES:
            place = _PLACES[kind]
            if last is None or (place <= last and kind != "function_call"):
                messages.append({"role": "assistant", "content": ""})
                turn_ids.append("")
            last = place
            turn_ids[-1] = _extend(messages[-1], item, kind, where, names) or turn_ids[-1]
    if not messages:
        raise bad("input", "has no message")
    return messages, turn_ids


def _plain(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        raise bad(f"{where}.role", "must be one of user, system, developer, assistant")
    return {
        "role": role,
        "content": openai_chat.text_of(item.get("content"), f"{where}.content"),
    }


def _extend(
    message: dict[str, Any],
    item: dict[str, Any],
    kind: str,
    where: str,
    names: dict[tuple[str, str], str],
) -> str:
    """Adds an item to the assistant message of its turn. Returns the id of the turn, or ""."""
    if kind == "message":
        message["content"] = openai_chat.text_of(item.get("content"), f"{where}.content")
    elif kind == "function_call":
        name = _string(item, "name", where)
        namespace = _string(item, "namespace", where) if item.get("namespace") else ""
        function = {
            "name": names.get((namespace, name), name),
            "arguments": _string(item, "arguments", where),
        }
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    else:
        text = openai_chat.text_of(item.get("content"), f"{where}.content")
        text = text or openai_chat.text_of(item.get("summary"), f"{where}.summary")
        if text:
            message["reasoning_content"] = text
        if item.get("encrypted_content") is not None:
            return _string(item, "encrypted_content", where)
    return ""


def _response(
    request: ChatRequest,
    head: Head,
    *,
    status: str,
    error: dict[str, str] | None = None,
    incomplete_details: dict[str, str] | None = None,
    output: list[dict[str, Any]] | None = None,
    usage: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "id": f"resp_{head.call_id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": error,
        "incomplete_details": incomplete_details,
        "model": request.model,
        "output": output or [],
        "usage": usage,
        "store": False,
        **request.options["echo"],
    }


def _items(turn: Turn, call_id: str, origins: Origins) -> Iterator[dict[str, Any]]:
    """A turn as output items."""
    if turn.reasoning:
        yield {
            "id": f"rs_{call_id}",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": turn.reasoning}],
            "encrypted_content": call_id,
        }
    if turn.content:
        yield {
            "id": f"msg_{call_id}",
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if turn.finish_reason is FinishReason.LENGTH else "completed",
            "content": [{"type": "output_text", "text": turn.content, "annotations": []}],
        }
    for index, call in enumerate(turn.tool_calls):
        namespace, name = origins.get(call.name, ("", call.name))
        item = {
            "id": f"fc_{call_id}_{index}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.call_id,
            "name": name,
            "arguments": call.arguments,
        }
        # Codex finds a tool by both.
        yield {**item, "namespace": namespace} if namespace else item


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events that tell an item, without their place in the stream."""
    where = {"item_id": item["id"]}
    begun = {"status": "in_progress"} if "status" in item else {}
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield "response.output_item.added", {"item": {**item, **begun, "arguments": ""}}
        yield "response.function_call_arguments.delta", {**where, "delta": arguments}
        done = {**where, "name": item["name"], "arguments": arguments}
        yield "response.function_call_arguments.done", done
    else:
        yield "response.output_item.added", {"item": {**item, **begun, "content": []}}
        for index, part in enumerate(item["content"]):
            here = {**where, "content_index": index}
            # Only text that is output has log-probs in the protocol.
            told = {**here, "logprobs": []} if part["type"] == "output_text" else here
            yield "response.content_part.added", {**here, "part": {**part, "text": ""}}
            yield f"response.{part['type']}.delta", {**told, "delta": part["text"]}
            yield f"response.{part['type']}.done", {**told, "text": part["text"]}
            yield "response.content_part.done", {**here, "part": part}
    yield "response.output_item.done", {"item": item}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
    }


def _event(kind: str, number: int, **fields: Any) -> bytes:
    data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
    return f"event: {kind}\n".encode() + b"data: " + data + b"\n\n"
