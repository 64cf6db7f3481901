"""The Ray Serve deployment: HTTP routes around `service.Service`.

Invariants: every answer that is not a 200 has the error shape of its protocol; a body is read only
for who may send it, and refused before it is read whole if it is too large, too slow or compressed;
a request that we fail to serve by a bug is a 500 with an
id that is in the log.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import ORJSONResponse, StreamingResponse
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayActorError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lightning_ray.config import RunConfig
from lightning_ray.engine.pool import EnginePool
from lightning_ray.gateway.dialects import (
    Dialect,
    anthropic_messages,
    openai_chat,
    openai_responses,
)
from lightning_ray.gateway.dispatch import Dispatch
from lightning_ray.gateway.errors import ApiError
from lightning_ray.gateway.files import Files
from lightning_ray.gateway.operator import Operator, invalid
from lightning_ray.gateway.render import Renderer
from lightning_ray.gateway.service import Service
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

log = logging.getLogger("ray.serve")  # the only logger that Serve writes to the replica's file
# Proxies in between must pass events on as they come.
_NO_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# For the OpenAPI document, in place of FastAPI's own 422.
_REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "Refused: an error in the shape of the route's protocol."},
    503: {"description": "An update, or something is starting again: see `Retry-After`."},
}
_BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}


app = FastAPI(title="lightning_ray gateway", docs_url=None, redoc_url=None, responses=_REFUSALS)


@app.exception_handler(ApiError)
async def _api_error(request: Request, error: ApiError) -> Response:
    return ORJSONResponse(error.body, error.status, headers=error.headers)


@app.exception_handler(HTTPException)
async def _http_error(request: Request, error: HTTPException) -> Response:
    known = {404: f"No such route: {request.method} {request.url.path}", 405: "Method not allowed"}
    return await _api_error(
        request, ApiError(error.status_code, known.get(error.status_code, str(error.detail)))
    )


@app.exception_handler(RequestValidationError)
async def _bad_parameter(request: Request, error: RequestValidationError) -> Response:
    return await _api_error(request, invalid(error.errors()[0]))


@app.exception_handler(RayActorError)
async def _no_store(request: Request, error: RayActorError) -> Response:
    return await _api_error(request, ApiError(503, "The store is starting again."))


@app.exception_handler(Exception)
async def _bug(request: Request, error: Exception) -> Response:
    number = uuid.uuid4().hex[:12]
    log.error("request %s failed", number, exc_info=error)
    return await _api_error(
        request, ApiError(500, f"This is a bug in lightning_ray; see {number} in the log.")
    )


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    """Describes a body in the OpenAPI document. FastAPI does not read it: it would read bodies of
    any size, from anybody."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)  # they are in the answers' models too
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _refusal(dialect: Dialect, error: ApiError) -> Response:
    return ORJSONResponse(dialect.error(error), error.status, headers=error.headers)


