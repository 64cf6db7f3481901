"""What graders and operators may do over HTTP: everything that a harness may not.

Reads and events go to the store; rollouts are created and cancelled by the run's controller, which
is looked up by name when it is needed, since it starts after the gateway.

Invariants: a grader's key posts the reward of one rollout, once, and opens nothing else; the routes
of `router` want the operator's key before anything else; what a request has wrong is a 4xx.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ValidationError
from ray.exceptions import RayActorError

from lightning_ray.config import RunConfig
from lightning_ray.gateway import access
from lightning_ray.gateway.bodies import Body, decode, read
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
        self.config, self.store, self._key_hash = config, store, key_hash

    async def reward(
        self, rollout_id: str, headers: Mapping[str, str], body: Body
    ) -> dict[str, Any]:
        """Takes the reward of a rollout from a grader outside.

        Raises:
            ApiError: 401, 404, 400 (not a reward), 409 (it has another one already).
        """
        key = access.key_of(headers)
        expected = await self.store.grader_key.remote(rollout_id)
        access.check(hash_key(expected), key)
        data = decode(await body())
        try:
            reward = Reward(data["reward"], data.get("solved", False), data.get("metrics", {}))
        except KeyError as error:
            raise bad("reward", "is missing") from error
        except (ValueError, AttributeError, TypeError) as error:
            raise ApiError(400, f"Not a reward: {error}", param="reward") from error
        try:
            await self.store.post_reward.remote(rollout_id, reward, "post")
        except DuplicateReward as error:
            raise ApiError(409, f"Rollout {rollout_id} already has another reward.") from error
        except StoreError as error:
            raise ApiError(404, f"There is no rollout {rollout_id!r}.") from error
        return {"rollout_id": rollout_id, "reward": reward.value}

    async def check(self, headers: Mapping[str, str]) -> None:
        """Raises `ApiError` (401) unless the request carries the operator's key."""
        key = access.key_of(headers)
        expected = self._key_hash or hash_key(await self.store.operator_key.remote())
        access.check(expected, key)

    async def detail(self, rollout_id: str, with_fields: bool = False) -> RolloutDetail:
        detail: RolloutDetail | None = await self.store.show_rollout.remote(rollout_id, with_fields)
        return _found(detail, rollout_id)

    async def controller(self, method: str, *args: Any) -> Any:
        try:
            actor = await asyncio.to_thread(handle.find, self.config)
        except ValueError as error:
            raise ApiError(503, "No controller runs: the run is starting or ending.") from error
        try:
            return await getattr(actor, method).remote(*args)
        except (RayActorError, handle.ControllerStopped) as error:
            raise ApiError(503, "The controller has stopped: the run is ending.") from error


async def _allowed(request: Request) -> Operator:
    """Serves a request that carries the operator's key.

    Raises:
        ApiError: 401, it carries another key or none.
    """
    operator: Operator = request.app.state.operator
    await operator.check(request.headers)
    return operator


_Allowed = Annotated[Operator, Depends(_allowed)]
# What FastAPI checks of a query or path comes after the key, and so does all that a route does.
router = APIRouter(prefix="/api/v1", dependencies=[Depends(_allowed)])


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    """Describes a body in the OpenAPI document. FastAPI does not read it: it would read bodies of
    any size, from anybody."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)  # they are in the answers' models too
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.get("/rollouts")
async def list_rollouts(operator: _Allowed, query: Annotated[RolloutQuery, Query()]) -> RolloutPage:
    page: RolloutPage = await operator.store.list_rollouts.remote(query)
    return page


@router.post("/rollouts", status_code=201, openapi_extra=_takes(NewRollout))
async def create_rollout(operator: _Allowed, request: Request) -> Created:
    """Queues a rollout, a group of its own that no training step waits for. Asked for again under
    the id that the caller chose, it is the rollout that there is."""
    new = _parse(NewRollout, await read(request, operator.config.gateway))
    rollout_id = new.rollout_id or f"op-{uuid.uuid4().hex}"
    task = Task(new.task_id, new.statement, new.fields)
    spec = RolloutSpec(rollout_id, rollout_id, task, new.split, new.step)
    if await operator.controller("submit", [spec]):
        raise ApiError(
            409, f"Rollout {rollout_id!r} exists, with another task or split.", param="rollout_id"
        )
    return Created(rollout_id=rollout_id)


@router.get("/rollouts/{rollout_id}")
async def show_rollout(operator: _Allowed, rollout_id: str, fields: bool = False) -> RolloutDetail:
    return await operator.detail(rollout_id, fields)


@router.post("/rollouts/{rollout_id}/cancel")
async def cancel_rollout(operator: _Allowed, rollout_id: str) -> RolloutDetail:
    """Ends a rollout; when this returns, its harness is dead."""
    known = await operator.detail(rollout_id)
    if known.state.final:
        raise ApiError(409, f"Rollout {rollout_id} is over: {known.state}.")
    if not await operator.controller("cancel", [rollout_id]):
        raise ApiError(409, f"Rollout {rollout_id} is not in this run's queue.")
    return await operator.detail(rollout_id)


@router.get("/rollouts/{rollout_id}/calls")
async def list_calls(
    operator: _Allowed, rollout_id: str, query: Annotated[CallQuery, Query()]
) -> CallPage:
    page: CallPage | None = await operator.store.list_calls.remote(rollout_id, query)
    return _found(page, rollout_id, "" if query.attempt is None else f", try {query.attempt}")


@router.get("/rollouts/{rollout_id}/events")
async def list_events(
    operator: _Allowed, rollout_id: str, query: Annotated[PageQuery, Query()]
) -> EventPage:
    page: EventPage | None = await operator.store.list_events.remote(rollout_id, query)
    return _found(page, rollout_id)


@router.post("/rollouts/{rollout_id}/events", status_code=201, openapi_extra=_takes(NewEvent))
async def add_event(operator: _Allowed, rollout_id: str, request: Request) -> Event:
    """Stores an event; when this returns, it is on disk."""
    new = _parse(NewEvent, await read(request, operator.config.gateway))
    if (size := len(orjson.dumps(new.data))) > MOST_EVENT_BYTES:
        raise ApiError(413, f"`data` has {size} bytes, {MOST_EVENT_BYTES} may be.", param="data")
    at = time.time() if new.time is None else new.time
    event: Event | None = await operator.store.add_event.remote(
        uuid.uuid4().hex, rollout_id, new.kind, new.data, at
    )
    return _found(event, rollout_id)


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
