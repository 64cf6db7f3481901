"""Small stand-ins that tests share: a byte-level tokenizer and an engine that says what it is
told."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import ray

from lightning_ray.config import load
from lightning_ray.engine.courier import Exchange
from lightning_ray.engine.partial import Generation
from lightning_ray.gateway import deploy
from lightning_ray.records import FinishReason, PolicyVersion, RolloutSpec, Span, Split, Task
from lightning_ray.run import cluster
from lightning_ray.samples.rows import CallFate, Fate
from lightning_ray.store import actor as store_actor

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


def tokens_by_fate(fates: list[CallFate]) -> Counter[Fate]:
    counted: Counter[Fate] = Counter()
    for fate in fates:
        counted[fate.fate] += fate.tokens
    return counted


class ScriptedEngine(Exchange):
    """An engine actor without a model. After `script`, calls are answered with one text after the
    other, the last one again and again; after `play`, a call is answered with what its prompt asks
    for. Prompts are remembered."""

    def __init__(self, tokenizer_dir: str, texts: list[str], seconds: float = 0.0) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        self._scripts: dict[str, list[str]] = {}
        self._forget(texts, seconds)

    def _forget(self, texts: list[str], seconds: float) -> None:
        self._texts, self._seconds = texts, seconds
        self._prompts: list[list[int]] = []
        self._constraints: list[Any] = []
        self._cancelled = 0

    def _say(self, prompt: np.ndarray) -> str:
        if not self._scripts:
            return self._texts[min(len(self._prompts), len(self._texts) - 1)]
        asked = self._tokenizer.decode(prompt.tolist())
        script = next(texts for marker, texts in self._scripts.items() if marker in asked)
        turn = asked.count("<|im_start|>tool\n")
        return script[min(turn, len(script) - 1)]

    async def generate(
        self,
        prompt: np.ndarray,
        *,
        temperature: float,
        max_tokens: int,
        stop: tuple[str, ...] = (),
        constraint: Any = None,
    ) -> Generation:
        text = self._say(prompt)
        self._prompts.append(prompt.tolist())
        self._constraints.append(constraint)
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self._cancelled += 1
            raise
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

    async def script(self, texts: list[str], seconds: float = 0.0) -> None:
        """From here on these texts are said, each after so many seconds."""
        self._scripts = {}
        self._forget(texts, seconds)

    async def play(self, scripts: dict[str, list[str]]) -> None:
        """From here on turn n of a conversation is text n of the first script whose marker is in
        the prompt."""
        self._scripts = scripts
        self._forget([], 0.0)

    async def prompts(self) -> list[list[int]]:
        return self._prompts

    async def constraints(self) -> list[Any]:
        return self._constraints

    async def cancelled(self) -> int:
        return self._cancelled

    async def die(self) -> None:
        os._exit(1)


MAX_MODEL_LEN = 600
HELLO = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]


class Running:
    """A gateway, its store, and an engine for each of `scripts`, started again if it dies up to
    `restarts` times (-1: always); `attempt()` makes a live attempt."""

    def __init__(
        self, folder: Path, scripts: list[list[str]], *settings: str, restarts: int = 0
    ) -> None:
        self.scripts, self.restarts = scripts, restarts
        self.tokenizer = make_tokenizer(folder / "model")
        self.config = load(
            None,
            [
                f"model.max_model_len={MAX_MODEL_LEN}",
                "model.tool_parser=hermes",
                "sampling.max_tokens=100",
                f"gateway.port={deploy.free_port()}",
                "gateway.max_body_mib=1",
                f"run.dir={folder}",
                *settings,
            ],
        )
        self.folder = folder
        self._numbers = itertools.count()

    def start(self):
        # Ray's workers do not have this folder on their path.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self.config = deploy.settle_port(self.config)
        cluster.connect(self.config)
        deploy.reclaim_port(self.config.gateway)
        self.store = store_actor.start(self.folder / "store")
        engine = ray.remote(ScriptedEngine).options(
            num_cpus=0, max_restarts=self.restarts, max_concurrency=1000
        )
        model = str(self.folder / "model")
        self.engines = [engine.remote(model, script) for script in self.scripts]
        self.url = deploy.start(self.config, self.folder / "model", self.engines, self.store)

    def attempt(self, key="secret", rollout=None):
        rollout = rollout or f"r{next(self._numbers)}"
        spec = RolloutSpec(rollout, "g", Task("t", "s"), Split.TRAIN, 1)
        ray.get(self.store.create_rollouts.remote([spec]))
        digest = hashlib.sha256(key.encode()).hexdigest()
        ray.get(self.store.start_attempt.remote(f"{rollout}-a0", rollout, 0, digest, time.time()))
        return f"{rollout}-a0"

    def post(self, attempt, body, key="secret"):
        return httpx.post(
            f"{self.url}/rollout/{attempt}/v1/chat/completions",
            headers={"authorization": f"Bearer {key}"},
            timeout=30,
            **({"json": body} if isinstance(body, dict | list) else {"content": body}),
        )

    def client(self, attempt, key="secret"):
        return openai.OpenAI(
            base_url=f"{self.url}/rollout/{attempt}/v1", api_key=key, max_retries=0
        )
