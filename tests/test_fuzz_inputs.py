"""Ten thousand bent requests through a replica's path of a call, without HTTP, store and engine:
read, planned, answered in each protocol, or refused. LIGHTNING_RAY_FUZZ=100000 makes that many
others of each protocol."""

from __future__ import annotations

import gc
import json
import os
import time
from random import Random

import numpy as np
import orjson
import psutil
import pytest
from fuzzing import KNOWN_BAD, ROUTES, bend, continued, say
from support import HELLO, make_tokenizer

from lightning_ray.config import load
from lightning_ray.gateway import bodies
from lightning_ray.gateway.dialects import Head, anthropic_messages
from lightning_ray.gateway.dispatch import DIALECTS
from lightning_ray.gateway.errors import ApiError
from lightning_ray.gateway.inflight import answer_of
from lightning_ray.gateway.planning import Memory, Planner
from lightning_ray.gateway.render import Renderer
from lightning_ray.records import Call, FinishReason, PolicyVersion, Span, Split
from lightning_ray.store.attempts import AttemptInfo

LENGTH = os.environ.get("LIGHTNING_RAY_FUZZ")
INPUTS = {"chat/completions": 4000, "responses": 4000, "messages": 4000}
# An answered request in so many goes on, as its harness would.
CONTINUED_ONE_IN = 4
# What the rest of the inputs may add to the resident memory after the first thousand: caches fill,
# and the allocator keeps what is free. A kilobyte kept of each input would be 2.5 MiB more.
MOST_MIB = 24


class Replica:
    """What a replica does with a call, around an engine that says what it is told."""

    def __init__(self, folder) -> None:
        self.tokenizer = make_tokenizer(folder)
        config = load(
            None,
            ["model.max_model_len=8000", "model.tool_parser=hermes", "sampling.max_tokens=300"],
        )
        self.renderer = Renderer(str(folder), config.model)
        self.planner = Planner(config, self.renderer)

    def call(self, route: str, memory: Memory, body: bytes, text: str) -> dict | None:
        """The answer to a request; None if it is a stream.

        Raises:
            ApiError: it is refused.
        """
        dialect = DIALECTS[route]
        data = bodies.decode(body)
        request = dialect.parse(data)
        fingerprint = bodies.fingerprint(dialect.NAME, data)
        plan = self.planner.plan(request, memory, {})
        tokens = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        reason = FinishReason.STOP if len(tokens) <= plan.max_tokens else FinishReason.LENGTH
        tokens = np.array(tokens[: plan.max_tokens], np.int32)
        turn, said = self.renderer.parse(
            request, tokens, reason, dialect.TOOL_CALL_PREFIX, plan.stop
        )
        number = len(memory.calls)
        call = Call(
            call_id=f"c{number}",
            attempt_id=memory.attempt.attempt_id,
            seq=number,
            prompt=plan.prompt,
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            spans=(Span(PolicyVersion("test", 0), len(tokens)),),
            finish_reason=reason,
            text=said,
            turn=turn,
            history=plan.history,
            branch=plan.branch,
            side=plan.side,
            request=fingerprint,
            dialect=dialect.NAME,
            model=request.model,
            constrained=request.constrained,
            cached_tokens=0,
            started_at=0.0,
            seconds=0.0,
        )
        memory.learn([call])
        head = Head(call.call_id, 0, len(plan.prompt))
        answer = answer_of(head, [call] * request.samples)
        if request.stream:
            events = [dialect.start(request, head), *dialect.finish(request, answer)]
            assert b"".join(events).endswith(b"\n\n")
            return None
        return json.loads(orjson.dumps(dialect.respond(request, answer)))


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    return Replica(tmp_path_factory.mktemp("model"))


def new_memory() -> Memory:
    return Memory(AttemptInfo("r-a0", "r", Split.TRAIN, "hash", True))


def resident_mib() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / (1 << 20)


@pytest.mark.parametrize("route", INPUTS)
def test_thousands_of_bent_requests_are_answered_or_refused_in_the_same_memory(replica, route):
    number = int(LENGTH or INPUTS[route])
    first = 0 if LENGTH is None else time.time_ns()
    answered, before = 0, 0.0
    for seed in range(first, first + number):
        random, memory = Random(seed), new_memory()
        body, text = bend(random, ROUTES[route]), say(random)
        if isinstance(body, dict) and random.random() < 0.2:
            body["stream"] = True
        refusal = None
        try:
            reply = replica.call(route, memory, json.dumps(body).encode(), text)
            answered += 1
            if reply is not None and seed % CONTINUED_ONE_IN == 0:
                again = json.dumps(continued(route, body, reply)).encode()
                replica.call(route, memory, again, "done")
        except ApiError as error:
            refusal = error
        except Exception as error:
            raise AssertionError(f"{route}, seed {seed}: {json.dumps(body)[:2000]}") from error
        if refusal:
            # What the gateway said, it takes back, if there is room for it.
            assert not memory.calls or refusal.code == "context_length_exceeded", (seed, refusal)
            assert 400 <= refusal.status < 500, (seed, refusal)
            assert json.dumps(DIALECTS[route].error(refusal))
        if seed == first + 1000:
            before = resident_mib()
    # Neither side of the fence is empty: else this tests nothing.
    assert number / 10 < answered < number * 9 / 10, answered
    assert resident_mib() - before < MOST_MIB


@pytest.mark.parametrize("route", KNOWN_BAD)
def test_what_was_wrong_before_is_refused(replica, route):
    def ask(body: bytes) -> None:
        if route == "messages/count_tokens":
            replica.renderer.render(anthropic_messages.count_request(bodies.decode(body)))
        else:
            replica.call(route, new_memory(), body, "hello")

    for number, body in enumerate(KNOWN_BAD[route]):
        with pytest.raises(ApiError) as caught:
            ask(json.dumps(body).encode())
        assert caught.value.status == 400, number


def test_too_many_messages_or_tools_are_refused_by_name():
    for name, most in bodies.MOST_ITEMS.items():
        assert bodies.decode(json.dumps({name: HELLO * most}).encode())
        with pytest.raises(ApiError, match=f"`{name}` has {most + 1} items") as caught:
            bodies.decode(json.dumps({name: HELLO * (most + 1)}).encode())
        assert (caught.value.status, caught.value.param) == (400, name)
