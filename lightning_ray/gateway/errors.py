"""Errors that a harness may see, in OpenAI's shape.

Invariant: what is wrong with a request is a 4xx, which SDKs do not retry; what is wrong with us is
a 503 with `Retry-After: 20`, which every harness survives (a 429 without it kills Codex, a longer
one kills Claude Code). A 500 is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Mapping

RETRY_AFTER_SECONDS = 20


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        details: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.details = details or {}

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_SECONDS)} if self.status == 503 else {}

    @property
    def body(self) -> dict[str, object]:
        kind = _KINDS.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def bad(where: str, what: str) -> ApiError:
    """The 400 for a field of the request."""
    return ApiError(400, f"`{where}` {what}.", param=where)


def context_overflow(limit: int, prompt_tokens: int, max_tokens: int) -> ApiError:
    """The prompt does not fit. Harnesses recognise vLLM's wording and this code, and compact."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. "
        f"However, you requested {max_tokens} "
        f"output tokens and your prompt contains {prompt_tokens} input tokens, for a total of "
        f"{prompt_tokens + max_tokens} tokens. Please reduce the length of the input prompt or the "
        "number of requested output tokens.",
        code="context_length_exceeded",
        param="messages",
        details={"prompt_tokens": prompt_tokens, "limit": limit},
    )
