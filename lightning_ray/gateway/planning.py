"""What one request will sample: its prompt, how it follows from earlier calls, its settings.

A `Memory` is what a replica knows of an attempt; `Planner.plan` finds the sampled turns in the
history that the harness sent, keeps their tokens, and classifies the call. Invariant: the same
request and the same earlier calls give the same plan in every replica; the run's sampling settings
win over the harness's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_ray.config import RunConfig
from lightning_ray.gateway import continuity, sidecalls
from lightning_ray.gateway.dialects import ChatRequest
from lightning_ray.gateway.errors import context_overflow
from lightning_ray.gateway.render import Renderer
from lightning_ray.records import Branch, Call, SideCall, Split
from lightning_ray.store.attempts import AttemptInfo


@dataclass
class Memory:
    """An attempt and its calls so far, in the order of recording."""

    attempt: AttemptInfo
    calls: list[Call] = field(default_factory=list)
    has_tools: bool = False

    def learn(self, calls: list[Call]) -> None:
        """Adds those calls that follow the known ones; the others are known, or will be told again
        after those before them."""
        for call in calls:
            if call.seq == len(self.calls):
                self.calls.append(call)


@dataclass(frozen=True)
class Plan:
    """See the module. `constraint` is vLLM's StructuredOutputsParams or None."""

    prompt: np.ndarray  # int32
    history: bytes
    branch: Branch
    side: SideCall | None
    constraint: Any
    temperature: float
    max_tokens: int
    stop: tuple[str, ...]


class Planner:
    """Plans the calls of a run."""

    def __init__(self, config: RunConfig, renderer: Renderer) -> None:
        self._config, self._renderer = config, renderer

    def plan(self, request: ChatRequest, memory: Memory, headers: Mapping[str, str]) -> Plan:
        """The plan of a request.

        Raises:
            ApiError: 400, the template refuses the messages or the prompt is too long.
        """
        sampling, limit = self._config.sampling, self._config.model.max_model_len
        constraint = self._renderer.constraint(request)
        request = _with_reasoning(request, memory.calls)
        history = continuity.digests(request.messages, request.tools)
        prompt, branch = self._prompt(request, history, memory)
        side = sidecalls.classify(headers, request, memory.has_tools)
        memory.has_tools = memory.has_tools or bool(request.tools)
        most = sampling.max_tokens
        if request.max_tokens and sampling.honour_max_tokens:
            most = min(request.max_tokens, most)
        longest = self._config.model.max_prompt_tokens
        if len(prompt) >= limit or len(prompt) > (longest or limit):
            raise context_overflow(longest or limit, len(prompt), most)
        temperature = sampling.temperature
        if memory.attempt.split is Split.VALIDATION:
            temperature = sampling.validation_temperature or temperature
        return Plan(
            prompt,
            history,
            branch,
            side,
            constraint,
            temperature,
            min(most, limit - len(prompt)),
            request.stop if sampling.honour_stop else (),
        )

    def _prompt(
        self, request: ChatRequest, history: bytes, memory: Memory
    ) -> tuple[np.ndarray, Branch]:
        match = continuity.find(request.messages, history, request.turn_ids, memory.calls)
        branch = continuity.branch_of(request.messages, history, match, memory.calls)
        if match and match.lost_reasoning and not self._config.model.keep_reasoning:
            return self._renderer.render(request), Branch.REASONING_DROPPED
        if match:
            prompt = self._renderer.extend(request, match.index, match.call)
            if prompt is not None:
                return prompt, branch
            branch = Branch.TEMPLATE
        return self._renderer.render(request), branch


def _with_reasoning(request: ChatRequest, calls: Sequence[Call]) -> ChatRequest:
    """The request with the reasoning of turns that the harness named by their id alone (an opaque
    string that it sends back, as the protocol asks)."""
    said = {call.call_id: call.turn.reasoning for call in calls if call.turn.reasoning}
    if not said or not request.turn_ids:
        return request
    ids = (*request.turn_ids, *[""] * len(request.messages))
    messages = [
        message | {"reasoning_content": said[turn_id]}
        if turn_id in said and not message.get("reasoning_content")
        else message
        for message, turn_id in zip(request.messages, ids, strict=False)
    ]
    return replace(request, messages=messages)
