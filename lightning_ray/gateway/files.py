"""What pods fetch and send back over HTTP: the rooms of the store's depot (`store.depot`).

A pod has no disk in common with us. It asks for its order and its workspace, and sends back what
the harness left, with the key of its attempt. Invariants: as in `access`; a result is read only
from who may send it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_ray.gateway.access import key_of
from lightning_ray.gateway.bodies import Body
from lightning_ray.gateway.errors import ApiError
from lightning_ray.store.depot import Refusal

# Names the pod, whatever its containers: an order is handed to one pod only.
POD_HEADER = "x-lightning-ray-pod"

_REFUSALS = {
    Refusal.KEY: ApiError(401, "This key does not open this.", code="invalid_api_key"),
    Refusal.NAME: ApiError(404, "There is no such file."),
    Refusal.CLAIMED: ApiError(409, "Another pod has this order.", code="order_taken"),
}


class Files:
    """Serves pods. `store` is the handle of the store actor."""

    def __init__(self, store: Any) -> None:
        self._store = store

    async def take(self, room: str, name: str, headers: Mapping[str, str]) -> bytes:
        """A file of a room.

        Raises:
            ApiError: 401, 404, 409 (the order is another pod's).
        """
        pod = headers.get(POD_HEADER, "")[:200]
        answer = await self._store.take_file.remote(room, key_of(headers), name, pod)
        return _granted(answer)

    async def bring(self, room: str, headers: Mapping[str, str], body: Body) -> None:
        """Takes the result of a room.

        Raises:
            ApiError: 401, and what reading the body raises.
        """
        key = key_of(headers)
        if not await self._store.opens_room.remote(room, key):
            raise _REFUSALS[Refusal.KEY]
        _granted(await self._store.bring_result.remote(room, key, await body()))


def _granted(answer: Any) -> Any:
    if isinstance(answer, Refusal):
        raise _REFUSALS[answer]
    return answer
