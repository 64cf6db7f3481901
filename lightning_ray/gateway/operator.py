"""What graders and operators may do over HTTP: everything that a harness may not.

Reads and events go to the store; rollouts are created and cancelled by the run's controller, which
is looked up by name when it is needed, since it starts after the gateway.

Invariants: a grader's key posts the reward of one rollout, once, and opens nothing else; the other
methods want the operator's key before they do anything; what a request has wrong is a 4xx.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from ray.exceptions import RayActorError

from lightning_ray.config import RunConfig
from lightning_ray.gateway import access
from lightning_ray.gateway.bodies import Body, decode
from lightning_ray.gateway.errors import ApiError, bad
from lightning_ray.records import Reward, RolloutSpec, Task
from lightning_ray.rollouts import handle
from lightning_ray.store.errors import DuplicateReward, StoreError
from lightning_ray.store.keys import hash_key
from lightning_ray.views import (
    CallPage,
    CallQuery,
    Created,
    Event,
    EventPage,
    NewEvent,
    NewRollout,
    PageQuery,
    RolloutDetail,
    RolloutPage,
    RolloutQuery,
)

# Bytes of an event's data: events are notes, not files.
MOST_EVENT_BYTES = 64 << 10

_Model = TypeVar("_Model", bound=BaseModel)
_Found = TypeVar("_Found")


class Operator:
    """Serves graders and operators. `store` is the handle of the store actor; `key_hash` is that of
    the operator's key, None if it is the store's own."""

    def __init__(self, config: RunConfig, store: Any, key_hash: str | None) -> None:
        self._config, self._store, self._key_hash = config, store, key_hash

    async def reward(
        self, rollout_id: str, headers: Mapping[str, str], body: Body
    ) -> dict[str, Any]:
        """Takes the reward of a rollout from a grader outside.

        Raises:
            ApiError: 401, 404, 400 (not a reward), 409 (it has another one already).
        """
        key = access.key_of(headers)
        expected = await self._store.grader_key.remote(rollout_id)
        access.check(hash_key(expected), key)
        data = decode(await body())
        try:
            reward = Reward(data["reward"], data.get("solved", False), data.get("metrics", {}))
        except KeyError as error:
            raise bad("reward", "is missing") from error
        except (ValueError, AttributeError, TypeError) as error:
            raise ApiError(400, f"Not a reward: {error}", param="reward") from error
        try:
            await self._store.post_reward.remote(rollout_id, reward, "post")
        except DuplicateReward as error:
            raise ApiError(409, f"Rollout {rollout_id} already has another reward.") from error
        except StoreError as error:
            raise ApiError(404, f"There is no rollout {rollout_id!r}.") from error
        return {"rollout_id": rollout_id, "reward": reward.value}

    async def check(self, headers: Mapping[str, str]) -> None:
        """Raises `ApiError` (401) unless the request carries the operator's key."""
        key = access.key_of(headers)
        expected = self._key_hash or hash_key(await self._store.operator_key.remote())
        access.check(expected, key)

    async def rollouts(self, headers: Mapping[str, str], query: RolloutQuery) -> RolloutPage:
        await self.check(headers)
        page: RolloutPage = await self._store.list_rollouts.remote(query)
        return page

    async def rollout(
        self, headers: Mapping[str, str], rollout_id: str, with_fields: bool
    ) -> RolloutDetail:
        await self.check(headers)
        return await self._detail(rollout_id, with_fields)

    async def create(self, headers: Mapping[str, str], body: Body) -> Created:
        """Queues a rollout, a group of its own that no training step waits for. Asked for again
        under the id that the caller chose, it is the rollout that there is.

        Raises:
            ApiError: 401, 400, 409 (the id belongs to another rollout), 503 (no controller runs).
        """
        await self.check(headers)
        new = _parse(NewRollout, await body())
        rollout_id = new.rollout_id or f"op-{uuid.uuid4().hex}"
        task = Task(new.task_id, new.statement, new.fields)
        spec = RolloutSpec(rollout_id, rollout_id, task, new.split, new.step)
        if await self._controller("submit", [spec]):
            raise ApiError(
                409,
                f"Rollout {rollout_id!r} exists, with another task or split.",
                param="rollout_id",
            )
        return Created(rollout_id=rollout_id)

    async def cancel(self, headers: Mapping[str, str], rollout_id: str) -> RolloutDetail:
        """Ends a rollout; when this returns, its harness is dead.

        Raises:
            ApiError: 401, 404, 409 (it is over, or nobody runs it), 503 (no controller runs).
        """
        await self.check(headers)
        known = await self._detail(rollout_id)
        if known.state.final:
            raise ApiError(409, f"Rollout {rollout_id} is over: {known.state}.")
        if not await self._controller("cancel", [rollout_id]):
            raise ApiError(409, f"Rollout {rollout_id} is not in this run's queue.")
        return await self._detail(rollout_id)

    async def calls(
        self, headers: Mapping[str, str], rollout_id: str, query: CallQuery
    ) -> CallPage:
        await self.check(headers)
        page: CallPage | None = await self._store.list_calls.remote(rollout_id, query)
        return _found(page, rollout_id, "" if query.attempt is None else f", try {query.attempt}")

    async def events(
        self, headers: Mapping[str, str], rollout_id: str, query: PageQuery
    ) -> EventPage:
        await self.check(headers)
        page: EventPage | None = await self._store.list_events.remote(rollout_id, query)
        return _found(page, rollout_id)

    async def add_event(self, headers: Mapping[str, str], rollout_id: str, body: Body) -> Event:
        """Stores an event; when this returns, it is on disk."""
        await self.check(headers)
        new = _parse(NewEvent, await body())
        if (size := len(orjson.dumps(new.data))) > MOST_EVENT_BYTES:
            raise ApiError(
                413, f"`data` has {size} bytes, {MOST_EVENT_BYTES} may be.", param="data"
            )
        at = time.time() if new.time is None else new.time
        event: Event | None = await self._store.add_event.remote(
            uuid.uuid4().hex, rollout_id, new.kind, new.data, at
        )
        return _found(event, rollout_id)

    async def _detail(self, rollout_id: str, with_fields: bool = False) -> RolloutDetail:
        detail: RolloutDetail | None = await self._store.show_rollout.remote(
            rollout_id, with_fields
        )
        return _found(detail, rollout_id)

    async def _controller(self, method: str, *args: Any) -> Any:
        try:
            actor = await asyncio.to_thread(handle.find, self._config)
        except ValueError as error:
            raise ApiError(503, "No controller runs: the run is starting or ending.") from error
        try:
            return await getattr(actor, method).remote(*args)
        except (RayActorError, handle.ControllerStopped) as error:
            raise ApiError(503, "The controller has stopped: the run is ending.") from error


def _found(answer: _Found | None, rollout_id: str, part: str = "") -> _Found:
    if answer is None:
        raise ApiError(404, f"There is no rollout {rollout_id!r}{part}.")
    return answer


def _parse(model: type[_Model], body: bytes) -> _Model:
    try:
        return model.model_validate(decode(body))
    except ValidationError as error:
        raise invalid(error.errors()[0]) from error


def invalid(problem: Mapping[str, Any]) -> ApiError:
    """The 400 for one of pydantic's errors."""
    field = ".".join(str(part) for part in problem["loc"] if part not in ("query", "path"))
    return ApiError(400, f"`{field}`: {problem['msg']}.", param=field)
