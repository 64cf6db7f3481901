"""What graders and operators may do over HTTP: everything that a harness may not.

Invariant: a grader's key posts the reward of one rollout, once, and opens nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_ray.gateway import access
from lightning_ray.gateway.errors import ApiError
from lightning_ray.gateway.service import decode
from lightning_ray.records import Reward
from lightning_ray.store.errors import DuplicateReward, StoreError


class Operator:
    """Serves graders and operators. `store` is the handle of the store actor."""

    def __init__(self, store: Any) -> None:
        self._store = store

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
