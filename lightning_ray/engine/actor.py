"""One vLLM engine in a Ray actor.

`generate` takes token ids and returns sampled token ids with the log-probabilities of the behaviour
policy (temperature included) and the policy versions that sampled them. `drain` ends or interrupts
what runs, `load_policy` puts new weights into the running engine (from their file, unless
`receive_policy` has taken them from the trainer's memory before), and what was interrupted goes on.
If the process dies, Ray starts the actor again and it comes back with the weights named by the
policy file, not with the base model.

Invariants: a token is stamped with the version that was loaded when it was sampled; the prefix
cache is empty after a change of weights; an engine with half of the new weights ends; the process
never hosts the trainer (vLLM replaces `torch.set_num_threads` and reseeds).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ray.config import RunConfig
from lightning_ray.engine.admission import Door, Limit
from lightning_ray.engine.courier import EngineDead, Exchange
from lightning_ray.engine.partial import Generation, Partial
from lightning_ray.files import replace
from lightning_ray.records import FinishReason, PolicyVersion

# Set in the engine's process before vLLM is imported. No telemetry, no hub, no forked tokenizers.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_CPU_ENVIRONMENT = {
    # vLLM's CPU worker runs in one process only with the in-process executor.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Idle OpenMP threads sleep instead of spinning: harnesses and the trainer need the same cores.
    "OMP_WAIT_POLICY": "PASSIVE",
}


# Between two looks at what still runs, while draining, or at whether a policy's file is there.
POLL_S = 0.05


class EngineStartError(RuntimeError):
    """vLLM did not start; the message says why and which setting to change."""


@dataclass(frozen=True)
class Drained:
    """How a drain went: the generations that were interrupted, and the seconds since the drain
    before in which any was running."""

    interrupted: int
    busy_s: float


@dataclass(frozen=True)
class Policy:
    """Weights on disk (safetensors, Hugging Face names) and the version they are."""

    path: str
    version: PolicyVersion

    def write(self, pointer: Path) -> None:
        """Makes `pointer` (the policy file) name these weights, atomically."""
        version = self.version
        said = {"path": self.path, "lineage": version.lineage, "step": version.step}
        replace(pointer, json.dumps(said).encode())

    @staticmethod
    def read(pointer: Path) -> Policy | None:
        if not pointer.exists():
            return None
        data = json.loads(pointer.read_text())
        return Policy(data["path"], PolicyVersion(data["lineage"], data["step"]))


def asleep(pointer: Path) -> Path:
    """The file that is there while engines must not start by themselves."""
    return pointer.with_name("asleep")


def environment(config: RunConfig, on_gpu: bool) -> dict[str, str]:
    """Environment variables of an engine's process."""
    if on_gpu:
        return dict(_ENVIRONMENT)
    return {
        **_ENVIRONMENT,
        **_CPU_ENVIRONMENT,
        "VLLM_CPU_KVCACHE_SPACE": str(config.engine.cpu_kv_cache_gib),
        "OMP_NUM_THREADS": str(config.engine.threads),
    }


