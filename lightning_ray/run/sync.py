"""New weights from the trainer into the engines, in one of two ways.

By file: the trainer writes them, leaves the GPU, and the engines read them. From memory: the
engines wake for weights only, each trainer rank sends them to the engine worker in its bundle, the
trainer leaves the GPU, the engines go on; meanwhile the file is written all the same, since an
engine that is started again later reads it.

Invariants: trainer and KV cache are never on a GPU together; the policy file names a version only
when its weights are whole on disk; the weights are gathered once; an engine that dies on the way
reads them from disk.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lightning_ray.config import RunConfig
from lightning_ray.engine.actor import Policy
from lightning_ray.placement import WeightSyncWay
from lightning_ray.records import PolicyVersion
from lightning_ray.run.stack import Stack
from lightning_ray.trainer.trainer import Trainer

# Longest time that a trainer rank waits for its engine worker, in seconds: a bucket takes one, the
# first waits until the engine is awake.
SILENCE_S = 60.0


class WeightSync:
    """See the module. `folder` is where the weights are written."""

    def __init__(
        self, config: RunConfig, way: WeightSyncWay, trainer: Trainer, stack: Stack, folder: Path
    ) -> None:
        self._config, self._way, self._folder = config, way, folder
        self._trainer, self._stack = trainer, stack
        # Thrice this is less than what all else may wait: a lost engine is no lost trainer.
        self._silence_s = min(SILENCE_S, config.run.wait_timeout_s / 4)
        if way is WeightSyncWay.MEMORY:
            trainer.open_doors()  # what cannot work is said here, not after the first update

    def policy(self, version: PolicyVersion) -> Policy:
        return Policy(str(self._folder / f"step-{version.step:05d}.safetensors"), version)

    def hand_over(self, version: PolicyVersion) -> float:
        """Puts the trainer's weights into the drained engines as `version` and opens the gate;
        returns when it opened (monotonic). The trainer sleeps afterwards.

        Raises:
            RunError: see `Stack.load`.
        """
        policy, verify = self.policy(version), self._config.engine.verify_sync
        Path(policy.path).unlink(missing_ok=True)  # of a step that was rolled back
        if self._way is WeightSyncWay.MEMORY:
            self._trainer.make_room()
            doors = self._trainer.open_doors()[: self._config.engine_workers]
            self._stack.feed(
                version,
                doors,
                # While a rank waits in vain for its engine, the others wait for the rank.
                3 * self._silence_s,
                verify,
                lambda: self._trainer.gather(doors, self._silence_s),
            )
        else:
            self._trainer.gather()
        self._trainer.sleep()
        with ThreadPoolExecutor(1) as background:
            written = background.submit(self._write, policy)
            if self._way is WeightSyncWay.FILE or verify:
                written.result()
            self._stack.load(policy, written.result() if verify else None)
            opened = time.monotonic()
            written.result()
        for old in self._folder.glob("*.safetensors"):
            if old != Path(policy.path):
                old.unlink()
        return opened

    def _write(self, policy: Policy) -> str:
        """Writes the file, and has engines that are started again read it; its checksum."""
        digest = self._trainer.write(Path(policy.path))
        self._stack.remember(policy)
        return digest
