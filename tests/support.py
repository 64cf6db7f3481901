"""Small stand-ins that tests share: a byte-level tokenizer and an engine that says what it is
told."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ray.engine.actor import Generation
from lightning_ray.records import FinishReason, PolicyVersion, Span

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]


def make_tokenizer(folder: Path) -> Any:
    """A tokenizer whose tokens are single bytes, with ChatML and Hermes tool calls, saved in
    `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return fast


class ScriptedEngine:
    """An engine actor without a model: each call is answered with the next text of the script, the
    last one again and again. Prompts are remembered."""

    def __init__(self, tokenizer_dir: str, script: list[str], seconds: float = 0.0) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        self._script, self._seconds = script, seconds
        self._prompts: list[list[int]] = []

    async def generate(
        self, prompt: np.ndarray, *, temperature: float, max_tokens: int, stop: tuple[str, ...] = ()
    ) -> Generation:
        text = self._script[min(len(self._prompts), len(self._script) - 1)]
        self._prompts.append(prompt.tolist())
        await asyncio.sleep(self._seconds)
        tokens = [*self._tokenizer.encode(text), self._tokenizer.eos_token_id]
        reason = FinishReason.STOP if len(tokens) <= max_tokens else FinishReason.LENGTH
        tokens = tokens[:max_tokens]
        return Generation(
            np.array(tokens, np.int32),
            np.full(len(tokens), -0.5, np.float32),
            (Span(PolicyVersion("test", 0), len(tokens)),),
            reason,
            0,
        )

    async def prompts(self) -> list[list[int]]:
        return self._prompts

    async def die(self) -> None:
        os._exit(1)