class EngineActor(Exchange):
    """See the module. `pointer` is the path of the policy file; without one the base model is
    served as `base_version`."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: str,
        pointer: str,
        base_version: PolicyVersion,
        on_gpu: bool,
    ) -> None:
        self._config, self._model_dir, self._pointer = config, model_dir, Path(pointer)
        self._version, self._on_gpu = base_version, on_gpu
        self._llm: Any = None
        self._starting = asyncio.Lock()
        self._numbers = 0
        self._door = Door(Limit(config.engine.max_num_seqs))
        self._running: dict[str, bool] = {}  # vLLM's request ids; True: under a grammar
        self._busy_s = self._busy_since = 0.0
        self._asleep = set[str]()  # what sleeps, by vLLM's tags
        # The version whose weights came from the trainer's memory, and their checksum.
        self._received: tuple[PolicyVersion, str | None] | None = None
        # Set while the weights are whole: a call that comes in between waits.
        self._usable = asyncio.Event()
        self._usable.set()

    async def ready(self) -> PolicyVersion:
        """Starts vLLM if it is not running; the version it serves.

        Raises:
            EngineStartError: the model does not fit, or vLLM refused it.
        """
        async with self._starting:
            if self._llm is None:
                self._llm = self._start()
                policy = Policy.read(self._pointer)
                if policy is not None:
                    await self._load(policy, verify=False)
        return self._version

    async def generate(
        self,
        prompt: np.ndarray,
        *,
        temperature: float,
        max_tokens: int,
        stop: tuple[str, ...] = (),
        constraint: Any = None,
        seed: int | None = None,
    ) -> Generation:
        """Samples up to `max_tokens` tokens after `prompt` (int32 token ids); `constraint` is
        vLLM's StructuredOutputsParams.

        Raises:
            EngineDead: vLLM's core process is gone.
            ValueError: vLLM refused the request.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        while self._llm is None and asleep(self._pointer).exists():
            await asyncio.sleep(POLL_S)  # started again during an update: the trainer has the GPU
        await self.ready()
        async with self._door.inside():
            made = Partial(stop, self._llm.get_tokenizer().decode)
            while True:
                params = SamplingParams(
                    temperature=temperature,
                    max_tokens=max_tokens - len(made.tokens),
                    stop=list(stop) or None,
                    structured_outputs=constraint,
                    seed=seed,
                    logprobs=0,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                await self._usable.wait()
                version = self._version
                final = await self._sample([*prompt.tolist(), *made.tokens], params)
                sampled = final.outputs[0]
                logprobs = [
                    at[token].logprob
                    for at, token in zip(sampled.logprobs or (), sampled.token_ids, strict=True)
                ]
                if made.add(sampled.token_ids, logprobs, version, final.num_cached_tokens or 0):
                    return made.finished(FinishReason.STOP)
                if sampled.finish_reason != FinishReason.ABORT:
                    return made.finished(FinishReason(sampled.finish_reason))
                if len(made.tokens) >= max_tokens:
                    return made.finished(FinishReason.LENGTH)

    async def _sample(self, prompt: list[int], params: Any) -> Any:
        """vLLM's output for one request, whole, or as far as it came when it was interrupted."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self._numbers += 1
        name, final = f"g{self._numbers}", None
        if not self._running:
            self._busy_since = time.monotonic()
        self._running[name] = params.structured_outputs is not None
        try:
            request = {"prompt_token_ids": prompt}
            async for output in self._llm.generate(request, params, request_id=name):
                final = output
        except EngineDeadError as error:
            _end_soon()
            raise EngineDead(f"vLLM's core process died: {error}") from error
        finally:
            del self._running[name]
            if not self._running:
                self._busy_s += time.monotonic() - self._busy_since
        if final is None:
            raise EngineDead("vLLM ended the generation without an output")
        return final

    async def receive_policy(
        self, version: PolicyVersion, doors: Sequence[str], limit_s: float, verify: bool
    ) -> None:
        """Takes the weights of `version` that trainer ranks send to `doors`, one for each vLLM
        worker, into a drained engine; `load_policy` then puts them to use, and no call is served
        before.

        Raises:
            EngineDead: it is not drained, since it was started again meanwhile; or they did not
                come, and the process ends.
        """
        if self._llm is None or self._usable.is_set():  # a drained one is not usable
            raise EngineDead("it was started again during the update")
        try:
            await self._wake("weights")
            digests = await self._llm.collective_rpc(
                "receive_policy", None, (doors, limit_s, verify)
            )
        except Exception as error:
            _end_soon()
            raise EngineDead(f"the weights of the trainer did not come: {error!r}") from error
        self._received = version, _one(digests)

    async def load_policy(self, policy: Policy, verify: bool) -> str | None:
        """Loads new weights and stamps what is sampled from here on. Returns the checksum of the
        tensors that were loaded if `verify`.

        Raises:
            RuntimeError: a generation is running; its tokens would belong to two policies.
        """
        await self.ready()
        self._check_drained()
        self._usable.clear()
        digest = await self._load(policy, verify)
        self._usable.set()  # only now: weights that came in part must not sample
        return digest

    async def drain(self, within_s: float | None = None) -> Drained:
        """Lets new generations wait until weights are loaded; returns when none is running. Those
        that still run after `within_s` seconds are interrupted, except under a grammar: they go on
        when the new weights are there."""
        self._usable.clear()
        loop = asyncio.get_running_loop()
        deadline, interrupted = loop.time() + (within_s or 0), 0
        while self._running:
            if within_s is not None and loop.time() >= deadline:
                stopped = [name for name, constrained in self._running.items() if not constrained]
                interrupted += len(stopped)
                await self._llm.abort(stopped)
                deadline = math.inf
            await asyncio.sleep(POLL_S)
        busy_s, self._busy_s = self._busy_s, 0.0
        return Drained(interrupted, busy_s)

    async def sleep(self) -> None:
        """Frees the GPU: weights are dropped (level 2), the next `load_policy` brings new ones.
        Nothing to do on a CPU, where sleeping frees no memory."""
        self._usable.clear()
        self._received = None
        if self._on_gpu and self._llm is not None:
            await self._llm.sleep(level=2)
            self._asleep = {"weights", "kv_cache"}

    async def _load(self, policy: Policy, verify: bool) -> str | None:
        if self._received and self._received[0] == policy.version:
            digest = self._received[1]
        else:
            digest = await self._read(policy, verify)
        await self._wake("kv_cache")
        await self._llm.reset_prefix_cache()
        self._version = policy.version
        return digest

    async def _read(self, policy: Policy, verify: bool) -> str | None:
        # If other engines got the weights from memory, their file may come yet.
        deadline = time.monotonic() + self._config.run.wait_timeout_s
        while not Path(policy.path).exists() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        await self._wake("weights")
        return _one(await self._llm.collective_rpc("load_policy", args=(policy.path, verify)))

    async def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            await self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    def _check_drained(self) -> None:
        if self._running:
            raise RuntimeError(
                f"{len(self._running)} generations are running; drain them before a weight sync"
            )

    def _start(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from lightning_ray.engine.meter import Meter

        try:
            llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**self._arguments()), stat_loggers=[lambda *_: Meter(self._door)]
            )
            # The others are vLLM's own for Prometheus: they count every token, and nobody asks.
            del llm.logger_manager.stat_loggers[1:]
            return llm
        except Exception as error:
            raise EngineStartError(_advice(error, self._config)) from error

    def _arguments(self) -> dict[str, Any]:
        """vLLM's engine arguments."""
        config = self._config
        eager = config.engine.enforce_eager
        arguments: dict[str, Any] = {
            "model": self._model_dir,
            "dtype": config.model.dtype,
            "max_model_len": config.model.max_model_len,
            "max_num_seqs": config.engine.max_num_seqs,
            "tensor_parallel_size": config.engine.tensor_parallel,
            "enforce_eager": (not self._on_gpu) if eager is None else eager,
            "trust_remote_code": config.model.trust_remote_code,
            "seed": config.run.seed,
            "enable_prefix_caching": True,
            # The behaviour policy: after temperature, not the raw distribution.
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "lightning_ray.engine.worker_extension.WeightLoader",
            "disable_log_stats": True,
        }
        if self._on_gpu:
            arguments["gpu_memory_utilization"] = config.engine.gpu_memory_utilization
            arguments["enable_sleep_mode"] = True
        else:
            # The smallest that vLLM's CPU attention likes. Its default, 128, is longer than the
            # prompts of small models, of which the prefix cache would then hold nothing.
            arguments["block_size"] = 32
        if config.engine.tensor_parallel == 1:
            arguments["distributed_executor_backend"] = "uni"
        return arguments


def _end_soon() -> None:
    """Ends this process, when the error that is on its way has left; Ray starts it again."""
    asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGKILL)


def _one(digests: list[str | None]) -> str | None:
    """The checksum that the workers of an engine agree on; all of them, if they do not."""
    return " and ".join(sorted({digest for digest in digests if digest})) or None


def _advice(error: Exception, config: RunConfig) -> str:
    """vLLM's reason for not starting, and the setting that most likely helps."""
    reason = str(error)
    if "memory" in reason.lower() or "kv cache" in reason.lower():
        setting = (
            f"lower model.max_model_len (now {config.model.max_model_len}), "
            "or give the engine more memory: "
            f"engine.cpu_kv_cache_gib (now {config.engine.cpu_kv_cache_gib}) on a CPU, "
            f"engine.gpu_memory_utilization (now {config.engine.gpu_memory_utilization}) on a GPU"
        )
    elif "max_model_len" in reason or "max_position_embeddings" in reason:
        setting = f"lower model.max_model_len (now {config.model.max_model_len})"
    else:
        setting = "check model.path, model.dtype and the engine section of the configuration"
    return f"vLLM did not start: {reason.strip()}\nWhat to do: {setting}."
