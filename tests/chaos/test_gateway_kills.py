"""The bare gateway process is killed at random moments, again and again, and sometimes the store's
before it, while clients of the SDK keep conversations going: none of them notices more than a
pause.

LIGHTNING_RAY_CHAOS_KILLS is the number of kills, LIGHTNING_RAY_CHAOS_SEED the seed of the moments.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import random
import socket
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from bare_gateway import NEEDS, ask, run_gateway, run_store
from forking import forking
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion
from support import TOOLS, make_tokenizer

from lightning_ray.records import Branch, RolloutSpec, Split, Task
from lightning_ray.store.rollouts import RolloutStore

KILLS = int(os.environ.get("LIGHTNING_RAY_CHAOS_KILLS", "50"))
SEED = int(os.environ.get("LIGHTNING_RAY_CHAOS_SEED", "0"))
# A gateway is killed within this time, in seconds, of its start or of its first answer.
LIFE_S = 0.4
# Enough of them that some are under way while others wait for a dead gateway's lease to end.
CLIENTS = 12
TURNS = 6  # of a conversation
KEY = "secret"


@dataclass(frozen=True)
class Told:
    """What a client got for a request."""

    completion: str
    tool_call: str
    arguments: str
    prompt_tokens: int
    sampled_tokens: int
    retries: int


class Clients:
    """Conversations, one after the other in each of `CLIENTS` threads, until `over`."""

    def __init__(self, port: int, store: Path) -> None:
        self._port, self._store = port, store
        self._numbers = itertools.count()
        self.told: dict[str, list[Told]] = defaultdict(list)
        self.over, self.answered = threading.Event(), threading.Event()

    def work(self) -> None:
        while not self.over.is_set():
            self._converse(f"r{next(self._numbers)}")

    def _converse(self, rollout: str) -> None:
        attempt, digest = f"{rollout}-a0", hashlib.sha256(KEY.encode()).hexdigest()
        spec = RolloutSpec(rollout, "g", Task("t", "s"), Split.TRAIN, 0)
        self._ask("create_rollouts", [spec])
        self._ask("start_attempt", attempt, rollout, 0, digest, 1.0)
        url = f"http://127.0.0.1:{self._port}/rollout/{attempt}/v1"
        messages: list[Any] = [{"role": "user", "content": "look around"}]
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=30, timeout=60) as client:
            for turn in range(TURNS):
                reply, retries = complete(client, messages, turn % 2 == 1)
                message = reply.choices[0].message
                [call] = message.tool_calls
                self.told[attempt].append(
                    Told(
                        reply.id,
                        call.id,
                        call.function.arguments,
                        reply.usage.prompt_tokens,
                        reply.usage.completion_tokens,
                        retries,
                    )
                )
                self.answered.set()
                messages += [
                    message.model_dump(
                        exclude_none=True, include={"role", "content", "tool_calls"}
                    ),
                    {"role": "tool", "tool_call_id": call.id, "content": "done"},
                ]

    def _ask(self, method: str, *args: Any) -> None:
        asyncio.run(ask(self._store, method, *args))


def complete(
    client: openai.OpenAI, messages: list[Any], stream: bool
) -> tuple[ChatCompletion, int]:
    """A whole answer, and how often the client had to ask again for it."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    cut = 0
    while True:
        # The SDK asks again for an answer that has not begun; for the rest of a stream we do.
        again = {"x-stainless-retry-count": str(cut)} if cut else {}
        raw = client.chat.completions.with_raw_response.create(
            model="m", messages=messages, tools=TOOLS, extra_headers=again, **options
        )
        if not stream:
            return raw.parse(), raw.retries_taken
        state = ChatCompletionStreamState()
        with contextlib.suppress(openai.APIConnectionError):
            for chunk in raw.parse():
                state.handle_chunk(chunk)
            return state.get_final_completion(), raw.retries_taken + cut
        cut += 1


class Processes:
    """The store's and the gateway's process."""

    def __init__(self, context: Any, folder: Path, listener: socket.socket) -> None:
        store = folder / "socket"
        self._starts = {
            "store": lambda: context.Process(target=run_store, args=(folder / "store", store)),
            "gateway": lambda: context.Process(
                target=run_gateway, args=(folder / "model", store, listener)
            ),
        }
        self._running: dict[str, Any] = {}
        self.start("store")
        self.start("gateway")

    def start(self, name: str) -> None:
        self._running[name] = process = self._starts[name]()
        process.start()

    def kill(self, name: str) -> None:
        process = self._running[name]
        process.kill()
        process.join()
        assert process.exitcode == -9, f"the {name} failed by itself"

    def end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.join()


@pytest.mark.slow
def test_every_answer_is_there_once_however_often_the_gateway_is_killed(
    tmp_path: Path, monkeypatch
):
    context = forking(NEEDS, monkeypatch)
    tokenizer = make_tokenizer(tmp_path / "model")
    chance = random.Random(SEED)
    # Open all the time, as the proxy's port is: who comes while there is no gateway waits for one.
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(CLIENTS) as pool:
        processes = Processes(context, tmp_path, listener)
        clients = Clients(listener.getsockname()[1], tmp_path / "socket")
        working = [pool.submit(clients.work) for _ in range(CLIENTS)]
        try:
            for _ in range(KILLS):
                clients.answered.clear()
                if chance.random() < 0.5:
                    assert clients.answered.wait(60)
                time.sleep(chance.random() * LIFE_S)
                if chance.random() < 0.2:
                    processes.kill("store")
                    processes.start("store")
                    time.sleep(chance.random() * LIFE_S)
                processes.kill("gateway")
                processes.start("gateway")
            clients.over.set()
            for client in working:
                client.result(120)
        finally:
            clients.over.set()
            processes.end()
    store = RolloutStore(tmp_path / "store")
    for attempt, told in clients.told.items():
        calls = store.calls(attempt)
        assert len(calls) == len(told) == TURNS
        before = None
        for call, said in zip(calls, told, strict=True):
            [turn] = call.turn.tool_calls
            assert f"chatcmpl-{call.call_id}" == said.completion
            assert (turn.call_id, turn.arguments) == (said.tool_call, said.arguments)
            assert (len(call.prompt), len(call.tokens)) == (said.prompt_tokens, said.sampled_tokens)
            assert tokenizer.decode(call.tokens.tolist()[:-1]) == call.text
            assert said.arguments in call.text
            assert call.branch is (Branch.CONTINUED if before else Branch.ROOT)
            assert (
                before is None or call.prompt[: len(before.full)].tolist() == before.full.tolist()
            )
            before = call
    retries = [said.retries for told in clients.told.values() for said in told]
    repeated = sum(map(bool, retries))
    print(f"{KILLS} kills, {len(retries)} answers, {repeated} of them to clients that asked again")
    assert repeated > KILLS / 2
