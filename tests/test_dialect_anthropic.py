"""The Anthropic Messages dialect, judged by the `anthropic` SDK: it writes the requests, and its
accumulators and types read the answers."""

from __future__ import annotations

import anthropic
import httpx2
import orjson
import pytest

from lightning_ray.gateway.dialects import Answer, Head, Usage
from lightning_ray.gateway.dialects import anthropic_messages as dialect
from lightning_ray.gateway.errors import ApiError, context_overflow
from lightning_ray.records import FinishReason, ToolCall, Turn

HEAD = Head(call_id="c1", created=1, prompt_tokens=100)
TOOL = {"name": "bash", "description": "Runs.", "input_schema": {"type": "object"}}
HELLO = [{"role": "user", "content": "hello"}]
LS, PWD = ToolCall("toolu_1", "bash", '{ "cmd":  "ls"}'), ToolCall("toolu_2", "bash", "{}")


class Gateway:
    """Answers every request with `turn`, or with `error`; keeps what it has parsed."""

    def __init__(self, turn: Turn, error: ApiError | None = None) -> None:
        self.answer = Answer(HEAD, (turn,), Usage(100, 7, cached_tokens=64))
        self.error = error
        self.requests = []
        transport = httpx2.MockTransport(self._serve)
        self.client = anthropic.Anthropic(
            api_key="key",
            base_url="http://gateway/rollout/a",
            max_retries=0,
            http_client=httpx2.Client(transport=transport),
            _strict_response_validation=True,
        )

    def ask(self, messages=HELLO, **fields):
        return self.client.messages.create(
            model="m", max_tokens=50, messages=messages, **{"tools": [TOOL], **fields}
        )

    def stream(self, **fields):
        """The accumulated message, and the types of the events that made it."""
        with self.client.messages.stream(
            model="m", max_tokens=50, messages=HELLO, tools=[TOOL], **fields
        ) as stream:
            kinds = [event.type for event in stream]
            return stream.get_final_message(), kinds

    def _serve(self, http: httpx2.Request) -> httpx2.Response:
        try:
            request = dialect.parse(orjson.loads(http.content))
        except ApiError as error:
            return httpx2.Response(error.status, json=dialect.error(error))
        self.requests.append(request)
        if not request.stream:
            if self.error:
                return httpx2.Response(self.error.status, json=dialect.error(self.error))
            body = orjson.dumps(dialect.respond(request, self.answer))
            return httpx2.Response(200, content=body, headers={"content-type": "application/json"})
        events = dialect.start(request, HEAD) + dialect.keepalive(request, HEAD)
        if self.error:
            events += dialect.failure(request, HEAD, self.error)
        else:
            events += b"".join(dialect.finish(request, self.answer))
        return httpx2.Response(200, content=events, headers={"content-type": "text/event-stream"})


def parse(*messages, **fields):
    return dialect.parse({"model": "m", "max_tokens": 50, "messages": list(messages), **fields})


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def text(value):
    return {"type": "text", "text": value}


def use(call_id, **given):
    return {"type": "tool_use", "id": call_id, "name": "bash", "input": given}


def result(call_id, content=None, **fields):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


# Answers.

FULL = Turn("Let me see.\n", "think ", (LS, PWD))


def test_an_answer_has_the_blocks_that_the_sdk_expects():
    message = Gateway(FULL).ask()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, said, ls, pwd = message.content
    assert (thinking.thinking, thinking.signature) == ("think ", "c1")
    assert said.text == "Let me see.\n"
    assert (ls.id, ls.name, ls.input) == ("toolu_1", "bash", {"cmd": "ls"})
    assert (pwd.id, pwd.input) == ("toolu_2", {})
    assert (message.id, message.model, message.stop_reason) == ("msg_c1", "m", "tool_use")


@pytest.mark.parametrize(
    "turn",
    [
        FULL,
        Turn("hi"),
        Turn(None, "only thought", finish_reason=FinishReason.LENGTH),
        Turn("", None, (PWD,)),
        Turn(None),
        Turn("", "", (ToolCall("toolu_3", "bash", '{"cmd": '), LS)),
    ],
)
def test_a_stream_adds_up_to_the_answer_without_streaming(turn):
    gateway = Gateway(turn)
    streamed, kinds = gateway.stream()
    assert streamed.to_dict(exclude_none=True) == gateway.ask().to_dict(exclude_none=True)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert [request.stream for request in gateway.requests] == [True, False]


def test_a_raw_stream_has_the_prompt_in_its_first_event_and_ends_every_block():
    request = parse(*HELLO, stream=True)
    events = dialect.start(request, HEAD) + b"".join(dialect.finish(request, Gateway(FULL).answer))
    frames = [frame.split("\n") for frame in events.decode().split("\n\n")[:-1]]
    data = [orjson.loads(line.removeprefix("data: ")) for _, line in frames]
    assert all(
        name == f"event: {body['type']}" for (name, _), body in zip(frames, data, strict=True)
    )
    assert data[0]["message"]["usage"]["input_tokens"] == 100
    started, stopped = (
        [body["index"] for body in data if body["type"] == f"content_block_{what}"]
        for what in ("start", "stop")
    )
    assert started == stopped == [0, 1, 2, 3]
    assert data[-2]["usage"]["output_tokens"] == 7


