"""The path of a model call: access, gate, dialect, render, sample, record, answer.

Invariants: a call is on disk before the last byte of its answer leaves; a call of an attempt that
has ended is refused, also when it ended while the call was sampled; a retry gets the answer of the
call that it repeats; a client that goes away stops nothing before its time; the harness's model
name is recorded and ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import pickle
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import orjson
import ray

from lightning_ray import canary
from lightning_ray.config import RunConfig
from lightning_ray.engine.pool import EnginePool, NoEngine
from lightning_ray.gateway import access, bodies
from lightning_ray.gateway.bodies import Body
from lightning_ray.gateway.dialects import Answer, ChatRequest, Dialect, Head
from lightning_ray.gateway.errors import ApiError
from lightning_ray.gateway.inflight import Answers, InFlight, answer_of, replay
from lightning_ray.gateway.patience import hold_s
from lightning_ray.gateway.planning import Memory, Plan, Planner
from lightning_ray.gateway.render import Renderer
from lightning_ray.line import Line
from lightning_ray.records import Call
from lightning_ray.store.actor import MOST_CALLS_PER_COMMIT, Asked
from lightning_ray.store.attempts import AttemptInfo
from lightning_ray.store.claims import Opening, Verdict
from lightning_ray.store.errors import AttemptOver
from lightning_ray.store.grouping import Grouped

log = logging.getLogger("ray.serve")  # the only logger that Serve writes to the replica's file

# Attempts whose calls a replica remembers; a forgotten one is read from the store again.
REMEMBERED_ATTEMPTS = 1024
# Attempts, those that were not used for longest, of which a replica asks each second whether they
# have ended: more than end in a second.
ASKED_ATTEMPTS = 256
# A generation that takes longer is streamed from here on: headers and keep-alive events go first.
SILENCE_S = 5.0
# Between two keep-alive events, in seconds. Clients give up after 120 s of silence and more.
KEEPALIVE_S = 10.0
# Between two looks at an answer that another replica is making.
WAIT_S = 0.2
# Between two signs of life of a replica, and two looks at the gate while answers are made.
LIFE_S = 1.0
# A pause shorter than this is waited for, however long ago the call came: its generation may be one
# of those that are just ending.
SHORT_PAUSE_S = 10.0


class Service:
    """Serves model calls. `store` is the handle of the store actor."""

    def __init__(self, config: RunConfig, renderer: Renderer, pool: EnginePool, store: Any) -> None:
        self._config, self._renderer, self._pool, self._store = config, renderer, pool, store
        self._planner, self._line = Planner(config, renderer), Line(store, "packed", again=True)
        self._open_call: Grouped[Asked, tuple[Opening | None, list[Call]]] = Grouped(
            partial(self._packed, "open_calls"), MOST_CALLS_PER_COMMIT
        )
        self._record: Grouped[tuple[list[Call], int], list[int]] = Grouped(
            partial(self._packed, "record_calls"), MOST_CALLS_PER_COMMIT
        )
        self._replica = uuid.uuid4().hex
        self._paused_since: float | None = None
        self._paused_by = ""  # why the gate is closed
        self._answers = Answers(lambda: self._paused_since is not None)
        self._memories: OrderedDict[str, Memory] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._alive: asyncio.Task[None] | None = None

    async def answer(
        self, dialect: Dialect, attempt_id: str, headers: Mapping[str, str], body: Body
    ) -> bytes | AsyncIterator[bytes]:
        """Answers one model call: a JSON body, or server-sent events.

        Raises:
            ApiError: see there.
        """
        # In a context without the request's Ray task: when Ray cancels a task it also cancels what
        # that task asked of other actors, and here others may wait for the same.
        answering = self._answer(dialect, attempt_id, headers, body)
        return await asyncio.create_task(answering, context=contextvars.Context())

    async def _answer(
        self, dialect: Dialect, attempt_id: str, headers: Mapping[str, str], body: Body
    ) -> bytes | AsyncIterator[bytes]:
        until = time.monotonic() + hold_s(self._config.gateway, headers)
        try:
            memory = await self._memory(attempt_id, headers)
            raw = await body()
            if found := canary.seen(raw.decode(errors="replace")):
                await self._store.note_canary.remote(attempt_id, len(memory.calls), found[0])
            data = bodies.decode(raw)
            request = dialect.parse(data)
            fingerprint = bodies.fingerprint(dialect.NAME, data)
            is_retry = headers.get("x-stainless-retry-count", "0") not in ("0", "")
            asked = Asked(attempt_id, fingerprint, self._replica, is_retry, 0, request.samples)
            opening = await self._open(memory, asked, until)
            if opening.verdict is Verdict.REPLAY:
                return await self._replayed(dialect, request, memory, opening)
            making = (
                self._answers.find(attempt_id, fingerprint)
                if opening.verdict is Verdict.WAIT
                else self._start(dialect, request, memory, headers, fingerprint, opening)
            )
            assert making is not None
            return await self._deliver(dialect, request, making, until)
        except (AttemptOver, ray.exceptions.RayActorError) as error:
            raise _answer_to(error) from error

    async def admit(self, attempt_id: str, headers: Mapping[str, str]) -> AttemptInfo:
        """The attempt, if it lives and the request carries its key.

        Raises:
            ApiError: 401, 410.
        """
        key = access.key_of(headers)
        return access.check_harness(await self._store.attempt.remote(attempt_id), key)

    async def count(
        self,
        parse: Callable[[dict[str, Any]], ChatRequest],
        attempt_id: str,
        headers: Mapping[str, str],
        body: Body,
    ) -> int:
        """The number of prompt tokens of a request that is not sampled."""
        await self.admit(attempt_id, headers)
        return len(self._renderer.render(parse(bodies.decode(await body()))))

    # -- before sampling ------------------------------------------------------------------------

    async def _memory(self, attempt_id: str, headers: Mapping[str, str]) -> Memory:
        memory = self._memories.get(attempt_id)
        if memory is None:
            attempt = await self.admit(attempt_id, headers)
            # Another request may have been here meanwhile.
            memory = self._memories.setdefault(attempt_id, Memory(attempt))
        access.check_harness(memory.attempt, access.key_of(headers))
        self._memories.move_to_end(attempt_id)
        while len(self._memories) > REMEMBERED_ATTEMPTS:
            self._memories.popitem(last=False)
        return memory

    async def _open(self, memory: Memory, asked: Asked, until: float) -> Opening:
        """Passes the gate and claims the request, or finds whose answer it gets."""
        attempt_id = asked.attempt_id
        while True:
            asked = replace(asked, known=len(memory.calls))
            opened = self._open_call(asked)
            try:
                opening, calls = await asyncio.shield(opened)
            except asyncio.CancelledError:
                # The client left; the store may have given it a claim, which must block nobody.
                opened.add_done_callback(partial(self._abandon, attempt_id))
                raise
            if opening is None:
                left = max(0.0, until - time.monotonic())
                if closed := await self._store.wait_gate.remote(left):
                    raise ApiError(503, f"{closed}; try again.", code="paused")
                continue
            memory.learn(calls)
            here = self._answers.find(attempt_id, asked.request)
            if opening.verdict is not Verdict.WAIT or here:
                return opening
            await asyncio.sleep(WAIT_S)

    def _abandon(
        self, attempt_id: str, opened: asyncio.Future[tuple[Opening | None, list[Call]]]
    ) -> None:
        if opened.cancelled() or opened.exception():
            return
        opening, _ = opened.result()
        if opening and opening.verdict is Verdict.ANSWER:
            self._tell("drop_call", attempt_id, opening.claim_id)

    # -- sampling -------------------------------------------------------------------------------

    def _start(
        self,
        dialect: Dialect,
        request: ChatRequest,
        memory: Memory,
        headers: Mapping[str, str],
        fingerprint: str,
        opening: Opening,
    ) -> InFlight:
        attempt_id = memory.attempt.attempt_id
        try:
            plan = self._planner.plan(request, memory, headers)
        except ApiError:
            self._tell("drop_call", attempt_id, opening.claim_id)
            raise
        head = Head(uuid.uuid4().hex, int(time.time()), len(plan.prompt))
        if self._alive is None or self._alive.done():
            self._alive = asyncio.create_task(self._report_life())
        return self._answers.start(
            attempt_id,
            fingerprint,
            head,
            self._make(dialect, request, memory, plan, head, fingerprint, opening.claim_id),
            lambda: contextvars.Context().run(
                self._tell, "detach_call", attempt_id, opening.claim_id
            ),
        )

    async def _make(
        self,
        dialect: Dialect,
        request: ChatRequest,
        memory: Memory,
        plan: Plan,
        head: Head,
        fingerprint: str,
        claim_id: int,
    ) -> Answer:
        """Samples and records the calls of a request."""
        attempt_id = memory.attempt.attempt_id
        ids = [head.call_id, *(uuid.uuid4().hex for _ in range(request.samples - 1))]
        try:
            calls = await asyncio.gather(
                *[self._sample(dialect, request, memory, plan, i, fingerprint) for i in ids]
            )
            seqs = await self._record((calls, claim_id))
        except BaseException as error:
            self._tell("drop_call", attempt_id, claim_id)
            if isinstance(error, ValueError):
                raise ApiError(400, f"The engine refuses this request: {error}") from error
            if isinstance(error, Exception) and not isinstance(error, ApiError | AttemptOver):
                self._tell("record_fault", attempt_id, 503)
            if isinstance(error, NoEngine | OSError):
                raise ApiError(503, f"Try again: {error}", code="unavailable") from error
            raise
        # Else the store would send them back with the next request.
        memory.learn([replace(call, seq=seq) for call, seq in zip(calls, seqs, strict=True)])
        return answer_of(head, calls)

    async def _sample(
        self,
        dialect: Dialect,
        request: ChatRequest,
        memory: Memory,
        plan: Plan,
        call_id: str,
        fingerprint: str,
    ) -> Call:
        started = time.time()
        generation = await self._pool.generate(
            memory.attempt.rollout_id,
            plan.prompt,
            temperature=plan.temperature,
            max_tokens=plan.max_tokens,
            stop=plan.stop,
            constraint=plan.constraint,
        )
        turn, text = self._renderer.parse(
            request,
            generation.tokens,
            generation.finish_reason,
            dialect.TOOL_CALL_PREFIX,
            plan.stop,
        )
        return Call(
            call_id=call_id,
            attempt_id=memory.attempt.attempt_id,
            seq=-1,
            prompt=plan.prompt,
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            spans=generation.spans,
            finish_reason=generation.finish_reason,
            text=text,
            turn=turn,
            history=plan.history,
            branch=plan.branch,
            side=plan.side,
            request=fingerprint,
            dialect=dialect.NAME,
            model=request.model,
            constrained=request.constrained,
            cached_tokens=generation.cached_tokens,
            started_at=started,
            seconds=time.time() - started,
        )

    # -- answering ------------------------------------------------------------------------------

    async def _deliver(
        self, dialect: Dialect, request: ChatRequest, making: InFlight, until: float
    ) -> bytes | AsyncIterator[bytes]:
        async with making.listening():
            if not request.stream:
                await self._wait_or_park(making, until)
                return orjson.dumps(dialect.respond(request, await making.answer()))
            # A failure within the first seconds still gets a status of its own.
            await asyncio.wait([making.task], timeout=SILENCE_S)
            if making.task.done():
                await making.answer()
        return self._events(dialect, request, making)

    async def _wait_or_park(self, making: InFlight, until: float) -> None:
        """Waits for an answer, but not longer than a call may be held if an update holds it up:
        then it is parked, and the client's retry joins it.

        Raises:
            ApiError: 503, it is parked.
        """
        await asyncio.wait([making.task], timeout=until - time.monotonic())
        while not making.task.done():
            since = self._paused_since
            if since is not None and time.monotonic() - since > SHORT_PAUSE_S:
                raise ApiError(503, f"{self._paused_by}; try again.", code="paused")
            await asyncio.wait([making.task], timeout=LIFE_S)

    async def _events(
        self, dialect: Dialect, request: ChatRequest, making: InFlight
    ) -> AsyncIterator[bytes]:
        async with making.listening():
            yield dialect.start(request, making.head)
            while not making.task.done():
                yield dialect.keepalive(request, making.head)
                await asyncio.wait([making.task], timeout=KEEPALIVE_S)
            try:
                answer = await making.answer()
            except Exception as error:
                yield dialect.failure(request, making.head, _answer_to(error))
            else:
                for event in dialect.finish(request, answer):
                    yield event

    async def _replayed(
        self, dialect: Dialect, request: ChatRequest, memory: Memory, opening: Opening
    ) -> bytes | AsyncIterator[bytes]:
        calls = [call for call in memory.calls if call.call_id in opening.calls]
        answer = answer_of(
            Head(calls[0].call_id, int(calls[0].started_at), len(calls[0].prompt)), calls
        )
        if request.stream:
            return replay(dialect, request, answer)
        return orjson.dumps(dialect.respond(request, answer))

    # -- housekeeping ---------------------------------------------------------------------------

    async def _packed(self, method: str, *args: Any) -> Any:
        return pickle.loads(await self._line.send(method, pickle.dumps(args, 5)))

    def _tell(self, method: str, *args: Any) -> None:
        """Sends the store a message without waiting for it: on the line, so that none that is sent
        later overtakes it."""

        async def sent() -> None:
            with contextlib.suppress(OSError, ray.exceptions.RayActorError):
                await self._packed(method, *args)

        task = asyncio.ensure_future(sent())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_life(self) -> None:
        """Keeps this replica's claims while it makes answers, and forgets attempts that ended."""
        while len(self._answers):
            unused = list(islice(self._memories, ASKED_ATTEMPTS))
            over, self._paused_by = await self._store.replica_alive.remote(self._replica, unused)
            for ended in over:
                self._memories.pop(ended, None)
            paused = self._paused_since or time.monotonic()
            self._paused_since = paused if self._paused_by else None
            await asyncio.sleep(LIFE_S)


def _answer_to(error: Exception) -> ApiError:
    """What a client is told of an exception that ended its call."""
    match error:
        case ApiError():
            return error
        case AttemptOver():
            return ApiError(410, "The attempt has ended.", code="attempt_over")
        case ray.exceptions.RayActorError():
            log.warning("the store did not answer a call: %s", error)
            return ApiError(503, "The store is starting again.", code="unavailable")
    log.error("a call failed", exc_info=error)
    return ApiError(500, "An error in the gateway; its log has more.", code="internal_error")