# What this class uses must stand above it: Serve pickles the class here.
@serve.ingress(app)
class GatewayDeployment:
    """One gateway replica."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: str,
        engines: list[Any],
        store: Any,
        operator_hash: str | None,
    ) -> None:
        self._config = config
        self._operator = Operator(config, store, operator_hash)
        self._files = Files(store)
        self._service = Service(
            config,
            Renderer(model_dir, config.model),
            EnginePool(engines, config.engine.restart_timeout_s),
            store,
        )

    def __serve_build_asgi_app__(self) -> Dispatch:
        return Dispatch(self.app, self._call, _bug)  # type: ignore[attr-defined]

    @app.post("/rollout/{attempt_id}/v1/chat/completions")
    async def chat(self, attempt_id: str, request: Request) -> Response:
        return await self._call(openai_chat, attempt_id, request)

    @app.post("/rollout/{attempt_id}/v1/responses")
    async def responses(self, attempt_id: str, request: Request) -> Response:
        return await self._call(openai_responses, attempt_id, request)

    @app.post("/rollout/{attempt_id}/v1/messages")
    async def messages(self, attempt_id: str, request: Request) -> Response:
        return await self._call(anthropic_messages, attempt_id, request)

    @app.post("/rollout/{attempt_id}/v1/messages/count_tokens")
    async def count_tokens(self, attempt_id: str, request: Request) -> Response:
        try:
            count = await self._service.count(
                anthropic_messages.count_request,
                attempt_id,
                request.headers,
                partial(self._body, request),
            )
        except ApiError as error:
            return _refusal(anthropic_messages, error)
        return ORJSONResponse({"input_tokens": count})

    @app.head("/rollout/{attempt_id}", response_class=Response)
    @app.head("/rollout/{attempt_id}/", response_class=Response)
    async def probe(self, attempt_id: str) -> Response:
        """Claude Code looks whether its base URL is there."""
        return Response()

    @app.get("/rollout/{attempt_id}/v1/models")
    async def attempt_models(self, attempt_id: str, request: Request) -> Response:
        await self._service.admit(attempt_id, request.headers)
        return self._models()

    @app.get("/v1/models")
    async def models(self) -> Response:
        return self._models()

    @app.post("/rollout/{rollout_id}/reward")
    async def reward(self, rollout_id: str, request: Request) -> Response:
        body = partial(self._body, request)
        return ORJSONResponse(await self._operator.reward(rollout_id, request.headers, body))

    # -- files for and from pods ----------------------------------------------------------------

    @app.get("/rollout/{room}/files/{name}", response_class=Response, responses=_BYTES)
    async def take_file(self, room: str, name: str, request: Request) -> Response:
        content = await self._files.take(room, name, request.headers)
        return Response(content, media_type="application/octet-stream")

    @app.put("/rollout/{room}/files/result", status_code=204, response_class=Response)
    async def bring_result(self, room: str, request: Request) -> Response:
        await self._files.bring(room, request.headers, partial(self._body, request))
        return Response(status_code=204)

    # -- the operator API -----------------------------------------------------------------------

    @app.get("/api/v1/rollouts")
    async def list_rollouts(
        self, request: Request, query: Annotated[RolloutQuery, Query()]
    ) -> RolloutPage:
        return await self._operator.rollouts(request.headers, query)

    @app.post("/api/v1/rollouts", status_code=201, openapi_extra=_takes(NewRollout))
    async def create_rollout(self, request: Request) -> Created:
        return await self._operator.create(request.headers, partial(self._body, request))

    @app.get("/api/v1/rollouts/{rollout_id}")
    async def show_rollout(
        self, rollout_id: str, request: Request, fields: bool = False
    ) -> RolloutDetail:
        return await self._operator.rollout(request.headers, rollout_id, fields)

    @app.post("/api/v1/rollouts/{rollout_id}/cancel")
    async def cancel_rollout(self, rollout_id: str, request: Request) -> RolloutDetail:
        return await self._operator.cancel(request.headers, rollout_id)

    @app.get("/api/v1/rollouts/{rollout_id}/calls")
    async def list_calls(
        self, rollout_id: str, request: Request, query: Annotated[CallQuery, Query()]
    ) -> CallPage:
        return await self._operator.calls(request.headers, rollout_id, query)

    @app.get("/api/v1/rollouts/{rollout_id}/events")
    async def list_events(
        self, rollout_id: str, request: Request, query: Annotated[PageQuery, Query()]
    ) -> EventPage:
        return await self._operator.events(request.headers, rollout_id, query)

    @app.post(
        "/api/v1/rollouts/{rollout_id}/events", status_code=201, openapi_extra=_takes(NewEvent)
    )
    async def add_event(self, rollout_id: str, request: Request) -> Event:
        body = partial(self._body, request)
        return await self._operator.add_event(request.headers, rollout_id, body)

    @app.get("/healthz")
    async def health(self) -> Response:
        return ORJSONResponse({"status": "ok"})

    async def _call(self, dialect: Dialect, attempt_id: str, request: Request) -> Response:
        try:
            body = partial(self._body, request)
            answer = await self._service.answer(dialect, attempt_id, request.headers, body)
        except ApiError as error:
            return _refusal(dialect, error)
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/json")
        return StreamingResponse(answer, media_type="text/event-stream", headers=_NO_BUFFER)

    def _models(self) -> Response:
        """The list of models: one, the policy."""
        policy = {
            "id": "policy",
            "object": "model",
            "created": 0,
            "owned_by": "lightning_ray",
            "max_model_len": self._config.model.max_model_len,
        }
        return ORJSONResponse({"object": "list", "data": [policy]})

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "The body is compressed; send it as it is.")
        limits = self._config.gateway
        most, seconds = limits.max_body_mib << 20, limits.body_timeout_s
        declared = request.headers.get("content-length", "0")
        received = bytearray()
        try:
            if not declared.isdigit() or int(declared) <= most:
                async with asyncio.timeout(seconds):
                    async for chunk in request.stream():
                        received += chunk
                        if len(received) > most:
                            break
                    else:
                        return bytes(received)
        except TimeoutError as error:
            raise ApiError(408, f"The body did not come within {seconds:g} s.") from error
        except ClientDisconnect as error:
            raise ApiError(400, "The client left before its body had come.") from error
        raise ApiError(413, f"The body is larger than {limits.max_body_mib} MiB.")