def test_usage_counts_cached_tokens_apart():
    gateway = Gateway(FULL)
    for message in (gateway.ask(), gateway.stream()[0]):
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (36, 64)
        assert (usage.cache_creation_input_tokens, usage.output_tokens) == (0, 7)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (Turn("hi"), "end_turn"),
        (Turn("hi", finish_reason=FinishReason.ABORT), "end_turn"),
        (Turn("hi", finish_reason=FinishReason.LENGTH), "max_tokens"),
        (Turn("", None, (LS,)), "tool_use"),
        (Turn("", None, (LS,), FinishReason.LENGTH), "max_tokens"),
        (Turn("", None, (ToolCall("toolu_1", "bash", "[1]"),)), "end_turn"),
    ],
)
def test_the_stop_reason_says_why_the_turn_ended(turn, reason):
    assert Gateway(turn).ask().stop_reason == reason


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        '{"cmd": ',
        "[1]",
        '"ls"',
        '{"n": NaN}',
        '{"s": "\\ud800"}',
        '{"a":' * 300 + "1" + "}" * 300,
    ],
    ids=["empty", "cut", "list", "string", "nan", "surrogate", "deep"],
)
def test_arguments_that_are_no_json_object_come_back_as_text(arguments):
    gateway = Gateway(Turn("Look:", None, (ToolCall("toolu_1", "bash", arguments),)))
    for message in (gateway.ask(), gateway.stream()[0]):
        said, call = message.content
        assert said.text == "Look:"
        assert call.text == f'{{"name": "bash", "arguments": {arguments}}}'


# Requests.


def test_a_turn_that_comes_back_is_known_by_its_signature():
    gateway = Gateway(FULL)
    for answer in (gateway.ask(), gateway.stream()[0]):
        blocks = [block.to_dict() for block in answer.content]
        gateway.ask(
            [*HELLO, assistant(*blocks), user(result("toolu_2", "/"), result("toolu_1", "a b"))],
            system="Be brief.",
        )
        request = gateway.requests[-1]
        system, hello, turn, ls, pwd = request.messages
        assert request.turn_ids == ("", "", "c1", "", "")
        assert (system["content"], hello["content"]) == ("Be brief.", "hello")
        assert (turn["content"], turn["reasoning_content"]) == ("Let me see.\n", "think ")
        assert [call["id"] for call in turn["tool_calls"]] == ["toolu_1", "toolu_2"]
        assert turn["tool_calls"][0]["function"] == {"name": "bash", "arguments": {"cmd": "ls"}}
        assert (ls["tool_call_id"], ls["content"]) == ("toolu_1", "a b")
        assert (pwd["tool_call_id"], pwd["content"]) == ("toolu_2", "/")


def test_messages_with_signatures_of_two_turns_are_no_turn():
    thoughts = [{"type": "thinking", "thinking": "t", "signature": s} for s in ("c1", "c2")]
    assert parse(*HELLO, assistant(*thoughts), *HELLO).turn_ids == ("", "", "")
    assert parse(*HELLO, assistant(thoughts[0], text("a")), *HELLO).turn_ids == ("", "c1", "")
    assert parse(*HELLO, assistant(text("a")), *HELLO).turn_ids == ("", "", "")


def test_system_text_may_be_a_string_or_blocks_and_loses_the_billing_header():
    blocks = [text("x-anthropic-billing-header: cc_version=2.f66"), text("You code."), text("Now.")]
    assert parse(*HELLO, system=blocks).messages[0]["content"] == "You code.\nNow."
    assert parse(*HELLO, system="You code.").messages[0]["content"] == "You code."
    for nothing in (None, "", blocks[:1]):
        assert [message["role"] for message in parse(*HELLO, system=nothing).messages] == ["user"]


def test_system_messages_stay_where_they_are_in_the_history():
    request = parse(
        *HELLO,
        {"role": "system", "content": "At the second place."},
        assistant(use("toolu_1")),
        user(result("toolu_1", "ok")),
        {"role": "system", "content": [text("After a result.")]},
    )
    roles = [message["role"] for message in request.messages]
    assert roles == ["user", "system", "assistant", "tool", "system"]
    assert request.messages[-1]["content"] == "After a result."
    assert len(request.turn_ids) == len(request.messages)


def test_tool_results_come_in_the_order_of_the_calls_and_before_the_text():
    request = parse(
        *HELLO,
        assistant(text("a"), use("t1"), use("t2"), use("t3")),
        user(
            text("And now?"),
            result("elsewhere", "z"),
            result("t3", [text("three"), text("lines")], is_error=False),
            result("t1", is_error=True),
            result("t2"),
        ),
    )
    got = [(message["role"], message.get("tool_call_id")) for message in request.messages[2:]]
    ids = ["t1", "t2", "t3", "elsewhere"]
    assert got == [*(("tool", call_id) for call_id in ids), ("user", None)]
    contents = [message["content"] for message in request.messages[2:]]
    assert contents == ["Error", "", "three\nlines", "z", "And now?"]


