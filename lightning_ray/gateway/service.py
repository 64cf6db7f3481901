"""The path of a model call: access, dialect, render, sample, record, answer.

Invariants: a call is on disk before its answer leaves; a call of an attempt that has ended is
refused, also when it ended while the call was sampled; the harness's model name is recorded and
ignored.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from lightning_ray.config import RunConfig
from lightning_ray.engine.pool import EnginePool, NoEngine
from lightning_ray.gateway import access
from lightning_ray.gateway.dialects import Answer, ChatRequest, Turn, Usage, openai_chat
from lightning_ray.gateway.errors import ApiError, context_overflow
from lightning_ray.gateway.render import Renderer
from lightning_ray.records import Call, Reward, Split
from lightning_ray.store.errors import AttemptOver, DuplicateReward, StoreError
from lightning_ray.store.rollouts import AttemptInfo


class Service:
    """Serves model calls and rewards. `store` is the handle of the store actor."""

    def __init__(self, config: RunConfig, renderer: Renderer, pool: EnginePool, store: Any) -> None:
        self._config, self._renderer, self._pool, self._store = config, renderer, pool, store

    async def chat(
        self, attempt_id: str, headers: Mapping[str, str], body: bytes
    ) -> dict[str, Any]:
        """Answers one model call.

        Raises:
            ApiError: see there.
        """
        attempt = access.check_harness(
            attempt_id, await self._store.attempt.remote(attempt_id), access.key_of(headers)
        )
        try:
            request = openai_chat.parse(decode(body))
            prompt = self._renderer.render(request)
            answer = await self._answer(attempt, request, prompt)
        except NoEngine as error:
            await self._store.record_fault.remote(attempt_id, 503)
            raise ApiError(503, "No engine is available; try again.", code="no_engine") from error
        except AttemptOver as error:
            raise ApiError(410, f"Attempt {attempt_id} has ended.", code="attempt_over") from error
        return openai_chat.respond(request, answer)

    async def reward(
        self, rollout_id: str, headers: Mapping[str, str], body: bytes
    ) -> dict[str, Any]:
        """Takes the reward of a rollout from a grader outside.

        Raises:
            ApiError: 401, 404, 400 (not a reward), 409 (it has one already).
        """
        key = access.key_of(headers)
        access.check_grader(await self._store.grader_key.remote(rollout_id), key)
        data = decode(body)
        try:
            reward = Reward(data["reward"], data.get("solved", False), data.get("metrics", {}))
        except KeyError as error:
            raise ApiError(400, "`reward` is missing.", param="reward") from error
        except (ValueError, AttributeError, TypeError) as error:
            raise ApiError(400, f"Not a reward: {error}", param="reward") from error
        try:
            await self._store.post_reward.remote(rollout_id, reward, "post")
        except DuplicateReward as error:
            raise ApiError(409, f"Rollout {rollout_id} already has a reward.") from error
        except StoreError as error:
            raise ApiError(404, f"There is no rollout {rollout_id!r}.") from error
        return {"rollout_id": rollout_id, "reward": reward.value}

    async def models(self, attempt_id: str | None, headers: Mapping[str, str]) -> dict[str, Any]:
        """The list of models: one, the policy."""
        if attempt_id is not None:
            attempt = await self._store.attempt.remote(attempt_id)
            access.check_harness(attempt_id, attempt, access.key_of(headers))
        return {
            "object": "list",
            "data": [
                {
                    "id": "policy",
                    "object": "model",
                    "created": 0,
                    "owned_by": "lightning_ray",
                    "max_model_len": self._config.model.max_model_len,
                }
            ],
        }

    async def _answer(
        self, attempt: AttemptInfo, request: ChatRequest, prompt: np.ndarray
    ) -> Answer:
        sampling, limit = self._config.sampling, self._config.model.max_model_len
        max_tokens = min(request.max_tokens or sampling.max_tokens, sampling.max_tokens)
        if len(prompt) >= limit:
            raise context_overflow(limit, len(prompt), max_tokens)
        max_tokens = min(max_tokens, limit - len(prompt))
        temperature = sampling.temperature
        if attempt.split is Split.VALIDATION:
            temperature = sampling.validation_temperature or temperature
        samples = await asyncio.gather(
            *[
                self._sample(attempt, request, prompt, temperature, max_tokens)
                for _ in range(request.samples)
            ]
        )
        return Answer(
            response_id=f"chatcmpl-{samples[0][1].call_id}",
            created=int(samples[0][1].started_at),
            turns=[turn for turn, _, _ in samples],
            usage=Usage(
                prompt_tokens=len(prompt),
                sampled_tokens=sum(len(call.tokens) for _, call, _ in samples),
                cached_tokens=max(cached for _, _, cached in samples),
            ),
        )

    async def _sample(
        self,
        attempt: AttemptInfo,
        request: ChatRequest,
        prompt: np.ndarray,
        temperature: float,
        max_tokens: int,
    ) -> tuple[Turn, Call, int]:
        """One recorded call: (what was said, the call, prompt tokens from the prefix cache)."""
        started = time.time()
        generation = await self._pool.generate(
            attempt.rollout_id,
            prompt,
            temperature=temperature,
            max_tokens=max_tokens,
            stop=request.stop,
        )
        turn = self._renderer.parse(request, generation.tokens, generation.finish_reason)
        call = Call(
            call_id=uuid.uuid4().hex,
            attempt_id=attempt.attempt_id,
            seq=-1,
            prompt=prompt,
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            spans=generation.spans,
            finish_reason=generation.finish_reason,
            text=self._renderer.tokenizer.decode(
                generation.tokens.tolist(), skip_special_tokens=True
            ),
            dialect=openai_chat.NAME,
            model=request.model,
            started_at=started,
            seconds=time.time() - started,
        )
        await self._store.record_call.remote(call)
        return turn, call, generation.cached_tokens


def decode(body: bytes) -> dict[str, Any]:
    """A request body as an object.

    Raises:
        ApiError: 400, it is no JSON object (orjson also refuses invalid UTF-8, lone surrogates, NaN
            and absurd nesting).
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"The body must be a JSON object, not {type(data).__name__}.")
    return data
