"""The sampled turns of an attempt are found again in what harnesses send back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.gateway import continuity, sidecalls
from lightning_ray.gateway.dialects import ChatRequest
from lightning_ray.records import Branch, Call, FinishReason, SideCall, ToolCall, Turn

SYSTEM = {"role": "system", "content": "You have a shell."}
TASK = {"role": "user", "content": "Fix the bug."}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
BASH = Turn(
    "I will  look.",
    reasoning="think",
    tool_calls=(
        ToolCall("call_1", "bash", '{ "command":  "ls" }'),
        ToolCall("call_2", "bash", '{"command": "pwd"}'),
    ),
)


def returned(turn: Turn, **changes) -> dict:
    """The message of `turn` as a harness that re-serialises and trims would send it back."""
    message = {
        "role": "assistant",
        "content": (turn.content or "").strip(),
        "reasoning_content": turn.reasoning,
        "tool_calls": [
            {"id": c.call_id, "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in turn.tool_calls
        ],
    }
    return {k: v for k, v in (message | changes).items() if v}


def results(*order: str) -> list[dict]:
    return [{"role": "tool", "tool_call_id": i, "content": f"result of {i}"} for i in order]


def call(seq: int, messages: list[dict], turn: Turn, side: SideCall | None = None) -> Call:
    return Call(
        call_id=f"c{seq}",
        attempt_id="a",
        seq=seq,
        prompt=np.array([1], np.int32),
        tokens=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        spans=(),
        finish_reason=FinishReason.STOP,
        turn=turn,
        history=continuity.digests(messages, TOOLS),
        side=side,
    )


def look(messages: list[dict], calls: list[Call], turn_ids: tuple[str, ...] = ()):
    history = continuity.digests(messages, TOOLS)
    match = continuity.find(messages, history, turn_ids, calls)
    return match, continuity.branch_of(messages, history, match, calls)


START = [SYSTEM, TASK]
FIRST = call(0, START, BASH)
SECOND_MESSAGES = [*START, returned(BASH), *results("call_1", "call_2")]
SECOND = call(1, SECOND_MESSAGES, Turn("Done."))


def test_the_first_call_of_an_attempt_is_a_root():
    assert look(START, []) == (None, Branch.ROOT)


def test_a_turn_is_found_although_its_json_and_white_space_changed():
    match, branch = look(SECOND_MESSAGES, [FIRST])
    assert (match.call, match.index, match.lost_reasoning) == (FIRST, 2, False)
    assert branch is Branch.CONTINUED


def test_the_deepest_turn_is_taken():
    messages = [*SECOND_MESSAGES, returned(Turn("Done.")), {"role": "user", "content": "More."}]
    match, branch = look(messages, [FIRST, SECOND])
    assert (match.call, branch) == (SECOND, Branch.CONTINUED)


def test_a_turn_with_the_right_id_and_another_meaning_is_not_the_turn():
    edited = returned(BASH, content="I will not look.")
    match, branch = look([*START, edited, *results("call_1", "call_2")], [FIRST])
    assert (match, branch) == (None, Branch.EDITED)


def test_dropped_reasoning_is_noticed():
    messages = [*START, returned(BASH, reasoning_content=None), *results("call_1", "call_2")]
    match, _ = look(messages, [FIRST])
    assert match.lost_reasoning


def test_of_two_samples_that_mean_the_same_the_ids_decide():
    calls = [("x", '{"command":"ls"}'), ("y", '{"command":"pwd"}')]
    same = tuple(ToolCall(name, "bash", arguments) for name, arguments in calls)
    twin = Turn(BASH.content, BASH.reasoning, same)
    calls = [FIRST, call(1, START, twin)]
    assert look(SECOND_MESSAGES, calls)[0].call is FIRST
    match, _ = look([*START, returned(twin), *results("x", "y")], calls)
    assert match.call.seq == 1
    plain = [call(0, START, Turn("Hi.")), call(1, START, Turn("Hi."))]
    match, _ = look([*START, returned(Turn("Hi.")), TASK], plain, turn_ids=("", "", "c0", ""))
    assert match.call.seq == 0


def test_an_assistant_message_that_was_never_sampled_is_context():
    messages = [*START, {"role": "assistant", "content": "Got it."}, TASK]
    assert look(messages, [FIRST])[0] is None
    # Behind a sampled turn: that one is still found.
    messages = [*SECOND_MESSAGES, {"role": "assistant", "content": "Got it."}, TASK]
    match, branch = look(messages, [FIRST])
    assert match.call is FIRST
    assert branch is not Branch.CONTINUED


LATER = [*SECOND_MESSAGES, returned(Turn("Done.")), {"role": "user", "content": "More."}]


@pytest.mark.parametrize(
    ("messages", "branch"),
    [
        ([SYSTEM, {"role": "user", "content": "Fix it!"}, *LATER[2:]], Branch.EDITED),
        ([m for m in LATER if m.get("tool_call_id") != "call_1"], Branch.DROPPED),
        ([TASK, SYSTEM, *LATER[2:]], Branch.REORDERED),
        ([SYSTEM, {"role": "user", "content": "Look for files."}], Branch.ROOT),
    ],
)
def test_a_branch_has_a_named_cause(messages, branch):
    _, found = look(messages, [FIRST, SECOND])
    assert found is branch


def test_a_history_that_was_replaced_by_its_summary_is_compacted():
    summary = call(2, [*LATER, TASK], Turn("The bug is in  parse()."), side=SideCall.COMPACTION)
    carried_on = [SYSTEM, {"role": "user", "content": "So far: The bug is in parse(). Go on."}]
    assert look(carried_on, [FIRST, SECOND, summary])[1] is Branch.COMPACTED


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(
    st.text(max_size=20),
    st.lists(st.tuples(st.text(max_size=4), st.dictionaries(st.text(max_size=3), json_values))),
    st.sampled_from([None, 2]),
)
def test_how_a_turn_is_written_does_not_change_its_digest(text, calls, indent):
    turn = Turn(
        text,
        tool_calls=tuple(ToolCall(f"i{n}", f, json.dumps(a)) for n, (f, a) in enumerate(calls)),
    )
    message = {
        "role": "assistant",
        "content": f"\n {text} ",
        "tool_calls": [
            {"function": {"name": f, "arguments": json.dumps(a, indent=indent, sort_keys=True)}}
            for f, a in calls
        ],
    }
    assert continuity.digest(message) == continuity.turn_digest(turn)


def test_a_malformed_call_means_its_text():
    turn = Turn(None, tool_calls=(ToolCall("i", "bash", '{"command": '),))
    function = {"name": "bash", "arguments": '{"command":'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    assert continuity.digest(message) == continuity.turn_digest(turn)


def request(*messages: tuple[str, str], tools=None) -> ChatRequest:
    made = [{"role": role, "content": text} for role, text in messages]
    return ChatRequest(made, tools, "m", 1, None, ())


@pytest.mark.parametrize(
    ("headers", "asked", "had_tools", "kind"),
    [
        ({}, request(("system", "You are a title generator."), ("user", "x")), False, "title"),
        (
            {},
            request(("system", "Generate a concise, sentence-case title for it"), ("user", "x")),
            False,
            "title",
        ),
        (
            {},
            request(("user", "You are performing a CONTEXT CHECKPOINT COMPACTION. Write")),
            True,
            "compaction",
        ),
        (
            {"x-codex-turn-metadata": '{"request_kind": "compaction"}'},
            request(("user", "x"), tools=TOOLS),
            True,
            "compaction",
        ),
        ({}, request(("system", "You are a context summarization agent"), ("user", "x")), False,
         "compaction"),
        ({}, request(("user", "What is a good name?")), True, "other"),
        ({}, request(("system", "You control a shell."), ("user", "x")), False, None),
        ({}, request(("system", "Give the title of the summary"), ("user", "x"), tools=TOOLS), True,
         None),
        ({"x-codex-turn-metadata": "no JSON"}, request(("user", "x")), False, None),
    ],
)  # fmt: skip
def test_side_calls_are_told_by_headers_and_shape(headers, asked, had_tools, kind):
    found = sidecalls.classify(headers, asked, had_tools)
    assert found == (SideCall(kind) if kind else None)
