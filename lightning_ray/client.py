"""A Python client of a run's operator API: watch, start and cancel rollouts from anywhere.

>>> from lightning_ray.client import Client  # doctest: +SKIP
>>> key = Path("runs/my-run/operator.key").read_text()  # doctest: +SKIP
>>> with Client("http://127.0.0.1:8765", key) as client:  # doctest: +SKIP
...     rollout_id = client.create("mine-1", "What is 6 times 7?", {"answer": "42"})
...     for rollout in client.rollouts(state=RolloutState.RUNNING):
...         print(rollout.rollout_id, rollout.attempts)
...     for call in client.calls(rollout_id):
...         print(call.seq, call.turn.content)

Lists are iterators that fetch one page after the other. Invariant: whatever goes wrong on the way
is a `ClientError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from lightning_ray.records import Json, RolloutState, Split
from lightning_ray.views import (
    CallPage,
    CallView,
    Created,
    Event,
    EventPage,
    RolloutDetail,
    RolloutPage,
    RolloutSummary,
)

# A cancellation waits until the harness is dead: up to half a minute.
TIMEOUT_S = 60.0
_Model = TypeVar("_Model", bound=BaseModel)


class ClientError(Exception):
    """The gateway refused, with the HTTP status `status`, or could not be asked (None)."""

    def __init__(self, status: int | None, message: str) -> None:
        super().__init__(message if status is None else f"HTTP {status}: {message}")
        self.status, self.message = status, message


class Client:
    """Talks to the gateway at `base_url` (without a path) with the operator's `key`, which is in
    `operator.key` in the run directory. Every method may raise `ClientError`."""

    def __init__(self, base_url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=f"{base_url.rstrip('/')}/api/v1",
            headers={"authorization": f"Bearer {key.strip()}"},
            timeout=TIMEOUT_S,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def rollouts(
        self,
        state: RolloutState | None = None,
        split: Split | None = None,
        step: int | None = None,
        page: int = 100,
    ) -> Iterator[RolloutSummary]:
        """The rollouts that are so, oldest first, `page` of them with each request."""
        query = {"state": state, "split": split, "step": step, "limit": page}
        for answer in self._pages(RolloutPage, "/rollouts", query):
            yield from answer.rollouts

    def create(
        self,
        task_id: str,
        statement: str,
        fields: Json | None = None,
        split: Split = Split.TRAIN,
        step: int = 0,
        rollout_id: str | None = None,
    ) -> str:
        """Starts a rollout of a task; returns its id. No training step waits for it. With a
        `rollout_id` of your own, it can be asked for again when nobody knows whether the first
        request arrived; another task under that id is refused (409)."""
        body = {
            "rollout_id": rollout_id,
            "task_id": task_id,
            "statement": statement,
            "fields": fields or {},
            "split": split,
            "step": step,
        }
        return self._ask(Created, "POST", "/rollouts", json=body).rollout_id

    def rollout(self, rollout_id: str, with_fields: bool = False) -> RolloutDetail:
        """All about one rollout; `with_fields` also what the agent must not see of its task."""
        params = {"fields": with_fields}
        return self._ask(RolloutDetail, "GET", _path(rollout_id), params=params)

    def cancel(self, rollout_id: str) -> RolloutDetail:
        """Ends a rollout; on return its harness is dead."""
        return self._ask(RolloutDetail, "POST", _path(rollout_id, "/cancel"))

    def calls(
        self,
        rollout_id: str,
        attempt: int | None = None,
        tokens: bool = False,
        page: int = 100,
    ) -> Iterator[CallView]:
        """The model calls of one attempt (by default the last one); with `tokens` also the token
        ids and log-probs."""
        query = {"attempt": attempt, "tokens": tokens, "limit": page}
        for answer in self._pages(CallPage, _path(rollout_id, "/calls"), query):
            yield from answer.calls

    def events(self, rollout_id: str, after: int | None = None, page: int = 100) -> Iterator[Event]:
        """What was reported of a rollout, oldest first, from behind the event with the `seq`
        `after`."""
        query = {"after": after, "limit": page}
        for answer in self._pages(EventPage, _path(rollout_id, "/events"), query):
            yield from answer.events

    def add_event(
        self, rollout_id: str, kind: str, data: Json | None = None, time: float | None = None
    ) -> Event:
        """Reports something of a rollout; `time` in seconds since the epoch, by default now."""
        body = {"kind": kind, "data": data or {}, "time": time}
        return self._ask(Event, "POST", _path(rollout_id, "/events"), json=body)

    def _pages(self, model: type[_Model], path: str, query: dict[str, Any]) -> Iterator[_Model]:
        params = {name: value for name, value in query.items() if value is not None}
        while True:
            page: Any = self._ask(model, "GET", path, params=params)
            yield page
            if page.next is None:
                return
            params["after"] = page.next

    def _ask(self, model: type[_Model], method: str, path: str, **options: Any) -> _Model:
        try:
            answer = self._http.request(method, path, **options)
        except (httpx.HTTPError, ValueError) as error:
            raise ClientError(None, f"{method} {path}: {error}") from error
        if not answer.is_success:
            raise ClientError(answer.status_code, _message(answer))
        try:
            return model.model_validate_json(answer.content)
        except ValidationError as error:
            raise ClientError(
                answer.status_code, f"{method} {path}: not the answer of a gateway ({error})"
            ) from error


def _path(rollout_id: str, rest: str = "") -> str:
    return f"/rollouts/{quote(rollout_id, safe='')}{rest}"


def _message(answer: httpx.Response) -> str:
    """The message of an error in OpenAI's shape; of another one, what it says."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
