"""What the tests of the two OpenAI dialects share: the real SDK's client on one dialect, turns."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from lightning_ray.gateway.dialects import Answer, Head, Usage, openai_chat, openai_responses
from lightning_ray.gateway.errors import ApiError
from lightning_ray.records import FinishReason, ToolCall, Turn

HEAD = Head("abc", 1_700_000_000, 7)
USAGE = Usage(prompt_tokens=7, sampled_tokens=5, cached_tokens=3)
ARGUMENTS = '{ "command":  "ls \u00e9"}'  # odd spacing and a letter outside ASCII stay as they are
TURN = Turn(
    "I look.\n", "hm ", (ToolCall("call_1", "bash", ARGUMENTS), ToolCall("call_2", "bash", "{"))
)
PLAIN = Turn("hello")
CUT = Turn("hel", finish_reason=FinishReason.LENGTH)
EMPTY = Turn(None)
TURNS = {"a turn with everything": TURN, "text": PLAIN, "a cut text": CUT, "nothing": EMPTY}

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
TOOLS = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
USER = {"role": "user", "content": "hi"}


class Server:
    """The SDK's client, against one dialect that always gives the same turns."""

    def __init__(self, dialect, *turns, error=None, keepalives=0):
        self.dialect, self.turns, self.error, self.keepalives = dialect, turns, error, keepalives
        self.client = openai.OpenAI(
            base_url="http://gateway/v1",
            api_key="key",
            max_retries=0,
            http_client=httpx.Client(transport=httpx.MockTransport(self._serve)),
        )

    def _serve(self, http):
        try:
            self.request = self.dialect.parse(json.loads(http.content))
        except ApiError as error:
            return httpx.Response(error.status, json=self.dialect.error(error))
        answer = Answer(HEAD, self.turns, USAGE)
        if not self.request.stream:
            return httpx.Response(200, json=self.dialect.respond(self.request, answer))
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, content=b"".join(self._stream(answer)), headers=headers)

    def _stream(self, answer):
        yield self.dialect.start(self.request, HEAD)
        for _ in range(self.keepalives):
            yield self.dialect.keepalive(self.request, HEAD)
        if self.error:
            yield self.dialect.failure(self.request, HEAD, self.error)
        else:
            yield from self.dialect.finish(self.request, answer)


def events_of(dialect, body, turn):
    """The data of all events of a stream."""
    request = dialect.parse(body)
    stream = [
        dialect.start(request, HEAD),
        dialect.keepalive(request, HEAD),
        *dialect.finish(request, Answer(HEAD, (turn,) * request.samples, USAGE)),
    ]
    events = b"".join(stream).decode().removesuffix("\n\n").split("\n\n")
    lines = [event.splitlines() for event in events]
    if dialect is openai_responses:
        assert all(e.removeprefix("event: ") == json.loads(d[6:])["type"] for e, d in lines)
    return [event[-1].removeprefix("data: ") for event in lines]


def chat(**fields):
    return openai_chat.parse({"model": "m", "messages": [USER], **fields})


def responses(items, **fields):
    return openai_responses.parse({"model": "m", "input": items, **fields})


def expect_refusal(parse, param):
    with pytest.raises(ApiError) as caught:
        parse()
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param.split("[")[0].split(".")[0] in caught.value.message