def test_redacted_thinking_is_dropped_and_fields_of_blocks_that_we_do_not_know_are_ignored():
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {**text("a"), "cache_control": {"type": "ephemeral"}, "citations": None},
        {**use("t1"), "caller": {"type": "direct"}},
    ]
    request = parse(*HELLO, assistant(*blocks), user(result("t1", "ok", cache_control={})))
    assert request.messages[1]["content"] == "a"
    assert "reasoning_content" not in request.messages[1]


def test_fields_of_claude_code_that_we_do_not_need_are_ignored():
    request = parse(
        *HELLO,
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": "{}"},
        betas=["context-1m"],
        temperature=0.3,
        tools=[],
        no_such_field=1,
    )
    assert (request.model, request.samples, request.max_tokens) == ("m", 1, 50)
    assert (request.tools, request.stop, request.stream) == (None, (), False)
    assert not request.constrained


def test_tools_of_anthropic_s_servers_are_ignored():
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    request = parse(*HELLO, tools=[search, {**TOOL, "type": "custom"}], stop_sequences=["END"])
    (tool,) = request.tools
    assert tool["function"]["name"] == "bash"
    assert tool["function"]["parameters"] == {"type": "object"}
    assert request.stop == ("END",)


@pytest.mark.parametrize(
    ("choice", "constrained"),
    [("auto", False), ("none", False), ("any", True), ("tool", True)],
)
def test_a_tool_choice_constrains_the_answer_where_it_asks_for_a_call(choice, constrained):
    given = {"type": choice, "disable_parallel_tool_use": True}
    request = parse(*HELLO, tools=[TOOL], tool_choice={**given, "name": "bash"})
    assert request.constrained is constrained


def test_an_output_schema_constrains_the_answer():
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    request = parse(*HELLO, tools=[], output_config={"effort": "low", "format": form})
    assert request.constrained
    assert request.parsed.response_format.json_schema.json_schema == schema


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": 0}),
        ("model", {"model": 3}),
        ("stream", {"stream": "yes"}),
        ("messages", {"messages": "hello"}),
        ("messages[0]", {"messages": ["hello"]}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": ""}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
        ("messages[0].content[0]", {"messages": [user("hello")]}),
        ("messages[0].content[1]", {"messages": [user(text("see"), IMAGE)]}),
        ("messages[0].content[0].content[0]", {"messages": [user(result("t1", [IMAGE]))]}),
        ("messages[0].content[0].tool_use_id", {"messages": [user(result(None))]}),
        ("messages[0].content[0].text", {"messages": [user(text(None))]}),
        ("messages[0].content[0]", {"messages": [user(use("t1"))]}),
        ("messages[0].content[0].id", {"messages": [assistant(use(None))]}),
        ("messages[0].content[0].input", {"messages": [assistant({**use("t"), "input": "ls"})]}),
        ("system[0]", {"system": [IMAGE]}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("tools", {"tools": {}}),
        ("tools[0].name", {"tools": [{"input_schema": {}}]}),
        ("tools[0].input_schema", {"tools": [{"name": "bash"}]}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}),
        ("tool_choice", {"tool_choice": "auto"}),
        ("tool_choice.type", {"tool_choice": {"type": "perhaps"}}),
        ("output_config.format.type", {"output_config": {"format": {"type": "xml"}}}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
    ],
)
def test_a_malformed_field_is_a_400_that_names_it(field, body):
    with pytest.raises(ApiError) as caught:
        dialect.parse({"model": "m", "max_tokens": 50, "messages": HELLO, **body})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert f"`{field}`" in caught.value.message


def test_counting_tokens_needs_no_max_tokens():
    request = dialect.count_request({"model": "m", "messages": HELLO, "tools": [TOOL]})
    assert (request.max_tokens, request.messages[0]["content"]) == (None, "hello")
    with pytest.raises(ApiError, match="max_tokens"):
        dialect.parse({"model": "m", "messages": HELLO})


# Errors.


@pytest.mark.parametrize(
    ("status", "kind", "exception"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (403, "permission_error", anthropic.PermissionDeniedError),
        (404, "not_found_error", anthropic.NotFoundError),
        (409, "invalid_request_error", anthropic.ConflictError),
        (410, "not_found_error", anthropic.APIStatusError),
        (413, "request_too_large", anthropic.APIStatusError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.InternalServerError),
    ],
)
def test_an_error_has_anthropic_s_type_for_its_status(status, kind, exception):
    with pytest.raises(exception) as caught:
        Gateway(FULL, ApiError(status, "Why.")).ask()
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "Why."}}


def test_a_stream_that_fails_ends_with_an_error_event():
    with pytest.raises(anthropic.APIStatusError) as caught:
        Gateway(FULL, ApiError(503, "No engine.")).stream()
    assert caught.value.body["error"] == {"type": "overloaded_error", "message": "No engine."}


def test_a_prompt_that_is_too_long_is_told_in_anthropic_s_words():
    error = context_overflow(limit=600, prompt_tokens=700, max_tokens=50)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 700 tokens > 600 max"):
        Gateway(FULL, error).ask()
