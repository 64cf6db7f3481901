"""The Ray Serve deployment: HTTP routes around `service.Service`.

Invariants: every answer that is not a 200 has the error shape of its protocol; a body above the
limit is refused before it is read whole; a request that we fail to serve by a bug is a 500 with an
id that is in the log.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import ORJSONResponse, StreamingResponse
from ray import serve
from starlette.exceptions import HTTPException

from lightning_ray.config import RunConfig
from lightning_ray.engine.pool import EnginePool
from lightning_ray.gateway.dialects import (
    Dialect,
    anthropic_messages,
    openai_chat,
    openai_responses,
)
from lightning_ray.gateway.errors import ApiError
from lightning_ray.gateway.operator import Operator
from lightning_ray.gateway.render import Renderer
from lightning_ray.gateway.service import Service

log = logging.getLogger("ray.serve")  # the only logger that Serve writes to the replica's file
# Proxies in between must pass events on as they come.
_NO_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
app = FastAPI(title="lightning_ray gateway", docs_url=None, redoc_url=None)


@app.exception_handler(ApiError)
async def _api_error(request: Request, error: ApiError) -> Response:
    return ORJSONResponse(error.body, error.status, headers=error.headers)


@app.exception_handler(HTTPException)
async def _http_error(request: Request, error: HTTPException) -> Response:
    known = {404: f"No such route: {request.method} {request.url.path}", 405: "Method not allowed"}
    return await _api_error(
        request, ApiError(error.status_code, known.get(error.status_code, str(error.detail)))
    )


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

    def __init__(self, config: RunConfig, model_dir: str, engines: list[Any], store: Any) -> None:
        self._most_bytes = config.gateway.max_body_mib << 20
        self._operator = Operator(store)
        self._service = Service(
            config, Renderer(model_dir, config.model), EnginePool(engines), store
        )

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
            body = await self._body(request)
            count = await self._service.count(
                anthropic_messages.count_request, attempt_id, request.headers, body
            )
        except ApiError as error:
            return _refusal(anthropic_messages, error)
        return ORJSONResponse({"input_tokens": count})

    @app.head("/rollout/{attempt_id}")
    @app.head("/rollout/{attempt_id}/")
    async def probe(self, attempt_id: str) -> Response:
        """Claude Code looks whether its base URL is there."""
        return Response()

    @app.get("/rollout/{attempt_id}/v1/models")
    async def attempt_models(self, attempt_id: str, request: Request) -> Response:
        return ORJSONResponse(await self._service.models(attempt_id, request.headers))

    @app.get("/v1/models")
    async def models(self, request: Request) -> Response:
        return ORJSONResponse(await self._service.models(None, request.headers))

    @app.post("/rollout/{rollout_id}/reward")
    async def reward(self, rollout_id: str, request: Request) -> Response:
        body = await self._body(request)
        return ORJSONResponse(await self._operator.reward(rollout_id, request.headers, body))

    @app.get("/healthz")
    async def health(self) -> Response:
        return ORJSONResponse({"status": "ok"})

    async def _call(self, dialect: Dialect, attempt_id: str, request: Request) -> Response:
        try:
            body = await self._body(request)
            answer = await self._service.answer(dialect, attempt_id, request.headers, body)
        except ApiError as error:
            return _refusal(dialect, error)
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/json")
        return StreamingResponse(answer, media_type="text/event-stream", headers=_NO_BUFFER)

    async def _body(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "0")
        received = bytearray()
        if not declared.isdigit() or int(declared) <= self._most_bytes:
            async for chunk in request.stream():
                received += chunk
                if len(received) > self._most_bytes:
                    break
            else:
                return bytes(received)
        raise ApiError(413, f"The body is larger than {self._most_bytes >> 20} MiB.")
