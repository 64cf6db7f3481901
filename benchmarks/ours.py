"""The system that is measured: the gateway and the store as a run starts them, an instant engine.

The engine is an actor that says 100 tokens at once, with log-probabilities. The bare replica is the
least that Ray Serve can do in the gateway's place, on the same Serve and in front of the same
engine: it takes the body, calls the engine, and answers with fixed bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from generator import NUMBER
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

import lightning_ray.tasks
from lightning_ray.config import load
from lightning_ray.engine.courier import Exchange
from lightning_ray.engine.partial import Generation
from lightning_ray.gateway import deploy
from lightning_ray.records import (
    FinishReason,
    Outcome,
    PolicyVersion,
    RolloutSpec,
    Span,
    Split,
    Task,
)
from lightning_ray.run import cluster
from lightning_ray.store import actor as store_actor

PROMPT_TOKENS, SAMPLED_TOKENS = 200, 100
KEY = "secret"
HEADERS = {"authorization": f"Bearer {KEY}"}
BARE = "bare"
# Words that are one token each, as most words are in a large vocabulary.
WORDS = 4000
# Different answers, so that no compression of the store finds one answer again and again.
ANSWERS = 64


def make_words() -> list[str]:
    """Words of four to nine letters, always the same."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return sorted({"".join(rng.choices(letters, k=rng.randint(4, 9))) for _ in range(WORDS)})


def make_tokenizer(folder: Path) -> Any:
    """A BPE tokenizer with a token for each word, bytes for the rest, and the template of the
    built-in models; saved in `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8 * WORDS,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f" {word}" for word in make_words()], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (Path(lightning_ray.tasks.__file__).parent / "chatml.jinja").read_text()
    fast.save_pretrained(folder)
    return fast


def answers(tokenizer: Any) -> list[np.ndarray]:
    """What the engine says: `SAMPLED_TOKENS` tokens, the last one ends the turn."""
    words, rng = make_words(), random.Random(1)
    texts = ["".join(f" {word}" for word in rng.choices(words, k=200)) for _ in range(ANSWERS)]
    ids = [tokenizer.encode(text)[: SAMPLED_TOKENS - 1] for text in texts]
    return [np.array([*row, tokenizer.eos_token_id], np.int32) for row in ids]


def make_body(tokenizer: Any) -> str:
    """A request whose prompt has `PROMPT_TOKENS` tokens: instructions, and a user's message that
    ends with a number."""
    words = random.Random(2).choices(make_words(), k=PROMPT_TOKENS)
    for used in reversed(range(PROMPT_TOKENS)):
        messages = [
            {"role": "system", "content": " ".join(["", *words[: used // 2]])},
            {"role": "user", "content": " ".join(["", *words[used // 2 : used], NUMBER])},
        ]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        if len(ids["input_ids"]) <= PROMPT_TOKENS:
            return json.dumps({"model": "policy", "messages": messages})
    raise AssertionError("even an empty request is too long")


class InstantEngine(Exchange):
    """An engine actor without a model."""

    def __init__(self, tokens: list[np.ndarray]) -> None:
        rng = np.random.default_rng(0)
        span = (Span(PolicyVersion("bench", 0), SAMPLED_TOKENS),)
        self._answers = itertools.cycle(
            [
                Generation(
                    row,
                    -rng.exponential(size=len(row)).astype(np.float32),
                    span,
                    FinishReason.STOP,
                    0,
                )
                for row in tokens
            ]
        )
        self._delay, self._running, self._most = 0.0, 0, 0

    async def generate(self, prompt: np.ndarray, **sampling: Any) -> Generation:
        self._running += 1
        self._most = max(self._most, self._running)
        if self._delay:
            await asyncio.sleep(self._delay)
        self._running -= 1
        return next(self._answers)

    async def delay(self, seconds: float) -> int:
        """From here on a call takes so long; returns the most calls that ran at a time so far."""
        most, self._delay, self._most = self._most, seconds, 0
        return most


class BareReplica:
    """See the module."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._prompt = engine, np.arange(PROMPT_TOKENS, dtype=np.int32)
        self._answer = json.dumps({"content": " word" * SAMPLED_TOKENS, "usage": {}}).encode()

    async def __call__(self, request: Request) -> Response:
        await request.body()
        await self._engine.generate.remote(
            self._prompt, temperature=1.0, max_tokens=100, stop=(), constraint=None
        )
        return Response(self._answer, media_type="application/json")


class System:
    """Everything on a local Ray; `folder` is the run's."""

    def __init__(self, folder: Path, *settings: str) -> None:
        # Ray's workers do not have this folder on their path.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self.folder = folder
        self.tokenizer = make_tokenizer(folder / "model")
        self.body = make_body(self.tokenizer)
        config = load(
            None,
            [
                "model.max_model_len=40000",
                "model.tool_parser=hermes",
                f"sampling.max_tokens={SAMPLED_TOKENS}",
                f"gateway.port={deploy.free_port()}",
                f"run.dir={folder}",
                *settings,
            ],
        )
        cluster.connect(config)
        self.store = store_actor.start(folder / "store")
        self.engine = (
            ray.remote(InstantEngine)
            .options(num_cpus=0, max_concurrency=1000)
            .remote(answers(self.tokenizer))
        )
        deploy.start(config, folder / "model", [self.engine], self.store)
        self.port = config.gateway.port
        bare = serve.deployment(BareReplica).options(
            max_ongoing_requests=deploy.MOST_REQUESTS, ray_actor_options={"num_cpus": 0}
        )
        serve.run(
            bare.bind(self.engine),
            name=BARE,
            route_prefix=f"/{BARE}",
            logging_config=deploy.LOGGING,
        )
        self._made = 0

    def attempts(self, count: int) -> list[str]:
        """New attempts."""
        names = [f"r{self._made + i}" for i in range(count)]
        self._made += count
        specs = [RolloutSpec(name, "g", Task("t", "s"), Split.TRAIN, 1) for name in names]
        ray.get(self.store.create_rollouts.remote(specs))
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        started = [
            self.store.start_attempt.remote(f"{name}-a0", name, 0, digest, time.time())
            for name in names
        ]
        ray.get(started)
        return [f"{name}-a0" for name in names]

    def end(self, attempts: list[str]) -> None:
        """Ends attempts, as the controller does when their harness has exited."""
        ended = [
            self.store.end_attempt.remote(attempt, Outcome.COMPLETED, "", time.time())
            for attempt in attempts
        ]
        ray.get(ended)

    def target(self, attempt: str) -> str:
        return f"/rollout/{attempt}/v1/chat/completions"

    def process(self, name: str) -> psutil.Process:
        """The actor's process whose title begins with `name`."""
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith("ray::") and name in " ".join(process.cmdline()):
                return process
        raise LookupError(f"no process of {name}")

    def stop(self) -> None:
        deploy.stop()
        ray.shutdown()
