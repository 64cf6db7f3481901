"""Model calls go straight to the service, past FastAPI.

FastAPI finds a route, solves its parameters and checks its answer for every request: a fifth of
what a model call costs in a replica, and it does nothing for one, which reads its own body and
writes its own answer. So the few paths of model calls are looked for first, everything else is
FastAPI's. FastAPI knows these routes too: they are in the OpenAPI document, and it answers other
methods and spellings of their paths.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lightning_ray.gateway.dialects import (
    Dialect,
    anthropic_messages,
    openai_chat,
    openai_responses,
)

DIALECTS: Mapping[str, Dialect] = {
    "chat/completions": openai_chat,
    "responses": openai_responses,
    "messages": anthropic_messages,
}
_PATH = re.compile(f"/rollout/([^/]+)/v1/({'|'.join(DIALECTS)})")


class Dispatch:
    """The ASGI application of a replica. `call` answers a model call, and `bug` one that it failed
    to answer."""

    def __init__(
        self,
        app: ASGIApp,
        call: Callable[[Dialect, str, Request], Awaitable[Response]],
        bug: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app, self._call, self._bug = app, call, bug

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model_call = (
            _PATH.fullmatch(scope["path"])
            if scope["type"] == "http" and scope["method"] == "POST"
            else None
        )
        if model_call is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await self._call(DIALECTS[model_call[2]], model_call[1], request)
        except Exception as error:
            response = await self._bug(request, error)
        await response(scope, receive, send)
