"""The Ray Serve deployment: HTTP routes around `service.Service`.

Invariants: every answer that is not a 200 has the error shape of its protocol; a body is read only
for who may send it, and refused before it is read whole if it is too large, too slow or compressed;
a request that we fail to serve by a bug is a 500 with an
id that is in the log.
"""

from __future__ import annotations

import logging
import uuid
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import ORJSONResponse, StreamingResponse
from ray import serve
from ray.exceptions import RayActorError
from starlette.exceptions import HTTPException

from lightning_ray.config import RunConfig
from lightning_ray.engine.pool import EnginePool
from lightning_ray.gateway import operator
from lightning_ray.gateway.bodies import Body, read
from lightning_ray.gateway.dialects import (
    Dialect,
    anthropic_messages,
    openai_chat,
    openai_responses,
)
from lightning_ray.gateway.dispatch import Dispatch
from lightning_ray.gateway.errors import ApiError
from lightning_ray.gateway.files import Files
from lightning_ray.gateway.render import Renderer
from lightning_ray.gateway.service import Service

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
app.include_router(operator.router)


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
    return await _api_error(request, operator.invalid(error.errors()[0]))


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
        self._operator = operator.Operator(config, store, operator_hash)
        self._files = Files(store)
        self._service = Service(
            config,
            Renderer(model_dir, config.model),
            EnginePool(engines, config.engine.restart_timeout_s),
            store,
        )

    def __serve_build_asgi_app__(self) -> Dispatch:
        self.app.state.operator = self._operator  # type: ignore[attr-defined]
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
                self._body(request),
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
        body = self._body(request)
        return ORJSONResponse(await self._operator.reward(rollout_id, request.headers, body))

    # -- files for and from pods ----------------------------------------------------------------

    @app.get("/rollout/{room}/files/{name}", response_class=Response, responses=_BYTES)
    async def take_file(self, room: str, name: str, request: Request) -> Response:
        content = await self._files.take(room, name, request.headers)
        return Response(content, media_type="application/octet-stream")

    @app.put("/rollout/{room}/files/result", status_code=204, response_class=Response)
    async def bring_result(self, room: str, request: Request) -> Response:
        await self._files.bring(room, request.headers, self._body(request))
        return Response(status_code=204)

    @app.get("/healthz")
    async def health(self) -> Response:
        return ORJSONResponse({"status": "ok"})

    async def _call(self, dialect: Dialect, attempt_id: str, request: Request) -> Response:
        try:
            body = self._body(request)
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

    def _body(self, request: Request) -> Body:
        return partial(read, request, self._config.gateway)
