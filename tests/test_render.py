"""Prompts: what `vllm serve` would render, and sampled turns kept as they are. Templates of five
kinds, written from their public form, with a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support import make_tokenizer

from lightning_ray.config import load
from lightning_ray.gateway.dialects import openai_chat
from lightning_ray.gateway.errors import ApiError
from lightning_ray.gateway.planning import Memory, Planner
from lightning_ray.gateway.render import Renderer
from lightning_ray.records import Call, FinishReason, PolicyVersion, Span, Split
from lightning_ray.store.attempts import AttemptInfo

TEMPLATES = Path(__file__).with_name("templates")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8,
    "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 512,
    "max_position_embeddings": 4096,
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]


def tool_call(call_id: str, command: str, as_object: bool = False) -> dict:
    arguments = {"command": command}
    return {
        "id": call_id,
        "type": "function",
        "function": {
            "name": "bash",
            "arguments": arguments if as_object else json.dumps(arguments),
        },
    }


def parts(text: str) -> list[dict]:
    return [{"type": "text", "text": text}]


HISTORIES = {
    "plain": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
    ],
    "content is null and a list of parts": [
        {"role": "system", "content": parts("Be brief.")},
        {"role": "user", "content": [*parts("hi"), *parts("there")]},
        {"role": "assistant", "content": None, "tool_calls": [tool_call("1", "ls")]},
        {"role": "tool", "tool_call_id": "1", "content": parts("a.txt")},
    ],
    "several tool messages in a row": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "look", "tool_calls": [tool_call("1", "ls"),
                                                                tool_call("2", "pwd")]},
        {"role": "tool", "tool_call_id": "1", "content": "a.txt"},
        {"role": "tool", "tool_call_id": "2", "content": "/tmp"},
    ],
    "thinking in an earlier turn": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning_content": "hm"},
        {"role": "user", "content": "bye"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    """A renderer for each template."""
    made = {}
    for path in sorted(TEMPLATES.glob("*.jinja")):
        folder = tmp_path_factory.mktemp(path.stem)
        tokenizer = make_tokenizer(folder)
        tokenizer.chat_template = path.read_text()
        tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|im_start|>", "<|eot|>", "<think>", "</think>"]}
        )
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        end = "<|eot|>" if path.stem in ("llama3", "deepseek") else "<|im_end|>"
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids(end)})
        )
        made[path.stem] = (folder, Renderer(str(folder), load(None, []).model))
    return made


def request(messages: list[dict], tools: list[dict] | None = None):
    body = {"model": "m", "messages": messages} | ({"tools": tools} if tools else {})
    return openai_chat.parse(body)


def vllm_prompt(folder: Path, messages: list[dict], tools: list[dict] | None) -> list[int]:
    """The prompt as vLLM's own code makes it."""
    from vllm.config import ModelConfig
    from vllm.entrypoints.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template
    from vllm.tokenizers import get_tokenizer

    config = ModelConfig(model=str(folder), tokenizer=str(folder), dtype="float32")
    tokenizer = get_tokenizer(str(folder))
    form = resolve_chat_template_content_format(
        chat_template=None, tools=tools, given_format="auto", tokenizer=tokenizer,
        model_config=config,
    )  # fmt: skip
    conversation, _, _ = parse_chat_messages(messages, config, content_format=form)
    prompt = safe_apply_chat_template(
        config, tokenizer, conversation, tools=tools, add_generation_prompt=True, tokenize=False
    )
    return tokenizer.encode(prompt, add_special_tokens=False)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("template", ["qwen", "llama3", "parts", "deepseek", "thinking"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_a_prompt_is_token_for_token_what_vllm_renders(renderers, template, history, tools):
    folder, renderer = renderers[template]
    messages = HISTORIES[history]
    if template == "llama3" and history == "several tool messages in a row":
        with pytest.raises(ApiError, match="single tool-calls"):
            renderer.render(request(messages, tools))
        with pytest.raises(ValueError, match="single tool-calls"):
            vllm_prompt(folder, messages, tools)
        return
    ours = renderer.render(request(messages, tools)).tolist()
    assert ours == vllm_prompt(folder, messages, tools)


def test_tool_arguments_may_be_text_or_an_object(renderers):
    _, renderer = renderers["qwen"]
    prompts = []
    for as_object in (False, True):
        call = tool_call("1", "ls", as_object)
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "1", "content": "a"}
        prompts.append(renderer.render(request([*HISTORIES["plain"][:2], said, result], TOOLS)))
    assert np.array_equal(*prompts)


def test_a_template_without_tools_refuses_them_by_name(renderers):
    _, renderer = renderers["no_tools"]
    with pytest.raises(ApiError, match="Only user and assistant roles") as refused:
        renderer.render(request(HISTORIES["several tool messages in a row"]))
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_a_system_message_in_between_keeps_its_place(renderers):
    _, renderer = renderers["qwen"]
    messages = [*HISTORIES["plain"][:2], {"role": "system", "content": "Note this."}]
    text = renderer.tokenizer.decode(renderer.render(request(messages)).tolist())
    assert text.endswith("hi<|im_end|>\n<|im_start|>user\nNote this.<|im_end|>\n"
                         "<|im_start|>assistant\n")  # fmt: skip


def sampled(renderer, messages, text, *, reasoning_parser=False, ended=True, tools=None) -> Call:
    asked = request(messages, tools)
    prompt = renderer.render(asked)
    end = [next(iter(renderer.end_tokens))] if ended else []
    tokens = np.array([*renderer.tokenizer.encode(text, add_special_tokens=False), *end], np.int32)
    reason = FinishReason.STOP if ended else FinishReason.LENGTH
    turn, _ = renderer.parse(asked, tokens, reason)
    return Call("c", "a", 0, prompt, tokens, np.zeros(len(tokens), np.float32),
                (Span(PolicyVersion("l", 0), len(tokens)),), reason, turn=turn)  # fmt: skip


def test_what_was_said_ends_before_the_first_stop_string(renderers):
    _, renderer = renderers["qwen"]
    asked = request(HISTORIES["plain"][:2])
    tokens = np.array(renderer.tokenizer.encode("ls\nEND\nObservation"), np.int32)
    stop = ("Observation", "END")
    turn, text = renderer.parse(asked, tokens, FinishReason.STOP, stop=stop)
    assert turn.content == text == "ls\n"
    turn, _ = renderer.parse(asked, tokens, FinishReason.LENGTH, stop=stop)
    assert turn.content == "ls\nEND\nObservation"


START = HISTORIES["plain"][:2]
MORE = {"role": "user", "content": "go on"}


@pytest.mark.parametrize("template", ["qwen", "llama3", "parts", "deepseek", "thinking"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_continued_turn_keeps_its_tokens_and_closes_as_the_template_does(
    renderers, template, ended
):
    _, renderer = renderers[template]
    # Llama 3's template trims what is said, so the sampled text is not what it would render.
    call = sampled(renderer, START, "some words" + "  " * (template == "llama3"), ended=ended)
    messages = [*START, {"role": "assistant", "content": "some words"}, MORE]
    prompt = renderer.extend(request(messages), len(START), call)
    assert np.array_equal(prompt[: len(call.full)], call.full)
    text = renderer.tokenizer.decode(prompt.tolist())
    fresh = renderer.tokenizer.decode(renderer.render(request(messages)).tolist())
    assert text.replace("words  ", "words") == fresh


def test_a_template_that_strips_old_thinking_makes_a_branch_and_not_a_wrong_prompt(renderers):
    _, renderer = renderers["thinking"]
    call = sampled(renderer, START, "<think>\nhm\n</think>\n\nhello")
    call = Call(**{**vars(call), "turn": type(call.turn)("hello", reasoning="hm")})
    said = {"role": "assistant", "content": "hello", "reasoning_content": "hm"}
    # A tool result goes on within the same user's turn: the thinking stays.
    result = {"role": "tool", "tool_call_id": "1", "content": "a"}
    kept = renderer.extend(request([*START, said, result]), len(START), call)
    assert np.array_equal(kept[: len(call.full)], call.full)
    assert renderer.extend(request([*START, said, MORE]), len(START), call) is None
    folder, _ = renderers["thinking"]
    keeping = Renderer(str(folder), load(None, ["model.keep_reasoning=true"]).model)
    kept = keeping.extend(request([*START, said, MORE]), len(START), call)
    assert np.array_equal(kept[: len(call.full)], call.full)


def test_a_template_that_always_strips_thinking_makes_a_branch(renderers):
    _, renderer = renderers["deepseek"]
    call = sampled(renderer, START, "<think>hm</think>hello")
    call = Call(**{**vars(call), "turn": type(call.turn)("hello", reasoning="hm")})
    said = {"role": "assistant", "content": "hello", "reasoning_content": "hm"}
    assert renderer.extend(request([*START, said, MORE]), len(START), call) is None


def test_a_prompt_may_be_as_long_as_is_set_and_then_has_its_whole_reply(tmp_path):
    make_tokenizer(tmp_path)

    def plan(*settings: str):
        config = load(None, ["model.max_model_len=200", "sampling.max_tokens=100", *settings])
        request = openai_chat.parse({"messages": [{"role": "user", "content": "x" * 60}]})
        memory = Memory(AttemptInfo("r-a0", "r", Split.TRAIN, "hash", True))
        return Planner(config, Renderer(str(tmp_path), config.model)).plan(request, memory, {})

    length = len(plan().prompt)
    assert plan(f"model.max_prompt_tokens={length}").max_tokens == 100
    with pytest.raises(ApiError, match=f"maximum context length is {length - 1} tokens") as caught:
        plan(f"model.max_prompt_tokens={length - 1}")
    assert caught.value.code == "context_length_exceeded"
